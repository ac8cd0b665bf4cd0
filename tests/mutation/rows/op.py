# SPDX-License-Identifier: MIT
[
    ("cumsum: exclusive and inclusive swapped in the backward", "check cumsum",
     [("src/op/cumsum.c", ".exclusive = a->exclusive,",
       ".exclusive = (work->pass == VJP_BACKWARD) != (a->exclusive != 0),")]),
    ("cross_entropy: smoothing leaves the target's own share out", "check cross_entropy",
     [("src/op/cross_entropy.c", ".at_target = 1 - a->label_smoothing * ((double)(classes - 1) / (double)classes),",
       ".at_target = 1 - a->label_smoothing,")]),
    ("dropout: the backward's mask is another stream's", "check dropout",
     [("src/op/dropout.c", "counter[1], a->stream);", "counter[1], a->stream + work->pass);")]),
    ("ref cross_entropy: smoothing over the other classes alone", "test test_golden",
     [("src/op/cross_entropy.c", ".elsewhere = a->label_smoothing / (double)classes,",
       ".elsewhere = a->label_smoothing / (double)(classes > 1 ? classes - 1 : 1),")]),
    ("rope: times past the table are let through", "test test_refusals",
     [("src/op/rope.c", "if (!work->tensor[ROPE_POSITIONS] && cosine->shape[0] < time)",
       "if (!work->tensor[ROPE_POSITIONS] && cosine->shape[0] < 0)")]),
    ("group_norm: channels that the groups do not divide", "test test_refusals",
     [("src/op/group_norm.c", "if (a->groups < 1 || channels % a->groups)", "if (a->groups < 1)")]),
]

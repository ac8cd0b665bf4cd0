# SPDX-License-Identifier: MIT
[
    ("adamw: m is not corrected for its start at 0", "check adamw",
     [("src/cpu/optimizer/adamw.c", ".correct_m = (float)(1 / correction(a->beta1, (double)count)),", ".correct_m = 1,")]),
    ("adamw: eps under the root", "check adamw",
     [("src/cpu/optimizer/adamw.c", "vf size = vf_fma(vf_sqrt(v), vf_set(p->correct_root), vf_set(p->eps));",
       "vf size = vf_mul(vf_sqrt(vf_add(v, vf_set(p->eps))), vf_set(p->correct_root));")]),
    ("adamw: 0 / 0 where nothing was averaged", "check adamw",
     [("src/cpu/optimizer/adamw.c", "vf_select(vf_equal(size, vf_zero()), vf_zero(),", "vf_select(vf_less(size, vf_zero()), vf_zero(),")]),
    ("adamw: the decay is not multiplied by lr", "check adamw",
     [("src/cpu/optimizer/adamw.c", ".decay = (float)a->weight_decay,", ".decay = (float)(a->weight_decay / (double)*(const float *)vjp_data(work, ADAMW_LR)),")]),
    ("sgd: nesterov looks ahead from the old momentum", "check sgd",
     [("src/cpu/optimizer/sgd.c", "p->nesterov ? vf_fma(momentum, beta, g) : momentum;",
       "p->nesterov ? vf_fma(vf_sub(momentum, g), beta, g) : momentum;")]),
    ("clip: a NaN norm passes as a short one", "check clip",
     [("src/cpu/optimizer/clip.c", "norm <= a->max_norm ? 1", "!(norm > a->max_norm) ? 1")]),
    ("sgd, adamw: no decay of an infinite weight is 0 * Inf", "test test_range",
     [("src/cpu/optimizer/decay.h", "return decay != 0 ?", "return decay >= 0 ?")]),
]

# SPDX-License-Identifier: MIT
[
    ("linear: every batch's db goes to the first", "check linear",
     [("src/cpu/linear/linear.c", "q->db_product.c = result_in(&q->db, b_rows);", "q->db_product.c = result_in(&q->db, 0);")]),
    ("linear: the last chunk of dbias is lost", "full linear",
     [("src/cpu/linear/linear.c", "for (int64_t c = 0; c < chunks; c++)", "for (int64_t c = 0; c < (chunks > 1 ? chunks - 1 : 1); c++)")]),
    ("linear: dgate of a pre that was not saved is that of an older one", "check linear",
     [("src/op/linear.c", ": work->tensor[LINEAR_B_DGATE] && !pre;", ": false;")]),
    ("linear: with a gate the gradients are made from dy", "check linear",
     [("src/op/linear.c", "w.tensor[LINEAR_B_DY] = &g->dpre;", "w.tensor[LINEAR_B_DY] = work->tensor[LINEAR_B_DY];")]),
    ("linear: a gate's product and its pre share the workspace", "check linear",
     [("src/op/linear.c", "if (w.workspace) w.workspace = (char *)w.workspace + g->bytes;", "")]),
    ("linear: the residual of each row is the first row's", "check linear",
     [("src/cpu/linear/linear.c", "load_row(o->residual.dtype, o->residual.data, at, n, addend);", "load_row(o->residual.dtype, o->residual.data, column + done, n, addend);")]),
    ("linear: an activation of f32 writes y without its residual", "check linear",
     [("src/cpu/linear/linear.c", " && !o->y.accumulate && !o->residual.data;", " && !o->y.accumulate;")]),
]

/* SPDX-License-Identifier: MIT */
/* square: y = x^2. Maths: docs/ops/square.md. */
#include "op/op.h"

static vjp_status infer(vjp_work *work) {
    int x = work->pass == VJP_FORWARD ? SQUARE_X : SQUARE_B_X;
    vjp_shape_own(work, x);
    const vjp_shape shape = work->shape[x];
    vjp_shape_set(work, "[...]", shape.ndim, shape.size);
    return VJP_OK;
}

const vjp_op_rules vjp_square_rules = {.infer = infer};

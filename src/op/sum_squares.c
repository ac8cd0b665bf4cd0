/* SPDX-License-Identifier: MIT */
/* sum_squares: the sum of x^2 over all of x. Maths: docs/ops/sum_squares.md. */
#include "op/op.h"

static vjp_status infer(vjp_work *work) {
    vjp_shape_own(work, SUM_SQUARES_X);
    vjp_shape_set(work, "[]", 0, NULL);
    return VJP_OK;
}

const vjp_op_rules vjp_sum_squares_rules = {.infer = infer};

/* SPDX-License-Identifier: MIT */
/* cast: the same numbers in another storage type. T is the input's type; the output has its own. Maths:
 * docs/ops/cast.md. */
#include "op/op.h"

static vjp_status infer(vjp_work *work) {
    vjp_shape_own(work, CAST_X);
    const vjp_shape shape = work->shape[CAST_X];
    vjp_shape_set(work, "[...]", shape.ndim, shape.size);
    return VJP_OK;
}

const vjp_op_rules vjp_cast_rules = {.infer = infer, .passes_gradient = 1u << CAST_B_DX};

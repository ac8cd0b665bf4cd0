/* SPDX-License-Identifier: MIT */
/* swiglu: y = silu(gate) * up, element by element. Maths: docs/ops/swiglu.md. */
#include "op/op.h"

static vjp_status infer(vjp_work *work) {
    int gate = work->pass == VJP_FORWARD ? SWIGLU_GATE : SWIGLU_B_GATE;
    vjp_shape_own(work, gate);
    const vjp_shape shape = work->shape[gate];
    vjp_shape_set(work, "[...]", shape.ndim, shape.size);
    return VJP_OK;
}

const vjp_op_rules vjp_swiglu_rules = {.infer = infer};

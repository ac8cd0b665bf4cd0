/* SPDX-License-Identifier: MIT */
/* scale: y = factor * x. Maths: docs/ops/scale.md. */
#include <float.h>
#include <math.h>

#include "op/op.h"

static vjp_status infer(vjp_work *work) {
    const vjp_scale_attributes *a = work->attributes;
    if (!(fabs(a->factor) <= (double)FLT_MAX))
        return vjp_refuse(work, VJP_INVALID, "factor is %g; it must be a number that f32 holds", a->factor);
    vjp_shape_own(work, SCALE_X);
    const vjp_shape shape = work->shape[SCALE_X];
    vjp_shape_set(work, "[...]", shape.ndim, shape.size);
    return VJP_OK;
}

const vjp_op_rules vjp_scale_rules = {.infer = infer};

/* SPDX-License-Identifier: MIT */
/* clip: from the sum of squares of all gradients, their norm and the factor to scale them by. Maths: docs/ops/clip.md.
 */
#include <math.h>

#include "op/op.h"

static vjp_status infer(vjp_work *work) {
    const vjp_clip_attributes *a = work->attributes;
    if (!(a->max_norm >= 0) || isinf(a->max_norm))
        return vjp_refuse(work, VJP_INVALID, "max_norm is %g; it must be 0 or a positive number", a->max_norm);
    vjp_shape_set(work, "[]", 0, NULL);
    return VJP_OK;
}

const vjp_op_rules vjp_clip_rules = {.infer = infer};

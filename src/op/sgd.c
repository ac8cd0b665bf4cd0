/* SPDX-License-Identifier: MIT */
/* sgd: one step of gradient descent with momentum. Maths: docs/ops/sgd.md. */
#include <math.h>

#include "op/op.h"

static vjp_status infer(vjp_work *work) {
    const vjp_sgd_attributes *a = work->attributes;
    if (!(a->beta >= 0 && a->beta < 1))
        return vjp_refuse(work, VJP_INVALID, "beta is %g; it must be at least 0 and less than 1", a->beta);
    if (!(a->weight_decay >= 0) || isinf(a->weight_decay))
        return vjp_refuse(work, VJP_INVALID, "weight_decay is %g; it must be 0 or a positive number", a->weight_decay);
    vjp_shape_own(work, SGD_W);
    const vjp_shape shape = work->shape[SGD_W];
    vjp_shape_set(work, "[...]", shape.ndim, shape.size);
    vjp_shape_set(work, "[]", 0, NULL);
    return VJP_OK;
}

const vjp_op_rules vjp_sgd_rules = {.infer = infer};

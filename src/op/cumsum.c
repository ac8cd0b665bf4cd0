/* SPDX-License-Identifier: MIT */
/* cumsum: running sums along an axis; the backward runs from the other end. Maths: docs/ops/cumsum.md. */
#include "op/op.h"

static vjp_status infer(vjp_work *work) {
    const vjp_cumsum_attributes *a = work->attributes;
    vjp_shape_own(work, CUMSUM_X);
    const vjp_shape shape = work->shape[CUMSUM_X];
    if (a->axis < -shape.ndim || a->axis >= shape.ndim)
        return vjp_refuse(work, VJP_INVALID, "axis is %lld; %s has rank %d", (long long)a->axis,
                          vjp_slot_at(work, CUMSUM_X)->name, shape.ndim);
    vjp_shape_set(work, "[...]", shape.ndim, shape.size);
    return VJP_OK;
}

vjp_cumsum_sizes vjp_cumsum_sizes_of(const vjp_work *work) {
    const vjp_cumsum_attributes *a = work->attributes;
    const vjp_shape *shape = &work->shape[CUMSUM_X];
    int axis = (int)(a->axis < 0 ? a->axis + shape->ndim : a->axis);
    return (vjp_cumsum_sizes){
        .outer = vjp_shape_product(shape, 0, axis),
        .length = shape->size[axis],
        .inner = vjp_shape_product(shape, axis + 1, shape->ndim),
        .exclusive = a->exclusive,
        .reverse = (work->pass == VJP_BACKWARD) != (a->reverse != 0),
    };
}

const vjp_op_rules vjp_cumsum_rules = {.infer = infer};

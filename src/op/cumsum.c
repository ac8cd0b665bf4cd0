/* cumsum: running sums along an axis; the backward runs from the other end. Maths: docs/ops/cumsum.md. */
#include "op/op.h"

static const vjp_slot forward[] = {
    {"y", "[...]", "the running sums", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 1u << CUMSUM_X},
    {"x", "[...]", "what is summed", VJP_KIND_STORAGE, 0, 0},
};

static const vjp_slot backward[] = {
    {"dx", "[...]", "gradient of x", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 1u << CUMSUM_X},
    {"dy", "[...]", "gradient of y", VJP_KIND_STORAGE, 0, 0},
};

static const vjp_attribute attribute_rows[] = {
    {"axis", "the axis summed along; negative: from the end", VJP_INTEGER, offsetof(vjp_cumsum_attributes, axis), -1, 0,
     NULL},
    {"exclusive", "leave an element's own value out", VJP_BOOLEAN, offsetof(vjp_cumsum_attributes, exclusive), 0, 0,
     NULL},
    {"reverse", "from the last element to the first", VJP_BOOLEAN, offsetof(vjp_cumsum_attributes, reverse), 0, 0,
     NULL},
};

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

const vjp_op vjp_op_cumsum = {
    .info = {.name = "cumsum",
             .about = "running sums along an axis",
             .pass = {{forward, 2, 1}, {backward, 2, 1}},
             .attributes = attribute_rows,
             .attribute_count = 3,
             .attribute_bytes = sizeof(vjp_cumsum_attributes)},
    .id = OP_ID(cumsum),
    .infer = infer,
};

vjp_status vjp_cumsum_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *x, int64_t axis, int exclusive,
                              int reverse) {
    vjp_cumsum_attributes values = {.axis = axis, .exclusive = exclusive != 0, .reverse = reverse != 0};
    const vjp_tensor *tensors[] = {y, x};
    return vjp_call(device, &vjp_op_cumsum, VJP_FORWARD, tensors, 2, &values);
}

vjp_status vjp_cumsum_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dy, int64_t axis,
                               int exclusive, int reverse) {
    vjp_cumsum_attributes values = {.axis = axis, .exclusive = exclusive != 0, .reverse = reverse != 0};
    const vjp_tensor *tensors[] = {dx, dy};
    return vjp_call(device, &vjp_op_cumsum, VJP_BACKWARD, tensors, 2, &values);
}

/* scale: y = factor * x. Maths: docs/ops/scale.md. */
#include <float.h>
#include <math.h>

#include "op/op.h"

static const vjp_slot forward[] = {
    {"y", "[...]", "factor * x", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 1u << SCALE_X},
    {"x", "[...]", "what is scaled", VJP_KIND_STORAGE, 0, 0},
};

static const vjp_slot backward[] = {
    {"dx", "[...]", "gradient of x", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 1u << SCALE_X},
    {"dy", "[...]", "gradient of y", VJP_KIND_STORAGE, 0, 0},
};

static const vjp_attribute attribute_rows[] = {
    {"factor", "what x is multiplied by", VJP_REAL, offsetof(vjp_scale_attributes, factor), 0, 1, NULL},
};

static vjp_status infer(vjp_work *work) {
    const vjp_scale_attributes *a = work->attributes;
    if (!(fabs(a->factor) <= (double)FLT_MAX))
        return vjp_refuse(work, VJP_INVALID, "factor is %g; it must be a number that f32 holds", a->factor);
    vjp_shape_own(work, SCALE_X);
    const vjp_shape shape = work->shape[SCALE_X];
    vjp_shape_set(work, "[...]", shape.ndim, shape.size);
    return VJP_OK;
}

const vjp_op vjp_op_scale = {
    .info = {.name = "scale",
             .about = "multiplies by a number",
             .pass = {{forward, 2, 1}, {backward, 2, 1}},
             .attributes = attribute_rows,
             .attribute_count = 1,
             .attribute_bytes = sizeof(vjp_scale_attributes)},
    .id = OP_ID(scale),
    .infer = infer,
};

vjp_status vjp_scale_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *x, double factor) {
    vjp_scale_attributes values = {.factor = factor};
    const vjp_tensor *tensors[] = {y, x};
    return vjp_call(device, &vjp_op_scale, VJP_FORWARD, tensors, 2, &values);
}

vjp_status vjp_scale_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dy, double factor) {
    vjp_scale_attributes values = {.factor = factor};
    const vjp_tensor *tensors[] = {dx, dy};
    return vjp_call(device, &vjp_op_scale, VJP_BACKWARD, tensors, 2, &values);
}

/* cast: the same numbers in another storage type. T is the input's type, the output's is its own: docs/ops/cast.md. */
#include "op/op.h"

static const vjp_slot forward[] = {
    {"y", "[...]", "x, rounded to nearest even", VJP_KIND_FLOAT, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 0},
    {"x", "[...]", "what is converted", VJP_KIND_STORAGE, 0, 0},
};

static const vjp_slot backward[] = {
    {"dx", "[...]", "gradient of x: dy, rounded to nearest even", VJP_KIND_FLOAT,
     VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 0},
    {"dy", "[...]", "gradient of y", VJP_KIND_STORAGE, 0, 0},
};

static vjp_status infer(vjp_work *work) {
    vjp_shape_own(work, CAST_X);
    const vjp_shape shape = work->shape[CAST_X];
    vjp_shape_set(work, "[...]", shape.ndim, shape.size);
    return VJP_OK;
}

const vjp_op vjp_op_cast = {
    .info = {.name = "cast",
             .about = "the same numbers in another storage type",
             .pass = {{forward, 2, 1}, {backward, 2, 1}}},
    .id = OP_ID(cast),
    .infer = infer,
    .passes_gradient = true,
};

vjp_status vjp_cast_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *x) {
    const vjp_tensor *tensors[] = {y, x};
    return vjp_call(device, &vjp_op_cast, VJP_FORWARD, tensors, 2, NULL);
}

vjp_status vjp_cast_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dy) {
    const vjp_tensor *tensors[] = {dx, dy};
    return vjp_call(device, &vjp_op_cast, VJP_BACKWARD, tensors, 2, NULL);
}

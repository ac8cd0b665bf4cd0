/* sgd: one step of gradient descent with momentum. Maths: docs/ops/sgd.md. */
#include <math.h>

#include "op/op.h"

static const vjp_slot forward[] = {
    {"w_out", "[...]", "the weights after the step", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT, 1u << SGD_W},
    {"momentum_out", "[...]", "the momentum after the step", VJP_KIND_STATISTIC, VJP_SLOT_OUTPUT, 1u << SGD_MOMENTUM},
    {"w", "[...]", "the weights", VJP_KIND_STORAGE, 0, 0},
    {"momentum", "[...]", "the momentum; absent: 0, as before the first step", VJP_KIND_STATISTIC, VJP_SLOT_OPTIONAL,
     0},
    {"g", "[...]", "the gradient of w", VJP_KIND_PARAMETER, 0, 0},
    {"lr", "[]", "the learning rate", VJP_KIND_STATISTIC, 0, 0},
    {"scale", "[]", "multiplies g, as clip gives it; absent: 1", VJP_KIND_STATISTIC, VJP_SLOT_OPTIONAL, 0},
};

static const vjp_attribute attribute_rows[] = {
    {"beta", "how much of the momentum stays", VJP_REAL, offsetof(vjp_sgd_attributes, beta), 0, 0.9, NULL},
    {"weight_decay", "the share of w that is added to g", VJP_REAL, offsetof(vjp_sgd_attributes, weight_decay), 0, 0,
     NULL},
    {"nesterov", "move by what the next momentum would be", VJP_BOOLEAN, offsetof(vjp_sgd_attributes, nesterov), 0, 0,
     NULL},
};

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

const vjp_op vjp_op_sgd = {
    .info = {.name = "sgd",
             .about = "a step of gradient descent with momentum",
             .pass = {{forward, 7, 2}},
             .attributes = attribute_rows,
             .attribute_count = 3,
             .attribute_bytes = sizeof(vjp_sgd_attributes)},
    .id = OP_ID(sgd),
    .infer = infer,
};

vjp_status vjp_sgd_forward(vjp_device *device, const vjp_tensor *w_out, const vjp_tensor *momentum_out,
                           const vjp_tensor *w, const vjp_tensor *momentum, const vjp_tensor *g, const vjp_tensor *lr,
                           const vjp_tensor *scale, double beta, double weight_decay, int nesterov) {
    vjp_sgd_attributes values = {.beta = beta, .weight_decay = weight_decay, .nesterov = nesterov != 0};
    const vjp_tensor *tensors[] = {w_out, momentum_out, w, momentum, g, lr, scale};
    return vjp_call(device, &vjp_op_sgd, VJP_FORWARD, tensors, 7, &values);
}

/* rms_norm: y = x * rstd * gamma + beta over the last axes. Maths: docs/ops/rms_norm.md. */
#include "op/norm.h"

static const vjp_slot forward[] = {
    {"y", "[..., dim]", "the normalised x, scaled and shifted", VJP_KIND_STORAGE,
     VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 1u << RMS_NORM_X},
    {"rstd", "[...]", "each row's 1/sqrt(mean(x^2) + eps), to save for the backward", VJP_KIND_STATISTIC,
     VJP_SLOT_OUTPUT, 0},
    {"x", "[..., dim]", "rows to normalise", VJP_KIND_STORAGE, 0, 0},
    {"gamma", "[dim]", "scale; absent: 1", VJP_KIND_PARAMETER, VJP_SLOT_OPTIONAL, 0},
    {"beta", "[dim]", "shift; absent: 0", VJP_KIND_PARAMETER, VJP_SLOT_OPTIONAL, 0},
};

static const vjp_slot backward[] = {
    {"dx", "[..., dim]", "gradient of x", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES,
     1u << RMS_NORM_B_DY | 1u << RMS_NORM_B_X},
    {"dgamma", "[dim]", "gradient of gamma", VJP_KIND_PARAMETER, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 0},
    {"dbeta", "[dim]", "gradient of beta", VJP_KIND_PARAMETER, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 0},
    {"dy", "[..., dim]", "gradient of y", VJP_KIND_STORAGE, 0, 0},
    {"x", "[..., dim]", "the forward's x", VJP_KIND_STORAGE, 0, 0},
    {"gamma", "[dim]", "the forward's gamma", VJP_KIND_PARAMETER, VJP_SLOT_OPTIONAL, 0},
    {"rstd", "[...]", "as saved; absent: computed again", VJP_KIND_STATISTIC, VJP_SLOT_OPTIONAL, 0},
};

static const vjp_attribute attribute_rows[] = {
    {"axes", "how many of the last axes are normalised together", VJP_INTEGER, offsetof(vjp_rms_norm_attributes, axes),
     1, 0, NULL},
    {"eps", "added to the mean square", VJP_REAL, offsetof(vjp_rms_norm_attributes, eps), 0, 1e-6, NULL},
};

static int slot_x(const vjp_work *work) {
    return work->pass == VJP_FORWARD ? RMS_NORM_X : RMS_NORM_B_X;
}

static vjp_status infer(vjp_work *work) {
    const vjp_rms_norm_attributes *a = work->attributes;
    return vjp_norm_infer(work, slot_x(work), a->axes, a->eps);
}

vjp_norm_sizes vjp_rms_norm_sizes(const vjp_work *work) {
    const vjp_rms_norm_attributes *a = work->attributes;
    return vjp_norm_sizes_of(work, slot_x(work), a->axes);
}

const vjp_op vjp_op_rms_norm = {
    .info = {.name = "rms_norm",
             .about = "scales rows to a mean square of 1",
             .pass = {{forward, 5, 2}, {backward, 7, 3}},
             .attributes = attribute_rows,
             .attribute_count = 2,
             .attribute_bytes = sizeof(vjp_rms_norm_attributes)},
    .id = OP_ID(rms_norm),
    .infer = infer,
};

vjp_status vjp_rms_norm_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *rstd, const vjp_tensor *x,
                                const vjp_tensor *gamma, const vjp_tensor *beta, int64_t axes, double eps) {
    vjp_rms_norm_attributes values = {.axes = axes, .eps = eps};
    const vjp_tensor *tensors[] = {y, rstd, x, gamma, beta};
    return vjp_call(device, &vjp_op_rms_norm, VJP_FORWARD, tensors, 5, &values);
}

vjp_status vjp_rms_norm_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dgamma,
                                 const vjp_tensor *dbeta, const vjp_tensor *dy, const vjp_tensor *x,
                                 const vjp_tensor *gamma, const vjp_tensor *rstd, int64_t axes, double eps) {
    vjp_rms_norm_attributes values = {.axes = axes, .eps = eps};
    const vjp_tensor *tensors[] = {dx, dgamma, dbeta, dy, x, gamma, rstd};
    return vjp_call(device, &vjp_op_rms_norm, VJP_BACKWARD, tensors, 7, &values);
}

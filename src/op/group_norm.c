/* group_norm: layer_norm's formula over groups of channels and the whole plane. Maths: docs/ops/group_norm.md. */
#include "op/norm.h"

static const vjp_slot forward[] = {
    {"y", "[N, channels, spatial]", "the normalised x, scaled and shifted", VJP_KIND_STORAGE,
     VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 1u << GROUP_NORM_X},
    {"mean", "[N, groups]", "each group's mean, to save for the backward", VJP_KIND_STATISTIC, VJP_SLOT_OUTPUT, 0},
    {"rstd", "[N, groups]", "each group's 1/sqrt(var + eps), to save for the backward", VJP_KIND_STATISTIC,
     VJP_SLOT_OUTPUT, 0},
    {"x", "[N, channels, spatial]", "channels second, or last with layout=channels_last", VJP_KIND_STORAGE, 0, 0},
    {"gamma", "[channels]", "scale; absent: 1", VJP_KIND_PARAMETER, VJP_SLOT_OPTIONAL, 0},
    {"beta", "[channels]", "shift; absent: 0", VJP_KIND_PARAMETER, VJP_SLOT_OPTIONAL, 0},
};

static const vjp_slot backward[] = {
    {"dx", "[N, channels, spatial]", "gradient of x", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES,
     1u << GROUP_NORM_B_DY | 1u << GROUP_NORM_B_X},
    {"dgamma", "[channels]", "gradient of gamma", VJP_KIND_PARAMETER, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 0},
    {"dbeta", "[channels]", "gradient of beta", VJP_KIND_PARAMETER, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 0},
    {"dy", "[N, channels, spatial]", "gradient of y", VJP_KIND_STORAGE, 0, 0},
    {"x", "[N, channels, spatial]", "the forward's x", VJP_KIND_STORAGE, 0, 0},
    {"gamma", "[channels]", "the forward's gamma", VJP_KIND_PARAMETER, VJP_SLOT_OPTIONAL, 0},
    {"mean", "[N, groups]", "as saved; absent: computed again", VJP_KIND_STATISTIC, VJP_SLOT_OPTIONAL, 0},
    {"rstd", "[N, groups]", "as saved; absent: computed again", VJP_KIND_STATISTIC, VJP_SLOT_OPTIONAL, 0},
};

static const char *const layout_names[] = {"channels_first", "channels_last", NULL};

static const vjp_attribute attribute_rows[] = {
    {"groups", "how many groups the channels form", VJP_INTEGER, offsetof(vjp_group_norm_attributes, groups), 1, 0,
     NULL},
    {"layout", "where the channel axis is", VJP_CHOICE, offsetof(vjp_group_norm_attributes, layout), 0, 0,
     layout_names},
    {"eps", "added to the variance", VJP_REAL, offsetof(vjp_group_norm_attributes, eps), 0, 1e-5, NULL},
};

static int slot_x(const vjp_work *work) {
    return work->pass == VJP_FORWARD ? GROUP_NORM_X : GROUP_NORM_B_X;
}

static vjp_status infer(vjp_work *work) {
    const vjp_group_norm_attributes *a = work->attributes;
    int x = slot_x(work);
    vjp_shape_own(work, x);
    const vjp_shape shape = work->shape[x];
    char text[VJP_SHAPE_TEXT];
    if (shape.ndim < 2)
        return vjp_refuse(work, VJP_INVALID, "x has rank %d; it must be 2 or more: [N, channels, spatial...]",
                          shape.ndim);
    vjp_status status = vjp_norm_check_eps(work, a->eps);
    if (status != VJP_OK) return status;
    int64_t channels = shape.size[a->layout == VJP_CHANNELS_LAST ? shape.ndim - 1 : 1];
    if (a->groups < 1 || channels % a->groups)
        return vjp_refuse(work, VJP_INVALID, "x has %lld channels, which %lld groups do not divide",
                          (long long)channels, (long long)a->groups);
    if (vjp_shape_product(&shape, 1, shape.ndim) == 0)
        return vjp_refuse(work, VJP_INVALID, "x has shape %s: a group to normalise holds no element",
                          vjp_shape_text(&shape, text));
    vjp_shape_set(work, "[N, channels, spatial]", shape.ndim, shape.size);
    vjp_shape_set(work, "[N, groups]", 2, (int64_t[]){shape.size[0], a->groups});
    vjp_shape_set(work, "[channels]", 1, &channels);
    return VJP_OK;
}

vjp_group_norm_sizes vjp_group_norm_sizes_of(const vjp_work *work) {
    const vjp_group_norm_attributes *a = work->attributes;
    const vjp_shape *shape = &work->shape[slot_x(work)];
    bool last = a->layout == VJP_CHANNELS_LAST;
    vjp_group_norm_sizes s = {.batch = shape->size[0], .groups = a->groups};
    s.channels = shape->size[last ? shape->ndim - 1 : 1];
    s.plane = last ? vjp_shape_product(shape, 1, shape->ndim - 1) : vjp_shape_product(shape, 2, shape->ndim);
    s.group_channels = s.channels / s.groups;
    s.channel_stride = last ? 1 : s.plane;
    s.plane_stride = last ? s.channels : 1;
    return s;
}

const vjp_op vjp_op_group_norm = {
    .info = {.name = "group_norm",
             .about = "normalises groups of channels over the whole plane",
             .pass = {{forward, 6, 3}, {backward, 8, 3}},
             .attributes = attribute_rows,
             .attribute_count = 3,
             .attribute_bytes = sizeof(vjp_group_norm_attributes)},
    .id = OP_ID(group_norm),
    .infer = infer,
};

vjp_status vjp_group_norm_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *mean,
                                  const vjp_tensor *rstd, const vjp_tensor *x, const vjp_tensor *gamma,
                                  const vjp_tensor *beta, int64_t groups, vjp_layout layout, double eps) {
    vjp_group_norm_attributes values = {.groups = groups, .layout = layout, .eps = eps};
    const vjp_tensor *tensors[] = {y, mean, rstd, x, gamma, beta};
    return vjp_call(device, &vjp_op_group_norm, VJP_FORWARD, tensors, 6, &values);
}

vjp_status vjp_group_norm_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dgamma,
                                   const vjp_tensor *dbeta, const vjp_tensor *dy, const vjp_tensor *x,
                                   const vjp_tensor *gamma, const vjp_tensor *mean, const vjp_tensor *rstd,
                                   int64_t groups, vjp_layout layout, double eps) {
    vjp_group_norm_attributes values = {.groups = groups, .layout = layout, .eps = eps};
    const vjp_tensor *tensors[] = {dx, dgamma, dbeta, dy, x, gamma, mean, rstd};
    return vjp_call(device, &vjp_op_group_norm, VJP_BACKWARD, tensors, 8, &values);
}

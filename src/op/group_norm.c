/* SPDX-License-Identifier: MIT */
/* group_norm: layer_norm's formula over groups of channels and the whole plane. Maths: docs/ops/group_norm.md. */
#include "op/norm.h"

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
    int64_t channels = shape.size[a->layout == VJP_LAYOUT_CHANNELS_LAST ? shape.ndim - 1 : 1];
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
    bool last = a->layout == VJP_LAYOUT_CHANNELS_LAST;
    vjp_group_norm_sizes s = {.batch = shape->size[0], .groups = a->groups};
    s.channels = shape->size[last ? shape->ndim - 1 : 1];
    s.plane = last ? vjp_shape_product(shape, 1, shape->ndim - 1) : vjp_shape_product(shape, 2, shape->ndim);
    s.group_channels = s.channels / s.groups;
    s.channel_stride = last ? 1 : s.plane;
    s.plane_stride = last ? s.channels : 1;
    return s;
}

const vjp_op_rules vjp_group_norm_rules = {.infer = infer};

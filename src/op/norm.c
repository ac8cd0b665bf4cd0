/* SPDX-License-Identifier: MIT */
/* layer_norm and rms_norm: each row of the last axes is normalised separately. */
#include "op/norm.h"

#include <math.h>

vjp_status vjp_norm_check_eps(const vjp_work *work, double eps) {
    if (!isfinite(eps) || eps < 0) return vjp_refuse(work, VJP_INVALID, "eps is %g; it must be 0 or more", eps);
    return VJP_OK;
}

static vjp_status infer_rows(vjp_work *work, int x, int64_t axes, double eps) {
    vjp_shape_own(work, x);
    const vjp_shape shape = work->shape[x];
    if (axes < 1 || axes > shape.ndim)
        return vjp_refuse(work, VJP_INVALID, "axes is %lld; x has rank %d, so it must be 1 to %d", (long long)axes,
                          shape.ndim, shape.ndim);
    vjp_status status = vjp_norm_check_eps(work, eps);
    if (status != VJP_OK) return status;
    int leading = shape.ndim - (int)axes;
    char text[VJP_SHAPE_TEXT];
    if (vjp_shape_product(&shape, leading, shape.ndim) == 0)
        return vjp_refuse(work, VJP_INVALID, "x has shape %s: a row to normalise holds no element",
                          vjp_shape_text(&shape, text));
    vjp_shape_set(work, "[..., dim]", shape.ndim, shape.size);
    vjp_shape_set(work, "[dim]", (int)axes, shape.size + leading);
    vjp_shape_set(work, "[...]", leading, shape.size);
    return VJP_OK;
}

static vjp_norm_sizes sizes_of(const vjp_work *work, int x, int64_t axes) {
    const vjp_shape *shape = &work->shape[x];
    int leading = shape->ndim - (int)axes;
    return (vjp_norm_sizes){vjp_shape_product(shape, 0, leading), vjp_shape_product(shape, leading, shape->ndim)};
}

static int layer_norm_x(const vjp_work *work) {
    return work->pass == VJP_FORWARD ? LAYER_NORM_X : LAYER_NORM_B_X;
}

static vjp_status layer_norm_infer(vjp_work *work) {
    const vjp_layer_norm_attributes *a = work->attributes;
    return infer_rows(work, layer_norm_x(work), a->axes, a->eps);
}

vjp_norm_sizes vjp_layer_norm_sizes(const vjp_work *work) {
    const vjp_layer_norm_attributes *a = work->attributes;
    return sizes_of(work, layer_norm_x(work), a->axes);
}

const vjp_op_rules vjp_layer_norm_rules = {.infer = layer_norm_infer};

static int rms_norm_x(const vjp_work *work) {
    return work->pass == VJP_FORWARD ? RMS_NORM_X : RMS_NORM_B_X;
}

static vjp_status rms_norm_infer(vjp_work *work) {
    const vjp_rms_norm_attributes *a = work->attributes;
    return infer_rows(work, rms_norm_x(work), a->axes, a->eps);
}

vjp_norm_sizes vjp_rms_norm_sizes(const vjp_work *work) {
    const vjp_rms_norm_attributes *a = work->attributes;
    return sizes_of(work, rms_norm_x(work), a->axes);
}

const vjp_op_rules vjp_rms_norm_rules = {.infer = rms_norm_infer};

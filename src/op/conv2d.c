/* SPDX-License-Identifier: MIT */
/* conv2d: a weighted sum over each window of x's planes. Maths: docs/ops/conv2d.md. */
#include "op/op.h"

#define X_SHAPE      "[N, channels, height, width]"
#define Y_SHAPE      "[N, out_channels, out_height, out_width]"
#define WEIGHT_SHAPE "[out_channels, channels / groups, kernel_h, kernel_w]"

/* Where the axes are: of x and y, and of weight. */
typedef struct axes {
    int channels, height, weight_channels, weight_height;
} axes;

static axes axes_of(const vjp_work *work) {
    const vjp_conv2d_attributes *a = work->attributes;
    if (a->layout == VJP_LAYOUT_CHANNELS_LAST)
        return (axes){.channels = 3, .height = 1, .weight_channels = 3, .weight_height = 1};
    return (axes){.channels = 1, .height = 2, .weight_channels = 1, .weight_height = 2};
}

enum { SIZE_LIMIT = 1 << 30 }; /* keeps every sum below free of overflow */

/* How many windows fit along one direction, or a refusal. */
static vjp_status count_windows(const vjp_work *work, const char *name, int64_t size, int64_t kernel, int64_t stride,
                                int64_t padding, int64_t dilation, int64_t *count) {
    if (kernel < 1 || stride < 1 || dilation < 1 || padding < 0 || kernel > SIZE_LIMIT || stride > SIZE_LIMIT ||
        dilation > SIZE_LIMIT || padding > SIZE_LIMIT || size > SIZE_LIMIT)
        return vjp_refuse(work, VJP_INVALID,
                          "%s %lld, kernel %lld, stride %lld, padding %lld, dilation %lld: each must be positive "
                          "(padding 0 or more) and at most 2^30",
                          name, (long long)size, (long long)kernel, (long long)stride, (long long)padding,
                          (long long)dilation);
    int64_t extent = (kernel - 1) * dilation + 1, room = size + 2 * padding - extent;
    if (room < 0)
        return vjp_refuse(work, VJP_INVALID, "a window's extent of %lld exceeds x's %s of %lld with padding %lld",
                          (long long)extent, name, (long long)size, (long long)padding);
    *count = room / stride + 1;
    return VJP_OK;
}

/* The tensor that gives a shape: in the backward, the gradient where the tensor itself is absent. */
static const vjp_tensor *shape_source(const vjp_work *work, int forward_slot, int input, int gradient) {
    if (work->pass == VJP_FORWARD) return work->tensor[forward_slot];
    return work->tensor[input] ? work->tensor[input] : work->tensor[gradient];
}

static vjp_status check_needed(const vjp_work *work) {
    if (work->pass == VJP_FORWARD) return VJP_OK;
    if (work->tensor[CONV2D_B_DWEIGHT] && !work->tensor[CONV2D_B_X])
        return vjp_refuse(work, VJP_INVALID, "x is missing: dweight needs it");
    if (work->tensor[CONV2D_B_DX] && !work->tensor[CONV2D_B_WEIGHT])
        return vjp_refuse(work, VJP_INVALID, "weight is missing: dx needs it");
    if (!work->tensor[CONV2D_B_DWEIGHT] && !work->tensor[CONV2D_B_WEIGHT])
        return vjp_refuse(work, VJP_INVALID,
                          "weight and dweight are both missing: one of them must give the kernel's size");
    return VJP_OK;
}

/* The size of x's plane: from x or dx, or from the attributes. */
static vjp_status find_plane(const vjp_work *work, const vjp_tensor *x, int height_axis, int64_t plane[2]) {
    const vjp_conv2d_attributes *a = work->attributes;
    plane[0] = x ? x->shape[height_axis] : a->height;
    plane[1] = x ? x->shape[height_axis + 1] : a->width;
    if (!x && (plane[0] < 1 || plane[1] < 1))
        return vjp_refuse(work, VJP_INVALID,
                          "height x width is %lld x %lld; without x and dx they must give the size of x's plane",
                          (long long)a->height, (long long)a->width);
    if ((a->height && a->height != plane[0]) || (a->width && a->width != plane[1]))
        return vjp_refuse(work, VJP_INVALID, "height x width is %lld x %lld, but x's plane is %lld x %lld",
                          (long long)a->height, (long long)a->width, (long long)plane[0], (long long)plane[1]);
    return VJP_OK;
}

static vjp_status infer(vjp_work *work) {
    const vjp_conv2d_attributes *a = work->attributes;
    axes at = axes_of(work);
    bool last = a->layout == VJP_LAYOUT_CHANNELS_LAST;
    vjp_status status = check_needed(work);
    if (status != VJP_OK) return status;
    const vjp_tensor *x = shape_source(work, CONV2D_X, CONV2D_B_X, CONV2D_B_DX);
    const vjp_tensor *weight = shape_source(work, CONV2D_WEIGHT, CONV2D_B_WEIGHT, CONV2D_B_DWEIGHT);
    const vjp_tensor *dy = work->pass == VJP_BACKWARD ? work->tensor[CONV2D_B_DY] : NULL;
    const vjp_tensor *ranked = x ? x : dy;
    if (ranked->ndim != 4)
        return vjp_refuse(work, VJP_INVALID, "%s has rank %d; it must be 4: %s", x ? "x" : "dy", ranked->ndim,
                          last ? "[N, height, width, channels]" : "[N, channels, height, width]");
    if (weight->ndim != 4)
        return vjp_refuse(work, VJP_INVALID, "weight has rank %d; it must be 4: %s", weight->ndim,
                          last ? "[out_channels, kernel_h, kernel_w, channels / groups]" : WEIGHT_SHAPE);
    int64_t out_channels = weight->shape[0], group_channels = weight->shape[at.weight_channels];
    if (a->groups < 1 || a->groups > SIZE_LIMIT || out_channels % a->groups)
        return vjp_refuse(work, VJP_INVALID, "weight has %lld out_channels, which are not %lld equal groups",
                          (long long)out_channels, (long long)a->groups);
    if (x && x->shape[at.channels] % a->groups)
        return vjp_refuse(work, VJP_INVALID, "x has %lld channels, which are not %lld equal groups",
                          (long long)x->shape[at.channels], (long long)a->groups);
    if (x && x->shape[at.channels] / a->groups != group_channels)
        return vjp_refuse(work, VJP_INVALID, "weight has %lld channels; x has %lld in each of %lld groups",
                          (long long)group_channels, (long long)(x->shape[at.channels] / a->groups),
                          (long long)a->groups);
    int64_t plane[2], kernel[2], out[2];
    status = find_plane(work, x, at.height, plane);
    if (status != VJP_OK) return status;
    for (int i = 0; i < 2; i++) {
        kernel[i] = weight->shape[at.weight_height + i];
        status = count_windows(work, i ? "width" : "height", plane[i], kernel[i], i ? a->stride_w : a->stride_h,
                               i ? a->padding_w : a->padding_h, i ? a->dilation_w : a->dilation_h, &out[i]);
        if (status != VJP_OK) return status;
    }
    int64_t x_shape[4], y_shape[4];
    x_shape[0] = y_shape[0] = ranked->shape[0];
    if (group_channels && a->groups > INT64_MAX / group_channels)
        return vjp_refuse(work, VJP_INVALID, "x is too large: the product of its sizes overflows");
    x_shape[at.channels] = group_channels * a->groups;
    y_shape[at.channels] = out_channels;
    for (int i = 0; i < 2; i++) {
        x_shape[at.height + i] = plane[i];
        y_shape[at.height + i] = out[i];
    }
    /* The caller will allocate an absent tensor: its size must fit too. */
    if (!vjp_sizes_fit(4, x_shape) || !vjp_sizes_fit(4, y_shape))
        return vjp_refuse(work, VJP_INVALID, "%s is too large: the product of its sizes overflows",
                          vjp_sizes_fit(4, x_shape) ? "y" : "x");
    vjp_shape_set(work, X_SHAPE, 4, x_shape);
    vjp_shape_set(work, Y_SHAPE, 4, y_shape);
    vjp_shape_set(work, WEIGHT_SHAPE, 4, weight->shape);
    vjp_shape_set(work, "[out_channels]", 1, &out_channels);
    return VJP_OK;
}

vjp_conv2d_sizes vjp_conv2d_sizes_of(const vjp_work *work) {
    const vjp_conv2d_attributes *a = work->attributes;
    axes at = axes_of(work);
    bool forwards = work->pass == VJP_FORWARD;
    const int64_t *x = work->shape[forwards ? CONV2D_X : CONV2D_B_DX].size;
    const int64_t *y = work->shape[forwards ? CONV2D_Y : CONV2D_B_DY].size;
    const int64_t *weight = work->shape[forwards ? CONV2D_WEIGHT : CONV2D_B_DWEIGHT].size;
    return (vjp_conv2d_sizes){
        .batch = x[0],
        .channels = x[at.channels],
        .height = x[at.height],
        .width = x[at.height + 1],
        .out_channels = y[at.channels],
        .out_height = y[at.height],
        .out_width = y[at.height + 1],
        .groups = a->groups,
        .kernel_h = weight[at.weight_height],
        .kernel_w = weight[at.weight_height + 1],
        .stride_h = a->stride_h,
        .stride_w = a->stride_w,
        .padding_h = a->padding_h,
        .padding_w = a->padding_w,
        .dilation_h = a->dilation_h,
        .dilation_w = a->dilation_w,
        .channels_last = a->layout == VJP_LAYOUT_CHANNELS_LAST,
    };
}

/* One product forward, one each for dx and dweight; an input that no requested gradient needs is not read. */
static void cost(const vjp_work *work, vjp_cost *cost) {
    vjp_conv2d_sizes s = vjp_conv2d_sizes_of(work);
    double product = 2.0 * (double)s.batch * (double)s.out_channels * (double)s.out_height * (double)s.out_width *
                     (double)(s.channels / s.groups) * (double)s.kernel_h * (double)s.kernel_w;
    cost->flops = product;
    if (work->pass == VJP_FORWARD) return;
    bool dx = work->tensor[CONV2D_B_DX], dweight = work->tensor[CONV2D_B_DWEIGHT];
    cost->flops = product * ((dx ? 1 : 0) + (dweight ? 1 : 0));
    double size = (double)vjp_dtype_size(work->storage);
    if (!dweight && work->tensor[CONV2D_B_X])
        cost->bytes -= size * (double)vjp_shape_product(&work->shape[CONV2D_B_X], 0, 4);
    if (!dx && work->tensor[CONV2D_B_WEIGHT])
        cost->bytes -= size * (double)vjp_shape_product(&work->shape[CONV2D_B_WEIGHT], 0, 4);
}

/* x for dweight and weight for dx. Sizes come from a gradient or from what it is the gradient of. */
static uint32_t keeps(const void *attributes, uint32_t wanted) {
    bool dx = wanted >> CONV2D_B_DX & 1, dweight = wanted >> CONV2D_B_DWEIGHT & 1;
    (void)attributes;
    return (dweight || !dx ? 1u << CONV2D_B_X : 0) | (dx || !dweight ? 1u << CONV2D_B_WEIGHT : 0);
}

const vjp_op_rules vjp_conv2d_rules = {.infer = infer, .keeps = keeps, .cost = cost};

/* SPDX-License-Identifier: MIT */
/* maxpool2d: the largest element of each window; its gradient goes to where it came from. Maths: docs/ops/maxpool2d.md.
 */
#include "op/op.h"

/* One direction of the window. */
typedef struct axis_sizes {
    const char *name;
    int64_t size, kernel, stride, padding, dilation;
} axis_sizes;

enum { SIZE_LIMIT = 1 << 30 }; /* keeps every sum below free of overflow */

/* How many windows fit along one direction, or a refusal. */
static vjp_status count_windows(const vjp_work *work, const axis_sizes *s, bool ceil_mode, int64_t *count) {
    if (s->kernel < 1 || s->stride < 1 || s->dilation < 1 || s->padding < 0 || s->kernel > SIZE_LIMIT ||
        s->stride > SIZE_LIMIT || s->dilation > SIZE_LIMIT || s->padding > SIZE_LIMIT || s->size > SIZE_LIMIT)
        return vjp_refuse(work, VJP_INVALID,
                          "%s %lld, kernel %lld, stride %lld, padding %lld, dilation %lld: each must be positive "
                          "(padding 0 or more) and at most 2^30",
                          s->name, (long long)s->size, (long long)s->kernel, (long long)s->stride,
                          (long long)s->padding, (long long)s->dilation);
    int64_t extent = (s->kernel - 1) * s->dilation + 1;
    if (s->padding > extent / 2)
        return vjp_refuse(work, VJP_INVALID, "%s: padding is %lld, more than half of the window's extent of %lld",
                          s->name, (long long)s->padding, (long long)extent);
    int64_t room = s->size + 2 * s->padding - extent;
    if (room < 0)
        return vjp_refuse(work, VJP_INVALID, "a window's extent of %lld exceeds x's %s of %lld with padding %lld",
                          (long long)extent, s->name, (long long)s->size, (long long)s->padding);
    *count = room / s->stride + 1;
    if (ceil_mode && room % s->stride) {
        (*count)++;
        if ((*count - 1) * s->stride >= s->size + s->padding) (*count)--; /* it would begin in the padding after x */
    }
    /*
     * A window that begins in the padding can step over all of x when its dilation exceeds x's length; it would have no
     * maximum. All later windows begin inside x.
     */
    for (int64_t o = 0; s->dilation > s->size && o < *count; o++) {
        int64_t begin = o * s->stride - s->padding;
        if (begin >= 0 && begin < s->size) break;
        int64_t skip = begin < 0 ? (-begin + s->dilation - 1) / s->dilation : 0;
        if (skip >= s->kernel || begin + skip * s->dilation >= s->size)
            return vjp_refuse(work, VJP_INVALID, "window %lld along x's %s of %lld holds padding alone", (long long)o,
                              s->name, (long long)s->size);
    }
    return VJP_OK;
}

/* The tensor that gives x's shape in the backward; NULL if there is none. */
static const vjp_tensor *shape_source(const vjp_work *work) {
    if (work->pass == VJP_FORWARD) return work->tensor[MAXPOOL2D_X];
    return work->tensor[MAXPOOL2D_B_X] ? work->tensor[MAXPOOL2D_B_X] : work->tensor[MAXPOOL2D_B_DX];
}

static void axes_of(const vjp_maxpool2d_attributes *a, int64_t height, int64_t width, axis_sizes axes[2]) {
    axes[0] = (axis_sizes){"height",     height,       a->kernel_h, a->stride_h ? a->stride_h : a->kernel_h,
                           a->padding_h, a->dilation_h};
    axes[1] =
        (axis_sizes){"width", width, a->kernel_w, a->stride_w ? a->stride_w : a->kernel_w, a->padding_w, a->dilation_w};
}

static vjp_status infer(vjp_work *work) {
    const vjp_maxpool2d_attributes *a = work->attributes;
    if (work->pass == VJP_BACKWARD && !work->tensor[MAXPOOL2D_B_X] && !work->tensor[MAXPOOL2D_B_ARGMAX])
        return vjp_refuse(work, VJP_INVALID,
                          "x and argmax are both missing: one of them must say where the maxima are");
    bool last = a->layout == VJP_LAYOUT_CHANNELS_LAST;
    int channel_axis = last ? 3 : 1, height_axis = last ? 1 : 2;
    const vjp_tensor *source = shape_source(work);
    const vjp_tensor *ranked = source ? source : work->tensor[MAXPOOL2D_B_DY];
    if (ranked->ndim != 4)
        return vjp_refuse(work, VJP_INVALID, "%s has rank %d; it must be 4: %s",
                          !source                                  ? "dy"
                          : source == work->tensor[MAXPOOL2D_B_DX] ? "dx"
                                                                   : "x",
                          ranked->ndim, last ? "[N, height, width, channels]" : "[N, channels, height, width]");
    int64_t height = source ? source->shape[height_axis] : a->height;
    int64_t width = source ? source->shape[height_axis + 1] : a->width;
    if ((a->height && a->height != height) || (a->width && a->width != width))
        return vjp_refuse(work, VJP_INVALID, "height x width is %lld x %lld, but x's plane is %lld x %lld",
                          (long long)a->height, (long long)a->width, (long long)height, (long long)width);
    axis_sizes axes[2];
    axes_of(a, height, width, axes);
    int64_t out[2];
    for (int i = 0; i < 2; i++) {
        vjp_status status = count_windows(work, &axes[i], a->ceil_mode, &out[i]);
        if (status != VJP_OK) return status;
    }
    int64_t x[4], y[4];
    x[0] = y[0] = ranked->shape[0];
    x[channel_axis] = y[channel_axis] = ranked->shape[channel_axis];
    x[height_axis] = height, x[height_axis + 1] = width;
    y[height_axis] = out[0], y[height_axis + 1] = out[1];
    vjp_shape_set(work, "[N, channels, height, width]", 4, x);
    vjp_shape_set(work, "[N, channels, out_height, out_width]", 4, y);
    return VJP_OK;
}

/* A saved argmax outside the plane would write outside dx. */
static vjp_status check_values(const vjp_work *work) {
    if (work->pass == VJP_FORWARD || !work->tensor[MAXPOOL2D_B_ARGMAX]) return VJP_OK;
    vjp_maxpool2d_sizes s = vjp_maxpool2d_sizes_of(work);
    return vjp_check_indices(work, MAXPOOL2D_B_ARGMAX, s.height * s.width, "elements of x's plane");
}

/* With argmax saved, x need not be read. */
static void cost(const vjp_work *work, vjp_cost *cost) {
    if (work->pass == VJP_FORWARD || !work->tensor[MAXPOOL2D_B_ARGMAX] || !work->tensor[MAXPOOL2D_B_X]) return;
    cost->bytes -= (double)vjp_shape_product(&work->shape[MAXPOOL2D_B_X], 0, 4) * (double)vjp_dtype_size(work->storage);
}

vjp_maxpool2d_sizes vjp_maxpool2d_sizes_of(const vjp_work *work) {
    const vjp_maxpool2d_attributes *a = work->attributes;
    bool last = a->layout == VJP_LAYOUT_CHANNELS_LAST;
    int channel_axis = last ? 3 : 1, height_axis = last ? 1 : 2;
    const int64_t *x = work->shape[work->pass == VJP_FORWARD ? MAXPOOL2D_X : MAXPOOL2D_B_DX].size;
    const int64_t *y = work->shape[work->pass == VJP_FORWARD ? MAXPOOL2D_Y : MAXPOOL2D_B_DY].size;
    axis_sizes axes[2];
    axes_of(a, x[height_axis], x[height_axis + 1], axes);
    return (vjp_maxpool2d_sizes){
        .batch = x[0],
        .channels = x[channel_axis],
        .height = x[height_axis],
        .width = x[height_axis + 1],
        .out_height = y[height_axis],
        .out_width = y[height_axis + 1],
        .kernel_h = axes[0].kernel,
        .kernel_w = axes[1].kernel,
        .stride_h = axes[0].stride,
        .stride_w = axes[1].stride,
        .padding_h = axes[0].padding,
        .padding_w = axes[1].padding,
        .dilation_h = axes[0].dilation,
        .dilation_w = axes[1].dilation,
        .channels_last = last,
    };
}

/* With the argmax the backward does not need x, and argmax takes less memory. */
static uint32_t keeps(const void *attributes, uint32_t wanted) {
    (void)attributes;
    (void)wanted;
    return 1u << MAXPOOL2D_B_ARGMAX;
}

const vjp_op_rules vjp_maxpool2d_rules = {.infer = infer, .keeps = keeps, .check_values = check_values, .cost = cost};

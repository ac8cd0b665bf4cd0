/* SPDX-License-Identifier: MIT */
/*
 * conv2d, plainly: each window's sum, and the backward as gathers: each element of dx sums over the windows that
 * contain it, each element of dweight over the elements of x that it multiplied.
 */
#include "ref/ref.h"

/* The index of element (n, c, h, w) of a tensor with these planes. */
static int64_t at(const vjp_conv2d_sizes *s, int64_t channels, int64_t height, int64_t width, int64_t n, int64_t c,
                  int64_t h, int64_t w) {
    return s->channels_last ? ((n * height + h) * width + w) * channels + c
                            : ((n * channels + c) * height + h) * width + w;
}

static int64_t x_at(const vjp_conv2d_sizes *s, int64_t n, int64_t c, int64_t h, int64_t w) {
    return at(s, s->channels, s->height, s->width, n, c, h, w);
}

static int64_t y_at(const vjp_conv2d_sizes *s, int64_t n, int64_t o, int64_t i, int64_t j) {
    return at(s, s->out_channels, s->out_height, s->out_width, n, o, i, j);
}

/* Of weight, c counts the channels of one group. */
static int64_t weight_at(const vjp_conv2d_sizes *s, int64_t o, int64_t c, int64_t u, int64_t v) {
    return at(s, s->channels / s->groups, s->kernel_h, s->kernel_w, o, c, u, v);
}

static double window_sum(const vjp_work *work, const vjp_conv2d_sizes *s, int64_t n, int64_t o, int64_t i, int64_t j) {
    int64_t channels = s->channels / s->groups, first = o / (s->out_channels / s->groups) * channels;
    double sum = 0;
    for (int64_t c = 0; c < channels; c++)
        for (int64_t u = 0; u < s->kernel_h; u++)
            for (int64_t v = 0; v < s->kernel_w; v++) {
                int64_t h = i * s->stride_h - s->padding_h + u * s->dilation_h;
                int64_t w = j * s->stride_w - s->padding_w + v * s->dilation_w;
                if (h < 0 || h >= s->height || w < 0 || w >= s->width) continue;
                sum += ref_get(work, CONV2D_X, x_at(s, n, first + c, h, w), 0) *
                       ref_get(work, CONV2D_WEIGHT, weight_at(s, o, c, u, v), 0);
            }
    return sum;
}

static vjp_status forward(const vjp_work *work) {
    vjp_conv2d_sizes s = vjp_conv2d_sizes_of(work);
    if (s.out_channels == 0) return VJP_OK; /* rather than loop over an empty batch; likewise below */
    for (int64_t n = 0; n < s.batch; n++)
        for (int64_t o = 0; o < s.out_channels; o++)
            for (int64_t i = 0; i < s.out_height; i++)
                for (int64_t j = 0; j < s.out_width; j++)
                    ref_put(work, CONV2D_Y, y_at(&s, n, o, i, j),
                            window_sum(work, &s, n, o, i, j) + ref_get(work, CONV2D_BIAS, o, 0));
    return VJP_OK;
}

static double dx_at(const vjp_work *work, const vjp_conv2d_sizes *s, int64_t n, int64_t c, int64_t h, int64_t w) {
    int64_t channels = s->channels / s->groups, outs = s->out_channels / s->groups, first = c / channels * outs;
    double sum = 0;
    for (int64_t o = first; o < first + outs; o++)
        for (int64_t u = 0; u < s->kernel_h; u++)
            for (int64_t v = 0; v < s->kernel_w; v++) {
                int64_t down = h + s->padding_h - u * s->dilation_h, across = w + s->padding_w - v * s->dilation_w;
                if (down < 0 || down % s->stride_h || down / s->stride_h >= s->out_height) continue;
                if (across < 0 || across % s->stride_w || across / s->stride_w >= s->out_width) continue;
                sum += ref_get(work, CONV2D_B_DY, y_at(s, n, o, down / s->stride_h, across / s->stride_w), 0) *
                       ref_get(work, CONV2D_B_WEIGHT, weight_at(s, o, c % channels, u, v), 0);
            }
    return sum;
}

static double dweight_at(const vjp_work *work, const vjp_conv2d_sizes *s, int64_t o, int64_t c, int64_t u, int64_t v) {
    int64_t channel = o / (s->out_channels / s->groups) * (s->channels / s->groups) + c;
    double sum = 0;
    for (int64_t n = 0; n < s->batch; n++)
        for (int64_t i = 0; i < s->out_height; i++)
            for (int64_t j = 0; j < s->out_width; j++) {
                int64_t h = i * s->stride_h - s->padding_h + u * s->dilation_h;
                int64_t w = j * s->stride_w - s->padding_w + v * s->dilation_w;
                if (h < 0 || h >= s->height || w < 0 || w >= s->width) continue;
                sum += ref_get(work, CONV2D_B_DY, y_at(s, n, o, i, j), 0) *
                       ref_get(work, CONV2D_B_X, x_at(s, n, channel, h, w), 0);
            }
    return sum;
}

static void put_dx(const vjp_work *work, const vjp_conv2d_sizes *s) {
    if (s->channels == 0) return;
    for (int64_t n = 0; n < s->batch; n++)
        for (int64_t c = 0; c < s->channels; c++)
            for (int64_t h = 0; h < s->height; h++)
                for (int64_t w = 0; w < s->width; w++)
                    ref_put(work, CONV2D_B_DX, x_at(s, n, c, h, w), dx_at(work, s, n, c, h, w));
}

static void put_dweight(const vjp_work *work, const vjp_conv2d_sizes *s) {
    int64_t channels = s->channels / s->groups;
    for (int64_t o = 0; channels && o < s->out_channels; o++)
        for (int64_t c = 0; c < channels; c++)
            for (int64_t u = 0; u < s->kernel_h; u++)
                for (int64_t v = 0; v < s->kernel_w; v++)
                    ref_put(work, CONV2D_B_DWEIGHT, weight_at(s, o, c, u, v), dweight_at(work, s, o, c, u, v));
}

static void put_dbias(const vjp_work *work, const vjp_conv2d_sizes *s) {
    for (int64_t o = 0; o < s->out_channels; o++) {
        double sum = 0;
        for (int64_t n = 0; n < s->batch; n++)
            for (int64_t i = 0; i < s->out_height; i++)
                for (int64_t j = 0; j < s->out_width; j++)
                    sum += ref_get(work, CONV2D_B_DY, y_at(s, n, o, i, j), 0);
        ref_put(work, CONV2D_B_DBIAS, o, sum);
    }
}

static vjp_status backward(const vjp_work *work) {
    vjp_conv2d_sizes s = vjp_conv2d_sizes_of(work);
    if (work->tensor[CONV2D_B_DX]) put_dx(work, &s);
    if (work->tensor[CONV2D_B_DWEIGHT]) put_dweight(work, &s);
    if (work->tensor[CONV2D_B_DBIAS]) put_dbias(work, &s);
    return VJP_OK;
}

const vjp_kernel vjp_ref_conv2d[VJP_PASS_COUNT] = {
    {forward, NULL, REF_STORAGE},
    {backward, NULL, REF_STORAGE},
};

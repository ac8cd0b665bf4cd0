/* SPDX-License-Identifier: MIT */
/*
 * Convolution with channels last as matrix products: no im2col matrix is stored; rows of windows are gathered while the
 * product packs them. Per tap, a row of a window is a contiguous run of channels.
 */
#ifndef VJP_CPU_CONV2D_LAST_H
#define VJP_CPU_CONV2D_LAST_H

#include "cpu/conv/conv2d.h"

/* The windows of all images as a matrix: rows are positions (image, i, j), columns (group, down, across, channel). */
typedef struct window_rows {
    const conv_sum *sum;
    int64_t terms; /* per group */
    bool joined;   /* adjacent taps are adjacent in memory: a row of taps is one run */
} window_rows;

static window_rows window_rows_of(const conv_sum *p) {
    return (window_rows){p, p->h.taps * p->w.taps * p->ins, p->groups == 1 && p->w.dilation == 1};
}

/* Elements [first, first + count) of a row of taps that starts at column w of source row `row`. */
static void load_joined(const conv_sum *p, int64_t row, int64_t w, int64_t first, int64_t count, float *to) {
    int64_t from = w * p->ins + first, begin = vjp_max(0, -from), end = vjp_min(count, p->w.size * p->ins - from);
    begin = vjp_min(begin, count);
    end = vjp_max(begin, end);
    memset(to, 0, (size_t)begin * sizeof *to);
    load_row(p->source.dtype, p->source.data, row * p->w.size * p->ins + from + begin, end - begin, to + begin);
    memset(to + end, 0, (size_t)(count - end) * sizeof *to);
}

static void read_windows(const void *source, int64_t row, int64_t column, int64_t count, float *to) {
    const window_rows *r = source;
    const conv_sum *p = r->sum;
    if (count == 0) return; /* no terms: avoid dividing by zero */
    int64_t image = row / (p->h.out * p->w.out), i = row / p->w.out % p->h.out, j = row % p->w.out;
    int64_t group = column / r->terms, term = column % r->terms;
    int64_t run = r->joined ? p->w.taps * p->ins : p->ins, place = term / run, in = term % run;
    while (count > 0) {
        int64_t n = vjp_min(count, run - in);
        int64_t down = r->joined ? place : place / p->w.taps, across = r->joined ? 0 : place % p->w.taps;
        int64_t h = i * p->h.step + p->h.base + down * p->h.dilation;
        int64_t w = j * p->w.step + p->w.base + across * p->w.dilation;
        bool outside = h < 0 || h >= p->h.size || (!r->joined && (w < 0 || w >= p->w.size));
        if (outside)
            memset(to, 0, (size_t)n * sizeof *to);
        else if (r->joined)
            load_joined(p, image * p->h.size + h, w, in, n, to);
        else
            load_row(p->source.dtype, p->source.data,
                     (((image * p->h.size + h) * p->w.size + w) * p->groups + group) * p->ins + in, n, to);
        to += n;
        count -= n;
        place++;
        in = 0;
    }
}

/* Weights as [(group, down, across, in), out], for dx: out channels are contiguous. */
static void read_transposed_weights(const void *source, int64_t row, int64_t column, int64_t count, float *to) {
    const conv_sum *p = source;
    int64_t in = row % p->ins, across = row / p->ins % p->w.taps, down = row / p->ins / p->w.taps % p->h.taps;
    int64_t group = row / p->ins / p->w.taps / p->h.taps;
    load_row(p->weight.dtype, p->weight.data, weight_index(p, group, column, in, down, across), count, to);
}

/* Epilogue: adds the bias to the sums of row (group, position) and stores them as the target's pixel. */
static void store_pixels(const void *target, int64_t row, int64_t column, int64_t count, const float *sums) {
    enum { BIAS_BUFFER = 256 };
    const conv_sum *p = target;
    int64_t positions = p->h.out * p->w.out, output = row % (p->batch * positions),
            group = row / (p->batch * positions);
    int64_t h = p->h.to + output / p->w.out % p->h.out * p->h.to_step, w = p->w.to + output % p->w.out * p->w.to_step;
    int64_t pixel = (output / positions * p->target_h + h) * p->target_w + w;
    int64_t channel = group * p->outs + column, at = pixel * p->groups * p->outs + channel;
    if (!p->bias.data) {
        store_row(p->target.dtype, p->target.data, at, count, sums, p->target.accumulate);
        return;
    }
    float bias[BIAS_BUFFER];
    for (int64_t done = 0; done < count; done += BIAS_BUFFER) {
        int64_t n = vjp_min(BIAS_BUFFER, count - done);
        load_row(p->bias.dtype, p->bias.data, channel + done, n, bias);
        for (int64_t i = 0; i < n; i++)
            bias[i] = sums[done + i] + bias[i];
        store_row(p->target.dtype, p->target.data, at + done, n, bias, p->target.accumulate);
    }
}

/* The product of a sum; the caller keeps `windows` and `weights`. */
static gemm_call pixels_product(const conv_sum *p, const window_rows *windows, matrix *weights) {
    int64_t outputs = p->batch * p->h.out * p->w.out;
    gemm_call call = {.threads = p->threads,
                      .items = p->groups,
                      .m = outputs,
                      .n = p->outs,
                      .k = windows->terms,
                      .a = {.read = read_windows, .source = windows, .item_column = windows->terms},
                      .c = {.epilogue = store_pixels, .target = p, .item_row = outputs}};
    /* Windows of a single tap are rows of the source. */
    bool same = p->groups == 1 && p->h.taps * p->w.taps == 1 && p->h.step == 1 && p->w.step == 1 && p->h.base == 0 &&
                p->w.base == 0 && p->h.out == p->h.size && p->w.out == p->w.size;
    if (same && p->source.dtype == VJP_F32) call.a = (gemm_operand){.data = p->source.data, .stride = p->ins};
    if (p->weight_in == 1) {
        *weights = p->weight;
        weights->columns = windows->terms;
        call.b = operand_of(weights, true, p->outs);
    } else {
        call.b = (gemm_operand){.read = read_transposed_weights, .source = p, .item_row = windows->terms};
    }
    return call;
}

static size_t pixels_workspace(const conv_sum *p) {
    window_rows windows = window_rows_of(p);
    matrix weights;
    gemm_call call = pixels_product(p, &windows, &weights);
    return CPU_NAME(gemm_workspace)(&call);
}

static void sum_pixels(const vjp_work *work, const conv_sum *p, void *workspace) {
    window_rows windows = window_rows_of(p);
    matrix weights;
    gemm_call call = pixels_product(p, &windows, &weights);
    CPU_NAME(gemm)(work, &call, workspace);
}

#endif

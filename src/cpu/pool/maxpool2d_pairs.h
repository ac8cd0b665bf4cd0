/* SPDX-License-Identifier: MIT */
/*
 * maxpool2d of 2 x 2 windows that tile the plane, for channels first: the kernel that most networks use. Every window
 * is two neighbours of two rows, so nothing needs to be staged: even and odd columns are separated in registers and
 * compared, and in the backward dy goes to the one of four places that won. The results are those of the path by rows.
 */
#ifndef VJP_CPU_MAXPOOL2D_PAIRS_H
#define VJP_CPU_MAXPOOL2D_PAIRS_H

#include "cpu/pool/maxpool2d.h"

static bool pairs_fit(const vjp_maxpool2d_sizes *s) {
    return !s->channels_last && s->kernel_h == 2 && s->kernel_w == 2 && s->stride_h == 2 && s->stride_w == 2 &&
           s->padding_h == 0 && s->padding_w == 0 && s->dilation_h == 1 && s->dilation_w == 1 && s->height % 2 == 0 &&
           s->width % 2 == 0 && s->height * s->width <= INT32_MAX;
}

/* The maxima of n windows, n < 16 or more, whose upper left elements are row[0], row[2], ... `index` is theirs. */
INLINE best find_pairs(vjp_dtype dtype, const void *x, int64_t upper, int64_t width, int64_t n, vi index,
                       int32_t down) {
    int64_t lower = upper + width, rest = 2 * n > LANES ? 2 * n - LANES : 0;
    vf a = vf_load_part(dtype, x, upper, 2 * n), c = vf_load_part(dtype, x, lower, 2 * n);
    vf b = rest ? vf_load_part(dtype, x, upper + LANES, rest) : vf_zero();
    vf d = rest ? vf_load_part(dtype, x, lower + LANES, rest) : vf_zero();
    best r = {vf_unzip(a, b, false), index};
    best_take(&r, vf_unzip(a, b, true), vi_add(index, vi_set(1)));
    best_take(&r, vf_unzip(c, d, false), vi_add(index, vi_set(down)));
    best_take(&r, vf_unzip(c, d, true), vi_add(index, vi_set(down + 1)));
    return r;
}

/* Items are rows of windows over all planes; x has two rows for each. */
INLINE void forward_pairs(vjp_dtype dtype, const pool_call *call, size_t task) {
    const vjp_maxpool2d_sizes *s = &call->s;
    for (int64_t row = cpu_split_begin(&call->split, task); row < cpu_split_end(&call->split, task); row++) {
        int64_t upper = 2 * row * s->width, to = row * s->out_width;
        int64_t first = row % s->out_height * 2 * s->width;
        for (int64_t w = 0; w < s->out_width; w += LANES) {
            int64_t n = s->out_width - w;
            vi index = vi_add(vi_steps(2), vi_set((int32_t)(first + 2 * w)));
            best b = find_pairs(dtype, call->x, upper + 2 * w, s->width, n, index, (int32_t)s->width);
            if (call->y) vf_write_part(call->mode, dtype, call->y, to + w, n, b.value);
            if (call->argmax) store_argmax(call->argmax_type, call->argmax, to + w, n, b.index);
        }
    }
    if (call->mode == WRITE_STREAM) vf_stream_done();
}

INLINE void write_pairs(vjp_dtype dtype, write_mode mode, const pool_call *call, int64_t to, int64_t n, vf even,
                        vf odd) {
    vf_write_part(mode, dtype, call->dx, to, 2 * n, vf_zip(even, odd, false));
    if (2 * n > LANES) vf_write_part(mode, dtype, call->dx, to + LANES, 2 * n - LANES, vf_zip(even, odd, true));
}

INLINE void backward_pairs_moded(vjp_dtype dtype, write_mode mode, const pool_call *call, size_t task) {
    const vjp_maxpool2d_sizes *s = &call->s;
    for (int64_t row = cpu_split_begin(&call->split, task); row < cpu_split_end(&call->split, task); row++) {
        int64_t upper = 2 * row * s->width, from = row * s->out_width;
        for (int64_t w = 0; w < s->out_width; w += LANES) {
            int64_t n = s->out_width - w, to = upper + 2 * w;
            vi won = find_pairs(dtype, call->x, to, s->width, n, vi_set(0), 2).index;
            vf dy = vf_load_part(dtype, call->dy, from + w, n), zero = vf_zero();
            write_pairs(dtype, mode, call, to, n, add_where(zero, won, vi_set(0), dy),
                        add_where(zero, won, vi_set(1), dy));
            write_pairs(dtype, mode, call, to + s->width, n, add_where(zero, won, vi_set(2), dy),
                        add_where(zero, won, vi_set(3), dy));
        }
    }
    if (mode == WRITE_STREAM) vf_stream_done();
}

INLINE void backward_pairs(vjp_dtype dtype, const pool_call *call, size_t task) {
    BY_MODE(dtype, call->mode, backward_pairs_moded, call, task);
}

#endif

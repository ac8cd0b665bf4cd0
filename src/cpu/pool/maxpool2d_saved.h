/* SPDX-License-Identifier: MIT */
/*
 * maxpool2d's backward with a saved argmax, for channels first and the usual windows: nothing is staged. An element of
 * dx compares its place with the argmax of each of the few windows over it, in the order of the windows, and adds the
 * dy of those that it won; sixteen windows at a time, straight from the argmax and dy. In cache that takes a fraction
 * of the time of adding dy number by number into a tile: no chain of sums through memory where neighbours share a
 * maximum.
 *
 * Where the windows are as high as wide, two rows of dx are computed together: a window's argmax and dy are loaded once
 * for all its places in the two rows, and all distances are constants. Other windows go row by row.
 *
 * A vector of windows may reach over the end of its row into the next, and a row of windows over the end of its plane:
 * those windows are in other columns or rows, so their argmax never equals the place that is compared with it. Only the
 * ends of the whole tensor need care.
 */
#ifndef VJP_CPU_MAXPOOL2D_SAVED_H
#define VJP_CPU_MAXPOOL2D_SAVED_H

#include "cpu/pool/maxpool2d.h"

/* The windows along one direction; dilation is 1. As constants, so that each tap is a load at a fixed distance. */
typedef struct window_axis {
    int64_t kernel, stride, padding;
} window_axis;

static const window_axis usual_windows[] = {{3, 2, 1}, {3, 2, 0}, {2, 2, 0}, {3, 1, 1}};

enum { MAX_SAVED_STRIDE = 2, MAX_SAVED_ROWS = 3, BLOCK_ROWS = 2 };

/* Bytes by which the argmax and dy are prefetched: from memory a tenth less time on one Sapphire Rapids core. */
enum { SAVED_AHEAD = 1024 };

static bool saved_rows_fit(const vjp_maxpool2d_sizes *s) {
    bool usual = false;
    for (size_t i = 0; i < sizeof usual_windows / sizeof usual_windows[0]; i++)
        usual = usual || (s->kernel_w == usual_windows[i].kernel && s->stride_w == usual_windows[i].stride &&
                          s->padding_w == usual_windows[i].padding);
    /* The last condition: one window over the end of a row shares no column with the next row's first. */
    return usual && !s->channels_last && s->dilation_w == 1 && s->dilation_h == 1 && s->kernel_h <= MAX_SAVED_ROWS &&
           s->height * s->width <= INT32_MAX && s->out_width * s->stride_w >= s->kernel_w;
}

/* The last condition is that of the columns, for the rows of windows over the end of a plane. */
INLINE bool saved_blocks_fit(const vjp_maxpool2d_sizes *s) {
    return s->kernel_h == s->kernel_w && s->stride_h == s->stride_w && s->padding_h == s->padding_w &&
           s->out_height * s->stride_h >= s->kernel_h;
}

/* Windows w + first_over to w + last_over hold an element of [w * stride, w * stride + n). */
INLINE int64_t first_over(window_axis a) {
    return -((a.kernel - 1 - a.padding) / a.stride);
}

INLINE int64_t last_over(window_axis a, int64_t n) {
    return (n - 1 + a.padding) / a.stride;
}

/* Whether window w of those holds element i. */
INLINE bool is_tap(window_axis a, int64_t w, int64_t i) {
    int64_t tap = i + a.padding - w * a.stride;
    return tap >= 0 && tap < a.kernel;
}

/* A copy of the call that stores to dx cannot change, so that the compiler keeps it in registers. */
typedef struct saved_call {
    vjp_maxpool2d_sizes s;
    write_mode mode;
    void *dx;
    const void *dy, *argmax;
    int64_t windows; /* of all planes */
} saved_call;

/* Sixteen windows: where their maximum was, and its gradient. */
typedef struct winners {
    vi index;
    vf dy;
} winners;

/* At an end of the tensor; windows outside have no element. */
OUTLINE winners load_end(const pool_call *call, int64_t first) {
    int32_t index[LANES];
    float dy[LANES];
    for (int64_t i = 0; i < LANES; i++) {
        int64_t w = first + i;
        bool inside = w >= 0 && w < call->windows, narrow = call->argmax_type == VJP_I32;
        index[i] = !inside  ? -1
                   : narrow ? ((const int32_t *)call->saved)[w]
                            : (int32_t)((const int64_t *)call->saved)[w];
        dy[i] = inside ? f32_load(call->dtype, call->dy, w) : 0;
    }
    return (winners){vi_load(index), vf_load(VJP_F32, dy, 0)};
}

/*
 * Sixteen even and sixteen odd columns in bf16 are the two halves of sixteen 32-bit words: half the work of
 * zipping, rounding and narrowing them. A sum of bf16 numbers that is NaN has a payload of bf16 alone, so rounding
 * cannot carry it into Inf. The same bits as vf_write().
 */
INLINE void write_halves(write_mode mode, uint16_t *to, vf even, vf odd) {
    int32_t *words = (int32_t *)(void *)to;
    if (mode == WRITE_ADD) {
        vi old = vi_load(words);
        even = vf_add(vi_as_vf(vi_shift_left(old, 16)), even);
        odd = vf_add(vi_as_vf(vi_and(old, vi_set((int32_t)0xffff0000))), odd);
    }
    typedef uint32_t native_u __attribute__((vector_size(NATIVE_LANES * 4)));
    vi r;
    EACH_PART {
        native_u low = (native_u)even.v[p], high = (native_u)odd.v[p];
        low += 0x7fff + (low >> 16 & 1);
        high += 0x7fff + (high >> 16 & 1);
        r.v[p] = (native_i)(low >> 16 | (high & 0xffff0000));
    }
#if defined(CPU_ISA_AVX512)
    if (mode == WRITE_STREAM) {
        _mm256_stream_si256((__m256i *)(void *)to, _mm512_castsi512_si256((__m512i)r.v[0]));
        _mm256_stream_si256((__m256i *)(void *)(to + LANES), _mm512_extracti64x4_epi64((__m512i)r.v[0], 1));
        return;
    }
#elif defined(CPU_ISA_AVX2)
    if (mode == WRITE_STREAM) {
        EACH_PART _mm256_stream_si256((__m256i *)(void *)(to + p * LANES), (__m256i)r.v[p]);
        return;
    }
#endif
    vi_store(words, r);
}

/* Up to n columns of dx from element `to` on, given by their remainder when divided by the stride. */
INLINE void write_columns(write_mode mode, vjp_dtype dtype, void *dx, int64_t to, int64_t n, const vf *sum,
                          int64_t stride) {
    if (stride == 1) {
        vf_write_part(mode, dtype, dx, to, n, sum[0]);
        return;
    }
    bool little = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
    if (dtype == VJP_BF16 && little && n >= 2 * LANES) {
        write_halves(mode, (uint16_t *)dx + to, sum[0], sum[1]);
        return;
    }
    vf_write_part(mode, dtype, dx, to, n, vf_zip(sum[0], sum[1], false));
    if (n > LANES) vf_write_part(mode, dtype, dx, to + LANES, n - LANES, vf_zip(sum[0], sum[1], true));
}

/* Which rows of dx are written, and below which windows: */
typedef struct row_block {
    int64_t h, to;  /* the first row, and its first element in all of dx */
    int64_t window; /* number of the first window of the row that first_over() and last_over() count from */
} row_block;

/* n rows of one plane of dx. */
INLINE void saved_block(const saved_call *call, vjp_dtype dtype, vjp_dtype argmax_type, window_axis across,
                        window_axis down, int64_t n, row_block b, const pool_call *at_end) {
    int64_t width = call->s.width, step = LANES * across.stride;
    vi place[BLOCK_ROWS][MAX_SAVED_STRIDE];
    UNROLL for (int64_t i = 0; i < n; i++) {
        UNROLL for (int64_t j = 0; j < across.stride; j++) {
            place[i][j] = vi_add(vi_steps((int32_t)across.stride), vi_set((int32_t)((b.h + i) * width + j)));
        }
    }
    int64_t element = (int64_t)dtype_bytes(dtype), place_bytes = argmax_type == VJP_I32 ? 4 : 8;
    for (int64_t left = 0; left < width; left += step) {
        int64_t last = b.window + last_over(down, n) * call->s.out_width + left / across.stride;
        prefetch_first_level((const char *)call->argmax + last * place_bytes + SAVED_AHEAD, LANES * place_bytes);
        prefetch_first_level((const char *)call->dy + last * element + SAVED_AHEAD, LANES * element);
        vf sum[BLOCK_ROWS][MAX_SAVED_STRIDE];
        UNROLL for (int64_t i = 0; i < n; i++) {
            UNROLL for (int64_t j = 0; j < across.stride; j++) sum[i][j] = vf_zero();
        }
        for (int64_t r = first_over(down); r <= last_over(down, n); r++) {
            UNROLL for (int64_t w = first_over(across); w <= last_over(across, across.stride); w++) {
                int64_t from = b.window + r * call->s.out_width + left / across.stride + w;
                winners a = at_end && (from < 0 || from + LANES > call->windows)
                                ? load_end(at_end, from)
                                : (winners){load_argmax(argmax_type, call->argmax, from, LANES),
                                            vf_load(dtype, call->dy, from)};
                UNROLL for (int64_t i = 0; i < n; i++) {
                    UNROLL for (int64_t j = 0; j < across.stride; j++) {
                        if (is_tap(down, r, i) && is_tap(across, w, j))
                            sum[i][j] = add_where(sum[i][j], a.index, place[i][j], a.dy);
                    }
                }
            }
        }
        UNROLL for (int64_t i = 0; i < n; i++) {
            write_columns(call->mode, dtype, call->dx, b.to + i * width + left, width - left, sum[i], across.stride);
            UNROLL for (int64_t j = 0; j < across.stride; j++) place[i][j] = vi_add(place[i][j], vi_set((int32_t)step));
        }
    }
}

/* Items are rows of dx, item_rows at a time. */
INLINE void saved_rows(const pool_call *pool, size_t task, vjp_dtype dtype, vjp_dtype argmax_type, window_axis c) {
    const saved_call call = {pool->s, pool->mode, pool->dx, pool->dy, pool->saved, pool->windows};
    const vjp_maxpool2d_sizes *s = &call.s;
    int64_t begin = cpu_split_begin(&pool->split, task) * pool->item_rows;
    int64_t end = cpu_split_end(&pool->split, task) * pool->item_rows;
    int64_t plane = begin / s->height, h = begin % s->height;
    /* How far the windows of a block reach before and after the one it counts from. */
    int64_t step = LANES * c.stride, steps = vjp_divide_up(s->width, step);
    int64_t before = first_over(c) * (s->out_width + 1);
    int64_t after = last_over(c, BLOCK_ROWS) * s->out_width + last_over(c, c.stride) + steps * LANES;
    bool blocks = saved_blocks_fit(s);
    for (int64_t row = begin; row < end;) {
        row_block b = {.h = h, .to = row * s->width};
        b.window = (plane * s->out_height + h / c.stride) * s->out_width;
        int64_t n = 1;
        if (blocks && h % c.stride == 0 && h + BLOCK_ROWS <= s->height && row + BLOCK_ROWS <= end &&
            b.window + before >= 0 && b.window + after <= call.windows) {
            n = BLOCK_ROWS;
            saved_block(&call, dtype, argmax_type, c, c, BLOCK_ROWS, b, NULL);
        } else {
            /* A row that k rows of windows reach is treated as one that k rows of stride 1 reach. */
            span over = windows_over(h, h + 1, s->out_height, s->kernel_h, s->stride_h, s->padding_h, 1);
            int64_t k = over.end - over.begin;
            b.window = (plane * s->out_height + over.begin) * s->out_width;
            saved_block(&call, dtype, argmax_type, c, (window_axis){k, 1, k - 1}, 1, b, pool);
        }
        row += n;
        h += n;
        if (h == s->height) h = 0, plane++;
    }
    if (call.mode == WRITE_STREAM) vf_stream_done();
}

INLINE void saved_rows_typed(vjp_dtype dtype, const pool_call *call, size_t task, window_axis c) {
    if (call->argmax_type == VJP_I32)
        saved_rows(call, task, dtype, VJP_I32, c);
    else
        saved_rows(call, task, dtype, VJP_I64, c);
}

INLINE void backward_saved_rows(vjp_dtype dtype, const pool_call *call, size_t task) {
    const vjp_maxpool2d_sizes *s = &call->s;
    if (s->stride_w == 1)
        saved_rows_typed(dtype, call, task, usual_windows[3]);
    else if (s->kernel_w == 2)
        saved_rows_typed(dtype, call, task, usual_windows[2]);
    else if (s->padding_w == 0)
        saved_rows_typed(dtype, call, task, usual_windows[1]);
    else
        saved_rows_typed(dtype, call, task, usual_windows[0]);
}

#endif

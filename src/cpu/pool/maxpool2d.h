/* SPDX-License-Identifier: MIT */
/*
 * Shared by all paths of maxpool2d: one call, which elements a window holds, and which of two elements is the maximum.
 */
#ifndef VJP_CPU_MAXPOOL2D_H
#define VJP_CPU_MAXPOOL2D_H

#include "core/arithmetic.h"
#include "cpu/dispatch.h"
#include "cpu/simd/shuffle.h"
#include "cpu/simd/stream.h"
#include "op/op.h"

/* maxpool2d.c says which is taken when. The first two are of the backward alone. */
typedef enum pool_path {
    POOL_SAVED_ROWS,
    POOL_SAVED_TILES,
    POOL_PAIRS,
    POOL_ROWS,
    POOL_PIXELS,
    POOL_ELEMENTS
} pool_path;

typedef struct pool_call {
    vjp_maxpool2d_sizes s;
    pool_path path;
    vjp_dtype dtype, argmax_type;
    write_mode mode; /* of y or dx */
    const void *x;
    void *y, *argmax;       /* forward */
    void *dx;               /* backward */
    const void *dy, *saved; /* saved: the argmax, or NULL */
    int64_t windows;        /* of the whole call, where saved */
    cpu_split split;        /* what an item is depends on the path */
    int64_t tile_h, tile_w; /* backward by tiles */
    float *tiles;           /* one tile per task */
    int64_t tile_floats;
    int64_t block;     /* backward by rows: columns of dx at a time */
    int64_t item_rows; /* by rows: rows per item */
} pool_call;

/* Along one direction: element origin + t * dilation is in x for t in [first, end), which is never empty. */
typedef struct taps {
    int64_t origin, first, end;
} taps;

INLINE taps taps_of(int64_t o, int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
    taps t = {.origin = o * stride - padding, .first = 0, .end = kernel};
    if (t.origin < 0) t.first = vjp_divide_up(-t.origin, dilation);
    if (t.origin + (kernel - 1) * dilation >= size) t.end = vjp_divide_up(size - t.origin, dilation);
    return t;
}

INLINE taps row_taps(const vjp_maxpool2d_sizes *s, int64_t oh) {
    return taps_of(oh, s->height, s->kernel_h, s->stride_h, s->padding_h, s->dilation_h);
}

INLINE taps column_taps(const vjp_maxpool2d_sizes *s, int64_t ow) {
    return taps_of(ow, s->width, s->kernel_w, s->stride_w, s->padding_w, s->dilation_w);
}

/* Windows [begin, end) along one direction that can hold an element of [from, to). */
typedef struct span {
    int64_t begin, end;
} span;

INLINE span windows_over(int64_t from, int64_t to, int64_t count, int64_t kernel, int64_t stride, int64_t padding,
                         int64_t dilation) {
    int64_t extent = (kernel - 1) * dilation + 1, reach = from + padding - extent + 1;
    return (span){.begin = reach > 0 ? vjp_divide_up(reach, stride) : 0,
                  .end = vjp_min((to - 1 + padding) / stride + 1, count)};
}

/* The best so far and its place. A later element wins only if it is greater, or the first NaN. */
typedef struct best {
    vf value;
    vi index;
} best;

INLINE void best_take(best *b, vf value, vi index) {
#if defined(CPU_ISA_AVX512)
    __m512 old = (__m512)b->value.v[0], new = (__m512)value.v[0];
    __mmask16 wins = _mm512_cmp_ps_mask(new, old, _CMP_NLE_UQ);
    wins = _mm512_mask_cmp_ps_mask(wins, old, old, _CMP_ORD_Q);
    b->value.v[0] = (native_f)_mm512_mask_mov_ps(old, wins, new);
    b->index.v[0] = (native_i)_mm512_mask_mov_epi32((__m512i)b->index.v[0], wins, (__m512i)index.v[0]);
#else
    vi wins;
    EACH_PART wins.v[p] = ~(native_i)(value.v[p] <= b->value.v[p]) & (native_i)(b->value.v[p] == b->value.v[p]);
    b->value = vf_select(wins, value, b->value);
    b->index = vi_select(wins, index, b->index);
#endif
}

/* sum + (index == place ? value : 0) */
INLINE vf add_where(vf sum, vi index, vi place, vf value) {
#if defined(CPU_ISA_AVX512)
    __mmask16 here = _mm512_cmpeq_epi32_mask((__m512i)index.v[0], (__m512i)place.v[0]);
    sum.v[0] = (native_f)_mm512_mask_add_ps((__m512)sum.v[0], here, (__m512)sum.v[0], (__m512)value.v[0]);
    return sum;
#else
    EACH_PART sum.v[p] += (native_f)((native_i)(index.v[p] == place.v[p]) & (native_i)value.v[p]);
    return sum;
#endif
}

/* Part by part: GCC copies a whole struct through the stack in small pieces, and the load then waits for them. */
INLINE vi vi_load(const int32_t *from) {
    vi r;
    EACH_PART memcpy(&r.v[p], from + p * NATIVE_LANES, sizeof r.v[p]);
    return r;
}

INLINE void vi_store(int32_t *to, vi a) {
    EACH_PART memcpy(to + p * NATIVE_LANES, &a.v[p], sizeof a.v[p]);
}

/* 0, step, 2 step, ... */
INLINE vi vi_steps(int32_t step) {
    int32_t lane[LANES];
    for (int i = 0; i < LANES; i++)
        lane[i] = i * step;
    return vi_load(lane);
}

/* Lanes 0 to n - 1. */
INLINE vi vi_below(int64_t n) {
    vi lane = vi_steps(1), limit = vi_set((int32_t)n);
    EACH_PART lane.v[p] = (native_i)(lane.v[p] < limit.v[p]);
    return lane;
}

/* n argmax values, n < 16 or more, from element i on. */
INLINE void store_argmax(vjp_dtype dtype, void *to, int64_t i, int64_t n, vi index) {
    int32_t lanes[LANES];
    if (dtype == VJP_I32 && n >= LANES) {
        vi_store((int32_t *)to + i, index);
        return;
    }
#if defined(CPU_ISA_AVX512)
    if (dtype == VJP_I32) {
        _mm512_mask_storeu_epi32((int32_t *)to + i, (__mmask16)((1u << n) - 1), (__m512i)index.v[0]);
        return;
    }
#endif
    vi_store(lanes, index);
    for (int64_t j = 0; j < LANES && j < n; j++) {
        if (dtype == VJP_I32)
            ((int32_t *)to)[i + j] = lanes[j];
        else
            ((int64_t *)to)[i + j] = lanes[j];
    }
}

/* 16 values of 64 bits, each of which fits 32 bits. */
INLINE vi vi_narrow(const int64_t *from) {
    typedef int64_t native_wide __attribute__((vector_size(NATIVE_LANES * 4)));
    typedef int32_t native_half_i __attribute__((vector_size(NATIVE_LANES * 2)));
    vi r;
    EACH_PART {
        native_wide low, high;
        memcpy(&low, from + p * NATIVE_LANES, sizeof low);
        memcpy(&high, from + p * NATIVE_LANES + NATIVE_LANES / 2, sizeof high);
        r.v[p] = __builtin_shufflevector(__builtin_convertvector(low, native_half_i),
                                         __builtin_convertvector(high, native_half_i), RUN(0));
    }
    return r;
}

/* Places past n are -1, which no element has. */
INLINE vi load_argmax(vjp_dtype dtype, const void *from, int64_t i, int64_t n) {
    if (dtype == VJP_I32 && n >= LANES) return vi_load((const int32_t *)from + i);
    if (dtype == VJP_I64 && n >= LANES) return vi_narrow((const int64_t *)from + i);
    int32_t lanes[LANES];
    for (int64_t j = 0; j < LANES; j++)
        lanes[j] = j >= n             ? -1
                   : dtype == VJP_I32 ? ((const int32_t *)from)[i + j]
                                      : (int32_t)((const int64_t *)from)[i + j];
    return vi_load(lanes);
}

#endif

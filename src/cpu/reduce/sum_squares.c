/* SPDX-License-Identifier: MIT */
/*
 * sum_squares on the CPU: each task sums the squares of its elements into a partial, the partials are added in order.
 * All in double: the square of an f32 is exact there and cannot overflow or underflow, so gradients of 1e20 and 1e-30
 * need no scaling, and one more conversion per vector costs nothing beside the memory that is read.
 */
#include "cpu/elementwise/elementwise.h"
#include "cpu/simd/shuffle.h"

extern const vjp_kernel CPU_NAME(sum_squares)[VJP_PASS_COUNT];

/*
 * The distance of prefetching: a page, which the hardware does not prefetch across. A kernel that only reads has
 * nothing else to wait for; measured on AVX-512, 0.86 of the copy's rate against 0.58 without and 0.65 at half the
 * distance.
 */
enum { AHEAD_BYTES = 4096 };

typedef struct squares_call {
    const void *x;
    vjp_dtype dtype;
    cpu_split split;
    double *partials;
} squares_call;

/* Half of a native vector. GCC 12 otherwise converts a quarter at a time. */
INLINE native_d widen(native_half_f half) {
#if defined(CPU_ISA_AVX512)
    return (native_d)_mm512_cvtps_pd((__m256)half);
#else
    return __builtin_convertvector(half, native_d);
#endif
}

INLINE vd add_squares(vd sums, vf x) {
    EACH_PART {
        native_half_f half[2];
        memcpy(half, &x.v[p], sizeof half);
        for (int k = 0; k < 2; k++) {
            native_d wide = widen(half[k]);
            sums.v[2 * p + k] = sums.v[2 * p + k] + wide * wide;
        }
    }
    return sums;
}

/* By halves, as vf_sum() does. */
INLINE double sum_lanes(vd a, vd b) {
    double lane[LANES];
    for (int i = 0; i < 2 * PARTS; i++)
        a.v[i] = a.v[i] + b.v[i];
    memcpy(lane, a.v, sizeof lane);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            lane[i] = lane[i] + lane[i + width];
    return lane[0];
}

INLINE void sum_elements(vjp_dtype dtype, const squares_call *call, size_t task) {
    int64_t i = cpu_split_begin(&call->split, task), end = cpu_split_end(&call->split, task);
    vd even = {{{0}}}, odd = {{{0}}};
    for (; i + 2 * LANES <= end; i += 2 * LANES) {
        prefetch_first_level((const char *)at(dtype, call->x, i) + AHEAD_BYTES,
                             2 * LANES * (int64_t)dtype_bytes(dtype));
        even = add_squares(even, vf_load(dtype, call->x, i));
        odd = add_squares(odd, vf_load(dtype, call->x, i + LANES));
    }
    for (; i < end; i += LANES)
        even = add_squares(even, vf_load_part(dtype, call->x, i, end - i));
    call->partials[task] = sum_lanes(even, odd);
}

static void task(void *call, size_t i) {
    const squares_call *c = call;
    BY_DTYPE(c->dtype, sum_elements, c, i);
}

static cpu_split split_of(const vjp_work *work) {
    return element_split(vjp_elements(work, SUM_SQUARES_X), dtype_bytes(work->storage), CPU_MAX_PARTIALS);
}

static size_t workspace(const vjp_work *work) {
    return (size_t)split_of(work).count * sizeof(double);
}

static vjp_status run(const vjp_work *work) {
    squares_call call = {.x = vjp_data(work, SUM_SQUARES_X),
                         .dtype = work->storage,
                         .split = split_of(work),
                         .partials = work->workspace};
    float *y = vjp_data(work, SUM_SQUARES_Y);
    if (!y) return VJP_OK;
    vjp_cpu_for(work, call.split.count, task, &call);
    double sum = 0;
    for (int64_t i = 0; i < call.split.count; i++)
        sum += call.partials[i];
    *y = (float)(vjp_accumulates(work, SUM_SQUARES_Y) ? (double)*y + sum : sum);
    return VJP_OK;
}

const vjp_kernel CPU_NAME(sum_squares)[VJP_PASS_COUNT] = {{run, workspace, VJP_STORAGE_16_32}};

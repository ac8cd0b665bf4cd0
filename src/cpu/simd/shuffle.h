/* SPDX-License-Identifier: MIT */
/*
 * Moving lanes of the virtual vector, and 16 lanes of double. Every function means the same on each instruction set, so
 * that kernels built on them keep their bits.
 */
#ifndef VJP_CPU_SHUFFLE_H
#define VJP_CPU_SHUFFLE_H

#include "cpu/simd/vec.h"

/* Lane numbers for __builtin_shufflevector, which wants them spelled out: a run, and every second one, from `s`. */
#if defined(CPU_ISA_AVX512)
#define RUN(s)      RUN_8(s), RUN_8((s) + 8)
#define RUN_HALF(s) RUN_8(s)
#define EVERY_SECOND(s)                                                                                                \
    s, s + 2, s + 4, s + 6, s + 8, s + 10, s + 12, s + 14, s + 16, s + 18, s + 20, s + 22, s + 24, s + 26, s + 28,     \
        s + 30
#define ZIPPED(s) ZIP_4(s), ZIP_4((s) + 4)
#define SWAPPED   1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#elif defined(CPU_ISA_AVX2)
#define RUN(s)          RUN_8(s)
#define RUN_HALF(s)     RUN_4(s)
#define EVERY_SECOND(s) s, s + 2, s + 4, s + 6, s + 8, s + 10, s + 12, s + 14
#define ZIPPED(s)       ZIP_4(s)
#define SWAPPED         1, 0, 3, 2, 5, 4, 7, 6
#else
#define RUN(s)          RUN_4(s)
#define RUN_HALF(s)     s, s + 1
#define EVERY_SECOND(s) s, s + 2, s + 4, s + 6
#define ZIPPED(s)       s, s + NATIVE_LANES, s + 1, s + NATIVE_LANES + 1
#define SWAPPED         1, 0, 3, 2
#endif
#define RUN_4(s) (s), (s) + 1, (s) + 2, (s) + 3
#define RUN_8(s) RUN_4(s), RUN_4((s) + 4)
#define ZIP_2(s) (s), (s) + NATIVE_LANES, (s) + 1, (s) + NATIVE_LANES + 1
#define ZIP_4(s) ZIP_2(s), ZIP_2((s) + 2)

/* Lanes 2i and 2i + 1 change places. */
INLINE vf vf_swap_pairs(vf a) {
    EACH_PART a.v[p] = __builtin_shufflevector(a.v[p], a.v[p], SWAPPED);
    return a;
}

/* Lanes 0, 2, 4, ... of the 32 lanes of a and b; `odd`: lanes 1, 3, 5, ... */
INLINE vf vf_unzip(vf a, vf b, bool odd) {
    native_f from[2 * PARTS];
    EACH_PART from[p] = a.v[p], from[PARTS + p] = b.v[p];
    vf r;
    EACH_PART r.v[p] = odd ? __builtin_shufflevector(from[2 * p], from[2 * p + 1], EVERY_SECOND(1))
                           : __builtin_shufflevector(from[2 * p], from[2 * p + 1], EVERY_SECOND(0));
    return r;
}

/* The other way: a0 b0 a1 b1 ...; `high`: the second half of those 32 lanes. */
INLINE vf vf_zip(vf a, vf b, bool high) {
    native_f both[2 * PARTS];
    EACH_PART {
        both[2 * p] = __builtin_shufflevector(a.v[p], b.v[p], ZIPPED(0));
        both[2 * p + 1] = __builtin_shufflevector(a.v[p], b.v[p], ZIPPED(NATIVE_LANES / 2));
    }
    vf r;
    EACH_PART r.v[p] = both[(high ? PARTS : 0) + p];
    return r;
}

/* The NATIVE_LANES lanes from `first` on of a followed by b; by = NATIVE_LANES - first is 1, 2, 4 or 8. */
INLINE native_f native_join_high(native_f a, native_f b, int by) {
    switch (by) {
    case 1: return __builtin_shufflevector(a, b, RUN(NATIVE_LANES - 1));
    case 2: return __builtin_shufflevector(a, b, RUN(NATIVE_LANES - 2));
#if defined(CPU_ISA_AVX512)
    case 8: return __builtin_shufflevector(a, b, RUN(NATIVE_LANES - 8));
#endif
    default: return __builtin_shufflevector(a, b, RUN(NATIVE_LANES - 4));
    }
}

/* The NATIVE_LANES lanes from `by` on of a followed by b. */
INLINE native_f native_join_low(native_f a, native_f b, int by) {
    switch (by) {
    case 1: return __builtin_shufflevector(a, b, RUN(1));
    case 2: return __builtin_shufflevector(a, b, RUN(2));
#if defined(CPU_ISA_AVX512)
    case 8: return __builtin_shufflevector(a, b, RUN(8));
#endif
    default: return __builtin_shufflevector(a, b, RUN(4));
    }
}

/* Lane i becomes lane i - by, zero where there is none; by is 1, 2, 4 or 8. */
INLINE vf vf_shift_up(vf a, int by) {
    vf r;
    native_f zero = {0};
    int parts = by / NATIVE_LANES;
    EACH_PART r.v[p] = parts ? p >= parts ? a.v[p - parts] : zero : native_join_high(p ? a.v[p - 1] : zero, a.v[p], by);
    return r;
}

/* Lane i becomes lane i + by, zero where there is none. */
INLINE vf vf_shift_down(vf a, int by) {
    vf r;
    native_f zero = {0};
    int parts = by / NATIVE_LANES;
    EACH_PART r.v[p] = parts ? p + parts < PARTS ? a.v[p + parts] : zero
                             : native_join_low(a.v[p], p + 1 < PARTS ? a.v[p + 1] : zero, by);
    return r;
}

/*
 * a + vf_shift_up(a, by), and the same downwards, but for native vectors that nothing is shifted into: they stay as
 * they are, with the -0 that adding zero would have made 0.
 */
INLINE vf vf_add_up(vf a, int by) {
    int parts = by / NATIVE_LANES;
    if (!parts) return vf_add(a, vf_shift_up(a, by));
    vf r = a;
    for (int p = parts; p < PARTS; p++)
        r.v[p] = a.v[p] + a.v[p - parts];
    return r;
}

INLINE vf vf_add_down(vf a, int by) {
    int parts = by / NATIVE_LANES;
    if (!parts) return vf_add(a, vf_shift_down(a, by));
    vf r = a;
    for (int p = 0; p + parts < PARTS; p++)
        r.v[p] = a.v[p] + a.v[p + parts];
    return r;
}

/* ---- 16 lanes of double ------------------------------------------------------------------------------ */

typedef double native_d __attribute__((vector_size(NATIVE_LANES * 4)));
typedef float native_half_f __attribute__((vector_size(NATIVE_LANES * 2)));

typedef struct vd {
    native_d v[2 * PARTS];
} vd;

INLINE vd vd_zero(void) {
    vd r;
    for (int p = 0; p < 2 * PARTS; p++)
        r.v[p] = (native_d){0};
    return r;
}

INLINE vd vd_of(vf a) {
    vd r;
    EACH_PART {
        native_half_f low = __builtin_shufflevector(a.v[p], a.v[p], RUN_HALF(0));
        native_half_f high = __builtin_shufflevector(a.v[p], a.v[p], RUN_HALF(NATIVE_LANES / 2));
        r.v[2 * p] = __builtin_convertvector(low, native_d);
        r.v[2 * p + 1] = __builtin_convertvector(high, native_d);
    }
    return r;
}

INLINE vf vd_round(vd a) {
    vf r;
    EACH_PART {
        native_half_f low = __builtin_convertvector(a.v[2 * p], native_half_f);
        native_half_f high = __builtin_convertvector(a.v[2 * p + 1], native_half_f);
        r.v[p] = __builtin_shufflevector(low, high, RUN(0));
    }
    return r;
}

INLINE vd vd_add(vd a, vd b) {
    for (int p = 0; p < 2 * PARTS; p++)
        a.v[p] += b.v[p];
    return a;
}

INLINE vd vd_scale(vd a, double by) {
    for (int p = 0; p < 2 * PARTS; p++)
        a.v[p] *= by;
    return a;
}

/* Part by part: GCC copies a whole struct through the stack in small pieces, and the load then waits for them. */
INLINE vd vd_load(const double *from) {
    vd r;
    for (int p = 0; p < 2 * PARTS; p++)
        memcpy(&r.v[p], from + p * (NATIVE_LANES / 2), sizeof r.v[p]);
    return r;
}

INLINE void vd_store(double *to, vd a) {
    for (int p = 0; p < 2 * PARTS; p++)
        memcpy(to + p * (NATIVE_LANES / 2), &a.v[p], sizeof a.v[p]);
}

#endif

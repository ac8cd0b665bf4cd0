/* SPDX-License-Identifier: MIT */
/*
 * Definitions shared by the FMA and AMX engines: the destination of a register block's sums, prefetch ranges, and the
 * transposition of a square of vectors.
 */
#ifndef VJP_CPU_GEMM_ENGINE_H
#define VJP_CPU_GEMM_ENGINE_H

#include "cpu/gemm/gemm.h"
#include "cpu/simd/vec.h"

/*
 * Two ranges of packed panels that the next slice of K reads. Other cores wrote them, so they come from the last-level
 * cache or another core's. While one pair of panels is multiplied, the next GEMM_PREFETCH bytes of each range are
 * prefetched into the second-level cache, a few lines at a time. `skip` bytes separate the lines of a strided range.
 */
typedef struct gemm_prefetch {
    const char *a, *a_end, *b, *b_end;
    int64_t skip;
} gemm_prefetch;

/*
 * An engine may pack one number as several limbs that add up to it. Products of limbs i and j count where i + j < kept.
 */
typedef struct gemm_limbs {
    int64_t a, b, kept;
} gemm_limbs;

/* Destination of a block of sums, and the values that they are added to (NULL: none; often the destination itself). */
typedef struct gemm_target {
    const float *from;
    float *to;
    int64_t from_stride, to_stride;
} gemm_target;

#if defined(CPU_ISA_AVX512)
#define ZIP_LOW  0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(CPU_ISA_AVX2)
#define ZIP_LOW  0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define ZIP_LOW  0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#endif

/*
 * Transposes a square of native vectors by interleaving each row with the row half a square below, log2(lanes) times.
 */
INLINE void native_transpose(native_f row[NATIVE_LANES]) {
    UNROLL for (int width = 1; width < NATIVE_LANES; width *= 2) {
        native_f next[NATIVE_LANES];
        UNROLL for (int i = 0; i < NATIVE_LANES / 2; i++) {
            next[2 * i] = __builtin_shufflevector(row[i], row[i + NATIVE_LANES / 2], ZIP_LOW);
            next[2 * i + 1] = __builtin_shufflevector(row[i], row[i + NATIVE_LANES / 2], ZIP_HIGH);
        }
        UNROLL for (int i = 0; i < NATIVE_LANES; i++) row[i] = next[i];
    }
}

#endif

/*
 * What the engines of the matrix products have in common: where the sums of two panels go, what is called in meanwhile,
 * and the transposition of a square of vectors.
 */
#ifndef VJP_CPU_GEMM_ENGINE_H
#define VJP_CPU_GEMM_ENGINE_H

#include "cpu/simd/vec.h"

/*
 * What the next run of terms will read: two stretches of packed panels that other cores have written, so that they come
 * from the last-level cache or out of another core's. While one pair of panels is multiplied, the next GEMM_AHEAD bytes
 * of each are called into the second-level cache, some lines at a time. `skip` bytes lie between the lines of a
 * stretch that is not one piece.
 */
enum { GEMM_LINE = 64 };

typedef struct gemm_ahead {
    const char *a, *a_end, *b, *b_end;
    int64_t skip;
} gemm_ahead;

/* How many numbers an engine packs for one of each operand; the products of pieces i and j with i + j < kept count. */
typedef struct gemm_pieces {
    int64_t a, b, kept;
} gemm_pieces;

/* Where a small block of sums goes, and what it is added to (NULL: nothing; else often the same place). */
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

/* Transposes a square of native vectors: zipping each row with the one half the square below, log2(lanes) times. */
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

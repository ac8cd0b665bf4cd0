/* SPDX-License-Identifier: MIT */
/*
 * What the products of few rows have in common (gemm_few_amx.h, gemm_few_fma.h): how many rows of b are read side by
 * side, and how they are prefetched.
 *
 * With 128-bit vectors 16 rows already make enough chains of sums. Rows of 2048 numbers in 16 bits are 4 KiB apart and
 * share four sets of a first-level cache of 64 KiB and four ways: of 16 rows each line stays until it is used up, of 32
 * it does not (Neoverse V1, one core, bf16: 15 and 7 GB/s). There the hardware prefetcher follows all rows, and
 * prefetching by software makes it slower.
 */
#ifndef VJP_CPU_GEMM_FEW_H
#define VJP_CPU_GEMM_FEW_H

#include "cpu/gemm/gemm.h"
#include "cpu/simd/vec.h"

/*
 * How far ahead of its use each row of b is prefetched, in bytes; 0: not at all. 32 rows side by side are more than the
 * hardware prefetcher follows. From 256 to 4096 it makes no difference that can be measured.
 */
enum { FEW_AHEAD = NATIVE_LANES == 4 ? 0 : 1024, FEW_BLOCK_ROWS = NATIVE_LANES == 4 ? 16 : 32 };

/* Prefetches one line of each row of a block, ahead of term t; behind the end of a row, of that of the next block. */
INLINE void prefetch_few(const void *block, int64_t number, int64_t stride, int64_t k, int64_t t) {
    if (!FEW_AHEAD) return;
    const char *ahead = (const char *)block + t * number + FEW_AHEAD;
    if (t * number + FEW_AHEAD >= k * number) ahead += (FEW_BLOCK_ROWS * stride - k) * number;
    for (int64_t j = 0; j < FEW_BLOCK_ROWS; j++)
        __builtin_prefetch(ahead + j * stride * number, 0, 2);
}

#endif

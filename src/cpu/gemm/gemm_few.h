/* SPDX-License-Identifier: MIT */
/* What the products of few rows have in common (gemm_few_amx.h, gemm_few_fma.h): how rows of b are prefetched. */
#ifndef VJP_CPU_GEMM_FEW_H
#define VJP_CPU_GEMM_FEW_H

#include "cpu/gemm/gemm.h"
#include "cpu/simd/vec.h"

/*
 * How far ahead of its use each row of b is prefetched, in bytes: 32 rows are read side by side, more than the hardware
 * prefetcher follows. From 256 to 4096 it makes no difference that can be measured.
 */
enum { FEW_AHEAD = 1024, FEW_BLOCK_ROWS = 32 };

/* Prefetches one line of each row of a block, ahead of term t; behind the end of a row, of that of the next block. */
INLINE void prefetch_few(const void *block, int64_t number, int64_t stride, int64_t k, int64_t t) {
    const char *ahead = (const char *)block + t * number + FEW_AHEAD;
    if (t * number + FEW_AHEAD >= k * number) ahead += (FEW_BLOCK_ROWS * stride - k) * number;
    for (int64_t j = 0; j < FEW_BLOCK_ROWS; j++)
        __builtin_prefetch(ahead + j * stride * number, 0, 2);
}

#endif

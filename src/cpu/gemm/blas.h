/* SPDX-License-Identifier: MIT */
/*
 * Matrix products by the BLAS found when building. Compiled once for all instruction sets. Each call runs on the
 * calling thread alone: the pool divides a product into tiles, and BLAS never starts threads of its own.
 */
#ifndef VJP_CPU_BLAS_H
#define VJP_CPU_BLAS_H

#include <stdbool.h>
#include <stdint.h>

/* "BLIS 0.9.0", "OpenBLAS 0.3.21"; NULL if the library was built without one. */
const char *vjp_blas_name(void);

/* Limits BLAS to the calling thread and makes it allocate its buffers now, so that no later call allocates. */
void vjp_blas_prepare(void);

/* c = alpha a b + beta c, row-major, f32; a is [m, k] or transposed [k, m], b is [k, n] or transposed [n, k]. */
void vjp_blas_sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float *a,
                    int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc);

#endif

/* SPDX-License-Identifier: MIT */
/*
 * BLIS or OpenBLAS behind blas.h. A call runs on the calling thread, whatever OMP_NUM_THREADS and similar variables
 * say. BLIS takes that limit with each call, through its expert interface, and nothing in the process changes. OpenBLAS
 * has a process-wide setting, made when a device is opened; where it was built on OpenMP, the calling thread's OpenMP
 * setting counts instead, and is restored after each call.
 *
 * BLIS 0.9 allocates a few bytes in every call, whatever is set; OpenBLAS does not. The built-in kernel keeps the
 * promise not to allocate, so it is the default and BLAS an option.
 */
#include "cpu/gemm/blas.h"

#include <stddef.h>

#if defined(VJP_HAVE_BLIS)

#include <blis.h>

const char *vjp_blas_name(void) {
#ifdef VJP_BLIS_VERSION
    return "BLIS " VJP_BLIS_VERSION;
#else
    return "BLIS";
#endif
}

void vjp_blas_sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float *a,
                    int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
    rntm_t one_thread;
    bli_rntm_init(&one_thread);
    bli_rntm_set_num_threads(1, &one_thread);
    bli_sgemm_ex(transpose_a ? BLIS_TRANSPOSE : BLIS_NO_TRANSPOSE, transpose_b ? BLIS_TRANSPOSE : BLIS_NO_TRANSPOSE,
                 (dim_t)m, (dim_t)n, (dim_t)k, &alpha, (float *)a, (inc_t)lda, 1, (float *)b, (inc_t)ldb, 1, &beta, c,
                 (inc_t)ldc, 1, NULL, &one_thread);
}

/* BLIS initialises itself in its first call, and allocates packing buffers in the first call large enough to pack. */
void vjp_blas_prepare(void) {
    bli_init();
}

#elif defined(VJP_HAVE_OPENBLAS)

#include <cblas.h>

/* Part of the OpenBLAS interface, but not declared by every cblas.h. */
extern char *openblas_get_config(void);
extern int openblas_get_parallel(void);
extern void openblas_set_num_threads(int threads);

/* Present where OpenBLAS was built on OpenMP. */
extern void omp_set_num_threads(int threads) __attribute__((weak));
extern int omp_get_max_threads(void) __attribute__((weak));

enum { OPENBLAS_ON_OPENMP = 2 };

/* "OpenBLAS 0.3.21 ... Haswell ...": version, options and the processor whose kernels it chose. */
const char *vjp_blas_name(void) {
    return openblas_get_config();
}

void vjp_blas_prepare(void) {
    openblas_set_num_threads(1);
}

void vjp_blas_sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float *a,
                    int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
    bool openmp = openblas_get_parallel() == OPENBLAS_ON_OPENMP && omp_set_num_threads && omp_get_max_threads;
    int threads = openmp ? omp_get_max_threads() : 1;
    if (threads != 1) omp_set_num_threads(1);
    cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans, transpose_b ? CblasTrans : CblasNoTrans, (int)m,
                (int)n, (int)k, alpha, a, (int)lda, b, (int)ldb, beta, c, (int)ldc);
    if (threads != 1) omp_set_num_threads(threads);
}

#else

const char *vjp_blas_name(void) {
    return NULL;
}

void vjp_blas_prepare(void) {
}

/* Never called: a device accepts BLAS only where vjp_blas_name() returns one. */
void vjp_blas_sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float *a,
                    int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
    (void)transpose_a, (void)transpose_b, (void)m, (void)n, (void)k, (void)alpha, (void)a, (void)lda, (void)b;
    (void)ldb, (void)beta, (void)c, (void)ldc;
}

#endif

/* SPDX-License-Identifier: MIT */
/* The functions of vec.h that test_vectors tests; compiled once for each instruction set, as the kernels are. */
#ifndef VJP_TESTS_VEC_PROBE_H
#define VJP_TESTS_VEC_PROBE_H

#include <stdint.h>

#include "vjp.h"

typedef struct vec_probe {
    const char *name;
    void (*load)(vjp_dtype dtype, const void *from, int64_t n, float *to);  /* by vectors and a part of one */
    void (*store)(vjp_dtype dtype, void *to, int64_t n, const float *from); /* likewise */
    void (*load_each)(vjp_dtype dtype, const void *from, int64_t n, float *to);
    void (*store_each)(vjp_dtype dtype, void *to, int64_t n, const float *from);
    void (*stream)(vjp_dtype dtype, void *to, int64_t n, const float *from); /* n a multiple of 16 */
    float (*sum)(const float *sixteen);
    float (*fma)(float a, float b, float c);
} vec_probe;

extern const vec_probe vjp_cpu_vec_probe_plain, vjp_cpu_vec_probe_avx2, vjp_cpu_vec_probe_avx512,
    vjp_cpu_vec_probe_neon;

#endif

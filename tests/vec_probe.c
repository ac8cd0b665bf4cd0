/* SPDX-License-Identifier: MIT */
/* vec.h's loads, stores and sums as ordinary functions, one set of them for each instruction set. */
#include "vec_probe.h"

#include "cpu/cpu.h"
#include "cpu/simd/vec.h"

/* dtype is a constant in every kernel, and vec.h is written for that. */
#define EACH_DTYPE(call)                                                                                               \
    do {                                                                                                               \
        if (dtype == VJP_F32) call(VJP_F32);                                                                           \
        if (dtype == VJP_BF16) call(VJP_BF16);                                                                         \
        if (dtype == VJP_F16) call(VJP_F16);                                                                           \
    } while (0)

INLINE void load_as(vjp_dtype dtype, const void *from, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i += LANES)
        vf_store_part(VJP_F32, to, i, n - i, vf_load_part(dtype, from, i, n - i));
}

INLINE void store_as(vjp_dtype dtype, void *to, int64_t n, const float *from) {
    for (int64_t i = 0; i < n; i += LANES)
        vf_store_part(dtype, to, i, n - i, vf_load_part(VJP_F32, from, i, n - i));
}

INLINE void stream_as(vjp_dtype dtype, void *to, int64_t n, const float *from) {
    for (int64_t i = 0; i < n; i += LANES)
        vf_stream(dtype, to, i, vf_load(VJP_F32, from, i));
    vf_stream_done();
}

static void load(vjp_dtype dtype, const void *from, int64_t n, float *to) {
#define CALL(constant) load_as(constant, from, n, to)
    EACH_DTYPE(CALL);
#undef CALL
}

static void store(vjp_dtype dtype, void *to, int64_t n, const float *from) {
#define CALL(constant) store_as(constant, to, n, from)
    EACH_DTYPE(CALL);
#undef CALL
}

static void stream(vjp_dtype dtype, void *to, int64_t n, const float *from) {
#define CALL(constant) stream_as(constant, to, n, from)
    EACH_DTYPE(CALL);
#undef CALL
}

static void load_each(vjp_dtype dtype, const void *from, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i++)
        to[i] = f32_load(dtype, from, i);
}

static void store_each(vjp_dtype dtype, void *to, int64_t n, const float *from) {
    for (int64_t i = 0; i < n; i++)
        f32_store(dtype, to, i, from[i]);
}

static float sum(const float *sixteen) {
    return vf_sum(vf_load(VJP_F32, sixteen, 0));
}

static float fma_of(float a, float b, float c) {
    float lanes[LANES];
    vf_store(VJP_F32, lanes, 0, vf_fma(vf_set(a), vf_set(b), vf_set(c)));
    return lanes[LANES - 1] == f32_fma(a, b, c) ? lanes[0] : lanes[0] + 1; /* all lanes, and the scalar one */
}

#if defined(CPU_ISA_AVX512)
#define SET "avx512"
#elif defined(CPU_ISA_AVX2)
#define SET "avx2"
#elif defined(CPU_ISA_NEON)
#define SET "neon"
#else
#define SET "plain"
#endif

const vec_probe CPU_NAME(vec_probe) = {SET, load, store, load_each, store_each, stream, sum, fma_of};

/* SPDX-License-Identifier: MIT */
/*
 * The virtual vector of the CPU kernels: vf, 16 f32 lanes, made of native vectors (1 AVX-512, 2 AVX2, 4 NEON, wasm or
 * plain). A kernel is written once over it and compiled once for each instruction set; the chunk of work, the
 * lane a number falls in and the order of every addition are the same in all of them, so the bits are too wherever
 * there is FMA. A struct of native vectors, because GCC 12 turns one 64-byte vector type into stack traffic on NEON.
 *
 * The storage type is an argument of loads and stores. Kernels pass it as a constant through always-inline
 * functions, so the switch is gone when the code is made.
 *
 * FMA is written out (vf_fma); contraction is off for the whole build. Only `plain` on a processor without FMA rounds
 * twice there. The set `wasm` is WebAssembly with relaxed SIMD, whose multiply-add the browser fuses where the
 * processor can; `plain` is also WebAssembly without it.
 */
#ifndef VJP_CPU_VEC_H
#define VJP_CPU_VEC_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "core/half.h"
#include "vjp.h"

#if defined(CPU_ISA_AVX512) || defined(CPU_ISA_AVX2)
#include <immintrin.h>
#elif defined(CPU_ISA_NEON)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__wasm_simd128__)
#include <wasm_simd128.h>
#endif

#if defined(CPU_ISA_AVX512)
enum { NATIVE_LANES = 16 };
#elif defined(CPU_ISA_AVX2)
enum { NATIVE_LANES = 8 };
#else
enum { NATIVE_LANES = 4 };
#endif

enum { LANES = 16, PARTS = LANES / NATIVE_LANES };

typedef float native_f __attribute__((vector_size(NATIVE_LANES * 4)));
typedef int32_t native_i __attribute__((vector_size(NATIVE_LANES * 4)));

typedef struct vf {
    native_f v[PARTS];
} vf;

/* 16 int32 lanes; also what a comparison gives: -1 where true, 0 where false. */
typedef struct vi {
    native_i v[PARTS];
} vi;

/*
 * CPU_FAST_BUILD: how quickly a kernel compiles matters more than its speed, as with sanitizers and in tests. Then the
 * compiler decides what to inline. Forced, it took GCC for NEON 118 seconds at -O1 instead of 17 for all kernels, and
 * clang with the address sanitizer 13 for norm.c instead of half of one.
 */
#if defined(CPU_FAST_BUILD) || !defined(__OPTIMIZE__)
#define INLINE static inline __attribute__((unused))
#else
#define INLINE static inline __attribute__((always_inline, unused))
#endif

/*
 * Code that runs once a row or only on `plain` stays out of line: inlined into every variant of every kernel it made
 * compiling ten times slower and nothing faster.
 */
#define OUTLINE static __attribute__((noinline, unused))
#if defined(CPU_ISA_AVX512) || defined(CPU_ISA_AVX2) || defined(CPU_ISA_NEON) || defined(CPU_ISA_WASM)
#define CONVERT INLINE
#else
#define CONVERT OUTLINE
#endif

/* Whether a loop has one variant for all stores and sizes. It compiles in a fraction of the time; few run `plain`. */
#if defined(CPU_ISA_PLAIN) && !defined(__wasm__)
enum { ONE_VARIANT = 1 };
#else
enum { ONE_VARIANT = 0 };
#endif

#if defined(CPU_ISA_WASM) /* converts f16 number by number */
#define CONVERT_F16 OUTLINE
#else
#define CONVERT_F16 CONVERT
#endif

#define EACH_PART for (int p = 0; p < PARTS; p++)

/*
 * Before a loop of few rounds, their number a constant, over an array that is to stay in registers. Not in a fast
 * build: sanitizers keep it in memory, and clang needs minutes for all their checks of the unrolled loops.
 */
#if defined(CPU_FAST_BUILD)
#define UNROLL
#elif defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* ---- Arithmetic -------------------------------------------------------------------------------------- */

INLINE vf vf_set(float value) {
    vf r;
    EACH_PART r.v[p] = value - (native_f){0};
    return r;
}

INLINE vf vf_zero(void) {
    vf r;
    EACH_PART r.v[p] = (native_f){0};
    return r;
}

INLINE vf vf_add(vf a, vf b) {
    EACH_PART a.v[p] = a.v[p] + b.v[p];
    return a;
}

INLINE vf vf_sub(vf a, vf b) {
    EACH_PART a.v[p] = a.v[p] - b.v[p];
    return a;
}

INLINE vf vf_mul(vf a, vf b) {
    EACH_PART a.v[p] = a.v[p] * b.v[p];
    return a;
}

INLINE vf vf_div(vf a, vf b) {
    EACH_PART a.v[p] = a.v[p] / b.v[p];
    return a;
}

INLINE vf vf_neg(vf a) {
    EACH_PART a.v[p] = -a.v[p];
    return a;
}

/* The square root, correctly rounded on every set, so the bits are equal. */
INLINE vf vf_sqrt(vf a) {
#if defined(CPU_ISA_AVX512)
    EACH_PART a.v[p] = (native_f)_mm512_sqrt_ps((__m512)a.v[p]);
#elif defined(CPU_ISA_AVX2)
    EACH_PART a.v[p] = (native_f)_mm256_sqrt_ps((__m256)a.v[p]);
#elif defined(CPU_ISA_NEON)
    EACH_PART a.v[p] = (native_f)vsqrtq_f32((float32x4_t)a.v[p]);
#elif defined(__wasm_simd128__)
    EACH_PART a.v[p] = (native_f)wasm_f32x4_sqrt((v128_t)a.v[p]);
#else
    for (int i = 0; i < LANES; i++)
        a.v[i / NATIVE_LANES][i % NATIVE_LANES] = __builtin_sqrtf(a.v[i / NATIVE_LANES][i % NATIVE_LANES]);
#endif
    return a;
}

INLINE native_f native_fma(native_f a, native_f b, native_f c) {
#if defined(CPU_ISA_AVX512)
    return (native_f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(CPU_ISA_AVX2)
    return (native_f)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(CPU_ISA_NEON)
    return (native_f)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(CPU_ISA_WASM)
    return (native_f)wasm_f32x4_relaxed_madd((v128_t)a, (v128_t)b, (v128_t)c);
#elif defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
    for (int i = 0; i < NATIVE_LANES; i++)
        c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

/* a * b + c, rounded once. */
INLINE vf vf_fma(vf a, vf b, vf c) {
    EACH_PART c.v[p] = native_fma(a.v[p], b.v[p], c.v[p]);
    return c;
}

/* The same for one number, with the same rounding as vf_fma. */
INLINE float f32_fma(float a, float b, float c) {
#if defined(CPU_ISA_AVX512) || defined(CPU_ISA_AVX2) || defined(CPU_ISA_NEON) || defined(__FP_FAST_FMAF) ||            \
    defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#elif defined(CPU_ISA_WASM)
    return native_fma((native_f){a}, (native_f){b}, (native_f){c})[0];
#else
    return a * b + c;
#endif
}

/* The sum of the 16 lanes, by halves: (i, i+8), (i, i+4), (i, i+2), (i, i+1). */
INLINE float vf_sum(vf a) {
#if defined(CPU_ISA_AVX512)
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256((__m512)a.v[0]),
                             _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)a.v[0]), 1)));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    typedef float quad __attribute__((vector_size(16)));
    quad s = (quad)q;
#elif defined(CPU_ISA_AVX2)
    __m256 h = (__m256)(a.v[0] + a.v[1]);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    typedef float quad __attribute__((vector_size(16)));
    quad s = (quad)q;
#else
    native_f s = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
#endif
    return (s[0] + s[2]) + (s[1] + s[3]);
}

/* ---- Comparing and choosing -------------------------------------------------------------------------- */

/* The larger of each pair; b where either is a NaN, so vf_max(bound, x) keeps a NaN and vf_max(x, sofar) drops it. */
INLINE vf vf_max(vf a, vf b) {
#if defined(CPU_ISA_AVX512)
    EACH_PART a.v[p] = (native_f)_mm512_max_ps((__m512)a.v[p], (__m512)b.v[p]);
#elif defined(CPU_ISA_AVX2)
    EACH_PART a.v[p] = (native_f)_mm256_max_ps((__m256)a.v[p], (__m256)b.v[p]);
#elif defined(__wasm_simd128__)
    EACH_PART a.v[p] = (native_f)wasm_f32x4_pmax((v128_t)b.v[p], (v128_t)a.v[p]); /* below becomes relaxed_max */
#else
    EACH_PART {
        native_i more = (native_i)(a.v[p] > b.v[p]);
        a.v[p] = (native_f)((more & (native_i)a.v[p]) | (~more & (native_i)b.v[p]));
    }
#endif
    return a;
}

/* The smaller of each pair; b where either is a NaN. */
INLINE vf vf_min(vf a, vf b) {
#if defined(CPU_ISA_AVX512)
    EACH_PART a.v[p] = (native_f)_mm512_min_ps((__m512)a.v[p], (__m512)b.v[p]);
#elif defined(CPU_ISA_AVX2)
    EACH_PART a.v[p] = (native_f)_mm256_min_ps((__m256)a.v[p], (__m256)b.v[p]);
#elif defined(__wasm_simd128__)
    EACH_PART a.v[p] = (native_f)wasm_f32x4_pmin((v128_t)b.v[p], (v128_t)a.v[p]);
#else
    EACH_PART {
        native_i less = (native_i)(a.v[p] < b.v[p]);
        a.v[p] = (native_f)((less & (native_i)a.v[p]) | (~less & (native_i)b.v[p]));
    }
#endif
    return a;
}

/* The largest of the 16 lanes, none of which is a NaN. */
INLINE float vf_max_lane(vf a) {
#if defined(CPU_ISA_AVX512)
    __m256 h = _mm256_max_ps(_mm512_castps512_ps256((__m512)a.v[0]),
                             _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)a.v[0]), 1)));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    typedef float quad __attribute__((vector_size(16)));
    quad s = (quad)q;
#elif defined(CPU_ISA_AVX2)
    __m256 h = _mm256_max_ps((__m256)a.v[0], (__m256)a.v[1]);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    typedef float quad __attribute__((vector_size(16)));
    quad s = (quad)q;
#elif defined(__wasm_simd128__)
    native_f s = a.v[0];
    for (int p = 1; p < PARTS; p++)
        s = (native_f)wasm_f32x4_pmax((v128_t)s, (v128_t)a.v[p]);
#else
    native_f s = a.v[0];
    for (int p = 1; p < PARTS; p++)
        for (int i = 0; i < NATIVE_LANES; i++)
            s[i] = a.v[p][i] > s[i] ? a.v[p][i] : s[i];
#endif
    float first = s[0] > s[2] ? s[0] : s[2], second = s[1] > s[3] ? s[1] : s[3];
    return first > second ? first : second;
}

INLINE vi vf_less(vf a, vf b) {
    vi r;
    EACH_PART r.v[p] = (native_i)(a.v[p] < b.v[p]);
    return r;
}

INLINE vi vf_greater(vf a, vf b) {
    return vf_less(b, a);
}

INLINE vi vf_equal(vf a, vf b) {
    vi r;
    EACH_PART r.v[p] = (native_i)(a.v[p] == b.v[p]);
    return r;
}

INLINE vi vf_is_nan(vf a) {
    vi r;
    EACH_PART r.v[p] = (native_i)(a.v[p] != a.v[p]);
    return r;
}

/* Has its sign bit set: -0 and a NaN may have. */
INLINE vi vf_signed(vf a) {
    vi r;
    EACH_PART r.v[p] = (native_i)a.v[p] >> 31;
    return r;
}

INLINE vi vi_or(vi a, vi b) {
    EACH_PART a.v[p] |= b.v[p];
    return a;
}

INLINE vi vi_and(vi a, vi b) {
    EACH_PART a.v[p] &= b.v[p];
    return a;
}

INLINE vi vi_not(vi a) {
    EACH_PART a.v[p] = ~a.v[p];
    return a;
}

/* True in the first n lanes, n <= 16. */
INLINE vi vi_first(int64_t n) {
    static const int32_t mask[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    vi r;
    EACH_PART memcpy(&r.v[p], mask + LANES - n + p * NATIVE_LANES, sizeof r.v[p]);
    return r;
}

INLINE vi vi_set(int32_t value) {
    vi r;
    EACH_PART r.v[p] = value - (native_i){0};
    return r;
}

INLINE vi vi_add(vi a, vi b) {
    EACH_PART a.v[p] += b.v[p];
    return a;
}

/* mask ? a : b */
INLINE vf vf_select(vi mask, vf a, vf b) {
    vf r;
    EACH_PART r.v[p] = (native_f)((mask.v[p] & (native_i)a.v[p]) | (~mask.v[p] & (native_i)b.v[p]));
    return r;
}

INLINE vi vi_select(vi mask, vi a, vi b) {
    vi r;
    EACH_PART r.v[p] = (mask.v[p] & a.v[p]) | (~mask.v[p] & b.v[p]);
    return r;
}

INLINE vf vf_abs(vf a) {
    EACH_PART a.v[p] = (native_f)((native_i)a.v[p] & 0x7fffffff);
    return a;
}

/* The lane's magnitude is a's, its sign b's. */
INLINE vf vf_copysign(vf a, vf b) {
    EACH_PART a.v[p] =
        (native_f)(((native_i)a.v[p] & 0x7fffffff) | ((native_i)b.v[p] & (native_i)(INT32_MIN - (native_i){0})));
    return a;
}

INLINE vi vf_bits(vf a) {
    vi r;
    EACH_PART r.v[p] = (native_i)a.v[p];
    return r;
}

INLINE vf vi_as_vf(vi a) {
    vf r;
    EACH_PART r.v[p] = (native_f)a.v[p];
    return r;
}

INLINE vi vi_shift_left(vi a, int bits) {
    EACH_PART a.v[p] = a.v[p] << bits;
    return a;
}

INLINE bool vi_any(vi a) {
    native_i any = a.v[0];
    for (int p = 1; p < PARTS; p++)
        any |= a.v[p];
#if defined(CPU_ISA_AVX512)
    return _mm512_test_epi32_mask((__m512i)any, (__m512i)any) != 0;
#elif defined(__wasm_simd128__)
    return wasm_v128_any_true((v128_t)any);
#else
    int32_t r = 0;
    for (int i = 0; i < NATIVE_LANES; i++)
        r |= any[i];
    return r != 0;
#endif
}

/* ---- Loading and storing by storage type ------------------------------------------------------------- */

INLINE size_t dtype_bytes(vjp_dtype dtype) {
    return dtype == VJP_F32 ? 4 : 2;
}

CONVERT native_f native_load_bf16(const uint16_t *from) {
#if defined(CPU_ISA_AVX512)
    return (native_f)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif defined(CPU_ISA_AVX2)
    return (native_f)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#elif defined(CPU_ISA_NEON)
    return (native_f)vshll_n_u16(vld1_u16(from), 16);
#elif defined(__wasm_simd128__)
    return (native_f)wasm_i32x4_shl(wasm_u32x4_load16x4(from), 16);
#else
    return (native_f){vjp_bf16_to_f32(from[0]), vjp_bf16_to_f32(from[1]), vjp_bf16_to_f32(from[2]),
                      vjp_bf16_to_f32(from[3])};
#endif
}

CONVERT_F16 native_f native_load_f16(const uint16_t *from) {
#if defined(CPU_ISA_AVX512)
    return (native_f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(CPU_ISA_AVX2)
    return (native_f)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(CPU_ISA_NEON)
    return (native_f)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
    return (native_f){vjp_f16_to_f32(from[0]), vjp_f16_to_f32(from[1]), vjp_f16_to_f32(from[2]),
                      vjp_f16_to_f32(from[3])};
#endif
}

/* Round to nearest even in the bits; a NaN is made quiet instead of rounded into Inf. */
INLINE native_i native_round_bf16(native_f a) {
    native_i bits = (native_i)a;
    typedef uint32_t native_u __attribute__((vector_size(NATIVE_LANES * 4)));
    native_i rounded = (native_i)((native_u)bits + 0x7fff + (((native_u)bits >> 16) & 1)); /* a NaN may wrap */
    native_i nan = (native_i)(a != a);
    return ((nan & (bits | 0x400000)) | (~nan & rounded)) >> 16;
}

CONVERT void native_store_bf16(uint16_t *to, native_f a) {
#if defined(CPU_ISA_AVX512)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)native_round_bf16(a)));
#elif defined(CPU_ISA_AVX2)
    __m256i bits = (__m256i)(native_round_bf16(a) & 0xffff);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(packed));
#elif defined(CPU_ISA_NEON)
    vst1_u16(to, vmovn_u32((uint32x4_t)native_round_bf16(a)));
#elif defined(__wasm_simd128__)
    v128_t bits = (v128_t)(native_round_bf16(a) & 0xffff);
    wasm_v128_store64_lane(to, wasm_u16x8_narrow_i32x4(bits, bits), 0);
#else
    native_i bits = native_round_bf16(a);
    for (int i = 0; i < NATIVE_LANES; i++)
        to[i] = (uint16_t)bits[i];
#endif
}

CONVERT_F16 void native_store_f16(uint16_t *to, native_f a) {
#if defined(CPU_ISA_AVX512)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT));
#elif defined(CPU_ISA_AVX2)
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT));
#elif defined(CPU_ISA_NEON)
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)a)));
#else
    for (int i = 0; i < NATIVE_LANES; i++)
        to[i] = vjp_f32_to_f16(a[i]);
#endif
}

/* Elements [i, i + 16) of an array of f32, bf16 or f16. */
INLINE vf vf_load(vjp_dtype dtype, const void *from, int64_t i) {
    vf r;
    switch (dtype) {
    case VJP_BF16: EACH_PART r.v[p] = native_load_bf16((const uint16_t *)from + i + p * NATIVE_LANES); break;
    case VJP_F16: EACH_PART r.v[p] = native_load_f16((const uint16_t *)from + i + p * NATIVE_LANES); break;
    default: EACH_PART memcpy(&r.v[p], (const float *)from + i + p * NATIVE_LANES, sizeof r.v[p]); break;
    }
    return r;
}

INLINE void vf_store(vjp_dtype dtype, void *to, int64_t i, vf a) {
    switch (dtype) {
    case VJP_BF16: EACH_PART native_store_bf16((uint16_t *)to + i + p * NATIVE_LANES, a.v[p]); break;
    case VJP_F16: EACH_PART native_store_f16((uint16_t *)to + i + p * NATIVE_LANES, a.v[p]); break;
    default: EACH_PART memcpy((float *)to + i + p * NATIVE_LANES, &a.v[p], sizeof a.v[p]); break;
    }
}

/* Part of a vector through a buffer, one function for each storage type. */
INLINE vf load_part_of(vjp_dtype dtype, const void *from, int64_t n) {
    char buffer[LANES * 4] = {0};
    memcpy(buffer, from, (size_t)n * dtype_bytes(dtype));
    return vf_load(dtype, buffer, 0);
}

INLINE void store_part_of(vjp_dtype dtype, void *to, int64_t n, vf a) {
    char buffer[LANES * 4];
    vf_store(dtype, buffer, 0, a);
    memcpy(to, buffer, (size_t)n * dtype_bytes(dtype));
}

OUTLINE vf load_part_f32(const float *from, int64_t n) {
    return load_part_of(VJP_F32, from, n);
}

OUTLINE vf load_part_bf16(const uint16_t *from, int64_t n) {
    return load_part_of(VJP_BF16, from, n);
}

OUTLINE vf load_part_f16(const uint16_t *from, int64_t n) {
    return load_part_of(VJP_F16, from, n);
}

OUTLINE void store_part_f32(float *to, int64_t n, vf a) {
    store_part_of(VJP_F32, to, n, a);
}

OUTLINE void store_part_bf16(uint16_t *to, int64_t n, vf a) {
    store_part_of(VJP_BF16, to, n, a);
}

OUTLINE void store_part_f16(uint16_t *to, int64_t n, vf a) {
    store_part_of(VJP_F16, to, n, a);
}

/* Elements [i, i + n), n < 16 or more; the lanes past n are zero. Touches nothing outside. */
INLINE vf vf_load_part(vjp_dtype dtype, const void *from, int64_t i, int64_t n) {
    if (n >= LANES) return vf_load(dtype, from, i);
#if defined(CPU_ISA_AVX512)
    __mmask16 first = (__mmask16)((1u << n) - 1);
    if (dtype == VJP_F32) return (vf){{(native_f)_mm512_maskz_loadu_ps(first, (const float *)from + i)}};
    __m256i half = _mm256_maskz_loadu_epi16(first, (const uint16_t *)from + i);
    if (dtype == VJP_F16) return (vf){{(native_f)_mm512_cvtph_ps(half)}};
    return (vf){{(native_f)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)}};
#else
    switch (dtype) {
    case VJP_BF16: return load_part_bf16((const uint16_t *)from + i, n);
    case VJP_F16: return load_part_f16((const uint16_t *)from + i, n);
    default: return load_part_f32((const float *)from + i, n);
    }
#endif
}

INLINE void vf_store_part(vjp_dtype dtype, void *to, int64_t i, int64_t n, vf a) {
    if (n >= LANES) {
        vf_store(dtype, to, i, a);
        return;
    }
#if defined(CPU_ISA_AVX512)
    __mmask16 first = (__mmask16)((1u << n) - 1);
    if (dtype == VJP_F32) {
        _mm512_mask_storeu_ps((float *)to + i, first, (__m512)a.v[0]);
        return;
    }
    __m256i half = dtype == VJP_BF16 ? _mm512_cvtepi32_epi16((__m512i)native_round_bf16(a.v[0]))
                                     : _mm512_cvtps_ph((__m512)a.v[0], _MM_FROUND_TO_NEAREST_INT);
    _mm256_mask_storeu_epi16((uint16_t *)to + i, first, half);
#else
    switch (dtype) {
    case VJP_BF16: store_part_bf16((uint16_t *)to + i, n, a); break;
    case VJP_F16: store_part_f16((uint16_t *)to + i, n, a); break;
    default: store_part_f32((float *)to + i, n, a); break;
    }
#endif
}

/*
 * A store past the caches, for outputs far larger than they are: it saves the read of the line that an ordinary store
 * makes first. The address must be a multiple of the vector's bytes (64 for f32, 32 for 16-bit);
 * vf_stream_aligned() says whether it is. vf_stream_done() must follow the last one of a task.
 */
INLINE bool vf_stream_aligned(vjp_dtype dtype, const void *to) {
    return (uintptr_t)to % (LANES * dtype_bytes(dtype)) == 0;
}

#if defined(CPU_ISA_NEON)
/* Eight 16-bit numbers from two native vectors. */
INLINE native_f native_halves(vjp_dtype dtype, native_f a, native_f b) {
    if (dtype == VJP_F16) return (native_f)vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)a), (float32x4_t)b);
    uint16x4_t low = vmovn_u32((uint32x4_t)native_round_bf16(a));
    return (native_f)vmovn_high_u32(low, (uint32x4_t)native_round_bf16(b));
}

/*
 * Two native vectors past the caches; GCC has no other name for the instruction. Many cores notice whole lines being
 * written and do not read them first; the others need this instruction for it.
 */
INLINE void native_stream_two(void *to, native_f a, native_f b) {
    typedef char both[2 * sizeof(native_f)];
    __asm__("stnp %q2, %q3, [%1]" : "=m"(*(both *)to) : "r"(to), "w"(a), "w"(b));
}
#endif

INLINE void vf_stream(vjp_dtype dtype, void *to, int64_t i, vf a) {
#if defined(CPU_ISA_AVX512)
    if (dtype == VJP_F32) {
        _mm512_stream_ps((float *)to + i, (__m512)a.v[0]);
        return;
    }
    __m256i half = dtype == VJP_BF16 ? _mm512_cvtepi32_epi16((__m512i)native_round_bf16(a.v[0]))
                                     : _mm512_cvtps_ph((__m512)a.v[0], _MM_FROUND_TO_NEAREST_INT);
    _mm256_stream_si256((__m256i *)((uint16_t *)to + i), half);
#elif defined(CPU_ISA_AVX2)
    if (dtype == VJP_F32) {
        EACH_PART _mm256_stream_ps((float *)to + i + p * NATIVE_LANES, (__m256)a.v[p]);
        return;
    }
    uint16_t buffer[LANES];
    vf_store(dtype, buffer, 0, a);
    EACH_PART _mm_stream_si128((__m128i *)((uint16_t *)to + i + p * NATIVE_LANES),
                               _mm_loadu_si128((const __m128i *)(buffer + p * NATIVE_LANES)));
#elif defined(CPU_ISA_NEON)
    if (dtype == VJP_F32) {
        native_stream_two((float *)to + i, a.v[0], a.v[1]);
        native_stream_two((float *)to + i + 2 * NATIVE_LANES, a.v[2], a.v[3]);
        return;
    }
    native_stream_two((uint16_t *)to + i, native_halves(dtype, a.v[0], a.v[1]), native_halves(dtype, a.v[2], a.v[3]));
#else
    vf_store(dtype, to, i, a);
#endif
}

/* NEON's are ordered with all other stores: the end of a task is enough. */
INLINE void vf_stream_done(void) {
#if defined(CPU_ISA_AVX512) || defined(CPU_ISA_AVX2)
    _mm_sfence();
#endif
}

/* One element, for tails and strides. */
INLINE float f32_load(vjp_dtype dtype, const void *from, int64_t i) {
    switch (dtype) {
    case VJP_BF16: return vjp_bf16_to_f32(((const uint16_t *)from)[i]);
    case VJP_F16: return vjp_f16_to_f32(((const uint16_t *)from)[i]);
    default: return ((const float *)from)[i];
    }
}

INLINE void f32_store(vjp_dtype dtype, void *to, int64_t i, float value) {
    switch (dtype) {
    case VJP_BF16: ((uint16_t *)to)[i] = vjp_f32_to_bf16(value); break;
    case VJP_F16: ((uint16_t *)to)[i] = vjp_f32_to_f16(value); break;
    default: ((float *)to)[i] = value; break;
    }
}

#endif

/* SPDX-License-Identifier: MIT */
/*
 * The few NEON intrinsics of the CPU kernels, each as the corresponding 128-bit instruction of an x86-64 processor, so
 * that NEON's kernels can be timed without an aarch64 machine (`run` beside this file). Half vectors are kept in the
 * lower 64 bits of whole ones.
 */
#ifndef VJP_NEON_ON_X86_H
#define VJP_NEON_ON_X86_H

#pragma GCC system_header

#include <immintrin.h>
#include <stdint.h>

typedef __m128 float32x4_t;
typedef __m128i uint32x4_t, uint64x2_t;

typedef struct half_vector {
    __m128i v;
} half_vector;

#define uint16x4_t half_vector

#define MAPPED static inline __attribute__((always_inline, unused))

MAPPED float32x4_t vfmaq_f32(float32x4_t c, float32x4_t a, float32x4_t b) {
    return _mm_fmadd_ps(a, b, c);
}

MAPPED float32x4_t vsqrtq_f32(float32x4_t a) {
    return _mm_sqrt_ps(a);
}

MAPPED half_vector vld1_u16(const uint16_t *from) {
    return (half_vector){_mm_loadl_epi64((const __m128i *)(const void *)from)};
}

MAPPED void vst1_u16(uint16_t *to, half_vector a) {
    _mm_storel_epi64((__m128i *)(void *)to, a.v);
}

MAPPED uint32x4_t vshll_n_u16(half_vector a, int by) {
    return _mm_slli_epi32(_mm_cvtepu16_epi32(a.v), by);
}

MAPPED half_vector vmovn_u32(uint32x4_t a) {
    return (half_vector){_mm_cvtepi32_epi16(a)};
}

MAPPED uint32x4_t vmovn_high_u32(half_vector low, uint32x4_t a) {
    return _mm_unpacklo_epi64(low.v, _mm_cvtepi32_epi16(a));
}

MAPPED float32x4_t vcvt_f32_f16(half_vector a) {
    return _mm_cvtph_ps(a.v);
}

MAPPED half_vector vcvt_f16_f32(float32x4_t a) {
    return (half_vector){_mm_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)};
}

MAPPED uint32x4_t vcvt_high_f16_f32(half_vector low, float32x4_t a) {
    return _mm_unpacklo_epi64(low.v, _mm_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

/* x86 multiplies the lower halves of 64 bits as they stand; aarch64 narrows them first. */
MAPPED uint64x2_t vmovn_u64(uint64x2_t a) {
    return a;
}

MAPPED uint64x2_t vmull_u32(uint64x2_t a, uint64x2_t b) {
    return _mm_mul_epu32(a, b);
}

#define vreinterpret_f16_u16(a) (a)
#define vreinterpret_u16_f16(a) (a)

/* The counterpart of NEON's stnp. */
MAPPED void neon_stream_two(void *to, float32x4_t a, float32x4_t b) {
    _mm_stream_ps((float *)to, a);
    _mm_stream_ps((float *)to + 4, b);
}

MAPPED void neon_stream_done(void) {
    _mm_sfence();
}

#endif

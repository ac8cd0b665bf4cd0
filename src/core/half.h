/* SPDX-License-Identifier: MIT */
/* bf16 and f16 to f32 and back, one number at a time: round to nearest even, NaN stays NaN, denormals kept. */
#ifndef VJP_CORE_HALF_H
#define VJP_CORE_HALF_H

#include <stdint.h>
#include <string.h>

static inline float vjp_bits_to_f32(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t vjp_f32_to_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static inline float vjp_bf16_to_f32(uint16_t h) {
    return vjp_bits_to_f32((uint32_t)h << 16);
}

static inline uint16_t vjp_f32_to_bf16(float f) {
    uint32_t bits = vjp_f32_to_bits(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40); /* NaN: quiet, payload kept */
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/*
 * An f32 as two halves: the upper one is the number as a bf16, rounded to nearest with halfway cases away from zero,
 * and the lower one holds its last 16 bits. Together they are the f32 to the bit; of a NaN only the sign is kept.
 * (Rounded to even, two numbers would share the halves of some.)
 */
static inline uint16_t vjp_upper_half(float f) {
    uint32_t bits = vjp_f32_to_bits(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16 & 0x8000u) | 0x7fc0u);
    return (uint16_t)((bits + 0x8000u) >> 16);
}

static inline uint16_t vjp_lower_half(float f) {
    uint32_t bits = vjp_f32_to_bits(f);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0 : (uint16_t)bits;
}

static inline float vjp_join_halves(uint16_t upper, uint16_t lower) {
    return vjp_bits_to_f32(((uint32_t)upper << 16) + lower - ((uint32_t)(lower & 0x8000u) << 1));
}

static inline float vjp_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) { /* Inf, or NaN made quiet as the hardware does */
        uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0;
        return vjp_bits_to_f32(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13 | quiet);
    }
    if (magnitude >= 0x400u) return vjp_bits_to_f32(sign | ((magnitude << 13) + (112u << 23)));
    float f = (float)magnitude * 0x1p-24f; /* zero and denormals, exact */
    return sign ? -f : f;
}

static inline uint16_t vjp_f32_to_f16(float f) {
    uint32_t bits = vjp_f32_to_bits(f), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds past the largest f16 */
    if (magnitude < 0x38800000u) {
        /* Below 2^-14: adding 0.5 puts the f16 denormal's last place at f32's, so the addition rounds. */
        float shifted = vjp_bits_to_f32(magnitude) + 0.5f;
        return (uint16_t)(sign | (vjp_f32_to_bits(shifted) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1)) >> 13));
}

#endif

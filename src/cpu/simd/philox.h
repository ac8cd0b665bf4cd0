/* SPDX-License-Identifier: MIT */
/*
 * core/philox.h's generator over vectors. A word sits in the lower half of a 64-bit lane, whose upper half may hold
 * anything: the one multiplication that there is, 32 by 32 bits to 64, looks at lower halves alone. A round is then two
 * multiplications, two shuffles and four exclusive ors (two in AVX-512) for as many counters as there are lanes.
 *
 * The counters stand in the lanes in such an order (0, n/2, 1, n/2 + 1, ...) that interleaving the four words of each
 * at the end gives the elements' own order, without a shuffle across the vector.
 */
#ifndef VJP_CPU_PHILOX_H
#define VJP_CPU_PHILOX_H

#include "core/philox.h"
#include "cpu/simd/vec.h"

enum {
    PHILOX_LANES = NATIVE_LANES / 2, /* counters of a native vector */
    PHILOX_GROUPS = 2,               /* native vectors under way at once: the multiplications of one hide the other's */
    PHILOX_ELEMENTS = 4 * PHILOX_LANES * PHILOX_GROUPS,
    PHILOX_VECTORS = PHILOX_ELEMENTS / LANES
};

typedef uint64_t native_w __attribute__((vector_size(NATIVE_LANES * 4)));
typedef uint32_t native_u __attribute__((vector_size(NATIVE_LANES * 4)));

/* The product of the lower halves. */
INLINE native_w native_multiply_halves(native_w a, native_w b) {
#if defined(CPU_ISA_AVX512)
    return (native_w)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(CPU_ISA_AVX2)
    return (native_w)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(CPU_ISA_NEON)
    return (native_w)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#elif defined(__SSE2__)
    return (native_w)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
    return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

/* The upper halves as lower ones. A shuffle: the port that shifts is the one that multiplies. */
INLINE native_w native_upper_halves(native_w a) {
#if defined(CPU_ISA_AVX512)
    return (native_w)_mm512_shuffle_epi32((__m512i)a, 0xf5);
#elif defined(CPU_ISA_AVX2)
    return (native_w)_mm256_shuffle_epi32((__m256i)a, 0xf5);
#else
    return a >> 32;
#endif
}

INLINE native_w native_exclusive_or(native_w a, native_w b, native_w c) {
#if defined(CPU_ISA_AVX512)
    return (native_w)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96); /* one instruction for both */
#else
    return a ^ b ^ c;
#endif
}

INLINE native_w native_w_set(uint64_t value) {
    return value - (native_w){0};
}

#if defined(CPU_ISA_AVX512)
#define PHILOX_EVEN 0, 8, 2, 10, 4, 12, 6, 14
#define PHILOX_ODD  1, 9, 3, 11, 5, 13, 7, 15
#define PHILOX_ORDER                                                                                                   \
    { 0, 4, 1, 5, 2, 6, 3, 7 }
#elif defined(CPU_ISA_AVX2)
#define PHILOX_EVEN 0, 4, 2, 6
#define PHILOX_ODD  1, 5, 3, 7
#define PHILOX_ORDER                                                                                                   \
    { 0, 2, 1, 3 }
#else
#define PHILOX_EVEN 0, 2
#define PHILOX_ODD  1, 3
#define PHILOX_ORDER                                                                                                   \
    { 0, 1 }
#endif

/* The key of every round in all lanes, and the counter's upper words: made once a task, then read from the cache. */
typedef struct philox_rounds {
    native_w key0[VJP_PHILOX_ROUNDS], key1[VJP_PHILOX_ROUNDS], high[2];
} philox_rounds;

OUTLINE void philox_rounds_make(philox_rounds *rounds, const vjp_dropout_key *key) {
    uint32_t key0 = key->key[0], key1 = key->key[1];
    for (int round = 0; round < VJP_PHILOX_ROUNDS; round++) {
        rounds->key0[round] = native_w_set(key0);
        rounds->key1[round] = native_w_set(key1);
        key0 += VJP_PHILOX_STEP_0;
        key1 += VJP_PHILOX_STEP_1;
    }
    for (int k = 0; k < 2; k++)
        rounds->high[k] = native_w_set(key->high[k]);
}

/* The words of PHILOX_ELEMENTS elements from 4 * block on, as native vectors in the elements' order. */
INLINE void philox_words(const philox_rounds *rounds, uint64_t block, native_u words[2 * PHILOX_GROUPS]) {
    const native_w order = PHILOX_ORDER;
    const native_w factor0 = native_w_set(VJP_PHILOX_FACTOR_0), factor1 = native_w_set(VJP_PHILOX_FACTOR_1);
    native_w c0[PHILOX_GROUPS], c1[PHILOX_GROUPS], c2[PHILOX_GROUPS], c3[PHILOX_GROUPS];
    for (int g = 0; g < PHILOX_GROUPS; g++) {
        c0[g] = native_w_set(block + (uint64_t)g * PHILOX_LANES) + order;
        c1[g] = native_w_set(block >> 32); /* no batch crosses 2^32: it begins at a multiple of its length */
        c2[g] = rounds->high[0];
        c3[g] = rounds->high[1];
    }
    for (int round = 0; round < VJP_PHILOX_ROUNDS; round++)
        for (int g = 0; g < PHILOX_GROUPS; g++) {
            native_w product0 = native_multiply_halves(c0[g], factor0);
            native_w product1 = native_multiply_halves(c2[g], factor1);
            c0[g] = native_exclusive_or(native_upper_halves(product1), c1[g], rounds->key0[round]);
            c1[g] = product1;
            c2[g] = native_exclusive_or(native_upper_halves(product0), c3[g], rounds->key1[round]);
            c3[g] = product0;
        }
    for (int g = 0; g < PHILOX_GROUPS; g++) {
        native_w low = (c0[g] & 0xffffffffu) | c1[g] << 32, high = (c2[g] & 0xffffffffu) | c3[g] << 32;
        words[2 * g] = (native_u)__builtin_shufflevector(low, high, PHILOX_EVEN);
        words[2 * g + 1] = (native_u)__builtin_shufflevector(low, high, PHILOX_ODD);
    }
}

#endif

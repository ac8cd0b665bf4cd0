/* SPDX-License-Identifier: MIT */
/*
 * Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011): random numbers
 * without state. Four words from a counter and a key, in integer arithmetic alone, so any element's word can be
 * computed directly and is the same on every processor. Dropout derives the words of its elements in two steps:
 *
 *   1. counter (step, stream), key seed, each of 64 bits, low word first: gives four words k0 k1 c2 c3;
 *   2. counter (i / 4, c2, c3), i / 4 of 64 bits, key k0 k1: gives the words of elements i .. i + 3.
 *
 * For one seed the first step is one to one, so no two steps or streams share their words. An element is dropped when
 * its word is below p * 2^32.
 */
#ifndef VJP_CORE_PHILOX_H
#define VJP_CORE_PHILOX_H

#include <math.h>
#include <stdint.h>

/* CUDA's kernels call these functions, too. */
#ifdef __CUDACC__
#define VJP_PHILOX_INLINE static inline __host__ __device__
#else
#define VJP_PHILOX_INLINE static inline
#endif

enum { VJP_PHILOX_ROUNDS = 10 };

#define VJP_PHILOX_FACTOR_0 0xD2511F53u
#define VJP_PHILOX_FACTOR_1 0xCD9E8D57u
#define VJP_PHILOX_STEP_0   0x9E3779B9u /* the golden ratio */
#define VJP_PHILOX_STEP_1   0xBB67AE85u /* sqrt(3) - 1 */

typedef struct vjp_philox {
    uint32_t word[4];
} vjp_philox;

VJP_PHILOX_INLINE vjp_philox vjp_philox4x32_10(vjp_philox counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < VJP_PHILOX_ROUNDS; round++) {
        uint64_t product0 = (uint64_t)VJP_PHILOX_FACTOR_0 * counter.word[0];
        uint64_t product1 = (uint64_t)VJP_PHILOX_FACTOR_1 * counter.word[2];
        vjp_philox next;
        next.word[0] = (uint32_t)(product1 >> 32) ^ counter.word[1] ^ key0;
        next.word[1] = (uint32_t)product1;
        next.word[2] = (uint32_t)(product0 >> 32) ^ counter.word[3] ^ key1;
        next.word[3] = (uint32_t)product0;
        counter = next;
        key0 += VJP_PHILOX_STEP_0;
        key1 += VJP_PHILOX_STEP_1;
    }
    return counter;
}

/* What all elements of a dropout share. */
typedef struct vjp_dropout_key {
    uint32_t key[2], high[2]; /* the key, and the counter's upper words */
} vjp_dropout_key;

VJP_PHILOX_INLINE vjp_dropout_key vjp_dropout_key_of(int64_t seed, int64_t step, int64_t stream) {
    vjp_philox counter = {{(uint32_t)(uint64_t)step, (uint32_t)((uint64_t)step >> 32), (uint32_t)(uint64_t)stream,
                           (uint32_t)((uint64_t)stream >> 32)}};
    vjp_philox made = vjp_philox4x32_10(counter, (uint32_t)(uint64_t)seed, (uint32_t)((uint64_t)seed >> 32));
    vjp_dropout_key key = {{made.word[0], made.word[1]}, {made.word[2], made.word[3]}};
    return key;
}

/* The four words of elements 4 * block .. 4 * block + 3. */
VJP_PHILOX_INLINE vjp_philox vjp_dropout_words(const vjp_dropout_key *key, uint64_t block) {
    vjp_philox counter = {{(uint32_t)block, (uint32_t)(block >> 32), key->high[0], key->high[1]}};
    return vjp_philox4x32_10(counter, key->key[0], key->key[1]);
}

/* An element whose word is below this is dropped. p is in [0, 1); a threshold that would round to 2^32 is 2^32 - 1. */
static inline uint32_t vjp_dropout_threshold(double p) {
    double threshold = floor(p * 0x1p32 + 0.5);
    return threshold > 0xffffffffu ? 0xffffffffu : (uint32_t)threshold;
}

#endif

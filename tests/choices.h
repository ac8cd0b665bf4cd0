/* SPDX-License-Identifier: MIT */
/* Choices of a random test: from a fuzzer's bytes, or from a seed. */
#ifndef VJP_TESTS_CHOICES_H
#define VJP_TESTS_CHOICES_H

#include <stdint.h>

#include "numbers.h"

/* The bytes from `at` to `end`, and zeros after them; at NULL: random numbers from the seed. */
typedef struct choices {
    const uint8_t *at, *end;
    uint64_t seed, drawn;
} choices;

/* A fuzzer's bytes, which may be NULL where there are none. */
static inline choices choices_of(const uint8_t *data, size_t size) {
    static const uint8_t none[1];
    return (choices){.at = data ? data : none, .end = data ? data + size : none};
}

/* From 0 to below - 1. */
static inline uint32_t choose(choices *c, uint32_t below) {
    uint32_t value = 0;
    if (!c->at) return (uint32_t)((random_of(7, c->seed, c->drawn++) + 1) / 2 * below) % below;
    for (uint32_t room = 1; room < below && c->at < c->end; room <<= 8)
        value = value << 8 | *c->at++;
    return value % below;
}

#endif

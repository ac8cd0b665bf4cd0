/* SPDX-License-Identifier: MIT */
/*
 * Integer arithmetic that every part of the library needs: the smaller and the larger of two counts, division and
 * rounding upwards, and sums and products of sizes that say when the result does not fit. Sizes that come from outside
 * go through the checked functions.
 */
#ifndef VJP_ARITHMETIC_H
#define VJP_ARITHMETIC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline int64_t vjp_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t vjp_max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* a / b rounded upwards, for a >= 0 and b > 0. Does not overflow. */
static inline int64_t vjp_divide_up(int64_t a, int64_t b) {
    return a / b + (a % b != 0);
}

/* The smallest multiple of `unit` that is not below a, for a >= 0 and unit > 0. The caller must know that it fits. */
static inline int64_t vjp_round_up(int64_t a, int64_t unit) {
    return vjp_divide_up(a, unit) * unit;
}

/* The checked functions return false, and leave the result as it was, when the result does not fit. */
static inline bool vjp_add_size(size_t a, size_t b, size_t *sum) {
    if (b > SIZE_MAX - a) return false;
    *sum = a + b;
    return true;
}

static inline bool vjp_mul_size(size_t a, size_t b, size_t *product) {
    if (b && a > SIZE_MAX / b) return false;
    *product = a * b;
    return true;
}

/* The smallest multiple of `unit` (not 0) that is not below `bytes`. */
static inline bool vjp_align_size(size_t bytes, size_t unit, size_t *aligned) {
    return vjp_mul_size(bytes / unit + (bytes % unit != 0), unit, aligned);
}

#endif

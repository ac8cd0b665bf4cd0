/* SPDX-License-Identifier: MIT */
/* Numbers on the host: memory, dtypes, and the random numbers of the cases. */
#ifndef VJP_PROOF_VALUES_H
#define VJP_PROOF_VALUES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vjp.h"

/* Zeroed memory; exits when there is none. */
void *proof_memory(size_t bytes);

int64_t proof_count(const vjp_tensor *tensor);

/* Element i of packed memory, and back: round to nearest even. */
double proof_get(const void *data, vjp_dtype dtype, int64_t i);
void proof_put(void *data, vjp_dtype dtype, int64_t i, double value);

/* Elements begin to begin + count. */
void proof_read(const void *data, vjp_dtype dtype, int64_t begin, int64_t count, double *values);

/* Whole arrays; to free(). */
double *proof_to_double(const void *data, vjp_dtype dtype, int64_t count);
void *proof_to_stored(const double *values, vjp_dtype dtype, int64_t count);

/* What a number becomes when it is stored in this dtype. */
double proof_rounded(double value, vjp_dtype dtype);

/* The largest number of a float dtype and its smallest normal one; of f64 those of f32, whose squares f64 holds. */
double proof_largest(vjp_dtype dtype);
double proof_smallest(vjp_dtype dtype);

/* A generator's state; the same seed and names give the same numbers everywhere. */
typedef struct proof_random {
    uint64_t state;
} proof_random;

proof_random proof_random_of(uint64_t seed, const char *first, const char *second, const char *third);
uint64_t proof_random_bits(proof_random *random);
int64_t proof_random_below(proof_random *random, int64_t limit);

/* Mean 0, variance 1, within +-3.5: four uniform numbers from one draw. */
double proof_random_normal(proof_random *random);

#endif

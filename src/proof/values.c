/* SPDX-License-Identifier: MIT */
/* Numbers on the host: memory, dtypes, and the random numbers of the cases. */
#include "proof/values.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/half.h"

void *proof_memory(size_t bytes) {
    void *data = calloc(1, bytes ? bytes : 1);
    if (data) return data;
    fprintf(stderr, "proof: no memory for %zu bytes\n", bytes);
    exit(1);
}

int64_t proof_count(const vjp_tensor *tensor) {
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

double proof_get(const void *data, vjp_dtype dtype, int64_t i) {
    switch (dtype) {
    case VJP_F32: return ((const float *)data)[i];
    case VJP_BF16: return vjp_bf16_to_f32(((const uint16_t *)data)[i]);
    case VJP_F16: return vjp_f16_to_f32(((const uint16_t *)data)[i]);
    case VJP_F64: return ((const double *)data)[i];
    case VJP_I32: return ((const int32_t *)data)[i];
    case VJP_I64: return (double)((const int64_t *)data)[i];
    }
    return NAN;
}

void proof_put(void *data, vjp_dtype dtype, int64_t i, double value) {
    switch (dtype) {
    case VJP_F32: ((float *)data)[i] = (float)value; break;
    case VJP_BF16: ((uint16_t *)data)[i] = vjp_f32_to_bf16((float)value); break;
    case VJP_F16: ((uint16_t *)data)[i] = vjp_f32_to_f16((float)value); break;
    case VJP_F64: ((double *)data)[i] = value; break;
    case VJP_I32: ((int32_t *)data)[i] = (int32_t)value; break;
    case VJP_I64: ((int64_t *)data)[i] = (int64_t)value; break;
    }
}

/* The dtypes of nearly all results have loops of their own: proofs spend much of their time here. */
void proof_read(const void *data, vjp_dtype dtype, int64_t begin, int64_t count, double *values) {
    switch (dtype) {
    case VJP_F32:
        for (int64_t i = 0; i < count; i++)
            values[i] = ((const float *)data)[begin + i];
        return;
    case VJP_BF16:
        for (int64_t i = 0; i < count; i++)
            values[i] = vjp_bf16_to_f32(((const uint16_t *)data)[begin + i]);
        return;
    default:
        for (int64_t i = 0; i < count; i++)
            values[i] = proof_get(data, dtype, begin + i);
    }
}

double *proof_to_double(const void *data, vjp_dtype dtype, int64_t count) {
    double *values = proof_memory((size_t)count * sizeof *values);
    proof_read(data, dtype, 0, count, values);
    return values;
}

void *proof_to_stored(const double *values, vjp_dtype dtype, int64_t count) {
    void *data = proof_memory((size_t)count * vjp_dtype_size(dtype));
    for (int64_t i = 0; i < count; i++)
        proof_put(data, dtype, i, values[i]);
    return data;
}

double proof_rounded(double value, vjp_dtype dtype) {
    double stored;
    proof_put(&stored, dtype, 0, value);
    return proof_get(&stored, dtype, 0);
}

double proof_largest(vjp_dtype dtype) {
    return dtype == VJP_F16 ? 65504 : dtype == VJP_BF16 ? 0x1.fep127 : FLT_MAX;
}

double proof_smallest(vjp_dtype dtype) {
    return dtype == VJP_F16 ? 0x1p-14 : FLT_MIN;
}

/* ---- Random numbers ---------------------------------------------------------------------------------- */

/* splitmix64: one chain of multiplications per draw, and any state is valid. */
uint64_t proof_random_bits(proof_random *random) {
    uint64_t z = random->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint64_t mix_text(uint64_t hash, const char *text) {
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
    return hash * 0x9e3779b97f4a7c15u + 1;
}

proof_random proof_random_of(uint64_t seed, const char *first, const char *second, const char *third) {
    return (proof_random){mix_text(mix_text(mix_text(seed + 0xcbf29ce484222325u, first), second), third)};
}

int64_t proof_random_below(proof_random *random, int64_t limit) {
    return (int64_t)(proof_random_bits(random) % (uint64_t)limit);
}

double proof_random_normal(proof_random *random) {
    uint64_t bits = proof_random_bits(random);
    double sum =
        (double)(bits & 0xffff) + (double)(bits >> 16 & 0xffff) + (double)(bits >> 32 & 0xffff) + (double)(bits >> 48);
    return (sum / 65535 - 2) * 1.7320508075688772; /* each uniform number has variance 1/12 */
}

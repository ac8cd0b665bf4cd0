/* SPDX-License-Identifier: MIT */
/* Numbers for tests of graphs: random ones without state, and the elements of a tensor in the host's memory. */
#ifndef VJP_TESTS_NUMBERS_H
#define VJP_TESTS_NUMBERS_H

#include "core/half.h"
#include "core/philox.h"
#include "vjp.h"

/* Element i of a stream, from -1 to 1. */
static inline double random_of(uint32_t stream, uint64_t seed, uint64_t i) {
    vjp_philox words = {{(uint32_t)i, (uint32_t)(i >> 32), stream, 0}};
    words = vjp_philox4x32_10(words, (uint32_t)seed, (uint32_t)(seed >> 32));
    return ((double)words.word[0] + (double)words.word[1] * 0x1p-32) * 0x1p-32 * 2 - 1;
}

static inline int64_t count_of(const vjp_tensor *tensor) {
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

static inline void put(const vjp_tensor *tensor, int64_t i, double value) {
    char *at = (char *)tensor->data + tensor->offset;
    if (tensor->dtype == VJP_F64)
        ((double *)at)[i] = value;
    else if (tensor->dtype == VJP_F32)
        ((float *)at)[i] = (float)value;
    else if (tensor->dtype == VJP_BF16)
        ((uint16_t *)at)[i] = vjp_f32_to_bf16((float)value);
    else if (tensor->dtype == VJP_F16)
        ((uint16_t *)at)[i] = vjp_f32_to_f16((float)value);
    else
        ((int32_t *)at)[i] = (int32_t)value;
}

static inline double get(const vjp_tensor *tensor, int64_t i) {
    const char *at = (const char *)tensor->data + tensor->offset;
    if (tensor->dtype == VJP_BF16) return (double)vjp_bf16_to_f32(((const uint16_t *)at)[i]);
    if (tensor->dtype == VJP_F16) return (double)vjp_f16_to_f32(((const uint16_t *)at)[i]);
    return tensor->dtype == VJP_F64 ? ((const double *)at)[i] : (double)((const float *)at)[i];
}

#endif

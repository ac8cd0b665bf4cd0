/*
 * Rows of any storage type to and from f32, for kernels whose inner part works in f32 (linear, attention).
 */
#ifndef VJP_CPU_ROWS_H
#define VJP_CPU_ROWS_H

#include "cpu/vec.h"

INLINE void load_as(vjp_dtype dtype, const void *from, int64_t at, int64_t count, float *to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        vf_store(VJP_F32, to, i, vf_load(dtype, from, at + i));
    if (i < count) vf_store_part(VJP_F32, to, i, count - i, vf_load_part(dtype, from, at + i, count - i));
}

INLINE void store_as(vjp_dtype dtype, void *to, int64_t at, int64_t count, const float *from, bool accumulate) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vf v = vf_load(VJP_F32, from, i);
        if (accumulate) v = vf_add(vf_load(dtype, to, at + i), v);
        vf_store(dtype, to, at + i, v);
    }
    if (i == count) return;
    vf v = vf_load_part(VJP_F32, from, i, count - i);
    if (accumulate) v = vf_add(vf_load_part(dtype, to, at + i, count - i), v);
    vf_store_part(dtype, to, at + i, count - i, v);
}

OUTLINE void load_row(vjp_dtype dtype, const void *from, int64_t at, int64_t count, float *to) {
    switch (dtype) {
    case VJP_BF16: load_as(VJP_BF16, from, at, count, to); break;
    case VJP_F16: load_as(VJP_F16, from, at, count, to); break;
    default: load_as(VJP_F32, from, at, count, to); break;
    }
}

OUTLINE void store_row(vjp_dtype dtype, void *to, int64_t at, int64_t count, const float *from, bool accumulate) {
    switch (dtype) {
    case VJP_BF16: store_as(VJP_BF16, to, at, count, from, accumulate); break;
    case VJP_F16: store_as(VJP_F16, to, at, count, from, accumulate); break;
    default: store_as(VJP_F32, to, at, count, from, accumulate); break;
    }
}

INLINE char *element(const void *data, vjp_dtype dtype, int64_t at) {
    return data ? (char *)data + at * (int64_t)dtype_bytes(dtype) : NULL;
}

#endif

/* SPDX-License-Identifier: MIT */
/*
 * The reference backend: plain loops in double, one file per op, for every storage type. It is the readable reference
 * that the other backends are compared with, so it is never optimised: each formula is written as docs/ops/ derives it.
 */
#ifndef VJP_REF_H
#define VJP_REF_H

#include "core/core.h"
#include "core/half.h"
#include "op/op.h"

enum { REF_STORAGE = VJP_BIT_F32 | VJP_BIT_BF16 | VJP_BIT_F16 | VJP_BIT_F64 };

#define OP(name, family, cuda, gpu) extern const vjp_kernel vjp_ref_##name[VJP_PASS_COUNT];
#include "op/ops.def"

/* Element i of a slot as a double; `absent` where the slot is empty. */
static inline double ref_get(const vjp_work *work, int slot, int64_t i, double absent) {
    const void *data = vjp_data(work, slot);
    if (!data) return absent;
    switch (vjp_type(work, slot)) {
    case VJP_F32: return ((const float *)data)[i];
    case VJP_BF16: return vjp_bf16_to_f32(((const uint16_t *)data)[i]);
    case VJP_F16: return vjp_f16_to_f32(((const uint16_t *)data)[i]);
    case VJP_F64: return ((const double *)data)[i];
    case VJP_I32: return ((const int32_t *)data)[i];
    case VJP_I64: return (double)((const int64_t *)data)[i];
    }
    return absent;
}

/* Writes element i of an output, or adds to it; nothing where the slot is empty. */
static inline void ref_put(const vjp_work *work, int slot, int64_t i, double value) {
    void *data = vjp_data(work, slot);
    if (!data) return;
    if (vjp_accumulates(work, slot)) value += ref_get(work, slot, i, 0);
    switch (vjp_type(work, slot)) {
    case VJP_F32: ((float *)data)[i] = (float)value; break;
    case VJP_BF16: ((uint16_t *)data)[i] = vjp_f32_to_bf16((float)value); break;
    case VJP_F16: ((uint16_t *)data)[i] = vjp_f32_to_f16((float)value); break;
    case VJP_F64: ((double *)data)[i] = value; break;
    case VJP_I32: ((int32_t *)data)[i] = (int32_t)value; break;
    case VJP_I64: ((int64_t *)data)[i] = (int64_t)value; break;
    }
}

#endif

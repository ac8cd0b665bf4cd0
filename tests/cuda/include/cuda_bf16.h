/* SPDX-License-Identifier: MIT */
/* bf16 as CUDA spells it; the conversions are those of core/half.h. */
#ifndef VJP_TESTS_CUDA_BF16_H
#define VJP_TESTS_CUDA_BF16_H

#include "cuda_runtime.h"

extern "C" {
#include "core/half.h"
}

struct __nv_bfloat16 {
    uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 x) {
    return vjp_bf16_to_f32(x.bits);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    return {vjp_f32_to_bf16(x)};
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) {
    return x.bits;
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
/* The larger of each pair; a NaN loses. */
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return __floats2bfloat162_rn(fmaxf(__bfloat162float(a.x), __bfloat162float(b.x)),
                                 fmaxf(__bfloat162float(a.y), __bfloat162float(b.y)));
}

#endif

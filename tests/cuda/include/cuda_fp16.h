/* SPDX-License-Identifier: MIT */
/* f16 as CUDA spells it; the conversions are those of core/half.h. */
#ifndef VJP_TESTS_CUDA_FP16_H
#define VJP_TESTS_CUDA_FP16_H

#include "cuda_runtime.h"

extern "C" {
#include "core/half.h"
}

struct __half {
    uint16_t bits;
};
struct alignas(4) __half2 {
    __half x, y;
};

inline float __half2float(__half x) {
    return vjp_f16_to_f32(x.bits);
}
inline __half __float2half_rn(float x) {
    return {vjp_f32_to_f16(x)};
}
inline unsigned short __half_as_ushort(__half x) {
    return x.bits;
}
inline float2 __half22float2(__half2 two) {
    return {__half2float(two.x), __half2float(two.y)};
}
inline __half2 __floats2half2_rn(float x, float y) {
    return {__float2half_rn(x), __float2half_rn(y)};
}
/* The larger of each pair; a NaN loses. */
inline __half2 __hmax2(__half2 a, __half2 b) {
    return __floats2half2_rn(fmaxf(__half2float(a.x), __half2float(b.x)), fmaxf(__half2float(a.y), __half2float(b.y)));
}

#endif

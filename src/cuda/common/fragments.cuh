/* SPDX-License-Identifier: MIT */
/*
 * Accumulators of tensor cores. A warp has sixteen rows of N columns: thread t has, for i < N / 8, d[4 i + {0, 1}] in
 * row t % 32 / 4 and d[4 i + {2, 3}] eight rows below, in columns 8 i + t % 4 * 2 + {0, 1}. Sixteen columns of them,
 * rounded to 16 bits, are the left operand of the next product without moving between threads.
 */
#ifndef VJP_CUDA_FRAGMENTS_CUH
#define VJP_CUDA_FRAGMENTS_CUH

#include "cuda/common/kernel.cuh"

namespace vjp {

/* Two numbers in 32 bits, the first in the lower half. */
template <class T> __device__ uint32_t pack_two(float low, float high) {
    uint32_t two;
    if constexpr (std::is_same_v<T, bf16>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}

template <class T> __device__ float2 unpack_two(uint32_t two) {
    if constexpr (std::is_same_v<T, bf16>)
        return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
    else
        return __half22float2(*reinterpret_cast<const __half2 *>(&two));
}

/* Accumulators as left operands: a[4 k ...] for the sixteen columns from 16 k on. */
template <class T, int COUNT> __device__ void fragments(uint32_t (&a)[COUNT / 2], const float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++)
        a[i] = pack_two<T>(d[2 * i], d[2 * i + 1]);
}

/* 2^x, to 2 units in the last place; results below the smallest normal number are 0. */
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

} // namespace vjp

#endif

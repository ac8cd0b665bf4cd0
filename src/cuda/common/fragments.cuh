/* SPDX-License-Identifier: MIT */
/*
 * Accumulators of tensor cores. A warp has sixteen rows of N columns: thread t has, for i < N / 8, d[4 i + {0, 1}] in
 * row t % 32 / 4 and d[4 i + {2, 3}] eight rows below, in columns 8 i + t % 4 * 2 + {0, 1}. Sixteen columns of them,
 * rounded to 16 bits, are the left operand of the next product without moving between threads. So are eight columns
 * rounded to TF32, if the terms of that product are taken in another order: a thread has terms t % 4 and t % 4 + 4 of a
 * left operand, and these become columns t % 4 * 2 and t % 4 * 2 + 1. The right operand needs its rows in that order.
 */
#ifndef VJP_CUDA_FRAGMENTS_CUH
#define VJP_CUDA_FRAGMENTS_CUH

#include "cuda/common/kernel.cuh"

namespace vjp {

template <class T> __device__ float2 unpack_two(uint32_t two) {
    if constexpr (std::is_same_v<T, bf16>)
        return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
    else
        return __half22float2(*reinterpret_cast<const __half2 *>(&two));
}

/* 4 k + {0, 1, 2, 3} to 4 k + {0, 2, 1, 3}: accumulators have two columns of a row side by side, operands two rows. */
__host__ __device__ constexpr int swap_middle(int i) {
    return i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i;
}

/* Terms of one product of a warp: sixteen of 16 bits, or eight of TF32. */
template <class T> constexpr int TERMS = 32 / (int)sizeof(T);

/* Accumulators as left operands: a[4 k ...] for the TERMS columns from TERMS k on. */
template <class T, int COUNT>
__device__ void fragments(uint32_t (&a)[COUNT * (int)sizeof(T) / 4], const float (&d)[COUNT]) {
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            a[i] = round_tf32(d[swap_middle(i)]);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++)
            a[i] = pack_two<T>(d[2 * i], d[2 * i + 1]);
    }
}

/* d -= a, the fragments of d: what was lost when they were rounded. */
template <class T, int COUNT>
__device__ void subtract_fragments(float (&d)[COUNT], const uint32_t (&a)[COUNT * (int)sizeof(T) / 4]) {
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            d[swap_middle(i)] -= __uint_as_float(a[i]);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
            float2 rounded = unpack_two<T>(a[i]);
            d[2 * i] -= rounded.x;
            d[2 * i + 1] -= rounded.y;
        }
    }
}

} // namespace vjp

#endif

/* SPDX-License-Identifier: MIT */
/* silu and its slope, and swiglu of one element: for swiglu.cu, and for products that end with it (gated.cuh). */
#ifndef VJP_CUDA_SILU_CUH
#define VJP_CUDA_SILU_CUH

#include "cuda/linear/activation.cuh"

namespace vjp {
namespace {

/* silu is first * second. Apart they stay normal numbers where their product is denormal or 0. */
struct silu_values {
    float first, second, slope;
};

/*
 * Below SILU_TAIL 1 + exp(x) is 1 and exp(x) may be denormal. silu and its slope are then x exp(x) and (1 + x) exp(x),
 * which have more digits than exp(x): the factor is multiplied with exp(x + SHIFT), whose argument is exact, before
 * exp(-SHIFT) makes the result small.
 */
constexpr float SILU_TAIL = -87, SHIFT = 40, EXP_MINUS_SHIFT = 4.248354255291589e-18f;

__device__ inline silu_values silu_to_f32(float x) {
    float near = clamped(x, LOGISTIC_END);
    if (x < SILU_TAIL) {
        float e = expf(near + SHIFT);
        return {near * e * EXP_MINUS_SHIFT, 1, fmaf(near, e, e) * EXP_MINUS_SHIFT};
    }
    logistic s = logistic_of(expf(-fabsf(near)));
    float sigmoid = x < 0 ? s.small : s.large, complement = x < 0 ? s.large : s.small;
    return {damped(x, sigmoid), 1, fmaf(near * complement, sigmoid, sigmoid)};
}

/*
 * With enough digits for 16 bits (silu to a relative error of 2e-5) and without a branch: at the end of a product it
 * must fit into the time that another warpgroup multiplies. Half of the exponent is taken, so that h = exp(-|x| / 2) is
 * normal down to x = -174, where the rest is 0.
 */
constexpr float SILU_END = 256, HALF_LOG2_E = 0.7213475204444817f;

__device__ inline silu_values silu_to_16_bits(float x) {
    float low = larger(x, -SILU_END), near = smaller(low, SILU_END);
    float h = exp2_fast(-HALF_LOG2_E * fabsf(near)), e = h * h, large = reciprocal_fast(1 + e);
    bool negative = x < 0;
    float part = negative ? h : 1, complement = negative ? large : e * large, second = part * large;
    return {low * part, second, second * (part * fmaf(near, complement, 1))};
}

template <class T> __device__ silu_values silu_of(float x) {
    if constexpr (sizeof(T) == 2)
        return silu_to_16_bits(x);
    else
        return silu_to_f32(x);
}

template <class T> __device__ float gated_value(float gate, float up) {
    silu_values silu = silu_of<T>(gate);
    return silu.first * (silu.second * up);
}

struct gated_slopes {
    float dgate, dup, y;
};

/* The slope first, which may be 0: dy * up may overflow. */
template <class T> __device__ gated_slopes gated_gradient(float dy, float gate, float up) {
    silu_values silu = silu_of<T>(gate);
    return {silu.slope * dy * up, silu.first * (silu.second * dy), silu.first * (silu.second * up)};
}

} // namespace
} // namespace vjp

#endif

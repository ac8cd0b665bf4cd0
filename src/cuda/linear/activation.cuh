/* SPDX-License-Identifier: MIT */
/*
 * The seven activations and their derivatives in f32. Each is finite and accurate for every finite x and takes its
 * limit at +-Inf; a NaN stays a NaN.
 *
 * Two rules ensure that: nothing is computed as 1 minus something that tends to 1 (1 - tanh^2 has no digit left beyond
 * |x| = 9), and x is clamped where the other factor has become exactly 0 or 1, so that no 0 meets an Inf. Instructions
 * are counted: at copy speed there are 40 per element of bf16 (H200), and the derivative of gelu's tanh form takes 18.
 */
#ifndef VJP_CUDA_ACTIVATION_CUH
#define VJP_CUDA_ACTIVATION_CUH

#include "cuda/common/kernel.cuh"

namespace vjp {

/* x within [-end, end]. */
__device__ inline float clamped(float x, float end) {
    return larger(smaller(x, end), -end);
}

/* 1/x for x from 1 to 1e30: the approximation and one Newton step, accurate to a unit in the last place. */
__device__ inline float reciprocal(float x) {
    float y = reciprocal_fast(x);
    return fmaf(y, fmaf(-x, y, 1.0f), y);
}

/* With e = exp(-|v|): the sigmoid of |v| and of -|v|, neither by subtraction. */
struct logistic {
    float large, small;
};

__device__ inline logistic logistic_of(float e) {
    float large = reciprocal(1.0f + e);
    return {large, e * large};
}

__device__ inline float sigmoid(float x) {
    logistic s = logistic_of(expf(-fabsf(x)));
    return x < 0 ? s.small : s.large;
}

/* x * factor, where factor is 0 long before x is -Inf. */
__device__ inline float damped(float x, float factor) {
    return (x < -0x1p+127f ? -0x1p+127f : x) * factor;
}

/* Beyond, the logistic function and its slope are 0 or 1 in f32; for both forms of gelu likewise. */
constexpr float LOGISTIC_END = 110, GELU_END = 16;

/*
 * gelu's tanh form is x sigmoid(v), v = 2 sqrt(2/pi) (x + 0.044715 x^3) = x (LINEAR + CUBIC x^2). exp(-|v|) is taken as
 * a power of two, with log2(e) in the constants.
 */
constexpr float GELU_LINEAR = 1.5957691216057308f, GELU_CUBIC = 0.07135481282553026f;
constexpr float GELU_LINEAR_2 = 2.302208198144325f, GELU_CUBIC_2 = 0.1029432346069527f;

__device__ inline logistic gelu_logistic(float size, float square) {
    return logistic_of(exp2_fast(-size * fmaf(square, GELU_CUBIC_2, GELU_LINEAR_2)));
}

/*
 * The normal density at x and the distribution's tail beyond |x|. The tail is the density times Mills' ratio, which
 * is P((t - 3) / (t + 3)) / (t + 3) for t = |x|, so it has full relative accuracy as far as f32 goes. The density's
 * exponent is taken with the rounding error of x^2, which at the end of the range is worth 50 units.
 */
struct normal {
    float density, tail;
};

__device__ inline normal normal_of(float x) {
    constexpr float c[] = {0x1.d3d9c8p+0f, -0x1.46d63cp+0f, 0x1.273408p-1f,  -0x1.e534ep-4f,   -0x1.adab98p-6f,
                           0x1.1ce80ep-6f, 0x1.4def0cp-9f,  -0x1.371482p-9f, -0x1.0abc6ep-11f, 0x1.1376c8p-13f};
    constexpr float root_2pi_inverse = 0x1.988454p-2f;
    float t = smaller(fabsf(x), GELU_END);
    float square = t * t, missed = fmaf(t, t, -square);
    float bell = expf(-0.5f * square);
    bell = fmaf(-0.5f * missed, bell, bell) * root_2pi_inverse;
    float inverse = reciprocal(t + 3.0f), at = (t - 3.0f) * inverse, ratio = c[9];
#pragma unroll
    for (int i = 8; i >= 0; i--)
        ratio = fmaf(ratio, at, c[i]);
    return {bell, bell * (ratio * inverse)};
}

/* The activation is chosen at run time. */
constexpr int ANY_ACTIVATION = -1;

template <int ACTIVATION> __device__ float activate(int any, float x) {
    switch (ACTIVATION == ANY_ACTIVATION ? any : ACTIVATION) {
    case VJP_ACTIVATION_RELU: return x < 0 ? 0.0f : x; /* in this form a NaN stays */
    case VJP_ACTIVATION_GELU_TANH: {
        float size = smaller(fabsf(x), GELU_END);
        logistic s = gelu_logistic(size, size * size);
        return damped(x, x < 0 ? s.small : s.large);
    }
    case VJP_ACTIVATION_GELU_ERF: {
        normal n = normal_of(x);
        return damped(x, x < 0 ? n.tail : 1.0f - n.tail);
    }
    case VJP_ACTIVATION_SILU: return damped(x, sigmoid(x));
    case VJP_ACTIVATION_SIGMOID: return sigmoid(x);
    case VJP_ACTIVATION_TANH: return tanhf(x);
    default: return x;
    }
}

/* The derivative of activate(). */
template <int ACTIVATION> __device__ float activate_slope(int any, float x) {
    switch (ACTIVATION == ANY_ACTIVATION ? any : ACTIVATION) {
    case VJP_ACTIVATION_RELU: return x > 0 ? 1.0f : x != x ? x : 0.0f;
    case VJP_ACTIVATION_GELU_TANH: {
        /* sigmoid + x sigmoid' v' at |x|; on the other side the sigmoid is the small one, and x is negative. */
        float size = smaller(fabsf(x), GELU_END), square = size * size;
        logistic s = gelu_logistic(size, square);
        float rise = size * fmaf(square, 3 * GELU_CUBIC, GELU_LINEAR), slope = s.small * s.large;
        return x < 0 ? fmaf(-rise, slope, s.small) : fmaf(rise, slope, s.large);
    }
    case VJP_ACTIVATION_GELU_ERF: {
        /* The distribution plus x times the density; for x > 0, 1 - tail + x density. */
        x = clamped(x, GELU_END);
        normal n = normal_of(x);
        float side = fmaf(x, n.density, x < 0 ? n.tail : -n.tail);
        return x < 0 ? side : 1.0f + side;
    }
    case VJP_ACTIVATION_SILU: {
        x = clamped(x, LOGISTIC_END);
        logistic s = logistic_of(expf(-fabsf(x)));
        return fmaf(x, s.small * s.large, x < 0 ? s.small : s.large);
    }
    case VJP_ACTIVATION_SIGMOID: {
        logistic s = logistic_of(expf(-fabsf(x)));
        return s.small * s.large;
    }
    case VJP_ACTIVATION_TANH: {
        /* 1 - tanh^2 = 4 e / (1 + e)^2, e = exp(-2|x|) */
        logistic s = logistic_of(expf(-2.0f * fabsf(x)));
        return 4.0f * (s.small * s.large);
    }
    default: return 1.0f;
    }
}

} // namespace vjp

#endif

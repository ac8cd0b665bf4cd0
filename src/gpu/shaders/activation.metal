/* SPDX-License-Identifier: MIT */
// The seven activations and their derivatives; ACTIVATION says which. Each is finite and right for every finite x and
// reaches its limit at plus and minus infinity; a NaN stays a NaN.
//
// Three rules keep that. Nothing is computed as 1 minus something that tends to 1: 1 - tanh^2 has no digit left past
// |x| = 9. x is clamped where the other factor has become 0 or 1, so that no 0 meets an infinity. And a compiler may
// assume that there are no NaN and no infinities: NaN are set aside by their bits first, and nothing here overflows on
// the way. No exp() or tanh() of the device, whose last digits differ from one to the next: these are polynomials,
// within a few units of the last place; the tails of gelu, below 1e-8, are right to 1e-5, because the rounding of their
// exponent counts there. What is below 1e-38 is 0.

#include "exponential.metal"

constexpr constant uint NONE = 0;
constexpr constant uint RELU = 1;
constexpr constant uint GELU_TANH = 2;
constexpr constant uint GELU_ERF = 3;
constexpr constant uint SILU = 4;
constexpr constant uint SIGMOID = 5;
constexpr constant uint TANH = 6;

// Beyond, the logistic function and its slope are 0 or 1; for both forms of gelu likewise.
constexpr constant float LOGISTIC_END = 110.0f;
constexpr constant float GELU_END = 13.0f;

// gelu's tanh form is x sigmoid(v), v = 2 sqrt(2/pi) (x + 0.044715 x^3) = x (LINEAR + CUBIC x^2).
constexpr constant float GELU_LINEAR = 1.5957691216057308f;
constexpr constant float GELU_CUBIC = 0.07135481627260025f;

// 1/x to a unit or so, should division be off by more: a step of Newton's mends that. x from 1 to 1e30.
inline float inverse_of(float x) {
    float y = 1.0f / x;
    return fma(y, fma(-x, y, 1.0f), y);
}

// The logistic function of |v| and of -|v|, neither by subtraction.
struct Logistic {
    float large;
    float small;
};

inline Logistic logistic(float size) {
    float e = exp_down(-size);
    float large = inverse_of(1.0f + e);
    return {large, e * large};
}

inline Logistic gelu_logistic(float size) {
    return logistic(size * fma(size * size, GELU_CUBIC, GELU_LINEAR));
}

// The normal density at x and the distribution's tail beyond |x|. The tail is the density times Mills' ratio, which is
// P((t - 3) / (t + 3)) / (t + 3) for t = |x|, so it has its digits as far as f32 goes. The density's exponent is taken
// with the rounding error of x^2, which far out is worth 40 units.
struct Normal {
    float density;
    float tail;
};

inline Normal normal_of(float t) {
    float square = t * t;
    float missed = fma(t, t, -square);
    float bell = exp_down(-0.5f * square);
    bell = fma(-0.5f * missed, bell, bell) * 0x1.988454p-2f;
    float inverse = inverse_of(t + 3.0f);
    float z = (t - 3.0f) * inverse;
    float p = fma(z, 0x1.1376c8p-13f, -0x1.0abc6ep-11f);
    p = fma(p, z, -0x1.371482p-9f);
    p = fma(p, z, 0x1.4def0cp-9f);
    p = fma(p, z, 0x1.1ce80ep-6f);
    p = fma(p, z, -0x1.adab98p-6f);
    p = fma(p, z, -0x1.e534ep-4f);
    p = fma(p, z, 0x1.273408p-1f);
    p = fma(p, z, -0x1.46d63cp+0f);
    p = fma(p, z, 0x1.d3d9c8p+0f);
    return {bell, bell * (p * inverse)};
}

// Odd polynomial below 0.625; above, (1 - e) / (1 + e) with e = exp(-2|x|), which has no cancellation there.
inline float tanh_of(float x) {
    float size = min(abs(x), LOGISTIC_END);
    float square = min(size * size, 1.0f);
    float p = fma(square, -0x1.75e1dap-8f, 0x1.52269ep-6f);
    p = fma(p, square, -0x1.b83c5ap-5f);
    p = fma(p, square, 0x1.110726p-3f);
    p = fma(p, square, -0x1.555532p-2f);
    float near = fma(size * square, p, size);
    float e = exp_down(-2.0f * size);
    float far = (1.0f - e) * inverse_of(1.0f + e);
    float magnitude = size < 0.625f ? near : far;
    return x < 0.0f ? -magnitude : magnitude;
}

// x * factor, where factor is 0 long before x is minus infinity.
inline float damped(float x, float factor) {
    return max(x, -0x1p+127f) * factor;
}

inline float act_of(float x) {
    bool negative = x < 0.0f;
    if (ACTIVATION == RELU) {
        return negative ? 0.0f : x;
    }
    if (ACTIVATION == GELU_TANH) {
        Logistic s = gelu_logistic(min(abs(x), GELU_END));
        return damped(x, negative ? s.small : s.large);
    }
    if (ACTIVATION == GELU_ERF) {
        Normal n = normal_of(min(abs(x), GELU_END));
        return damped(x, negative ? n.tail : 1.0f - n.tail);
    }
    if (ACTIVATION == TANH) {
        return tanh_of(x);
    }
    Logistic s = logistic(min(abs(x), LOGISTIC_END));
    float value = negative ? s.small : s.large;
    return ACTIVATION == SILU ? damped(x, value) : value;
}

inline float slope_of(float x) {
    bool negative = x < 0.0f;
    if (ACTIVATION == RELU) {
        return x > 0.0f ? 1.0f : 0.0f;
    }
    if (ACTIVATION == GELU_TANH) {
        // sigmoid(v) + x sigmoid'(v) v': on the negative side the sigmoid is the small one, and x is negative.
        float size = min(abs(x), GELU_END);
        Logistic s = gelu_logistic(size);
        float rise = size * fma(size * size, 3.0f * GELU_CUBIC, GELU_LINEAR);
        return fma(negative ? -rise : rise, s.small * s.large, negative ? s.small : s.large);
    }
    if (ACTIVATION == GELU_ERF) {
        // The distribution plus x times the density; for x > 0, 1 - tail + x density.
        float size = min(abs(x), GELU_END);
        Normal n = normal_of(size);
        float side = fma(size, n.density, -n.tail);
        return negative ? -side : 1.0f + side;
    }
    if (ACTIVATION == TANH) {
        // 1 - tanh^2 = 4 e / (1 + e)^2, e = exp(-2|x|)
        Logistic s = logistic(2.0f * min(abs(x), LOGISTIC_END));
        return 4.0f * (s.small * s.large);
    }
    float size = min(abs(x), LOGISTIC_END);
    Logistic s = logistic(size);
    if (ACTIVATION == SILU) {
        return fma(negative ? -size : size, s.small * s.large, negative ? s.small : s.large);
    }
    return s.small * s.large;
}

inline float activate(float x) {
    return is_nan(x) ? x : act_of(x);
}

inline float4 activate(float4 x) {
    if (ACTIVATION == NONE) {
        return x;
    }
    return float4(activate(x.x), activate(x.y), activate(x.z), activate(x.w));
}

// The derivative of activate(). A NaN gives a NaN, or 0.
inline float activate_slope(float x, bool zero_nan) {
    if (is_nan(x)) {
        return zero_nan ? 0.0f : x;
    }
    return slope_of(x);
}

inline float4 activate_slope(float4 x, bool zero_nan) {
    if (ACTIVATION == NONE) {
        return float4(1.0f);
    }
    return float4(activate_slope(x.x, zero_nan), activate_slope(x.y, zero_nan), activate_slope(x.z, zero_nan),
                  activate_slope(x.w, zero_nan));
}

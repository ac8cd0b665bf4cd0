/* SPDX-License-Identifier: MIT */
/*
 * The seven activations and their derivatives over vf. Each is finite and right for every finite x and takes its limit
 * at +-Inf; a NaN stays a NaN.
 *
 * Two rules keep that: nothing is computed as 1 minus what tends to 1, and x is clamped where the other factor has
 * become exactly 0 or 1, so that no 0 meets an Inf.
 */
#ifndef VJP_CPU_ACTIVATION_H
#define VJP_CPU_ACTIVATION_H

#include "cpu/simd/vec_math.h"

/* Beyond, the logistic function and its slope are 0 or 1 in f32; for gelu's tanh form and for its erf form likewise. */
static const float LOGISTIC_END = 110, GELU_TANH_END = 12, GELU_ERF_END = 16;

/* Below, 1 + exp(x) is 1 and exp(x) may be denormal. */
static const float SILU_TAIL = -87;

/*
 * gelu's tanh form is x sigmoid(v), v = 2 sqrt(2/pi) (x + 0.044715 x^3) = x (LINEAR + CUBIC x^2); REST is what f32
 * loses of the two numbers. LINEAR is a multiple of 2^-19, the last digit of LINEAR + CUBIC x^2 at the end.
 */
static const float GELU_LINEAR = 1.5957698822021484f, GELU_LINEAR_REST = -7.605964177e-07f;
static const float GELU_CUBIC = 0.07135481627260025f, GELU_CUBIC_REST = 2.398832396e-09f;

/* x; for -Inf, of which no factor makes 0, a number that is large enough. */
INLINE vf above_minus_infinity(vf x) {
    return vf_max(vf_set(-0x1p+127f), x);
}

/* x * factor, where factor is 0 long before x is -Inf. */
INLINE vf damped(vf x, vf factor) {
    return vf_mul(above_minus_infinity(x), factor);
}

/* The normal distribution function. */
INLINE vf normal_below(vf x) {
    vf density, tail = vf_normal(x, &density);
    return vf_select(vf_less(x, vf_zero()), tail, vf_sub(vf_set(1), tail));
}

/* With e = exp(-|v|): sigmoid(v) and sigmoid(-v), neither by subtraction. */
typedef struct logistic {
    vf value, complement;
} logistic;

INLINE logistic logistic_from(vf e, vi negative) {
    vf large = vf_div(vf_set(1), vf_add(vf_set(1), e)), small = vf_mul(e, large);
    return (logistic){vf_select(negative, small, large), vf_select(negative, large, small)};
}

INLINE logistic logistic_of(vf v) {
    return logistic_from(exp_below_zero(vf_abs(v)), vf_signed(v));
}

/*
 * exp(-v) of gelu's tanh form, for size = |x| up to GELU_TANH_END. Far out v is 70 and more, and its rounding error
 * alone would be 1e-5 of exp(-v): v is a sum of two floats here, the second what every rounding of the first lost.
 * LINEAR - sum is exact.
 */
INLINE vf gelu_exp(vf size) {
    vf cubic = vf_set(GELU_CUBIC), linear = vf_set(GELU_LINEAR);
    vf square = vf_mul(size, size), square_rest = vf_fma(size, size, vf_neg(square));
    vf sum = vf_fma(square, cubic, linear), sum_rest = vf_fma(square, cubic, vf_sub(linear, sum));
    sum_rest = vf_add(sum_rest, vf_fma(square, vf_set(GELU_CUBIC_REST), vf_set(GELU_LINEAR_REST)));
    sum_rest = vf_fma(square_rest, cubic, sum_rest);
    vf v = vf_mul(size, sum), v_rest = vf_fma(size, sum_rest, vf_fma(size, sum, vf_neg(v)));
    vf e = exp_within(vf_neg(v));
    return vf_fma(vf_neg(v_rest), e, e);
}

/* |x|, at most GELU_TANH_END. */
INLINE vf gelu_size(vf x) {
    return vf_min(vf_set(GELU_TANH_END), vf_abs(x));
}

INLINE vf gelu_tanh(vf x) {
    vf e = gelu_exp(gelu_size(x)), numerator = vf_select(vf_signed(x), e, vf_set(1));
    return vf_div(vf_mul(above_minus_infinity(x), numerator), vf_add(vf_set(1), e));
}

/* sigmoid + x sigmoid' v' */
INLINE vf gelu_tanh_slope(vf x) {
    vf size = gelu_size(x);
    vf dv = vf_fma(vf_mul(size, size), vf_set(3 * GELU_CUBIC), vf_set(GELU_LINEAR + GELU_LINEAR_REST));
    logistic s = logistic_from(gelu_exp(size), vf_signed(x));
    return vf_fma(vf_mul(vf_mul(vf_copysign(size, x), dv), s.complement), s.value, s.value);
}

/*
 * silu and its derivative from one exp. Where exp(x) is a denormal number, they are x exp(x) and (1 + x) exp(x), which
 * have more digits than exp(x) itself: the factor is multiplied before the power of 2.
 */
INLINE vf silu_and_slope(vf x, vf *slope) {
    vf near = vf_clamp(x, -LOGISTIC_END, LOGISTIC_END);
    exp_parts parts = exp_split(vf_neg(vf_abs(near)));
    logistic s = logistic_from(exp_join(parts.e, parts.rounded), vf_signed(near));
    vi tiny = vf_less(x, vf_set(SILU_TAIL));
    *slope = vf_select(tiny, exp_join(vf_fma(near, parts.e, parts.e), parts.rounded),
                       vf_fma(vf_mul(near, s.complement), s.value, s.value));
    return vf_select(tiny, exp_join(vf_mul(near, parts.e), parts.rounded), damped(x, s.value));
}

/* silu alone, by one division: its last bit may be another than silu_and_slope() gives. */
INLINE vf silu(vf x) {
    exp_parts parts = exp_split(vf_neg(vf_min(vf_set(LOGISTIC_END), vf_abs(x))));
    vf e = exp_join(parts.e, parts.rounded), numerator = vf_select(vf_signed(x), e, vf_set(1));
    vf near = vf_max(vf_set(-LOGISTIC_END), x);
    return vf_select(vf_less(x, vf_set(SILU_TAIL)), exp_join(vf_mul(near, parts.e), parts.rounded),
                     damped(x, vf_div(numerator, vf_add(vf_set(1), e))));
}

INLINE vf activate(vjp_activation activation, vf x) {
    switch (activation) {
    case VJP_ACTIVATION_NONE: return x;
    case VJP_ACTIVATION_RELU: return vf_select(vf_less(x, vf_zero()), vf_zero(), x); /* this way round a NaN stays */
    case VJP_ACTIVATION_GELU_TANH: return gelu_tanh(x);
    case VJP_ACTIVATION_GELU_ERF: return damped(x, normal_below(x));
    case VJP_ACTIVATION_SILU: return silu(x);
    case VJP_ACTIVATION_SIGMOID: return vf_sigmoid(x);
    case VJP_ACTIVATION_TANH: return vf_tanh(x);
    }
    return x;
}

/* The derivative of activate(). */
INLINE vf activate_slope(vjp_activation activation, vf x) {
    switch (activation) {
    case VJP_ACTIVATION_NONE: return vf_set(1);
    case VJP_ACTIVATION_RELU: {
        vf slope = vf_select(vf_greater(x, vf_zero()), vf_set(1), vf_zero());
        return vf_select(vf_is_nan(x), x, slope);
    }
    case VJP_ACTIVATION_GELU_TANH: return gelu_tanh_slope(x);
    case VJP_ACTIVATION_GELU_ERF: {
        /* The distribution plus x times the density; for x > 0, 1 - tail + x density. */
        x = vf_clamp(x, -GELU_ERF_END, GELU_ERF_END);
        vf density, tail = vf_normal(x, &density);
        vi negative = vf_less(x, vf_zero());
        vf side = vf_select(negative, tail, vf_neg(tail));
        return vf_add(vf_select(negative, vf_zero(), vf_set(1)), vf_fma(x, density, side));
    }
    case VJP_ACTIVATION_SILU: {
        vf slope;
        silu_and_slope(x, &slope);
        return slope;
    }
    case VJP_ACTIVATION_SIGMOID: {
        logistic s = logistic_of(x);
        return vf_mul(s.value, s.complement);
    }
    case VJP_ACTIVATION_TANH: {
        /* 1 - tanh^2 = 4 e / (1 + e)^2, e = exp(-2|x|) */
        logistic s = logistic_of(vf_add(x, x));
        return vf_mul(vf_mul(s.value, s.complement), vf_set(4));
    }
    }
    return vf_set(1);
}

#endif

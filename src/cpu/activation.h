/*
 * The seven activations and their derivatives over vf. Each is finite and right for every finite x and takes its limit
 * at +-Inf; a NaN stays a NaN.
 *
 * Two rules keep that: nothing is computed as 1 minus what tends to 1, and x is clamped where the other factor has
 * become exactly 0 or 1, so that no 0 meets an Inf.
 */
#ifndef VJP_CPU_ACTIVATION_H
#define VJP_CPU_ACTIVATION_H

#include "cpu/vec_math.h"

/* Beyond, the logistic function and its slope are 0 or 1 in f32; for gelu's tanh form and for its erf form likewise. */
static const float LOGISTIC_END = 110, GELU_END = 16;

/*
 * gelu's tanh form is x sigmoid(v), v = 2 sqrt(2/pi) (x + 0.044715 x^3) = x (LINEAR + CUBIC x^2); REST is what f32
 * loses of the two numbers.
 */
static const float GELU_LINEAR = 1.5957691216057308f, GELU_LINEAR_REST = -4.534068042e-08f;
static const float GELU_CUBIC = 0.07135481627260025f, GELU_CUBIC_REST = 2.398832396e-09f;

/* x * factor, where factor is 0 long before x is -Inf. */
INLINE vf damped(vf x, vf factor) {
    return vf_mul(vf_select(vf_less(x, vf_set(-0x1p+127f)), vf_set(-0x1p+127f), x), factor);
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
    return logistic_from(vf_exp(vf_sub(vf_zero(), vf_abs(v))), vf_less(v, vf_zero()));
}

/*
 * sigmoid(v) of gelu's tanh form, for x within GELU_END. Far out |v| is 70 and more, and its rounding error alone would
 * be 1e-5 of exp(-|v|): v is a sum of two floats here, the second what every rounding of the first lost.
 */
INLINE logistic gelu_logistic(vf x) {
    vf cubic = vf_set(GELU_CUBIC), linear = vf_set(GELU_LINEAR), zero = vf_zero();
    vf size = vf_abs(x), square = vf_mul(size, size), square_rest = vf_fma(size, size, vf_sub(zero, square));
    vf product = vf_mul(square, cubic), sum = vf_add(product, linear);
    vf rest = vf_add(vf_fma(square, cubic, vf_sub(zero, product)), vf_sub(linear, vf_sub(sum, product)));
    rest = vf_add(rest, vf_fma(square, vf_set(GELU_CUBIC_REST), vf_set(GELU_LINEAR_REST)));
    rest = vf_fma(square_rest, cubic, rest);
    vf v = vf_mul(size, sum), v_rest = vf_fma(size, rest, vf_fma(size, sum, vf_sub(zero, v)));
    vf e = vf_exp(vf_sub(zero, v));
    return logistic_from(vf_fma(vf_sub(zero, v_rest), e, e), vf_less(x, zero));
}

INLINE vf activate(vjp_activation activation, vf x) {
    switch (activation) {
    case VJP_ACT_NONE: return x;
    case VJP_ACT_RELU: return vf_select(vf_less(x, vf_zero()), vf_zero(), x); /* this way round a NaN stays */
    case VJP_ACT_GELU_TANH: return damped(x, gelu_logistic(vf_clamp(x, -GELU_END, GELU_END)).value);
    case VJP_ACT_GELU_ERF: return damped(x, normal_below(x));
    case VJP_ACT_SILU: return damped(x, vf_sigmoid(x));
    case VJP_ACT_SIGMOID: return vf_sigmoid(x);
    case VJP_ACT_TANH: return vf_tanh(x);
    }
    return x;
}

/* silu and its derivative from one exp. */
INLINE vf silu_and_slope(vf x, vf *slope) {
    vf near = vf_clamp(x, -LOGISTIC_END, LOGISTIC_END);
    logistic s = logistic_of(near);
    *slope = vf_fma(vf_mul(near, s.complement), s.value, s.value);
    return damped(x, s.value);
}

/* The derivative of activate(). */
INLINE vf activate_slope(vjp_activation activation, vf x) {
    switch (activation) {
    case VJP_ACT_NONE: return vf_set(1);
    case VJP_ACT_RELU: {
        vf slope = vf_select(vf_greater(x, vf_zero()), vf_set(1), vf_zero());
        return vf_select(vf_is_nan(x), x, slope);
    }
    case VJP_ACT_GELU_TANH: {
        x = vf_clamp(x, -GELU_END, GELU_END);
        vf square = vf_mul(x, x), dv = vf_fma(square, vf_set(3 * GELU_CUBIC), vf_set(GELU_LINEAR));
        logistic s = gelu_logistic(x);
        /* sigmoid + x sigmoid' v' */
        return vf_fma(vf_mul(vf_mul(x, dv), s.complement), s.value, s.value);
    }
    case VJP_ACT_GELU_ERF: {
        /* The distribution plus x times the density; for x > 0, 1 - tail + x density. */
        x = vf_clamp(x, -GELU_END, GELU_END);
        vf density, tail = vf_normal(x, &density);
        vi negative = vf_less(x, vf_zero());
        vf side = vf_select(negative, tail, vf_sub(vf_zero(), tail));
        return vf_add(vf_select(negative, vf_zero(), vf_set(1)), vf_fma(x, density, side));
    }
    case VJP_ACT_SILU: {
        vf slope;
        silu_and_slope(x, &slope);
        return slope;
    }
    case VJP_ACT_SIGMOID: {
        logistic s = logistic_of(x);
        return vf_mul(s.value, s.complement);
    }
    case VJP_ACT_TANH: {
        /* 1 - tanh^2 = 4 e / (1 + e)^2, e = exp(-2|x|) */
        logistic s = logistic_of(vf_add(x, x));
        return vf_mul(vf_mul(s.value, s.complement), vf_set(4));
    }
    }
    return vf_set(1);
}

#endif

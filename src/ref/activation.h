/* SPDX-License-Identifier: MIT */
/*
 * The seven activations and their derivatives in double. Each is finite and accurate for every finite x and has its
 * limit at plus and minus infinity, which a product in single precision may have overflowed to; a NaN stays a NaN.
 *
 * Two rules avoid cancellation and 0 * Inf: nothing is computed as 1 minus what tends to 1 (1 - tanh^2 has no digit
 * left past |x| = 19 in double, past 9 in float), and a product with a factor that has become 0 is 0, even if another
 * is infinite.
 */
#ifndef VJP_REF_ACTIVATION_H
#define VJP_REF_ACTIVATION_H

#include <math.h>

#include "vjp.h"

static const double REF_SQRT_HALF = 0.70710678118654752440;       /* 1/sqrt(2) */
static const double REF_SQRT_2_OVER_PI = 0.79788456080286535588;  /* of gelu's tanh form */
static const double REF_1_OVER_SQRT_2PI = 0.39894228040143267794; /* of the normal density */
static const double REF_GELU_CUBIC = 0.044715;                    /* of gelu's tanh form */

/* x * factor, and 0 where the factor, which tends to 0 faster than x grows, has become 0. */
static inline double ref_damped(double x, double factor) {
    return factor == 0 ? 0 : x * factor;
}

static inline double ref_sigmoid(double x) {
    if (x >= 0) return 1 / (1 + exp(-x));
    double e = exp(x);
    return e / (1 + e);
}

/* sigmoid * (1 - sigmoid), the second factor without the subtraction. */
static inline double ref_sigmoid_slope(double x) {
    return ref_sigmoid(x) * ref_sigmoid(-x);
}

/* (1 + tanh(u)) / 2 = sigmoid(2 u): gelu's tanh form is x * sigmoid(v(x)), v = 2 sqrt(2/pi) (x + 0.044715 x^3). */
static inline double ref_gelu_argument(double x) {
    return 2 * REF_SQRT_2_OVER_PI * x * (1 + REF_GELU_CUBIC * x * x);
}

static inline double ref_activate(vjp_activation activation, double x) {
    switch (activation) {
    case VJP_ACTIVATION_NONE: return x;
    case VJP_ACTIVATION_RELU: return x < 0 ? 0 : x; /* written so that a NaN stays a NaN */
    case VJP_ACTIVATION_GELU_TANH: return ref_damped(x, ref_sigmoid(ref_gelu_argument(x)));
    case VJP_ACTIVATION_GELU_ERF: return ref_damped(x, 0.5 * erfc(-x * REF_SQRT_HALF));
    case VJP_ACTIVATION_SILU: return ref_damped(x, ref_sigmoid(x));
    case VJP_ACTIVATION_SIGMOID: return ref_sigmoid(x);
    case VJP_ACTIVATION_TANH: return tanh(x);
    }
    return x;
}

static inline double ref_activate_slope(vjp_activation activation, double x) {
    switch (activation) {
    case VJP_ACTIVATION_NONE: return 1;
    case VJP_ACTIVATION_RELU: return isnan(x) ? x : x > 0 ? 1 : 0;
    case VJP_ACTIVATION_GELU_TANH: {
        double v = ref_gelu_argument(x);
        double dv = 2 * REF_SQRT_2_OVER_PI * (1 + 3 * REF_GELU_CUBIC * x * x);
        return ref_sigmoid(v) + ref_damped(x * dv, ref_sigmoid_slope(v));
    }
    case VJP_ACTIVATION_GELU_ERF:
        return 0.5 * erfc(-x * REF_SQRT_HALF) + ref_damped(x, REF_1_OVER_SQRT_2PI * exp(-0.5 * x * x));
    case VJP_ACTIVATION_SILU: return ref_sigmoid(x) + ref_damped(x, ref_sigmoid_slope(x));
    case VJP_ACTIVATION_SIGMOID: return ref_sigmoid_slope(x);
    case VJP_ACTIVATION_TANH: {
        double sech = 1 / cosh(x);
        return sech * sech;
    }
    }
    return 1;
}

#endif

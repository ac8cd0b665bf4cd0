/* SPDX-License-Identifier: MIT */
/*
 * exp, tanh, the logistic function and the normal distribution over vf. Each is a polynomial of our own fitting (least
 * maximum relative error) under explicit FMAs, so the bits are equal wherever there is FMA. Against libm in
 * double they are within a few units in the last place, at both ends too; a NaN stays a NaN.
 */
#ifndef VJP_CPU_VEC_MATH_H
#define VJP_CPU_VEC_MATH_H

#include "cpu/simd/vec.h"

/* x within [low, high]; a NaN stays. */
INLINE vf vf_clamp(vf x, float low, float high) {
    return vf_min(vf_set(high), vf_max(vf_set(low), x));
}

/* c[0] + x (c[1] + x (c[2] + ...)) */
INLINE vf vf_polynomial(vf x, const float *c, int count) {
    vf sum = vf_set(c[count - 1]);
    for (int i = count - 2; i >= 0; i--)
        sum = vf_fma(sum, x, vf_set(c[i]));
    return sum;
}

/* exp(x) = 2^n e with e from 0.7 to 1.42, for x from -170 to 89. */
typedef struct exp_parts {
    vf e, rounded; /* rounded: n + EXP_ROUNDER */
} exp_parts;

static const float EXP_ROUNDER = 0x1.8p+23f; /* a sum with it holds the nearest integer in its low bits */

/* e = exp(r), r = x - n ln 2 within half of ln 2. */
INLINE exp_parts exp_split(vf x) {
    const float log2_e = 0x1.715476p+0f, ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
    const float c[] = {0x1.fffffcp-2f, 0x1.55549p-3f, 0x1.5558f6p-5f, 0x1.123a8ep-7f, 0x1.6a2316p-10f};
    vf rounded = vf_fma(x, vf_set(log2_e), vf_set(EXP_ROUNDER));
    vf n = vf_sub(rounded, vf_set(EXP_ROUNDER));
    vf r = vf_fma(n, vf_set(-ln2_low), vf_fma(n, vf_set(-ln2_high), x));
    return (exp_parts){vf_add(vf_fma(vf_mul(r, r), vf_polynomial(r, c, 5), r), vf_set(1)), rounded};
}

/*
 * 2^n e. The power is multiplied in two halves, so that results go gradually through the denormals to 0, and to Inf
 * only where they must; AVX-512 has one instruction that does just that, with the same bits.
 */
INLINE vf exp_join(vf e, vf rounded) {
#if defined(CPU_ISA_AVX512)
    vf n = vf_sub(rounded, vf_set(EXP_ROUNDER));
    EACH_PART e.v[p] = (native_f)_mm512_scalef_ps((__m512)e.v[p], (__m512)n.v[p]);
#else
    const int32_t rounder_bits = 0x4b400000, exponent_bias = 127;
    EACH_PART {
        native_i power = (native_i)rounded.v[p] - rounder_bits, half = power >> 1;
        native_f first = (native_f)((half + exponent_bias) << 23);
        native_f second = (native_f)((power - half + exponent_bias) << 23);
        e.v[p] = e.v[p] * first * second;
    }
#endif
    return e;
}

INLINE vf exp_within(vf x) {
    exp_parts parts = exp_split(x);
    return exp_join(parts.e, parts.rounded);
}

/* For every x: 0 below -104, Inf from 88.73 on. */
INLINE vf vf_exp(vf x) {
    return exp_within(vf_clamp(x, -104, 89));
}

typedef double native_d __attribute__((vector_size(NATIVE_LANES * 4)));
typedef int64_t native_l __attribute__((vector_size(NATIVE_LANES * 4)));

/*
 * The natural logarithm of positive normal numbers (0 gives -Inf, Inf and NaN themselves) in double, right to 5e-16. By
 * plain operations alone: libm's bits are another machine's own.
 */
INLINE native_d native_log(native_d x) {
    const double ln2 = 0.693147180559945309;
    const int64_t root_half = 0x3fe6a09e667f3bcd; /* sqrt(1/2): x = 2^n m, m from there to twice that */
    const int64_t infinity = 0x7ff0000000000000, minus_infinity = (int64_t)0xfff0000000000000;
    native_l bits = (native_l)x, n = (bits - root_half) >> 52;
    native_d m = (native_d)(bits - (n << 52));
    /* log m = 2 atanh(s); |s| is at most 0.172, so that the series of 11 terms ends below 2^-56. */
    native_d s = (m - 1) / (m + 1), square = s * s, sum = {0};
    for (int k = 21; k >= 3; k -= 2)
        sum = (sum + 1.0 / k) * square;
    native_d log = __builtin_convertvector(n, native_d) * ln2 + (2 * s + 2 * s * sum);
    native_l normal = (bits > 0) & (bits < infinity), zero = (bits << 1) == 0;
    native_l other = (zero & minus_infinity) | (~zero & bits);
    return (native_d)((normal & (native_l)log) | (~normal & other));
}

/* Of LANES numbers in their place. */
INLINE void f64_logs(double x[LANES]) {
    for (int i = 0; i < LANES; i += NATIVE_LANES / 2) {
        native_d some;
        memcpy(&some, x + i, sizeof some);
        some = native_log(some);
        memcpy(x + i, &some, sizeof some);
    }
}

/*
 * exp(x) for softmax, where x is the distance below a maximum: half the work of vf_exp, for no denormals and no way to
 * overflow. Right to 9e-8 down to -10 and to 3e-7 at the end (n ln 2 is taken off in one step), where it counts for
 * nothing beside the maximum's 1; below -88 the factor 2^n is 0; above 87 it is wrong.
 */
INLINE vf vf_exp_below(vf x) {
    const float log2_e = 0x1.715476p+0f, ln2 = 0x1.62e43p-1f, least = -88.03f; /* where n is -127 */
    const float rounder = 0x1.8p+23f + 127; /* a sum with it holds the exponent of 2^n in its low bits */
    const float c[] = {1, 1, 0x1.fffffcp-2f, 0x1.55549p-3f, 0x1.5558f6p-5f, 0x1.123a8ep-7f, 0x1.6a2316p-10f};
    x = vf_max(vf_set(least), x);
    vf rounded = vf_fma(x, vf_set(log2_e), vf_set(rounder));
    vf r = vf_fma(vf_sub(rounded, vf_set(rounder)), vf_set(-ln2), x);
    return vf_mul(vf_polynomial(r, c, 7), vi_as_vf(vi_shift_left(vf_bits(rounded), 23)));
}

/* exp(-size) for size >= 0. */
INLINE vf exp_below_zero(vf size) {
    return exp_within(vf_neg(vf_min(vf_set(104), size)));
}

/* 1 / (1 + exp(-x)), through exp(-|x|) so that both tails keep their digits. */
INLINE vf vf_sigmoid(vf x) {
    vf e = exp_below_zero(vf_abs(x));
    vf numerator = vf_select(vf_signed(x), e, vf_set(1));
    return vf_div(numerator, vf_add(vf_set(1), e));
}

/* Odd polynomial below 0.625; above, (1 - e) / (1 + e) with e = exp(-2|x|), which has no cancellation there. */
INLINE vf vf_tanh(vf x) {
    const float c[] = {-0x1.555532p-2f, 0x1.110726p-3f, -0x1.b83c5ap-5f, 0x1.52269ep-6f, -0x1.75e1dap-8f};
    vf size = vf_abs(x), square = vf_mul(size, size);
    vf near = vf_fma(vf_mul(size, square), vf_polynomial(square, c, 5), size);
    vf e = exp_below_zero(vf_add(size, size));
    vf far = vf_div(vf_sub(vf_set(1), e), vf_add(vf_set(1), e));
    return vf_copysign(vf_select(vf_less(size, vf_set(0.625f)), near, far), x);
}

/*
 * The normal density at x and the distribution's tail beyond |x|. The tail is the density times Mills' ratio, which
 * is P((t - 3) / (t + 3)) / (t + 3) for t = |x|, so it has full relative accuracy as far as f32 goes. The density's
 * exponent is taken with the rounding error of x^2, which at the end of the range is worth 50 units.
 */
INLINE vf vf_normal(vf x, vf *density) {
    const float c[] = {0x1.d3d9c6p+0f, -0x1.46d63cp+0f, 0x1.273408p-1f,  -0x1.e534ep-4f,   -0x1.adab98p-6f,
                       0x1.1ce80ep-6f, 0x1.4def0cp-9f,  -0x1.371482p-9f, -0x1.0abc6ep-11f, 0x1.1376c8p-13f};
    const float root_2pi_inverse = 0x1.988454p-2f;
    vf t = vf_min(vf_set(15), vf_abs(x)); /* both are 0 from 14.5 on */
    vf square = vf_mul(t, t), missed = vf_fma(t, t, vf_neg(square));
    vf bell = exp_within(vf_mul(square, vf_set(-0.5f)));
    bell = vf_mul(vf_fma(vf_mul(missed, vf_set(-0.5f)), bell, bell), vf_set(root_2pi_inverse));
    vf inverse = vf_div(vf_set(1), vf_add(t, vf_set(3)));
    vf ratio = vf_mul(vf_polynomial(vf_mul(vf_sub(t, vf_set(3)), inverse), c, 10), inverse);
    *density = bell;
    return vf_mul(bell, ratio);
}

#endif

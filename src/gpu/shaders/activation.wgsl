// SPDX-License-Identifier: MIT
// The seven activations and their derivatives, four at a time; ACTIVATION says which. Each is finite and right for
// every finite x and reaches its limit at plus and minus infinity; a NaN stays a NaN.
//
// Three rules keep that. Nothing is computed as 1 minus something that tends to 1: 1 - tanh^2 has no digit left past |x| = 9. x is
// clamped where the other factor has become 0 or 1, so that no 0 meets an infinity. And a compiler may assume that
// there are no NaN and no infinities: NaN are set aside by their bits first, and nothing here overflows on the way.
// WGSL's own exp and tanh may be wrong in the fifth digit, so these are polynomials, within a few units of the last
// place; the tails of gelu, below 1e-8, are right to 1e-5, because the rounding of their exponent counts there. What is
// below 1e-38 is 0.

const NONE = 0u;
const RELU = 1u;
const GELU_TANH = 2u;
const GELU_ERF = 3u;
const SILU = 4u;
const SIGMOID = 5u;
const TANH = 6u;

//# include exponential

// Beyond, the logistic function and its slope are 0 or 1; for both forms of gelu likewise.
const LOGISTIC_END = vec4<f32>(110.0);
const GELU_END = vec4<f32>(13.0);

// gelu's tanh form is x sigmoid(v), v = 2 sqrt(2/pi) (x + 0.044715 x^3) = x (LINEAR + CUBIC x^2).
const GELU_LINEAR = vec4<f32>(1.5957691216057308);
const GELU_CUBIC = vec4<f32>(0.07135481627260025);

// 1/x to a unit or so: division may be off by 2.5, and a step of Newton's mends that. x from 1 to 1e30.
fn inverse_of(x: vec4<f32>) -> vec4<f32> {
    let y = ONE / x;
    return fma(y, fma(-x, y, ONE), y);
}

// The logistic function of |v| and of -|v|, neither by subtraction.
struct Logistic {
    large: vec4<f32>,
    small: vec4<f32>,
}

fn logistic(size: vec4<f32>) -> Logistic {
    let e = exp_down(-size);
    let large = inverse_of(ONE + e);
    return Logistic(large, e * large);
}

fn gelu_logistic(size: vec4<f32>) -> Logistic {
    return logistic(size * fma(size * size, GELU_CUBIC, GELU_LINEAR));
}

// The normal density at x and the distribution's tail beyond |x|. The tail is the density times Mills' ratio, which is
// P((t - 3) / (t + 3)) / (t + 3) for t = |x|, so it has its digits as far as f32 goes. The density's exponent is taken
// with the rounding error of x^2, which far out is worth 40 units, on GPUs whose fma() rounds once.
struct Normal {
    density: vec4<f32>,
    tail: vec4<f32>,
}

fn normal_of(t: vec4<f32>) -> Normal {
    let square = t * t;
    let missed = fma(t, t, -square);
    var bell = exp_down(-0.5 * square);
    bell = fma(-0.5 * missed, bell, bell) * 0x1.988454p-2;
    let inverse = inverse_of(t + 3.0);
    let z = (t - 3.0) * inverse;
    var p = fma(z, vec4<f32>(0x1.1376c8p-13), vec4<f32>(-0x1.0abc6ep-11));
    p = fma(p, z, vec4<f32>(-0x1.371482p-9));
    p = fma(p, z, vec4<f32>(0x1.4def0cp-9));
    p = fma(p, z, vec4<f32>(0x1.1ce80ep-6));
    p = fma(p, z, vec4<f32>(-0x1.adab98p-6));
    p = fma(p, z, vec4<f32>(-0x1.e534ep-4));
    p = fma(p, z, vec4<f32>(0x1.273408p-1));
    p = fma(p, z, vec4<f32>(-0x1.46d63cp+0));
    p = fma(p, z, vec4<f32>(0x1.d3d9c8p+0));
    return Normal(bell, bell * (p * inverse));
}

// Odd polynomial below 0.625; above, (1 - e) / (1 + e) with e = exp(-2|x|), which has no cancellation there.
fn tanh_of(x: vec4<f32>) -> vec4<f32> {
    let size = min(abs(x), LOGISTIC_END);
    let square = min(size * size, ONE);
    var p = fma(square, vec4<f32>(-0x1.75e1dap-8), vec4<f32>(0x1.52269ep-6));
    p = fma(p, square, vec4<f32>(-0x1.b83c5ap-5));
    p = fma(p, square, vec4<f32>(0x1.110726p-3));
    p = fma(p, square, vec4<f32>(-0x1.555532p-2));
    let near = fma(size * square, p, size);
    let e = exp_down(-2.0 * size);
    let far = (ONE - e) * inverse_of(ONE + e);
    let magnitude = select(far, near, size < vec4<f32>(0.625));
    return select(magnitude, -magnitude, x < ZERO);
}

// x * factor, where factor is 0 long before x is minus infinity.
fn damped(x: vec4<f32>, factor: vec4<f32>) -> vec4<f32> {
    return max(x, vec4<f32>(-0x1p+127)) * factor;
}

fn act_of(x: vec4<f32>) -> vec4<f32> {
    let negative = x < ZERO;
    if (ACTIVATION == RELU) {
        return select(x, ZERO, negative);
    }
    if (ACTIVATION == GELU_TANH) {
        let s = gelu_logistic(min(abs(x), GELU_END));
        return damped(x, select(s.large, s.small, negative));
    }
    if (ACTIVATION == GELU_ERF) {
        let n = normal_of(min(abs(x), GELU_END));
        return damped(x, select(ONE - n.tail, n.tail, negative));
    }
    if (ACTIVATION == TANH) {
        return tanh_of(x);
    }
    let s = logistic(min(abs(x), LOGISTIC_END));
    let value = select(s.large, s.small, negative);
    if (ACTIVATION == SILU) {
        return damped(x, value);
    }
    return value;
}

fn slope_of(x: vec4<f32>) -> vec4<f32> {
    let negative = x < ZERO;
    if (ACTIVATION == RELU) {
        return select(ZERO, ONE, x > ZERO);
    }
    if (ACTIVATION == GELU_TANH) {
        // sigmoid(v) + x sigmoid'(v) v': on the negative side the sigmoid is the small one, and x is negative.
        let size = min(abs(x), GELU_END);
        let s = gelu_logistic(size);
        let rise = size * fma(size * size, 3.0 * GELU_CUBIC, GELU_LINEAR);
        return fma(select(rise, -rise, negative), s.small * s.large, select(s.large, s.small, negative));
    }
    if (ACTIVATION == GELU_ERF) {
        // The distribution plus x times the density; for x > 0, 1 - tail + x density.
        let size = min(abs(x), GELU_END);
        let n = normal_of(size);
        let side = fma(size, n.density, -n.tail);
        return select(ONE + side, -side, negative);
    }
    if (ACTIVATION == TANH) {
        // 1 - tanh^2 = 4 e / (1 + e)^2, e = exp(-2|x|)
        let s = logistic(2.0 * min(abs(x), LOGISTIC_END));
        return 4.0 * (s.small * s.large);
    }
    let size = min(abs(x), LOGISTIC_END);
    let s = logistic(size);
    if (ACTIVATION == SILU) {
        return fma(select(size, -size, negative), s.small * s.large, select(s.large, s.small, negative));
    }
    return s.small * s.large;
}

fn not_numbers(x: vec4<f32>) -> vec4<bool> {
    return (bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u);
}

fn activate(x: vec4<f32>) -> vec4<f32> {
    if (ACTIVATION == NONE) {
        return x;
    }
    let nan = not_numbers(x);
    return select(act_of(select(x, ZERO, nan)), x, nan);
}

// The derivative of activate(). A NaN gives a NaN, or 0.
fn activate_slope(x: vec4<f32>, zero_nan: bool) -> vec4<f32> {
    if (ACTIVATION == NONE) {
        return ONE;
    }
    let nan = not_numbers(x);
    return select(slope_of(select(x, ZERO, nan)), select(x, ZERO, vec4<bool>(zero_nan)), nan);
}

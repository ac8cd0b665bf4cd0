// SPDX-License-Identifier: MIT
// exp(x) and 1 - exp(x) for x <= 0, four at a time, by a polynomial: WGSL's own exp may be wrong in the fifth digit.

const ZERO = vec4<f32>();
const ONE = vec4<f32>(1.0);

// exp(x) = power (1 + rest).
struct Exponential {
    power: vec4<f32>,
    rest: vec4<f32>,
}

// exp(x) is 2^n exp(r), r = x - n ln 2 within half of ln 2. ln 2 is 22713 / 2^15 and a rest; n times the first is made
// of integers, because compilers may and do gather n (p + q) from n p + n q, which here would cost 30 units far out.
// x is -87 or more.
fn exponential(x: vec4<f32>) -> Exponential {
    let n = round(x * 1.44269502);
    let power = vec4<i32>(n);
    let r = fma(n, vec4<f32>(-0x1.7f7d1cp-20), x - vec4<f32>(power * 22713) * 0x1p-15);
    var p = fma(r, vec4<f32>(0x1.6a2316p-10), vec4<f32>(0x1.123a8ep-7));
    p = fma(p, r, vec4<f32>(0x1.5558f6p-5));
    p = fma(p, r, vec4<f32>(0x1.55549p-3));
    p = fma(p, r, vec4<f32>(0x1.fffffcp-2));
    return Exponential(bitcast<vec4<f32>>(vec4<u32>(power + vec4<i32>(127)) << vec4<u32>(23u)), fma(r * r, p, r));
}

// Below -87 it is 0.
fn exp_down(x: vec4<f32>) -> vec4<f32> {
    let e = exponential(max(x, vec4<f32>(-87.0)));
    return select((e.rest + ONE) * e.power, ZERO, x < vec4<f32>(-87.0));
}

// 1 - exp(x), with all its digits where x is near 0.
fn one_minus_exp(x: vec4<f32>) -> vec4<f32> {
    let e = exponential(max(x, vec4<f32>(-87.0)));
    return fma(-e.power, e.rest, ONE - e.power);
}

// SPDX-License-Identifier: MIT
// Sums of two f32 each: twice the digits of one, for sums of many terms. A shader that includes this has `zero: u32`, a
// 0 that compilers cannot know, in its Params.

struct Pair {
    high: vec2<f32>,
    low: vec2<f32>, // what rounding took from high
}

// v after rounding. By the rules of algebra a rounding takes away 0, and WGSL lets compilers apply them. Mesa's does:
// without this, running sums of 2^24 equal terms were wrong by 2.4e-7, much as with a carry of one f32, and with it by
// 2.5e-8. No compiler can know that u.p.zero is 0, so none removes this.
fn rounded(v: vec2<f32>) -> vec2<f32> {
    return bitcast<vec2<f32>>(bitcast<vec2<u32>>(v) ^ vec2<u32>(u.p.zero));
}

// p + v: the sum, and exactly what its rounding took away (Knuth's two-sum), normalised so that low is small against
// high. An infinite or NaN sum has low 0: inf - inf would turn it into a NaN.
fn plus(p: Pair, v: vec2<f32>) -> Pair {
    let sum = rounded(p.high + v);
    let part = rounded(sum - p.high);
    let lost = rounded(p.high - rounded(sum - part)) + rounded(v - part);
    let low = rounded(p.low + lost);
    let high = rounded(sum + low);
    let finite = (bitcast<vec2<u32>>(high) & vec2<u32>(0x7f800000u)) != vec2<u32>(0x7f800000u);
    return Pair(select(sum, high, finite), select(vec2<f32>(), low - rounded(high - sum), finite));
}

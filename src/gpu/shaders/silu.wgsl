// SPDX-License-Identifier: MIT
// silu and its slope with one exponential, for a product with another factor: swiglu, and linear with a gate. Included after
// activation.wgsl.

// Below -80 silu and its slope are x exp(x) and (1 + x) exp(x), and exp(x) may be too small for f32 where its product
// with a large factor is not. There exp(x + SHIFT) is used, and `last`, exp(-SHIFT), multiplies the finished product.
const TAIL = -80.0;
const SHIFT = 40.0;
const EXP_MINUS_SHIFT = 4.248354255291589e-18;
const SILU_END = vec4<f32>(130.0);

struct Silu {
    value: vec4<f32>,
    slope: vec4<f32>,
    last: vec4<f32>,
}

fn silu_of(gate: vec4<f32>) -> Silu {
    let nan = not_numbers(gate);
    let x = select(gate, ZERO, nan);
    let negative = x < ZERO;
    let tail = x < vec4<f32>(TAIL);
    let size = min(abs(x), SILU_END);
    let s = logistic(select(size, size - SHIFT, tail));
    let sigmoid = select(s.large, s.small, negative);
    let near = select(size, -size, negative);
    let value = select(x, near, negative) * sigmoid;
    let slope = fma(near * select(s.small, s.large, negative), sigmoid, sigmoid);
    return Silu(select(value, gate, nan), select(slope, gate, nan), select(ONE, vec4<f32>(EXP_MINUS_SHIFT), tail));
}

// SPDX-License-Identifier: MIT
// What the optimizers share: weight decay, and a gradient's factor. With a factor that is not finite a step changes
// nothing.
//# float lr scale

// g + decay w. Without decay an infinite w adds nothing, as 0 * Inf would: the product is then a zero of w's sign.
fn decayed(w: vec4<f32>, decay: f32, g: vec4<f32>) -> vec4<f32> {
    if (decay != 0.0) {
        return fma(w, vec4<f32>(decay), g);
    }
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(w) & vec4<u32>(0x80000000u)) + g;
}

fn scale_factor() -> f32 {
    if (scale_is) {
        return scale_at(0u);
    }
    return 1.0;
}

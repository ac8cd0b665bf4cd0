// SPDX-License-Identifier: MIT
// sgd: momentum = beta momentum + g + weight_decay w, w = w - lr momentum. The formulas are those of the CPU.
//# include elementwise
//# include decay

struct Params {
    e: Elements,
    decay: f32,
    beta: f32,
    nesterov: u32,
}

var<private> rate: f32;
var<private> factor: f32;

fn prepare(reports: bool) -> bool {
    rate = lr_at(0u);
    factor = scale_factor();
    return true;
}

// in0 is w, in1 g, in2 momentum; out0 w_out, out1 momentum_out. Without momentum its old value is not even 0: 0 * beta
// + -0 is 0.
fn formula(i: u32, v: Inputs) -> Outputs {
    if (!is_finite(factor)) {
        return outputs_of(v.in0, v.in2);
    }
    let beta = vec4<f32>(u.p.beta);
    let g = decayed(v.in0, u.p.decay, v.in1 * factor);
    var momentum = g;
    if (in2_is) {
        momentum = fma(v.in2, beta, g);
    }
    var direction = momentum;
    if (u.p.nesterov == 1u) {
        direction = fma(momentum, beta, g);
    }
    return outputs_of(fma(direction, vec4<f32>(-rate), v.in0), momentum);
}

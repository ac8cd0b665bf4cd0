// SPDX-License-Identifier: MIT
// adamw: a step of Adam with decoupled weight decay. The formulas are those of the CPU, operation by operation
// (docs/ops/adamw.md says why each has its form).
//
// lr, step and scale are read on the device. Each thread computes the bias corrections, in f32: 1 - beta^step as 1 -
// exp(step log(beta)) is as accurate as its argument. A step that is not an integer of at least 1 is reported, and
// nothing is written.
//# include elementwise
//# include decay
//# include exponential
//# index step
//# bad_index

struct Params {
    e: Elements,
    log_beta1: f32, // -200 or more, which is as good as minus infinity
    log_beta2: f32,
    keep_m: f32, // beta1, 1 - beta1
    take_m: f32,
    keep_v: f32, // beta2, 1 - beta2
    take_v: f32,
    eps: f32,
    decay: f32,
}

var<private> rate: f32;
var<private> factor: f32;
var<private> correct_m: f32;    // 1 / (1 - beta1^step)
var<private> correct_root: f32; // 1 / sqrt(1 - beta2^step)

fn prepare(reports: bool) -> bool {
    let number = step_integer(0u);
    if (number.z == 0u || (number.y & 0x80000000u) != 0u || (number.x | number.y) == 0u) {
        if (reports) {
            bad_index_explain(0u, step_raw(0u));
        }
        return false;
    }
    let count = fma(f32(number.y), 0x1p32, f32(number.x));
    let correction = one_minus_exp(vec4<f32>(count * u.p.log_beta1, count * u.p.log_beta2, -1.0, -1.0));
    rate = lr_at(0u);
    factor = scale_factor();
    correct_m = 1.0 / correction.x;
    correct_root = 1.0 / sqrt(correction.y);
    return true;
}

// in0 is w, in1 g, in2 m, in3 v; out0 w_out, out1 m_out, out2 v_out.
fn formula(i: u32, v: Inputs) -> Outputs {
    if (!is_finite(factor)) {
        return Outputs(v.in0, v.in2, v.in3);
    }
    let g = v.in1 * factor;
    let m = fma(v.in2, vec4<f32>(u.p.keep_m), g * u.p.take_m);
    let squares = fma(v.in3, vec4<f32>(u.p.keep_v), g * u.p.take_v * g);
    let size = fma(sqrt(squares), vec4<f32>(correct_root), vec4<f32>(u.p.eps));
    // Nothing averaged yet and no eps: 0 / 0, and the weight stays.
    let direction = select(m * correct_m / size, ZERO, size == ZERO);
    return Outputs(fma(decayed(v.in0, u.p.decay, direction), vec4<f32>(-rate), v.in0), m, squares);
}

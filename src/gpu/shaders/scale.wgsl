// SPDX-License-Identifier: MIT
// scale: y = factor * x. The backward is the forward with dy for x.
//# include elementwise

struct Params {
    e: Elements,
    factor: f32,
}

fn prepare(reports: bool) -> bool {
    return true;
}

fn formula(i: u32, v: Inputs) -> Outputs {
    return outputs_of(u.p.factor * v.in0, vec4<f32>());
}

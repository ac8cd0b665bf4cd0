// SPDX-License-Identifier: MIT
// mean, the backward: dx = dy / length, in1 being dy, repeated over the averaged axes. The forward is in sums.wgsl.
//# include elementwise

struct Params {
    e: Elements,
    share: f32, // 1 / length
}

fn prepare(reports: bool) -> bool {
    return true;
}

fn formula(i: u32, v: Inputs) -> Outputs {
    return outputs_of(v.in1 * u.p.share, vec4<f32>());
}

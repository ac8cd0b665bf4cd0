// SPDX-License-Identifier: MIT
// cast: the same numbers; the accesses convert and round. The backward is the forward with dy for x.
//# include elementwise

struct Params {
    e: Elements,
}

fn prepare(reports: bool) -> bool {
    return true;
}

fn formula(i: u32, v: Inputs) -> Outputs {
    return outputs_of(v.in0, vec4<f32>());
}

// SPDX-License-Identifier: MIT
// add: y = a + b; da = dy, db = dy. Where b is repeated, db is a sum (sums.wgsl).
//# include elementwise

struct Params {
    e: Elements,
}

fn prepare(reports: bool) -> bool {
    return true;
}

// Forward: in0 is a, in1 b. Backward: in0 is dy, out0 da, out1 db.
fn formula(i: u32, v: Inputs) -> Outputs {
    if (BACKWARD == 1u) {
        return outputs_of(v.in0, v.in0);
    }
    return outputs_of(v.in0 + v.in1, vec4<f32>());
}

// SPDX-License-Identifier: MIT
// mul: y = a b; da = dy b, db = dy a. Where b is repeated, db is a sum (sums.wgsl).
//# include elementwise

struct Params {
    e: Elements,
}

fn prepare(reports: bool) -> bool {
    return true;
}

// in0 is a or, in the backward, dy; in1 is b. Backward: in2 is a, out0 da, out1 db.
fn formula(i: u32, v: Inputs) -> Outputs {
    return outputs_of(v.in0 * v.in1, v.in0 * v.in2);
}

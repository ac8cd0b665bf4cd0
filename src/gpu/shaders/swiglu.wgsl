// SPDX-License-Identifier: MIT
// swiglu: y = silu(gate) up; dgate = silu'(gate) dy up, dup = dy silu(gate). silu and its slope share one exponential.
//# include elementwise
//# include activation
//# include silu

struct Params {
    e: Elements,
}

const ACTIVATION = SILU;

fn prepare(reports: bool) -> bool {
    return true;
}

// Forward: in0 is gate, in1 up. Backward: in0 is dy, in1 up, in2 gate; out2 is the forward's y. The slope first, which
// may be 0: dy * up may overflow.
fn formula(i: u32, v: Inputs) -> Outputs {
    if (BACKWARD == 1u) {
        let silu = silu_of(v.in2);
        return Outputs(silu.slope * v.in0 * v.in1 * silu.last, v.in0 * silu.value * silu.last,
                       silu.value * v.in1 * silu.last);
    }
    let silu = silu_of(v.in0);
    return outputs_of(silu.value * v.in1 * silu.last, vec4<f32>());
}

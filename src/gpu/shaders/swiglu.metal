/* SPDX-License-Identifier: MIT */
// swiglu: y = silu(gate) up; dgate = silu'(gate) dy up, dup = dy silu(gate). silu and its slope share one exponential.
#define MORE_OPERANDS(operand)
#define MORE_PARAMS
#define ACTIVATION SILU

struct Factors {
    uint none;
};

#include "elementwise.metal"

#include "activation.metal"
#include "silu.metal"

inline bool prepare(thread const Call &, thread Factors &, bool) {
    return true;
}

// Forward: in0 is gate, in1 up. Backward: in0 is dy, in1 up, in2 gate; out2 is the forward's y. The slope first, which
// may be 0: dy * up may overflow.
inline Outputs formula(thread const Call &, thread const Factors &, uint, Inputs v) {
    Outputs r = outputs_of(float4(0.0f), float4(0.0f));
    for (uint k = 0; k < 4; k++) {
        Silu silu = silu_of(BACKWARD ? v.in2[k] : v.in0[k]);
        if (BACKWARD) {
            r.out0[k] = silu.slope * v.in0[k] * v.in1[k] * silu.last;
            r.out1[k] = v.in0[k] * silu.value * silu.last;
            r.out2[k] = silu.value * v.in1[k] * silu.last;
        } else {
            r.out0[k] = silu.value * v.in1[k] * silu.last;
        }
    }
    return r;
}

KERNELS(ENTRY)

/* SPDX-License-Identifier: MIT */
// add: y = a + b; da = dy, db = dy. Where b is repeated, db is a sum (sums.metal).
#define MORE_OPERANDS(operand)
#define MORE_PARAMS

struct Factors {
    uint none;
};

#include "elementwise.metal"

inline bool prepare(thread const Call &, thread Factors &, bool) {
    return true;
}

// Forward: in0 is a, in1 b. Backward: in0 is dy, out0 da, out1 db.
inline Outputs formula(thread const Call &, thread const Factors &, uint, Inputs v) {
    return BACKWARD ? outputs_of(v.in0, v.in0) : outputs_of(v.in0 + v.in1, float4(0.0f));
}

KERNELS(ENTRY)

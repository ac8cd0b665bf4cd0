/* SPDX-License-Identifier: MIT */
// mul: y = a b; da = dy b, db = dy a. Where b is repeated, db is a sum (sums.metal).
#define MORE_OPERANDS(operand)
#define MORE_PARAMS

struct Factors {
    uint none;
};

#include "elementwise.metal"

inline bool prepare(thread const Call &, thread Factors &, bool) {
    return true;
}

// in0 is a or, in the backward, dy; in1 is b. Backward: in2 is a, out0 da, out1 db.
inline Outputs formula(thread const Call &, thread const Factors &, uint, Inputs v) {
    return outputs_of(v.in0 * v.in1, v.in0 * v.in2);
}

KERNELS(ENTRY)

/* SPDX-License-Identifier: MIT */
// scale: y = factor * x. The backward is the forward with dy for x.
#define MORE_OPERANDS(operand)
#define MORE_PARAMS float factor;

struct Factors {
    uint none;
};

#include "elementwise.metal"

inline bool prepare(thread const Call &, thread Factors &, bool) {
    return true;
}

inline Outputs formula(thread const Call &c, thread const Factors &, uint, Inputs v) {
    return outputs_of(c.p.factor * v.in0, float4(0.0f));
}

KERNELS(ENTRY)

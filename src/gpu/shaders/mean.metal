/* SPDX-License-Identifier: MIT */
// mean, the backward: dx = dy / length, in1 being dy, repeated over the averaged axes. The forward is in sums.metal.
#define MORE_OPERANDS(operand)
#define MORE_PARAMS float share; /* 1 / length */

struct Factors {
    uint none;
};

#include "elementwise.metal"

inline bool prepare(thread const Call &, thread Factors &, bool) {
    return true;
}

inline Outputs formula(thread const Call &c, thread const Factors &, uint, Inputs v) {
    return outputs_of(v.in1 * c.p.share, float4(0.0f));
}

KERNELS(ENTRY)

/* SPDX-License-Identifier: MIT */
// sgd: momentum = beta momentum + g + weight_decay w, w = w - lr momentum. The formulas are those of the CPU.
#define MORE_OPERANDS(operand) operand(Float, 8, lr) operand(Float, 9, scale)
#define MORE_PARAMS                                                                                                    \
    float decay, beta;                                                                                                 \
    uint nesterov;

struct Factors {
    float rate;
    float factor;
};

#include "elementwise.metal"

#include "decay.metal"

inline bool prepare(thread const Call &c, thread Factors &f, bool) {
    f = {c.lr.at(0), scale_factor(c)};
    return true;
}

// in0 is w, in1 g, in2 momentum; out0 w_out, out1 momentum_out. Without momentum its old value is not even 0: 0 * beta
// + -0 is 0.
inline Outputs formula(thread const Call &c, thread const Factors &f, uint, Inputs v) {
    Outputs r = outputs_of(v.in0, v.in2);
    for (uint k = 0; k < 4 && is_finite(f.factor); k++) {
        float g = decayed(v.in0[k], c.p.decay, v.in1[k] * f.factor);
        float momentum = c.in2.is() ? fma(v.in2[k], c.p.beta, g) : g;
        float direction = c.p.nesterov ? fma(momentum, c.p.beta, g) : momentum;
        r.out0[k] = fma(direction, -f.rate, v.in0[k]);
        r.out1[k] = momentum;
    }
    return r;
}

KERNELS(ENTRY)

/* SPDX-License-Identifier: MIT */
// adamw: a step of Adam with decoupled weight decay. The formulas are those of the CPU, operation by operation
// (docs/ops/adamw.md says why each has its form).
//
// lr, step and scale are read on the device. Each thread computes the bias corrections, in f32: 1 - beta^step as 1 -
// exp(step log(beta)) is as accurate as its argument. A step that is not an integer of at least 1 is reported, and
// nothing is written.
#define MORE_OPERANDS(operand)                                                                                         \
    operand(Float, 8, lr) operand(Float, 9, scale) operand(Index, 10, step) operand(BadIndex, 11, bad_index)
#define MORE_PARAMS                                                                                                    \
    float log_beta1, log_beta2; /* -200 or more, which is as good as minus infinity */                                 \
    float keep_m, take_m;       /* beta1, 1 - beta1 */                                                                 \
    float keep_v, take_v;       /* beta2, 1 - beta2 */                                                                 \
    float eps, decay;

struct Factors {
    float rate;
    float factor;
    float correct_m;    // 1 / (1 - beta1^step)
    float correct_root; // 1 / sqrt(1 - beta2^step)
};

#include "elementwise.metal"

#include "decay.metal"

#include "exponential.metal"

inline bool prepare(thread const Call &c, thread Factors &f, bool reports) {
    uint3 number = c.step.integer(0);
    if (number.z == 0 || (number.y & 0x80000000u) != 0 || (number.x | number.y) == 0) {
        if (reports) {
            c.bad_index.explain(0, c.step.raw(0));
        }
        return false;
    }
    float count = fma(float(number.y), 0x1p32f, float(number.x));
    f = {c.lr.at(0), scale_factor(c), 1.0f / one_minus_exp(count * c.p.log_beta1),
         1.0f / sqrt(one_minus_exp(count * c.p.log_beta2))};
    return true;
}

// in0 is w, in1 g, in2 m, in3 v; out0 w_out, out1 m_out, out2 v_out.
inline Outputs formula(thread const Call &c, thread const Factors &f, uint, Inputs v) {
    Outputs r = {v.in0, v.in2, v.in3};
    for (uint k = 0; k < 4 && is_finite(f.factor); k++) {
        float g = v.in1[k] * f.factor;
        float m = fma(v.in2[k], c.p.keep_m, g * c.p.take_m);
        float squares = fma(v.in3[k], c.p.keep_v, g * c.p.take_v * g);
        float size = fma(sqrt(squares), f.correct_root, c.p.eps);
        // Nothing averaged yet and no eps: 0 / 0, and the weight stays.
        float direction = size == 0.0f ? 0.0f : m * f.correct_m / size;
        r.out0[k] = fma(decayed(v.in0[k], c.p.decay, direction), -f.rate, v.in0[k]);
        r.out1[k] = m;
        r.out2[k] = squares;
    }
    return r;
}

KERNELS(ENTRY)

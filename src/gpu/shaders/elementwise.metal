/* SPDX-License-Identifier: MIT */
// The elementwise ops: every element of the outputs out0 to out2 comes from the same element of the inputs in0 to in3.
// An op is its formula, on four neighbouring elements at a time. A shader that includes this defines first
//
//     MORE_OPERANDS(operand)   its own operands, numbered from 8
//     MORE_PARAMS              its own numbers, members of Params
//     struct Factors           what all elements share
//
// and after it
//
//     bool prepare(c, f, reports)   fills in f. False: nothing is to be written; `reports` is true in one thread of the
//                                   launch, which then says why
//     Outputs formula(c, f, i, v)   the outputs of elements i to i + 3, i a multiple of four; BACKWARD says of which
//                                   pass
//
// Where the launch has `row`, in1 is an element of it instead, repeated as `inner` and `span` say.
//
// A thread has `rounds` times four elements, neighbouring threads neighbouring fours. It reads all inputs of an element
// before it writes an output, so an output may be the memory of an input. Memory traffic: each tensor once, an output
// that is added to twice. One dispatch per 2^24 elements.
#define OPERANDS(operand)                                                                                              \
    operand(Float, 0, out0) operand(Float, 1, out1) operand(Float, 2, out2) operand(Float, 3, in0)                     \
        operand(Float, 4, in1) operand(Float, 5, in2) operand(Float, 6, in3) operand(Float, 7, row)                    \
            MORE_OPERANDS(operand)
#define NUMBERS(number)    number(0, BACKWARD)
#define KERNELS(kernel_of) kernel_of(elements)

struct Params {
    uint count; // of this launch
    uint first; // the element that is the launch's first
    uint rounds;
    uint inner; // element e of the tensor has element e / span * inner + e % inner of row
    uint span;
    uint unused[3];
    MORE_PARAMS
};

struct Shared {
    uint none;
};

#include "common.metal"

struct Inputs {
    float4 in0;
    float4 in1;
    float4 in2;
    float4 in3;
};

struct Outputs {
    float4 out0;
    float4 out1;
    float4 out2;
};

inline bool prepare(thread const Call &c, thread Factors &f, bool reports);
inline Outputs formula(thread const Call &c, thread const Factors &f, uint i, Inputs v);

inline uint place_in_row(thread const Call &c, uint i) {
    uint element = c.p.first + i;
    return element / c.p.span * c.p.inner + element % c.p.inner;
}

// Element i of in1, or of row.
inline float second_at(thread const Call &c, uint i) {
    return c.row.is() ? c.row.at(place_in_row(c, i)) : c.in1.at(i);
}

inline float4 second_four(thread const Call &c, uint i) {
    if (!c.row.is()) {
        return c.in1.four(i);
    }
    if (c.p.inner % 4 == 0) {
        return c.row.four(place_in_row(c, i));
    }
    return float4(second_at(c, i), second_at(c, i + 1), second_at(c, i + 2), second_at(c, i + 3));
}

// Elements i to i + 3; past the end there are zeros.
inline Inputs load(thread const Call &c, uint i, uint left) {
    if (left >= 4) {
        return {c.in0.four(i), second_four(c, i), c.in2.four(i), c.in3.four(i)};
    }
    Inputs v = {float4(0.0f), float4(0.0f), float4(0.0f), float4(0.0f)};
    for (uint k = 0; k < left; k++) {
        v.in0[k] = c.in0.at(i + k);
        v.in1[k] = second_at(c, i + k);
        v.in2[k] = c.in2.at(i + k);
        v.in3[k] = c.in3.at(i + k);
    }
    return v;
}

inline void store(thread const Call &c, uint i, uint left, Outputs r) {
    if (left >= 4) {
        c.out0.set_four(i, r.out0);
        c.out1.set_four(i, r.out1);
        c.out2.set_four(i, r.out2);
        return;
    }
    for (uint k = 0; k < left; k++) {
        c.out0.set(i + k, r.out0[k]);
        c.out1.set(i + k, r.out1[k]);
        c.out2.set(i + k, r.out2[k]);
    }
}

inline void elements(thread const Call &c) {
    Factors f;
    if (!prepare(c, f, c.group == 0 && c.lane == 0 && c.p.first == 0)) {
        return;
    }
    for (uint k = 0; k < c.p.rounds; k++) {
        uint i = 4 * ((c.group * c.p.rounds + k) * c.threads + c.lane);
        if (i < c.p.count) {
            uint left = c.p.count - i;
            store(c, i, left, formula(c, f, c.p.first + i, load(c, i, left)));
        }
    }
}

inline Outputs outputs_of(float4 out0, float4 out1) {
    return {out0, out1, float4(0.0f)};
}

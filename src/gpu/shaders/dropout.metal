/* SPDX-License-Identifier: MIT */
// dropout: y = x / (1 - p) where the element's random word is not below the threshold, else 0. The words are those of
// core/philox.h, in integers, so the mask is the same as on every backend. The backward is the forward with dy for x.
//
// Four elements share a call of the generator. The counter is in the device's memory, so each thread derives the key
// from it. A counter in f32 that is not an integer is reported, and nothing is written.
#define MORE_OPERANDS(operand) operand(Index, 8, counter) operand(BadIndex, 9, bad_index)
#define MORE_PARAMS                                                                                                    \
    uint stream_low, stream_high, threshold;                                                                           \
    float factor; /* 1 / (1 - p) */

struct Factors {
    uint4 key; // key and upper half of the counter
};

#include "elementwise.metal"

// Philox4x32-10.
inline uint4 philox(uint4 counter, uint key0, uint key1) {
    for (uint k = 0; k < 10; k++) {
        uint first = counter.x;
        uint second = counter.z;
        counter = uint4(mulhi(0xCD9E8D57u, second) ^ counter.y ^ key0, 0xCD9E8D57u * second,
                        mulhi(0xD2511F53u, first) ^ counter.w ^ key1, 0xD2511F53u * first);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

inline bool prepare(thread const Call &c, thread Factors &f, bool reports) {
    uint3 seed = c.counter.integer(0);
    uint3 step = c.counter.integer(1);
    if (seed.z == 0 || step.z == 0) {
        if (reports) {
            uint position = seed.z == 0 ? 0 : 1;
            c.bad_index.explain(position, c.counter.raw(position));
        }
        return false;
    }
    f.key = philox(uint4(step.x, step.y, c.p.stream_low, c.p.stream_high), seed.x, seed.y);
    return true;
}

inline Outputs formula(thread const Call &c, thread const Factors &f, uint i, Inputs v) {
    uint4 words = philox(uint4(i / 4, 0, f.key.z, f.key.w), f.key.x, f.key.y);
    float4 y;
    for (uint k = 0; k < 4; k++) {
        y[k] = words[k] < c.p.threshold ? 0.0f : v.in0[k] * c.p.factor;
    }
    return outputs_of(y, float4(0.0f));
}

KERNELS(ENTRY)

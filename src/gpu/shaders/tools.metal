/* SPDX-License-Identifier: MIT */
// Kernels of the device itself: the value of a bad index for the sentence, and copies within its memory.
#define OPERANDS(operand)                                                                                              \
    operand(Index, 0, explained) operand(Word, 1, to) operand(Word, 2, from) operand(BadIndex, 3, bad_index)
#define NUMBERS(number)
#define KERNELS(kernel_of) kernel_of(explain) kernel_of(words) kernel_of(bytes)

struct Params {
    uint count;
};

struct Shared {
    uint none;
};

#include "common.metal"

// The recorded position may be of an earlier call, which has already noted its value.
inline void explain(thread const Call &c) {
    uint position = c.bad_index.first();
    if (c.lane == 0 && position != NO_INDEX && position != c.bad_index.explained() && position < c.p.count) {
        c.bad_index.note(position, c.explained.raw(position));
    }
}

inline void words(thread const Call &c) {
    uint i = c.group * c.threads + c.lane;
    if (i < c.p.count) {
        c.to.put(i, c.from.word(i));
    }
}

inline void bytes(thread const Call &c) {
    uint i = c.group * c.threads + c.lane;
    if (i < c.p.count) {
        c.to.memory[i] = c.from.memory[i];
    }
}

KERNELS(ENTRY)

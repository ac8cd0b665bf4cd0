// What the device itself needs: the value of a bad index for the sentence, and copies within its memory.
#define OPERANDS(operand)                                                                                              \
    operand(Index, 0, explained) operand(Word, 1, to) operand(Word, 2, from) operand(Found, 3, found)
#define NUMBERS(number)
#define KERNELS(kernel_of) kernel_of(explain) kernel_of(words) kernel_of(bytes)

struct Params {
    uint count;
};

struct Shared {
    uint none;
};

#include "common.metal"

// The position that is recorded may be of an earlier call; its value is then noted already.
inline void explain(thread const Call &c) {
    uint position = c.found.first();
    if (c.lane == 0 && position != NO_INDEX && position != c.found.explained() && position < c.p.count) {
        c.found.note(position, c.explained.raw(position));
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

/* SPDX-License-Identifier: MIT */
// rope: pairs (a, b) of a head's first 2 * pairs elements are rotated by the angle of their position,
//
//     a' = a cos - b sin,  b' = b cos + a sin
//
// and the rest of the head is copied. The backward rotates by the opposite angle: `sign` is -1. A pair is two
// neighbours (INTERLEAVED), or element i of the first half with element i of the second.
//
// A thread has four pairs of up to HEADS heads of one time, which share their angles: 16-byte loads of x in f32, and
// the tables are read once for all these heads. Further threads of a head copy eight elements each of its rest. A pair
// is read before it is written, by one thread, so y may be x.
//
// Memory traffic: x once, y once (twice where it is added to), a row of the tables once per HEADS heads, and from
// cache for the others. One dispatch per 2^24 elements; with positions one more, of a single threadgroup.
#define OPERANDS(operand)                                                                                              \
    operand(Float, 0, y) operand(Float, 1, x) operand(Float, 2, cosine) operand(Float, 3, sine)                        \
        operand(Index, 4, positions) operand(BadIndex, 5, bad_index)
#define NUMBERS(number)    number(0, INTERLEAVED) number(1, HEADS)
#define KERNELS(kernel_of) kernel_of(rotate_heads)

struct Params {
    uint threads;  // that have work; the last threadgroup may have more
    uint first;    // row (batch and time) of this launch
    uint tasks;    // per set of heads: threads that rotate pairs, then those that copy the rest
    uint rotating; // tasks that rotate
    uint head_sets;
    uint heads;
    uint head_dim;
    uint y_step; // elements from one time's heads to the next one's
    uint x_step;
    uint pairs; // of a head
    uint time;
    uint table_rows;
    uint position_stride;
    float sign; // of the angle
};

struct Shared {
    uint none;
};

#include "common.metal"

// fma() leaves a compiler no choice of what to fuse: an element has the same bits in every pipeline.
inline float4 first_of(float4 a, float4 b, float4 cosine, float4 sine) {
    return fma(-sine, b, a * cosine);
}

inline float4 second_of(float4 a, float4 b, float4 cosine, float4 sine) {
    return fma(sine, a, b * cosine);
}

// Pairs i to i + 3 of the head that begins at `x_head` in x and at `y_head` in y.
inline void rotate_four(thread const Call &c, uint x_head, uint y_head, uint i, float4 cosine, float4 sine) {
    if (INTERLEAVED) {
        float4 near = c.x.four(x_head + 2 * i);
        float4 far = c.x.four(x_head + 2 * i + 4);
        float4 a = float4(near.x, near.z, far.x, far.z);
        float4 b = float4(near.y, near.w, far.y, far.w);
        float4 first = first_of(a, b, cosine, sine);
        float4 second = second_of(a, b, cosine, sine);
        c.y.set_four(y_head + 2 * i, float4(first.x, second.x, first.y, second.y));
        c.y.set_four(y_head + 2 * i + 4, float4(first.z, second.z, first.w, second.w));
    } else {
        float4 a = c.x.four(x_head + i);
        float4 b = c.x.four(x_head + c.p.pairs + i);
        c.y.set_four(y_head + i, first_of(a, b, cosine, sine));
        c.y.set_four(y_head + c.p.pairs + i, second_of(a, b, cosine, sine));
    }
}

// The same where fewer than four pairs are left. Halves of an odd number of pairs are not stored in twos (the host then
// gives run 1), and of an even number two are left.
inline void rotate_last(thread const Call &c, uint x_head, uint y_head, uint i, float4 cosine, float4 sine) {
    uint left = c.p.pairs - i;
    float4 a = float4(0.0f);
    float4 b = float4(0.0f);
    for (uint k = 0; k < left; k++) {
        if (INTERLEAVED) {
            float2 pair = c.x.two(x_head + 2 * (i + k));
            a[k] = pair.x;
            b[k] = pair.y;
        } else {
            a[k] = c.x.at(x_head + i + k);
            b[k] = c.x.at(x_head + c.p.pairs + i + k);
        }
    }
    float4 first = first_of(a, b, cosine, sine);
    float4 second = second_of(a, b, cosine, sine);
    if (!INTERLEAVED && left == 2) {
        c.y.set_two(y_head + i, first.xy);
        c.y.set_two(y_head + c.p.pairs + i, second.xy);
        return;
    }
    for (uint k = 0; k < left; k++) {
        if (INTERLEAVED) {
            c.y.set_two(y_head + 2 * (i + k), float2(first[k], second[k]));
        } else {
            c.y.set(y_head + i + k, first[k]);
            c.y.set(y_head + c.p.pairs + i + k, second[k]);
        }
    }
}

inline void rotate_pairs(thread const Call &c, uint x_head, uint y_head, uint heads, uint i, uint position) {
    uint row = position * c.p.pairs + i;
    if (i + 4 <= c.p.pairs) {
        float4 cosine = c.cosine.four(row);
        float4 sine = c.sine.four(row) * c.p.sign;
        for (uint head = 0; head < heads; head++) {
            rotate_four(c, x_head + head * c.p.head_dim, y_head + head * c.p.head_dim, i, cosine, sine);
        }
        return;
    }
    float4 cosine = float4(0.0f);
    float4 sine = float4(0.0f);
    for (uint k = 0; k < c.p.pairs - i; k++) {
        cosine[k] = c.cosine.at(row + k);
        sine[k] = c.sine.at(row + k) * c.p.sign;
    }
    for (uint head = 0; head < heads; head++) {
        rotate_last(c, x_head + head * c.p.head_dim, y_head + head * c.p.head_dim, i, cosine, sine);
    }
}

inline void copy_rest(thread const Call &c, uint x_head, uint y_head, uint heads, uint begin) {
    uint end = min(begin + 8, c.p.head_dim);
    for (uint head = 0; head < heads * c.p.head_dim; head += c.p.head_dim) {
        for (uint e = begin; e < end; e += 2) {
            if (e + 1 < end) {
                c.y.set_two(y_head + head + e, c.x.two(x_head + head + e));
            } else {
                c.y.set(y_head + head + e, c.x.at(x_head + head + e));
            }
        }
    }
}

inline void rotate_heads(thread const Call &c) {
    uint own = c.group * c.threads + c.lane;
    if (own >= c.p.threads) {
        return;
    }
    uint task = own % c.p.tasks;
    uint owner = own / c.p.tasks;
    uint head = (owner % c.p.head_sets) * HEADS;
    uint row = owner / c.p.head_sets;
    uint batch = (c.p.first + row) / c.p.time;
    uint position = c.p.first + row - batch * c.p.time;
    if (c.positions.is()) {
        uint at = batch * c.p.position_stride + position;
        position = c.positions.in(at, c.p.table_rows);
        if (position == NO_INDEX) {
            // One thread reports it; nothing is written for this time.
            if (task == 0 && head == 0) {
                c.bad_index.report(at);
            }
            return;
        }
    }
    uint x_head = row * c.p.x_step + head * c.p.head_dim;
    uint y_head = row * c.p.y_step + head * c.p.head_dim;
    uint heads = min(c.p.heads - head, HEADS);
    if (task < c.p.rotating) {
        rotate_pairs(c, x_head, y_head, heads, 4 * task, position);
    } else {
        copy_rest(c, x_head, y_head, heads, 2 * c.p.pairs + 8 * (task - c.p.rotating));
    }
}

KERNELS(ENTRY)

/* SPDX-License-Identifier: MIT */
// Sums along the middle axis of x, seen as [outer, length, inner]: mean, sum_squares, and db of add and mul. TERM says
// what is summed: elements of in0, products of those of in0 and in1, or squares of those of in0.
//
// A team of lanes * columns threads has a chunk of an axis. A thread adds every lanes-th group of four: along a line
// where inner is 1 (LINES), else four rows of two neighbouring columns. Two terms are added in f32, everything else in
// pairs of f32 (pairs.metal): 2^24 equal terms stay right to the last digit. One chunk writes the results; several
// leave their sums in the workspace, which `finish` adds.
//
// Numbers near the ends of f32's range have sums, means and squares that f32 holds, but not the numbers on the way. So
// there are two sums, of large terms and of small ones, each in its own unit.
//
// Memory traffic: each input once. One dispatch per 2^24 elements, and one for `finish`.
#define OPERANDS(operand)                                                                                              \
    operand(Float, 0, out) operand(Float, 1, in0) operand(Float, 2, in1) operand(Float, 3, partials_out)               \
        operand(Float, 4, partials)
#define NUMBERS(number)    number(0, LINES) number(1, TERM)
#define KERNELS(kernel_of) kernel_of(sums) kernel_of(finish)

struct Params {
    uint first;  // item of this launch: a chunk of an axis, in the order of memory
    uint end;    // of its items
    uint offset; // the element that is the launch's first
    uint length;
    uint inner;
    uint chunks;
    uint chunk;   // positions in each; the last of an axis may have fewer
    uint steps;   // of a chunk: groups of four per thread
    uint lanes;   // of a team, along the axis; a power of two
    uint columns; // of a team: pairs of them; a power of two
    uint tiles;   // of columns
    uint zero;
    float factor; // of the results
};

struct Shared {
    float4 large[256];
    float4 small[256];
};

#include "common.metal"

#include "pairs.metal"

constexpr constant uint PRODUCTS = 1;
constexpr constant uint SQUARES = 2;

// ---- Large and small terms ----------------------------------------------------------------------------------

struct TermSum {
    Pair large;
    Pair small;
};

inline TermSum no_sum() {
    return {no_pair(), no_pair()};
}

inline float4 term_of(float4 v) {
    return TERM == SQUARES ? v * v : v;
}

// Adds v.xy and v.zw. A term from `limit` on is large. Units are powers of two: of elements before they are squared,
// and of the two sums. 2^31 terms of up to 2^64 fit. An element whose square in its unit is too large has a square that
// f32 does not hold.
inline TermSum add_four(thread const Call &c, TermSum sum, float4 v) {
    uint limit = TERM == SQUARES ? 0x3f800000u : 0x5f800000u; // bits of 1, of 2^64
    float large_scale = TERM == SQUARES ? 0x1p-20f : 0x1p-64f;
    float small_scale = TERM == SQUARES ? 0x1p40f : 1.0f;
    float4 large = float4(0.0f);
    float4 small = float4(0.0f);
    bool any_large = false;
    for (uint k = 0; k < 4; k++) {
        bool is_large = (as_type<uint>(v[k]) & 0x7fffffffu) >= limit;
        any_large = any_large || is_large;
        large[k] = is_large ? v[k] * large_scale : 0.0f;
        small[k] = is_large ? 0.0f : v[k] * small_scale;
    }
    if (any_large) {
        float4 terms = term_of(large);
        sum.large = plus(c, sum.large, terms.xy + terms.zw);
    }
    float4 terms = term_of(small);
    sum.small = plus(c, sum.small, terms.xy + terms.zw);
    return sum;
}

inline Pair add_pair(thread const Call &c, Pair p, float4 other) {
    return plus(c, plus(c, p, other.xy), other.zw);
}

// The sum of one column, in f32. The factor comes first, and compilers are kept from changing that: the sum without it
// may be more than f32 holds.
inline float value_of(thread const Call &c, float2 large, float2 small) {
    float large_unit = TERM == SQUARES ? 0x1p40f : 0x1p64f;
    float small_unit = TERM == SQUARES ? 0x1p-80f : 1.0f;
    float small_to_large = TERM == SQUARES ? 0x1p-120f : 0x1p-64f;
    bool has_large = (as_type<uint>(large.x) & 0x7fffffffu) != 0;
    float sum = has_large ? large.x + (large.y + small.x * small_to_large) : small.x;
    return rounded(c, sum * c.p.factor) * (has_large ? large_unit : small_unit);
}

// The sum over `lanes` threads that are `apart` from each other, for the first of them. Every thread of the threadgroup
// must come here.
inline TermSum over_lanes(thread const Call &c, TermSum own, uint rank, uint lanes, uint apart) {
    threadgroup float4 *large = c.shared->large;
    threadgroup float4 *small = c.shared->small;
    TermSum sum = own;
    for (uint by = lanes / 2; by > 0; by /= 2) {
        large[c.lane] = float4(sum.large.high, sum.large.low);
        small[c.lane] = float4(sum.small.high, sum.small.low);
        wait_for_all();
        if (rank < by) {
            sum.large = add_pair(c, sum.large, large[c.lane + by * apart]);
            sum.small = add_pair(c, sum.small, small[c.lane + by * apart]);
        }
        wait_for_all();
    }
    return sum;
}

// Both halves of each pair of columns as one.
inline Pair joined(thread const Call &c, Pair p) {
    return plus(c, plus(c, p, float2(p.high.y, 0.0f)), float2(p.low.y, 0.0f));
}

// ---- Sums of chunks -----------------------------------------------------------------------------------------

inline float4 four(thread const Call &c, uint i) {
    return TERM == PRODUCTS ? c.in0.four(i) * c.in1.four(i) : c.in0.four(i);
}

inline float2 two(thread const Call &c, uint i) {
    return TERM == PRODUCTS ? c.in0.two(i) * c.in1.two(i) : c.in0.two(i);
}

inline float one(thread const Call &c, uint i) {
    return TERM == PRODUCTS ? c.in0.at(i) * c.in1.at(i) : c.in0.at(i);
}

// Past the end of a line there are zeros.
inline float4 line_four(thread const Call &c, uint start, uint position, uint count) {
    if (position + 4 <= count) {
        return four(c, start + position);
    }
    float4 v = float4(0.0f);
    for (uint k = 0; position + k < count; k++) {
        v[k] = one(c, start + position + k);
    }
    return v;
}

// Both columns of a row, or the last one alone.
inline float2 row_two(thread const Call &c, uint start, uint position, uint count, bool both) {
    uint at = start + position * c.p.inner;
    if (position >= count) {
        return float2(0.0f);
    }
    return both ? two(c, at) : float2(one(c, at), 0.0f);
}

inline void write_sum(thread const Call &c, uint item, uint column, TermSum sum, uint k) {
    float2 large = float2(sum.large.high[k], sum.large.low[k]);
    float2 small = float2(sum.small.high[k], sum.small.low[k]);
    uint at = item * c.p.inner + column;
    if (c.partials_out.is()) {
        c.partials_out.set_two(4 * at, large);
        c.partials_out.set_two(4 * at + 2, small);
    } else {
        c.out.set(at, value_of(c, large, small));
    }
}

// A team's threads are [lanes][columns], a threadgroup's [teams][lanes][columns].
inline void sums(thread const Call &c) {
    uint size = c.p.lanes * c.p.columns;
    uint team = c.group * (c.threads / size) + c.lane / size;
    uint rank = c.lane / c.p.columns % c.p.lanes;
    uint tile = team % c.p.tiles;
    uint item = c.p.first + team / c.p.tiles;
    uint column = 2 * (tile * c.p.columns + c.lane % c.p.columns);
    uint outer = item / c.p.chunks;
    uint begin = (item - outer * c.p.chunks) * c.p.chunk;
    uint start = (outer * c.p.length + begin) * c.p.inner + column - c.p.offset;
    bool has = item < c.p.end && column < c.p.inner;
    bool both = !LINES && column + 1 < c.p.inner;
    uint count = has ? min(c.p.chunk, c.p.length - begin) : 0;
    TermSum sum = no_sum();
    for (uint step = 0; step < c.p.steps; step++) {
        uint position = 4 * (step * c.p.lanes + rank);
        if (position >= count) {
            break;
        }
        if (LINES) {
            sum = add_four(c, sum, line_four(c, start, position, count));
        } else {
            for (uint k = 0; k < 4; k += 2) {
                sum = add_four(c, sum,
                               float4(row_two(c, start, position + k, count, both),
                                      row_two(c, start, position + k + 1, count, both)));
            }
        }
    }
    sum = over_lanes(c, sum, rank, c.p.lanes, c.p.columns);
    if (LINES) {
        sum = {joined(c, sum.large), joined(c, sum.small)};
    }
    if (rank == 0 && has) {
        write_sum(c, item, column, sum, 0);
        if (both) {
            write_sum(c, item, column + 1, sum, 1);
        }
    }
}

// ---- Sums of all chunks -------------------------------------------------------------------------------------

// Result i of [first, end), by `lanes` threads.
inline void finish(thread const Call &c) {
    uint rank = c.lane % c.p.lanes;
    uint i = c.p.first + c.group * (c.threads / c.p.lanes) + c.lane / c.p.lanes;
    uint outer = i / c.p.inner;
    TermSum sum = no_sum();
    if (i < c.p.end) {
        for (uint k = rank; k < c.p.chunks; k += c.p.lanes) {
            uint at = 4 * ((outer * c.p.chunks + k) * c.p.inner + (i - outer * c.p.inner));
            float2 large = c.partials.two(at);
            float2 small = c.partials.two(at + 2);
            sum.large = add_pair(c, sum.large, float4(large.x, 0.0f, large.y, 0.0f));
            sum.small = add_pair(c, sum.small, float4(small.x, 0.0f, small.y, 0.0f));
        }
    }
    sum = over_lanes(c, sum, rank, c.p.lanes, 1);
    if (rank == 0 && i < c.p.end) {
        c.out.set(i, value_of(c, float2(sum.large.high.x, sum.large.low.x), float2(sum.small.high.x, sum.small.low.x)));
    }
}

KERNELS(ENTRY)

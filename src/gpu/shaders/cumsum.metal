/* SPDX-License-Identifier: MIT */
// cumsum: running sums along an axis of x, seen as [outer, length, inner], from either end, with or without an
// element's own value.
//
// A track is one such sum, along the whole axis or a segment of it. A thread has two tracks side by side, as the .x and
// .y of its vectors: two neighbouring columns or, where inner is 1 (LINES), two lines. A team of lanes * columns
// threads goes along its tracks in steps of four positions per thread: a thread adds its four, the team's lanes scan
// these sums along a tree of at most eight levels, and the sum of the whole step is added to the carry. So a sum in
// plain f32 is ten additions deep; the carry is a pair of f32, because after 2^24 ones a single f32 stops growing.
//
// Where there are too few tracks to fill a GPU the axis is split into segments: `sums` sums each, and `scan` starts
// from the sum of those before. An element is read and then written by one thread: y may be x.
//
// Memory traffic: x once, y once (twice where it is added to), one dispatch per 2^24 elements; with segments x twice,
// two dispatches, and 8 bytes per segment and column, of which each segment reads those before its own.
#define OPERANDS(operand)  operand(Float, 0, y) operand(Float, 1, x) operand(Float, 2, totals)
#define NUMBERS(number)    number(0, LINES)
#define KERNELS(kernel_of) kernel_of(sums) kernel_of(scan)

struct Params {
    uint first;  // item of this launch: a segment of an axis, in the order of memory
    uint end;    // of its items
    uint offset; // the element that is the launch's first
    uint length;
    uint inner;
    uint segments;
    uint segment; // positions in each; the last one in memory may have fewer
    uint steps;   // of a segment
    uint lanes;   // of a team, along the axis; a power of two
    uint columns; // of a team: pairs of them; a power of two
    uint tiles;   // of columns
    uint reverse;
    uint exclusive;
    uint zero;
};

// Two levels, used in turn: one is written while the other may still be read.
struct Shared {
    float4 pairs[256];
    float2 levels[2][256];
};

#include "common.metal"

// ---- Sums of two f32 ----------------------------------------------------------------------------------------

#include "pairs.metal"

// The sum over the lanes of this thread's team, for each of them. Every thread of the threadgroup must come here.
inline Pair over_lanes(thread const Call &c, Pair own, uint rank) {
    threadgroup float4 *pairs = c.shared->pairs;
    Pair sum = own;
    pairs[c.lane] = float4(sum.high, sum.low);
    wait_for_all();
    for (uint by = c.p.lanes / 2; by > 0; by /= 2) {
        if (rank < by) {
            float4 other = pairs[c.lane + by * c.p.columns];
            sum = plus(c, plus(c, sum, other.xy), other.zw);
            pairs[c.lane] = float4(sum.high, sum.low);
        }
        wait_for_all();
    }
    float4 total = pairs[c.lane - rank * c.p.columns];
    wait_for_all();
    return {total.xy, total.zw};
}

// ---- Tracks -------------------------------------------------------------------------------------------------

struct Tracks {
    uint2 start; // the element at the first position in memory
    uint2 count; // positions; 0: there is no such track
    uint2 order; // which segment of the axis it is, in the order of the scan
    uint2 total; // of the axis's first segment in that order
};

inline void add_track(thread const Call &c, thread Tracks &t, uint k, uint item, uint column) {
    if (item >= c.p.end || column >= c.p.inner) {
        return;
    }
    uint outer = item / c.p.segments;
    uint segment = item - outer * c.p.segments;
    uint begin = segment * c.p.segment;
    t.start[k] = (outer * c.p.length + begin) * c.p.inner + column - c.p.offset;
    t.count[k] = min(c.p.segment, c.p.length - begin);
    t.order[k] = c.p.reverse ? c.p.segments - 1 - segment : segment;
    t.total[k] = outer * c.p.segments * c.p.inner + column;
}

// The tracks of a thread: a team's threads are [lanes][columns], a threadgroup's [teams][lanes][columns].
inline Tracks tracks_of(thread const Call &c) {
    uint size = c.p.lanes * c.p.columns;
    uint team = c.group * (c.threads / size) + c.lane / size;
    Tracks t = {uint2(0), uint2(0), uint2(0), uint2(0)};
    if (LINES) {
        add_track(c, t, 0, c.p.first + 2 * team, 0);
        add_track(c, t, 1, c.p.first + 2 * team + 1, 0);
    } else {
        uint item = team / c.p.tiles;
        uint column = 2 * ((team - item * c.p.tiles) * c.p.columns + c.lane % c.p.columns);
        add_track(c, t, 0, c.p.first + item, column);
        add_track(c, t, 1, c.p.first + item, column + 1);
    }
    return t;
}

// Four positions of both tracks, in the order of the scan.
struct Four {
    float2 a;
    float2 b;
    float2 c;
    float2 d;
};

inline Four turned(thread const Call &c, Four f) {
    if (c.p.reverse) {
        return {f.d, f.c, f.b, f.a};
    }
    return f;
}

// The first of a thread's four positions in a step.
inline uint position_of(thread const Call &c, uint step, uint rank) {
    uint position = step * c.p.lanes + rank;
    return 4 * (c.p.reverse ? c.p.steps * c.p.lanes - 1 - position : position);
}

// Past the end x is 0. Positions are multiples of four, so the last two of a line start on a word of 16-bit elements.
inline float4 line_four(thread const Call &c, uint start, uint position, uint count) {
    uint at = start + position;
    if (position + 4 <= count) {
        return c.x.four(at);
    }
    float4 v = float4(0.0f);
    if (position + 2 <= count) {
        v.xy = c.x.two(at);
        if (position + 3 <= count) {
            v.z = c.x.at(at + 2);
        }
    } else if (position < count) {
        v.x = c.x.at(at);
    }
    return v;
}

inline float2 row_two(thread const Call &c, Tracks t, uint position) {
    uint at = t.start.x + position * c.p.inner;
    if (position < t.count.y) {
        return c.x.two(at);
    }
    if (position < t.count.x) {
        return float2(c.x.at(at), 0.0f);
    }
    return float2(0.0f);
}

inline Four load(thread const Call &c, Tracks t, uint position) {
    Four f;
    if (LINES) {
        float4 v = line_four(c, t.start.x, position, t.count.x);
        float4 w = line_four(c, t.start.y, position, t.count.y);
        f = {float2(v.x, w.x), float2(v.y, w.y), float2(v.z, w.z), float2(v.w, w.w)};
    } else {
        f = {row_two(c, t, position), row_two(c, t, position + 1), row_two(c, t, position + 2),
             row_two(c, t, position + 3)};
    }
    return turned(c, f);
}

inline void line_four_set(thread const Call &c, uint start, uint position, uint count, float4 v) {
    uint at = start + position;
    if (position + 4 <= count) {
        c.y.set_four(at, v);
        return;
    }
    if (position + 2 <= count) {
        c.y.set_two(at, v.xy);
    } else if (position < count) {
        c.y.set(at, v.x);
    }
    if (position + 3 <= count) {
        c.y.set(at + 2, v.z);
    }
}

inline void row_two_set(thread const Call &c, Tracks t, uint position, float2 v) {
    uint at = t.start.x + position * c.p.inner;
    if (position < t.count.y) {
        c.y.set_two(at, v);
    } else if (position < t.count.x) {
        c.y.set(at, v.x);
    }
}

inline void store(thread const Call &c, Tracks t, uint position, Four results) {
    Four f = turned(c, results);
    if (LINES) {
        line_four_set(c, t.start.x, position, t.count.x, float4(f.a.x, f.b.x, f.c.x, f.d.x));
        line_four_set(c, t.start.y, position, t.count.y, float4(f.a.y, f.b.y, f.c.y, f.d.y));
    } else {
        row_two_set(c, t, position, f.a);
        row_two_set(c, t, position + 1, f.b);
        row_two_set(c, t, position + 2, f.c);
        row_two_set(c, t, position + 3, f.d);
    }
}

// ---- Segments -----------------------------------------------------------------------------------------------

inline void total_set(thread const Call &c, uint at, float high, float low) {
    c.totals.set(2 * at, high);
    c.totals.set(2 * at + 1, low);
}

// The sum of each segment.
inline void sums(thread const Call &c) {
    uint rank = (c.lane / c.p.columns) % c.p.lanes;
    Tracks t = tracks_of(c);
    Pair own = no_pair();
    for (uint step = 0; step < c.p.steps; step++) {
        Four v = load(c, t, position_of(c, step, rank));
        own = plus(c, own, (v.a + v.b) + (v.c + v.d));
    }
    Pair total = over_lanes(c, own, rank);
    if (rank == 0 && t.count.x > 0) {
        total_set(c, t.total.x + t.order.x * c.p.inner, total.high.x, total.low.x);
    }
    if (rank == 0 && t.count.y > 0) {
        total_set(c, t.total.y + t.order.y * c.p.inner, total.high.y, total.low.y);
    }
}

// The sum of all segments before.
inline Pair before_segment(thread const Call &c, Tracks t, uint rank) {
    Pair own = no_pair();
    for (uint i = rank; i < max(t.order.x, t.order.y); i += c.p.lanes) {
        Pair segment = no_pair();
        if (i < t.order.x) {
            uint at = 2 * (t.total.x + i * c.p.inner);
            segment.high.x = c.totals.at(at);
            segment.low.x = c.totals.at(at + 1);
        }
        if (i < t.order.y) {
            uint at = 2 * (t.total.y + i * c.p.inner);
            segment.high.y = c.totals.at(at);
            segment.low.y = c.totals.at(at + 1);
        }
        own = plus(c, plus(c, own, segment.high), segment.low);
    }
    return over_lanes(c, own, rank);
}

// ---- The scan -----------------------------------------------------------------------------------------------

struct Step {
    float2 before; // the sum of the lanes before this one
    float2 total;  // of all
};

// Every thread of the threadgroup must come here. The barrier at the end keeps the next step from overwriting what this
// one reads.
inline Step over_lanes_before(thread const Call &c, float2 own, uint rank) {
    if (c.p.lanes == 1) {
        return {float2(0.0f), own};
    }
    float2 sum = own;
    uint level = 0;
    for (uint by = 1; by < c.p.lanes; by *= 2) {
        c.shared->levels[level][c.lane] = sum;
        wait_for_all();
        if (rank >= by) {
            sum = c.shared->levels[level][c.lane - by * c.p.columns] + sum;
        }
        level = 1 - level;
    }
    c.shared->levels[level][c.lane] = sum;
    wait_for_all();
    // Not by subtracting the lane's own sum: inf - inf is a NaN.
    float2 before = float2(0.0f);
    if (rank > 0) {
        before = c.shared->levels[level][c.lane - c.p.columns];
    }
    float2 total = c.shared->levels[level][c.lane + (c.p.lanes - 1 - rank) * c.p.columns];
    wait_for_all();
    return {before, total};
}

inline void scan(thread const Call &c) {
    uint rank = (c.lane / c.p.columns) % c.p.lanes;
    Tracks t = tracks_of(c);
    Pair carry = no_pair();
    if (c.p.segments > 1) {
        carry = before_segment(c, t, rank);
    }
    for (uint step = 0; step < c.p.steps; step++) {
        uint position = position_of(c, step, rank);
        Four v = load(c, t, position);
        // As a tree, so that equal terms lose no digits.
        float2 ab = v.a + v.b;
        float2 abc = ab + v.c;
        float2 own = ab + (v.c + v.d);
        Step s = over_lanes_before(c, own, rank);
        Four f = {v.a, ab, abc, own};
        if (c.p.exclusive) {
            f = {float2(0.0f), v.a, ab, abc};
        }
        store(c, t, position,
              {carry.high + (carry.low + (s.before + f.a)), carry.high + (carry.low + (s.before + f.b)),
               carry.high + (carry.low + (s.before + f.c)), carry.high + (carry.low + (s.before + f.d))});
        carry = plus(c, carry, s.total);
    }
}

KERNELS(ENTRY)

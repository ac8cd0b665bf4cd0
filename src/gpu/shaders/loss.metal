/* SPDX-License-Identifier: MIT */
// Rows of logits z with target classes t: their losses, lse and gradients, for cross_entropy and linear_cross_entropy
// (docs/ops/cross_entropy.md derives them). With max the largest of a row and s the label smoothing:
//
//     sum = sum of exp(z - max),  lse = max + log(sum)
//     loss = log(sum) + (1 - s) (max - z[t]) + s mean(max - z)
//     dlogits = scale (exp(z - max) / sum - q),  scale = dloss, divided by the rows that take part for a mean
//
// A team of `lanes` threads has a row, and a threadgroup a chunk of rows. A thread keeps a running maximum of its
// logits, scales its sum down when that rises, and the team joins its threads' sums. All terms of a loss are positive,
// so f32 holds it well once `sum` is a pair of f32 (pairs.metal): of a row whose target is certain, sum is 1 and a
// little, and the loss is the logarithm of that. Distances max - z are in units of 2^40, because f32 may not hold them.
// A row with NaN or +Inf is NaN everywhere; both are found by their bits.
//
// Dispatches and memory traffic (each repeated per 2^24 logits):
//   losses               1: logits once. `finish` adds the chunks where there are several.
//   gradients, lse saved 1: logits in, dlogits out. A mean has `count` before it, which reads the targets.
//   gradients, no lse    1: a row is measured, then read again from cache; it can give losses and lse, too.
// Barriers of a row: log2(lanes) + 4 to measure it where a simdgroup has 16 threads or more, none with a saved lse.
#define OPERANDS(operand)                                                                                              \
    operand(Float, 0, logits) operand(Float, 1, dlogits) operand(Float, 2, lse) operand(Float, 3, lse_in)              \
        operand(Float, 4, loss) operand(Float, 5, dloss) operand(Float, 6, partials) operand(Index, 7, target)         \
            operand(Word, 8, counts) operand(BadIndex, 9, bad_index)
#define NUMBERS(number)    number(0, SMOOTH)
#define KERNELS(kernel_of) kernel_of(count) kernel_of(rows) kernel_of(finish)

struct Params {
    uint first_row; // of this launch among all rows
    uint rows;      // of this launch
    uint width;     // logits of a row: the classes from first_class on
    uint first_class;
    uint classes;
    uint lanes; // of a team, a power of two
    uint chunk_rows;
    uint first_partial; // of this launch; of `count`, its first count
    uint partials;      // of all launches together; a single one is the loss itself
    uint counts;        // of all launches; of `count`, its own
    uint ignore_low;
    uint ignore_high;
    uint mean;
    uint zero;
    float near;      // 1 - s
    float elsewhere; // s / classes: q of every class but the target
    float rest;      // 1 - q of the target
};

struct Shared {
    float4 tree[256];
};

#include "common.metal"

#include "exponential.metal"

#include "pairs.metal"

constexpr constant float UNIT = 0x1p40f;
constexpr constant float SCALE = 0x1p-40f;
constexpr constant float LOWEST = -0x1.fffffep127f;
constexpr constant uint PARTIAL = 6; // f32 of a chunk: its loss as pairs, logarithms and distances; rows as two halves

inline float not_a_number() {
    return as_type<float>(0x7fc00000u);
}

inline float infinity() {
    return as_type<float>(0x7f800000u);
}

// -Inf is the logit of an impossible class.
inline bool is_impossible(float z) {
    return as_type<uint>(z) == 0xff800000u;
}

// ---- Targets ------------------------------------------------------------------------------------------------

// The class of a row, or NO_INDEX where the row takes no part.
inline uint class_of(thread const Call &c, uint row, bool reports) {
    uint3 value = c.target.integer(row);
    if (value.z == 1 && value.x == c.p.ignore_low && value.y == c.p.ignore_high) {
        return NO_INDEX;
    }
    uint class_index = c.target.in(row, c.p.classes);
    if (class_index == NO_INDEX && reports) {
        c.bad_index.report(c.p.first_row + row);
    }
    return class_index;
}

// Rows that take part, so far: 16 bits in each half, so that sums of them are exact.
inline float2 halves(uint n) {
    return float2(float(n >> 16), float(n & 0xffffu));
}

inline float whole(float2 n) {
    return n.x * 65536.0f + n.y;
}

// Up to 256 threadgroups each leave a count.
inline void count(thread const Call &c) {
    uint own = 0;
    for (uint row = c.group * c.threads + c.lane; row < c.p.rows; row += c.p.counts * c.threads) {
        own += class_of(c, row, false) == NO_INDEX ? 0 : 1;
    }
    float2 total = team_sum(c, halves(own), c.threads);
    if (c.lane == 0) {
        c.counts.put(c.p.first_partial + c.group, uint(total.x) * 65536 + uint(total.y));
    }
}

// What every gradient is multiplied with. Every thread of the threadgroup must come here.
inline float scale_of(thread const Call &c) {
    if (c.p.mean == 0) {
        return c.dloss.at(0);
    }
    float2 own = float2(0.0f);
    for (uint k = c.lane; k < c.p.counts; k += c.threads) {
        own += halves(c.counts.word(k));
    }
    return c.dloss.at(0) / whole(team_sum(c, own, c.threads));
}

// ---- A row's largest logit and sums -------------------------------------------------------------------------

struct Row {
    float top;  // the largest finite logit
    Pair sum;   // x: of exp(z - top)
    Pair below; // x: of top - z, in units; with label smoothing
    uint seen;  // finite logits
};

// The sums for a larger maximum.
inline Row raised(thread const Call &c, Row row, float top) {
    if (row.seen > 0 && top > row.top) {
        float factor = exp_down(row.top - top);
        row.sum.high *= factor;
        row.sum.low *= factor;
        if (SMOOTH) {
            row.below = plus(c, row.below, float2(float(row.seen) * (top * SCALE - row.top * SCALE), 0.0f));
        }
    }
    row.top = top;
    return row;
}

// Both halves of a pair as one.
inline Pair joined(thread const Call &c, Pair p) {
    Pair first = {float2(p.high.x, 0.0f), float2(p.low.x, 0.0f)};
    return plus(c, plus(c, first, float2(p.high.y, 0.0f)), float2(p.low.y, 0.0f));
}

// Logits i to i + 3, or the first `count` of them.
inline float4 first_of(thread const Call &c, uint i, uint count) {
    if (count >= 4) {
        return c.logits.four(i);
    }
    return float4(c.logits.at(i), count > 1 ? c.logits.at(i + 1) : 0.0f, count > 2 ? c.logits.at(i + 2) : 0.0f, 0.0f);
}

// What this thread has of a row of `width` logits from element `start` on.
inline Row own_sums(thread const Call &c, uint start, uint width) {
    Row row = {LOWEST, no_pair(), no_pair(), 0};
    for (uint i = 4 * (c.lane % c.p.lanes); i < width; i += 4 * c.p.lanes) {
        uint here = min(4u, width - i);
        float4 v = first_of(c, start + i, here);
        float top = row.top;
        uint finite = 0; // bit k: v[k] is there, and finite
        for (uint k = 0; k < here; k++) {
            if (is_finite(v[k])) {
                finite |= 1u << k;
                top = max(top, v[k]);
            } else if (!is_impossible(v[k])) {
                row.sum.high.x = not_a_number();
            } else if (SMOOTH) {
                row.below.high.x = infinity();
            }
        }
        row = raised(c, row, top);
        float4 e = float4(0.0f);
        float4 b = float4(0.0f);
        for (uint k = 0; k < 4; k++) {
            if (finite >> k & 1) {
                e[k] = exp_down(v[k] - top);
                b[k] = top * SCALE - v[k] * SCALE;
                row.seen += 1;
            }
        }
        row.sum = plus(c, plus(c, row.sum, e.xy), e.zw);
        if (SMOOTH) {
            row.below = plus(c, row.below, b.xy + b.zw);
        }
    }
    row.sum = joined(c, row.sum);
    row.below = joined(c, row.below);
    return row;
}

struct Highest {
    template <typename T> static T join(T a, T b) {
        return max(a, b);
    }
    template <typename T> static T none() {
        return T(LOWEST);
    }
};

// The sum of pairs over `lanes` threads, for all of them. Every thread of the threadgroup must come here.
inline Pair over_lanes(thread const Call &c, Pair own, uint lanes) {
    threadgroup float4 *tree = c.shared->tree;
    Pair sum = own;
    uint rank = c.lane % lanes;
    tree[c.lane] = float4(sum.high, sum.low);
    wait_for_all();
    for (uint by = lanes / 2; by > 0; by /= 2) {
        if (rank < by) {
            float4 other = tree[c.lane + by];
            sum = plus(c, plus(c, sum, other.xy), other.zw);
            tree[c.lane] = float4(sum.high, sum.low);
        }
        wait_for_all();
    }
    float4 all = tree[c.lane - rank];
    wait_for_all();
    return {all.xy, all.zw};
}

// A whole row. Every thread of the threadgroup must come here.
inline Row measured(thread const Call &c, uint start, uint width) {
    Row row = own_sums(c, start, width);
    row = raised(c, row, team_tree<Highest>(c, row.top, c.p.lanes));
    Pair own = {float2(row.sum.high.x, row.below.high.x), float2(row.sum.low.x, row.below.low.x)};
    Pair all = over_lanes(c, own, c.p.lanes);
    row.sum = {float2(all.high.x, 0.0f), float2(all.low.x, 0.0f)};
    row.below = {float2(all.high.y, 0.0f), float2(all.low.y, 0.0f)};
    return row;
}

// log of a sum of 1 or more: log(2^n m) = n ln 2 + log(1 + f), f = m - 1 within [sqrt(1/2) - 1, sqrt(2) - 1], by a
// polynomial that keeps the digits of a small f.
inline float log_of(Pair sum) {
    uint bits = as_type<uint>(sum.high.x) + (0x3f800000u - 0x3f3504f3u);
    float n = float(int(bits >> 23) - 127);
    float f = as_type<float>((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
    float p = fma(f, -0x1.38b576p-4f, 0x1.055b68p-3f);
    p = fma(p, f, -0x1.0d8542p-3f);
    p = fma(p, f, 0x1.22da1ep-3f);
    p = fma(p, f, -0x1.547244p-3f);
    p = fma(p, f, 0x1.99a008p-3f);
    p = fma(p, f, -0x1.000226p-2f);
    p = fma(p, f, 0x1.555554p-2f);
    float mantissa = fma(f * f, fma(f, p, -0.5f), f) + sum.low.x / sum.high.x;
    return fma(n, 0x1.62e4p-1f, fma(n, 0x1.7f7d1cp-20f, mantissa));
}

// ---- Losses -------------------------------------------------------------------------------------------------

// A row's loss: its logarithm, and distances in units. A term whose weight is 0 is left out: 0 * Inf would be NaN.
inline float2 loss_of(thread const Call &c, Row row, float log_sum, float z) {
    float distance = 0.0f;
    if (c.p.near != 0.0f) {
        distance = c.p.near * (row.top * SCALE - z * SCALE);
    }
    if (SMOOTH) {
        distance += c.p.elsewhere * (row.below.high.x + row.below.low.x);
    }
    return float2(log_sum, distance);
}

// The loss of all rows. The division comes before the unit, and compilers are kept from changing that.
inline void store_loss(thread const Call &c, Pair total, float2 n) {
    float taken = whole(n);
    float divisor = c.p.mean == 1 && taken > 0.0f ? taken : 1.0f;
    float2 both = rounded(c, (total.high + total.low) / divisor);
    c.loss.set(0, both.x + both.y * UNIT);
}

// Adds the chunks.
inline void finish(thread const Call &c) {
    Pair total = no_pair();
    float2 n = float2(0.0f);
    for (uint k = c.lane; k < c.p.partials; k += c.threads) {
        total = plus(c, plus(c, total, c.partials.two(PARTIAL * k)), c.partials.two(PARTIAL * k + 2));
        n += c.partials.two(PARTIAL * k + 4);
    }
    total = over_lanes(c, total, c.threads);
    n = team_sum(c, n, c.threads);
    if (c.lane == 0) {
        store_loss(c, total, n);
    }
}

// ---- Gradients ----------------------------------------------------------------------------------------------

// What the gradients of a row are computed with: p = inverse exp(z - shift).
struct Slope {
    bool nan;
    float shift;
    float inverse;
    Pair sum;
};

// p - 1 of the target, whose exp(z - shift) is e. It has all digits where p is near 1: the other terms of the sum.
inline float target_slope(thread const Call &c, Slope s, float x, float e) {
    if (c.lse_in.is()) {
        return -one_minus_exp(x);
    }
    return (rounded(c, e - s.sum.high.x) - s.sum.low.x) * s.inverse;
}

// Where exp(x) may be less than f32 holds, it is FAR times too large until the scale, which may be large, is applied.
constexpr constant float FAR_FROM = -80.0f;
constexpr constant float FAR = 0x1p64f;
constexpr constant float LOG_FAR = 44.3614196f;

// dlogits of a logit.
inline float slope_of(thread const Call &c, Slope s, float z, bool is_target, float scale) {
    bool impossible = is_impossible(z);
    if (s.nan || !(is_finite(z) || impossible)) {
        return not_a_number();
    }
    float x = impossible ? 0.0f : min(z - s.shift, 88.0f);
    if (x < FAR_FROM && !is_target && c.p.elsewhere == 0.0f) {
        return (exp_down(x + LOG_FAR) * s.inverse * scale) / FAR;
    }
    float e = impossible || x < FAR_FROM ? 0.0f : exp_down(x);
    if (!is_target) {
        return (e * s.inverse - c.p.elsewhere) * scale;
    }
    return (c.p.rest + (impossible ? -1.0f : target_slope(c, s, x, e))) * scale;
}

inline void write_row(thread const Call &c, uint start, uint position, bool takes_part, Slope s, float scale) {
    for (uint i = 4 * (c.lane % c.p.lanes); i < c.p.width; i += 4 * c.p.lanes) {
        uint here = min(4u, c.p.width - i);
        float4 d = float4(0.0f);
        if (takes_part) {
            d = first_of(c, start + i, here);
            for (uint k = 0; k < 4; k++) {
                d[k] = slope_of(c, s, d[k], position - i == k, scale);
            }
        }
        if (here == 4) {
            c.dlogits.set_four(start + i, d);
            continue;
        }
        if (here > 1) {
            c.dlogits.set_two(start + i, d.xy);
        }
        if (here != 2) {
            c.dlogits.set(start + i + here - 1, here == 1 ? d.x : d.z);
        }
    }
}

// ---- A chunk of rows ----------------------------------------------------------------------------------------

inline void rows(thread const Call &c) {
    bool first = c.lane % c.p.lanes == 0;
    uint teams = c.threads / c.p.lanes;
    uint begin = c.group * c.p.chunk_rows;
    uint end = min(begin + c.p.chunk_rows, c.p.rows);
    bool has_loss = c.partials.is() || c.loss.is();
    float scale = c.dlogits.is() ? scale_of(c) : 0.0f;
    Pair total = no_pair();
    uint taken = 0;
    for (uint base = begin; base < end; base += teams) {
        uint row = base + c.lane / c.p.lanes;
        bool has = row < end;
        uint near = min(row, end - 1);
        uint class_index = class_of(c, near, has && first);
        bool takes_part = has && class_index != NO_INDEX;
        uint start = near * c.p.width;
        uint position = class_index - c.p.first_class; // outside of the row where it has only some of the classes
        Slope s = {false, 0.0f, 1.0f, no_pair()};
        if (c.lse_in.is()) {
            s.shift = c.lse_in.at(near);
            s.nan = !is_finite(s.shift);
        } else {
            float z = c.logits.at(start + min(position, c.p.width - 1)); // before dlogits replace it
            bool wanted = takes_part || (has && c.lse.is());
            Row sums = measured(c, start, wanted ? c.p.width : 0);
            bool none = sums.sum.high.x == 0.0f; // every logit is -Inf
            s = {none || !is_finite(sums.sum.high.x), sums.top, 1.0f / sums.sum.high.x, sums.sum};
            float log_sum = s.nan ? not_a_number() : log_of(sums.sum);
            if (wanted && first) {
                c.lse.set(near, none ? -infinity() : sums.top + log_sum);
            }
            if (has_loss && takes_part && first) {
                total = plus(c, total, loss_of(c, sums, log_sum, z));
                taken += 1;
            }
        }
        if (c.dlogits.is() && has) {
            write_row(c, start, position, takes_part, s, scale);
        }
    }
    if (!has_loss) {
        return;
    }
    total = over_lanes(c, total, c.threads);
    float2 n = team_sum(c, halves(taken), c.threads);
    if (c.lane != 0) {
        return;
    }
    if (c.partials.is()) {
        uint at = PARTIAL * (c.p.first_partial + c.group);
        c.partials.set_two(at, total.high);
        c.partials.set_two(at + 2, total.low);
        c.partials.set_two(at + 4, n);
    } else {
        store_loss(c, total, n);
    }
}

KERNELS(ENTRY)

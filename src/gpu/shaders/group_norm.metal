/* SPDX-License-Identifier: MIT */
// group_norm: the group_channels * plane elements of each group of each sample are normalised together, with a scale
// and a shift per channel. With xh = (x - mean) * rstd and g = dy * gamma (docs/ops/group_norm.md derives it):
//
//     y  = xh * gamma + beta
//     dx = rstd * (g - mean(g) - xh * mean(g * xh)),  dgamma = sum of dy * xh,  dbeta = sum of dy, per channel
//
// A team of threads has a group, or a part of one. With channels last, the threads of neighbouring teams are neighbours
// in the threadgroup, so that they read neighbouring groups. A group is seen in two ways: as a flat run of elements
// in the order of memory, for its statistics and its results; and channel by channel, for sums of dy and dy * xh, from
// which mean(g) and mean(g * xh) follow too.
//
//     whole    a group that fits a team's cache: `forward`; or `backward` and `finish`
//     split    chunks of a group: `moments` and `normalise`; or `moments` (where statistics are not saved), `sums`,
//              `gradient` and `finish`. Each team that needs the numbers of a whole group merges those of its chunks,
//              in order: a few numbers are read more than once, and that saves a launch.
//
// Memory traffic in tensors of x's size: whole 2 forward, 3 backward (later passes find them in cache); split 3
// forward, 5 backward, 6 without saved statistics. Launches: 1 forward, 2 where split; backward 1, and where split 2, 3
// without saved statistics; 1 more for dgamma and dbeta.
//
// A threadgroup has a power of two of threads, and so have teams.
#define OPERANDS(operand)                                                                                              \
    operand(Float, 0, x) operand(Float, 1, dy) operand(Float, 2, gamma) operand(Float, 3, beta) operand(Float, 4, y)   \
        operand(Float, 5, mean) operand(Float, 6, rstd) operand(Float, 7, mean_in) operand(Float, 8, rstd_in)          \
            operand(Float, 9, dx) operand(Float, 10, dgamma) operand(Float, 11, dbeta) operand(Float, 12, chunks)      \
                operand(Float, 13, part_sums) operand(Float, 14, plane_sums)
#define NUMBERS(number) number(0, LAST) number(1, SAVED) number(2, NORMAL)
#define KERNELS(kernel_of)                                                                                             \
    kernel_of(forward) kernel_of(moments) kernel_of(normalise) kernel_of(backward) kernel_of(sums) kernel_of(gradient) \
        kernel_of(finish)

struct Params {
    uint items; // batch * group_items * groups, groups varying fastest; a team has one
    uint groups;
    uint group_items; // items of a group in this launch
    uint channels;
    uint group_channels;
    uint plane;
    uint lanes; // of a team
    uint teams;
    uint along;      // lanes of a team that share a channel
    uint inner;      // flat: runs of this many elements, a channel's plane or a position's channels,
    uint stride;     // this many elements apart
    uint step_outer; // 2 * lanes elements further: this many runs and elements
    uint step_inner;
    uint chunk;          // flat: elements of a chunk, even
    uint chunks;         // of a group
    uint channel_chunk;  // by channel: channels of a part of a group
    uint position_chunk; // and positions
    uint position_chunks;
    uint parts;          // of a group
    uint plane_sum_rows; // rows of plane_sums
    uint columns;        // channels that a threadgroup of `finish` has
    uint max_scale;      // the largest exponent by which a group is scaled up
    float eps;
    float inverse; // 1 / elements of a group
};

struct Shared {
    uint none;
};

#include "common.metal"

// ---- Sums ---------------------------------------------------------------------------------------------------

// A thread's sum: terms are added in parts of 16, these in parts of 16, and so on, so that no f32 chain is long.
struct Terms {
    float4 part;
    float4 middle;
    float4 large;
    float4 total;
    uint count;

    void take(float4 v) {
        part += v;
        count += 1;
        if (count % 16 != 0) {
            return;
        }
        middle += part;
        part = float4(0.0f);
        if (count % 256 == 0) {
            large += middle;
            middle = float4(0.0f);
        }
        if (count % 4096 == 0) {
            total += large;
            large = float4(0.0f);
        }
    }
    float4 all() const {
        return ((part + middle) + large) + total;
    }
};

inline Terms no_terms() {
    return {float4(0.0f), float4(0.0f), float4(0.0f), float4(0.0f), 0};
}

// Over a team, for each of its threads. With channels last, they are `teams` from each other.
inline float4 group_sum(thread const Call &c, float4 v) {
    return LAST ? across_teams(c, v, c.p.teams) : team_sum(c, v, c.p.lanes);
}

inline float group_max(thread const Call &c, float v) {
    return LAST ? across_max(c, v, c.p.teams) : team_max(c, v, c.p.lanes);
}

// ---- A team and its group -----------------------------------------------------------------------------------

struct Team {
    uint rank;  // this thread's number in it
    bool valid; // false: past the last item: it repeats the last one's work and stores nothing
    uint row;   // sample * groups + group
    uint sample;
    uint part;    // which of the group's items
    uint start;   // the group's first element
    uint channel; // the group's first channel
};

inline Team team_of(thread const Call &c) {
    Team t;
    t.rank = LAST ? c.lane / c.p.teams : c.lane % c.p.lanes;
    uint item = c.group * c.p.teams + (LAST ? c.lane % c.p.teams : c.lane / c.p.lanes);
    t.valid = item < c.p.items;
    uint near = min(item, c.p.items - 1);
    uint group = near % c.p.groups;
    t.part = near / c.p.groups % c.p.group_items;
    t.sample = near / c.p.groups / c.p.group_items;
    t.row = t.sample * c.p.groups + group;
    t.channel = group * c.p.group_channels;
    t.start = t.sample * c.p.channels * c.p.plane + t.channel * (LAST ? 1 : c.p.plane);
    return t;
}

inline uint group_size(thread const Call &c) {
    return c.p.group_channels * c.p.plane;
}

inline uint chunk_end(thread const Call &c, uint begin) {
    return min(begin + c.p.chunk, group_size(c));
}

// Two elements of a group that follow each other in its flat run. They may be apart in memory where channels are last
// and a group has an odd number of them.
struct Pair {
    uint a; // elements of the tensor
    uint b;
    uint channel_a;
    uint channel_b;
    bool both; // false: the run ends after the first
};

// A thread's position in elements [begin, end) of the flat run of a group.
struct Cursor {
    uint i;     // index of the first in the run
    uint outer; // where that is: in which run of p.inner, and where in it
    uint inner;
    uint end;

    bool more() const {
        return i < end;
    }
    void next(thread const Call &c) {
        i += 2 * c.p.lanes;
        outer += c.p.step_outer;
        inner += c.p.step_inner;
        if (inner >= c.p.inner) {
            inner -= c.p.inner;
            outer += 1;
        }
    }
    Pair at(thread const Call &c, thread const Team &t) const {
        bool wraps = inner + 1 == c.p.inner;
        uint next_outer = wraps ? outer + 1 : outer;
        uint next_inner = wraps ? 0 : inner + 1;
        Pair p;
        p.both = i + 1 < end;
        p.a = t.start + outer * c.p.stride + inner;
        p.b = p.both ? t.start + next_outer * c.p.stride + next_inner : p.a;
        p.channel_a = t.channel + (LAST ? inner : outer);
        p.channel_b = p.both ? t.channel + (LAST ? next_inner : next_outer) : p.channel_a;
        return p;
    }
};

inline Cursor cursor_from(thread const Call &c, thread const Team &t, uint begin, uint end) {
    uint i = begin + 2 * t.rank;
    return {i, i / c.p.inner, i % c.p.inner, end};
}

// The elements a and b; `outside` where there is no second. Two that share a word, from an even one on, are one load.
inline float2 pair_of(Float from, uint a, uint b, bool both, float outside) {
    if (b == a + 1 && (a & 1) == 0) {
        return from.two(a);
    }
    return float2(from.at(a), both ? from.at(b) : outside);
}

inline float2 pair_of(Float from, Pair p, float outside) {
    return pair_of(from, p.a, p.b, p.both, outside);
}

inline void set_pair(Float to, Pair p, float2 v) {
    if (p.b == p.a + 1) {
        to.set_two(p.a, v);
    } else {
        to.set(p.a, v.x);
        if (p.both) {
            to.set(p.b, v.y);
        }
    }
}

inline float2 parameters(Float from, Pair p) {
    return float2(from.at(p.channel_a), from.at(p.channel_b));
}

inline float2 gamma_pair(thread const Call &c, Pair p) {
    return c.gamma.is() ? parameters(c.gamma, p) : float2(1.0f);
}

// ---- Statistics ---------------------------------------------------------------------------------------------

// The mean is shift + rest: a mean near 1000 would lose digits in one f32, and a sum of dy * xh over a large plane
// amplifies an error of 1e-9 in the mean, which every term shares. So `shift` is the mean rounded to 1/4096 of the
// group's magnitude: x - shift is then exact for x of that magnitude. What remains of the mean, `rest`, is small and
// has all the digits of an f32.
struct Stats {
    float guard; // all but g and gxh are those of x * guard
    float shift;
    float rest;
    float rstd;
    float dy_guard; // g and gxh are those of dy * dy_guard: GUARD where a sum of g exceeds f32's range, else 1
    float g;        // mean(g)
    float gxh;      // mean(g * xh)
};

inline Stats no_stats() {
    return {1.0f, 0.0f, 0.0f, 0.0f, 1.0f, 0.0f, 0.0f};
}

inline float2 normal(Stats f, float2 x) {
    return ((x * f.guard - f.shift) - f.rest) * f.rstd;
}

// Statistics of a chunk. Squares of 1e20 and of 1e-20 leave f32's range, so these are the squares of (x - mean) / unit.
struct Moments {
    float shift;
    float rest;
    float squares;
    float unit; // a power of two near the largest magnitude of x - mean
};

inline int exponent_of(float v) {
    return int(as_type<uint>(v) >> 23);
}

// A mean that is large against its grid is on it already.
inline float on_grid(float mean, float unit) {
    float steps = mean * (inverse_power(unit) * 4096.0f);
    if (abs(steps) < 4194304.0f) {
        return rint(steps) * (unit / 4096.0f);
    }
    return mean;
}

// A sum of squares that rounding has made negative is 0. A NaN stays one, which max() does not promise.
inline float above_zero(float squares) {
    return squares < 0.0f && !is_nan(squares) ? 0.0f : squares;
}

// first + near, where near has the mean of v - first, and that of (v - first) * GUARD.
inline float mean_near(float first, float2 near, int exponent) {
    if (exponent >= LARGE) {
        return (first * GUARD + near.y) * inverse_power(GUARD);
    }
    return first + near.x;
}

// Of elements [begin, end) of the group's flat run: a first pass finds a point near their mean, a second measures from
// it.
inline Moments measured_moments(thread const Call &c, thread const Team &t, uint begin, uint end) {
    float first = c.x.at(t.start);
    float size = float(end - begin);
    Terms sum = no_terms();
    float largest = 0.0f;
    for (Cursor w = cursor_from(c, t, begin, end); w.more(); w.next(c)) {
        float2 x = pair_of(c.x, w.at(c, t), first);
        float2 v = x - first;
        float2 guarded = x * GUARD - first * GUARD;
        sum.take(float4(v.x + v.y, guarded.x + guarded.y, 0.0f, 0.0f));
        largest = max(largest, max(abs(v.x), abs(v.y)));
    }
    float2 near = group_sum(c, sum.all()).xy / size;
    int exponent = clamp(exponent_of(group_max(c, largest)), 127 - int(c.p.max_scale), 253);
    Moments m;
    m.unit = as_type<float>(uint(exponent) << 23);
    m.shift = on_grid(mean_near(first, near, exponent), m.unit);
    float guard = guard_of(exponent);
    float scale = inverse_power(m.unit * guard);
    sum = no_terms();
    for (Cursor w = cursor_from(c, t, begin, end); w.more(); w.next(c)) {
        float2 v = (pair_of(c.x, w.at(c, t), m.shift) * guard - m.shift * guard) * scale;
        sum.take(float4(v.x + v.y, v.x * v.x + v.y * v.y, 0.0f, 0.0f));
    }
    float4 all = group_sum(c, sum.all());
    float rest = all.x / size;
    m.rest = rest * m.unit;
    m.squares = above_zero(all.y - all.x * rest);
    return m;
}

inline Stats stats_from(thread const Call &c, Moments m) {
    Stats f = no_stats();
    f.guard = guard_of(exponent_of(m.unit));
    float scale = inverse_power(m.unit);
    f.shift = m.shift * f.guard;
    f.rest = m.rest * f.guard;
    f.rstd = inverse_power(m.unit * f.guard) / sqrt(m.squares * c.p.inverse + c.p.eps * scale * scale);
    return f;
}

inline void moments(thread const Call &c) {
    Team t = team_of(c);
    uint begin = t.part * c.p.chunk;
    Moments m = measured_moments(c, t, begin, chunk_end(c, begin));
    if (t.valid && t.rank == 0) {
        uint at = 4 * (t.row * c.p.chunks + t.part);
        c.chunks.set_two(at, float2(m.shift, m.rest));
        c.chunks.set_two(at + 2, float2(m.squares, m.unit));
    }
}

inline Moments chunk_of(thread const Call &c, thread const Team &t, uint k) {
    uint at = 4 * (t.row * c.p.chunks + k);
    return {c.chunks.at(at), c.chunks.at(at + 1), c.chunks.at(at + 2), c.chunks.at(at + 3)};
}

inline float chunk_size(thread const Call &c, uint k) {
    uint begin = k * c.p.chunk;
    return float(chunk_end(c, begin) - begin);
}

// A group's statistics from those of its chunks, in two passes as for elements: a chunk's squares about the group's
// shift are its own, plus the square of the distance from there to its mean for each of its elements.
inline Moments merged_moments(thread const Call &c, thread const Team &t) {
    float first = chunk_of(c, t, 0).shift;
    float2 near = float2(0.0f);
    float largest = 0.0f;
    for (uint k = t.rank; k < c.p.chunks; k += c.p.lanes) {
        Moments chunk = chunk_of(c, t, k);
        near += float2(chunk.shift - first, chunk.shift * GUARD - first * GUARD) * (chunk_size(c, k) * c.p.inverse);
        largest = max(largest, chunk.unit);
    }
    near = group_sum(c, float4(near, 0.0f, 0.0f)).xy;
    Moments m;
    m.unit = group_max(c, largest);
    int exponent = exponent_of(m.unit);
    m.shift = on_grid(mean_near(first, near, exponent), m.unit);
    float guard = guard_of(exponent);
    float scale = inverse_power(m.unit * guard);
    float2 sums = float2(0.0f);
    for (uint k = t.rank; k < c.p.chunks; k += c.p.lanes) {
        Moments chunk = chunk_of(c, t, k);
        float size = chunk_size(c, k);
        float narrow = (chunk.unit * guard) * scale;
        float distance = ((chunk.shift * guard - m.shift * guard) + chunk.rest * guard) * scale;
        sums += float2(distance * size, (chunk.squares * narrow) * narrow + distance * distance * size);
    }
    float4 all = group_sum(c, float4(sums, 0.0f, 0.0f));
    float rest = all.x * c.p.inverse;
    m.rest = rest * m.unit;
    m.squares = above_zero(all.y - all.x * rest);
    return m;
}

// ---- Forward ------------------------------------------------------------------------------------------------

inline void normalise_run(thread const Call &c, thread const Team &t, Stats f, uint begin, uint end) {
    if (t.part == 0 && t.rank == 0) {
        c.mean.set(t.row, (f.shift + f.rest) * inverse_power(f.guard));
        c.rstd.set(t.row, f.rstd * f.guard);
    }
    if (!c.y.is()) {
        return;
    }
    for (Cursor w = cursor_from(c, t, begin, end); w.more(); w.next(c)) {
        Pair p = w.at(c, t);
        float2 v = normal(f, pair_of(c.x, p, 0.0f));
        if (c.gamma.is()) {
            v *= gamma_pair(c, p);
        }
        if (c.beta.is()) {
            v += parameters(c.beta, p);
        }
        set_pair(c.y, p, v);
    }
}

inline void forward(thread const Call &c) {
    Team t = team_of(c);
    Stats f = stats_from(c, measured_moments(c, t, 0, group_size(c)));
    if (t.valid) {
        normalise_run(c, t, f, 0, group_size(c));
    }
}

inline void normalise(thread const Call &c) {
    Team t = team_of(c);
    uint begin = t.part * c.p.chunk;
    Stats f = stats_from(c, merged_moments(c, t));
    if (t.valid) {
        normalise_run(c, t, f, begin, chunk_end(c, begin));
    }
}

// ---- Backward -----------------------------------------------------------------------------------------------

// Stores a channel's sums of dy and dy * xh over a chunk of the plane; returns the sums of g and g * xh. So far only
// `shift` was subtracted from x; the rest of the mean is subtracted here, from the sum, with all its digits.
inline float2 store_sums(thread const Call &c, thread const Team &t, Stats f, uint channel, uint position_chunk,
                         float2 about_shift) {
    float2 sums = float2(about_shift.x, about_shift.y - about_shift.x * (f.rest * f.rstd));
    if (t.valid) {
        c.plane_sums.set_two(2 * ((t.sample * c.p.position_chunks + position_chunk) * c.p.channels + channel), sums);
    }
    return c.gamma.is() ? sums * c.gamma.at(channel) : sums;
}

// Terms of the sums over a channel or two, and over all channels: the sums of dy near f32's largest number do not fit.
struct Products {
    float4 channel; // dy and dy * xh
    float2 guarded; // g and g * xh with dy * GUARD
};

inline Products products(thread const Call &c, Stats f, uint a, bool both, float2 gamma) {
    uint b = both ? a + 1 : a;
    float2 dy = pair_of(c.dy, a, b, both, 0.0f);
    float2 xh = float2(0.0f);
    if (NORMAL) {
        xh = (pair_of(c.x, a, b, both, 0.0f) * f.guard - f.shift) * f.rstd;
        if (!both) {
            xh.y = 0.0f;
        }
    }
    float2 g = (dy * GUARD) * gamma;
    float2 gxh = g * xh;
    return {float4(dy, dy * xh), float2(g.x + g.y, gxh.x + gxh.y)};
}

inline float gamma_near(thread const Call &c, uint channel) {
    return c.gamma.is() ? c.gamma.at(min(channel, c.p.channels - 1)) : 1.0f;
}

// A part of a group: some of its channels at some of their positions.
struct Part {
    uint position_chunk;
    uint channel_begin;
    uint channel_end;
    uint position_begin;
    uint position_end;
};

inline Part part_of(thread const Call &c, uint part) {
    Part r;
    r.position_chunk = part % c.p.position_chunks;
    r.channel_begin = part / c.p.position_chunks * c.p.channel_chunk;
    r.channel_end = min(r.channel_begin + c.p.channel_chunk, c.p.group_channels);
    r.position_begin = r.position_chunk * c.p.position_chunk;
    r.position_end = min(r.position_begin + c.p.position_chunk, c.p.plane);
    return r;
}

// A channel has `along` lanes. With channels last they are apart from each other, as its elements are.
inline float4 sums_last(thread const Call &c, thread const Team &t, Stats f, Part r) {
    uint across = c.p.lanes / c.p.along;
    Terms total = no_terms();
    float2 guarded = float2(0.0f);
    for (uint step = 0; step < c.p.channel_chunk; step += 2 * across) {
        uint channel = r.channel_begin + step + 2 * (t.rank % across);
        bool both = channel + 1 < r.channel_end;
        Terms sum = no_terms();
        if (channel < r.channel_end) {
            float2 gamma = float2(gamma_near(c, t.channel + channel), gamma_near(c, t.channel + channel + 1));
            for (uint s = r.position_begin + t.rank / across; s < r.position_end; s += c.p.along) {
                Products p = products(c, f, t.start + s * c.p.channels + channel, both, gamma);
                sum.take(p.channel);
                guarded += p.guarded;
            }
        }
        float4 all = across_teams(c, sum.all(), across * c.p.teams);
        if (t.rank / across == 0 && channel < r.channel_end) {
            float2 gs = store_sums(c, t, f, t.channel + channel, r.position_chunk, float2(all.x, all.z));
            if (both) {
                gs += store_sums(c, t, f, t.channel + channel + 1, r.position_chunk, float2(all.y, all.w));
            }
            total.take(float4(gs, 0.0f, 0.0f));
        }
    }
    return total.all() + float4(float2(0.0f), guarded);
}

// Else they are neighbours, as its elements are.
inline float4 sums_planes(thread const Call &c, thread const Team &t, Stats f, Part r) {
    uint across = c.p.lanes / c.p.along;
    Terms total = no_terms();
    float2 guarded = float2(0.0f);
    for (uint step = 0; step < c.p.channel_chunk; step += across) {
        uint channel = r.channel_begin + step + t.rank / c.p.along;
        Terms sum = no_terms();
        if (channel < r.channel_end) {
            float2 gamma = float2(gamma_near(c, t.channel + channel));
            for (uint s = r.position_begin + 2 * (t.rank % c.p.along); s < r.position_end; s += 2 * c.p.along) {
                Products p = products(c, f, t.start + channel * c.p.plane + s, s + 1 < r.position_end, gamma);
                sum.take(p.channel);
                guarded += p.guarded;
            }
        }
        float4 all = team_sum(c, sum.all(), c.p.along);
        if (t.rank % c.p.along == 0 && channel < r.channel_end) {
            float2 gs =
                store_sums(c, t, f, t.channel + channel, r.position_chunk, float2(all.x + all.y, all.z + all.w));
            total.take(float4(gs, 0.0f, 0.0f));
        }
    }
    return total.all() + float4(float2(0.0f), guarded);
}

// The sums of g and g * xh over part `part` of the group, and those with dy * GUARD; stores those of its channels.
inline float4 channel_sums(thread const Call &c, thread const Team &t, Stats f, uint part) {
    Part r = part_of(c, part);
    return group_sum(c, LAST ? sums_last(c, t, f, r) : sums_planes(c, t, f, r));
}

// mean(g) and mean(g * xh) from these sums over the whole group.
inline Stats averaged(thread const Call &c, Stats f, float4 sum) {
    bool fits = is_finite(sum.x) && is_finite(sum.y);
    float2 guarded = float2(sum.z, sum.w - sum.z * (f.rest * f.rstd));
    float2 means = (fits ? sum.xy : guarded) * c.p.inverse;
    f.dy_guard = fits ? 1.0f : GUARD;
    f.g = means.x;
    f.gxh = means.y;
    return f;
}

inline void gradient_of(thread const Call &c, thread const Team &t, Stats f, uint begin, uint end) {
    for (Cursor w = cursor_from(c, t, begin, end); w.more(); w.next(c)) {
        Pair p = w.at(c, t);
        float2 g = (pair_of(c.dy, p, 0.0f) * f.dy_guard) * gamma_pair(c, p);
        float2 xh = normal(f, pair_of(c.x, p, 0.0f));
        set_pair(c.dx, p, f.rstd * ((g - f.g) - xh * f.gxh) * f.guard * inverse_power(f.dy_guard));
    }
}

inline Stats saved_stats(thread const Call &c, thread const Team &t) {
    Stats f = no_stats();
    float mean = c.mean_in.at(t.row);
    float rstd = c.rstd_in.at(t.row);
    int exponent = clamp(254 - exponent_of(rstd), 20, 240);
    float shift = on_grid(mean, as_type<float>(uint(exponent) << 23));
    f.guard = guard_of(exponent);
    f.shift = shift * f.guard;
    f.rest = (mean - shift) * f.guard;
    f.rstd = rstd * inverse_power(f.guard);
    return f;
}

inline void backward(thread const Call &c) {
    Team t = team_of(c);
    Stats f = no_stats();
    if (SAVED) {
        f = saved_stats(c, t);
    } else if (NORMAL) {
        f = stats_from(c, measured_moments(c, t, 0, group_size(c)));
    }
    f = averaged(c, f, channel_sums(c, t, f, 0));
    if (c.dx.is() && t.valid) {
        gradient_of(c, t, f, 0, group_size(c));
    }
}

// The statistics of a group that is split.
inline Stats stats_of(thread const Call &c, thread const Team &t) {
    if (SAVED) {
        return saved_stats(c, t);
    }
    return NORMAL ? stats_from(c, merged_moments(c, t)) : no_stats();
}

inline void sums(thread const Call &c) {
    Team t = team_of(c);
    float4 all = channel_sums(c, t, stats_of(c, t), t.part);
    if (t.valid && t.rank == 0) {
        c.part_sums.set_two(4 * (t.row * c.p.parts + t.part), all.xy);
        c.part_sums.set_two(4 * (t.row * c.p.parts + t.part) + 2, all.zw);
    }
}

inline void gradient(thread const Call &c) {
    Team t = team_of(c);
    Stats f = stats_of(c, t);
    Terms sum = no_terms();
    for (uint k = t.rank; k < c.p.parts; k += c.p.lanes) {
        sum.take(c.part_sums.four(4 * (t.row * c.p.parts + k)));
    }
    f = averaged(c, f, group_sum(c, sum.all()));
    uint begin = t.part * c.p.chunk;
    if (t.valid) {
        gradient_of(c, t, f, begin, chunk_end(c, begin));
    }
}

// dgamma and dbeta of some channels: their sums over the batch and over the chunks of the plane.
inline void finish(thread const Call &c) {
    uint channel = c.group * c.p.columns + c.lane % c.p.columns;
    Terms sum = no_terms();
    if (channel < c.p.channels) {
        for (uint row = c.lane / c.p.columns; row < c.p.plane_sum_rows; row += c.threads / c.p.columns) {
            sum.take(float4(c.plane_sums.two(2 * (row * c.p.channels + channel)), 0.0f, 0.0f));
        }
    }
    float4 all = across_teams(c, sum.all(), c.p.columns);
    if (c.lane < c.p.columns && channel < c.p.channels) {
        c.dbeta.set(channel, all.x);
        c.dgamma.set(channel, all.y);
    }
}

KERNELS(ENTRY)

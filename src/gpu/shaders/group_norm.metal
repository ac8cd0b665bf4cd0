// group_norm: the group_channels * plane elements of each group of each sample, normalised together, with a scale and a
// shift a channel. With xh = (x - mean) * rstd and g = dy * gamma (docs/ops/group_norm.md derives it):
//
//     y  = xh * gamma + beta
//     dx = rstd * (g - mean(g) - xh * mean(g * xh)),  dgamma = sum of dy * xh,  dbeta = sum of dy a channel
//
// A team of threads has a group, or a part of one. Channels last, teams lie beside each other in the threadgroup, so
// that threads side by side read groups side by side. A group is looked at in two ways: as a flat run of elements in
// the order of memory, for its statistics and its results; and channel by channel, for sums of dy and dy * xh, from
// which mean(g) and mean(g * xh) follow too.
//
//     whole    a group that a team can hold in cache: `forward`, or `backward` and `finish`
//     cut      pieces of a group: `moments` and `normalise`; or `moments` (where statistics are not saved), `sums`,
//              `gradient` and `finish`. A group's numbers are put together, in order, by each team that needs them:
//              a few numbers are read more than once, and that saves a launch.
//
// A threadgroup has a power of two of threads, and so have teams.
#define OPERANDS(operand)                                                                                              \
    operand(Float, 0, x) operand(Float, 1, dy) operand(Float, 2, gamma) operand(Float, 3, beta) operand(Float, 4, y)   \
        operand(Float, 5, mean) operand(Float, 6, rstd) operand(Float, 7, mean_in) operand(Float, 8, rstd_in)          \
            operand(Float, 9, dx) operand(Float, 10, dgamma) operand(Float, 11, dbeta) operand(Float, 12, pieces)      \
                operand(Float, 13, lines) operand(Float, 14, cells)
#define NUMBERS(number) number(0, LAST) number(1, SAVED) number(2, NORMAL)
#define KERNELS(kernel_of)                                                                                             \
    kernel_of(forward) kernel_of(moments) kernel_of(normalise) kernel_of(backward) kernel_of(sums) kernel_of(gradient) \
        kernel_of(finish)

struct Params {
    uint items; // batch * cuts * groups, groups the fastest: what teams have
    uint groups;
    uint cuts; // items that a group makes in this launch
    uint channels;
    uint group_channels;
    uint plane;
    uint lanes; // of a team
    uint teams;
    uint along;      // lanes of a team that share a channel
    uint inner;      // flat: runs of this many elements, a channel's plane or a place's channels,
    uint stride;     // this far from each other
    uint step_outer; // 2 * lanes elements on: so many runs and so many elements
    uint step_inner;
    uint piece;         // flat: elements of a piece, even
    uint pieces;        // of a group
    uint channel_piece; // by channel: a part of a group has so many channels
    uint place_piece;   // and so many places
    uint place_pieces;
    uint parts;      // of a group
    uint cell_rows;  // sums that a channel has
    uint columns;    // channels that a threadgroup of `finish` has
    uint most_scale; // the largest exponent by which a group is scaled up
    float eps;
    float inverse; // 1 / elements of a group
};

struct Shared {
    uint none;
};

#include "common.metal"

// ---- Sums ---------------------------------------------------------------------------------------------------

// Terms of one thread, in parts of 16, these in parts of 16 and so on: no f32 chain is long.
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

// Over a team, for each of its threads. Channels last, its threads lie `teams` from each other.
inline float4 group_sum(thread const Call &c, float4 v) {
    return LAST ? across_teams(c, v, c.p.teams) : team_sum(c, v, c.p.lanes);
}

inline float group_max(thread const Call &c, float v) {
    return LAST ? across_max(c, v, c.p.teams) : team_max(c, v, c.p.lanes);
}

// ---- A team and its group -----------------------------------------------------------------------------------

struct Team {
    uint place; // of this thread in it
    bool valid; // false: past the last item; it does the last one's work and leaves nothing
    uint row;   // sample * groups + group
    uint sample;
    uint part;    // which of the group's `cuts`
    uint start;   // the group's first element
    uint channel; // the group's first channel
};

inline Team team_of(thread const Call &c) {
    Team t;
    t.place = LAST ? c.lane / c.p.teams : c.lane % c.p.lanes;
    uint item = c.group * c.p.teams + (LAST ? c.lane % c.p.teams : c.lane / c.p.lanes);
    t.valid = item < c.p.items;
    uint near = min(item, c.p.items - 1);
    uint group = near % c.p.groups;
    t.part = near / c.p.groups % c.p.cuts;
    t.sample = near / c.p.groups / c.p.cuts;
    t.row = t.sample * c.p.groups + group;
    t.channel = group * c.p.group_channels;
    t.start = t.sample * c.p.channels * c.p.plane + t.channel * (LAST ? 1 : c.p.plane);
    return t;
}

inline uint group_size(thread const Call &c) {
    return c.p.group_channels * c.p.plane;
}

inline uint piece_end(thread const Call &c, uint begin) {
    return min(begin + c.p.piece, group_size(c));
}

// Two elements of a group that follow each other in its flat run. They may lie apart where channels are last and a
// group has an odd number of them.
struct Pair {
    uint a; // elements of the tensor
    uint b;
    uint channel_a;
    uint channel_b;
    bool both; // false: the run ends after the first
};

// A thread's way through elements [begin, end) of the run.
struct Walk {
    uint i;     // the first's index in the run
    uint outer; // and where that is: in which run of p.inner, and where in it
    uint inner;
    uint end;

    bool goes_on() const {
        return i < end;
    }
    void on(thread const Call &c) {
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

inline Walk walk_of(thread const Call &c, thread const Team &t, uint begin, uint end) {
    uint i = begin + 2 * t.place;
    return {i, i / c.p.inner, i % c.p.inner, end};
}

// The elements a and b; `outside` where there is no second. Two of a word are loaded at once: they start at even ones.
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

// The mean is shift + rest: a mean near 1000 would lose digits in one f32, and a sum of dy * xh over a large plane sees
// an error of 1e-9 in the mean, which every term has. So `shift` is the mean on a grid of 1/4096 of the group's
// magnitude: x - shift then has no error that all x of a size share, as with a shift of 24 digits. What is left of the
// mean, `rest`, is small, and known to all the digits of an f32.
struct Facts {
    float shift;
    float rest;
    float rstd;
    float g;   // mean(g)
    float gxh; // mean(g * xh)
};

inline Facts no_facts() {
    return {0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
}

inline float2 normal(Facts f, float2 x) {
    return ((x - f.shift) - f.rest) * f.rstd;
}

// Statistics of a piece. Squares of 1e20 and of 1e-20 leave f32's range, so that they are those of (x - mean) / unit.
struct Moments {
    float shift;
    float rest;
    float squares;
    float unit; // a power of two near the largest magnitude of x - mean
};

inline float inverse_unit(float unit) {
    return as_type<float>((254u << 23) - as_type<uint>(unit));
}

// A mean that is large against its grid is on it.
inline float on_grid(float mean, float unit) {
    float steps = mean * (inverse_unit(unit) * 4096.0f);
    if (abs(steps) < 4194304.0f) {
        return rint(steps) * (unit / 4096.0f);
    }
    return mean;
}

// Squares that rounding has brought below zero are none. A NaN stays one, which max() does not promise.
inline float above_zero(float squares) {
    return squares < 0.0f && !is_nan(squares) ? 0.0f : squares;
}

// Of elements [begin, end) of the group's flat run: a first look finds about where they are, a second measures there.
inline Moments measured(thread const Call &c, thread const Team &t, uint begin, uint end) {
    float first = c.x.at(t.start);
    float size = float(end - begin);
    Terms sum = no_terms();
    float largest = 0.0f;
    for (Walk w = walk_of(c, t, begin, end); w.goes_on(); w.on(c)) {
        float2 v = pair_of(c.x, w.at(c, t), first) - first;
        sum.take(float4(v.x + v.y, 0.0f, 0.0f, 0.0f));
        largest = max(largest, max(abs(v.x), abs(v.y)));
    }
    float near = group_sum(c, sum.all()).x / size;
    largest = group_max(c, largest);
    int exponent = clamp(int(as_type<uint>(largest) >> 23), 127 - int(c.p.most_scale), 253);
    Moments m;
    m.unit = as_type<float>(uint(exponent) << 23);
    m.shift = on_grid(first + near, m.unit);
    float scale = inverse_unit(m.unit);
    sum = no_terms();
    for (Walk w = walk_of(c, t, begin, end); w.goes_on(); w.on(c)) {
        float2 v = (pair_of(c.x, w.at(c, t), m.shift) - m.shift) * scale;
        sum.take(float4(v.x + v.y, v.x * v.x + v.y * v.y, 0.0f, 0.0f));
    }
    float4 all = group_sum(c, sum.all());
    float rest = all.x / size;
    m.rest = rest * m.unit;
    m.squares = above_zero(all.y - all.x * rest);
    return m;
}

inline Facts facts_from(thread const Call &c, Moments m) {
    float scale = inverse_unit(m.unit);
    Facts f = no_facts();
    f.shift = m.shift;
    f.rest = m.rest;
    f.rstd = scale / sqrt(m.squares * c.p.inverse + c.p.eps * scale * scale);
    return f;
}

inline void moments(thread const Call &c) {
    Team t = team_of(c);
    uint begin = t.part * c.p.piece;
    Moments m = measured(c, t, begin, piece_end(c, begin));
    if (t.valid && t.place == 0) {
        uint at = 4 * (t.row * c.p.pieces + t.part);
        c.pieces.set_two(at, float2(m.shift, m.rest));
        c.pieces.set_two(at + 2, float2(m.squares, m.unit));
    }
}

inline Moments piece_of(thread const Call &c, thread const Team &t, uint k) {
    uint at = 4 * (t.row * c.p.pieces + k);
    return {c.pieces.at(at), c.pieces.at(at + 1), c.pieces.at(at + 2), c.pieces.at(at + 3)};
}

inline float piece_size(thread const Call &c, uint k) {
    uint begin = k * c.p.piece;
    return float(piece_end(c, begin) - begin);
}

// A group's statistics from its pieces', looked at twice as elements are: a piece's squares about the group's shift are
// its own, and those of the way from there to its mean.
inline Moments merged(thread const Call &c, thread const Team &t) {
    float first = piece_of(c, t, 0).shift;
    float near = 0.0f;
    float largest = 0.0f;
    for (uint k = t.place; k < c.p.pieces; k += c.p.lanes) {
        Moments piece = piece_of(c, t, k);
        near += (piece.shift - first) * (piece_size(c, k) * c.p.inverse);
        largest = max(largest, piece.unit);
    }
    near = group_sum(c, float4(near, 0.0f, 0.0f, 0.0f)).x;
    Moments m;
    m.unit = group_max(c, largest);
    m.shift = on_grid(first + near, m.unit);
    float scale = inverse_unit(m.unit);
    float2 sums = float2(0.0f);
    for (uint k = t.place; k < c.p.pieces; k += c.p.lanes) {
        Moments piece = piece_of(c, t, k);
        float size = piece_size(c, k);
        float narrow = piece.unit * scale;
        float way = ((piece.shift - m.shift) + piece.rest) * scale;
        sums += float2(way * size, (piece.squares * narrow) * narrow + way * way * size);
    }
    float4 all = group_sum(c, float4(sums, 0.0f, 0.0f));
    float rest = all.x * c.p.inverse;
    m.rest = rest * m.unit;
    m.squares = above_zero(all.y - all.x * rest);
    return m;
}

// ---- Forward ------------------------------------------------------------------------------------------------

inline void normalised(thread const Call &c, thread const Team &t, Facts f, uint begin, uint end) {
    if (t.part == 0 && t.place == 0) {
        c.mean.set(t.row, f.shift + f.rest);
        c.rstd.set(t.row, f.rstd);
    }
    if (!c.y.is()) {
        return;
    }
    for (Walk w = walk_of(c, t, begin, end); w.goes_on(); w.on(c)) {
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
    Facts f = facts_from(c, measured(c, t, 0, group_size(c)));
    if (t.valid) {
        normalised(c, t, f, 0, group_size(c));
    }
}

inline void normalise(thread const Call &c) {
    Team t = team_of(c);
    uint begin = t.part * c.p.piece;
    Facts f = facts_from(c, merged(c, t));
    if (t.valid) {
        normalised(c, t, f, begin, piece_end(c, begin));
    }
}

// ---- Backward -----------------------------------------------------------------------------------------------

// Leaves a channel's sums of dy and dy * xh over a piece of the plane; makes what they are of g and g * xh. So far only
// `shift` was taken from x; the rest of the mean is taken from the sum, with all its digits.
inline float2 leave(thread const Call &c, thread const Team &t, Facts f, uint channel, uint place_piece,
                    float2 about_shift) {
    float2 sums = float2(about_shift.x, about_shift.y - about_shift.x * (f.rest * f.rstd));
    if (t.valid) {
        c.cells.set_two(2 * ((t.sample * c.p.place_pieces + place_piece) * c.p.channels + channel), sums);
    }
    return c.gamma.is() ? sums * c.gamma.at(channel) : sums;
}

inline float4 products(thread const Call &c, Facts f, uint a, bool both) {
    uint b = both ? a + 1 : a;
    float2 dy = pair_of(c.dy, a, b, both, 0.0f);
    float2 dyxh = float2(0.0f);
    if (NORMAL) {
        dyxh = dy * ((pair_of(c.x, a, b, both, 0.0f) - f.shift) * f.rstd);
        if (!both) {
            dyxh.y = 0.0f;
        }
    }
    return float4(dy, dyxh);
}

// What is to be added of a part of a group: some of its channels at some of their places.
struct Part {
    uint place_piece;
    uint channel_begin;
    uint channel_end;
    uint place_begin;
    uint place_end;
};

inline Part part_of(thread const Call &c, uint part) {
    Part r;
    r.place_piece = part % c.p.place_pieces;
    r.channel_begin = part / c.p.place_pieces * c.p.channel_piece;
    r.channel_end = min(r.channel_begin + c.p.channel_piece, c.p.group_channels);
    r.place_begin = r.place_piece * c.p.place_piece;
    r.place_end = min(r.place_begin + c.p.place_piece, c.p.plane);
    return r;
}

// A channel has `along` lanes: every so many-th where the plane's places lie apart,
inline Terms sums_last(thread const Call &c, thread const Team &t, Facts f, Part r) {
    uint across = c.p.lanes / c.p.along;
    Terms total = no_terms();
    for (uint step = 0; step < c.p.channel_piece; step += 2 * across) {
        uint channel = r.channel_begin + step + 2 * (t.place % across);
        bool both = channel + 1 < r.channel_end;
        Terms sum = no_terms();
        if (channel < r.channel_end) {
            for (uint s = r.place_begin + t.place / across; s < r.place_end; s += c.p.along) {
                sum.take(products(c, f, t.start + s * c.p.channels + channel, both));
            }
        }
        float4 all = across_teams(c, sum.all(), across * c.p.teams);
        if (t.place / across == 0 && channel < r.channel_end) {
            float2 gs = leave(c, t, f, t.channel + channel, r.place_piece, float2(all.x, all.z));
            if (both) {
                gs += leave(c, t, f, t.channel + channel + 1, r.place_piece, float2(all.y, all.w));
            }
            total.take(float4(gs, 0.0f, 0.0f));
        }
    }
    return total;
}

// and neighbours where its elements are neighbours.
inline Terms sums_planes(thread const Call &c, thread const Team &t, Facts f, Part r) {
    uint across = c.p.lanes / c.p.along;
    Terms total = no_terms();
    for (uint step = 0; step < c.p.channel_piece; step += across) {
        uint channel = r.channel_begin + step + t.place / c.p.along;
        Terms sum = no_terms();
        if (channel < r.channel_end) {
            for (uint s = r.place_begin + 2 * (t.place % c.p.along); s < r.place_end; s += 2 * c.p.along) {
                sum.take(products(c, f, t.start + channel * c.p.plane + s, s + 1 < r.place_end));
            }
        }
        float4 all = team_sum(c, sum.all(), c.p.along);
        if (t.place % c.p.along == 0 && channel < r.channel_end) {
            float2 gs = leave(c, t, f, t.channel + channel, r.place_piece, float2(all.x + all.y, all.z + all.w));
            total.take(float4(gs, 0.0f, 0.0f));
        }
    }
    return total;
}

// The sums of g and g * xh over part `part` of the group, and those of its channels left behind.
inline float2 channel_sums(thread const Call &c, thread const Team &t, Facts f, uint part) {
    Part r = part_of(c, part);
    Terms total = LAST ? sums_last(c, t, f, r) : sums_planes(c, t, f, r);
    return group_sum(c, total.all()).xy;
}

inline void gradient_of(thread const Call &c, thread const Team &t, Facts f, uint begin, uint end) {
    for (Walk w = walk_of(c, t, begin, end); w.goes_on(); w.on(c)) {
        Pair p = w.at(c, t);
        float2 g = pair_of(c.dy, p, 0.0f) * gamma_pair(c, p);
        float2 xh = normal(f, pair_of(c.x, p, 0.0f));
        set_pair(c.dx, p, f.rstd * ((g - f.g) - xh * f.gxh));
    }
}

inline Facts saved(thread const Call &c, thread const Team &t) {
    Facts f = no_facts();
    float mean = c.mean_in.at(t.row);
    f.rstd = c.rstd_in.at(t.row);
    int exponent = clamp(254 - int(as_type<uint>(f.rstd) >> 23), 20, 240);
    f.shift = on_grid(mean, as_type<float>(uint(exponent) << 23));
    f.rest = mean - f.shift;
    return f;
}

inline void backward(thread const Call &c) {
    Team t = team_of(c);
    Facts f = no_facts();
    if (SAVED) {
        f = saved(c, t);
    } else if (NORMAL) {
        f = facts_from(c, measured(c, t, 0, group_size(c)));
    }
    float2 all = channel_sums(c, t, f, 0);
    f.g = all.x * c.p.inverse;
    f.gxh = all.y * c.p.inverse;
    if (c.dx.is() && t.valid) {
        gradient_of(c, t, f, 0, group_size(c));
    }
}

// The statistics of a group that is cut.
inline Facts known(thread const Call &c, thread const Team &t) {
    if (SAVED) {
        return saved(c, t);
    }
    return NORMAL ? facts_from(c, merged(c, t)) : no_facts();
}

inline void sums(thread const Call &c) {
    Team t = team_of(c);
    float2 all = channel_sums(c, t, known(c, t), t.part);
    if (t.valid && t.place == 0) {
        c.lines.set_two(2 * (t.row * c.p.parts + t.part), all);
    }
}

inline void gradient(thread const Call &c) {
    Team t = team_of(c);
    Facts f = known(c, t);
    Terms sum = no_terms();
    for (uint k = t.place; k < c.p.parts; k += c.p.lanes) {
        sum.take(float4(c.lines.two(2 * (t.row * c.p.parts + k)), 0.0f, 0.0f));
    }
    float4 all = group_sum(c, sum.all());
    f.g = all.x * c.p.inverse;
    f.gxh = all.y * c.p.inverse;
    uint begin = t.part * c.p.piece;
    if (t.valid) {
        gradient_of(c, t, f, begin, piece_end(c, begin));
    }
}

// dgamma and dbeta of some channels: their sums over the batch and the pieces of the plane.
inline void finish(thread const Call &c) {
    uint channel = c.group * c.p.columns + c.lane % c.p.columns;
    Terms sum = no_terms();
    if (channel < c.p.channels) {
        for (uint row = c.lane / c.p.columns; row < c.p.cell_rows; row += c.threads / c.p.columns) {
            sum.take(float4(c.cells.two(2 * (row * c.p.channels + channel)), 0.0f, 0.0f));
        }
    }
    float4 all = across_teams(c, sum.all(), c.p.columns);
    if (c.lane < c.p.columns && channel < c.p.channels) {
        c.dbeta.set(channel, all.x);
        c.dgamma.set(channel, all.y);
    }
}

KERNELS(ENTRY)

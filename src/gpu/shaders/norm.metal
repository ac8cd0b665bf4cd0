/* SPDX-License-Identifier: MIT */
// layer_norm and rms_norm (LAYER: the mean is subtracted): each row of `dim` elements is normalised on its own.
// With xh = (x - mean) * rstd and g = dy * gamma (docs/ops/layer_norm.md derives it):
//
//     y  = xh * gamma + beta
//     dx = rstd * (g - mean(g) - xh * mean(g * xh)),  dgamma = sum of dy * xh,  dbeta = sum of dy over rows
//
// A team of `lanes` threads has a row; a threadgroup has `teams` of them, and perhaps a few more threads. As long as a
// threadgroup has a row's columns, 16 per thread, one kernel computes the row's statistics and its dx and reads x and
// dy from memory once (the second pass finds them in cache). For longer rows `measure` leaves the statistics in the
// workspace, and `columns` has a tile of columns. `columns` also leaves column sums of each chunk of rows, which
// `finish` adds, and gives rms_norm's y again where it is wanted, with the forward's bits.
#define OPERANDS(operand)                                                                                              \
    operand(Float, 0, x) operand(Float, 1, dy) operand(Float, 2, gamma) operand(Float, 3, beta) operand(Float, 4, y)   \
        operand(Float, 5, mean) operand(Float, 6, rstd) operand(Float, 7, mean_in) operand(Float, 8, rstd_in)          \
            operand(Float, 9, dx) operand(Float, 10, dgamma) operand(Float, 11, dbeta) operand(Float, 12, stats)       \
                operand(Float, 13, partials)
#define NUMBERS(number)    number(0, PAIRS) number(1, FUSED) number(2, SAVED) number(3, GAMMA)
#define KERNELS(kernel_of) kernel_of(forward) kernel_of(measure) kernel_of(columns) kernel_of(finish)

struct Params {
    uint rows;
    uint dim;
    uint chunks;
    uint chunk_rows;
    uint tiles;
    uint lanes; // of a team
    uint teams;
    float eps;
    float inverse;  // 1 / dim
    uint max_scale; // the largest exponent by which a row is scaled up
};

struct Shared {
    uint none;
};

#include "common.metal"

// Terms are added in parts of 64, and these in parts of 64: no f32 chain is long, 2^24 equal terms stay accurate.
constexpr constant uint PART = 64;
constexpr constant uint MAX_PAIRS = 8;

struct Stats {
    float guard; // all but g and gxh are those of x * guard
    float shift; // xh = ((x - shift) - rest) * rstd: a mean near 1000 would lose digits in one f32
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
    return LAYER ? ((x * f.guard - f.shift) - f.rest) * f.rstd : (x * f.guard) * f.rstd;
}

// Columns i and i + 1 of a row that starts at `start`; what is past the row's end is `outside`.
inline float2 pair_of(thread const Call &c, Float from, uint start, uint i, float outside) {
    if (i + 1 < c.p.dim) {
        return from.two(start + i);
    }
    return float2(from.at(start + i), outside);
}

inline float2 parameters(thread const Call &c, Float from, uint i) {
    return float2(from.at(i), from.at(min(i + 1, c.p.dim - 1)));
}

inline float2 gamma_pair(thread const Call &c, uint i) {
    return c.gamma.is() ? parameters(c, c.gamma, i) : float2(1.0f);
}

// The sum of `term` over the pairs of a row's columns, for every thread of the team.
template <typename T, typename Term> T row_sum(thread const Call &c, thread Term &term) {
    uint step = 2 * c.p.lanes;
    T total = T(0.0f);
    T middle = T(0.0f);
    uint parts = 0;
    for (uint begin = 2 * (c.lane % c.p.lanes); begin < c.p.dim; begin += step * PART) {
        T part = T(0.0f);
        uint end = min(begin + step * PART, c.p.dim);
        for (uint i = begin; i < end; i += step) {
            part += term.of(c, i);
        }
        middle += part;
        parts += 1;
        if (parts % PART == 0) {
            total += middle;
            middle = T(0.0f);
        }
    }
    return team_sum(c, total + middle, c.p.lanes);
}

// x - shift, the same times GUARD, which does not overflow, and the largest magnitude.
struct Spread {
    uint start;
    float shift;
    float largest;

    float2 of(thread const Call &c, uint i) {
        float2 x = pair_of(c, c.x, start, i, shift);
        float2 v = x - shift;
        float2 guarded = x * GUARD - shift * GUARD;
        largest = max(largest, max(abs(v.x), abs(v.y)));
        return float2(v.x + v.y, guarded.x + guarded.y);
    }
};

// ((x - shift) - rest)^2, scaled.
struct Squares {
    uint start;
    Stats f;
    float scale;

    float of(thread const Call &c, uint i) {
        float2 v = ((pair_of(c, c.x, start, i, 0.0f) * f.guard - f.shift) - f.rest) * scale;
        if (i + 1 >= c.p.dim) {
            v.y = 0.0f;
        }
        return v.x * v.x + v.y * v.y;
    }
};

// g and g * xh, and both with dy * GUARD: the sums of dy near f32's largest number do not fit.
struct Averages {
    uint start;
    Stats f;

    float4 of(thread const Call &c, uint i) {
        float2 dy = pair_of(c, c.dy, start, i, 0.0f);
        float2 g = dy * gamma_pair(c, i);
        float2 guarded = (dy * GUARD) * gamma_pair(c, i);
        float2 xh = normal(f, pair_of(c, c.x, start, i, 0.0f));
        if (i + 1 >= c.p.dim) {
            xh.y = 0.0f;
        }
        float2 gxh = g * xh;
        float2 guarded_gxh = guarded * xh;
        return float4(g.x + g.y, gxh.x + gxh.y, guarded.x + guarded.y, guarded_gxh.x + guarded_gxh.y);
    }
};

// mean(g) and mean(g * xh) of a row whose statistics are in `f`.
inline Stats averaged(thread const Call &c, Stats f, uint start) {
    Averages averages = {start, f};
    float4 sum = row_sum<float4>(c, averages);
    bool fits = is_finite(sum.x) && is_finite(sum.y);
    float2 means = (fits ? sum.xy : sum.zw) * c.p.inverse;
    f.dy_guard = fits ? 1.0f : GUARD;
    f.g = LAYER ? means.x : 0.0f;
    f.gxh = means.y;
    return f;
}

// Statistics of a row. Squares of 1e20 and of 1e-20 leave f32's range, so the row is scaled by the power of two that
// brings its largest magnitude near 1, and rstd = scale / sqrt(variance of the scaled row + eps * scale^2).
inline Stats measured(thread const Call &c, uint row) {
    uint start = row * c.p.dim;
    float first = LAYER ? c.x.at(start) : 0.0f;
    Spread spread = {start, first, 0.0f};
    float2 sum = row_sum<float2>(c, spread);
    int exponent = int(as_type<uint>(team_max(c, spread.largest, c.p.lanes)) >> 23);
    Stats f = no_stats();
    f.guard = guard_of(exponent);
    bool large = exponent >= LARGE;
    exponent = clamp(large ? exponent - GUARD_EXPONENT : exponent, 127 - int(c.p.max_scale), 253);
    if (LAYER) {
        f.shift = first * f.guard;
        f.rest = (large ? sum.y : sum.x) * c.p.inverse;
    }
    float scale = as_type<float>(uint(254 - exponent) << 23);
    float whole_scale = scale * f.guard;
    Squares squares = {start, f, scale};
    float variance = row_sum<float>(c, squares) * c.p.inverse;
    f.rstd = scale / sqrt(variance + c.p.eps * whole_scale * whole_scale);
    return f;
}

// y of columns i and i + 1.
inline void set_y(thread const Call &c, float2 xh, uint start, uint i) {
    float2 v = xh;
    if (c.gamma.is()) {
        v *= gamma_pair(c, i);
    }
    if (c.beta.is()) {
        v += parameters(c, c.beta, i);
    }
    if (i + 1 < c.p.dim) {
        c.y.set_two(start + i, v);
    } else {
        c.y.set(start + i, v.x);
    }
}

inline void forward(thread const Call &c) {
    uint team = c.lane / c.p.lanes;
    uint row = c.group * c.p.teams + team;
    uint start = min(row, c.p.rows - 1) * c.p.dim;
    Stats f = measured(c, min(row, c.p.rows - 1));
    if (team >= c.p.teams || row >= c.p.rows) {
        return;
    }
    if (c.lane % c.p.lanes == 0) {
        c.mean.set(row, (f.shift + f.rest) * inverse_power(f.guard));
        c.rstd.set(row, f.rstd * f.guard);
    }
    if (!c.y.is()) {
        return;
    }
    for (uint i = 2 * (c.lane % c.p.lanes); i < c.p.dim; i += 2 * c.p.lanes) {
        set_y(c, normal(f, pair_of(c, c.x, start, i, 0.0f)), start, i);
    }
}

// All that dx, dgamma and y need of a row. Every thread of the threadgroup must come here.
inline Stats stats_of(thread const Call &c, uint row) {
    Stats f = no_stats();
    if (SAVED) {
        float rstd = c.rstd_in.at(row);
        f.guard = guard_of(254 - int(as_type<uint>(rstd) >> 23));
        f.shift = LAYER ? c.mean_in.at(row) * f.guard : 0.0f;
        f.rstd = rstd * inverse_power(f.guard);
    } else {
        f = measured(c, row);
    }
    if (c.dx.is() || c.stats.is()) {
        f = averaged(c, f, row * c.p.dim);
    }
    return f;
}

// The statistics of rows that are too long for one threadgroup, for `columns`.
inline void measure(thread const Call &c) {
    Stats f = stats_of(c, c.group);
    if (c.lane == 0) {
        c.stats.set(c.group * 7, f.guard);
        c.stats.set(c.group * 7 + 1, f.shift);
        c.stats.set(c.group * 7 + 2, f.rest);
        c.stats.set(c.group * 7 + 3, f.rstd);
        c.stats.set(c.group * 7 + 4, f.dy_guard);
        c.stats.set(c.group * 7 + 5, f.g);
        c.stats.set(c.group * 7 + 6, f.gxh);
    }
}

inline Stats stats_read(thread const Call &c, uint row) {
    return {c.stats.at(row * 7),     c.stats.at(row * 7 + 1), c.stats.at(row * 7 + 2), c.stats.at(row * 7 + 3),
            c.stats.at(row * 7 + 4), c.stats.at(row * 7 + 5), c.stats.at(row * 7 + 6)};
}

// The sums of one thread's columns: of up to 64 rows, and of all before; x and y of dgamma, z and w of dbeta.
struct Columns {
    float4 part[MAX_PAIRS];
    float4 sum[MAX_PAIRS];
};

inline void close_parts(thread Columns &s) {
    for (uint k = 0; k < PAIRS; k++) {
        s.sum[k] += s.part[k];
        s.part[k] = float4(0.0f);
    }
}

// One row's share of the thread's columns.
inline void take_row(thread const Call &c, thread Columns &s, Stats f, uint start, uint first) {
    for (uint k = 0; k < PAIRS; k++) {
        uint i = first + k * 2 * c.p.lanes;
        if (i >= c.p.dim) {
            break;
        }
        float2 dy = pair_of(c, c.dy, start, i, 0.0f);
        float2 xh = float2(0.0f);
        if (c.dx.is() || c.y.is() || GAMMA) {
            xh = normal(f, pair_of(c, c.x, start, i, 0.0f));
        }
        s.part[k] += float4(dy * xh, dy);
        if (c.dx.is()) {
            float2 g = (dy * f.dy_guard) * gamma_pair(c, i);
            float2 v = f.rstd * ((g - f.g) - xh * f.gxh) * f.guard * inverse_power(f.dy_guard);
            if (i + 1 < c.p.dim) {
                c.dx.set_two(start + i, v);
            } else {
                c.dx.set(start + i, v.x);
            }
        }
        if (c.y.is()) {
            set_y(c, xh, start, i);
        }
    }
}

inline void columns(thread const Call &c) {
    uint tile = c.group % c.p.tiles;
    uint chunk = c.group / c.p.tiles;
    uint begin = chunk * c.p.chunk_rows;
    uint end = min(begin + c.p.chunk_rows, c.p.rows);
    uint team = c.lane / c.p.lanes;
    uint first = tile * (2 * c.p.lanes * PAIRS) + 2 * (c.lane % c.p.lanes);
    Columns s;
    for (uint k = 0; k < PAIRS; k++) {
        s.part[k] = s.sum[k] = float4(0.0f);
    }
    uint taken = 0;
    for (uint base = begin; base < end; base += c.p.teams) {
        uint row = min(base + team, end - 1);
        Stats f = no_stats();
        if (!FUSED) {
            f = stats_read(c, row);
        } else if (c.dx.is() || c.y.is() || GAMMA) {
            f = stats_of(c, row);
        }
        if (team < c.p.teams && base + team < end) {
            take_row(c, s, f, row * c.p.dim, first);
        }
        taken += 1;
        if (taken % PART == 0) {
            close_parts(s);
        }
    }
    close_parts(s);
    if (!c.partials.is()) {
        return;
    }
    for (uint k = 0; k < PAIRS; k++) {
        float4 total = across_teams(c, s.sum[k], c.p.lanes);
        uint i = first + k * 2 * c.p.lanes;
        if (c.lane < c.p.lanes && i < c.p.dim) {
            uint at = chunk * 2 * c.p.dim + i;
            c.partials.set(at, total.x);
            c.partials.set(at + c.p.dim, total.z);
            if (i + 1 < c.p.dim) {
                c.partials.set(at + 1, total.y);
                c.partials.set(at + c.p.dim + 1, total.w);
            }
        }
    }
}

// dgamma and dbeta of a column: the sums of the chunks in their order, 16 at a time.
inline void finish(thread const Call &c) {
    uint column = c.group * c.threads + c.lane;
    if (column >= 2 * c.p.dim) {
        return;
    }
    float total = 0.0f;
    for (uint begin = 0; begin < c.p.chunks; begin += 16) {
        float part = 0.0f;
        for (uint chunk = begin; chunk < min(begin + 16, c.p.chunks); chunk++) {
            part += c.partials.at(chunk * 2 * c.p.dim + column);
        }
        total += part;
    }
    if (column < c.p.dim) {
        c.dgamma.set(column, total);
    } else {
        c.dbeta.set(column - c.p.dim, total);
    }
}

KERNELS(ENTRY)

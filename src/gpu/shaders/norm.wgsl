// SPDX-License-Identifier: MIT
// layer_norm and rms_norm (LAYER: the mean is subtracted): each row of `dim` elements is normalised on its own.
// With xh = (x - mean) * rstd and g = dy * gamma (docs/ops/layer_norm.md derives it):
//
//     y  = xh * gamma + beta
//     dx = rstd * (g - mean(g) - xh * mean(g * xh)),  dgamma = sum of dy * xh,  dbeta = sum of dy over rows
//
// A team of `lanes` threads has a row; a workgroup has `teams` of them. As long as a workgroup has
// a row's columns, 16 per thread, one kernel computes the row's statistics and its dx and reads x and dy from memory once
// (the second pass finds them in cache). For longer rows `measure` leaves the statistics in the workspace, and `columns`
// has a tile of columns. `columns` also leaves column sums of each chunk of rows, which `finish` adds, and gives
// rms_norm's y again where it is wanted, with the forward's bits.
//# const PAIRS FUSED SAVED GAMMA
//# float x dy gamma beta y mean rstd mean_in rstd_in dx dgamma dbeta stats partials

struct Params {
    rows: u32,
    dim: u32,
    chunks: u32,
    chunk_rows: u32,
    tiles: u32,
    lanes: u32, // of a team, a power of two
    teams: u32,
    eps: f32,
    inverse: f32, // 1 / dim
    max_scale: u32, // the largest exponent by which a row is scaled up
}

// Terms are added in parts of 64, and these in parts of 64: no f32 chain is long, 2^24 equal terms stay accurate.
const PART = 64u;

struct Stats {
    guard: f32, // all but g and gxh are those of x * guard
    shift: f32, // xh = ((x - shift) - rest) * rstd: a mean near 1000 would lose digits in one f32
    rest: f32,
    rstd: f32,
    dy_guard: f32, // g and gxh are those of dy * dy_guard: GUARD where a sum of g exceeds f32's range, else 1
    g: f32,        // mean(g)
    gxh: f32,      // mean(g * xh)
}

fn normal(f: Stats, x: vec2<f32>) -> vec2<f32> {
    if (LAYER) {
        return ((x * f.guard - f.shift) - f.rest) * f.rstd;
    }
    return (x * f.guard) * f.rstd;
}

// x of columns c and c + 1; what is past the row's end is `outside`.
fn x_pair(start: u32, c: u32, outside: f32) -> vec2<f32> {
    if (c + 1u < u.p.dim) {
        return x_two(start + c);
    }
    return vec2<f32>(x_at(start + c), outside);
}

fn dy_pair(start: u32, c: u32) -> vec2<f32> {
    if (c + 1u < u.p.dim) {
        return dy_two(start + c);
    }
    return vec2<f32>(dy_at(start + c), 0.0);
}

fn gamma_pair(c: u32) -> vec2<f32> {
    if (!gamma_is) {
        return vec2<f32>(1.0);
    }
    return vec2<f32>(gamma_at(c), gamma_at(min(c + 1u, u.p.dim - 1u)));
}

struct Spread {
    sum: f32,         // of x - shift over the row
    guarded_sum: f32, // of (x - shift) * GUARD, which does not overflow
    largest: f32,     // magnitude of x - shift
}

fn spread(start: u32, shift: f32, lane: u32) -> Spread {
    let first = 2u * (lane % u.p.lanes);
    var largest = 0.0;
    var total = vec2<f32>();
    var middle = vec2<f32>();
    var parts = 0u;
    for (var begin = first; begin < u.p.dim; begin += 2u * u.p.lanes * PART) {
        var part = vec2<f32>();
        let end = min(begin + 2u * u.p.lanes * PART, u.p.dim);
        for (var c = begin; c < end; c += 2u * u.p.lanes) {
            let x = x_pair(start, c, shift);
            let v = x - shift;
            let guarded = x * GUARD - shift * GUARD;
            part += vec2<f32>(v.x + v.y, guarded.x + guarded.y);
            largest = max(largest, max(abs(v.x), abs(v.y)));
        }
        middle += part;
        parts += 1u;
        if (parts % PART == 0u) {
            total += middle;
            middle = vec2<f32>();
        }
    }
    let sum = team_sum(total + middle, lane, u.p.lanes);
    return Spread(sum.x, sum.y, team_max(largest, lane, u.p.lanes));
}

// The sum of ((x - shift) - rest)^2 over the row, scaled.
fn squares(start: u32, f: Stats, scale: f32, lane: u32) -> f32 {
    let first = 2u * (lane % u.p.lanes);
    var total = 0.0;
    var middle = 0.0;
    var parts = 0u;
    for (var begin = first; begin < u.p.dim; begin += 2u * u.p.lanes * PART) {
        var part = 0.0;
        let end = min(begin + 2u * u.p.lanes * PART, u.p.dim);
        for (var c = begin; c < end; c += 2u * u.p.lanes) {
            var v = ((x_pair(start, c, 0.0) * f.guard - f.shift) - f.rest) * scale;
            if (c + 1u >= u.p.dim) {
                v.y = 0.0;
            }
            part += v.x * v.x + v.y * v.y;
        }
        middle += part;
        parts += 1u;
        if (parts % PART == 0u) {
            total += middle;
            middle = 0.0;
        }
    }
    return team_sum(vec2<f32>(total + middle, 0.0), lane, u.p.lanes).x;
}

// mean(g) and mean(g * xh) of a row whose statistics are in `f`. The sums of dy near f32's largest number do not fit:
// they are also computed with dy * GUARD.
fn averaged(f: Stats, start: u32, lane: u32) -> Stats {
    let first = 2u * (lane % u.p.lanes);
    var total = vec4<f32>();
    var middle = vec4<f32>();
    var parts = 0u;
    for (var begin = first; begin < u.p.dim; begin += 2u * u.p.lanes * PART) {
        var part = vec4<f32>();
        let end = min(begin + 2u * u.p.lanes * PART, u.p.dim);
        for (var c = begin; c < end; c += 2u * u.p.lanes) {
            let dy = dy_pair(start, c);
            let g = dy * gamma_pair(c);
            let guarded = (dy * GUARD) * gamma_pair(c);
            var xh = normal(f, x_pair(start, c, 0.0));
            if (c + 1u >= u.p.dim) {
                xh.y = 0.0;
            }
            let gxh = g * xh;
            let guarded_gxh = guarded * xh;
            part += vec4<f32>(g.x + g.y, gxh.x + gxh.y, guarded.x + guarded.y, guarded_gxh.x + guarded_gxh.y);
        }
        middle += part;
        parts += 1u;
        if (parts % PART == 0u) {
            total += middle;
            middle = vec4<f32>();
        }
    }
    let sum = team_sum4(total + middle, lane, u.p.lanes);
    let fits = is_finite(sum.x) && is_finite(sum.y);
    let means = select(sum.zw, sum.xy, fits) * u.p.inverse;
    var out = f;
    out.dy_guard = select(GUARD, 1.0, fits);
    out.g = select(0.0, means.x, LAYER);
    out.gxh = means.y;
    return out;
}

// Statistics of a row. Squares of 1e20 and of 1e-20 leave f32's range, so the row is scaled by the power of two that
// brings its largest magnitude near 1, and rstd = scale / sqrt(variance of the scaled row + eps * scale^2).
fn measured(row: u32, lane: u32) -> Stats {
    let start = row * u.p.dim;
    let first = select(0.0, x_at(start), LAYER);
    let s = spread(start, first, lane);
    var exponent = i32(bitcast<u32>(s.largest) >> 23u);
    var f = Stats();
    f.guard = guard_of(exponent);
    let large = exponent >= LARGE;
    exponent = clamp(select(exponent, exponent - GUARD_EXPONENT, large), 127 - i32(u.p.max_scale), 253);
    if (LAYER) {
        f.shift = first * f.guard;
        f.rest = select(s.sum, s.guarded_sum, large) * u.p.inverse;
    }
    let scale = bitcast<f32>(u32(254 - exponent) << 23u);
    let whole_scale = scale * f.guard;
    let variance = squares(start, f, scale, lane) * u.p.inverse;
    f.rstd = scale / sqrt(variance + u.p.eps * whole_scale * whole_scale);
    return f;
}

// y of columns c and c + 1.
fn set_y(xh: vec2<f32>, start: u32, c: u32) {
    var v = xh;
    if (gamma_is) {
        v *= gamma_pair(c);
    }
    if (beta_is) {
        v += vec2<f32>(beta_at(c), beta_at(min(c + 1u, u.p.dim - 1u)));
    }
    if (c + 1u < u.p.dim) {
        y_set_two(start + c, v);
    } else {
        y_set(start + c, v.x);
    }
}

fn forward(group: u32, lane: u32) {
    let row = group * u.p.teams + lane / u.p.lanes;
    let valid = row < u.p.rows;
    let start = min(row, u.p.rows - 1u) * u.p.dim;
    let f = measured(min(row, u.p.rows - 1u), lane);
    if (!valid) {
        return;
    }
    if (lane % u.p.lanes == 0u) {
        mean_set(row, (f.shift + f.rest) * inverse_power(f.guard));
        rstd_set(row, f.rstd * f.guard);
    }
    if (!y_is) {
        return;
    }
    for (var c = 2u * (lane % u.p.lanes); c < u.p.dim; c += 2u * u.p.lanes) {
        set_y(normal(f, x_pair(start, c, 0.0)), start, c);
    }
}

// All that dx, dgamma and y need of a row. Every thread of the workgroup must come here.
fn stats_of(row: u32, lane: u32) -> Stats {
    var f = Stats();
    if (SAVED == 1u) {
        let rstd = rstd_in_at(row);
        f.guard = guard_of(254 - i32(bitcast<u32>(rstd) >> 23u));
        if (LAYER) {
            f.shift = mean_in_at(row) * f.guard;
        }
        f.rstd = rstd * inverse_power(f.guard);
    } else {
        f = measured(row, lane);
    }
    if (dx_is || stats_is) {
        f = averaged(f, row * u.p.dim, lane);
    }
    return f;
}

// The statistics of rows that are too long for one workgroup, for `columns`.
fn measure(group: u32, lane: u32) {
    let f = stats_of(group, lane);
    if (lane == 0u) {
        stats_set(group * 7u, f.guard);
        stats_set(group * 7u + 1u, f.shift);
        stats_set(group * 7u + 2u, f.rest);
        stats_set(group * 7u + 3u, f.rstd);
        stats_set(group * 7u + 4u, f.dy_guard);
        stats_set(group * 7u + 5u, f.g);
        stats_set(group * 7u + 6u, f.gxh);
    }
}

fn stats_read(row: u32) -> Stats {
    return Stats(stats_at(row * 7u), stats_at(row * 7u + 1u), stats_at(row * 7u + 2u), stats_at(row * 7u + 3u),
                 stats_at(row * 7u + 4u), stats_at(row * 7u + 5u), stats_at(row * 7u + 6u));
}

// The sums of one thread's columns: of up to 64 rows, and of all before.
var<private> gamma_part: array<vec2<f32>, PAIRS>;
var<private> beta_part: array<vec2<f32>, PAIRS>;
var<private> gamma_sum: array<vec2<f32>, PAIRS>;
var<private> beta_sum: array<vec2<f32>, PAIRS>;

fn close_parts() {
    for (var k = 0u; k < PAIRS; k++) {
        gamma_sum[k] += gamma_part[k];
        beta_sum[k] += beta_part[k];
        gamma_part[k] = vec2<f32>();
        beta_part[k] = vec2<f32>();
    }
}

// One row's share of the thread's columns.
fn take_row(f: Stats, start: u32, first: u32) {
    for (var k = 0u; k < PAIRS; k++) {
        let c = first + k * 2u * u.p.lanes;
        if (c >= u.p.dim) {
            break;
        }
        let dy = dy_pair(start, c);
        var xh = vec2<f32>();
        if (dx_is || y_is || GAMMA == 1u) {
            xh = normal(f, x_pair(start, c, 0.0));
        }
        gamma_part[k] += dy * xh;
        beta_part[k] += dy;
        if (dx_is) {
            let g = (dy * f.dy_guard) * gamma_pair(c);
            let v = f.rstd * ((g - f.g) - xh * f.gxh) * f.guard * inverse_power(f.dy_guard);
            if (c + 1u < u.p.dim) {
                dx_set_two(start + c, v);
            } else {
                dx_set(start + c, v.x);
            }
        }
        if (y_is) {
            set_y(xh, start, c);
        }
    }
}

fn columns(group: u32, lane: u32) {
    let tile = group % u.p.tiles;
    let chunk = group / u.p.tiles;
    let begin = chunk * u.p.chunk_rows;
    let end = min(begin + u.p.chunk_rows, u.p.rows);
    let first = tile * (2u * u.p.lanes * PAIRS) + 2u * (lane % u.p.lanes);
    var taken = 0u;
    for (var base = begin; base < end; base += u.p.teams) {
        let row = base + lane / u.p.lanes;
        let valid = row < end;
        let near = min(row, end - 1u);
        var f = Stats();
        if (FUSED == 1u) {
            if (dx_is || y_is || GAMMA == 1u) {
                f = stats_of(near, lane);
            }
        } else {
            f = stats_read(near);
        }
        if (valid) {
            take_row(f, row * u.p.dim, first);
        }
        taken += 1u;
        if (taken % PART == 0u) {
            close_parts();
        }
    }
    close_parts();
    if (!partials_is) {
        return;
    }
    for (var k = 0u; k < PAIRS; k++) {
        let total = across_teams(vec4<f32>(gamma_sum[k], beta_sum[k]), lane, u.p.lanes);
        let c = first + k * 2u * u.p.lanes;
        if (lane < u.p.lanes && c < u.p.dim) {
            let at = chunk * 2u * u.p.dim + c;
            partials_set(at, total.x);
            partials_set(at + u.p.dim, total.z);
            if (c + 1u < u.p.dim) {
                partials_set(at + 1u, total.y);
                partials_set(at + u.p.dim + 1u, total.w);
            }
        }
    }
}

// dgamma and dbeta of a column: the sums of the chunks in their order, 16 at a time.
fn finish(group: u32, lane: u32) {
    let column = group * 256u + lane;
    if (column >= 2u * u.p.dim) {
        return;
    }
    var total = 0.0;
    for (var begin = 0u; begin < u.p.chunks; begin += 16u) {
        var part = 0.0;
        for (var chunk = begin; chunk < min(begin + 16u, u.p.chunks); chunk++) {
            part += partials_at(chunk * 2u * u.p.dim + column);
        }
        total += part;
    }
    if (column < u.p.dim) {
        dgamma_set(column, total);
    } else {
        dbeta_set(column - u.p.dim, total);
    }
}

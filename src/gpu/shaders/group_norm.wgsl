// SPDX-License-Identifier: MIT
// group_norm: the group_channels * plane elements of each group of each sample are normalised together, with a scale
// and a shift per channel. With xh = (x - mean) * rstd and g = dy * gamma (docs/ops/group_norm.md derives it):
//
//     y  = xh * gamma + beta
//     dx = rstd * (g - mean(g) - xh * mean(g * xh)),  dgamma = sum of dy * xh,  dbeta = sum of dy, per channel
//
// A team of threads has a group, or a part of one. With channels last, the threads of neighbouring teams are neighbours
// in the workgroup, so that they read neighbouring groups. A group is seen in two ways: as a flat run of elements
// in the order of memory, for its statistics and its results; and channel by channel, for sums of dy and dy * xh, from
// which mean(g) and mean(g * xh) follow too.
//
//     whole    a group that fits a team's cache: `forward`; or `backward` and `finish`
//     split    chunks of a group: `moments` and `normalise`; or `moments` (where statistics are not saved), `sums`,
//              `gradient` and `finish`. Each team that needs the numbers of a whole group merges those of its chunks, in
//              order: a few numbers are read more than once, and that saves a launch.
//
// Memory traffic in tensors of x's size: whole 2 forward, 3 backward (later passes find them in cache); split 3 forward,
// 5 backward, 6 without saved statistics. Launches: 1 forward, 2 where split; backward 1, and where split 2, 3 without
// saved statistics; 1 more for dgamma and dbeta.
//# const LAST SAVED NORMAL
//# float x dy gamma beta y mean rstd mean_in rstd_in dx dgamma dbeta chunks part_sums plane_sums

struct Params {
    items: u32, // batch * group_items * groups, groups varying fastest; a team has one
    groups: u32,
    group_items: u32, // items of a group in this launch
    channels: u32,
    group_channels: u32,
    plane: u32,
    lanes: u32, // of a team
    teams: u32,
    along: u32, // lanes of a team that share a channel
    inner: u32,  // flat: runs of this many elements, a channel's plane or a position's channels,
    stride: u32, // this many elements apart
    step_outer: u32, // 2 * lanes elements further: this many runs and elements
    step_inner: u32,
    chunk: u32,  // flat: elements of a chunk, even
    chunks: u32, // of a group
    channel_chunk: u32, // by channel: channels of a part of a group
    position_chunk: u32,   // and positions
    position_chunks: u32,
    parts: u32,     // of a group
    plane_sum_rows: u32, // rows of plane_sums
    columns: u32,   // channels that a workgroup of `finish` has
    max_scale: u32, // the largest exponent by which a group is scaled up
    eps: f32,
    inverse: f32, // 1 / elements of a group
}

// ---- Sums ----

// A thread's sum: terms are added in parts of 16, these in parts of 16, and so on, so that no f32 chain is long.
struct Terms {
    part: vec4<f32>,
    middle: vec4<f32>,
    large: vec4<f32>,
    total: vec4<f32>,
    count: u32,
}

fn take(s: ptr<function, Terms>, v: vec4<f32>) {
    (*s).part += v;
    (*s).count += 1u;
    if ((*s).count % 16u != 0u) {
        return;
    }
    (*s).middle += (*s).part;
    (*s).part = vec4<f32>();
    if ((*s).count % 256u == 0u) {
        (*s).large += (*s).middle;
        (*s).middle = vec4<f32>();
    }
    if ((*s).count % 4096u == 0u) {
        (*s).total += (*s).large;
        (*s).large = vec4<f32>();
    }
}

fn all_of(s: Terms) -> vec4<f32> {
    return ((s.part + s.middle) + s.large) + s.total;
}

// Over a team, for each of its threads. With channels last, they are `teams` from each other.
fn group_sum(v: vec4<f32>, lane: u32) -> vec4<f32> {
    if (LAST == 1u) {
        return across_teams(v, lane, u.p.teams);
    }
    return team_sum4(v, lane, u.p.lanes);
}

fn group_max(v: f32, lane: u32) -> f32 {
    if (LAST == 1u) {
        return across_max(v, lane, u.p.teams);
    }
    return team_max(v, lane, u.p.lanes);
}

// ---- A team and its group ----

struct Team {
    rank: u32, // this thread's number in it
    valid: bool, // false: past the last item: it repeats the last one's work and stores nothing
    row: u32, // sample * groups + group
    sample: u32,
    part: u32, // which of the group's items
    start: u32, // the group's first element
    channel: u32, // the group's first channel
}

fn team_of(workgroup: u32, lane: u32) -> Team {
    var t = Team();
    t.rank = select(lane % u.p.lanes, lane / u.p.teams, LAST == 1u);
    let item = workgroup * u.p.teams + select(lane / u.p.lanes, lane % u.p.teams, LAST == 1u);
    t.valid = item < u.p.items;
    let near = min(item, u.p.items - 1u);
    let group = near % u.p.groups;
    t.part = (near / u.p.groups) % u.p.group_items;
    t.sample = near / u.p.groups / u.p.group_items;
    t.row = t.sample * u.p.groups + group;
    t.channel = group * u.p.group_channels;
    t.start = t.sample * u.p.channels * u.p.plane + t.channel * select(u.p.plane, 1u, LAST == 1u);
    return t;
}

fn group_size() -> u32 {
    return u.p.group_channels * u.p.plane;
}

fn chunk_end(begin: u32) -> u32 {
    return min(begin + u.p.chunk, group_size());
}

// A thread's position in the flat run of a group.
struct Cursor {
    i: u32,     // index of the first in the run
    outer: u32, // where that is: in which run of u.p.inner, and where in it
    inner: u32,
}

// Two elements of a group that follow each other in its flat run. They may be apart in memory where channels are last
// and a group has an odd number of them.
struct Pair {
    a: u32, // elements of the tensor
    b: u32,
    channel_a: u32,
    channel_b: u32,
    both: bool, // false: the run ends after the first
}

fn cursor_from(i: u32) -> Cursor {
    return Cursor(i, i / u.p.inner, i % u.p.inner);
}

fn cursor_next(w: ptr<function, Cursor>) {
    (*w).i += 2u * u.p.lanes;
    (*w).outer += u.p.step_outer;
    (*w).inner += u.p.step_inner;
    if ((*w).inner >= u.p.inner) {
        (*w).inner -= u.p.inner;
        (*w).outer += 1u;
    }
}

fn pair_at(t: Team, w: Cursor, end: u32) -> Pair {
    var p = Pair();
    let wraps = w.inner + 1u == u.p.inner;
    let outer = select(w.outer, w.outer + 1u, wraps);
    let inner = select(w.inner + 1u, 0u, wraps);
    p.both = w.i + 1u < end;
    p.a = t.start + w.outer * u.p.stride + w.inner;
    p.b = select(p.a, t.start + outer * u.p.stride + inner, p.both);
    p.channel_a = t.channel + select(w.outer, w.inner, LAST == 1u);
    p.channel_b = select(p.channel_a, t.channel + select(outer, inner, LAST == 1u), p.both);
    return p;
}

// The elements a and b; `outside` where there is no second. Two that share a word, from an even one on, are one load.
fn x_pair(a: u32, b: u32, both: bool, outside: f32) -> vec2<f32> {
    if (b == a + 1u && (a & 1u) == 0u) {
        return x_two(a);
    }
    return vec2<f32>(x_at(a), select(outside, x_at(b), both));
}

fn dy_pair(a: u32, b: u32, both: bool) -> vec2<f32> {
    if (b == a + 1u && (a & 1u) == 0u) {
        return dy_two(a);
    }
    return vec2<f32>(dy_at(a), select(0.0, dy_at(b), both));
}

fn gamma_pair(p: Pair) -> vec2<f32> {
    if (!gamma_is) {
        return vec2<f32>(1.0);
    }
    return vec2<f32>(gamma_at(p.channel_a), gamma_at(p.channel_b));
}

// ---- Statistics ----

// The mean is shift + rest: a mean near 1000 would lose digits in one f32, and a sum of dy * xh over a large plane
// amplifies an error of 1e-9 in the mean, which every term shares. So `shift` is the mean rounded to 1/4096 of the
// group's magnitude: x - shift is then exact for x of that magnitude. What remains of the mean, `rest`, is small and
// has all the digits of an f32.
struct Stats {
    guard: f32, // all but g and gxh are those of x * guard
    shift: f32,
    rest: f32,
    rstd: f32,
    dy_guard: f32, // g and gxh are those of dy * dy_guard: GUARD where a sum of g exceeds f32's range, else 1
    g: f32,        // mean(g)
    gxh: f32,      // mean(g * xh)
}

fn normal(f: Stats, x: vec2<f32>) -> vec2<f32> {
    return ((x * f.guard - f.shift) - f.rest) * f.rstd;
}

// Statistics of a chunk. Squares of 1e20 and of 1e-20 leave f32's range, so these are the squares of (x - mean) / unit.
struct Moments {
    shift: f32,
    rest: f32,
    squares: f32,
    unit: f32, // a power of two near the largest magnitude of x - mean
}

fn exponent_of(v: f32) -> i32 {
    return i32(bitcast<u32>(v) >> 23u);
}

// A mean that is large against its grid is on it already.
fn on_grid(mean: f32, unit: f32) -> f32 {
    let steps = mean * (inverse_power(unit) * 4096.0);
    if (abs(steps) < 4194304.0) {
        return round(steps) * (unit / 4096.0);
    }
    return mean;
}

// A sum of squares that rounding has made negative is 0. A NaN stays one, which max() does not promise.
fn above_zero(squares: f32) -> f32 {
    return select(squares, 0.0, squares < 0.0 && !is_nan(squares));
}

// first + near, where near has the mean of v - first, and that of (v - first) * GUARD.
fn mean_near(first: f32, near: vec2<f32>, exponent: i32) -> f32 {
    if (exponent >= LARGE) {
        return (first * GUARD + near.y) * inverse_power(GUARD);
    }
    return first + near.x;
}

// Of elements [begin, end) of the group's flat run: a first pass finds a point near their mean, a second measures from it.
fn measured_moments(t: Team, begin: u32, end: u32, lane: u32) -> Moments {
    let first = x_at(t.start);
    let size = f32(end - begin);
    var sum = Terms();
    var largest = 0.0;
    var w = cursor_from(begin + 2u * t.rank);
    while (w.i < end) {
        let p = pair_at(t, w, end);
        let x = x_pair(p.a, p.b, p.both, first);
        let v = x - first;
        let guarded = x * GUARD - first * GUARD;
        take(&sum, vec4<f32>(v.x + v.y, guarded.x + guarded.y, 0.0, 0.0));
        largest = max(largest, max(abs(v.x), abs(v.y)));
        cursor_next(&w);
    }
    let near = group_sum(all_of(sum), lane).xy / size;
    let exponent = clamp(exponent_of(group_max(largest, lane)), 127 - i32(u.p.max_scale), 253);
    var m = Moments();
    m.unit = bitcast<f32>(u32(exponent) << 23u);
    m.shift = on_grid(mean_near(first, near, exponent), m.unit);
    let guard = guard_of(exponent);
    let scale = inverse_power(m.unit * guard);
    sum = Terms();
    w = cursor_from(begin + 2u * t.rank);
    while (w.i < end) {
        let p = pair_at(t, w, end);
        let v = (x_pair(p.a, p.b, p.both, m.shift) * guard - m.shift * guard) * scale;
        take(&sum, vec4<f32>(v.x + v.y, v.x * v.x + v.y * v.y, 0.0, 0.0));
        cursor_next(&w);
    }
    let all = group_sum(all_of(sum), lane);
    let rest = all.x / size;
    m.rest = rest * m.unit;
    m.squares = above_zero(all.y - all.x * rest);
    return m;
}

fn stats_from(m: Moments) -> Stats {
    var f = Stats();
    f.guard = guard_of(exponent_of(m.unit));
    let scale = inverse_power(m.unit);
    f.shift = m.shift * f.guard;
    f.rest = m.rest * f.guard;
    f.rstd = inverse_power(m.unit * f.guard) / sqrt(m.squares * u.p.inverse + u.p.eps * scale * scale);
    return f;
}

fn moments(workgroup: u32, lane: u32) {
    let t = team_of(workgroup, lane);
    let begin = t.part * u.p.chunk;
    let m = measured_moments(t, begin, chunk_end(begin), lane);
    if (t.valid && t.rank == 0u) {
        let at = 4u * (t.row * u.p.chunks + t.part);
        chunks_set_two(at, vec2<f32>(m.shift, m.rest));
        chunks_set_two(at + 2u, vec2<f32>(m.squares, m.unit));
    }
}

fn chunk_of(t: Team, k: u32) -> Moments {
    let at = 4u * (t.row * u.p.chunks + k);
    return Moments(chunks_at(at), chunks_at(at + 1u), chunks_at(at + 2u), chunks_at(at + 3u));
}

fn chunk_size(k: u32) -> f32 {
    let begin = k * u.p.chunk;
    return f32(chunk_end(begin) - begin);
}

// A group's statistics from those of its chunks, in two passes as for elements: a chunk's squares about the group's
// shift are its own, plus the square of the distance from there to its mean for each of its elements.
fn merged_moments(t: Team, lane: u32) -> Moments {
    let first = chunk_of(t, 0u).shift;
    var near = vec2<f32>();
    var largest = 0.0;
    for (var k = t.rank; k < u.p.chunks; k += u.p.lanes) {
        let chunk = chunk_of(t, k);
        near += vec2<f32>(chunk.shift - first, chunk.shift * GUARD - first * GUARD) * (chunk_size(k) * u.p.inverse);
        largest = max(largest, chunk.unit);
    }
    near = group_sum(vec4<f32>(near, 0.0, 0.0), lane).xy;
    var m = Moments();
    m.unit = group_max(largest, lane);
    let exponent = exponent_of(m.unit);
    m.shift = on_grid(mean_near(first, near, exponent), m.unit);
    let guard = guard_of(exponent);
    let scale = inverse_power(m.unit * guard);
    var sums = vec2<f32>();
    for (var k = t.rank; k < u.p.chunks; k += u.p.lanes) {
        let chunk = chunk_of(t, k);
        let narrow = (chunk.unit * guard) * scale;
        let distance = ((chunk.shift * guard - m.shift * guard) + chunk.rest * guard) * scale;
        sums += vec2<f32>(distance * chunk_size(k), (chunk.squares * narrow) * narrow + distance * distance * chunk_size(k));
    }
    let all = group_sum(vec4<f32>(sums, 0.0, 0.0), lane);
    let rest = all.x * u.p.inverse;
    m.rest = rest * m.unit;
    m.squares = above_zero(all.y - all.x * rest);
    return m;
}

// ---- Forward ----

fn normalise_run(t: Team, f: Stats, begin: u32, end: u32) {
    if (t.part == 0u && t.rank == 0u) {
        mean_set(t.row, (f.shift + f.rest) * inverse_power(f.guard));
        rstd_set(t.row, f.rstd * f.guard);
    }
    if (!y_is) {
        return;
    }
    var w = cursor_from(begin + 2u * t.rank);
    while (w.i < end) {
        let p = pair_at(t, w, end);
        var v = normal(f, x_pair(p.a, p.b, p.both, 0.0));
        if (gamma_is) {
            v *= gamma_pair(p);
        }
        if (beta_is) {
            v += vec2<f32>(beta_at(p.channel_a), beta_at(p.channel_b));
        }
        if (p.b == p.a + 1u) {
            y_set_two(p.a, v);
        } else {
            y_set(p.a, v.x);
            if (p.both) {
                y_set(p.b, v.y);
            }
        }
        cursor_next(&w);
    }
}

fn forward(workgroup: u32, lane: u32) {
    let t = team_of(workgroup, lane);
    let f = stats_from(measured_moments(t, 0u, group_size(), lane));
    if (t.valid) {
        normalise_run(t, f, 0u, group_size());
    }
}

fn normalise(workgroup: u32, lane: u32) {
    let t = team_of(workgroup, lane);
    let begin = t.part * u.p.chunk;
    let f = stats_from(merged_moments(t, lane));
    if (t.valid) {
        normalise_run(t, f, begin, chunk_end(begin));
    }
}

// ---- Backward ----

// Stores a channel's sums of dy and dy * xh over a chunk of the plane; returns the sums of g and g * xh. So far only
// `shift` was subtracted from x; the rest of the mean is subtracted here, from the sum, with all its digits.
fn store_sums(t: Team, f: Stats, channel: u32, position_chunk: u32, about_shift: vec2<f32>) -> vec2<f32> {
    let sums = vec2<f32>(about_shift.x, about_shift.y - about_shift.x * (f.rest * f.rstd));
    if (t.valid) {
        plane_sums_set_two(2u * ((t.sample * u.p.position_chunks + position_chunk) * u.p.channels + channel), sums);
    }
    if (gamma_is) {
        return sums * gamma_at(channel);
    }
    return sums;
}

// Terms of the sums over a channel or two, and over all channels: the sums of dy near f32's largest number do not fit.
struct Products {
    channel: vec4<f32>, // dy and dy * xh
    guarded: vec2<f32>, // g and g * xh with dy * GUARD
}

fn products(f: Stats, a: u32, both: bool, gamma: vec2<f32>) -> Products {
    let b = select(a, a + 1u, both);
    let dy = dy_pair(a, b, both);
    var xh = vec2<f32>();
    if (NORMAL == 1u) {
        xh = (x_pair(a, b, both, 0.0) * f.guard - f.shift) * f.rstd;
        if (!both) {
            xh.y = 0.0;
        }
    }
    let g = (dy * GUARD) * gamma;
    let gxh = g * xh;
    return Products(vec4<f32>(dy, dy * xh), vec2<f32>(g.x + g.y, gxh.x + gxh.y));
}

fn gamma_near(channel: u32) -> f32 {
    if (!gamma_is) {
        return 1.0;
    }
    return gamma_at(min(channel, u.p.channels - 1u));
}

// A part of a group: some of its channels at some of their positions.
struct Part {
    position_chunk: u32,
    channel_begin: u32,
    channel_end: u32,
    position_begin: u32,
    position_end: u32,
}

fn part_of(part: u32) -> Part {
    var r = Part();
    r.position_chunk = part % u.p.position_chunks;
    r.channel_begin = part / u.p.position_chunks * u.p.channel_chunk;
    r.channel_end = min(r.channel_begin + u.p.channel_chunk, u.p.group_channels);
    r.position_begin = r.position_chunk * u.p.position_chunk;
    r.position_end = min(r.position_begin + u.p.position_chunk, u.p.plane);
    return r;
}

// A channel has `along` lanes. With channels last they are apart from each other, as its elements are.
fn sums_last(t: Team, f: Stats, r: Part, lane: u32) -> vec4<f32> {
    let across = u.p.lanes / u.p.along;
    var total = Terms();
    var guarded = vec2<f32>();
    for (var step = 0u; step < u.p.channel_chunk; step += 2u * across) {
        let channel = r.channel_begin + step + 2u * (t.rank % across);
        let both = channel + 1u < r.channel_end;
        var sum = Terms();
        if (channel < r.channel_end) {
            let gamma = vec2<f32>(gamma_near(t.channel + channel), gamma_near(t.channel + channel + 1u));
            for (var s = r.position_begin + t.rank / across; s < r.position_end; s += u.p.along) {
                let p = products(f, t.start + s * u.p.channels + channel, both, gamma);
                take(&sum, p.channel);
                guarded += p.guarded;
            }
        }
        let all = across_teams(all_of(sum), lane, across * u.p.teams);
        if (t.rank / across == 0u && channel < r.channel_end) {
            var gs = store_sums(t, f, t.channel + channel, r.position_chunk, all.xz);
            if (both) {
                gs += store_sums(t, f, t.channel + channel + 1u, r.position_chunk, all.yw);
            }
            take(&total, vec4<f32>(gs, 0.0, 0.0));
        }
    }
    return all_of(total) + vec4<f32>(0.0, 0.0, guarded);
}

// Else they are neighbours, as its elements are.
fn sums_planes(t: Team, f: Stats, r: Part, lane: u32) -> vec4<f32> {
    let across = u.p.lanes / u.p.along;
    var total = Terms();
    var guarded = vec2<f32>();
    for (var step = 0u; step < u.p.channel_chunk; step += across) {
        let channel = r.channel_begin + step + t.rank / u.p.along;
        var sum = Terms();
        if (channel < r.channel_end) {
            let gamma = vec2<f32>(gamma_near(t.channel + channel));
            for (var s = r.position_begin + 2u * (t.rank % u.p.along); s < r.position_end; s += 2u * u.p.along) {
                let p = products(f, t.start + channel * u.p.plane + s, s + 1u < r.position_end, gamma);
                take(&sum, p.channel);
                guarded += p.guarded;
            }
        }
        let all = team_sum4(all_of(sum), lane, u.p.along);
        if (t.rank % u.p.along == 0u && channel < r.channel_end) {
            let gs = store_sums(t, f, t.channel + channel, r.position_chunk, vec2<f32>(all.x + all.y, all.z + all.w));
            take(&total, vec4<f32>(gs, 0.0, 0.0));
        }
    }
    return all_of(total) + vec4<f32>(0.0, 0.0, guarded);
}

// The sums of g and g * xh over part `part` of the group, and those with dy * GUARD; stores those of its channels.
fn channel_sums(t: Team, f: Stats, part: u32, lane: u32) -> vec4<f32> {
    let r = part_of(part);
    var total = vec4<f32>();
    if (LAST == 1u) {
        total = sums_last(t, f, r, lane);
    } else {
        total = sums_planes(t, f, r, lane);
    }
    return group_sum(total, lane);
}

// mean(g) and mean(g * xh) from these sums over the whole group.
fn averaged(f: Stats, sum: vec4<f32>) -> Stats {
    let fits = is_finite(sum.x) && is_finite(sum.y);
    let guarded = vec2<f32>(sum.z, sum.w - sum.z * (f.rest * f.rstd));
    let means = select(guarded, sum.xy, fits) * u.p.inverse;
    var out = f;
    out.dy_guard = select(GUARD, 1.0, fits);
    out.g = means.x;
    out.gxh = means.y;
    return out;
}

fn gradient_of(t: Team, f: Stats, begin: u32, end: u32) {
    var w = cursor_from(begin + 2u * t.rank);
    while (w.i < end) {
        let p = pair_at(t, w, end);
        let g = (dy_pair(p.a, p.b, p.both) * f.dy_guard) * gamma_pair(p);
        let xh = normal(f, x_pair(p.a, p.b, p.both, 0.0));
        let v = f.rstd * ((g - f.g) - xh * f.gxh) * f.guard * inverse_power(f.dy_guard);
        if (p.b == p.a + 1u) {
            dx_set_two(p.a, v);
        } else {
            dx_set(p.a, v.x);
            if (p.both) {
                dx_set(p.b, v.y);
            }
        }
        cursor_next(&w);
    }
}

fn saved_stats(t: Team) -> Stats {
    var f = Stats();
    let mean = mean_in_at(t.row);
    let rstd = rstd_in_at(t.row);
    let exponent = clamp(254 - exponent_of(rstd), 20, 240);
    let shift = on_grid(mean, bitcast<f32>(u32(exponent) << 23u));
    f.guard = guard_of(exponent);
    f.shift = shift * f.guard;
    f.rest = (mean - shift) * f.guard;
    f.rstd = rstd * inverse_power(f.guard);
    return f;
}

fn backward(workgroup: u32, lane: u32) {
    let t = team_of(workgroup, lane);
    var f = Stats();
    if (SAVED == 1u) {
        f = saved_stats(t);
    } else if (NORMAL == 1u) {
        f = stats_from(measured_moments(t, 0u, group_size(), lane));
    }
    f = averaged(f, channel_sums(t, f, 0u, lane));
    if (dx_is && t.valid) {
        gradient_of(t, f, 0u, group_size());
    }
}

// The statistics of a group that is split.
fn stats_of(t: Team, lane: u32) -> Stats {
    if (SAVED == 1u) {
        return saved_stats(t);
    }
    if (NORMAL == 1u) {
        return stats_from(merged_moments(t, lane));
    }
    return Stats();
}

fn sums(workgroup: u32, lane: u32) {
    let t = team_of(workgroup, lane);
    let all = channel_sums(t, stats_of(t, lane), t.part, lane);
    if (t.valid && t.rank == 0u) {
        part_sums_set_two(4u * (t.row * u.p.parts + t.part), all.xy);
        part_sums_set_two(4u * (t.row * u.p.parts + t.part) + 2u, all.zw);
    }
}

fn gradient(workgroup: u32, lane: u32) {
    let t = team_of(workgroup, lane);
    var f = stats_of(t, lane);
    var sum = Terms();
    for (var k = t.rank; k < u.p.parts; k += u.p.lanes) {
        take(&sum, part_sums_four(4u * (t.row * u.p.parts + k)));
    }
    f = averaged(f, group_sum(all_of(sum), lane));
    let begin = t.part * u.p.chunk;
    if (t.valid) {
        gradient_of(t, f, begin, chunk_end(begin));
    }
}

// dgamma and dbeta of some channels: their sums over the batch and over the chunks of the plane.
fn finish(workgroup: u32, lane: u32) {
    let channel = workgroup * u.p.columns + lane % u.p.columns;
    var sum = Terms();
    if (channel < u.p.channels) {
        for (var row = lane / u.p.columns; row < u.p.plane_sum_rows; row += 256u / u.p.columns) {
            take(&sum, vec4<f32>(plane_sums_two(2u * (row * u.p.channels + channel)), 0.0, 0.0));
        }
    }
    let all = across_teams(all_of(sum), lane, u.p.columns);
    if (lane < u.p.columns && channel < u.p.channels) {
        dbeta_set(channel, all.x);
        dgamma_set(channel, all.y);
    }
}

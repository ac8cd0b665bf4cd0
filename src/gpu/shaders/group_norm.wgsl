// group_norm: the group_channels * plane elements of each group of each sample, normalised together, with a scale and a
// shift a channel. With xh = (x - mean) * rstd and g = dy * gamma (docs/ops/group_norm.md derives it):
//
//     y  = xh * gamma + beta
//     dx = rstd * (g - mean(g) - xh * mean(g * xh)),  dgamma = sum of dy * xh,  dbeta = sum of dy a channel
//
// A team of threads has a group, or a part of one. Channels last, teams lie beside each other in the workgroup, so that
// threads side by side read groups side by side. A group is looked at in two ways: as a flat run of elements in the
// order of memory, for its statistics and its results; and channel by channel, for sums of dy and dy * xh, from which
// mean(g) and mean(g * xh) follow too.
//
//     whole    a group that a team can hold in cache: `forward`, or `backward` and `finish`
//     cut      pieces of a group: `moments` and `normalise`; or `moments` (where statistics are not saved), `sums`,
//              `gradient` and `finish`. A group's numbers are put together, in order, by each team that needs them:
//              a few numbers are read more than once, and that saves a launch.
//
// Tensors of x's size that go through memory: whole 2 forward, 3 backward (further looks find them in cache); cut 3
// forward, 5 backward, 6 without saved statistics. Launches: 1 forward, 2 where cut; backward 1, and where cut 2, 3
// without saved statistics; 1 more for dgamma and dbeta.
//# const LAST SAVED NORMAL
//# float x dy gamma beta y mean rstd mean_in rstd_in dx dgamma dbeta pieces lines cells

struct Params {
    items: u32, // batch * cuts * groups, groups the fastest: what teams have
    groups: u32,
    cuts: u32, // items that a group makes in this launch
    channels: u32,
    group_channels: u32,
    plane: u32,
    lanes: u32, // of a team
    teams: u32,
    along: u32, // lanes of a team that share a channel
    inner: u32,  // flat: runs of this many elements, a channel's plane or a place's channels,
    stride: u32, // this far from each other
    step_outer: u32, // 2 * lanes elements on: so many runs and so many elements
    step_inner: u32,
    piece: u32,  // flat: elements of a piece, even
    pieces: u32, // of a group
    channel_piece: u32, // by channel: a part of a group has so many channels
    place_piece: u32,   // and so many places
    place_pieces: u32,
    parts: u32,     // of a group
    cell_rows: u32, // sums that a channel has
    columns: u32,   // channels that a workgroup of `finish` has
    most_scale: u32, // the largest exponent by which a group is scaled up
    eps: f32,
    inverse: f32, // 1 / elements of a group
}

// ---- Sums ----

// Terms of one thread, in parts of 16, these in parts of 16 and so on: no f32 chain is long.
struct Sum {
    part: vec4<f32>,
    middle: vec4<f32>,
    large: vec4<f32>,
    total: vec4<f32>,
    terms: u32,
}

fn take(s: ptr<function, Sum>, v: vec4<f32>) {
    (*s).part += v;
    (*s).terms += 1u;
    if ((*s).terms % 16u != 0u) {
        return;
    }
    (*s).middle += (*s).part;
    (*s).part = vec4<f32>();
    if ((*s).terms % 256u == 0u) {
        (*s).large += (*s).middle;
        (*s).middle = vec4<f32>();
    }
    if ((*s).terms % 4096u == 0u) {
        (*s).total += (*s).large;
        (*s).large = vec4<f32>();
    }
}

fn all_of(s: Sum) -> vec4<f32> {
    return ((s.part + s.middle) + s.large) + s.total;
}

// For each run of `span` threads, and each place modulo `low` in it: the sum of v, the same for all who share it. Both
// are powers of two. Every thread of the workgroup must come here; the last barrier keeps the next sum from overwriting
// this one while it is still being read.
fn fold(v: vec4<f32>, lane: u32, span: u32, low: u32) -> vec4<f32> {
    team_tree[lane] = v;
    workgroupBarrier();
    for (var stride = span / 2u; stride >= low; stride = stride >> 1u) {
        if ((lane & (span - 1u)) < stride) {
            team_tree[lane] += team_tree[lane + stride];
        }
        workgroupBarrier();
    }
    let total = team_tree[(lane & ~(span - 1u)) | (lane & (low - 1u))];
    workgroupBarrier();
    return total;
}

fn fold_max(v: f32, lane: u32, span: u32, low: u32) -> f32 {
    team_tree[lane].x = v;
    workgroupBarrier();
    for (var stride = span / 2u; stride >= low; stride = stride >> 1u) {
        if ((lane & (span - 1u)) < stride) {
            team_tree[lane].x = max(team_tree[lane].x, team_tree[lane + stride].x);
        }
        workgroupBarrier();
    }
    let largest = team_tree[(lane & ~(span - 1u)) | (lane & (low - 1u))].x;
    workgroupBarrier();
    return largest;
}

fn group_sum(v: vec4<f32>, lane: u32) -> vec4<f32> {
    if (LAST == 1u) {
        return fold(v, lane, 256u, u.p.teams);
    }
    return fold(v, lane, u.p.lanes, 1u);
}

fn group_max(v: f32, lane: u32) -> f32 {
    if (LAST == 1u) {
        return fold_max(v, lane, 256u, u.p.teams);
    }
    return fold_max(v, lane, u.p.lanes, 1u);
}

// ---- A team and its group ----

struct Team {
    place: u32, // of this thread in it
    valid: bool, // false: past the last item; it does the last one's work and leaves nothing
    row: u32, // sample * groups + group
    sample: u32,
    part: u32, // which of the group's `cuts`
    start: u32, // the group's first element
    channel: u32, // the group's first channel
}

fn team_of(workgroup: u32, lane: u32) -> Team {
    var t = Team();
    t.place = select(lane % u.p.lanes, lane / u.p.teams, LAST == 1u);
    let item = workgroup * u.p.teams + select(lane / u.p.lanes, lane % u.p.teams, LAST == 1u);
    t.valid = item < u.p.items;
    let near = min(item, u.p.items - 1u);
    let group = near % u.p.groups;
    t.part = (near / u.p.groups) % u.p.cuts;
    t.sample = near / u.p.groups / u.p.cuts;
    t.row = t.sample * u.p.groups + group;
    t.channel = group * u.p.group_channels;
    t.start = t.sample * u.p.channels * u.p.plane + t.channel * select(u.p.plane, 1u, LAST == 1u);
    return t;
}

// Two elements of a group that follow each other in its flat run. They may lie apart
// where channels are last and a group has an odd number of them.
struct Walk {
    i: u32,     // the first's index in the run
    outer: u32, // and where that is: in which run of u.p.inner, and where in it
    inner: u32,
}

struct Pair {
    a: u32, // elements of the tensor
    b: u32,
    channel_a: u32,
    channel_b: u32,
    both: bool, // false: the run ends after the first
}

fn walk_from(i: u32) -> Walk {
    return Walk(i, i / u.p.inner, i % u.p.inner);
}

fn walk_on(w: ptr<function, Walk>) {
    (*w).i += 2u * u.p.lanes;
    (*w).outer += u.p.step_outer;
    (*w).inner += u.p.step_inner;
    if ((*w).inner >= u.p.inner) {
        (*w).inner -= u.p.inner;
        (*w).outer += 1u;
    }
}

fn pair_at(t: Team, w: Walk, end: u32) -> Pair {
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

// The elements a and b; `outside` where there is no second. Two of a word are loaded at once: they start at even ones.
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

// The mean is shift + rest: a mean near 1000 would lose digits in one f32, and a sum of dy * xh over a large plane sees
// an error of 1e-9 in the mean, which every term has. So `shift` is the mean on a grid of 1/4096 of the group's
// magnitude: x - shift then has no error that all x of a size share, as with a shift of 24 digits. What is left of
// the mean, `rest`, is small, and known to all the digits of an f32.
struct Facts {
    shift: f32,
    rest: f32,
    rstd: f32,
    g: f32,   // mean(g)
    gxh: f32, // mean(g * xh)
}

fn normal(f: Facts, x: vec2<f32>) -> vec2<f32> {
    return ((x - f.shift) - f.rest) * f.rstd;
}

// Statistics of a piece. Squares of 1e20 and of 1e-20 leave f32's range, so that they are those of (x - mean) / unit.
struct Moments {
    shift: f32,
    rest: f32,
    squares: f32,
    unit: f32, // a power of two near the largest magnitude of x - mean
}

fn inverse_unit(unit: f32) -> f32 {
    return bitcast<f32>((254u << 23u) - bitcast<u32>(unit));
}

// A mean that is large against its grid is on it.
fn on_grid(mean: f32, unit: f32) -> f32 {
    let steps = mean * (inverse_unit(unit) * 4096.0);
    if (abs(steps) < 4194304.0) {
        return round(steps) * (unit / 4096.0);
    }
    return mean;
}

// Squares that rounding has brought below zero are none. A NaN stays one, which max() does not promise.
fn above_zero(squares: f32) -> f32 {
    return select(squares, 0.0, squares < 0.0 && !is_nan(squares));
}

// Of elements [begin, end) of the group's flat run: a first look finds about where they are, a second measures there.
fn measured(t: Team, begin: u32, end: u32, lane: u32) -> Moments {
    let first = x_at(t.start);
    let size = f32(end - begin);
    var sum = Sum();
    var largest = 0.0;
    var w = walk_from(begin + 2u * t.place);
    while (w.i < end) {
        let p = pair_at(t, w, end);
        let v = x_pair(p.a, p.b, p.both, first) - first;
        take(&sum, vec4<f32>(v.x + v.y, 0.0, 0.0, 0.0));
        largest = max(largest, max(abs(v.x), abs(v.y)));
        walk_on(&w);
    }
    let near = group_sum(all_of(sum), lane).x / size;
    largest = group_max(largest, lane);
    let exponent = clamp(i32(bitcast<u32>(largest) >> 23u), 127 - i32(u.p.most_scale), 253);
    var m = Moments();
    m.unit = bitcast<f32>(u32(exponent) << 23u);
    m.shift = on_grid(first + near, m.unit);
    let scale = inverse_unit(m.unit);
    sum = Sum();
    w = walk_from(begin + 2u * t.place);
    while (w.i < end) {
        let p = pair_at(t, w, end);
        let v = (x_pair(p.a, p.b, p.both, m.shift) - m.shift) * scale;
        take(&sum, vec4<f32>(v.x + v.y, v.x * v.x + v.y * v.y, 0.0, 0.0));
        walk_on(&w);
    }
    let all = group_sum(all_of(sum), lane);
    let rest = all.x / size;
    m.rest = rest * m.unit;
    m.squares = above_zero(all.y - all.x * rest);
    return m;
}

fn facts_from(m: Moments) -> Facts {
    var f = Facts();
    let scale = inverse_unit(m.unit);
    f.shift = m.shift;
    f.rest = m.rest;
    f.rstd = scale / sqrt(m.squares * u.p.inverse + u.p.eps * scale * scale);
    return f;
}

fn moments(workgroup: u32, lane: u32) {
    let t = team_of(workgroup, lane);
    let begin = t.part * u.p.piece;
    let m = measured(t, begin, min(begin + u.p.piece, u.p.group_channels * u.p.plane), lane);
    if (t.valid && t.place == 0u) {
        let at = 4u * (t.row * u.p.pieces + t.part);
        pieces_set_two(at, vec2<f32>(m.shift, m.rest));
        pieces_set_two(at + 2u, vec2<f32>(m.squares, m.unit));
    }
}

fn piece_of(t: Team, k: u32) -> Moments {
    let at = 4u * (t.row * u.p.pieces + k);
    return Moments(pieces_at(at), pieces_at(at + 1u), pieces_at(at + 2u), pieces_at(at + 3u));
}

fn piece_size(k: u32) -> f32 {
    let begin = k * u.p.piece;
    return f32(min(begin + u.p.piece, u.p.group_channels * u.p.plane) - begin);
}

// A group's statistics from its pieces', looked at twice as elements are: a piece's squares about the group's shift are
// its own, and those of the way from there to its mean.
fn merged(t: Team, lane: u32) -> Moments {
    let first = piece_of(t, 0u).shift;
    var near = 0.0;
    var largest = 0.0;
    for (var k = t.place; k < u.p.pieces; k += u.p.lanes) {
        let piece = piece_of(t, k);
        near += (piece.shift - first) * (piece_size(k) * u.p.inverse);
        largest = max(largest, piece.unit);
    }
    near = group_sum(vec4<f32>(near, 0.0, 0.0, 0.0), lane).x;
    var m = Moments();
    m.unit = group_max(largest, lane);
    m.shift = on_grid(first + near, m.unit);
    let scale = inverse_unit(m.unit);
    var sums = vec2<f32>();
    for (var k = t.place; k < u.p.pieces; k += u.p.lanes) {
        let piece = piece_of(t, k);
        let narrow = piece.unit * scale;
        let way = ((piece.shift - m.shift) + piece.rest) * scale;
        sums += vec2<f32>(way * piece_size(k), (piece.squares * narrow) * narrow + way * way * piece_size(k));
    }
    let all = group_sum(vec4<f32>(sums, 0.0, 0.0), lane);
    let rest = all.x * u.p.inverse;
    m.rest = rest * m.unit;
    m.squares = above_zero(all.y - all.x * rest);
    return m;
}

// ---- Forward ----

fn normalised(t: Team, f: Facts, begin: u32, end: u32) {
    if (t.part == 0u && t.place == 0u) {
        mean_set(t.row, f.shift + f.rest);
        rstd_set(t.row, f.rstd);
    }
    if (!y_is) {
        return;
    }
    var w = walk_from(begin + 2u * t.place);
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
        walk_on(&w);
    }
}

fn forward(workgroup: u32, lane: u32) {
    let t = team_of(workgroup, lane);
    let count = u.p.group_channels * u.p.plane;
    let f = facts_from(measured(t, 0u, count, lane));
    if (t.valid) {
        normalised(t, f, 0u, count);
    }
}

fn normalise(workgroup: u32, lane: u32) {
    let t = team_of(workgroup, lane);
    let begin = t.part * u.p.piece;
    let f = facts_from(merged(t, lane));
    if (t.valid) {
        normalised(t, f, begin, min(begin + u.p.piece, u.p.group_channels * u.p.plane));
    }
}

// ---- Backward ----

// Leaves a channel's sums of dy and dy * xh over a piece of the plane; makes what they are of g and g * xh. So far only
// `shift` was taken from x; the rest of the mean is taken from the sum, with all its digits.
fn leave(t: Team, f: Facts, channel: u32, place_piece: u32, about_shift: vec2<f32>) -> vec2<f32> {
    let sums = vec2<f32>(about_shift.x, about_shift.y - about_shift.x * (f.rest * f.rstd));
    if (t.valid) {
        cells_set_two(2u * ((t.sample * u.p.place_pieces + place_piece) * u.p.channels + channel), sums);
    }
    if (gamma_is) {
        return sums * gamma_at(channel);
    }
    return sums;
}

fn products(f: Facts, a: u32, both: bool) -> vec4<f32> {
    let b = select(a, a + 1u, both);
    let dy = dy_pair(a, b, both);
    var dyxh = vec2<f32>();
    if (NORMAL == 1u) {
        dyxh = dy * ((x_pair(a, b, both, 0.0) - f.shift) * f.rstd);
        if (!both) {
            dyxh.y = 0.0;
        }
    }
    return vec4<f32>(dy, dyxh);
}

// The sums of g and g * xh over part `part` of the group, and those of its channels left behind. A channel has `along`
// lanes: neighbours where its elements are neighbours, and every so many-th where the plane's places lie apart.
fn channel_sums(t: Team, f: Facts, part: u32, lane: u32) -> vec2<f32> {
    let across = u.p.lanes / u.p.along;
    let place_piece = part % u.p.place_pieces;
    let channel_begin = part / u.p.place_pieces * u.p.channel_piece;
    let channel_end = min(channel_begin + u.p.channel_piece, u.p.group_channels);
    let place_begin = place_piece * u.p.place_piece;
    let place_end = min(place_begin + u.p.place_piece, u.p.plane);
    var total = Sum();
    if (LAST == 1u) {
        for (var step = 0u; step < u.p.channel_piece; step += 2u * across) {
            let c = channel_begin + step + 2u * (t.place % across);
            let both = c + 1u < channel_end;
            var sum = Sum();
            if (c < channel_end) {
                for (var s = place_begin + t.place / across; s < place_end; s += u.p.along) {
                    take(&sum, products(f, t.start + s * u.p.channels + c, both));
                }
            }
            let all = fold(all_of(sum), lane, 256u, across * u.p.teams);
            if (t.place / across == 0u && c < channel_end) {
                var gs = leave(t, f, t.channel + c, place_piece, all.xz);
                if (both) {
                    gs += leave(t, f, t.channel + c + 1u, place_piece, all.yw);
                }
                take(&total, vec4<f32>(gs, 0.0, 0.0));
            }
        }
    } else {
        for (var step = 0u; step < u.p.channel_piece; step += across) {
            let c = channel_begin + step + t.place / u.p.along;
            var sum = Sum();
            if (c < channel_end) {
                for (var s = place_begin + 2u * (t.place % u.p.along); s < place_end; s += 2u * u.p.along) {
                    take(&sum, products(f, t.start + c * u.p.plane + s, s + 1u < place_end));
                }
            }
            let all = fold(all_of(sum), lane, u.p.along, 1u);
            if (t.place % u.p.along == 0u && c < channel_end) {
                let gs = leave(t, f, t.channel + c, place_piece, vec2<f32>(all.x + all.y, all.z + all.w));
                take(&total, vec4<f32>(gs, 0.0, 0.0));
            }
        }
    }
    return group_sum(all_of(total), lane).xy;
}

fn gradient_of(t: Team, f: Facts, begin: u32, end: u32) {
    var w = walk_from(begin + 2u * t.place);
    while (w.i < end) {
        let p = pair_at(t, w, end);
        let g = dy_pair(p.a, p.b, p.both) * gamma_pair(p);
        let xh = normal(f, x_pair(p.a, p.b, p.both, 0.0));
        let v = f.rstd * ((g - f.g) - xh * f.gxh);
        if (p.b == p.a + 1u) {
            dx_set_two(p.a, v);
        } else {
            dx_set(p.a, v.x);
            if (p.both) {
                dx_set(p.b, v.y);
            }
        }
        walk_on(&w);
    }
}

fn saved(t: Team) -> Facts {
    var f = Facts();
    let mean = mean_in_at(t.row);
    f.rstd = rstd_in_at(t.row);
    let exponent = clamp(254 - i32(bitcast<u32>(f.rstd) >> 23u), 20, 240);
    f.shift = on_grid(mean, bitcast<f32>(u32(exponent) << 23u));
    f.rest = mean - f.shift;
    return f;
}

fn backward(workgroup: u32, lane: u32) {
    let t = team_of(workgroup, lane);
    let count = u.p.group_channels * u.p.plane;
    var f = Facts();
    if (SAVED == 1u) {
        f = saved(t);
    } else if (NORMAL == 1u) {
        f = facts_from(measured(t, 0u, count, lane));
    }
    let all = channel_sums(t, f, 0u, lane);
    f.g = all.x * u.p.inverse;
    f.gxh = all.y * u.p.inverse;
    if (dx_is && t.valid) {
        gradient_of(t, f, 0u, count);
    }
}

// The statistics of a group that is cut.
fn known(t: Team, lane: u32) -> Facts {
    if (SAVED == 1u) {
        return saved(t);
    }
    if (NORMAL == 1u) {
        return facts_from(merged(t, lane));
    }
    return Facts();
}

fn sums(workgroup: u32, lane: u32) {
    let t = team_of(workgroup, lane);
    let all = channel_sums(t, known(t, lane), t.part, lane);
    if (t.valid && t.place == 0u) {
        lines_set_two(2u * (t.row * u.p.parts + t.part), all);
    }
}

fn gradient(workgroup: u32, lane: u32) {
    let t = team_of(workgroup, lane);
    var f = known(t, lane);
    var sum = Sum();
    for (var k = t.place; k < u.p.parts; k += u.p.lanes) {
        take(&sum, vec4<f32>(lines_two(2u * (t.row * u.p.parts + k)), 0.0, 0.0));
    }
    let all = group_sum(all_of(sum), lane);
    f.g = all.x * u.p.inverse;
    f.gxh = all.y * u.p.inverse;
    let begin = t.part * u.p.piece;
    if (t.valid) {
        gradient_of(t, f, begin, min(begin + u.p.piece, u.p.group_channels * u.p.plane));
    }
}

// dgamma and dbeta of some channels: their sums over the batch and the pieces of the plane.
fn finish(workgroup: u32, lane: u32) {
    let channel = workgroup * u.p.columns + lane % u.p.columns;
    var sum = Sum();
    if (channel < u.p.channels) {
        for (var row = lane / u.p.columns; row < u.p.cell_rows; row += 256u / u.p.columns) {
            take(&sum, vec4<f32>(cells_two(2u * (row * u.p.channels + channel)), 0.0, 0.0));
        }
    }
    let all = fold(all_of(sum), lane, 256u, u.p.columns);
    if (lane < u.p.columns && channel < u.p.channels) {
        dbeta_set(channel, all.x);
        dgamma_set(channel, all.y);
    }
}

// SPDX-License-Identifier: MIT
// cumsum: running sums along an axis of x, seen as [outer, length, inner], from either end, with or without an
// element's own value.
//
// A track is one such sum, along the whole axis or a segment of it. A thread has two tracks side by side, as the .x and
// .y of its vectors: two neighbouring columns or, where inner is 1 (LINES), two lines. A team of lanes * columns
// threads goes along its tracks in steps of four positions per thread: a thread adds its four, the team's lanes scan
// these sums along a tree of at most eight levels, and the sum of the whole step is added to the carry. So a sum in
// plain f32 is ten additions deep; the carry is a pair of f32, because after 2^24 ones a single f32 stops growing.
//
// Where there are too few tracks to fill a GPU the axis is split into segments: `sums` sums each, and `scan` starts from
// the sum of those before. An element is read and then written by one thread: y may be x.
//
// Memory traffic: x once, y once (twice where it is added to), one dispatch per 2^24 elements; with segments x twice,
// two dispatches, and 8 bytes per segment and column, of which each segment reads those before its own.
//# const LINES
//# float y x totals

struct Params {
    first: u32,  // item of this launch: a segment of an axis, in the order of memory
    end: u32,    // of its items
    offset: u32, // the element that is the launch's first
    length: u32,
    inner: u32,
    segments: u32,
    segment: u32, // positions in each; the last one in memory may have fewer
    steps: u32,   // of a segment
    lanes: u32,   // of a team, along the axis
    columns: u32, // of a team: pairs of them
    tiles: u32,   // of columns
    reverse: u32,
    exclusive: u32,
    zero: u32,
}

// ---- Sums of two f32 ----

//# include pairs

// The sum over the lanes of this thread's team, for each of them. Every thread of the workgroup must come here.
fn over_lanes(own: Pair, lane: u32, rank: u32) -> Pair {
    var sum = own;
    team_tree[lane] = vec4<f32>(sum.high, sum.low);
    workgroupBarrier();
    for (var by = u.p.lanes / 2u; by > 0u; by = by >> 1u) {
        if (rank < by) {
            let other = team_tree[lane + by * u.p.columns];
            sum = plus(plus(sum, other.xy), other.zw);
            team_tree[lane] = vec4<f32>(sum.high, sum.low);
        }
        workgroupBarrier();
    }
    let total = team_tree[lane - rank * u.p.columns];
    workgroupBarrier();
    return Pair(total.xy, total.zw);
}

// ---- Tracks ----

struct Tracks {
    start: vec2<u32>, // the element at the first position in memory
    count: vec2<u32>, // positions; 0: there is no such track
    order: vec2<u32>, // which segment of the axis it is, in the order of the scan
    total: vec2<u32>, // of the axis's first segment in that order
}

fn add_track(t: ptr<function, Tracks>, k: u32, item: u32, column: u32) {
    if (item >= u.p.end || column >= u.p.inner) {
        return;
    }
    let outer = item / u.p.segments;
    let segment = item - outer * u.p.segments;
    let begin = segment * u.p.segment;
    (*t).start[k] = (outer * u.p.length + begin) * u.p.inner + column - u.p.offset;
    (*t).count[k] = min(u.p.segment, u.p.length - begin);
    (*t).order[k] = select(segment, u.p.segments - 1u - segment, u.p.reverse == 1u);
    (*t).total[k] = outer * u.p.segments * u.p.inner + column;
}

// The tracks of a thread: a team's threads are [lanes][columns], a workgroup's [teams][lanes][columns].
fn tracks_of(group: u32, lane: u32) -> Tracks {
    let size = u.p.lanes * u.p.columns;
    let team = group * (256u / size) + lane / size;
    var t = Tracks();
    if (LINES == 1u) {
        add_track(&t, 0u, u.p.first + 2u * team, 0u);
        add_track(&t, 1u, u.p.first + 2u * team + 1u, 0u);
    } else {
        let item = team / u.p.tiles;
        let column = 2u * ((team - item * u.p.tiles) * u.p.columns + lane % u.p.columns);
        add_track(&t, 0u, u.p.first + item, column);
        add_track(&t, 1u, u.p.first + item, column + 1u);
    }
    return t;
}

// Four positions of both tracks, in the order of the scan.
struct Four {
    a: vec2<f32>,
    b: vec2<f32>,
    c: vec2<f32>,
    d: vec2<f32>,
}

fn turned(f: Four) -> Four {
    if (u.p.reverse == 1u) {
        return Four(f.d, f.c, f.b, f.a);
    }
    return f;
}

// The first of a thread's four positions in a step.
fn position_of(step: u32, rank: u32) -> u32 {
    let position = step * u.p.lanes + rank;
    return 4u * select(position, u.p.steps * u.p.lanes - 1u - position, u.p.reverse == 1u);
}

// Past the end x is 0. Positions are multiples of four, so the last two of a line start on a word of 16-bit elements.
fn line_four(start: u32, position: u32, count: u32) -> vec4<f32> {
    let at = start + position;
    if (position + 4u <= count) {
        return x_four(at);
    }
    var v = vec4<f32>();
    if (position + 2u <= count) {
        let two = x_two(at);
        v.x = two.x;
        v.y = two.y;
        if (position + 3u <= count) {
            v.z = x_at(at + 2u);
        }
    } else if (position < count) {
        v.x = x_at(at);
    }
    return v;
}

fn row_two(t: Tracks, position: u32) -> vec2<f32> {
    let at = t.start.x + position * u.p.inner;
    if (position < t.count.y) {
        return x_two(at);
    }
    if (position < t.count.x) {
        return vec2<f32>(x_at(at), 0.0);
    }
    return vec2<f32>();
}

fn load(t: Tracks, position: u32) -> Four {
    if (LINES == 1u) {
        let v = line_four(t.start.x, position, t.count.x);
        let w = line_four(t.start.y, position, t.count.y);
        return turned(Four(vec2<f32>(v.x, w.x), vec2<f32>(v.y, w.y), vec2<f32>(v.z, w.z), vec2<f32>(v.w, w.w)));
    }
    return turned(Four(row_two(t, position), row_two(t, position + 1u), row_two(t, position + 2u), row_two(t, position + 3u)));
}

fn line_four_set(start: u32, position: u32, count: u32, v: vec4<f32>) {
    let at = start + position;
    if (position + 2u <= count) {
        y_set_two(at, v.xy);
    } else if (position < count) {
        y_set(at, v.x);
    }
    if (position + 4u <= count) {
        y_set_two(at + 2u, v.zw);
    } else if (position + 3u <= count) {
        y_set(at + 2u, v.z);
    }
}

fn row_two_set(t: Tracks, position: u32, v: vec2<f32>) {
    let at = t.start.x + position * u.p.inner;
    if (position < t.count.y) {
        y_set_two(at, v);
    } else if (position < t.count.x) {
        y_set(at, v.x);
    }
}

fn store(t: Tracks, position: u32, results: Four) {
    let f = turned(results);
    if (LINES == 1u) {
        line_four_set(t.start.x, position, t.count.x, vec4<f32>(f.a.x, f.b.x, f.c.x, f.d.x));
        line_four_set(t.start.y, position, t.count.y, vec4<f32>(f.a.y, f.b.y, f.c.y, f.d.y));
    } else {
        row_two_set(t, position, f.a);
        row_two_set(t, position + 1u, f.b);
        row_two_set(t, position + 2u, f.c);
        row_two_set(t, position + 3u, f.d);
    }
}

// ---- Segments ----

fn total_set(at: u32, high: f32, low: f32) {
    totals_set(2u * at, high);
    totals_set(2u * at + 1u, low);
}

// The sum of each segment.
fn sums(group: u32, lane: u32) {
    let rank = (lane / u.p.columns) % u.p.lanes;
    let t = tracks_of(group, lane);
    var own = Pair();
    for (var step = 0u; step < u.p.steps; step++) {
        let v = load(t, position_of(step, rank));
        own = plus(own, (v.a + v.b) + (v.c + v.d));
    }
    let total = over_lanes(own, lane, rank);
    if (rank == 0u && t.count.x > 0u) {
        total_set(t.total.x + t.order.x * u.p.inner, total.high.x, total.low.x);
    }
    if (rank == 0u && t.count.y > 0u) {
        total_set(t.total.y + t.order.y * u.p.inner, total.high.y, total.low.y);
    }
}

// The sum of all segments before.
fn before_segment(t: Tracks, lane: u32, rank: u32) -> Pair {
    var own = Pair();
    for (var i = rank; i < max(t.order.x, t.order.y); i += u.p.lanes) {
        var high = vec2<f32>();
        var low = vec2<f32>();
        if (i < t.order.x) {
            let at = 2u * (t.total.x + i * u.p.inner);
            high.x = totals_at(at);
            low.x = totals_at(at + 1u);
        }
        if (i < t.order.y) {
            let at = 2u * (t.total.y + i * u.p.inner);
            high.y = totals_at(at);
            low.y = totals_at(at + 1u);
        }
        own = plus(plus(own, high), low);
    }
    return over_lanes(own, lane, rank);
}

// ---- The scan ----

struct Step {
    before: vec2<f32>, // the sum of the lanes before this one
    total: vec2<f32>,  // of all
}

// Two levels, used in turn: one is written while the other may still be read.
var<workgroup> levels: array<array<vec2<f32>, 256>, 2>;

// Every thread of the workgroup must come here. The barrier at the end keeps the next step from overwriting what this
// one reads.
fn over_lanes_before(own: vec2<f32>, lane: u32, rank: u32) -> Step {
    if (u.p.lanes == 1u) {
        return Step(vec2<f32>(), own);
    }
    var sum = own;
    var level = 0u;
    for (var by = 1u; by < u.p.lanes; by = by << 1u) {
        levels[level][lane] = sum;
        workgroupBarrier();
        if (rank >= by) {
            sum = levels[level][lane - by * u.p.columns] + sum;
        }
        level = 1u - level;
    }
    levels[level][lane] = sum;
    workgroupBarrier();
    // Not by subtracting the lane's own sum: inf - inf is a NaN.
    var before = vec2<f32>();
    if (rank > 0u) {
        before = levels[level][lane - u.p.columns];
    }
    let total = levels[level][lane + (u.p.lanes - 1u - rank) * u.p.columns];
    workgroupBarrier();
    return Step(before, total);
}

fn scan(group: u32, lane: u32) {
    let rank = (lane / u.p.columns) % u.p.lanes;
    let t = tracks_of(group, lane);
    var carry = Pair();
    if (u.p.segments > 1u) {
        carry = before_segment(t, lane, rank);
    }
    for (var step = 0u; step < u.p.steps; step++) {
        let position = position_of(step, rank);
        let v = load(t, position);
        // As a tree, so that equal terms lose no digits.
        let ab = v.a + v.b;
        let abc = ab + v.c;
        let own = ab + (v.c + v.d);
        let s = over_lanes_before(own, lane, rank);
        var f = Four(v.a, ab, abc, own);
        if (u.p.exclusive == 1u) {
            f = Four(vec2<f32>(), v.a, ab, abc);
        }
        store(t, position,
              Four(carry.high + (carry.low + (s.before + f.a)), carry.high + (carry.low + (s.before + f.b)),
                   carry.high + (carry.low + (s.before + f.c)), carry.high + (carry.low + (s.before + f.d))));
        carry = plus(carry, s.total);
    }
}

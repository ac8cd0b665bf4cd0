// SPDX-License-Identifier: MIT
// Sums along the middle axis of x, seen as [outer, length, inner]: mean, sum_squares, and db of add and mul. TERM says
// what is summed: elements of in0, products of those of in0 and in1, or squares of those of in0.
//
// A team of lanes * columns threads has a chunk of an axis. A thread adds every lanes-th group of four: along a line
// where inner is 1 (LINES), else four rows of two neighbouring columns. Two terms are added in f32, everything else in
// pairs of f32 (pairs.wgsl): 2^24 equal terms stay right to the last digit. The sums of a chunk go to the
// results, or to the workspace, where `finish` adds them.
//
// Numbers near the ends of f32's range have sums, means and squares that f32 holds, but not the numbers on the way. So
// there are two sums, of large terms and of small ones, each in its own unit.
//
// Memory traffic: each input once. One dispatch per 2^24 elements, and one for `finish`.
//# const LINES TERM
//# float out in0 in1 partials_out partials

struct Params {
    first: u32,  // item of this launch: a chunk of an axis, in the order of memory
    end: u32,    // of its items
    offset: u32, // the element that is the launch's first
    length: u32,
    inner: u32,
    chunks: u32,
    chunk: u32, // positions in each; the last of an axis may have fewer
    steps: u32, // of a chunk: groups of four per thread
    lanes: u32, // of a team, along the axis
    columns: u32, // of a team: pairs of them
    tiles: u32,   // of columns
    zero: u32,
    factor: f32, // of the results
}

const ELEMENTS = 0u;
const PRODUCTS = 1u;
const SQUARES = 2u;

//# include pairs

// ---- Large and small terms ----

struct Sum {
    large: Pair,
    small: Pair,
}

// A term from `limit` on is large. Units are powers of two: of elements before they are squared, and of the two sums.
// 2^31 terms of up to 2^64 fit. An element whose square in its unit is too large has a square that f32 does not hold.
const IS_SQUARE = TERM == SQUARES;
const LIMIT = select(0x5f800000u, 0x3f800000u, IS_SQUARE); // bits of 2^64, of 1
const LARGE_SCALE = select(0x1p-64, 0x1p-20, IS_SQUARE);
const SMALL_SCALE = select(1.0, 0x1p40, IS_SQUARE);
const LARGE_UNIT = select(0x1p64, 0x1p40, IS_SQUARE);
const SMALL_UNIT = select(1.0, 0x1p-80, IS_SQUARE);
const SMALL_TO_LARGE = select(0x1p-64, 0x1p-120, IS_SQUARE);

fn term_of(v: vec4<f32>) -> vec4<f32> {
    if (IS_SQUARE) {
        return v * v;
    }
    return v;
}

// Adds v.xy and v.zw.
fn add_four(sum: Sum, v: vec4<f32>) -> Sum {
    var s = sum;
    let large = (bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu)) >= vec4<u32>(LIMIT);
    if (any(large)) {
        let terms = term_of(select(vec4<f32>(), v * LARGE_SCALE, large));
        s.large = plus(s.large, terms.xy + terms.zw);
    }
    let terms = term_of(select(v * SMALL_SCALE, vec4<f32>(), large));
    s.small = plus(s.small, terms.xy + terms.zw);
    return s;
}

fn add_pair(p: Pair, other: vec4<f32>) -> Pair {
    return plus(plus(p, other.xy), other.zw);
}

// The sum of one column, in f32. The factor comes first, and compilers are kept from changing that: the sum without it
// may be more than f32 holds.
fn value_of(large: vec2<f32>, small: vec2<f32>) -> f32 {
    let has_large = (bitcast<u32>(large.x) & 0x7fffffffu) != 0u;
    let sum = select(small.x, large.x + (large.y + small.x * SMALL_TO_LARGE), has_large);
    let scaled = rounded(vec2<f32>(sum * u.p.factor, 0.0)).x;
    return scaled * select(f32(SMALL_UNIT), LARGE_UNIT, has_large);
}

var<workgroup> large_tree: array<vec4<f32>, 256>;
var<workgroup> small_tree: array<vec4<f32>, 256>;

// The sum over `lanes` threads that are `apart` from each other, for the first of them. Every thread of the workgroup
// must come here. Where each call of a merged launch has its own number of lanes, all have the barriers of the most.
fn over_lanes(own: Sum, lane: u32, rank: u32, lanes: u32, apart: u32) -> Sum {
    var sum = own;
    for (var by = first_half(lanes); by > 0u; by = by >> 1u) {
        large_tree[lane] = vec4<f32>(sum.large.high, sum.large.low);
        small_tree[lane] = vec4<f32>(sum.small.high, sum.small.low);
        workgroupBarrier();
        if (rank < by && by < lanes) {
            sum.large = add_pair(sum.large, large_tree[lane + by * apart]);
            sum.small = add_pair(sum.small, small_tree[lane + by * apart]);
        }
        workgroupBarrier();
    }
    return sum;
}

// Both halves of each pair of columns as one.
fn joined(p: Pair) -> Pair {
    return plus(plus(p, vec2<f32>(p.high.y, 0.0)), vec2<f32>(p.low.y, 0.0));
}

// ---- Sums of chunks ----

fn four(i: u32) -> vec4<f32> {
    if (TERM == PRODUCTS) {
        return in0_four(i) * in1_four(i);
    }
    return in0_four(i);
}

fn two(i: u32) -> vec2<f32> {
    if (TERM == PRODUCTS) {
        return in0_two(i) * in1_two(i);
    }
    return in0_two(i);
}

fn one(i: u32) -> f32 {
    if (TERM == PRODUCTS) {
        return in0_at(i) * in1_at(i);
    }
    return in0_at(i);
}

// Past the end of a line there are zeros.
fn line_four(start: u32, position: u32, count: u32) -> vec4<f32> {
    if (position + 4u <= count) {
        return four(start + position);
    }
    var v = vec4<f32>();
    for (var k = 0u; position + k < count; k++) {
        v[k] = one(start + position + k);
    }
    return v;
}

// Both columns of a row, or the last one alone.
fn row_two(start: u32, position: u32, count: u32, both: bool) -> vec2<f32> {
    let at = start + position * u.p.inner;
    if (position >= count) {
        return vec2<f32>();
    }
    if (both) {
        return two(at);
    }
    return vec2<f32>(one(at), 0.0);
}

fn write_sum(item: u32, column: u32, sum: Sum, k: u32) {
    let large = vec2<f32>(sum.large.high[k], sum.large.low[k]);
    let small = vec2<f32>(sum.small.high[k], sum.small.low[k]);
    let at = item * u.p.inner + column;
    if (partials_out_is) {
        partials_out_set_two(4u * at, large);
        partials_out_set_two(4u * at + 2u, small);
    } else {
        out_set(at, value_of(large, small));
    }
}

// A team's threads are [lanes][columns], a workgroup's [teams][lanes][columns].
fn sums(group: u32, lane: u32) {
    let size = u.p.lanes * u.p.columns;
    let team = group * (256u / size) + lane / size;
    let rank = (lane / u.p.columns) % u.p.lanes;
    let tile = team % u.p.tiles;
    let item = u.p.first + team / u.p.tiles;
    let column = 2u * (tile * u.p.columns + lane % u.p.columns);
    let outer = item / u.p.chunks;
    let begin = (item - outer * u.p.chunks) * u.p.chunk;
    let start = (outer * u.p.length + begin) * u.p.inner + column - u.p.offset;
    let has = item < u.p.end && column < u.p.inner;
    let both = LINES == 0u && column + 1u < u.p.inner;
    let count = select(0u, min(u.p.chunk, u.p.length - begin), has);
    var sum = Sum();
    for (var step = 0u; step < u.p.steps; step++) {
        let position = 4u * (step * u.p.lanes + rank);
        if (position < count) {
            if (LINES == 1u) {
                sum = add_four(sum, line_four(start, position, count));
            } else {
                sum = add_four(sum, vec4<f32>(row_two(start, position, count, both), row_two(start, position + 1u, count, both)));
                sum = add_four(sum, vec4<f32>(row_two(start, position + 2u, count, both), row_two(start, position + 3u, count, both)));
            }
        }
    }
    sum = over_lanes(sum, lane, rank, u.p.lanes, u.p.columns);
    if (LINES == 1u) {
        sum = Sum(joined(sum.large), joined(sum.small));
    }
    if (rank == 0u && has) {
        write_sum(item, column, sum, 0u);
        if (both) {
            write_sum(item, column + 1u, sum, 1u);
        }
    }
}

// ---- Sums of all chunks ----

// Result i of [first, end), by `lanes` threads.
fn finish(group: u32, lane: u32) {
    let rank = lane % u.p.lanes;
    let i = u.p.first + group * (256u / u.p.lanes) + lane / u.p.lanes;
    let outer = i / u.p.inner;
    var sum = Sum();
    if (i < u.p.end) {
        for (var k = rank; k < u.p.chunks; k += u.p.lanes) {
            let at = 4u * ((outer * u.p.chunks + k) * u.p.inner + (i - outer * u.p.inner));
            let large = partials_two(at);
            let small = partials_two(at + 2u);
            sum.large = add_pair(sum.large, vec4<f32>(large.x, 0.0, large.y, 0.0));
            sum.small = add_pair(sum.small, vec4<f32>(small.x, 0.0, small.y, 0.0));
        }
    }
    sum = over_lanes(sum, lane, rank, u.p.lanes, 1u);
    if (rank == 0u && i < u.p.end) {
        out_set(i, value_of(vec2<f32>(sum.large.high.x, sum.large.low.x), vec2<f32>(sum.small.high.x, sum.small.low.x)));
    }
}

// SPDX-License-Identifier: MIT
// Rows of logits z with target classes t: their losses, lse and gradients, for cross_entropy and linear_cross_entropy
// (docs/ops/cross_entropy.md derives them). With max the largest of a row and s the label smoothing:
//
//     sum = sum of exp(z - max),  lse = max + log(sum)
//     loss = log(sum) + (1 - s) (max - z[t]) + s mean(max - z)
//     dlogits = scale (exp(z - max) / sum - q),  scale = dloss, divided by the rows that take part for a mean
//
// A team of `lanes` threads has a row, and a workgroup a chunk of rows. A thread keeps a running maximum of its logits,
// scales its sum down when that rises, and the team joins its threads' sums. All terms of a loss are positive, so f32
// holds it well once `sum` is a pair of f32 (pairs.wgsl): of a row whose target is certain, sum is 1 and a little, and
// the loss is the logarithm of that. Distances max - z are in units of 2^40, because f32 may not hold them.
// A row with NaN or +Inf is NaN everywhere; both are found by their bits.
//
// Dispatches and memory traffic (each repeated per 2^24 logits):
//   losses               1: logits once. `finish` adds the chunks where there are several.
//   gradients, lse saved 1: logits in, dlogits out. A mean has `count` before it, which reads the targets.
//   gradients, no lse    1: a row is measured, then read again from cache; it can give losses and lse, too.
// Barriers of a row: 2 log2(lanes) + 4 to measure it, none with a saved lse.
//# const SMOOTH
//# float logits dlogits lse lse_in loss dloss partials
//# index target
//# word counts
//# bad_index
//# include exponential

struct Params {
    first_row: u32, // of this launch among all rows
    rows: u32,      // of this launch
    width: u32,     // logits of a row: the classes from first_class on
    first_class: u32,
    classes: u32,
    lanes: u32, // of a team, a power of two
    chunk_rows: u32,
    first_partial: u32, // of this launch; of `count`, its first count
    partials: u32, // of all launches together; a single one is the loss itself
    counts: u32, // of all launches; of `count`, its own
    ignore_low: u32,
    ignore_high: u32,
    mean: u32,
    zero: u32,
    near: f32,      // 1 - s
    elsewhere: f32, // s / classes: q of every class but the target
    rest: f32,      // 1 - q of the target
}

//# include pairs

const UNIT = 0x1p40;
const SCALE = 0x1p-40;
const LOWEST = -0x1.fffffep127;
const PARTIAL = 6u; // f32 of a chunk: its loss as pairs, logarithms and distances; rows as two halves of 16 bits

fn not_a_number() -> f32 {
    return bitcast<f32>(0x7fc00000u ^ u.p.zero);
}

fn infinity() -> f32 {
    return bitcast<f32>(0x7f800000u ^ u.p.zero);
}

// ---- Targets ------------------------------------------------------------------------------------------------

// The class of a row, or NO_INDEX where the row takes no part.
fn class_of(row: u32, reports: bool) -> u32 {
    let value = target_integer(row);
    if (value.z == 1u && value.x == u.p.ignore_low && value.y == u.p.ignore_high) {
        return NO_INDEX;
    }
    let class_index = target_in(row, u.p.classes);
    if (class_index == NO_INDEX && reports) {
        bad_index_report(u.p.first_row + row);
    }
    return class_index;
}

// Rows that take part, so far: 16 bits in each half, so that sums of them are exact.
fn halves(count: u32) -> vec2<f32> {
    return vec2<f32>(f32(count >> 16u), f32(count & 0xffffu));
}

fn whole(count: vec2<f32>) -> f32 {
    return count.x * 65536.0 + count.y;
}

// Up to 256 workgroups each leave a count.
fn count(group: u32, lane: u32) {
    var own = 0u;
    for (var row = group * 256u + lane; row < u.p.rows; row += u.p.counts * 256u) {
        own += select(1u, 0u, class_of(row, false) == NO_INDEX);
    }
    let total = team_sum(halves(own), lane, 256u);
    if (lane == 0u) {
        counts_put(u.p.first_partial + group, u32(total.x) * 65536u + u32(total.y));
    }
}

// What every gradient is multiplied with. Every thread of the workgroup must come here.
fn scale_of(lane: u32) -> f32 {
    if (u.p.mean == 0u) {
        return dloss_at(0u);
    }
    var own = vec2<f32>();
    for (var k = lane; k < u.p.counts; k += 256u) {
        own += halves(counts_word(k));
    }
    return dloss_at(0u) / whole(team_sum(own, lane, 256u));
}

// ---- A row's largest logit and sums -------------------------------------------------------------------------

struct Row {
    top: f32,    // the largest finite logit
    sum: Pair,   // x: of exp(z - top)
    below: Pair, // x: of top - z, in units; with label smoothing
}

// The sums for a larger maximum, of `seen` logits.
fn raised(row: Row, top: f32, seen: u32) -> Row {
    var r = row;
    if (seen > 0u && top > row.top) {
        let factor = exp_down(vec4<f32>(row.top - top)).x;
        r.sum = Pair(row.sum.high * factor, row.sum.low * factor);
        if (SMOOTH == 1u) {
            r.below = plus(row.below, vec2<f32>(f32(seen) * (top * SCALE - row.top * SCALE), 0.0));
        }
    }
    r.top = top;
    return r;
}

fn first_of(count: u32) -> vec4<bool> {
    return vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(count);
}

// Both halves of a pair as one.
fn joined(p: Pair) -> Pair {
    let first = Pair(vec2<f32>(p.high.x, 0.0), vec2<f32>(p.low.x, 0.0));
    return plus(plus(first, vec2<f32>(p.high.y, 0.0)), vec2<f32>(p.low.y, 0.0));
}

// What this thread has of a row of `width` logits from element `start` on.
fn own_sums(start: u32, width: u32, rank: u32, seen: ptr<function, u32>) -> Row {
    var row = Row(LOWEST, Pair(), Pair());
    for (var c = 4u * rank; c < width; c += 4u * u.p.lanes) {
        var v = logits_four(start + c);
        var inside = first_of(width - c);
        let bits = bitcast<vec4<u32>>(v);
        let special = inside & ((bits & vec4<u32>(0x7f800000u)) == vec4<u32>(0x7f800000u));
        if (any(special)) {
            let impossible = bits == vec4<u32>(0xff800000u);
            if (any(special & !impossible)) {
                row.sum.high.x = not_a_number();
            }
            if (SMOOTH == 1u && any(special & impossible)) {
                row.below.high.x = infinity();
            }
            inside = inside & !special;
        }
        v = select(vec4<f32>(row.top), v, inside);
        row = raised(row, max(row.top, max(max(v.x, v.y), max(v.z, v.w))), *seen);
        let e = select(ZERO, exp_down(v - vec4<f32>(row.top)), inside);
        row.sum = plus(plus(row.sum, e.xy), e.zw);
        if (SMOOTH == 1u) {
            let b = select(ZERO, vec4<f32>(row.top * SCALE) - v * SCALE, inside);
            row.below = plus(row.below, b.xy + b.zw);
        }
        let taken = select(vec4<u32>(), vec4<u32>(1u), inside);
        *seen += taken.x + taken.y + taken.z + taken.w;
    }
    row.sum = joined(row.sum);
    row.below = joined(row.below);
    return row;
}

var<workgroup> tree: array<vec4<f32>, 256>;

// The sum of pairs over `lanes` threads, for all of them. Every thread of the workgroup must come here.
fn over_lanes(own: Pair, lane: u32, lanes: u32) -> Pair {
    var sum = own;
    let rank = lane % lanes;
    tree[lane] = vec4<f32>(sum.high, sum.low);
    workgroupBarrier();
    for (var by = lanes / 2u; by > 0u; by = by >> 1u) {
        if (rank < by) {
            let other = tree[lane + by];
            sum = plus(plus(sum, other.xy), other.zw);
            tree[lane] = vec4<f32>(sum.high, sum.low);
        }
        workgroupBarrier();
    }
    let all = tree[lane - rank];
    workgroupBarrier();
    return Pair(all.xy, all.zw);
}

// A whole row. Every thread of the workgroup must come here.
fn measured(start: u32, width: u32, lane: u32) -> Row {
    var seen = 0u;
    var row = own_sums(start, width, lane % u.p.lanes, &seen);
    row = raised(row, team_max(row.top, lane, u.p.lanes), seen);
    let all = over_lanes(Pair(vec2<f32>(row.sum.high.x, row.below.high.x), vec2<f32>(row.sum.low.x, row.below.low.x)), lane, u.p.lanes);
    return Row(row.top, Pair(vec2<f32>(all.high.x, 0.0), vec2<f32>(all.low.x, 0.0)),
               Pair(vec2<f32>(all.high.y, 0.0), vec2<f32>(all.low.y, 0.0)));
}

// log of a sum of 1 or more: log(2^n m) = n ln 2 + log(1 + f), f = m - 1 within [sqrt(1/2) - 1, sqrt(2) - 1], by a
// polynomial that keeps the digits of a small f; WGSL's own log may be wrong in the seventh place after the point.
fn log_of(sum: Pair) -> f32 {
    let bits = bitcast<u32>(sum.high.x) + (0x3f800000u - 0x3f3504f3u);
    let n = f32(i32(bits >> 23u) - 127);
    let f = bitcast<f32>((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0;
    var p = fma(f, -0x1.38b576p-4, 0x1.055b68p-3);
    p = fma(p, f, -0x1.0d8542p-3);
    p = fma(p, f, 0x1.22da1ep-3);
    p = fma(p, f, -0x1.547244p-3);
    p = fma(p, f, 0x1.99a008p-3);
    p = fma(p, f, -0x1.000226p-2);
    p = fma(p, f, 0x1.555554p-2);
    let mantissa = fma(f * f, fma(f, p, -0.5), f) + sum.low.x / sum.high.x;
    return fma(n, 0x1.62e4p-1, fma(n, 0x1.7f7d1cp-20, mantissa));
}

// ---- Losses -------------------------------------------------------------------------------------------------

// A row's loss: its logarithm, and distances in units. A term whose weight is 0 is left out: 0 * Inf would be NaN.
fn loss_of(row: Row, log_sum: f32, z: f32) -> vec2<f32> {
    var distance = 0.0;
    if (u.p.near != 0.0) {
        distance = u.p.near * (row.top * SCALE - z * SCALE);
    }
    if (SMOOTH == 1u) {
        distance += u.p.elsewhere * (row.below.high.x + row.below.low.x);
    }
    return vec2<f32>(log_sum, distance);
}

// The loss of all rows. The division comes before the unit, and compilers are kept from changing that.
fn store_loss(total: Pair, count: vec2<f32>) {
    let rows = whole(count);
    let divisor = select(1.0, rows, u.p.mean == 1u && rows > 0.0);
    let both = rounded((total.high + total.low) / divisor);
    loss_set(0u, both.x + both.y * UNIT);
}

// Adds the chunks.
fn finish(group: u32, lane: u32) {
    var total = Pair();
    var count = vec2<f32>();
    for (var k = lane; k < u.p.partials; k += 256u) {
        total = plus(plus(total, partials_two(PARTIAL * k)), partials_two(PARTIAL * k + 2u));
        count += partials_two(PARTIAL * k + 4u);
    }
    total = over_lanes(total, lane, 256u);
    count = team_sum(count, lane, 256u);
    if (lane == 0u) {
        store_loss(total, count);
    }
}

// ---- Gradients ----------------------------------------------------------------------------------------------

// What the gradients of a row are computed with: p = inverse exp(z - shift).
struct Slope {
    is_nan: bool,
    shift: f32,
    inverse: f32,
    sum: Pair,
}

// p - 1 of the target, whose exp(z - shift) is e. It has all digits where p is near 1: the other terms of the sum.
fn target_slope(s: Slope, x: f32, e: f32) -> f32 {
    if (lse_in_is) {
        return -one_minus_exp(vec4<f32>(x)).x;
    }
    return (rounded(vec2<f32>(e - s.sum.high.x, 0.0)).x - s.sum.low.x) * s.inverse;
}

// Where exp(x) may be less than f32 holds, it is FAR times too large until the scale, which may be large, is applied.
const FAR_FROM = vec4<f32>(-80.0);
const FAR = 0x1p64;
const LOG_FAR = 44.3614196;

// dlogits of four logits; the target is element `position` of them, if it is one of them.
fn slopes(s: Slope, v: vec4<f32>, position: u32, scale: f32) -> vec4<f32> {
    let bits = bitcast<vec4<u32>>(v);
    let impossible = bits == vec4<u32>(0xff800000u);
    let nan = ((bits & vec4<u32>(0x7f800000u)) == vec4<u32>(0x7f800000u)) & !impossible;
    let x = min(select(v, vec4<f32>(s.shift), impossible | nan) - vec4<f32>(s.shift), vec4<f32>(88.0));
    let far = x < FAR_FROM;
    let e = select(exp_down(select(x, x + vec4<f32>(LOG_FAR), far)), ZERO, impossible);
    var d = (select(e, ZERO, far) * s.inverse - vec4<f32>(u.p.elsewhere)) * scale;
    if (u.p.elsewhere == 0.0) {
        d = select(d, (e * s.inverse * scale) / FAR, far);
    }
    if (position < 4u) {
        let slope = target_slope(s, x[position], select(e[position], 0.0, far[position]));
        d[position] = (u.p.rest + select(slope, -1.0, impossible[position])) * scale;
    }
    return select(d, vec4<f32>(not_a_number()), nan | vec4<bool>(s.is_nan));
}

fn write_row(start: u32, position: u32, takes_part: bool, s: Slope, scale: f32, rank: u32) {
    for (var c = 4u * rank; c < u.p.width; c += 4u * u.p.lanes) {
        var d = ZERO;
        if (takes_part) {
            d = slopes(s, logits_four(start + c), position - c, scale);
        }
        let left = min(4u, u.p.width - c);
        for (var i = 0u; i < left; i += 2u) {
            let two = select(d.xy, d.zw, i == 2u);
            if (i + 1u < left) {
                dlogits_set_two(start + c + i, two);
            } else {
                dlogits_set(start + c + i, two.x);
            }
        }
    }
}

// ---- A chunk of rows ----------------------------------------------------------------------------------------

fn rows(group: u32, lane: u32) {
    let rank = lane % u.p.lanes;
    let teams = 256u / u.p.lanes;
    let begin = group * u.p.chunk_rows;
    let end = min(begin + u.p.chunk_rows, u.p.rows);
    let has_loss = partials_is || loss_is;
    var scale = 0.0;
    if (dlogits_is) {
        scale = scale_of(lane);
    }
    var total = Pair();
    var taken = 0u;
    for (var base = begin; base < end; base += teams) {
        let row = base + lane / u.p.lanes;
        let has = row < end;
        let near = min(row, end - 1u);
        let class_index = class_of(near, has && rank == 0u);
        let takes_part = has && class_index != NO_INDEX;
        let start = near * u.p.width;
        let position = class_index - u.p.first_class; // outside of the row where it has only some of the classes
        var s = Slope(false, 0.0, 1.0, Pair());
        if (lse_in_is) {
            s.shift = lse_in_at(near);
            s.is_nan = !is_finite(s.shift);
        } else {
            let z = logits_at(start + min(position, u.p.width - 1u)); // before dlogits replace it
            let wanted = takes_part || (has && lse_is);
            let row_sums = measured(start, select(0u, u.p.width, wanted), lane);
            let none = row_sums.sum.high.x == 0.0; // every logit is -Inf
            s = Slope(none || !is_finite(row_sums.sum.high.x), row_sums.top, 1.0 / row_sums.sum.high.x, row_sums.sum);
            var log_sum = log_of(row_sums.sum);
            if (s.is_nan) {
                log_sum = not_a_number();
            }
            if (wanted && rank == 0u) {
                lse_set(near, select(row_sums.top + log_sum, -infinity(), none));
            }
            if (has_loss && takes_part && rank == 0u) {
                total = plus(total, loss_of(row_sums, log_sum, z));
                taken += 1u;
            }
        }
        if (dlogits_is && has) {
            write_row(start, position, takes_part, s, scale, rank);
        }
    }
    if (!has_loss) {
        return;
    }
    total = over_lanes(total, lane, 256u);
    let count = team_sum(halves(taken), lane, 256u);
    if (lane != 0u) {
        return;
    }
    if (partials_is) {
        let at = PARTIAL * (u.p.first_partial + group);
        partials_set_two(at, total.high);
        partials_set_two(at + 2u, total.low);
        partials_set_two(at + 4u, count);
    } else {
        store_loss(total, count);
    }
}

// SPDX-License-Identifier: MIT
// attention: y = softmax(scale q k^T) v for each head, and its gradients. docs/ops/attention.md derives them.
//
// The queries of all heads that share a head of k are rows of one problem: row i is time i / group, head i % group of
// them. A workgroup has 64 rows (of queries, or of keys for dk and dv) and goes through the other side, the terms, 32
// at a time: no more of the scores is ever stored. A thread has 4 rows by 2 terms of a tile of scores, then 4 rows by 4
// columns of each product of the tile's weights with rows of `right` or `right2`, all through workgroup memory.
//
//     kernel    rows     left  right  left2  right2  out  out2     what it makes
//     forward   queries  q     k      -      v       y    -        lse; or row_max and row_log, which are kept apart
//     deltas    queries  -     -      dy     y       -    -        delta = <dy, y> of each query
//     gradient  queries  q     k      dy     v       dq   -        dq = scale sum of ds k
//     gradient  keys     k     q      v      dy      dk   dv       dk = scale sum of ds q, dv = sum of p dy
//
// `gradient` computes the scores again, p = exp(score - row_max - row_log), ds = p (<dy, v> - delta). Where dim is more
// than 64, dk and dv have a launch each, so that the sums of a thread stay in registers; a workgroup has up to 128
// columns (CHUNKS of 64), and beyond that the scores are computed once for every 128.
//
// With `first` the kernels have `edge`, made by attention_first.wgsl: the first key of each query, or for rows of keys
// the end of the queries that see each key.
//
// Each sum is made by one thread in a fixed order: 32 terms in a chain, 64 chains, then all: no chain is longer than
// 256 up to 524288 terms. Terms that a row does not see are left out, not multiplied by 0: they may be NaN.
//
// Dispatches and memory traffic, for each 2^24 elements of q or k (tiles of the other side are read again by every 64
// rows, from caches): forward 1: q, k, v in, y and lse out. Backward 3, or 4 where dim > 64: deltas (dy, y in), dq (q,
// k, v, dy in), dk and dv (the same in). Without y and lse 1 more, and y in f32 out and in. Barriers for each 32 terms:
// 2 for each 16 of dim in a product over dim (forward and dv 1 product, dq and dk 2), 2 for each 64 columns of a sum,
// and in the forward 2 of the softmax.
//# const CHUNKS KEY_ROWS
//# float left right left2 right2 out out2 lse row_max row_log delta
//# word edge
//# include exponential

struct Params {
    left_step: u32, // elements from one time's heads to the next one's
    right_step: u32,
    left2_step: u32,
    right2_step: u32,
    out_step: u32,
    out2_step: u32,
    units: u32, // batches times heads of k
    time: u32,
    keys: u32,
    kv_heads: u32,
    group: u32, // heads of q for each of k
    dim: u32,
    causal: u32,
    window: u32, // of causal: how many of its last keys a query sees; all are `keys`
    row_tiles: u32,
    column_tiles: u32,
    scale: f32,
    infinity: f32, // no constant may be infinite or NaN
    nan: f32,
    zero: u32, // a 0 that compilers cannot know
    first_batch: u32, // of this launch, for `edge`
}

const ROWS = 64u;
const TERMS = 32u;
const COLUMNS = 64u;
const DEPTH = 16u;
const FOURS = 16u; // of rows, and of columns
const FOLD = 64u; // tiles whose sums are added in one chain
const DEPTH_FOLD = 256u; // elements of dim whose products are added in one chain

// Weights of a tile, which also take what the rows' threads exchange; then what a product is staged in.
var<workgroup> tile: array<vec4<f32>, 1024>;
const STAGE = 512u;
const STAGE_RIGHT = 768u;

// ---- Rows and terms -----------------------------------------------------------------------------------------

fn queries() -> u32 {
    return u.p.time * u.p.group;
}

fn query_head(unit: u32, query: u32) -> u32 {
    return unit % u.p.kv_heads * u.p.group + query % u.p.group;
}

fn query_start(unit: u32, query: u32, step: u32) -> u32 {
    let time = unit / u.p.kv_heads * u.p.time + query / u.p.group;
    return time * step + query_head(unit, query) * u.p.dim;
}

fn key_start(unit: u32, key: u32, step: u32) -> u32 {
    return (unit / u.p.kv_heads * u.p.keys + key) * step + unit % u.p.kv_heads * u.p.dim;
}

// Where a query's lse is: [batch, heads, time].
fn statistic_at(unit: u32, query: u32) -> u32 {
    let head = unit / u.p.kv_heads * u.p.kv_heads * u.p.group + query_head(unit, query);
    return head * u.p.time + query / u.p.group;
}

fn row_count() -> u32 {
    return select(queries(), u.p.keys, KEY_ROWS == 1u);
}

fn term_count() -> u32 {
    return select(u.p.keys, queries(), KEY_ROWS == 1u);
}

fn row_start(unit: u32, row: u32, step: u32) -> u32 {
    if (KEY_ROWS == 1u) {
        return key_start(unit, row, step);
    }
    return query_start(unit, row, step);
}

fn term_start(unit: u32, term: u32, second: bool) -> u32 {
    let step = select(u.p.right_step, u.p.right2_step, second);
    if (KEY_ROWS == 1u) {
        return query_start(unit, term, step);
    }
    return key_start(unit, term, step);
}

// The end of the keys that a query sees with causal; it sees the last `window` of them.
fn end_key(query: u32) -> u32 {
    return min(query / u.p.group + u.p.keys - u.p.time + 1u, u.p.keys);
}

// A row sees the terms [first, end): for a key, the queries from its own time on, while it is in their window. These
// are the limits without `first`.
fn window_first(row: u32) -> u32 {
    if (u.p.causal == 0u) {
        return 0u;
    }
    if (KEY_ROWS == 1u) {
        let ahead = u.p.keys - u.p.time;
        return (max(row, ahead) - ahead) * u.p.group;
    }
    return max(end_key(row), u.p.window) - u.p.window;
}

fn window_end(row: u32) -> u32 {
    if (u.p.causal == 0u) {
        return term_count();
    }
    if (KEY_ROWS == 1u) {
        let ahead = u.p.keys - u.p.time;
        return min(max(row + u.p.window, ahead) - ahead, u.p.time) * u.p.group;
    }
    return end_key(row);
}

// The same with `first`, whose edges have the window in them. Rows past the end are like the last one.
fn first_term(unit: u32, row: u32) -> u32 {
    if (edge_is && KEY_ROWS == 0u) {
        let batch = u.p.first_batch + unit / u.p.kv_heads;
        return edge_word(batch * u.p.time + min(row / u.p.group, u.p.time - 1u));
    }
    return window_first(row);
}

fn end_term(unit: u32, row: u32) -> u32 {
    if (edge_is && KEY_ROWS == 1u) {
        let batch = u.p.first_batch + unit / u.p.kv_heads;
        return edge_word(batch * u.p.keys + min(row, u.p.keys - 1u)) * u.p.group;
    }
    return window_end(row);
}

struct Limits {
    first: vec4<u32>,
    end: vec4<u32>,
}

fn limits_of(unit: u32, row: u32) -> Limits {
    return Limits(
        vec4<u32>(
            first_term(unit, row), first_term(unit, row + 1u), first_term(unit, row + 2u), first_term(unit, row + 3u)),
        vec4<u32>(end_term(unit, row), end_term(unit, row + 1u), end_term(unit, row + 2u), end_term(unit, row + 3u)));
}

fn sees(limits: Limits, term: u32) -> vec4<bool> {
    return (vec4<u32>(term) >= limits.first) & (vec4<u32>(term) < limits.end);
}

// What a workgroup has: 64 rows from `row`, columns from `column`. Rows that see many terms come first.
struct Place {
    unit: u32,
    row: u32,
    column: u32,
}

fn place_of(group: u32) -> Place {
    let above = group / u.p.column_tiles;
    let rank = above / u.p.units;
    let row_tile = select(u.p.row_tiles - 1u - rank, rank, KEY_ROWS == 1u);
    return Place(above % u.p.units, row_tile * ROWS, group % u.p.column_tiles * COLUMNS * CHUNKS);
}

// The terms that any of a workgroup's rows sees, [x, y). A loop with barriers depends on them, so edges, which come
// from memory, are read once for all threads. They go through the tile, which takes all the memory that a workgroup is
// sure to have, in halves, since an f32 has 24 bits.
fn range_of_rows(p: Place, lane: u32) -> vec2<u32> {
    let last = min(p.row + ROWS, row_count()) - 1u;
    if (edge_is) {
        if (lane == 0u) {
            let first = first_term(p.unit, p.row);
            let end = end_term(p.unit, last);
            tile[0] = vec4<f32>(vec4<u32>(first >> 16u, first & 0xffffu, end >> 16u, end & 0xffffu));
        }
        let halves = vec4<u32>(workgroupUniformLoad(&tile[0]));
        return (halves.xz << vec2<u32>(16u)) | halves.yw;
    }
    return vec2<u32>(window_first(p.row), window_end(last));
}

// Whether all of a workgroup's rows see all 32 terms from `term`.
fn all_see(p: Place, term: u32) -> bool {
    let last = min(p.row + ROWS, row_count()) - 1u;
    return term >= first_term(p.unit, last) && term + TERMS <= end_term(p.unit, p.row);
}

// ---- Products -----------------------------------------------------------------------------------------------

// The first `count` of v, then zeros: the memory there may hold a NaN.
fn kept(v: vec4<f32>, count: u32) -> vec4<f32> {
    return select(vec4<f32>(), v, vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(count));
}

fn row_load(second: bool, valid: bool, start: u32, column: u32) -> vec4<f32> {
    if (!valid || column >= u.p.dim) {
        return vec4<f32>();
    }
    if (second) {
        return kept(left2_four(start + column), u.p.dim - column);
    }
    return kept(left_four(start + column), u.p.dim - column);
}

fn term_load(second: bool, valid: bool, start: u32, column: u32) -> vec4<f32> {
    if (!valid || column >= u.p.dim) {
        return vec4<f32>();
    }
    if (second) {
        return kept(right2_four(start + column), u.p.dim - column);
    }
    return kept(right_four(start + column), u.p.dim - column);
}

// Index of a four of a staged line: 8 threads that read 8 neighbouring lines hit 32 different banks.
fn line_slot(line: u32, quad: u32) -> u32 {
    return line * 4u + (quad ^ ((line >> 1u) & 3u));
}

// Index of the weights of a term for four rows, and of what the threads of those rows exchange.
fn weight_slot(term: u32, four: u32) -> u32 {
    return term * FOURS + (four ^ (term & 7u));
}

// Four depths of r by four depths of four rows.
fn add_depths(sum: vec4<f32>, r: vec4<f32>, l: mat4x4<f32>) -> vec4<f32> {
    var s = fma(vec4<f32>(r.x), l[0], sum);
    s = fma(vec4<f32>(r.y), l[1], s);
    s = fma(vec4<f32>(r.z), l[2], s);
    return fma(vec4<f32>(r.w), l[3], s);
}

// For a thread's four rows: terms lane % 16 and lane % 16 + 16 of a tile.
struct Scores {
    a: vec4<f32>,
    b: vec4<f32>,
}

// <left, right>, or <left2, right2>, over dim. Its first barrier also ends the reading of what was staged before.
fn products(second: bool, p: Place, term: u32, lane: u32) -> Scores {
    let line = lane / 4u;
    let quad = lane % 4u;
    let has_row = p.row + line < row_count();
    let has_term = line < TERMS && term + line < term_count();
    let row_at = row_start(p.unit, p.row + line, select(u.p.left_step, u.p.left2_step, second));
    let term_at = term_start(p.unit, term + line, second);
    let y = lane / FOURS;
    let x = lane % FOURS;
    var s = Scores();
    var total = Scores();
    for (var d = 0u; d < u.p.dim; d += DEPTH) {
        let row_four = row_load(second, has_row, row_at, d + 4u * quad);
        let term_four = term_load(second, has_term, term_at, d + 4u * quad);
        workgroupBarrier();
        tile[STAGE + line_slot(line, quad)] = row_four;
        if (line < TERMS) {
            tile[STAGE_RIGHT + line_slot(line, quad)] = term_four;
        }
        workgroupBarrier();
        for (var i = 0u; i < min((u.p.dim - d + 3u) / 4u, 4u); i++) {
            let l = transpose(mat4x4<f32>(
                tile[STAGE + line_slot(4u * y, i)], tile[STAGE + line_slot(4u * y + 1u, i)],
                tile[STAGE + line_slot(4u * y + 2u, i)], tile[STAGE + line_slot(4u * y + 3u, i)]));
            s.a = add_depths(s.a, tile[STAGE_RIGHT + line_slot(x, i)], l);
            s.b = add_depths(s.b, tile[STAGE_RIGHT + line_slot(x + FOURS, i)], l);
        }
        if ((d + DEPTH) % DEPTH_FOLD == 0u) {
            total = Scores(total.a + s.a, total.b + s.b);
            s = Scores();
        }
    }
    return Scores(total.a + s.a, total.b + s.b);
}

// By each of a thread's four rows, four columns from p.column + 64 chunk: the sum of weights times `right` or `right2`
// over the tile's terms. The weights are visible after its first barrier.
fn weighted(second: bool, p: Place, chunk: u32, term: u32, limits: Limits, lane: u32) -> mat4x4<f32> {
    let y = lane / FOURS;
    let x = lane % FOURS;
    let count = min(TERMS, term_count() - term);
    workgroupBarrier();
    for (var line = y; line < TERMS; line += ROWS / 4u) {
        tile[STAGE + line * FOURS + x] =
            term_load(
                second, line < count, term_start(p.unit, term + line, second), p.column + chunk * COLUMNS + 4u * x);
    }
    workgroupBarrier();
    var c0 = vec4<f32>();
    var c1 = vec4<f32>();
    var c2 = vec4<f32>();
    var c3 = vec4<f32>();
    let whole = all_see(p, term);
    for (var k = 0u; k < count; k++) {
        let w = tile[weight_slot(k, y)];
        let v = tile[STAGE + k * FOURS + x];
        if (whole) {
            c0 = fma(vec4<f32>(w.x), v, c0);
            c1 = fma(vec4<f32>(w.y), v, c1);
            c2 = fma(vec4<f32>(w.z), v, c2);
            c3 = fma(vec4<f32>(w.w), v, c3);
        } else {
            let seen = sees(limits, term + k);
            c0 = select(c0, fma(vec4<f32>(w.x), v, c0), seen.x);
            c1 = select(c1, fma(vec4<f32>(w.y), v, c1), seen.y);
            c2 = select(c2, fma(vec4<f32>(w.z), v, c2), seen.z);
            c3 = select(c3, fma(vec4<f32>(w.w), v, c3), seen.w);
        }
    }
    return mat4x4<f32>(c0, c1, c2, c3);
}

fn times_rows(m: mat4x4<f32>, factor: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(m[0] * factor.x, m[1] * factor.y, m[2] * factor.z, m[3] * factor.w);
}

fn put_four(second: bool, at: u32, count: u32, four: vec4<f32>) {
    for (var j = 0u; j < count; j += 2u) {
        let v = select(four.xy, four.zw, j == 2u);
        if (second && j + 1u < count) {
            out2_set_two(at + j, v);
        } else if (second) {
            out2_set(at + j, v.x);
        } else if (j + 1u < count) {
            out_set_two(at + j, v);
        } else {
            out_set(at + j, v.x);
        }
    }
}

// Stores four columns of a thread's four rows, or as many as there are, for each chunk.
fn put_rows(second: bool, p: Place, lane: u32, chunk0: mat4x4<f32>, chunk1: mat4x4<f32>) {
    let row = p.row + 4u * (lane / FOURS);
    if (row >= row_count() || !select(out_is, out2_is, second)) {
        return;
    }
    let rows = min(4u, row_count() - row);
    let step = select(u.p.out_step, u.p.out2_step, second);
    var m = chunk0;
    for (var chunk = 0u; chunk < CHUNKS; chunk++) {
        let column = p.column + chunk * COLUMNS + 4u * (lane % FOURS);
        for (var i = 0u; i < rows && column < u.p.dim; i++) {
            put_four(second, row_start(p.unit, row + i, step) + column, min(4u, u.p.dim - column), m[i]);
        }
        m = chunk1;
    }
}

// ---- Softmax ------------------------------------------------------------------------------------------------

fn are_nan(x: vec4<f32>) -> vec4<bool> {
    return (bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u);
}

// exp(x); a NaN stays one. Past 88, where only a wrong lse leads, it is infinite.
fn weights_of(x: vec4<f32>) -> vec4<f32> {
    let w = exp_down(min(x, vec4<f32>(88.0)));
    return select(select(w, w * w, x > vec4<f32>(88.0)), x, are_nan(x));
}

// Scores, rounded: compilers may otherwise fuse the factor with the subtraction of the maximum, and the largest
// score minus the maximum is then not 0 but as much as was rounded away: 1e12 at a score of 1e20.
fn scaled(s: vec4<f32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(s * u.p.scale) ^ vec4<u32>(u.p.zero));
}

// log(x) of x >= 1, by its exponent and the series of the hyperbolic arc tangent: WGSL's own may be wrong in the
// seventh digit of 1.
fn log_of(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    if (bits >= 0x7f800000u) {
        return x;
    }
    // x = 2^n m, m between the roots of 1/2 and of 2
    let n = (bits - 0x3f3504f3u) >> 23u;
    let m = bitcast<f32>(bits - (n << 23u));
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let series = fma(z, fma(z, fma(z, fma(z, 1.0 / 9.0, 1.0 / 7.0), 0.2), 1.0 / 3.0), 1.0);
    return fma(f32(n), 0.693147182, 2.0 * s * series);
}

// A power of two above `sum`, for each of four rows; 2 where there is no sum yet.
fn powers_above(sum: vec4<f32>) -> vec4<f32> {
    let exponent = bitcast<vec4<u32>>(max(sum, vec4<f32>(1.0))) >> vec4<u32>(23u);
    return bitcast<vec4<f32>>((exponent + vec4<u32>(1u)) << vec4<u32>(23u));
}

fn inverse_powers(power: vec4<f32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(254u << 23u) - bitcast<vec4<u32>>(power));
}

// ---- Kernels ------------------------------------------------------------------------------------------------

// Sums of weighted values are kept divided by a power of two above the sum of weights, so that they stay below the
// largest value and lose no digit.
fn forward(group: u32, lane: u32) {
    let p = place_of(group);
    let y = lane / FOURS;
    let x = lane % FOURS;
    let row = p.row + 4u * y;
    let limits = limits_of(p.unit, row);
    let none = vec4<f32>(-u.p.infinity);
    var largest = none;
    var sum = vec4<f32>(); // of weights: of the tiles of a chain, and of finished chains
    var sum_total = vec4<f32>();
    var power = vec4<f32>(2.0);
    var y0 = mat4x4<f32>(); // of weighted values, for each chunk
    var y1 = mat4x4<f32>();
    var y0_total = mat4x4<f32>();
    var y1_total = mat4x4<f32>();
    var tiles = 0u;
    let terms = range_of_rows(p, lane);
    for (var term = terms.x; term < terms.y; term += TERMS) {
        let product = products(false, p, term, lane);
        let a = select(none, scaled(product.a), sees(limits, term + x));
        let b = select(none, scaled(product.b), sees(limits, term + x + FOURS));
        tile[weight_slot(x, y)] = max(a, b);
        workgroupBarrier();
        let before = largest;
        // Not from 0, so that compilers do not unroll it: that doubles the time of compiling.
        for (var i = u.p.zero; i < FOURS; i++) {
            largest = max(largest, tile[weight_slot(i, y)]);
        }
        // All scores are -Inf so far: weights are 0, not NaN.
        let top = select(largest, vec4<f32>(), bitcast<vec4<u32>>(largest) == vec4<u32>(0xff800000u));
        let weight_a = weights_of(a - top);
        let weight_b = weights_of(b - top);
        let correction = weights_of(before - top);
        tile[STAGE + weight_slot(x, y)] = weight_a + weight_b;
        workgroupBarrier();
        var added = vec4<f32>();
        for (var i = u.p.zero; i < FOURS; i++) {
            added += tile[STAGE + weight_slot(i, y)];
        }
        sum = sum * correction + added;
        sum_total *= correction;
        let old_power = power;
        power = powers_above(sum + sum_total);
        let inverse = inverse_powers(power);
        let factor = correction * (old_power * inverse);
        tile[weight_slot(x, y)] = weight_a * inverse;
        tile[weight_slot(x + FOURS, y)] = weight_b * inverse;
        if (out_is) {
            for (var chunk = 0u; chunk < CHUNKS; chunk++) {
                let added_values = weighted(true, p, chunk, term, limits, lane);
                if (chunk == 0u) {
                    y0 = times_rows(y0, factor) + added_values;
                    y0_total = times_rows(y0_total, factor);
                } else {
                    y1 = times_rows(y1, factor) + added_values;
                    y1_total = times_rows(y1_total, factor);
                }
            }
        }
        tiles += 1u;
        if (tiles % FOLD == 0u) {
            sum_total += sum;
            y0_total += y0;
            y1_total += y1;
            sum = vec4<f32>();
            y0 = mat4x4<f32>();
            y1 = mat4x4<f32>();
        }
    }
    let all = sum + sum_total;
    // No keys: y is 0. Keys whose scores are all -Inf: NaN.
    let without = select(vec4<f32>(u.p.nan), vec4<f32>(), limits.end == vec4<u32>());
    let empty = all == vec4<f32>();
    let inverse = select(power / all, without, empty);
    put_rows(false, p, lane, times_rows(y0 + y0_total, inverse), times_rows(y1 + y1_total, inverse));
    if (x != 0u || p.column != 0u) {
        return;
    }
    for (var i = 0u; i < 4u; i++) {
        if (row + i < row_count()) {
            let at = statistic_at(p.unit, row + i);
            let rest = select(log_of(all[i]), without[i], empty[i]);
            lse_set(at, largest[i] + rest);
            row_max_set(at, largest[i]);
            row_log_set(at, rest);
        }
    }
}

// <dy, y> of a query, in the order of products(): where one weight is 1 and the others are 0, y is a value, and <dy, v>
// - delta is exactly 0.
fn deltas(group: u32, lane: u32) {
    let item = group * 256u + lane;
    if (item >= u.p.units * queries()) {
        return;
    }
    let unit = item / queries();
    let dy_at = query_start(unit, item % queries(), u.p.left2_step);
    let y_at = query_start(unit, item % queries(), u.p.right2_step);
    var sum = 0.0;
    var total = 0.0;
    for (var d = 0u; d < u.p.dim; d += 4u) {
        let dy = row_load(true, true, dy_at, d);
        let y = term_load(true, true, y_at, d);
        sum = fma(dy.x, y.x, sum);
        sum = fma(dy.y, y.y, sum);
        sum = fma(dy.z, y.z, sum);
        sum = fma(dy.w, y.w, sum);
        if ((d + 4u) % DEPTH_FOLD == 0u) {
            total += sum;
            sum = 0.0;
        }
    }
    delta_set(statistic_at(unit, item % queries()), total + sum);
}

// The softmax of a query: its largest score, the log of the sum, <dy, y>. An absent row_log is 0.
fn softmax_at(unit: u32, query: u32) -> vec3<f32> {
    let at = statistic_at(unit, min(query, queries() - 1u));
    return vec3<f32>(row_max_at(at), row_log_at(at), delta_at(at));
}

fn gradient(group: u32, lane: u32) {
    let p = place_of(group);
    let y = lane / FOURS;
    let x = lane % FOURS;
    let row = p.row + 4u * y;
    let limits = limits_of(p.unit, row);
    var largest: Scores;
    var rest: Scores;
    var mean: Scores;
    if (KEY_ROWS == 0u) {
        let q0 = softmax_at(p.unit, row);
        let q1 = softmax_at(p.unit, row + 1u);
        let q2 = softmax_at(p.unit, row + 2u);
        let q3 = softmax_at(p.unit, row + 3u);
        largest.a = vec4<f32>(q0.x, q1.x, q2.x, q3.x);
        rest.a = vec4<f32>(q0.y, q1.y, q2.y, q3.y);
        mean.a = vec4<f32>(q0.z, q1.z, q2.z, q3.z);
        largest.b = largest.a;
        rest.b = rest.a;
        mean.b = mean.a;
    }
    var out0 = mat4x4<f32>(); // for each chunk: of the tiles of a chain, and of finished chains
    var out1 = mat4x4<f32>();
    var out0_total = mat4x4<f32>();
    var out1_total = mat4x4<f32>();
    var second0 = mat4x4<f32>();
    var second1 = mat4x4<f32>();
    var second0_total = mat4x4<f32>();
    var second1_total = mat4x4<f32>();
    var tiles = 0u;
    let terms = range_of_rows(p, lane);
    for (var term = terms.x; term < terms.y; term += TERMS) {
        if (KEY_ROWS == 1u) {
            let q0 = softmax_at(p.unit, term + x);
            let q1 = softmax_at(p.unit, term + x + FOURS);
            largest = Scores(vec4<f32>(q0.x), vec4<f32>(q1.x));
            rest = Scores(vec4<f32>(q0.y), vec4<f32>(q1.y));
            mean = Scores(vec4<f32>(q0.z), vec4<f32>(q1.z));
        }
        // First the weights, for out2, then ds, for out. A loop, because a shader is compiled at run time.
        var weight = Scores();
        for (var step = 0u; step < select(1u, 2u, out_is); step++) {
            let product = products(step == 1u, p, term, lane);
            if (step == 0u) {
                weight.a = weights_of(scaled(product.a) - largest.a - rest.a);
                weight.b = weights_of(scaled(product.b) - largest.b - rest.b);
            } else {
                weight.a *= product.a - mean.a;
                weight.b *= product.b - mean.b;
            }
            tile[weight_slot(x, y)] = weight.a;
            tile[weight_slot(x + FOURS, y)] = weight.b;
            for (var chunk = 0u; chunk < select(0u, CHUNKS, step == 1u || out2_is); chunk++) {
                let added = weighted(step == 0u, p, chunk, term, limits, lane);
                if (out2_is && step == 0u && chunk == 0u) {
                    second0 += added;
                } else if (out2_is && step == 0u) {
                    second1 += added;
                } else if (chunk == 0u) {
                    out0 += added;
                } else {
                    out1 += added;
                }
            }
        }
        tiles += 1u;
        if (tiles % FOLD == 0u) {
            out0_total += out0;
            out1_total += out1;
            second0_total += second0;
            second1_total += second1;
            out0 = mat4x4<f32>();
            out1 = mat4x4<f32>();
            second0 = mat4x4<f32>();
            second1 = mat4x4<f32>();
        }
    }
    put_rows(false, p, lane, (out0 + out0_total) * u.p.scale, (out1 + out1_total) * u.p.scale);
    put_rows(true, p, lane, second0 + second0_total, second1 + second1_total);
}

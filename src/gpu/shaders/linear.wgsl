// SPDX-License-Identifier: MIT
// linear: y = act(a b + bias) + residual, or silu(gate) (a b + bias), and its gradients da = dpre b^T, db = a^T dpre, dbias = the column sums of
// dpre, where dpre = dy * act'(pre), and dresidual = dy. docs/ops/linear.md derives them.
//
// `product` computes all three products: out[rows, columns] = left[rows, depth] right[depth, columns], `batches` of
// them. The constants LEFT_ALONG and RIGHT_ALONG say whether an operand is stored with its depth contiguous (a of a b,
// b^T of dpre b^T) or with the other axis contiguous. A workgroup has a tile (tiles.wgsl). Where there are few tiles
// and the depth is long (db of many rows), the depth is split into parts by the sizes alone; each leaves its sums in the
// workspace, and `join` adds them along a fixed tree. No f32 chain is longer than 256.
//
// The kernel that has the finished sums also adds the bias and stores pre and y = act(pre) + residual; where the
// backward recomputes pre, it multiplies dy by act'(pre) there, and pre is never stored. With a saved pre, `columns` reads dy and
// pre once, writes dpre (f32, whatever the storage type) and leaves the column sums of each chunk of rows, which `join`
// adds, too.
//
// Dispatches and memory traffic (tiles are read again from cache or memory: a once per column of tiles, b once per row):
//   forward                  1: a, b, bias, residual or gate in; y and pre out. Parts: 2, and parts * rows * columns f32 out and in.
//   backward, no activation  da 1, db 1 (parts: 2 each), dbias 2: dy is read by each.
//   backward, pre saved      1 more: dy and pre in, dpre in f32 out; it is also the first of dbias.
//   backward, pre recomputed 1 more: a, b, bias and dy in, dpre out.
//   dresidual                1: dy in and out.
//   backward with a gate     1 more, and 1 where pre is recomputed: swiglu's, which makes dgate and dpre in the storage type.
//# const LEFT_ALONG RIGHT_ALONG ACTIVATION TEAMS BLOCK
//# float left right bias residual gate dy pre y parts
//# include activation
//# include silu
//# include tiles

struct Params {
    rows: u32,
    columns: u32,
    depth: u32,
    batches: u32,
    row_tiles: u32,
    column_tiles: u32,
    parts: u32, // of the depth; of `columns`, chunks of rows
    span: u32,  // the depth of a part, a multiple of `chain`; the rows of a chunk
    chain: u32, // how much of the depth is added in one chain
    zero_nan: u32,
}

const PART = 32u; // sums are added in parts of this many

// ---- Results ------------------------------------------------------------------------------------------------

// Stores four of pre and of y from element `at`, or as many as there are columns. Do not unroll such loops by hand: a
// shader is compiled at run time, and stores of 16 bits are long.
fn put_four(at: u32, column: u32, value: vec4<f32>, result: vec4<f32>) {
    let count = min(4u, u.p.columns - column);
    for (var i = 0u; i < count; i += 2u) {
        let v = select(value.xy, value.zw, i == 2u);
        let r = select(result.xy, result.zw, i == 2u);
        if (i + 1u < count) {
            pre_set_two(at + i, v);
            y_set_two(at + i, r);
        } else {
            pre_set(at + i, v.x);
            y_set(at + i, r.x);
        }
    }
}

// Four sums from column `column`, which belong at element `at`. Columns past the end hold anything.
fn deliver(at: u32, column: u32, sums: vec4<f32>) {
    var value = sums;
    if (bias_is) {
        value += bias_four(column);
    }
    var result = value;
    if (dy_is) {
        result = dy_four(at) * activate_slope(value, u.p.zero_nan == 1u);
    } else if (gate_is) {
        // Rounded as pre is stored, and multiplied as swiglu does: the bits of the two ops.
        let silu = silu_of(gate_four(at));
        result = silu.value * gate_rounded(value) * silu.last;
    } else {
        result = activate(value);
        if (residual_is) {
            result += residual_four(at);
        }
    }
    put_four(at, column, value, result);
}

// ---- The product --------------------------------------------------------------------------------------------

// Where the operands of this workgroup's batch begin.
var<private> left_start: u32;
var<private> right_start: u32;

fn left_load(row: u32, k: u32, end: u32) -> vec4<f32> {
    if (row >= u.p.rows || k >= end) {
        return vec4<f32>();
    }
    if (LEFT_ALONG == 1u) {
        return first_of(left_four(left_start + row * u.p.depth + k), end - k);
    }
    return first_of(left_four(left_start + k * u.p.rows + row), u.p.rows - row);
}

fn right_load(column: u32, k: u32, end: u32) -> vec4<f32> {
    if (column >= u.p.columns || k >= end) {
        return vec4<f32>();
    }
    if (RIGHT_ALONG == 1u) {
        return first_of(right_four(right_start + column * u.p.depth + k), end - k);
    }
    return first_of(right_four(right_start + k * u.p.columns + column), u.p.columns - column);
}

fn product(group: u32, lane: u32) {
    let column_tile = group % u.p.column_tiles;
    let above = group / u.p.column_tiles;
    let row_tile = above % u.p.row_tiles;
    let outer = above / u.p.row_tiles; // part * batches + batch
    let batch = outer % u.p.batches;
    let begin = outer / u.p.batches * u.p.span;
    let end = min(begin + u.p.span, u.p.depth);

    left_start = batch * u.p.rows * u.p.depth;
    right_start = batch * u.p.depth * u.p.columns;
    let row = row_tile * TILE + 4u * (lane / 16u);
    let column = column_tile * TILE + 4u * (lane % 16u);
    let inside = row < u.p.rows && column < u.p.columns;
    let sums = multiply(row_tile * TILE, column_tile * TILE, begin, end, inside, lane);
    // Where y is the workspace's parts, `outer` counts those too.
    for (var quarter = 0u; quarter < BLOCK * BLOCK; quarter++) {
        let at = vec2<u32>(row, column) + quarter_start(quarter);
        if (at.x < u.p.rows && at.y < u.p.columns) {
            let start = (outer * u.p.rows + at.x) * u.p.columns + at.y;
            for (var i = 0u; i < min(4u, u.p.rows - at.x); i++) {
                deliver(start + i * u.p.columns, at.y, row_of(quarter_of(sums, quarter), i));
            }
        }
    }
}

// Adds the parts of the depth, or the chunks of `columns`: a team of LANES threads has four columns of a row, and each
// of its threads every LANES-th part.
fn join(group: u32, lane: u32) {
    let fours = (u.p.columns + 3u) / 4u;
    let rows = u.p.batches * u.p.rows;
    let item = group * TEAMS + lane / LANES;
    let valid = item < rows * fours;
    let near = min(item, rows * fours - 1u);
    let column = 4u * (near % fours);
    let at = near / fours * u.p.columns + column;
    var sum = vec4<f32>();
    var total = vec4<f32>();
    var taken = 0u;
    for (var part = lane % LANES; part < u.p.parts; part += LANES) {
        sum += parts_four(part * rows * u.p.columns + at);
        taken += 1u;
        if (taken % PART == 0u) {
            total += sum;
            sum = vec4<f32>();
        }
    }
    let all = team_sum4(total + sum, lane, LANES);
    if (valid && lane % LANES == 0u) {
        deliver(at, column, all);
    }
}

// ---- The activation's backward and dbias --------------------------------------------------------------------

// A chunk of rows of LANES fours of columns: dpre into y, if there is a pre and a y; column sums into parts. A team of
// LANES threads has a row.
fn columns(group: u32, lane: u32) {
    let column = 4u * (group % u.p.column_tiles * LANES + lane % LANES);
    let chunk = group / u.p.column_tiles;
    let end = min((chunk + 1u) * u.p.span, u.p.rows);
    var sum = vec4<f32>();
    var total = vec4<f32>();
    var taken = 0u;
    if (column < u.p.columns) {
        for (var row = chunk * u.p.span + lane / LANES; row < end; row += TEAMS) {
            let at = row * u.p.columns + column;
            var v = dy_four(at);
            if (pre_is) {
                v *= activate_slope(pre_four(at), u.p.zero_nan == 1u);
            }
            put_four(at, column, v, v);
            sum += v;
            taken += 1u;
            if (taken % PART == 0u) {
                total += sum;
                sum = vec4<f32>();
            }
        }
    }
    if (!parts_is) {
        return;
    }
    let all = across_teams(total + sum, lane, LANES);
    if (lane < LANES && column < u.p.columns) {
        for (var i = 0u; i < min(4u, u.p.columns - column); i++) {
            parts_set(chunk * u.p.columns + column + i, all[i]);
        }
    }
}

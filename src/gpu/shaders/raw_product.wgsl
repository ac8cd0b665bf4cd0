// SPDX-License-Identifier: MIT
// The raw product of `vjp bench`, which linear is measured against: y[rows, columns] = left[rows, depth]
// right[depth, columns], rows contiguous, of whole tiles alone. It leaves out what linear needs: ends of rows and columns,
// operands stored the other way, chains of limited length, and everything after the sum.
//
// A workgroup has a tile of 128 x 128, a thread 4 x 4 of each quarter of it. 8 of the depth at a time go through workgroup
// memory, in one of two buffers, so that each step has one barrier; the next step is loaded while this one is multiplied.
//# float left right y

struct Params {
    columns: u32,
    depth: u32,
    column_tiles: u32,
}

const TILE = 128u;
const DEPTH = 8u;
const LINE_FOURS = 32u; // of rows, or of columns, of a tile

// Of each buffer: LINE_FOURS fours of rows for each depth, then as many of columns. 16 KiB, all that every device has.
const OPERAND_FOURS = 256u;
const BUFFER_FOURS = 512u;
var<workgroup> buffers: array<vec4<f32>, 1024>;

// One row per vector: adds four rows of one depth by four columns of it.
fn add_outer(s: mat4x4<f32>, l: vec4<f32>, r: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(fma(vec4<f32>(l.x), r, s[0]), fma(vec4<f32>(l.y), r, s[1]), fma(vec4<f32>(l.z), r, s[2]),
                       fma(vec4<f32>(l.w), r, s[3]));
}

fn put_row(at: u32, v: vec4<f32>) {
    y_set_two(at, v.xy);
    y_set_two(at + 2u, v.zw);
}

fn put_block(row: u32, column: u32, s: mat4x4<f32>) {
    let at = row * u.p.columns + column;
    put_row(at, s[0]);
    put_row(at + u.p.columns, s[1]);
    put_row(at + 2u * u.p.columns, s[2]);
    put_row(at + 3u * u.p.columns, s[3]);
}

// Two threads load the 8 depths of a row, 32 threads the 128 columns of a depth.
fn product(group: u32, lane: u32) {
    let first_row = group / u.p.column_tiles * TILE;
    let first_column = group % u.p.column_tiles * TILE;
    let loaded_row = lane / 2u;
    let loaded_quad = lane % 2u;
    var left_at = (first_row + loaded_row) * u.p.depth + 4u * loaded_quad;
    var right_at = lane / LINE_FOURS * u.p.columns + first_column + 4u * (lane % LINE_FOURS);
    let left_to = 4u * loaded_quad * LINE_FOURS + loaded_row / 4u;
    let row_four = lane / 16u;
    let column_four = lane % 16u;
    var s0 = mat4x4<f32>();
    var s1 = mat4x4<f32>();
    var s2 = mat4x4<f32>();
    var s3 = mat4x4<f32>();
    var l = left_four(left_at);
    var r = right_four(right_at);
    for (var k = 0u; k < u.p.depth; k += DEPTH) {
        let base = k / DEPTH % 2u * BUFFER_FOURS;
        for (var i = 0u; i < 4u; i++) {
            buffers[base + left_to + i * LINE_FOURS][loaded_row % 4u] = l[i];
        }
        buffers[base + OPERAND_FOURS + lane] = r;
        workgroupBarrier();
        if (k + DEPTH < u.p.depth) {
            left_at += DEPTH;
            right_at += DEPTH * u.p.columns;
            l = left_four(left_at);
            r = right_four(right_at);
        }
        for (var d = 0u; d < DEPTH; d++) {
            let rows = base + d * LINE_FOURS + row_four;
            let columns = base + OPERAND_FOURS + d * LINE_FOURS + column_four;
            let above = buffers[rows];
            let below = buffers[rows + 16u];
            let near = buffers[columns];
            let beside = buffers[columns + 16u];
            s0 = add_outer(s0, above, near);
            s1 = add_outer(s1, above, beside);
            s2 = add_outer(s2, below, near);
            s3 = add_outer(s3, below, beside);
        }
    }
    let row = first_row + 4u * row_four;
    let column = first_column + 4u * column_four;
    put_block(row, column, s0);
    put_block(row, column + 64u, s1);
    put_block(row + 64u, column, s2);
    put_block(row + 64u, column + 64u, s3);
}

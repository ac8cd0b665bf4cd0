// SPDX-License-Identifier: MIT
// A tile of a matrix product, out[rows, columns] = left[rows, depth] right[depth, columns]: linear and conv2d. A
// workgroup has a tile of 64 x 64, a thread 4 x 4 of it, or with BLOCK 2 a tile of 128 x 128, a thread 4 x 4 of each
// quarter of it. 16 of the depth at a time (BLOCK 2: 8) go through workgroup memory, while the next are already in
// registers. Sums are chains of u.p.chain products, which are added in order: BLOCK changes no bit of them.
//
// A shader that includes this has, for each operand, a constant that says along which axis a thread loads four
// neighbours (LEFT_ALONG, RIGHT_ALONG: 1 along the depth, 0 along the rows or columns), and a function that loads them,
// zeros past the end of an axis: left_load(row, k, end), right_load(column, k, end), for depths below `end`.

const DEPTH = 16u / BLOCK;
const QUADS = DEPTH / 4u;   // of the depth
const FOURS = 16u * BLOCK;  // of rows, or of columns, of a tile
const TILE = 4u * FOURS;

// A tile is laid out as it is loaded, in fours. Along the depth a line is QUADS fours. Threads read 8 lines that are 4
// apart at once, so lines are padded and their fours change position: that hits 32 different banks. Else: FOURS fours for
// each depth.
const TILE_FOURS = 320u;
var<workgroup> tiles: array<vec4<f32>, 640>;

fn line_index(line: u32, quad: u32) -> u32 {
    if (BLOCK == 2u) {
        return line * QUADS + line / 4u + quad;
    }
    return line * (QUADS + 1u) + (quad ^ ((line >> 3u) & 3u));
}

// Where in the tile a thread's four begins: line and depth.
fn four_of(along: bool, lane: u32) -> vec2<u32> {
    if (along) {
        return vec2<u32>(lane / QUADS, 4u * (lane % QUADS));
    }
    return vec2<u32>(4u * (lane % FOURS), lane / FOURS);
}

fn store_four(base: u32, along: bool, lane: u32, v: vec4<f32>) {
    if (along) {
        tiles[base + line_index(lane / QUADS, lane % QUADS)] = v;
    } else {
        tiles[base + lane] = v;
    }
}

// The first `count` of v, then zeros: the memory there may hold a NaN.
fn first_of(v: vec4<f32>, count: u32) -> vec4<f32> {
    return select(vec4<f32>(), v, vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(count));
}

// Four lines from 4 * four, four depths from 4 * quad: one line per vector where the tile is loaded along the depth, else
// one depth per vector.
fn block(base: u32, along: bool, four: u32, quad: u32) -> mat4x4<f32> {
    if (along) {
        let at = base + line_index(4u * four, quad);
        let next = QUADS + 2u - BLOCK;
        return mat4x4<f32>(tiles[at], tiles[at + next], tiles[at + 2u * next], tiles[at + 3u * next]);
    }
    let at = base + 4u * FOURS * quad + four;
    return mat4x4<f32>(tiles[at], tiles[at + FOURS], tiles[at + 2u * FOURS], tiles[at + 3u * FOURS]);
}

// One vector per row.
fn left_block(four: u32, quad: u32) -> mat4x4<f32> {
    let l = block(0u, LEFT_ALONG == 1u, four, quad);
    if (LEFT_ALONG == 1u) {
        return l;
    }
    return transpose(l);
}

// One vector per depth.
fn right_block(four: u32, quad: u32) -> mat4x4<f32> {
    let r = block(TILE_FOURS, RIGHT_ALONG == 1u, four, quad);
    if (RIGHT_ALONG == 1u) {
        return transpose(r);
    }
    return r;
}

// Four rows of four columns.
struct Sums {
    s0: vec4<f32>,
    s1: vec4<f32>,
    s2: vec4<f32>,
    s3: vec4<f32>,
}

fn row_of(sums: Sums, i: u32) -> vec4<f32> {
    if (i == 0u) {
        return sums.s0;
    } else if (i == 1u) {
        return sums.s1;
    } else if (i == 2u) {
        return sums.s2;
    }
    return sums.s3;
}

fn plus_sums(a: Sums, b: Sums) -> Sums {
    return Sums(a.s0 + b.s0, a.s1 + b.s1, a.s2 + b.s2, a.s3 + b.s3);
}

// One row: four depths of left by four depths of four columns.
fn add_row(sum: vec4<f32>, l: vec4<f32>, r: mat4x4<f32>) -> vec4<f32> {
    var s = fma(vec4<f32>(l.x), r[0], sum);
    s = fma(vec4<f32>(l.y), r[1], s);
    s = fma(vec4<f32>(l.z), r[2], s);
    return fma(vec4<f32>(l.w), r[3], s);
}

fn add_product(s: Sums, l: mat4x4<f32>, r: mat4x4<f32>) -> Sums {
    return Sums(add_row(s.s0, l[0], r), add_row(s.s1, l[1], r), add_row(s.s2, l[2], r), add_row(s.s3, l[3], r));
}

// A thread's quarters: four by four of each quarter of the tile. With BLOCK 1 the tile is the first alone.
struct Quarters {
    q0: Sums,
    q1: Sums, // to its right
    q2: Sums, // below
    q3: Sums,
}

fn quarter_of(q: Quarters, i: u32) -> Sums {
    if (i == 0u) {
        return q.q0;
    } else if (i == 1u) {
        return q.q1;
    } else if (i == 2u) {
        return q.q2;
    }
    return q.q3;
}

// Row and column of a quarter in the tile.
fn quarter_start(i: u32) -> vec2<u32> {
    return 64u * vec2<u32>(i / 2u, i % 2u);
}

// The sums over depths [begin, end) of the tile whose first row and column are these. A thread that is not `inside` has no
// row or no column, and only loads; every thread of the workgroup must come here.
fn multiply(first_row: u32, first_column: u32, begin: u32, end: u32, inside: bool, lane: u32) -> Quarters {
    let left_at = four_of(LEFT_ALONG == 1u, lane) + vec2<u32>(first_row, 0u);
    let right_at = four_of(RIGHT_ALONG == 1u, lane) + vec2<u32>(first_column, 0u);
    // The current chain, and the sum of the finished ones.
    var s = Quarters();
    var total = Quarters();
    // A round loads a step, multiplies the one before, and only then stores the loaded one in its place.
    for (var next = begin; next < end + DEPTH; next += DEPTH) {
        let left_next = left_load(left_at.x, next + left_at.y, end);
        let right_next = right_load(right_at.x, next + right_at.y, end);
        if (inside && next > begin) {
            let quads = min((end + DEPTH - next + 3u) / 4u, QUADS);
            for (var quad = 0u; quad < quads; quad++) {
                let l = left_block(lane / 16u, quad);
                let r = right_block(lane % 16u, quad);
                s.q0 = add_product(s.q0, l, r);
                if (BLOCK == 2u) {
                    let below = left_block(16u + lane / 16u, quad);
                    let beside = right_block(16u + lane % 16u, quad);
                    s.q1 = add_product(s.q1, l, beside);
                    s.q2 = add_product(s.q2, below, r);
                    s.q3 = add_product(s.q3, below, beside);
                }
            }
        }
        if ((next - begin) % u.p.chain == 0u) {
            total.q0 = plus_sums(total.q0, s.q0);
            if (BLOCK == 2u) {
                total.q1 = plus_sums(total.q1, s.q1);
                total.q2 = plus_sums(total.q2, s.q2);
                total.q3 = plus_sums(total.q3, s.q3);
            }
            s = Quarters();
        }
        workgroupBarrier();
        store_four(0u, LEFT_ALONG == 1u, lane, left_next);
        store_four(TILE_FOURS, RIGHT_ALONG == 1u, lane, right_next);
        workgroupBarrier();
    }
    return Quarters(plus_sums(total.q0, s.q0), plus_sums(total.q1, s.q1), plus_sums(total.q2, s.q2),
                    plus_sums(total.q3, s.q3));
}

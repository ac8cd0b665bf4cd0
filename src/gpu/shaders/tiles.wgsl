// SPDX-License-Identifier: MIT
// A tile of a matrix product, out[rows, columns] = left[rows, depth] right[depth, columns]: linear and conv2d. A
// workgroup has a tile of 64 x 64, a thread 4 x 4 of it; 16 of the depth at a time go through workgroup memory, while the
// next 16 are already in registers. Sums are chains of u.p.chain products, which are added in order.
//
// A shader that includes this has, for each operand, a constant that says along which axis a thread loads four
// neighbours (LEFT_ALONG, RIGHT_ALONG: 1 along the depth, 0 along the rows or columns), and a function that loads them,
// zeros past the end of an axis: left_load(row, k, end), right_load(column, k, end), for depths below `end`.

const TILE = 64u;
const DEPTH = 16u;

// A tile is laid out as it is loaded, in fours. Along the depth: a line of the tile has 4 fours and one of padding, and
// the fours of a line change position every 8 lines, so that 8 threads reading 8 lines that are 4 apart hit 32 different
// banks. Else: 16 fours for each of 16 depths.
const TILE_FOURS = 320u;
var<workgroup> tiles: array<vec4<f32>, 640>;

fn line_index(line: u32, quad: u32) -> u32 {
    return line * 5u + (quad ^ ((line >> 3u) & 3u));
}

// Where in the tile a thread's four begins: line and depth.
fn four_of(along: bool, lane: u32) -> vec2<u32> {
    if (along) {
        return vec2<u32>(lane / 4u, 4u * (lane % 4u));
    }
    return vec2<u32>(4u * (lane % 16u), lane / 16u);
}

fn store_four(base: u32, along: bool, lane: u32, v: vec4<f32>) {
    if (along) {
        tiles[base + line_index(lane / 4u, lane % 4u)] = v;
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
        return mat4x4<f32>(tiles[at], tiles[at + 5u], tiles[at + 10u], tiles[at + 15u]);
    }
    let at = base + 64u * quad + four;
    return mat4x4<f32>(tiles[at], tiles[at + 16u], tiles[at + 32u], tiles[at + 48u]);
}

// One row: four depths of left by four depths of four columns.
fn add_row(sum: vec4<f32>, l: vec4<f32>, r: mat4x4<f32>) -> vec4<f32> {
    var s = fma(vec4<f32>(l.x), r[0], sum);
    s = fma(vec4<f32>(l.y), r[1], s);
    s = fma(vec4<f32>(l.z), r[2], s);
    return fma(vec4<f32>(l.w), r[3], s);
}

// A thread's four rows of four columns.
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

// The sums over depths [begin, end) of the tile whose first row and column are these. A thread that is not `inside` has no
// row or no column, and only loads; every thread of the workgroup must come here.
fn multiply(first_row: u32, first_column: u32, begin: u32, end: u32, inside: bool, lane: u32) -> Sums {
    let left_at = four_of(LEFT_ALONG == 1u, lane) + vec2<u32>(first_row, 0u);
    let right_at = four_of(RIGHT_ALONG == 1u, lane) + vec2<u32>(first_column, 0u);
    // The current chain, and the sum of the finished ones.
    var s0 = vec4<f32>();
    var s1 = vec4<f32>();
    var s2 = vec4<f32>();
    var s3 = vec4<f32>();
    var total = Sums();
    // A round loads a step, multiplies the one before, and only then stores the loaded one in its place.
    for (var next = begin; next < end + DEPTH; next += DEPTH) {
        let left_next = left_load(left_at.x, next + left_at.y, end);
        let right_next = right_load(right_at.x, next + right_at.y, end);
        if (inside && next > begin) {
            let quads = min((end + DEPTH - next + 3u) / 4u, DEPTH / 4u);
            for (var quad = 0u; quad < quads; quad++) {
                var l = block(0u, LEFT_ALONG == 1u, lane / 16u, quad);
                var r = block(TILE_FOURS, RIGHT_ALONG == 1u, lane % 16u, quad);
                if (LEFT_ALONG != 1u) {
                    l = transpose(l);
                }
                if (RIGHT_ALONG == 1u) {
                    r = transpose(r);
                }
                s0 = add_row(s0, l[0], r);
                s1 = add_row(s1, l[1], r);
                s2 = add_row(s2, l[2], r);
                s3 = add_row(s3, l[3], r);
            }
        }
        if ((next - begin) % u.p.chain == 0u) {
            total.s0 += s0;
            total.s1 += s1;
            total.s2 += s2;
            total.s3 += s3;
            s0 = vec4<f32>();
            s1 = vec4<f32>();
            s2 = vec4<f32>();
            s3 = vec4<f32>();
        }
        workgroupBarrier();
        store_four(0u, LEFT_ALONG == 1u, lane, left_next);
        store_four(TILE_FOURS, RIGHT_ALONG == 1u, lane, right_next);
        workgroupBarrier();
    }
    return Sums(total.s0 + s0, total.s1 + s1, total.s2 + s2, total.s3 + s3);
}

// SPDX-License-Identifier: MIT
// rope: pairs (a, b) of a head's first 2 * pairs elements are rotated by the angle of their position,
//
//     a' = a cos - b sin,  b' = b cos + a sin
//
// and the rest of the head is copied. The backward rotates by the opposite angle: `sign` is -1. A pair is two
// neighbours (INTERLEAVED), or element i of the first half with element i of the second.
//
// A thread has four pairs of up to HEADS heads of one time, which share their angles: 16-byte loads of x in f32, and
// the tables are read once for all these heads. Further threads of a head copy eight elements each of its rest. A pair
// is read before it is written, by one thread, so y may be x.
//
// Memory traffic: x once, y once (twice where it is added to), a row of the tables once per HEADS heads, and from
// cache for the others. One dispatch per 2^24 elements; with positions one more, of a single workgroup.
//# const INTERLEAVED HEADS
//# float y x cosine sine
//# index positions
//# bad_index

struct Params {
    threads: u32, // that have work; the last workgroup may have more
    first: u32,   // row (batch and time) of this launch
    tasks: u32,  // per set of heads: threads that rotate pairs, then those that copy the rest
    rotating: u32, // tasks that rotate
    head_sets: u32,
    heads: u32,
    head_dim: u32,
    y_step: u32, // elements from one time's heads to the next one's
    x_step: u32,
    pairs: u32, // of a head
    time: u32,
    table_rows: u32,
    position_stride: u32,
    sign: f32, // of the angle
}

// fma() leaves a compiler no choice of what to fuse: an element has the same bits in every pipeline.
fn first_of(a: vec4<f32>, b: vec4<f32>, cosine: vec4<f32>, sine: vec4<f32>) -> vec4<f32> {
    return fma(-sine, b, a * cosine);
}

fn second_of(a: vec4<f32>, b: vec4<f32>, cosine: vec4<f32>, sine: vec4<f32>) -> vec4<f32> {
    return fma(sine, a, b * cosine);
}

fn y_four_set(i: u32, v: vec4<f32>) {
    y_set_two(i, v.xy);
    y_set_two(i + 2u, v.zw);
}

// Pairs i to i + 3 of the head that begins at `x_head` in x and at `y_head` in y.
fn rotate_four(x_head: u32, y_head: u32, i: u32, cosine: vec4<f32>, sine: vec4<f32>) {
    if (INTERLEAVED == 1u) {
        let near = x_four(x_head + 2u * i);
        let far = x_four(x_head + 2u * i + 4u);
        let a = vec4<f32>(near.xz, far.xz);
        let b = vec4<f32>(near.yw, far.yw);
        let first = first_of(a, b, cosine, sine);
        let second = second_of(a, b, cosine, sine);
        y_four_set(y_head + 2u * i, vec4<f32>(first.x, second.x, first.y, second.y));
        y_four_set(y_head + 2u * i + 4u, vec4<f32>(first.z, second.z, first.w, second.w));
    } else {
        let a = x_four(x_head + i);
        let b = x_four(x_head + u.p.pairs + i);
        y_four_set(y_head + i, first_of(a, b, cosine, sine));
        y_four_set(y_head + u.p.pairs + i, second_of(a, b, cosine, sine));
    }
}

// The same where fewer than four pairs are left. Halves of an odd number of pairs are not stored in twos (the host then
// gives run 1), and of an even number two are left.
fn rotate_last(x_head: u32, y_head: u32, i: u32, cosine: vec4<f32>, sine: vec4<f32>) {
    let left = u.p.pairs - i;
    var a = vec4<f32>();
    var b = vec4<f32>();
    for (var k = 0u; k < left; k++) {
        if (INTERLEAVED == 1u) {
            let pair = x_two(x_head + 2u * (i + k));
            a[k] = pair.x;
            b[k] = pair.y;
        } else {
            a[k] = x_at(x_head + i + k);
            b[k] = x_at(x_head + u.p.pairs + i + k);
        }
    }
    let first = first_of(a, b, cosine, sine);
    let second = second_of(a, b, cosine, sine);
    if (INTERLEAVED == 0u && left == 2u) {
        y_set_two(y_head + i, first.xy);
        y_set_two(y_head + u.p.pairs + i, second.xy);
        return;
    }
    for (var k = 0u; k < left; k++) {
        if (INTERLEAVED == 1u) {
            y_set_two(y_head + 2u * (i + k), vec2<f32>(first[k], second[k]));
        } else {
            y_set(y_head + i + k, first[k]);
            y_set(y_head + u.p.pairs + i + k, second[k]);
        }
    }
}

fn rotate_pairs(x_head: u32, y_head: u32, heads: u32, i: u32, position: u32) {
    let row = position * u.p.pairs + i;
    if (i + 4u <= u.p.pairs) {
        let cosine = cosine_four(row);
        let sine = sine_four(row) * u.p.sign;
        for (var head = 0u; head < heads; head++) {
            rotate_four(x_head + head * u.p.head_dim, y_head + head * u.p.head_dim, i, cosine, sine);
        }
        return;
    }
    var cosine = vec4<f32>();
    var sine = vec4<f32>();
    for (var k = 0u; k < u.p.pairs - i; k++) {
        cosine[k] = cosine_at(row + k);
        sine[k] = sine_at(row + k) * u.p.sign;
    }
    for (var head = 0u; head < heads; head++) {
        rotate_last(x_head + head * u.p.head_dim, y_head + head * u.p.head_dim, i, cosine, sine);
    }
}

fn copy_rest(x_head: u32, y_head: u32, heads: u32, begin: u32) {
    let end = min(begin + 8u, u.p.head_dim);
    for (var head = 0u; head < heads * u.p.head_dim; head += u.p.head_dim) {
        for (var e = begin; e < end; e += 2u) {
            if (e + 1u < end) {
                y_set_two(y_head + head + e, x_two(x_head + head + e));
            } else {
                y_set(y_head + head + e, x_at(x_head + head + e));
            }
        }
    }
}

fn rotate_heads(group: u32, lane: u32) {
    let thread = group * 256u + lane;
    if (thread >= u.p.threads) {
        return;
    }
    let task = thread % u.p.tasks;
    let owner = thread / u.p.tasks;
    let head = (owner % u.p.head_sets) * HEADS;
    let row = owner / u.p.head_sets;
    let batch = (u.p.first + row) / u.p.time;
    var position = u.p.first + row - batch * u.p.time;
    if (positions_is) {
        let at = batch * u.p.position_stride + position;
        position = positions_in(at, u.p.table_rows);
        if (position == NO_INDEX) {
            // One thread reports it; nothing is written for this time.
            if (task == 0u && head == 0u) {
                bad_index_report(at);
            }
            return;
        }
    }
    let x_head = row * u.p.x_step + head * u.p.head_dim;
    let y_head = row * u.p.y_step + head * u.p.head_dim;
    let heads = min(u.p.heads - head, HEADS);
    if (task < u.p.rotating) {
        rotate_pairs(x_head, y_head, heads, 4u * task, position);
    } else {
        copy_rest(x_head, y_head, heads, 2u * u.p.pairs + 8u * (task - u.p.rotating));
    }
}

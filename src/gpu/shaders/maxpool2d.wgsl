// SPDX-License-Identifier: MIT
// maxpool2d: y is the maximum of each window, argmax its position in the plane. The first in row-major order wins ties,
// a NaN wins over all other values, padding never wins. A thread has two neighbours of y: two channels of one window,
// where channels come last and are even (PAIRED), else two windows, which it searches one after the other.
//
// Backward: a thread has two neighbours of dx, goes through the windows over each in row-major order and adds dy of
// those whose argmax it is: no atomics, the same bits every time. Without a saved argmax, `forward` first recomputes it
// into the workspace: each window is searched once, not for each element under it. A saved argmax outside the plane is
// reported by the elements under its window, and nothing is added for it.
//
// Dispatches: forward 1; backward 1, and 1 to recompute the argmax; 1 to record a bad argmax where it was saved.
// Memory traffic: forward x, y, argmax once; elements that windows share come from cache. Backward dx, dy, argmax (4 or
// 8 bytes per window) likewise; without argmax x too, and 4 bytes per window written.
//# const PAIRED
//# float y x dx dy
//# index argmax saved
//# word recomputed_out recomputed
//# bad_index

struct Params {
    inner: u32, // channels where they come last, else 1: neighbours in memory that do not share a plane
    total: u32, // elements of the output
    height: u32,
    width: u32,
    out_height: u32,
    out_width: u32,
    kernel_h: u32,
    kernel_w: u32,
    stride_h: u32,
    stride_w: u32,
    padding_h: u32,
    padding_w: u32,
    dilation_h: u32,
    dilation_w: u32,
    reach_h: u32, // from a window's first element to its last
    reach_w: u32,
}

struct Position {
    plane: u32,
    row: u32,
    column: u32,
    inner: u32,
}

// Element i of a tensor whose planes are height x width.
fn position_of(i: u32, height: u32, width: u32) -> Position {
    let element = i / u.p.inner;
    let row = element / width;
    let plane = row / height;
    return Position(plane, row - plane * height, element - row * width, i - element * u.p.inner);
}

// ---- Windows of an axis ----

// The elements of a window: first, first + dilation, ...; there is at least one.
struct Taps {
    first: u32,
    count: u32,
}

fn taps_of(window: u32, stride: u32, padding: u32, dilation: u32, kernel: u32, size: u32) -> Taps {
    let origin = window * stride; // in the padded axis
    let lack = max(padding, origin) - origin;
    let skipped = (lack + dilation - 1u) / dilation;
    let first = origin + skipped * dilation - padding;
    return Taps(first, min(kernel - skipped, (size - first + dilation - 1u) / dilation));
}

// Windows [begin, end) that reach over an element.
struct Span {
    begin: u32,
    end: u32,
}

fn windows_over(element: u32, stride: u32, padding: u32, reach: u32, windows: u32) -> Span {
    let last = element + padding;
    let begin = (max(last, reach) - reach + stride - 1u) / stride;
    return Span(begin, min(last / stride + 1u, windows));
}

// ---- The maximum ----

// A number that orders as x does, equal for 0 and -0, greatest for every NaN, and never 0. Comparisons of floats could
// be compiled as if there were no NaN.
fn order_of(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if (is_nan(x)) {
        return 0xffffffffu;
    }
    if (bits == 0x80000000u) {
        return bits;
    }
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

// x at i, and at the next channel.
fn x_pair(i: u32) -> vec2<f32> {
    if (PAIRED == 1u) {
        return x_two(i);
    }
    return vec2<f32>(x_at(i), 0.0);
}

struct Best {
    order: vec2<u32>, // 0: nothing yet
    value: vec2<f32>,
    position: vec2<u32>,
}

// The window of element i of y, and with PAIRED that of the next channel. A later element must be greater.
fn search(i: u32) -> Best {
    let at = position_of(i, u.p.out_height, u.p.out_width);
    let rows = taps_of(at.row, u.p.stride_h, u.p.padding_h, u.p.dilation_h, u.p.kernel_h, u.p.height);
    let columns = taps_of(at.column, u.p.stride_w, u.p.padding_w, u.p.dilation_w, u.p.kernel_w, u.p.width);
    let start = at.plane * u.p.height * u.p.width * u.p.inner + at.inner;
    var best = Best();
    for (var r = 0u; r < rows.count; r++) {
        for (var c = 0u; c < columns.count; c++) {
            let position = (rows.first + r * u.p.dilation_h) * u.p.width + columns.first + c * u.p.dilation_w;
            let v = x_pair(start + position * u.p.inner);
            let order = vec2<u32>(order_of(v.x), order_of(v.y));
            let wins = order > best.order;
            best.order = select(best.order, order, wins);
            best.value = select(best.value, v, wins);
            best.position = select(best.position, vec2<u32>(position), wins);
        }
    }
    return best;
}

fn store_argmax(i: u32, position: u32) {
    argmax_put(i, position);
    recomputed_out_put(i, position);
}

fn forward(group: u32, lane: u32) {
    let i = 2u * (group * 256u + lane);
    if (i >= u.p.total) {
        return;
    }
    var best = search(i);
    store_argmax(i, best.position.x);
    if (i + 1u == u.p.total) {
        y_set(i, best.value.x);
        return;
    }
    if (PAIRED == 0u) {
        let next = search(i + 1u);
        best.value.y = next.value.x;
        best.position.y = next.position.x;
    }
    store_argmax(i + 1u, best.position.y);
    y_set_two(i, best.value);
}

// ---- Backward ----

// The argmax of window i.
fn argmax_of(i: u32) -> u32 {
    if (!saved_is) {
        return recomputed_word(i);
    }
    let position = saved_in(i, u.p.height * u.p.width);
    if (position == NO_INDEX) {
        bad_index_report(i);
    }
    return position;
}

// No f32 chain is longer than PART, however many windows there are over an element.
const PART = 64u;

struct Parts {
    total: vec2<f32>,
    middle: vec2<f32>,
    part: vec2<f32>,
}

fn close_part(sum: Parts, seen: u32) -> Parts {
    var s = sum;
    if (seen % PART == 0u) {
        s.middle += s.part;
        s.part = vec2<f32>();
        if (seen % (PART * PART) == 0u) {
            s.total += s.middle;
            s.middle = vec2<f32>();
        }
    }
    return s;
}

// dx of element i, and with PAIRED that of the next channel.
fn collect(i: u32) -> vec2<f32> {
    let at = position_of(i, u.p.height, u.p.width);
    let position = at.row * u.p.width + at.column;
    let rows = windows_over(at.row, u.p.stride_h, u.p.padding_h, u.p.reach_h, u.p.out_height);
    let columns = windows_over(at.column, u.p.stride_w, u.p.padding_w, u.p.reach_w, u.p.out_width);
    var sum = Parts();
    var seen = 0u;
    for (var r = rows.begin; r < rows.end; r++) {
        for (var c = columns.begin; c < columns.end; c++) {
            let window = ((at.plane * u.p.out_height + r) * u.p.out_width + c) * u.p.inner + at.inner;
            if (argmax_of(window) == position) {
                sum.part.x += dy_at(window);
            }
            if (PAIRED == 1u) {
                if (argmax_of(window + 1u) == position) {
                    sum.part.y += dy_at(window + 1u);
                }
            }
            seen += 1u;
            sum = close_part(sum, seen);
        }
    }
    return sum.total + (sum.middle + sum.part);
}

fn backward(group: u32, lane: u32) {
    let i = 2u * (group * 256u + lane);
    if (i >= u.p.total) {
        return;
    }
    var v = collect(i);
    if (i + 1u == u.p.total) {
        dx_set(i, v.x);
        return;
    }
    if (PAIRED == 0u) {
        v.y = collect(i + 1u).x;
    }
    dx_set_two(i, v);
}

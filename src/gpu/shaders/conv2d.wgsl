// SPDX-License-Identifier: MIT
// conv2d: y, dx, dweight and dbias (PASS), in both layouts (LAST: channels last). docs/ops/conv2d.md derives them.
//
// `product`, for each group of channels, computes tiles of a matrix product (tiles.wgsl) whose right factor is gathered
// from a picture while it is loaded. A term is a channel and a tap of the window; a pixel is a place of the output.
//
//            rows          columns             depth   left    right: element (pixel, term) of
//   y        out channels  pixels of y         terms   weight  x
//   dx       channels      pixels of dx, of    terms   weight  dy
//                          one phase
//   dweight  out channels  terms               pixels  dy      x
//
// A pixel of dx is in one of stride_h * stride_w phases, by its remainders. The taps that reach a phase are every
// (stride / gcd(stride, dilation))-th, and with those dx is a convolution of dy with stride 1: each product of dx is
// computed once, and no others. Each element is written once, zeros where no tap reaches.
//
// Where there are few tiles and the depth is long, the depth is split into parts by the sizes alone; each leaves its sums
// in the workspace, in the order of the output, and `join` adds them along a fixed tree.
//
// Groups of few channels would leave most of a tile empty. There `direct` has two neighbours of y or dx per thread, and
// `reduce` sums dweight over pixels, four terms at a time; `reduce` is also dbias, whose other factor is 1.
//
// Dispatches, one barrier between two of them (each is repeated where tensors have more than 2^24 elements: for images,
// until as many as that are done):
//   y, dx    1; 2 with parts                   weight, picture in, once per row and column of tiles; output out
//   dweight  1; 2 with parts                   x, dy in, likewise; dweight out
//   dbias    1; 2 with parts                   dy in; dbias out
// Parts are parts * outputs f32, out and in.
//# const PASS LAST LEFT_ALONG RIGHT_ALONG BLOCK BY_FOURS BY_TWOS TEAMS
//# float out picture other bias parts_out parts

struct Params {
    batch: u32,    // images of this launch
    channels: u32, // of x, in a group
    outs: u32,     // channels of y, in a group
    groups: u32,
    height: u32, // of x
    width: u32,
    out_height: u32, // of y
    out_width: u32,
    kernel_h: u32,
    kernel_w: u32,
    stride_h: u32,
    stride_w: u32,
    padding_h: u32,
    padding_w: u32,
    dilation_h: u32,
    dilation_w: u32,
    every_h: u32, // dx: of the taps, those that reach one phase: stride / gcd(stride, dilation)
    every_w: u32,
    step_h: u32, // dx: how far dy's pixel moves from one of them to the next: dilation / gcd(stride, dilation)
    step_w: u32,
    phases_h: u32, // dx: that have pixels
    phases_w: u32,
    total: u32, // elements of the output
    row_tiles: u32,
    column_tiles: u32,
    parts: u32,      // of the depth, in this launch; of `join`, all
    first_part: u32, // of this launch
    span: u32,       // the depth of a part, a multiple of `chain`; of `reduce`, pixels
    chain: u32,      // how much of the depth is added in one chain
}

const Y = 0u;
const DX = 1u;
const DWEIGHT = 2u;
const DBIAS = 3u;
const CHAIN = 32u; // sums of single threads are added in chains of this many

//# include tiles

// ---- Where elements are -------------------------------------------------------------------------------------

fn element(channels: u32, height: u32, width: u32, n: u32, c: u32, h: u32, w: u32) -> u32 {
    if (LAST == 1u) {
        return ((n * height + h) * width + w) * channels + c;
    }
    return ((n * channels + c) * height + h) * width + w;
}

fn x_index(n: u32, c: u32, h: u32, w: u32) -> u32 {
    return element(u.p.channels * u.p.groups, u.p.height, u.p.width, n, c, h, w);
}

fn y_index(n: u32, o: u32, h: u32, w: u32) -> u32 {
    return element(u.p.outs * u.p.groups, u.p.out_height, u.p.out_width, n, o, h, w);
}

fn weight_index(o: u32, c: u32, h: u32, w: u32) -> u32 {
    return element(u.p.channels, u.p.kernel_h, u.p.kernel_w, o, c, h, w);
}

// ---- Pixels and terms ---------------------------------------------------------------------------------------

// One direction of a window: pixel i meets row i * stride + offset + tap * step of the picture, modulo 2^32, so that a
// row above the picture is a large number. Of dx this is a phase, with its own pixels and taps.
struct Axis {
    pixels: u32,
    taps: u32,
    stride: u32,
    offset: u32,
    step: u32,
    first_tap: u32, // of the weights: first_tap, first_tap + every, ...
    every: u32,
    first_pixel: u32, // of the output: first_pixel, first_pixel + apart, ...
    apart: u32,
}

fn window_axis(pixels: u32, taps: u32, stride: u32, padding: u32, dilation: u32) -> Axis {
    return Axis(pixels, taps, stride, 0u - padding, dilation, 0u, 1u, 0u, 1u);
}

// Row h = phase + stride * a is reached by the taps whose distance to it, h + padding - tap * dilation, is a multiple of
// the stride.
fn phase_axis(phase: u32, size: u32, kernel: u32, stride: u32, padding: u32, dilation: u32, every: u32,
              step: u32) -> Axis {
    let place = phase + padding;
    let limit = min(kernel, every);
    var first = 0u;
    while (first < limit && (first * dilation) % stride != place % stride) {
        first++;
    }
    let taps = select((kernel - first + every - 1u) / every, 0u, first == limit);
    let back = first * dilation;
    let offset = select(0u - (back - place) / stride, (place - back) / stride, place >= back);
    return Axis((size - phase + stride - 1u) / stride, taps, 1u, offset, 0u - step, first, every, phase, stride);
}

struct Window {
    h: Axis,
    w: Axis,
}

fn window_of(phase_h: u32, phase_w: u32) -> Window {
    if (PASS == DX) {
        return Window(phase_axis(phase_h, u.p.height, u.p.kernel_h, u.p.stride_h, u.p.padding_h, u.p.dilation_h,
                                 u.p.every_h, u.p.step_h),
                      phase_axis(phase_w, u.p.width, u.p.kernel_w, u.p.stride_w, u.p.padding_w, u.p.dilation_w,
                                 u.p.every_w, u.p.step_w));
    }
    return Window(window_axis(u.p.out_height, u.p.kernel_h, u.p.stride_h, u.p.padding_h, u.p.dilation_h),
                  window_axis(u.p.out_width, u.p.kernel_w, u.p.stride_w, u.p.padding_w, u.p.dilation_w));
}

struct Pixel {
    image: u32,
    row: u32,
    column: u32,
}

fn pixel_of(window: Window, i: u32) -> Pixel {
    let row = i / window.w.pixels;
    let image = row / window.h.pixels;
    return Pixel(image, row - image * window.h.pixels, i - row * window.w.pixels);
}

fn next_pixel(window: Window, p: Pixel) -> Pixel {
    var next = Pixel(p.image, p.row, p.column + 1u);
    if (next.column == window.w.pixels) {
        next.column = 0u;
        next.row += 1u;
        if (next.row == window.h.pixels) {
            next.row = 0u;
            next.image += 1u;
        }
    }
    return next;
}

// Terms are counted in the order of the weights in memory.
struct Term {
    channel: u32, // of the picture, in its group
    row: u32,     // of the window's taps
    column: u32,
}

fn picture_channels() -> u32 {
    return select(u.p.channels, u.p.outs, PASS == DX);
}

fn term_of(window: Window, i: u32) -> Term {
    if (LAST == 1u) {
        let tap = i / picture_channels();
        let row = tap / window.w.taps;
        return Term(i - tap * picture_channels(), row, tap - row * window.w.taps);
    }
    let line = i / window.w.taps;
    let channel = line / window.h.taps;
    return Term(channel, line - channel * window.h.taps, i - line * window.w.taps);
}

fn next_term(window: Window, t: Term) -> Term {
    var next = t;
    if (LAST == 1u) {
        next.channel += 1u;
        if (next.channel == picture_channels()) {
            next.channel = 0u;
            next.column += 1u;
        }
    } else {
        next.column += 1u;
    }
    if (next.column == window.w.taps) {
        next.column = 0u;
        next.row += 1u;
        if (LAST != 1u && next.row == window.h.taps) {
            next.row = 0u;
            next.channel += 1u;
        }
    }
    return next;
}

// ---- Loads --------------------------------------------------------------------------------------------------

// What a workgroup's tile shares, and the column that a thread loads.
struct Place {
    window: Window,
    group: u32,
    pixel: Pixel, // y, dx
    term: Term,   // dweight
}
var<private> here: Place;

// Where element (pixel, term) of the picture is; OUTSIDE where the window reaches past it.
const OUTSIDE = 0xffffffffu;

fn picture_index(window: Window, group: u32, p: Pixel, t: Term) -> u32 {
    let h = p.row * window.h.stride + window.h.offset + t.row * window.h.step;
    let w = p.column * window.w.stride + window.w.offset + t.column * window.w.step;
    let channel = group * picture_channels() + t.channel;
    if (PASS == DX) {
        return select(OUTSIDE, y_index(p.image, channel, h, w), h < u.p.out_height && w < u.p.out_width);
    }
    return select(OUTSIDE, x_index(p.image, channel, h, w), h < u.p.height && w < u.p.width);
}

fn picture_load(window: Window, group: u32, p: Pixel, t: Term) -> f32 {
    let at = picture_index(window, group, p, t);
    if (at == OUTSIDE) {
        return 0.0;
    }
    return picture_at(at);
}

// `count` neighbouring terms of a pixel, at most four. BY_FOURS: there are four, of one tap.
fn picture_terms(p: Pixel, first: Term, count: u32) -> vec4<f32> {
    if (BY_FOURS == 1u) {
        let at = picture_index(here.window, here.group, p, first);
        if (at == OUTSIDE) {
            return vec4<f32>();
        }
        return picture_four(at);
    }
    var v = vec4<f32>();
    var t = first;
    for (var i = 0u; i < min(count, 4u); i++) {
        v[i] = picture_load(here.window, here.group, p, t);
        t = next_term(here.window, t);
    }
    return v;
}

// A term of `count` neighbouring pixels, at most four.
fn picture_pixels(first: Pixel, t: Term, count: u32) -> vec4<f32> {
    var v = vec4<f32>();
    var p = first;
    for (var i = 0u; i < min(count, 4u); i++) {
        v[i] = picture_load(here.window, here.group, p, t);
        p = next_pixel(here.window, p);
    }
    return v;
}

fn rows_count() -> u32 {
    return select(u.p.outs, u.p.channels, PASS == DX);
}

fn terms_count(window: Window) -> u32 {
    return picture_channels() * window.h.taps * window.w.taps;
}

fn columns_count(window: Window) -> u32 {
    if (PASS == DWEIGHT) {
        return terms_count(window);
    }
    return u.p.batch * window.h.pixels * window.w.pixels;
}

fn depth_count(window: Window) -> u32 {
    if (PASS == DWEIGHT) {
        return u.p.batch * window.h.pixels * window.w.pixels;
    }
    return terms_count(window);
}

fn right_load(column: u32, k: u32, end: u32) -> vec4<f32> {
    let columns = columns_count(here.window);
    if (column >= columns || k >= end) {
        return vec4<f32>();
    }
    if (PASS == DWEIGHT) {
        let pixel = pixel_of(here.window, k);
        if (LAST == 1u) {
            return picture_terms(pixel, here.term, columns - column);
        }
        return picture_pixels(pixel, here.term, end - k);
    }
    let term = term_of(here.window, k);
    if (LAST == 1u) {
        return picture_terms(here.pixel, term, end - k);
    }
    return picture_pixels(here.pixel, term, columns - column);
}

fn weight_of(t: Term, channel: u32) -> u32 {
    let h = here.window.h.first_tap + t.row * here.window.h.every;
    let w = here.window.w.first_tap + t.column * here.window.w.every;
    return weight_index(here.group * u.p.outs + t.channel, channel, h, w);
}

// Of dy: four out channels of a pixel, or an out channel of four pixels.
fn dy_load(row: u32, k: u32, end: u32) -> vec4<f32> {
    var p = pixel_of(here.window, k);
    let at = y_index(p.image, here.group * u.p.outs + row, p.row, p.column);
    if (LAST == 1u) {
        return first_of(other_four(at), u.p.outs - row);
    }
    if (BY_FOURS == 1u) {
        return first_of(other_four(at), end - k);
    }
    var v = vec4<f32>();
    for (var i = 0u; i < min(end - k, 4u); i++) {
        v[i] = other_at(y_index(p.image, here.group * u.p.outs + row, p.row, p.column));
        p = next_pixel(here.window, p);
    }
    return v;
}

fn left_load(row: u32, k: u32, end: u32) -> vec4<f32> {
    if (row >= rows_count() || k >= end) {
        return vec4<f32>();
    }
    if (PASS == Y) {
        let line = here.group * u.p.outs + row;
        return first_of(other_four(line * terms_count(here.window) + k), end - k);
    }
    if (PASS == DWEIGHT) {
        return dy_load(row, k, end);
    }
    var t = term_of(here.window, k);
    if (LAST == 1u) {
        return first_of(other_four(weight_of(t, row)), u.p.channels - row);
    }
    var v = vec4<f32>();
    for (var i = 0u; i < min(end - k, 4u); i++) {
        v[i] = other_at(weight_of(t, row));
        t = next_term(here.window, t);
    }
    return v;
}

// ---- Results ------------------------------------------------------------------------------------------------

// The bias of an element of y.
fn bias_of(i: u32) -> f32 {
    if (LAST == 1u) {
        return bias_at(i % (u.p.outs * u.p.groups));
    }
    return bias_at(i / (u.p.out_height * u.p.out_width) % (u.p.outs * u.p.groups));
}

fn put_one(i: u32, value: f32, bias: f32) {
    if (parts_out_is) {
        parts_out_set(i, value);
    } else if (bias_is) {
        out_set(i, value + bias);
    } else {
        out_set(i, value);
    }
}

fn put_two(i: u32, value: vec2<f32>, bias: vec2<f32>) {
    if (parts_out_is) {
        parts_out_set_two(i, value);
    } else if (bias_is) {
        out_set_two(i, value + bias);
    } else {
        out_set_two(i, value);
    }
}

// Where the sum of a row and a column is in the output.
fn out_index(window: Window, group: u32, row: u32, column: u32) -> u32 {
    let channel = group * rows_count() + row;
    if (PASS == DWEIGHT) {
        return channel * terms_count(window) + column;
    }
    let p = pixel_of(window, column);
    let h = window.h.first_pixel + p.row * window.h.apart;
    let w = window.w.first_pixel + p.column * window.w.apart;
    if (PASS == DX) {
        return x_index(p.image, channel, h, w);
    }
    return y_index(p.image, channel, h, w);
}

// Four rows of four columns, from element `start` of the output on. Two neighbours in memory at a time: two rows with the
// channels last, else two columns.
fn put_sums(window: Window, group: u32, first: vec2<u32>, start: u32, sums: Sums) {
    let rows = rows_count();
    let count = vec2<u32>(rows, columns_count(window)) - first;
    let across = LAST == 1u && PASS != DWEIGHT;
    let outer = min(4u, select(count.x, count.y, across));
    let inner = min(4u, select(count.y, count.x, across));
    let turned = transpose(mat4x4<f32>(sums.s0, sums.s1, sums.s2, sums.s3));
    for (var i = 0u; i < outer; i++) {
        var v = row_of(sums, i);
        if (across) {
            v = row_of(Sums(turned[0], turned[1], turned[2], turned[3]), i);
        }
        for (var k = 0u; k < inner; k += 2u) {
            let two = select(v.xy, v.zw, k == 2u);
            let at = first + select(vec2<u32>(i, k), vec2<u32>(k, i), across);
            let next = at + select(vec2<u32>(0u, 1u), vec2<u32>(1u, 0u), across);
            let bias = vec2<f32>(bias_at(group * rows + at.x), bias_at(group * rows + min(next.x, rows - 1u)));
            let to = start + out_index(window, group, at.x, at.y);
            if (k + 1u == inner) {
                put_one(to, two.x, bias.x);
            } else if (BY_TWOS == 1u) {
                put_two(to, two, bias);
            } else {
                put_one(to, two.x, bias.x);
                put_one(start + out_index(window, group, next.x, next.y), two.y, bias.y);
            }
        }
    }
}

// ---- Kernels ------------------------------------------------------------------------------------------------

fn product(block_group: u32, lane: u32) {
    let column_tile = block_group % u.p.column_tiles;
    var rest = block_group / u.p.column_tiles;
    let row_tile = rest % u.p.row_tiles;
    rest /= u.p.row_tiles;
    let group = rest % u.p.groups;
    rest /= u.p.groups;
    let phase_w = rest % u.p.phases_w;
    rest /= u.p.phases_w;
    let window = window_of(rest % u.p.phases_h, phase_w);
    let part = rest / u.p.phases_h;
    let begin = part * u.p.span;
    let end = max(begin, min(begin + u.p.span, depth_count(window)));

    here.window = window;
    here.group = group;
    let loaded = column_tile * TILE + four_of(RIGHT_ALONG == 1u, lane).x;
    if (PASS == DWEIGHT) {
        here.term = term_of(window, loaded);
    } else {
        here.pixel = pixel_of(window, loaded);
    }
    let row = row_tile * TILE + 4u * (lane / 16u);
    let column = column_tile * TILE + 4u * (lane % 16u);
    let rows = rows_count();
    let columns = columns_count(window);
    let inside = row < rows && column < columns;
    let sums = multiply(row_tile * TILE, column_tile * TILE, begin, end, inside, lane);
    for (var quarter = 0u; quarter < BLOCK * BLOCK; quarter++) {
        let at = vec2<u32>(row, column) + quarter_start(quarter);
        if (at.x < rows && at.y < columns) {
            put_sums(window, group, at, (u.p.first_part + part) * u.p.total, quarter_of(sums, quarter));
        }
    }
}

// Adds the parts of four neighbours of the output: a team of LANES threads, each of which has every LANES-th part.
fn join(block_group: u32, lane: u32) {
    let item = 4u * (block_group * TEAMS + lane / LANES);
    let at = min(item, u.p.total - 1u);
    var sum = vec4<f32>();
    var total = vec4<f32>();
    var taken = 0u;
    for (var part = lane % LANES; part < u.p.parts; part += LANES) {
        sum += parts_four(part * u.p.total + at);
        taken += 1u;
        if (taken % CHAIN == 0u) {
            total += sum;
            sum = vec4<f32>();
        }
    }
    let all = team_sum4(total + sum, lane, LANES);
    if (item >= u.p.total || lane % LANES != 0u) {
        return;
    }
    for (var i = 0u; i < min(4u, u.p.total - item); i += 2u) {
        let v = select(all.xy, all.zw, i == 2u);
        var bias = vec2<f32>();
        if (bias_is) {
            bias = vec2<f32>(bias_of(item + i), bias_of(min(item + i + 1u, u.p.total - 1u)));
        }
        if (item + i + 1u < u.p.total) {
            put_two(item + i, v, bias);
        } else {
            put_one(item + i, v.x, bias.x);
        }
    }
}

// One element of y or dx: chains of CHAIN terms, and of CHAIN * CHAIN.
fn direct_sum(i: u32) -> f32 {
    let height = select(u.p.out_height, u.p.height, PASS == DX);
    let width = select(u.p.out_width, u.p.width, PASS == DX);
    let channels = rows_count() * u.p.groups;
    var image: u32;
    var channel: u32;
    var pixel: u32;
    if (LAST == 1u) {
        pixel = i / channels;
        channel = i - pixel * channels;
        image = pixel / (height * width);
        pixel -= image * height * width;
    } else {
        let plane = i / (height * width);
        pixel = i - plane * height * width;
        image = plane / channels;
        channel = plane - image * channels;
    }
    let h = pixel / width;
    let w = pixel - h * width;
    var window = window_of(0u, 0u);
    var p = Pixel(image, h, w);
    if (PASS == DX) {
        window = window_of(h % u.p.stride_h, w % u.p.stride_w);
        p = Pixel(image, h / u.p.stride_h, w / u.p.stride_w);
    }
    here.window = window;
    here.group = channel / rows_count();
    let row = channel - here.group * rows_count();
    let terms = terms_count(window);
    var t = Term();
    var sum = 0.0;
    var middle = 0.0;
    var total = 0.0;
    for (var k = 0u; k < terms; k++) {
        let at = picture_index(window, here.group, p, t);
        if (at != OUTSIDE) {
            var weight = 0.0;
            if (PASS == DX) {
                weight = other_at(weight_of(t, row));
            } else {
                weight = other_at(channel * terms + k);
            }
            sum = fma(weight, picture_at(at), sum);
        }
        t = next_term(window, t);
        if ((k + 1u) % CHAIN == 0u) {
            middle += sum;
            sum = 0.0;
            if ((k + 1u) % (CHAIN * CHAIN) == 0u) {
                total += middle;
                middle = 0.0;
            }
        }
    }
    return total + (middle + sum);
}

fn direct(block_group: u32, lane: u32) {
    let i = 2u * (block_group * 256u + lane);
    if (i >= u.p.total) {
        return;
    }
    let first = direct_sum(i);
    if (i + 1u == u.p.total) {
        put_one(i, first, bias_of(i));
    } else {
        put_two(i, vec2<f32>(first, direct_sum(i + 1u)), vec2<f32>(bias_of(i), bias_of(i + 1u)));
    }
}

// Four terms of LANES out channels of dweight, or LANES out channels of dbias, over `span` pixels.
fn reduce(block_group: u32, lane: u32) {
    let window = window_of(0u, 0u);
    let outs = u.p.outs * u.p.groups;
    let terms = select(terms_count(window), 1u, PASS == DBIAS);
    let fours = (terms + 3u) / 4u;
    let four = 4u * (block_group % fours);
    let rest = block_group / fours;
    let channel = rest % u.p.row_tiles * LANES + lane % LANES;
    let part = rest / u.p.row_tiles;
    let end = min((part + 1u) * u.p.span, u.p.batch * u.p.out_height * u.p.out_width);
    var sum = vec4<f32>();
    var total = vec4<f32>();
    var taken = 0u;
    if (channel < outs) {
        here.window = window;
        here.group = channel / u.p.outs;
        for (var i = part * u.p.span + lane / LANES; i < end; i += TEAMS) {
            let p = pixel_of(window, i);
            let dy = other_at(y_index(p.image, channel, p.row, p.column));
            if (PASS == DBIAS) {
                sum.x += dy;
            } else {
                sum = fma(vec4<f32>(dy), picture_terms(p, term_of(window, four), terms - four), sum);
            }
            taken += 1u;
            if (taken % CHAIN == 0u) {
                total += sum;
                sum = vec4<f32>();
            }
        }
    }
    let all = across_teams(total + sum, lane, LANES);
    if (lane >= LANES || channel >= outs) {
        return;
    }
    for (var i = 0u; i < min(4u, terms - four); i++) {
        put_one((u.p.first_part + part) * u.p.total + channel * terms + four + i, all[i], 0.0);
    }
}

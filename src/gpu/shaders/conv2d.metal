/* SPDX-License-Identifier: MIT */
// conv2d: y, dx, dweight and dbias (PASS), in both layouts (LAST: channels last). docs/ops/conv2d.md derives them.
//
// `product`, for each group of channels, computes tiles of a matrix product (tiles.metal) whose right factor is
// gathered from a picture while it is loaded. A term is a channel and a tap of the window; a pixel is a place of the
// output.
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
// Where there are few tiles and the depth is long, the depth is split into parts by the sizes alone; each leaves its
// sums in the workspace, in the order of the output, and `join` adds them along a fixed tree.
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
#define OPERANDS(operand)                                                                                              \
    operand(Float, 0, out) operand(Float, 1, picture) operand(Float, 2, other) operand(Float, 3, bias)                 \
        operand(Float, 4, parts_out) operand(Float, 5, parts)
#define NUMBERS(number)                                                                                                \
    number(0, PASS) number(1, LAST) number(2, LEFT_ALONG) number(3, RIGHT_ALONG) number(4, BY_FOURS)                   \
        number(5, BY_TWOS) number(6, LANES) number(7, TEAMS) number(8, BLOCK) number(9, MATRIX)
#define KERNELS(kernel_of) kernel_of(product) kernel_of(join) kernel_of(direct) kernel_of(reduce)

struct Params {
    uint batch;    // images of this launch
    uint channels; // of x, in a group
    uint outs;     // channels of y, in a group
    uint groups;
    uint height; // of x
    uint width;
    uint out_height; // of y
    uint out_width;
    uint kernel_h;
    uint kernel_w;
    uint stride_h;
    uint stride_w;
    uint padding_h;
    uint padding_w;
    uint dilation_h;
    uint dilation_w;
    uint every_h; // dx: of the taps, those that reach one phase: stride / gcd(stride, dilation)
    uint every_w;
    uint step_h; // dx: how far dy's pixel moves from one of them to the next: dilation / gcd(stride, dilation)
    uint step_w;
    uint phases_h; // dx: that have pixels
    uint phases_w;
    uint total; // elements of the output
    uint row_tiles;
    uint column_tiles;
    uint parts;      // of the depth, in this launch; of `join`, all
    uint first_part; // of this launch
    uint span;       // the depth of a part, a multiple of `chain`; of `reduce`, pixels
    uint chain;      // how much of the depth is added in one chain
};

struct Shared {
    float4 tiles[640];
};

#include "common.metal"

#include "tiles.metal"

constexpr constant uint Y = 0;
constexpr constant uint DX = 1;
constexpr constant uint DWEIGHT = 2;
constexpr constant uint DBIAS = 3;
constexpr constant uint CHAIN = 32; // sums of single threads are added in chains of this many

// ---- Where elements are -------------------------------------------------------------------------------------

inline uint element(uint channels, uint height, uint width, uint n, uint channel, uint h, uint w) {
    return LAST == 1 ? ((n * height + h) * width + w) * channels + channel
                     : ((n * channels + channel) * height + h) * width + w;
}

inline uint x_index(thread const Call &c, uint n, uint channel, uint h, uint w) {
    return element(c.p.channels * c.p.groups, c.p.height, c.p.width, n, channel, h, w);
}

inline uint y_index(thread const Call &c, uint n, uint channel, uint h, uint w) {
    return element(c.p.outs * c.p.groups, c.p.out_height, c.p.out_width, n, channel, h, w);
}

inline uint weight_index(thread const Call &c, uint o, uint channel, uint h, uint w) {
    return element(c.p.channels, c.p.kernel_h, c.p.kernel_w, o, channel, h, w);
}

// ---- Pixels and terms ---------------------------------------------------------------------------------------

// One direction of a window: pixel i meets row i * stride + offset + tap * step of the picture, modulo 2^32, so that a
// row above the picture is a large number. Of dx this is a phase, with its own pixels and taps.
struct Axis {
    uint pixels;
    uint taps;
    uint stride;
    uint offset;
    uint step;
    uint first_tap; // of the weights: first_tap, first_tap + every, ...
    uint every;
    uint first_pixel; // of the output: first_pixel, first_pixel + apart, ...
    uint apart;
};

inline Axis window_axis(uint pixels, uint taps, uint stride, uint padding, uint dilation) {
    return {pixels, taps, stride, 0 - padding, dilation, 0, 1, 0, 1};
}

// Row h = phase + stride * a is reached by the taps whose distance to it, h + padding - tap * dilation, is a multiple
// of the stride.
inline Axis phase_axis(uint phase, uint size, uint kernel_size, uint stride, uint padding, uint dilation, uint every,
                       uint step) {
    uint place = phase + padding;
    uint limit = min(kernel_size, every);
    uint first = 0;
    while (first < limit && first * dilation % stride != place % stride) {
        first++;
    }
    uint taps = first == limit ? 0 : (kernel_size - first + every - 1) / every;
    uint back = first * dilation;
    uint offset = place >= back ? (place - back) / stride : 0 - (back - place) / stride;
    return {(size - phase + stride - 1) / stride, taps, 1, offset, 0 - step, first, every, phase, stride};
}

struct Window {
    Axis h;
    Axis w;
};

inline Window window_of(thread const Call &c, uint phase_h, uint phase_w) {
    if (PASS == DX) {
        return {phase_axis(phase_h, c.p.height, c.p.kernel_h, c.p.stride_h, c.p.padding_h, c.p.dilation_h, c.p.every_h,
                           c.p.step_h),
                phase_axis(phase_w, c.p.width, c.p.kernel_w, c.p.stride_w, c.p.padding_w, c.p.dilation_w, c.p.every_w,
                           c.p.step_w)};
    }
    return {window_axis(c.p.out_height, c.p.kernel_h, c.p.stride_h, c.p.padding_h, c.p.dilation_h),
            window_axis(c.p.out_width, c.p.kernel_w, c.p.stride_w, c.p.padding_w, c.p.dilation_w)};
}

struct Pixel {
    uint image;
    uint row;
    uint column;
};

inline Pixel pixel_of(thread const Window &window, uint i) {
    uint row = i / window.w.pixels;
    uint image = row / window.h.pixels;
    return {image, row - image * window.h.pixels, i - row * window.w.pixels};
}

inline Pixel next_pixel(thread const Window &window, Pixel p) {
    p.column += 1;
    if (p.column == window.w.pixels) {
        p.column = 0;
        p.row += 1;
        if (p.row == window.h.pixels) {
            p.row = 0;
            p.image += 1;
        }
    }
    return p;
}

// Terms are counted in the order of the weights in memory.
struct Term {
    uint channel; // of the picture, in its group
    uint row;     // of the window's taps
    uint column;
};

inline uint picture_channels(thread const Call &c) {
    return PASS == DX ? c.p.outs : c.p.channels;
}

inline Term term_of(thread const Call &c, thread const Window &window, uint i) {
    if (LAST == 1) {
        uint tap = i / picture_channels(c);
        uint row = tap / window.w.taps;
        return {i - tap * picture_channels(c), row, tap - row * window.w.taps};
    }
    uint line = i / window.w.taps;
    uint channel = line / window.h.taps;
    return {channel, line - channel * window.h.taps, i - line * window.w.taps};
}

inline Term next_term(thread const Call &c, thread const Window &window, Term t) {
    if (LAST == 1) {
        t.channel += 1;
        if (t.channel == picture_channels(c)) {
            t.channel = 0;
            t.column += 1;
        }
    } else {
        t.column += 1;
    }
    if (t.column == window.w.taps) {
        t.column = 0;
        t.row += 1;
        if (LAST != 1 && t.row == window.h.taps) {
            t.row = 0;
            t.channel += 1;
        }
    }
    return t;
}

inline uint rows_count(thread const Call &c) {
    return PASS == DX ? c.p.channels : c.p.outs;
}

inline uint terms_count(thread const Call &c, thread const Window &window) {
    return picture_channels(c) * window.h.taps * window.w.taps;
}

inline uint pixels_count(thread const Call &c, thread const Window &window) {
    return c.p.batch * window.h.pixels * window.w.pixels;
}

// ---- Loads --------------------------------------------------------------------------------------------------

constexpr constant uint OUTSIDE = 0xffffffffu;

// The factors of a group: of a tile, or of one sum.
struct Factors {
    Window window;
    uint group;
    uint loaded; // the column that a thread loads in each step, and its pixel or term
    Pixel pixel;
    Term term;

    // Where element (pixel, term) of the picture is; OUTSIDE where the window reaches past it.
    uint index(thread const Call &c, Pixel p, Term t) const {
        uint h = p.row * window.h.stride + window.h.offset + t.row * window.h.step;
        uint w = p.column * window.w.stride + window.w.offset + t.column * window.w.step;
        uint channel = group * picture_channels(c) + t.channel;
        if (PASS == DX) {
            return h < c.p.out_height && w < c.p.out_width ? y_index(c, p.image, channel, h, w) : OUTSIDE;
        }
        return h < c.p.height && w < c.p.width ? x_index(c, p.image, channel, h, w) : OUTSIDE;
    }
    float at(thread const Call &c, Pixel p, Term t) const {
        uint i = index(c, p, t);
        return i == OUTSIDE ? 0.0f : c.picture.at(i);
    }
    // `count` neighbouring terms of a pixel, at most four. BY_FOURS: there are four, of one tap.
    float4 terms(thread const Call &c, Pixel p, Term t, uint count) const {
        if (BY_FOURS == 1) {
            uint i = index(c, p, t);
            return i == OUTSIDE ? float4(0.0f) : c.picture.four(i);
        }
        float4 v = float4(0.0f);
        for (uint i = 0; i < min(count, 4u); i++) {
            v[i] = at(c, p, t);
            t = next_term(c, window, t);
        }
        return v;
    }
    // A term of `count` neighbouring pixels, at most four.
    float4 pixels(thread const Call &c, Pixel p, Term t, uint count) const {
        float4 v = float4(0.0f);
        for (uint i = 0; i < min(count, 4u); i++) {
            v[i] = at(c, p, t);
            p = next_pixel(window, p);
        }
        return v;
    }
    uint weight(thread const Call &c, Term t, uint channel) const {
        return weight_index(c, group * c.p.outs + t.channel, channel, window.h.first_tap + t.row * window.h.every,
                            window.w.first_tap + t.column * window.w.every);
    }
    uint dy(thread const Call &c, Pixel p, uint row) const {
        return y_index(c, p.image, group * c.p.outs + row, p.row, p.column);
    }

    // ---- As tiles.metal needs them

    bool left_along() const {
        return LEFT_ALONG == 1;
    }
    bool right_along() const {
        return RIGHT_ALONG == 1;
    }
    uint columns(thread const Call &c) const {
        return PASS == DWEIGHT ? terms_count(c, window) : pixels_count(c, window);
    }
    uint depth(thread const Call &c) const {
        return PASS == DWEIGHT ? pixels_count(c, window) : terms_count(c, window);
    }
    float4 right(thread const Call &c, uint2 place, uint end) const {
        uint count = columns(c) - place.x;
        if (place.x >= columns(c) || place.y >= end) {
            return float4(0.0f);
        }
        if (PASS == DWEIGHT) {
            Pixel p = pixel_of(window, place.y);
            Term t = place.x == loaded ? term : term_of(c, window, place.x);
            return LAST == 1 ? terms(c, p, t, count) : pixels(c, p, t, end - place.y);
        }
        Pixel p = place.x == loaded ? pixel : pixel_of(window, place.x);
        Term t = term_of(c, window, place.y);
        return LAST == 1 ? terms(c, p, t, end - place.y) : pixels(c, p, t, count);
    }
    float4 left(thread const Call &c, uint2 place, uint end) const {
        uint row = place.x;
        uint k = place.y;
        if (row >= rows_count(c) || k >= end) {
            return float4(0.0f);
        }
        if (PASS == Y) {
            return first_of(c.other, (group * c.p.outs + row) * terms_count(c, window) + k, end - k);
        }
        float4 v = float4(0.0f);
        if (PASS == DWEIGHT) {
            // Four out channels of a pixel, or an out channel of four pixels.
            Pixel p = pixel_of(window, k);
            if (LAST == 1 || BY_FOURS == 1) {
                return first_of(c.other, dy(c, p, row), LAST == 1 ? c.p.outs - row : end - k);
            }
            for (uint i = 0; i < min(end - k, 4u); i++) {
                v[i] = c.other.at(dy(c, p, row));
                p = next_pixel(window, p);
            }
            return v;
        }
        Term t = term_of(c, window, k);
        if (LAST == 1) {
            return first_of(c.other, weight(c, t, row), c.p.channels - row);
        }
        for (uint i = 0; i < min(end - k, 4u); i++) {
            v[i] = c.other.at(weight(c, t, row));
            t = next_term(c, window, t);
        }
        return v;
    }
};

// ---- Results ------------------------------------------------------------------------------------------------

// The bias of an element of y.
inline float bias_of(thread const Call &c, uint i) {
    return c.bias.at((LAST == 1 ? i : i / (c.p.out_height * c.p.out_width)) % (c.p.outs * c.p.groups));
}

inline void put_one(thread const Call &c, uint i, float value, float bias) {
    c.parts_out.set(i, value);
    c.out.set(i, c.bias.is() ? value + bias : value);
}

inline void put_two(thread const Call &c, uint i, float2 value, float2 bias) {
    c.parts_out.set_two(i, value);
    c.out.set_two(i, c.bias.is() ? value + bias : value);
}

// Where the sum of a row and a column is in the output.
inline uint out_index(thread const Call &c, thread const Factors &f, uint2 at) {
    uint channel = f.group * rows_count(c) + at.x;
    if (PASS == DWEIGHT) {
        return channel * terms_count(c, f.window) + at.y;
    }
    Pixel p = pixel_of(f.window, at.y);
    uint h = f.window.h.first_pixel + p.row * f.window.h.apart;
    uint w = f.window.w.first_pixel + p.column * f.window.w.apart;
    return PASS == DX ? x_index(c, p.image, channel, h, w) : y_index(c, p.image, channel, h, w);
}

// Four rows of four columns, from element `start` of the output on, of as many as there are. Two neighbours in memory
// at a time: two rows with the channels last, else two columns.
inline void put_sums(thread const Call &c, thread const Factors &f, uint2 first, uint2 count, uint start, Block sums) {
    bool across = LAST == 1 && PASS != DWEIGHT;
    if (across) {
        sums = transposed(sums);
    }
    uint rows = rows_count(c);
    uint outer = min(4u, across ? count.y : count.x);
    uint inner = min(4u, across ? count.x : count.y);
    for (uint i = 0; i < outer; i++) {
        float4 v = row_at(sums, i);
        for (uint k = 0; k < inner; k += 2) {
            float2 two = k == 2 ? v.zw : v.xy;
            uint2 at = first + (across ? uint2(k, i) : uint2(i, k));
            uint2 next = at + (across ? uint2(1, 0) : uint2(0, 1));
            float2 bias = float2(c.bias.at(f.group * rows + at.x), c.bias.at(f.group * rows + min(next.x, rows - 1)));
            uint to = start + out_index(c, f, at);
            if (k + 1 == inner) {
                put_one(c, to, two.x, bias.x);
            } else if (BY_TWOS == 1) {
                put_two(c, to, two, bias);
            } else {
                put_one(c, to, two.x, bias.x);
                put_one(c, start + out_index(c, f, next), two.y, bias.y);
            }
        }
    }
}

// ---- Kernels ------------------------------------------------------------------------------------------------

inline void product(thread const Call &c) {
    Tile tile = tile_of(c);
    uint column_tile = c.group % c.p.column_tiles;
    uint rest = c.group / c.p.column_tiles;
    uint row_tile = rest % c.p.row_tiles;
    rest /= c.p.row_tiles;
    Factors f = {};
    f.group = rest % c.p.groups;
    rest /= c.p.groups;
    uint phase_w = rest % c.p.phases_w;
    rest /= c.p.phases_w;
    f.window = window_of(c, rest % c.p.phases_h, phase_w);
    uint part = rest / c.p.phases_h;
    uint begin = part * c.p.span;
    uint end = max(begin, min(begin + c.p.span, f.depth(c)));

    uint2 first = tile.first(row_tile, column_tile);
    f.loaded = first.y + four_of(f.right_along(), c.lane, tile.across).x;
    if (PASS == DWEIGHT) {
        f.term = term_of(c, f.window, f.loaded);
    } else {
        f.pixel = pixel_of(f.window, f.loaded);
    }
    uint2 own = first + tile.own();
    uint2 size = uint2(rows_count(c), f.columns(c));
    Quarters sums = multiply(c, f, first, size, begin, end);
    if (!tile.inside(first, size)) {
        return;
    }
    for (uint q = 0; q < quarters_count(); q++) {
        uint2 at = own + tile.quarter(q);
        if (at.x < size.x && at.y < size.y) {
            put_sums(c, f, at, size - at, (c.p.first_part + part) * c.p.total, quarter_at(sums, q));
        }
    }
}

// Adds the parts of four neighbours of the output: a team of LANES threads, each of which has every LANES-th part.
inline void join(thread const Call &c) {
    uint team = c.lane / LANES;
    uint item = 4 * (c.group * TEAMS + team);
    uint at = min(item, c.p.total - 1);
    float4 sum = float4(0.0f);
    float4 total = float4(0.0f);
    uint taken = 0;
    for (uint part = c.lane % LANES; part < c.p.parts; part += LANES) {
        sum += first_of(c.parts, part * c.p.total + at, c.p.total - at);
        taken += 1;
        if (taken % CHAIN == 0) {
            total += sum;
            sum = float4(0.0f);
        }
    }
    float4 all = team_sum(c, total + sum, LANES);
    if (team >= TEAMS || item >= c.p.total || c.lane % LANES != 0) {
        return;
    }
    for (uint i = 0; i < min(4u, c.p.total - item); i += 2) {
        float2 v = i == 2 ? all.zw : all.xy;
        if (item + i + 1 < c.p.total) {
            put_two(c, item + i, v, float2(bias_of(c, item + i), bias_of(c, item + i + 1)));
        } else {
            put_one(c, item + i, v.x, bias_of(c, item + i));
        }
    }
}

// One element of y or dx: chains of CHAIN terms, and of CHAIN * CHAIN.
inline float direct_sum(thread const Call &c, uint i) {
    uint height = PASS == DX ? c.p.height : c.p.out_height;
    uint width = PASS == DX ? c.p.width : c.p.out_width;
    uint channels = rows_count(c) * c.p.groups;
    uint plane = height * width;
    uint image = i / (channels * plane);
    uint inside = i - image * channels * plane;
    uint channel = LAST == 1 ? inside % channels : inside / plane;
    uint place = LAST == 1 ? inside / channels : inside % plane;
    uint h = place / width;
    uint w = place % width;
    Factors f = {};
    Pixel p = {image, h, w};
    if (PASS == DX) {
        f.window = window_of(c, h % c.p.stride_h, w % c.p.stride_w);
        p = {image, h / c.p.stride_h, w / c.p.stride_w};
    } else {
        f.window = window_of(c, 0, 0);
    }
    f.group = channel / rows_count(c);
    uint row = channel % rows_count(c);
    uint terms = terms_count(c, f.window);
    Term t = {0, 0, 0};
    float sum = 0.0f;
    float middle = 0.0f;
    float total = 0.0f;
    for (uint k = 0; k < terms; k++) {
        uint at = f.index(c, p, t);
        if (at != OUTSIDE) {
            sum = fma(c.other.at(PASS == DX ? f.weight(c, t, row) : channel * terms + k), c.picture.at(at), sum);
        }
        t = next_term(c, f.window, t);
        if ((k + 1) % CHAIN == 0) {
            middle += sum;
            sum = 0.0f;
            if ((k + 1) % (CHAIN * CHAIN) == 0) {
                total += middle;
                middle = 0.0f;
            }
        }
    }
    return total + (middle + sum);
}

inline void direct(thread const Call &c) {
    uint i = 2 * (c.group * c.threads + c.lane);
    if (i >= c.p.total) {
        return;
    }
    float first = direct_sum(c, i);
    if (i + 1 == c.p.total) {
        put_one(c, i, first, bias_of(c, i));
    } else {
        put_two(c, i, float2(first, direct_sum(c, i + 1)), float2(bias_of(c, i), bias_of(c, i + 1)));
    }
}

// Four terms of LANES out channels of dweight, or LANES out channels of dbias, over `span` pixels.
inline void reduce(thread const Call &c) {
    Factors f = {};
    f.window = window_of(c, 0, 0);
    uint outs = c.p.outs * c.p.groups;
    uint terms = PASS == DBIAS ? 1 : terms_count(c, f.window);
    uint fours = (terms + 3) / 4;
    uint four = 4 * (c.group % fours);
    uint rest = c.group / fours;
    uint team = c.lane / LANES;
    uint channel = rest % c.p.row_tiles * LANES + c.lane % LANES;
    uint part = rest / c.p.row_tiles;
    uint end = min((part + 1) * c.p.span, pixels_count(c, f.window));
    float4 sum = float4(0.0f);
    float4 total = float4(0.0f);
    uint taken = 0;
    if (team < TEAMS && channel < outs) {
        f.group = channel / c.p.outs;
        Term first = {0, 0, 0};
        if (PASS != DBIAS) {
            first = term_of(c, f.window, four);
        }
        for (uint i = part * c.p.span + team; i < end; i += TEAMS) {
            Pixel p = pixel_of(f.window, i);
            float dy = c.other.at(f.dy(c, p, channel % c.p.outs));
            if (PASS == DBIAS) {
                sum.x += dy;
            } else {
                sum = fma(float4(dy), f.terms(c, p, first, terms - four), sum);
            }
            taken += 1;
            if (taken % CHAIN == 0) {
                total += sum;
                sum = float4(0.0f);
            }
        }
    }
    float4 all = across_teams(c, total + sum, LANES);
    if (c.lane >= LANES || channel >= outs) {
        return;
    }
    for (uint i = 0; i < min(4u, terms - four); i++) {
        put_one(c, (c.p.first_part + part) * c.p.total + channel * terms + four + i, all[i], 0.0f);
    }
}

KERNELS(ENTRY)

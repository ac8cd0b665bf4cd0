/* SPDX-License-Identifier: MIT */
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
#define OPERANDS(operand)                                                                                              \
    operand(Float, 0, y) operand(Float, 1, x) operand(Float, 2, dx) operand(Float, 3, dy) operand(Index, 4, argmax)    \
        operand(Index, 5, saved) operand(Word, 6, recomputed_out) operand(Word, 7, recomputed)                         \
            operand(BadIndex, 8, bad_index)
#define NUMBERS(number)    number(0, PAIRED)
#define KERNELS(kernel_of) kernel_of(forward) kernel_of(backward)

struct Params {
    uint inner; // channels where they come last, else 1: neighbours in memory that do not share a plane
    uint total; // elements of the output
    uint height;
    uint width;
    uint out_height;
    uint out_width;
    uint kernel_h;
    uint kernel_w;
    uint stride_h;
    uint stride_w;
    uint padding_h;
    uint padding_w;
    uint dilation_h;
    uint dilation_w;
    uint reach_h; // from a window's first element to its last
    uint reach_w;
};

struct Shared {
    uint none;
};

#include "common.metal"

struct Position {
    uint plane;
    uint row;
    uint column;
    uint inner;
};

// Element i of a tensor whose planes are height x width.
inline Position position_of(thread const Call &c, uint i, uint height, uint width) {
    uint element = i / c.p.inner;
    uint row = element / width;
    uint plane = row / height;
    return {plane, row - plane * height, element - row * width, i - element * c.p.inner};
}

// ---- Windows of an axis ---------------------------------------------------------------------------------------

// The elements of a window: first, first + dilation, ...; there is at least one.
struct Taps {
    uint first;
    uint count;
};

inline Taps taps_of(uint window, uint stride, uint padding, uint dilation, uint taps, uint size) {
    uint origin = window * stride; // in the padded axis
    uint lack = max(padding, origin) - origin;
    uint skipped = (lack + dilation - 1) / dilation;
    uint first = origin + skipped * dilation - padding;
    return {first, min(taps - skipped, (size - first + dilation - 1) / dilation)};
}

// Windows [begin, end) that reach over an element.
struct Span {
    uint begin;
    uint end;
};

inline Span windows_over(uint element, uint stride, uint padding, uint reach, uint windows) {
    uint last = element + padding;
    uint begin = (max(last, reach) - reach + stride - 1) / stride;
    return {begin, min(last / stride + 1, windows)};
}

// ---- The maximum ----------------------------------------------------------------------------------------------

// A number that orders as x does, equal for 0 and -0, greatest for every NaN, and never 0. Comparisons of floats could
// be compiled as if there were no NaN.
inline uint order_of(float x) {
    uint bits = as_type<uint>(x);
    if (is_nan(x)) {
        return 0xffffffffu;
    }
    if (bits == 0x80000000u) {
        return bits;
    }
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

struct Best {
    uint order; // 0: nothing yet
    float value;
    uint position;
};

// A later element must be greater.
inline void take(thread Best &best, float value, uint position) {
    uint order = order_of(value);
    if (order > best.order) {
        best.order = order;
        best.value = value;
        best.position = position;
    }
}

// The window of element i of y, and with PAIRED that of the next channel.
inline void search(thread const Call &c, uint i, thread Best &best, thread Best &next) {
    Position at = position_of(c, i, c.p.out_height, c.p.out_width);
    Taps rows = taps_of(at.row, c.p.stride_h, c.p.padding_h, c.p.dilation_h, c.p.kernel_h, c.p.height);
    Taps columns = taps_of(at.column, c.p.stride_w, c.p.padding_w, c.p.dilation_w, c.p.kernel_w, c.p.width);
    uint start = at.plane * c.p.height * c.p.width * c.p.inner + at.inner;
    for (uint row = 0; row < rows.count; row++) {
        for (uint column = 0; column < columns.count; column++) {
            uint position = (rows.first + row * c.p.dilation_h) * c.p.width + columns.first + column * c.p.dilation_w;
            if (PAIRED) {
                float2 v = c.x.two(start + position * c.p.inner);
                take(best, v.x, position);
                take(next, v.y, position);
            } else {
                take(best, c.x.at(start + position * c.p.inner), position);
            }
        }
    }
}

inline void store_argmax(thread const Call &c, uint i, uint position) {
    c.argmax.put(i, position);
    c.recomputed_out.put(i, position);
}

inline void forward(thread const Call &c) {
    uint i = 2 * (c.group * c.threads + c.lane);
    if (i >= c.p.total) {
        return;
    }
    Best best = {0, 0.0f, 0};
    Best next = {0, 0.0f, 0};
    search(c, i, best, next);
    store_argmax(c, i, best.position);
    if (i + 1 == c.p.total) {
        c.y.set(i, best.value);
        return;
    }
    if (!PAIRED) {
        Best none = {0, 0.0f, 0};
        search(c, i + 1, next, none);
    }
    store_argmax(c, i + 1, next.position);
    c.y.set_two(i, float2(best.value, next.value));
}

// ---- Backward -------------------------------------------------------------------------------------------------

// The argmax of window i.
inline uint argmax_of(thread const Call &c, uint i) {
    if (!c.saved.is()) {
        return c.recomputed.word(i);
    }
    uint position = c.saved.in(i, c.p.height * c.p.width);
    if (position == NO_INDEX) {
        c.bad_index.report(i);
    }
    return position;
}

// No f32 chain is longer than PART, however many windows there are over an element.
constexpr constant uint PART = 64;

struct Parts {
    float2 total;
    float2 middle;
    float2 part;
};

inline void close_part(thread Parts &s, uint seen) {
    if (seen % PART == 0) {
        s.middle += s.part;
        s.part = float2(0.0f);
        if (seen % (PART * PART) == 0) {
            s.total += s.middle;
            s.middle = float2(0.0f);
        }
    }
}

// dx of element i, and with PAIRED that of the next channel.
inline float2 collect(thread const Call &c, uint i) {
    Position at = position_of(c, i, c.p.height, c.p.width);
    uint position = at.row * c.p.width + at.column;
    Span rows = windows_over(at.row, c.p.stride_h, c.p.padding_h, c.p.reach_h, c.p.out_height);
    Span columns = windows_over(at.column, c.p.stride_w, c.p.padding_w, c.p.reach_w, c.p.out_width);
    Parts s = {float2(0.0f), float2(0.0f), float2(0.0f)};
    uint seen = 0;
    for (uint row = rows.begin; row < rows.end; row++) {
        for (uint column = columns.begin; column < columns.end; column++) {
            uint window = ((at.plane * c.p.out_height + row) * c.p.out_width + column) * c.p.inner + at.inner;
            if (argmax_of(c, window) == position) {
                s.part.x += c.dy.at(window);
            }
            if (PAIRED && argmax_of(c, window + 1) == position) {
                s.part.y += c.dy.at(window + 1);
            }
            seen += 1;
            close_part(s, seen);
        }
    }
    return s.total + (s.middle + s.part);
}

inline void backward(thread const Call &c) {
    uint i = 2 * (c.group * c.threads + c.lane);
    if (i >= c.p.total) {
        return;
    }
    float2 v = collect(c, i);
    if (i + 1 == c.p.total) {
        c.dx.set(i, v.x);
        return;
    }
    if (!PAIRED) {
        v.y = collect(c, i + 1).x;
    }
    c.dx.set_two(i, v);
}

KERNELS(ENTRY)

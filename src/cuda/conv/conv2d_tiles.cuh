/* SPDX-License-Identifier: MIT */
/*
 * conv2d by tiles: matrix products in which one factor is gathered from the picture while it is copied to shared
 * memory. No matrix of windows is stored.
 *
 *     result     rows                    columns          terms
 *     y          pixels of y             out channels     taps x channels
 *     dx         pixels of x, by phase   channels         taps x out channels
 *     dweight    taps x channels         out channels     pixels of y
 *
 * y and dx are one kernel: the rows of x whose distance modulo the stride is equal (a phase) are reached by the same
 * taps, and form a convolution of dy with stride 1 (docs/ops/conv2d.md).
 *
 * Pictures are read in runs of 16 bytes of channels: channels last, each group padded to whole runs. What is not stored
 * so is copied into the workspace first (conv2d_pack.cuh), which moves each element once, while the product
 * reads it once per tap.
 *
 * A block computes ROWS x COLUMNS results with 256 threads; tile_sums.cuh has their sums and the stages of terms.
 *
 * Sums of y and dx in 16 bits and TF32 are one f32 chain on the tensor cores; in f32, FMA chains of CHAIN terms that
 * are added in order. dweight: see chain_pixels().
 */
#ifndef VJP_CUDA_CONV2D_TILES_CUH
#define VJP_CUDA_CONV2D_TILES_CUH

#include "cuda/conv/conv2d_general.cuh"
#include "cuda/conv/tile_sums.cuh"

namespace vjp {
namespace {

/* ---- y and dx ---------------------------------------------------------------------------------------- */

/* The sizes along one axis. */
struct tile_axis {
    int source, result, kernel, stride, padding, dilation;
};

struct window_call {
    const uint4 *source; /* [batch, pixels, groups, runs] */
    const uint4 *weight; /* [groups, columns, taps, runs] */
    void *result;
    bool add, channels_last, wide; /* wide: the result can be written in 16 bytes */
    bool transposed;               /* dx from dy */
    parameter bias;
    int batch, groups, runs, columns; /* runs and columns of a group */
    tile_axis down, across;
    int phases_down, phases_across, row_tiles, column_tiles;
};

/* Result i is at first + i*apart; its tap k is tap first_tap + k*next_tap of weight, over i*step + base + k*move. */
struct axis_windows {
    int count, first, apart, step, base, move, taps, first_tap, next_tap;
};

__host__ __device__ inline axis_windows windows_of(const tile_axis &a, bool transposed, int phase) {
    if (!transposed) return {a.result, 0, 1, a.stride, -a.padding, a.dilation, a.kernel, 0, 1};
    int tap = 0, common = a.stride;
    for (int rest = a.dilation; rest;) { /* the greatest common divisor */
        int next = common % rest;
        common = rest;
        rest = next;
    }
    while (tap < a.kernel && (phase + a.padding - tap * a.dilation) % a.stride)
        tap++;
    int apart = a.stride / common, taps = tap < a.kernel ? (a.kernel - 1 - tap) / apart + 1 : 0;
    return {(a.result - phase + a.stride - 1) / a.stride,
            phase,
            a.stride,
            1,
            (phase + a.padding - tap * a.dilation) / a.stride,
            -(a.dilation / common),
            taps,
            tap,
            apart};
}

/* A place outside of every picture, also after the taps' moves have been added. */
constexpr int OUTSIDE = -(1 << 28);

/* What the copies read of axis_windows. */
struct alignas(16) axis_taps {
    int count, first, next, move;
};

/* A row of a tile: its first tap in the source (run, row and column), and the first of its results; -1: none. */
struct alignas(16) row_window {
    unsigned at; /* wraps where the tap is outside */
    int h, w, result;
};

/* All shared memory of a block. */
template <class T, int ROWS, int COLUMNS>
constexpr size_t window_bytes = TILE_BYTES<T, ROWS, COLUMNS> + ROWS * sizeof(row_window) + 2 * sizeof(axis_taps) + 16;

template <class T, int ROWS, int COLUMNS>
__global__ void __launch_bounds__(THREADS, 2) window_tiles(const __grid_constant__ window_call q) {
    uint4 *shared = dynamic_shared<uint4>();
    __shared__ row_window windows[ROWS]; /* in registers these would be spilled */
    __shared__ axis_taps down, across;
    __shared__ int tile_group, tile_column;
    begin_chained();
    int block = (int)blockIdx.x, column_tile = block % q.column_tiles;
    block /= q.column_tiles;
    int row_tile = block % q.row_tiles;
    block /= q.row_tiles;
    int phases = q.phases_down * q.phases_across, phase = block % phases, group = block / phases;
    {
        axis_windows v = windows_of(q.down, q.transposed, phase / q.phases_across);
        axis_windows u = windows_of(q.across, q.transposed, phase % q.phases_across);
        int plane = v.count * u.count, rows = q.batch * plane, row = row_tile * ROWS + (int)threadIdx.x;
        if (row_tile * ROWS >= rows) return; /* this phase has fewer rows than the first */
        if (threadIdx.x == 0) {
            down = {v.taps, v.first_tap, v.next_tap, v.move};
            across = {u.taps, u.first_tap, u.next_tap, u.move};
            tile_group = group;
            tile_column = column_tile * COLUMNS;
        }
        if (threadIdx.x < ROWS && row >= rows) windows[threadIdx.x] = {0, OUTSIDE, 0, -1};
        if (threadIdx.x < ROWS && row < rows) {
            int n = row / plane, i = row % plane / u.count, j = row % u.count;
            int h = i * v.step + v.base, w = j * u.step + u.base;
            unsigned line = (unsigned)n * (unsigned)q.down.source + (unsigned)h;
            unsigned pixel = line * (unsigned)q.across.source + (unsigned)w;
            int result = (n * q.down.result + v.first + i * v.apart) * q.across.result + u.first + j * u.apart;
            if (q.channels_last)
                result = (result * q.groups + group) * q.columns;
            else
                result += (n * (q.groups * q.columns - 1) + group * q.columns) * q.down.result * q.across.result;
            windows[threadIdx.x] = {(pixel * (unsigned)q.groups + (unsigned)group) * (unsigned)q.runs, h, w, result};
        }
    }
    __syncthreads();

    /* A thread copies one run of rows first_row, first_row + APART, ...: of windows, and of weights. */
    constexpr int APART = THREADS / RUNS<T>;
    int run = (int)threadIdx.x % RUNS<T>, first_row = (int)threadIdx.x / RUNS<T>;
    int up = 0, left = 0, c = run; /* tap and run of the next copy */
    auto normalize = [&] {
        while (c >= q.runs) {
            c -= q.runs;
            if (++left == across.count) {
                left = 0;
                up++;
            }
        }
    };
    normalize();
    int column = tile_column + first_row, columns = q.columns - column;
    auto load = [&](int stage) {
        uint4 *a = shared + stage * STAGE<T, ROWS, COLUMNS> + first_row * RUNS<T> + place_in_row<T>(run, first_row);
        uint4 *b = a + ROWS * RUNS<T>;
        axis_taps v = down, u = across;
        bool present = up < v.count;
        int move_h = present ? up * v.move : OUTSIDE, move_w = left * u.move;
        unsigned move = (unsigned)move_h * (unsigned)q.across.source + (unsigned)move_w;
        move = move * (unsigned)(q.groups * q.runs) + (unsigned)c;
#pragma unroll
        for (int i = 0; i < ROWS / APART; i++) {
            row_window first = windows[first_row + APART * i];
            bool inside = (unsigned)(first.h + move_h) < (unsigned)q.down.source &&
                          (unsigned)(first.w + move_w) < (unsigned)q.across.source;
            copy_async_or_zero(a + APART * i * RUNS<T>, q.source + (first.at + move), inside);
        }
        int taps = q.down.kernel * q.across.kernel;
        int tap = (v.first + up * v.next) * q.across.kernel + u.first + left * u.next;
        int weight = ((tile_group * q.columns + column) * taps + tap) * q.runs + c;
#pragma unroll
        for (int i = 0; i < COLUMNS / APART; i++)
            copy_async_or_zero(b + APART * i * RUNS<T>, q.weight + (weight + APART * i * taps * q.runs),
                               present && APART * i < columns);
        c += RUNS<T>;
        normalize();
    };
    tile_sums<T, ROWS, COLUMNS, false> sums(shared);
    int stages = divide_up(down.count * across.count * q.runs, RUNS<T>);
    multiply_stages(sums, shared, stages, load);

    /*
     * The results pass through shared memory, so that neighbours in memory are written together. Neighbouring threads
     * read four columns, or one row each: the pitch puts them in different banks.
     */
    int pitch = COLUMNS + (q.channels_last ? 4 : 1);
    static_assert(ROWS * (COLUMNS + 4) * sizeof(float) <= TILE_BYTES<T, ROWS, COLUMNS>);
    float *tile = reinterpret_cast<float *>(shared);
    sums.each([&](int row, int column, const auto &values) {
#pragma unroll
        for (int i = 0; i < (int)(sizeof values.v / sizeof(float)); i++)
            tile[row * pitch + column + i] = values.v[i];
    });
    __syncthreads();
    stored<T> *result = static_cast<stored<T> *>(q.result);
    int channel = tile_group * q.columns, next = q.channels_last ? 1 : q.down.result * q.across.result;
    auto with_bias = [&](float sum, int column) {
        return q.bias.data ? sum + read_parameter<stored<T>>(q.bias, channel + column) : sum;
    };
    if (q.wide) {
        constexpr int W = WIDE<T>, VECTORS = COLUMNS / W;
        for (int i = (int)threadIdx.x; i < ROWS * VECTORS; i += THREADS) {
            int row = i / VECTORS, first = i % VECTORS * W, column = tile_column + first;
            int place = windows[row].result;
            if (place < 0 || column >= q.columns) continue;
            float values[W];
#pragma unroll
            for (int j = 0; j < W; j += 4) {
                float4 four = *reinterpret_cast<const float4 *>(tile + row * pitch + first + j);
                values[j] = with_bias(four.x, column + j);
                values[j + 1] = with_bias(four.y, column + j + 1);
                values[j + 2] = with_bias(four.z, column + j + 2);
                values[j + 3] = with_bias(four.w, column + j + 3);
            }
            write_wide(result + place + column, values, q.add);
        }
        return;
    }
    for (int i = (int)threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
        int row = q.channels_last ? i / COLUMNS : i % ROWS, in_tile = q.channels_last ? i % COLUMNS : i / ROWS;
        int column = tile_column + in_tile;
        int place = windows[row].result;
        if (place < 0 || column >= q.columns) continue;
        write_one(result + place + column * next, with_bias(tile[row * pitch + in_tile], column), q.add);
    }
}

/* ---- dweight ----------------------------------------------------------------------------------------- */

/* Division of numbers below 2^31 by one that the host knows: a multiplication by its inverse, rounded upwards. */
struct divisor {
    unsigned inverse; /* 2^(31 + shift) / divisor */
    int shift;        /* 2^shift is at least the divisor */

    __device__ int quotient(int x) const {
        return (int)(__umulhi(2 * (unsigned)x, inverse) >> shift);
    }
};

divisor divisor_of(int by) {
    int shift = 0;
    while (shift < 31 && 1 << shift < by)
        shift++;
    return {(unsigned)vjp_divide_up((int64_t)1 << (31 + shift), by), shift};
}

struct weight_call {
    const uint4 *x;  /* [batch, pixels of x, groups, x_runs] */
    const uint4 *dy; /* [pixels, groups, y_runs] */
    float *partial;  /* [parts, groups, rows, columns] */
    int groups, x_runs, y_runs, rows, columns;
    int pixels, part;       /* all, and of a part */
    int chain;              /* stages until sums are added to the part */
    tile_axis down, across; /* source: of x; result: of dy */
    divisor by_height, by_width;
    int parts, row_tiles, column_tiles;
};

template <class T, int ROWS, int COLUMNS>
__global__ void __launch_bounds__(THREADS, 2) weight_tiles(const __grid_constant__ weight_call q) {
    uint4 *shared = dynamic_shared<uint4>();
    begin_chained();
    __shared__ int tile_row, tile_column, tile_group; /* the last over parts and groups; they take no registers */
    int block = (int)blockIdx.x, column_tile = block % q.column_tiles;
    block /= q.column_tiles;
    int row_tile = block % q.row_tiles;
    block /= q.row_tiles;
    int group = block % q.groups, part = block / q.groups;
    int begin = part * q.part, end = q.pixels - begin < q.part ? q.pixels : begin + q.part;
    if (threadIdx.x == 0) {
        tile_row = row_tile * ROWS;
        tile_column = column_tile * COLUMNS;
        tile_group = block;
    }

    /* A thread copies one run of x, of one tap, and one of dy, for pixels a few apart. */
    constexpr int A_RUNS = ROWS / WIDE<T>, B_RUNS = COLUMNS / WIDE<T>;
    constexpr int A_APART = THREADS / A_RUNS, B_APART = THREADS / B_RUNS;
    int a_run = (int)threadIdx.x % A_RUNS, a_pixel = (int)threadIdx.x / A_RUNS;
    int b_run = (int)threadIdx.x % B_RUNS, b_pixel = (int)threadIdx.x / B_RUNS;
    int x_run = row_tile * A_RUNS + a_run, y_run = column_tile * B_RUNS + b_run, tap = x_run / q.x_runs;
    int up = tap / q.across.kernel * q.down.dilation - q.down.padding;
    int left = tap % q.across.kernel * q.across.dilation - q.across.padding;
    if (tap >= q.down.kernel * q.across.kernel) up = OUTSIDE;
    x_run = group * q.x_runs + x_run % q.x_runs;
    int y_end = y_run < q.y_runs ? end : 0;
    y_run += group * q.y_runs;
    int first = begin; /* the next stage's first pixel */
    auto load = [&](int stage) {
        uint4 *a = shared + stage * STAGE<T, ROWS, COLUMNS>, *b = a + ROWS * RUNS<T>;
#pragma unroll
        for (int i = 0; i < DEPTH<T> / A_APART; i++) {
            int term = a_pixel + i * A_APART, pixel = first + term;
            int line = q.by_width.quotient(pixel), n = q.by_height.quotient(line);
            int h = (line - n * q.down.result) * q.down.stride + up;
            int w = (pixel - line * q.across.result) * q.across.stride + left;
            bool inside =
                pixel < end && (unsigned)h < (unsigned)q.down.source && (unsigned)w < (unsigned)q.across.source;
            int at = ((n * q.down.source + h) * q.across.source + w) * q.groups * q.x_runs + x_run;
            copy_async_or_zero(a + term * A_RUNS + place_in_term<T>(a_run, term), q.x + at, inside);
        }
#pragma unroll
        for (int i = 0; i < DEPTH<T> / B_APART; i++) {
            int term = b_pixel + i * B_APART, pixel = first + term;
            bool inside = pixel < y_end;
            int at = pixel * q.groups * q.y_runs + y_run;
            copy_async_or_zero(b + term * B_RUNS + place_in_term<T>(b_run, term), q.dy + at, inside);
        }
        first += DEPTH<T>;
    };
    tile_sums<T, ROWS, COLUMNS, true> sums(shared);
    bool add = false;
    auto write = [&] {
        float *partial = q.partial + (int64_t)tile_group * q.rows * q.columns;
        sums.each([&](int row, int column, auto values) {
            row += tile_row;
            column += tile_column;
            if (row >= q.rows || column >= q.columns) return; /* columns are whole runs: all of them, or none */
            auto *to = reinterpret_cast<decltype(values) *>(partial + (int64_t)row * q.columns + column);
            if (add) values = *to + values;
            *to = values;
        });
        sums.clear();
        add = true;
    };
    multiply_stages(sums, shared, divide_up(end - begin, DEPTH<T>), load, q.chain, write);
    write();
}

struct weight_sum_call {
    const float *partial;
    int parts, groups, channels, outs, taps; /* channels and outs of a group */
    int padded_channels, padded_outs;
    picture window;
    parameter_output dweight;
};

/* Parts of an element that a thread reads at once: with few elements, the time is that of waiting for memory. */
constexpr int PARTS_AT_ONCE = 16;

/* A thread adds the parts of an element, in order and in double. Neighbours read neighbouring out channels. */
template <class T>
__global__ void __launch_bounds__(THREADS) sum_weight_parts(const __grid_constant__ weight_sum_call q) {
    begin_chained();
    int64_t elements = (int64_t)q.groups * q.taps * q.channels * q.outs;
    int64_t part = (int64_t)q.groups * q.taps * q.padded_channels * q.padded_outs;
    for (int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x; t < elements; t += (int64_t)gridDim.x * THREADS) {
        quotient o = divide(t, q.outs), c = divide(o.quotient, q.channels), tap = divide(c.quotient, q.taps);
        const float *from =
            q.partial + ((tap.quotient * q.taps + tap.rest) * q.padded_channels + c.rest) * q.padded_outs + o.rest;
        double sum = 0;
        for (int i = 0; i < q.parts; i += PARTS_AT_ONCE) {
            float values[PARTS_AT_ONCE];
#pragma unroll
            for (int j = 0; j < PARTS_AT_ONCE; j++)
                values[j] = from[(i + j < q.parts ? i + j : i) * part];
#pragma unroll
            for (int j = 0; j < PARTS_AT_ONCE; j++)
                sum += i + j < q.parts ? values[j] : 0.0f;
        }
        int64_t out = tap.quotient * q.outs + o.rest;
        write_parameter<T>(q.dweight, out * q.window.image + c.rest * q.window.channel + tap.rest * q.window.pixel,
                           (float)sum);
    }
}

} // namespace
} // namespace vjp

#endif

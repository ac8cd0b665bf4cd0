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
 * A block computes ROWS x COLUMNS results with 256 threads; STAGES tiles of terms are in flight. A row of shared memory
 * holds run r in place r ^ (row % 8), so that eight rows of the same run are in different banks.
 *
 * Sums of y and dx in 16 bits are one f32 chain on the tensor cores; in f32, FMA chains of CHAIN terms that are added
 * in order. dweight: see MAX_CHAIN_PIXELS.
 */
#ifndef VJP_CUDA_CONV2D_TILES_CUH
#define VJP_CUDA_CONV2D_TILES_CUH

#include "cuda/conv/conv2d_general.cuh"
#include "cuda/conv/tile_instructions.cuh"

namespace vjp {
namespace {

constexpr int ROWS = 128, STAGES = 3;

/* Runs in a row of terms (128 bytes), and terms of a stage. */
constexpr int RUNS = 8;
template <class T> constexpr int DEPTH = RUNS *WIDE<T>;

/* 16-byte places of a stage, and bytes of shared memory. */
template <int COLUMNS> constexpr int STAGE = (ROWS + COLUMNS) * RUNS;
template <int COLUMNS> constexpr size_t TILE_BYTES = (size_t)STAGES *STAGE<COLUMNS> * 16;

/* ---- The sums of a block ----------------------------------------------------------------------------- */

/*
 * The threads' sums of a tile. multiply() adds the products of one stage: `a` and `b` have a row of DEPTH terms per
 * result row and column; if BY_TERM, a row of result rows (columns) per term. each() calls f(row, column, sum).
 */
template <class T, int COLUMNS, bool BY_TERM> struct tile_sums {
    /* Warps over rows and columns; 16-row and 8-column matrices of a warp. */
    static constexpr int WARPS_ACROSS = COLUMNS / 32, WARPS_DOWN = 8 / WARPS_ACROSS;
    static constexpr int DOWN = ROWS / WARPS_DOWN / 16, ACROSS = 4;
    float sum[DOWN][ACROSS][4] = {};
    int lane = (int)threadIdx.x % 32;
    int first_row = (int)threadIdx.x / 32 / WARPS_ACROSS * DOWN * 16;
    int first_column = (int)threadIdx.x / 32 % WARPS_ACROSS * 32;

    __device__ void multiply(const uint4 *a, const uint4 *b) {
        constexpr int A_RUNS = BY_TERM ? ROWS / 8 : RUNS, B_RUNS = BY_TERM ? COLUMNS / 8 : RUNS;
        int low = lane & 7, middle = lane >> 3 & 1, high = lane >> 4;
#pragma unroll
        for (int k = 0; k < DEPTH<T> / 16; k++) {
            unsigned left[DOWN][4], right[ACROSS / 2][4];
#pragma unroll
            for (int i = 0; i < DOWN; i++) {
                int first = first_row + i * 16;
                int row = BY_TERM ? k * 16 + high * 8 + low : first + middle * 8 + low;
                int run = BY_TERM ? first / 8 + middle : k * 2 + high;
                load_matrices<BY_TERM>(left[i], a + row * A_RUNS + (run ^ low));
            }
#pragma unroll
            for (int j = 0; j < ACROSS / 2; j++) {
                int first = first_column + j * 16;
                int row = BY_TERM ? k * 16 + middle * 8 + low : first + high * 8 + low;
                int run = BY_TERM ? first / 8 + high : k * 2 + middle;
                load_matrices<BY_TERM>(right[j], b + row * B_RUNS + (run ^ low));
            }
#pragma unroll
            for (int i = 0; i < DOWN; i++)
#pragma unroll
                for (int j = 0; j < ACROSS; j++)
                    multiply_matrices<T>(sum[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
        }
    }

    __device__ void end_chain() {
    }

    template <class F> __device__ void each(F f) const {
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    f(first_row + i * 16 + e / 2 * 8 + lane / 4, first_column + j * 8 + lane % 4 * 2 + e % 2,
                      sum[i][j][e]);
    }

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    sum[i][j][e] = 0;
    }
};

/* f32: a thread has 8 x 4 results, in chains of CHAIN terms. */
template <int COLUMNS, bool BY_TERM> struct tile_sums<float, COLUMNS, BY_TERM> {
    static_assert(COLUMNS == 64);
    float chain[8][4] = {}, sum[8][4] = {};
    int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;

    __device__ int row(int i) const {
        return BY_TERM ? i / 4 * 64 + y * 4 + i % 4 : y + 16 * i;
    }

    __device__ int column(int j) const {
        return BY_TERM ? x * 4 + j : x + 16 * j;
    }

    __device__ static void read(float (&to)[4], const uint4 *from) {
        float4 v = *reinterpret_cast<const float4 *>(from);
        to[0] = v.x;
        to[1] = v.y;
        to[2] = v.z;
        to[3] = v.w;
    }

    __device__ void multiply(const uint4 *a, const uint4 *b) {
        if constexpr (BY_TERM) {
#pragma unroll 4
            for (int k = 0; k < DEPTH<float>; k++) {
                float left[2][4], right[4];
#pragma unroll
                for (int i = 0; i < 2; i++)
                    read(left[i], a + k * (ROWS / 4) + ((y + 16 * i) ^ (k & 7)));
                read(right, b + k * (COLUMNS / 4) + (x ^ (k & 7)));
#pragma unroll
                for (int i = 0; i < 8; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        chain[i][j] = fmaf(left[i / 4][i % 4], right[j], chain[i][j]);
            }
        } else {
#pragma unroll 2
            for (int run = 0; run < RUNS; run++) {
                float right[4][4];
#pragma unroll
                for (int j = 0; j < 4; j++)
                    read(right[j], b + column(j) * RUNS + (run ^ (x & 7)));
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float left[4];
                    read(left, a + row(i) * RUNS + (run ^ (y & 7)));
#pragma unroll
                    for (int k = 0; k < 4; k++)
#pragma unroll
                        for (int j = 0; j < 4; j++)
                            chain[i][j] = fmaf(left[k], right[j][k], chain[i][j]);
                }
            }
        }
    }

    __device__ void end_chain() {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                sum[i][j] += chain[i][j];
                chain[i][j] = 0;
            }
    }

    template <class F> __device__ void each(F f) const {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                f(row(i), column(j), sum[i][j]);
    }

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                sum[i][j] = 0;
    }
};

/*
 * Adds the products of `stages` stages to the sums. load(stage) starts the copies of the next stage to that place;
 * at_chunk() is called after every chunk of `chunk` stages but the last.
 */
template <class T, int COLUMNS, bool BY_TERM, class LOAD, class CHUNK>
__device__ void multiply_stages(tile_sums<T, COLUMNS, BY_TERM> &sums, const uint4 *shared, int stages, int chunk,
                                LOAD load, CHUNK at_chunk) {
    constexpr int CHAIN_STAGES = (int)CHAIN / DEPTH<T>;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < stages) load(s);
        commit_copies();
    }
    for (int s = 0; s < stages; s++) {
        wait_copies<STAGES - 2>();
        __syncthreads(); /* the stage has arrived, and all threads have used the one before it, which is filled next */
        if (s + STAGES - 1 < stages) load((s + STAGES - 1) % STAGES);
        commit_copies();
        const uint4 *a = shared + s % STAGES * STAGE<COLUMNS>;
        sums.multiply(a, a + ROWS * RUNS);
        if ((s + 1) % CHAIN_STAGES == 0) sums.end_chain();
        if ((s + 1) % chunk == 0 && s + 1 < stages) at_chunk();
    }
    sums.end_chain();
    wait_copies<0>();
    __syncthreads();
}

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

__device__ inline axis_windows windows_of(const tile_axis &a, bool transposed, int phase) {
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

template <class T, int COLUMNS>
__global__ void __launch_bounds__(THREADS, 2) window_tiles(const __grid_constant__ window_call q) {
    extern __shared__ uint4 shared[];
    __shared__ int64_t place[ROWS]; /* of each row's first result; -1: none */
    begin_chained();
    int block = (int)blockIdx.x, column_tile = block % q.column_tiles;
    block /= q.column_tiles;
    int row_tile = block % q.row_tiles;
    block /= q.row_tiles;
    int phases = q.phases_down * q.phases_across, phase = block % phases, group = block / phases;
    axis_windows down = windows_of(q.down, q.transposed, phase / q.phases_across);
    axis_windows across = windows_of(q.across, q.transposed, phase % q.phases_across);
    int plane = down.count * across.count, rows = q.batch * plane;
    if (row_tile * ROWS >= rows) return; /* this phase has fewer rows than the first */

    /* A thread copies one run of rows first_row, first_row + 32, ...: of windows, and of weights. */
    int run = (int)threadIdx.x % RUNS, first_row = (int)threadIdx.x / RUNS;
    int image[ROWS / 32], h[ROWS / 32], w[ROWS / 32];
#pragma unroll
    for (int i = 0; i < ROWS / 32; i++) {
        int row = row_tile * ROWS + first_row + 32 * i, n = row / plane, rest = row % plane;
        bool present = row < rows;
        image[i] = n * q.down.source * q.across.source;
        h[i] = present ? rest / across.count * down.step + down.base : OUTSIDE;
        w[i] = rest % across.count * across.step + across.base;
    }
    int up = 0, left = 0, c = run; /* tap and run of the next copy */
    auto normalize = [&] {
        while (c >= q.runs) {
            c -= q.runs;
            if (++left == across.taps) {
                left = 0;
                up++;
            }
        }
    };
    normalize();
    int taps = q.down.kernel * q.across.kernel;
    auto load = [&](int stage) {
        uint4 *a = shared + stage * STAGE<COLUMNS> + first_row * RUNS + (run ^ (first_row & 7)), *b = a + ROWS * RUNS;
        bool present = up < down.taps;
#pragma unroll
        for (int i = 0; i < ROWS / 32; i++) {
            int at_h = h[i] + up * down.move, at_w = w[i] + left * across.move;
            bool inside =
                present && (unsigned)at_h < (unsigned)q.down.source && (unsigned)at_w < (unsigned)q.across.source;
            int at = ((image[i] + at_h * q.across.source + at_w) * q.groups + group) * q.runs + c;
            copy_async_or_zero(a + 32 * i * RUNS, q.source + (inside ? at : 0), inside);
        }
        int tap = (down.first_tap + up * down.next_tap) * q.across.kernel + across.first_tap + left * across.next_tap;
#pragma unroll
        for (int i = 0; i < COLUMNS / 32; i++) {
            int column = column_tile * COLUMNS + first_row + 32 * i;
            bool inside = present && column < q.columns;
            int at = ((group * q.columns + column) * taps + tap) * q.runs + c;
            copy_async_or_zero(b + 32 * i * RUNS, q.weight + (inside ? at : 0), inside);
        }
        c += RUNS;
        normalize();
    };
    tile_sums<T, COLUMNS, false> sums;
    int stages = divide_up(down.taps * across.taps * q.runs, RUNS);
    multiply_stages(sums, shared, stages, stages + 1, load, [] {});

    /* The results pass through shared memory, so that neighbours in memory are written together. */
    constexpr int PITCH = COLUMNS + 1;
    float *tile = reinterpret_cast<float *>(shared);
    sums.each([&](int row, int column, float sum) { tile[row * PITCH + column] = sum; });
    int64_t result_plane = (int64_t)q.down.result * q.across.result;
    if (threadIdx.x < ROWS) {
        int row = row_tile * ROWS + (int)threadIdx.x, n = row / plane, rest = row % plane;
        int64_t pixel = (int64_t)(down.first + rest / across.count * down.apart) * q.across.result + across.first +
                        rest % across.count * across.apart;
        int64_t at = q.channels_last ? ((n * result_plane + pixel) * q.groups + group) * q.columns
                                     : ((int64_t)n * q.groups + group) * q.columns * result_plane + pixel;
        place[threadIdx.x] = row < rows ? at : -1;
    }
    __syncthreads();
    T *result = static_cast<T *>(q.result);
    auto value_of = [&](int row, int column_in_tile, int column) {
        float sum = tile[row * PITCH + column_in_tile];
        return q.bias.data ? sum + read_parameter<T>(q.bias, group * q.columns + column) : sum;
    };
    if (q.wide) {
        constexpr int W = WIDE<T>, VECTORS = COLUMNS / W;
        for (int i = (int)threadIdx.x; i < ROWS * VECTORS; i += THREADS) {
            int row = i / VECTORS, first = i % VECTORS * W, column = column_tile * COLUMNS + first;
            if (place[row] < 0 || column >= q.columns) continue;
            float values[W];
#pragma unroll
            for (int j = 0; j < W; j++)
                values[j] = value_of(row, first + j, column + j);
            write_wide(result + place[row] + column, values, q.add);
        }
        return;
    }
    for (int i = (int)threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
        int row = q.channels_last ? i / COLUMNS : i % ROWS, in_tile = q.channels_last ? i % COLUMNS : i / ROWS;
        int column = column_tile * COLUMNS + in_tile;
        if (place[row] < 0 || column >= q.columns) continue;
        int64_t at = place[row] + column * (q.channels_last ? 1 : result_plane);
        write_one(result + at, value_of(row, in_tile, column), q.add);
    }
}

/* ---- dweight ----------------------------------------------------------------------------------------- */

/*
 * Pixels that are summed in the registers; then the sums are added to the part in the workspace. Tensor cores truncate
 * what an addition shifts out: by estimate 4e-6 after 4096 terms, and an f32 gradient must be within 1e-5.
 */
constexpr int MAX_CHAIN_PIXELS = 4096;

struct weight_call {
    const uint4 *x;  /* [batch, pixels of x, groups, x_runs] */
    const uint4 *dy; /* [pixels, groups, y_runs] */
    float *partial;  /* [parts, groups, rows, columns] */
    int groups, x_runs, y_runs, rows, columns;
    int pixels, part;       /* all, and of a part */
    tile_axis down, across; /* source: of x; result: of dy */
    int parts, row_tiles, column_tiles;
};

template <class T, int COLUMNS>
__global__ void __launch_bounds__(THREADS, 2) weight_tiles(const __grid_constant__ weight_call q) {
    extern __shared__ uint4 shared[];
    begin_chained();
    int block = (int)blockIdx.x, column_tile = block % q.column_tiles;
    block /= q.column_tiles;
    int row_tile = block % q.row_tiles;
    block /= q.row_tiles;
    int group = block % q.groups, part = block / q.groups;
    int begin = part * q.part, end = q.pixels - begin < q.part ? q.pixels : begin + q.part;

    /* A thread copies one run of x, of one tap, and one of dy, for pixels a few apart. */
    constexpr int A_RUNS = ROWS / WIDE<T>, B_RUNS = COLUMNS / WIDE<T>;
    constexpr int A_APART = THREADS / A_RUNS, B_APART = THREADS / B_RUNS;
    int a_run = (int)threadIdx.x % A_RUNS, a_pixel = (int)threadIdx.x / A_RUNS;
    int b_run = (int)threadIdx.x % B_RUNS, b_pixel = (int)threadIdx.x / B_RUNS;
    int tap = (row_tile * A_RUNS + a_run) / q.x_runs, c = (row_tile * A_RUNS + a_run) % q.x_runs;
    int up = tap / q.across.kernel * q.down.dilation - q.down.padding;
    int left = tap % q.across.kernel * q.across.dilation - q.across.padding;
    bool a_present = tap < q.down.kernel * q.across.kernel;
    int y_run = column_tile * B_RUNS + b_run;
    int plane = q.down.result * q.across.result, first = begin; /* first: the next stage's first pixel */
    auto load = [&](int stage) {
        uint4 *a = shared + stage * STAGE<COLUMNS>, *b = a + ROWS * RUNS;
#pragma unroll
        for (int i = 0; i < DEPTH<T> / A_APART; i++) {
            int term = a_pixel + i * A_APART, pixel = first + term;
            unsigned n = (unsigned)pixel / (unsigned)plane, rest = (unsigned)pixel % (unsigned)plane;
            int h = (int)(rest / (unsigned)q.across.result) * q.down.stride + up;
            int w = (int)(rest % (unsigned)q.across.result) * q.across.stride + left;
            bool inside = a_present && pixel < end && (unsigned)h < (unsigned)q.down.source &&
                          (unsigned)w < (unsigned)q.across.source;
            int at = ((((int)n * q.down.source + h) * q.across.source + w) * q.groups + group) * q.x_runs + c;
            copy_async_or_zero(a + term * A_RUNS + (a_run ^ (term & 7)), q.x + (inside ? at : 0), inside);
        }
#pragma unroll
        for (int i = 0; i < DEPTH<T> / B_APART; i++) {
            int term = b_pixel + i * B_APART, pixel = first + term;
            bool inside = pixel < end && y_run < q.y_runs;
            int at = (pixel * q.groups + group) * q.y_runs + y_run;
            copy_async_or_zero(b + term * B_RUNS + (b_run ^ (term & 7)), q.dy + (inside ? at : 0), inside);
        }
        first += DEPTH<T>;
    };
    tile_sums<T, COLUMNS, true> sums;
    float *partial = q.partial + ((int64_t)part * q.groups + group) * q.rows * q.columns;
    bool add = false;
    auto write = [&] {
        sums.each([&](int row, int column, float sum) {
            row += row_tile * ROWS;
            column += column_tile * COLUMNS;
            if (row >= q.rows || column >= q.columns) return;
            float *to = partial + (int64_t)row * q.columns + column;
            *to = add ? *to + sum : sum;
        });
        sums.clear();
        add = true;
    };
    multiply_stages(sums, shared, divide_up(end - begin, DEPTH<T>), MAX_CHAIN_PIXELS / DEPTH<T>, load, write);
    write();
}

struct weight_sum_call {
    const float *partial;
    int parts, groups, channels, outs, taps; /* channels and outs of a group */
    int padded_channels, padded_outs;
    picture window;
    parameter_output dweight;
};

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
        for (int i = 0; i < q.parts; i++)
            sum += from[i * part];
        int64_t out = tap.quotient * q.outs + o.rest;
        write_parameter<T>(q.dweight, out * q.window.image + c.rest * q.window.channel + tap.rest * q.window.pixel,
                           (float)sum);
    }
}

} // namespace
} // namespace vjp

#endif

/*
 * group_norm in pieces: one kernel for each look at x and dy, whatever the size of a group. For groups that no cluster
 * holds, for cards without clusters, for a few large groups, for 16-bit planes of no whole number of 16 bytes, and for
 * channels last.
 *
 *   moments of pieces -> scale of each group      where the statistics are not saved
 *   sums of pieces    -> slopes of each group     in the backward
 *   y or dx
 *
 * A piece is some places of the plane of one channel; its moments, later its sums, are a cell of the workspace, and a
 * block a group adds its cells up. Channels first, a warp takes a piece. Channels last, a block takes some rows of the
 * plane with all channels, or up to 256 units of them: a thread walks down a column of units.
 *
 * Where it counts, x and dy come from memory twice: 5/3 of the least bytes. The last kernel goes backwards, so that
 * it begins with what the one before has left in the second-level cache.
 */
#ifndef VJP_CUDA_GROUP_NORM_PIECES_CUH
#define VJP_CUDA_GROUP_NORM_PIECES_CUH

#include "cuda/norm/group_norm.cuh"

namespace vjp {
namespace {

__device__ scale scale_at(const group_call &call, int64_t row) {
    return call.mean_in ? saved_scale(call, row) : call.scales[row];
}

/* ---- Channels first: a warp a piece ------------------------------------------------------------------ */

constexpr int FIRST_THREADS = 256;
constexpr int FIRST_WARPS = FIRST_THREADS / 32;

/* Places of one channel, and this warp's lane in them. */
struct first_piece {
    int64_t n, channel, piece, row;
    int64_t at, places;
};

template <class F> __device__ void each_piece(const group_call &call, bool backwards, F f) {
    int64_t all = call.batch * call.channels * call.pieces, stride = (int64_t)gridDim.x * FIRST_WARPS;
    for (int64_t i = (int64_t)blockIdx.x * FIRST_WARPS + threadIdx.x / 32; i < all; i += stride) {
        int64_t k = backwards ? all - 1 - i : i, channel = k / call.pieces, piece = k % call.pieces;
        int64_t from = piece * call.piece, places = call.plane - from;
        f(first_piece{channel / call.channels, channel % call.channels, piece, channel / call.group_channels,
                      channel * call.plane + from, places < call.piece ? places : call.piece});
    }
}

template <int WIDTH, class F> __device__ void each_place(const first_piece &p, F f) {
#pragma unroll 4
    for (int64_t i = threadIdx.x % 32 * WIDTH; i < p.places; i += 32 * WIDTH)
        f(p.at + i);
}

template <class T, int WIDTH> __global__ void __launch_bounds__(FIRST_THREADS, 3) first_moments(group_call call) {
    take_turn();
    const T *x = static_cast<const T *>(call.x);
    each_piece(call, false, [&](first_piece p) {
        float sum = 0, largest = 0, squares = 0;
        each_place<WIDTH>(p, [&](int64_t i) { add_first(load_unit<T, WIDTH>(x + i, call.aligned), sum, largest); });
        for (int step = 16; step; step /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        center near = center_of(warp_sum((double)sum), (double)p.places, largest);
        sum = 0;
        each_place<WIDTH>(p,
                          [&](int64_t i) { add_second(load_unit<T, WIDTH>(x + i, call.aligned), near, sum, squares); });
        moments m = moments_of(near, warp_sum((double)sum), warp_sum((double)squares), (double)p.places);
        if (threadIdx.x % 32 == 0) *cell_at(call, p.n, p.channel, p.piece) = {m.mean, m.squares};
    });
}

template <class T, int WIDTH> __global__ void __launch_bounds__(FIRST_THREADS, 3) first_sums(group_call call) {
    take_turn();
    const T *x = static_cast<const T *>(call.x), *dy = static_cast<const T *>(call.dy);
    each_piece(call, false, [&](first_piece p) {
        scale s = scale_at(call, p.row);
        float chain = 0, product_chain = 0;
        each_place<WIDTH>(p, [&](int64_t i) {
            add_sums(load_unit<T, WIDTH>(x + i, call.aligned), load_unit<T, WIDTH>(dy + i, call.aligned), s, chain,
                     product_chain);
        });
        double sum = warp_sum((double)chain), product = warp_sum((double)product_chain) + s.rest * sum;
        if (threadIdx.x % 32 == 0) *cell_at(call, p.n, p.channel, p.piece) = {sum, product};
    });
}

template <class T, int WIDTH, bool BACKWARD>
__global__ void __launch_bounds__(FIRST_THREADS, 3) first_results(group_call call) {
    take_turn();
    const T *x = static_cast<const T *>(call.x), *dy = static_cast<const T *>(call.dy);
    each_piece(call, true, [&](first_piece p) {
        scale s = scale_at(call, p.row);
        float gamma = gamma_at<T>(call, p.channel), weight = s.rstd * gamma;
        slopes line = BACKWARD ? call.lines[p.row] : forward_line(s, gamma, beta_at<T>(call, p.channel));
        each_place<WIDTH>(p, [&](int64_t i) {
            unit<T, WIDTH> values = load_unit<T, WIDTH>(x + i, call.aligned), d;
            if constexpr (BACKWARD) d = load_unit<T, WIDTH>(dy + i, call.aligned);
            write_result<T, WIDTH>(call, i, values, BACKWARD ? &d : nullptr, s, weight, line);
        });
    });
}

/* ---- Channels last: a block some rows of the plane --------------------------------------------------- */

constexpr int LAST_THREADS = 256;

/* A thread takes one column of units and every `abreast`-th row of the piece, `walk` of them at most. */
struct last_cut {
    int64_t tiles; /* of columns */
    int columns;   /* units of a tile */
    int abreast;   /* rows at a time */
    int walk;      /* a multiple of CHAIN_UNITS: each such run of rows is a chain of its own */
};

/* Where a thread is. */
struct last_place {
    int64_t n, piece, rows;    /* rows of the piece */
    int64_t at, first_channel; /* of the piece's first row and this thread's column */
    int column, lane;          /* lane: of the rows */
    int64_t columns;           /* units of this tile that there are */
    bool here;                 /* this thread has a column */
};

template <int WIDTH> __device__ last_place last_place_of(const group_call &call, const last_cut &cut, int64_t index) {
    last_place p;
    int64_t tile = index % cut.tiles, from = tile * cut.columns;
    p.piece = index / cut.tiles % call.pieces;
    p.n = index / cut.tiles / call.pieces;
    p.rows = call.plane - p.piece * call.piece;
    if (p.rows > call.piece) p.rows = call.piece;
    p.columns = call.channels / WIDTH - from;
    if (p.columns > cut.columns) p.columns = cut.columns;
    p.column = (int)threadIdx.x % cut.columns;
    p.lane = (int)threadIdx.x / cut.columns;
    p.here = p.lane < cut.abreast && p.column < p.columns;
    p.first_channel = (from + p.column) * WIDTH;
    p.at = (p.n * call.plane + p.piece * call.piece) * call.channels + p.first_channel;
    return p;
}

/* Calls f(element) down a thread's column, and flush() after every CHAIN_UNITS rows and at the end. */
template <class F, class G>
__device__ void each_row(const group_call &call, const last_cut &cut, const last_place &p, F f, G flush) {
    for (int from = 0; from < cut.walk; from += CHAIN_UNITS) {
        int64_t row = p.lane + (int64_t)from * cut.abreast, end = row + (int64_t)CHAIN_UNITS * cut.abreast;
        if (end > p.rows) end = p.rows;
#pragma unroll 4
        for (; row < end; row += cut.abreast)
            f(p.at + row * call.channels);
        flush();
    }
}

/* Rows that a lane has. */
__device__ int64_t last_rows_of(const last_cut &cut, const last_place &p, int lane) {
    return p.rows > lane ? (p.rows - lane + cut.abreast - 1) / cut.abreast : 0;
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(LAST_THREADS) last_moments(group_call call, last_cut cut) {
    __shared__ double means[LAST_THREADS * WIDTH], squares_of[LAST_THREADS * WIDTH];
    take_turn();
    const T *x = static_cast<const T *>(call.x);
    int64_t all = call.batch * call.pieces * cut.tiles;
    for (int64_t index = blockIdx.x; index < all; index += gridDim.x) {
        last_place p = last_place_of<WIDTH>(call, cut, index);
        if (p.here) {
            float sum[WIDTH] = {}, chain[WIDTH] = {}, squares[WIDTH] = {}, square_chain[WIDTH] = {},
                  largest[WIDTH] = {};
            center near[WIDTH];
            double rows = (double)last_rows_of(cut, p, p.lane);
            auto flush = [&] {
#pragma unroll
                for (int i = 0; i < WIDTH; i++) {
                    sum[i] += chain[i];
                    squares[i] += square_chain[i];
                    chain[i] = square_chain[i] = 0;
                }
            };
            each_row(
                call, cut, p,
                [&](int64_t at) {
                    unit<T, WIDTH> u = load_unit<T, WIDTH>(x + at, call.aligned);
#pragma unroll
                    for (int i = 0; i < WIDTH; i++)
                        add_first(unit<T, 1>{u.v[i]}, chain[i], largest[i]);
                },
                flush);
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                near[i] = center_of(sum[i], rows, largest[i]);
                sum[i] = 0;
            }
            each_row(
                call, cut, p,
                [&](int64_t at) {
                    unit<T, WIDTH> u = load_unit<T, WIDTH>(x + at, call.aligned);
#pragma unroll
                    for (int i = 0; i < WIDTH; i++)
                        add_second(unit<T, 1>{u.v[i]}, near[i], chain[i], square_chain[i]);
                },
                flush);
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                moments m = moments_of(near[i], sum[i], squares[i], rows);
                means[(p.lane * cut.columns + p.column) * WIDTH + i] = m.mean;
                squares_of[(p.lane * cut.columns + p.column) * WIDTH + i] = m.squares;
            }
        }
        __syncthreads();
        for (int k = threadIdx.x; k < (int)p.columns * WIDTH; k += LAST_THREADS) {
            double mean = 0, squares = 0;
            for (int lane = 0; lane < cut.abreast; lane++)
                mean += (double)last_rows_of(cut, p, lane) * means[lane * cut.columns * WIDTH + k];
            mean /= (double)p.rows;
            for (int lane = 0; lane < cut.abreast; lane++) {
                double offset = means[lane * cut.columns * WIDTH + k] - mean;
                squares +=
                    squares_of[lane * cut.columns * WIDTH + k] + (double)last_rows_of(cut, p, lane) * offset * offset;
            }
            int64_t channel = index % cut.tiles * cut.columns * WIDTH + k;
            *cell_at(call, p.n, channel, p.piece) = {mean, squares};
        }
        __syncthreads();
    }
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(LAST_THREADS, 2) last_sums(group_call call, last_cut cut) {
    __shared__ float sums[LAST_THREADS * WIDTH], products[LAST_THREADS * WIDTH];
    take_turn();
    const T *x = static_cast<const T *>(call.x), *dy = static_cast<const T *>(call.dy);
    int64_t all = call.batch * call.pieces * cut.tiles;
    for (int64_t index = blockIdx.x; index < all; index += gridDim.x) {
        last_place p = last_place_of<WIDTH>(call, cut, index);
        if (p.here) {
            float sum[WIDTH] = {}, chain[WIDTH] = {}, product[WIDTH] = {}, product_chain[WIDTH] = {};
            scale s[WIDTH];
#pragma unroll
            for (int i = 0; i < WIDTH; i++)
                s[i] = scale_at(call, p.n * call.groups + (p.first_channel + i) / call.group_channels);
            each_row(
                call, cut, p,
                [&](int64_t at) {
                    unit<T, WIDTH> u = load_unit<T, WIDTH>(x + at, call.aligned);
                    unit<T, WIDTH> d = load_unit<T, WIDTH>(dy + at, call.aligned);
#pragma unroll
                    for (int i = 0; i < WIDTH; i++)
                        add_sums(unit<T, 1>{u.v[i]}, unit<T, 1>{d.v[i]}, s[i], chain[i], product_chain[i]);
                },
                [&] {
#pragma unroll
                    for (int i = 0; i < WIDTH; i++) {
                        sum[i] += chain[i];
                        product[i] += product_chain[i];
                        chain[i] = product_chain[i] = 0;
                    }
                });
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                sums[(p.lane * cut.columns + p.column) * WIDTH + i] = sum[i];
                products[(p.lane * cut.columns + p.column) * WIDTH + i] = product[i];
            }
        }
        __syncthreads();
        for (int k = threadIdx.x; k < (int)p.columns * WIDTH; k += LAST_THREADS) {
            double sum = 0, product = 0;
            for (int lane = 0; lane < cut.abreast; lane++) {
                sum += sums[lane * cut.columns * WIDTH + k];
                product += products[lane * cut.columns * WIDTH + k];
            }
            int64_t channel = index % cut.tiles * cut.columns * WIDTH + k;
            product += scale_at(call, p.n * call.groups + channel / call.group_channels).rest * sum;
            *cell_at(call, p.n, channel, p.piece) = {sum, product};
        }
        __syncthreads();
    }
}

template <class T, int WIDTH, bool BACKWARD>
__global__ void __launch_bounds__(LAST_THREADS, 2) last_results(group_call call, last_cut cut) {
    take_turn();
    const T *x = static_cast<const T *>(call.x), *dy = static_cast<const T *>(call.dy);
    T *out = static_cast<T *>(call.out);
    int64_t all = call.batch * call.pieces * cut.tiles;
    for (int64_t index = blockIdx.x; index < all; index += gridDim.x) {
        last_place p = last_place_of<WIDTH>(call, cut, all - 1 - index);
        if (!p.here) continue;
        scale s[WIDTH];
        slopes line[WIDTH];
        float weight[WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            int64_t row = p.n * call.groups + (p.first_channel + i) / call.group_channels;
            float gamma = gamma_at<T>(call, p.first_channel + i);
            s[i] = scale_at(call, row);
            weight[i] = s[i].rstd * gamma;
            if constexpr (BACKWARD)
                line[i] = call.lines[row];
            else
                line[i] = forward_line(s[i], gamma, beta_at<T>(call, p.first_channel + i));
        }
        each_row(
            call, cut, p,
            [&](int64_t at) {
                float value[WIDTH], d[WIDTH];
                to_floats(load_unit<T, WIDTH>(x + at, call.aligned), value);
                if constexpr (BACKWARD) to_floats(load_unit<T, WIDTH>(dy + at, call.aligned), d);
#pragma unroll
                for (int i = 0; i < WIDTH; i++) {
                    value[i] = fmaf(line[i].slope, normalise(value[i], s[i]), line[i].level);
                    if constexpr (BACKWARD) value[i] = fmaf(weight[i], d[i], value[i]);
                }
                write_unit<T, WIDTH>(out + at, value, call.aligned, call.add);
            },
            [] {});
    }
}

/* ---- Cells of a group: a block a group, either layout ------------------------------------------------- */

constexpr int CELL_THREADS = 128;

/* Calls f(channel, piece) for this thread's cells of a group, neighbours in memory for neighbouring threads. */
template <class F> __device__ void each_cell(const group_call &call, int64_t group, F f) {
    int64_t first = group * call.group_channels, all = call.group_channels * call.pieces;
    for (int64_t k = threadIdx.x; k < all; k += CELL_THREADS) {
        if (call.channel_step == 1)
            f(first + k % call.group_channels, k / call.group_channels);
        else
            f(first + k / call.pieces, k % call.pieces);
    }
}

__global__ void __launch_bounds__(CELL_THREADS) group_scales(group_call call) {
    __shared__ block_sums<double, 1, CELL_THREADS> shared;
    int turn = 0;
    take_turn();
    for (int64_t row = blockIdx.x; row < call.batch * call.groups; row += gridDim.x) {
        int64_t n = row / call.groups, group = row % call.groups;
        auto count = [&](int64_t piece) {
            int64_t places = call.plane - piece * call.piece;
            return (double)(places < call.piece ? places : call.piece);
        };
        double mean[1] = {0}, squares[1] = {0};
        each_cell(call, group,
                  [&](int64_t c, int64_t piece) { mean[0] += count(piece) * cell_at(call, n, c, piece)->x; });
        block_sum(mean, shared, turn);
        mean[0] /= (double)(call.group_channels * call.plane);
        each_cell(call, group, [&](int64_t c, int64_t piece) {
            double2 cell = *cell_at(call, n, c, piece);
            squares[0] += cell.y + count(piece) * (cell.x - mean[0]) * (cell.x - mean[0]);
        });
        block_sum(squares, shared, turn);
        scale s = measured_scale(call, row, mean[0], squares[0], threadIdx.x == 0);
        if (threadIdx.x == 0) call.scales[row] = s;
    }
}

template <class T> __global__ void __launch_bounds__(CELL_THREADS) group_lines(group_call call) {
    __shared__ block_sums<double, 2, CELL_THREADS> shared;
    int turn = 0;
    take_turn();
    for (int64_t row = blockIdx.x; row < call.batch * call.groups; row += gridDim.x) {
        int64_t n = row / call.groups, group = row % call.groups;
        double total[2] = {0, 0};
        each_cell(call, group, [&](int64_t c, int64_t piece) {
            double2 cell = *cell_at(call, n, c, piece);
            double gamma = gamma_at<T>(call, c);
            total[0] += gamma * cell.x;
            total[1] += gamma * cell.y;
        });
        block_sum(total, shared, turn);
        if (threadIdx.x == 0) call.lines[row] = slopes_of(call, scale_at(call, row), total[0], total[1]);
    }
}

} // namespace
} // namespace vjp

#endif

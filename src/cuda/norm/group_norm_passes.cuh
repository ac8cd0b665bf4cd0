/* SPDX-License-Identifier: MIT */
/*
 * group_norm in several passes: one kernel for each time that x and dy are read, whatever the size of a group. For
 * groups too large for a cluster, for cards without clusters, for a few large groups, for 16-bit planes that are not a
 * multiple of 16 bytes, and for channels last.
 *
 *     moments of chunks -> scale of each group     where the statistics are not saved
 *     sums of chunks    -> map of each group       in the backward
 *     y or dx
 *
 * A chunk is some places of the plane of one channel; its moments, later its sums, are a partial in the workspace, and
 * a block per group adds its partials up. Channels first, a warp takes a chunk. Channels last, a block takes some rows
 * of the plane with all channels, or up to 256 units of them: a thread moves down a column of units.
 *
 * For large tensors x and dy come from memory twice: 5/3 of the fewest bytes. The last kernel runs backwards, so that
 * it begins with what the previous one has left in L2.
 */
#ifndef VJP_CUDA_GROUP_NORM_PASSES_CUH
#define VJP_CUDA_GROUP_NORM_PASSES_CUH

#include "cuda/norm/group_norm.cuh"

namespace vjp {
namespace {

__device__ scale scale_at(const group_call &call, int64_t row) {
    return call.mean_in ? saved_scale(call, row) : call.scales[row];
}

/* ---- Channels first: a warp per chunk ---------------------------------------------------------------- */

constexpr int FIRST_THREADS = 256;
constexpr int FIRST_WARPS = FIRST_THREADS / 32;

/* Places of one channel. */
struct first_chunk {
    int64_t n, channel, chunk, row;
    int64_t at, places;
};

template <class F> __device__ void each_chunk(const group_call &call, bool backwards, F f) {
    int64_t all = call.batch * call.channels * call.chunks, stride = (int64_t)gridDim.x * FIRST_WARPS;
    for (int64_t i = (int64_t)blockIdx.x * FIRST_WARPS + threadIdx.x / 32; i < all; i += stride) {
        int64_t k = backwards ? all - 1 - i : i, channel = k / call.chunks, chunk = k % call.chunks;
        int64_t from = chunk * call.chunk, places = call.plane - from;
        f(first_chunk{channel / call.channels, channel % call.channels, chunk, channel / call.group_channels,
                      channel * call.plane + from, places < call.chunk ? places : call.chunk});
    }
}

template <int WIDTH, class F> __device__ void each_place(const first_chunk &p, F f) {
#pragma unroll 4
    for (int64_t i = threadIdx.x % 32 * WIDTH; i < p.places; i += 32 * WIDTH)
        f(p.at + i);
}

template <class T, int WIDTH> __global__ void __launch_bounds__(FIRST_THREADS, 3) first_moments(group_call call) {
    begin_chained();
    const T *x = static_cast<const T *>(call.x);
    each_chunk(call, false, [&](first_chunk p) {
        float sum = 0, largest = 0, squares = 0;
        each_place<WIDTH>(p, [&](int64_t i) { add_first(load_unit<T, WIDTH>(x + i, call.aligned), sum, largest); });
        for (int step = 16; step; step /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        center near = center_of(warp_sum((double)sum), (double)p.places, largest);
        sum = 0;
        each_place<WIDTH>(p,
                          [&](int64_t i) { add_second(load_unit<T, WIDTH>(x + i, call.aligned), near, sum, squares); });
        moments m = moments_of(near, warp_sum((double)sum), warp_sum((double)squares), (double)p.places);
        if (threadIdx.x % 32 == 0) *partial_at(call, p.n, p.channel, p.chunk) = {m.mean, m.squares};
    });
}

template <class T, int WIDTH> __global__ void __launch_bounds__(FIRST_THREADS, 3) first_sums(group_call call) {
    begin_chained();
    const T *x = static_cast<const T *>(call.x), *dy = static_cast<const T *>(call.dy);
    each_chunk(call, false, [&](first_chunk p) {
        scale s = scale_at(call, p.row);
        float chain = 0, product_chain = 0;
        each_place<WIDTH>(p, [&](int64_t i) {
            add_sums(load_unit<T, WIDTH>(x + i, call.aligned), load_unit<T, WIDTH>(dy + i, call.aligned), s, chain,
                     product_chain);
        });
        double sum = warp_sum((double)chain), product = warp_sum((double)product_chain) + s.rest * sum;
        if (threadIdx.x % 32 == 0) *partial_at(call, p.n, p.channel, p.chunk) = {sum, product};
    });
}

template <class T, int WIDTH, bool BACKWARD>
__global__ void __launch_bounds__(FIRST_THREADS, 3) first_results(group_call call) {
    begin_chained();
    const T *x = static_cast<const T *>(call.x), *dy = static_cast<const T *>(call.dy);
    each_chunk(call, true, [&](first_chunk p) {
        scale s = scale_at(call, p.row);
        float gamma = gamma_at<T>(call, p.channel), weight = s.rstd * gamma;
        affine map = BACKWARD ? call.maps[p.row] : forward_map(s, gamma, beta_at<T>(call, p.channel));
        each_place<WIDTH>(p, [&](int64_t i) {
            unit<T, WIDTH> values = load_unit<T, WIDTH>(x + i, call.aligned), d;
            if constexpr (BACKWARD) d = load_unit<T, WIDTH>(dy + i, call.aligned);
            write_result<T, WIDTH>(call, i, values, BACKWARD ? &d : nullptr, s, weight, map);
        });
    });
}

/* ---- Channels last: some rows of the plane per block ------------------------------------------------- */

constexpr int LAST_THREADS = 256;

/* A thread takes one column of units and every `abreast`-th row of the chunk, `depth` of them at most. */
struct last_split {
    int64_t tiles; /* of columns */
    int columns;   /* units of a tile */
    int abreast;   /* rows at a time */
    int depth;     /* a multiple of CHAIN_UNITS: so many rows are one chain */
};

/* A thread's position. */
struct last_place {
    int64_t n, chunk, rows;    /* rows of the chunk */
    int64_t at, first_channel; /* of the chunk's first row and this thread's column */
    int column, lane;          /* lane: of the rows */
    int64_t columns;           /* units of this tile */
    bool here;                 /* this thread has a column to process */
};

template <int WIDTH>
__device__ last_place last_place_of(const group_call &call, const last_split &split, int64_t index) {
    last_place p;
    int64_t tile = index % split.tiles, from = tile * split.columns;
    p.chunk = index / split.tiles % call.chunks;
    p.n = index / split.tiles / call.chunks;
    p.rows = call.plane - p.chunk * call.chunk;
    if (p.rows > call.chunk) p.rows = call.chunk;
    p.columns = call.channels / WIDTH - from;
    if (p.columns > split.columns) p.columns = split.columns;
    p.column = (int)threadIdx.x % split.columns;
    p.lane = (int)threadIdx.x / split.columns;
    p.here = p.lane < split.abreast && p.column < p.columns;
    p.first_channel = (from + p.column) * WIDTH;
    p.at = (p.n * call.plane + p.chunk * call.chunk) * call.channels + p.first_channel;
    return p;
}

/* Calls f(element) down a thread's column, and flush() after every CHAIN_UNITS rows and at the end. */
template <class F, class G>
__device__ void each_row(const group_call &call, const last_split &split, const last_place &p, F f, G flush) {
    for (int from = 0; from < split.depth; from += CHAIN_UNITS) {
        int64_t row = p.lane + (int64_t)from * split.abreast, end = row + (int64_t)CHAIN_UNITS * split.abreast;
        if (end > p.rows) end = p.rows;
#pragma unroll 4
        for (; row < end; row += split.abreast)
            f(p.at + row * call.channels);
        flush();
    }
}

/* Rows of a lane. */
__device__ int64_t last_rows_of(const last_split &split, const last_place &p, int lane) {
    return p.rows > lane ? (p.rows - lane + split.abreast - 1) / split.abreast : 0;
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(LAST_THREADS) last_moments(group_call call, last_split split) {
    __shared__ double means[LAST_THREADS * WIDTH], squares_of[LAST_THREADS * WIDTH];
    begin_chained();
    const T *x = static_cast<const T *>(call.x);
    int64_t all = call.batch * call.chunks * split.tiles;
    for (int64_t index = blockIdx.x; index < all; index += gridDim.x) {
        last_place p = last_place_of<WIDTH>(call, split, index);
        if (p.here) {
            float sum[WIDTH] = {}, chain[WIDTH] = {}, squares[WIDTH] = {}, square_chain[WIDTH] = {},
                  largest[WIDTH] = {};
            center near[WIDTH];
            double rows = (double)last_rows_of(split, p, p.lane);
            auto flush = [&] {
#pragma unroll
                for (int i = 0; i < WIDTH; i++) {
                    sum[i] += chain[i];
                    squares[i] += square_chain[i];
                    chain[i] = square_chain[i] = 0;
                }
            };
            each_row(
                call, split, p,
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
                call, split, p,
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
                means[(p.lane * split.columns + p.column) * WIDTH + i] = m.mean;
                squares_of[(p.lane * split.columns + p.column) * WIDTH + i] = m.squares;
            }
        }
        __syncthreads();
        for (int k = threadIdx.x; k < (int)p.columns * WIDTH; k += LAST_THREADS) {
            double mean = 0, squares = 0;
            for (int lane = 0; lane < split.abreast; lane++)
                mean += (double)last_rows_of(split, p, lane) * means[lane * split.columns * WIDTH + k];
            mean /= (double)p.rows;
            for (int lane = 0; lane < split.abreast; lane++) {
                double offset = means[lane * split.columns * WIDTH + k] - mean;
                squares += squares_of[lane * split.columns * WIDTH + k] +
                           (double)last_rows_of(split, p, lane) * offset * offset;
            }
            int64_t channel = index % split.tiles * split.columns * WIDTH + k;
            *partial_at(call, p.n, channel, p.chunk) = {mean, squares};
        }
        __syncthreads();
    }
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(LAST_THREADS, 2) last_sums(group_call call, last_split split) {
    __shared__ float sums[LAST_THREADS * WIDTH], products[LAST_THREADS * WIDTH];
    begin_chained();
    const T *x = static_cast<const T *>(call.x), *dy = static_cast<const T *>(call.dy);
    int64_t all = call.batch * call.chunks * split.tiles;
    for (int64_t index = blockIdx.x; index < all; index += gridDim.x) {
        last_place p = last_place_of<WIDTH>(call, split, index);
        if (p.here) {
            float sum[WIDTH] = {}, chain[WIDTH] = {}, product[WIDTH] = {}, product_chain[WIDTH] = {};
            scale s[WIDTH];
#pragma unroll
            for (int i = 0; i < WIDTH; i++)
                s[i] = scale_at(call, p.n * call.groups + (p.first_channel + i) / call.group_channels);
            each_row(
                call, split, p,
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
                sums[(p.lane * split.columns + p.column) * WIDTH + i] = sum[i];
                products[(p.lane * split.columns + p.column) * WIDTH + i] = product[i];
            }
        }
        __syncthreads();
        for (int k = threadIdx.x; k < (int)p.columns * WIDTH; k += LAST_THREADS) {
            double sum = 0, product = 0;
            for (int lane = 0; lane < split.abreast; lane++) {
                sum += sums[lane * split.columns * WIDTH + k];
                product += products[lane * split.columns * WIDTH + k];
            }
            int64_t channel = index % split.tiles * split.columns * WIDTH + k;
            product += scale_at(call, p.n * call.groups + channel / call.group_channels).rest * sum;
            *partial_at(call, p.n, channel, p.chunk) = {sum, product};
        }
        __syncthreads();
    }
}

template <class T, int WIDTH, bool BACKWARD>
__global__ void __launch_bounds__(LAST_THREADS, 2) last_results(group_call call, last_split split) {
    begin_chained();
    const T *x = static_cast<const T *>(call.x), *dy = static_cast<const T *>(call.dy);
    T *out = static_cast<T *>(call.out);
    int64_t all = call.batch * call.chunks * split.tiles;
    for (int64_t index = blockIdx.x; index < all; index += gridDim.x) {
        last_place p = last_place_of<WIDTH>(call, split, all - 1 - index);
        if (!p.here) continue;
        scale s[WIDTH];
        affine map[WIDTH];
        float weight[WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            int64_t row = p.n * call.groups + (p.first_channel + i) / call.group_channels;
            float gamma = gamma_at<T>(call, p.first_channel + i);
            s[i] = scale_at(call, row);
            weight[i] = s[i].rstd * gamma;
            if constexpr (BACKWARD)
                map[i] = call.maps[row];
            else
                map[i] = forward_map(s[i], gamma, beta_at<T>(call, p.first_channel + i));
        }
        each_row(
            call, split, p,
            [&](int64_t at) {
                float value[WIDTH], d[WIDTH];
                to_floats(load_unit<T, WIDTH>(x + at, call.aligned), value);
                if constexpr (BACKWARD) to_floats(load_unit<T, WIDTH>(dy + at, call.aligned), d);
#pragma unroll
                for (int i = 0; i < WIDTH; i++) {
                    value[i] = fmaf(map[i].slope, normalise(value[i], s[i]), map[i].level);
                    if constexpr (BACKWARD) value[i] = fmaf(weight[i], d[i], value[i]);
                }
                write_unit<T, WIDTH>(out + at, value, call.aligned, call.add);
            },
            [] {});
    }
}

/* ---- Partials of a group: a block per group, either layout -------------------------------------------- */

constexpr int GROUP_THREADS = 128;

/* Calls f(channel, chunk) for this thread's partials of a group; adjacent threads get adjacent ones in memory. */
template <class F> __device__ void each_partial(const group_call &call, int64_t group, F f) {
    int64_t first = group * call.group_channels, all = call.group_channels * call.chunks;
    for (int64_t k = threadIdx.x; k < all; k += GROUP_THREADS) {
        if (call.channel_step == 1)
            f(first + k % call.group_channels, k / call.group_channels);
        else
            f(first + k / call.chunks, k % call.chunks);
    }
}

__global__ void __launch_bounds__(GROUP_THREADS) group_scales(group_call call) {
    __shared__ block_sums<double, 1, GROUP_THREADS> shared;
    int turn = 0;
    begin_chained();
    for (int64_t row = blockIdx.x; row < call.batch * call.groups; row += gridDim.x) {
        int64_t n = row / call.groups, group = row % call.groups;
        auto count = [&](int64_t chunk) {
            int64_t places = call.plane - chunk * call.chunk;
            return (double)(places < call.chunk ? places : call.chunk);
        };
        double mean[1] = {0}, squares[1] = {0};
        each_partial(call, group,
                     [&](int64_t c, int64_t chunk) { mean[0] += count(chunk) * partial_at(call, n, c, chunk)->x; });
        block_sum(mean, shared, turn);
        mean[0] /= (double)(call.group_channels * call.plane);
        each_partial(call, group, [&](int64_t c, int64_t chunk) {
            double2 partial = *partial_at(call, n, c, chunk);
            squares[0] += partial.y + count(chunk) * (partial.x - mean[0]) * (partial.x - mean[0]);
        });
        block_sum(squares, shared, turn);
        scale s = measured_scale(call, row, mean[0], squares[0], threadIdx.x == 0);
        if (threadIdx.x == 0) call.scales[row] = s;
    }
}

template <class T> __global__ void __launch_bounds__(GROUP_THREADS) group_maps(group_call call) {
    __shared__ block_sums<double, 2, GROUP_THREADS> shared;
    int turn = 0;
    begin_chained();
    for (int64_t row = blockIdx.x; row < call.batch * call.groups; row += gridDim.x) {
        int64_t n = row / call.groups, group = row % call.groups;
        double total[2] = {0, 0};
        each_partial(call, group, [&](int64_t c, int64_t chunk) {
            double2 partial = *partial_at(call, n, c, chunk);
            double gamma = gamma_at<T>(call, c);
            total[0] += gamma * partial.x;
            total[1] += gamma * partial.y;
        });
        block_sum(total, shared, turn);
        if (threadIdx.x == 0) call.maps[row] = backward_map(call, scale_at(call, row), total[0], total[1]);
    }
}

} // namespace
} // namespace vjp

#endif

/* SPDX-License-Identifier: MIT */
/*
 * Norms of rows of more than 8192 elements, split into units of NORM_UNIT columns so that a single row keeps many
 * multiprocessors busy. A block takes a unit of a row, a thread 8 of its columns; the results of a row's units are
 * written to the workspace and added where they are needed, in the order of the units, in double. The steps, a kernel
 * each:
 *
 *     norm_long_moments  statistics of each unit (where none are saved)
 *     norm_long_y        forward: y and the saved statistics
 *     norm_long_sums     backward: a chunk of rows per block, for one unit: each row's sums, and column sums
 *     norm_long_dx       backward: dx, and y where it is wanted
 *
 * x and dy are read twice where dx is wanted, 5/3 of the fewest bytes: rows of this length are rare, and few of them
 * stay in L2. Elements are loaded one at a time, adjacent ones by adjacent threads, whatever the alignment.
 */
#ifndef VJP_CUDA_NORM_LONG_CUH
#define VJP_CUDA_NORM_LONG_CUH

#include "cuda/norm/norm.cuh"

namespace vjp {
namespace {

constexpr int NORM_LONG_THREADS = 256;
constexpr int NORM_LONG_ELEMENTS = NORM_UNIT / NORM_LONG_THREADS;

/* A block's unit: columns [from, from + n), of which a thread has threadIdx.x + i * NORM_LONG_THREADS. */
struct norm_unit {
    int64_t from;
    int n;

    __device__ norm_unit(const norm_call &c, int64_t unit)
        : from(unit * NORM_UNIT), n((int)(c.dim - from < NORM_UNIT ? c.dim - from : NORM_UNIT)) {
    }
    __device__ static int at(int i) {
        return (int)threadIdx.x + i * NORM_LONG_THREADS;
    }
    __device__ bool has(int i) const {
        return at(i) < n;
    }
};

/* The thread's elements of a unit whose first element is at `from`. Columns beyond the row are 0. */
template <class T>
__device__ void norm_long_read_as(const norm_unit &u, const T *from, float (&values)[NORM_LONG_ELEMENTS]) {
#pragma unroll
    for (int i = 0; i < NORM_LONG_ELEMENTS; i++)
        values[i] = u.has(i) ? to_f32(from[norm_unit::at(i)]) : 0.0f;
}

__device__ inline void norm_long_read(const norm_call &c, const norm_unit &u, const void *tensor, int64_t row,
                                      float (&values)[NORM_LONG_ELEMENTS]) {
    norm_with_type(c, [&](auto zero) {
        norm_long_read_as(u, static_cast<const decltype(zero) *>(tensor) + row * c.dim + u.from, values);
    });
}

__device__ inline void norm_long_write(const norm_call &c, const norm_unit &u, void *tensor, int64_t row,
                                       const float (&values)[NORM_LONG_ELEMENTS], bool add) {
    norm_with_type(c, [&](auto zero) {
        auto *to = static_cast<decltype(zero) *>(tensor) + row * c.dim + u.from;
#pragma unroll
        for (int i = 0; i < NORM_LONG_ELEMENTS; i++)
            if (u.has(i)) write_one(to + norm_unit::at(i), values[i], add);
    });
}

/* A parameter at the thread's columns. No branch between the loads, so all are in flight at once. */
__device__ inline void norm_long_parameter(const norm_call &c, const norm_unit &u, parameter p, float absent,
                                           float (&v)[NORM_LONG_ELEMENTS]) {
    if (!p.data)
#pragma unroll
        for (int i = 0; i < NORM_LONG_ELEMENTS; i++)
            v[i] = absent;
    else if (p.f32)
        norm_long_read_as(u, static_cast<const float *>(p.data) + u.from, v);
    else
        norm_long_read(c, u, p.data, 0, v);
}

/* ---- Statistics -------------------------------------------------------------------------------------- */

/* A row's statistics, in every thread of the block; each warp adds them up separately. */
template <bool LAYER> __device__ norm_scale norm_long_scale(const norm_call &c, int64_t row) {
    if (c.rstd_in) return norm_scale_saved<LAYER>(c, row);
    const norm_pair *units = c.moments + row * c.units;
    double dim = (double)c.dim, mean = 0, squares = 0;
    for (int64_t i = threadIdx.x % 32; i < c.units; i += 32)
        mean += units[i].a * (double)norm_unit(c, i).n;
    mean = warp_sum(mean) / dim;
    for (int64_t i = threadIdx.x % 32; i < c.units; i += 32) {
        double off = units[i].a - mean;
        squares += units[i].b + off * off * (double)norm_unit(c, i).n;
    }
    return norm_scale_of(mean, warp_sum(squares) / dim, c.eps);
}

/* The mean of one unit and the squared distances from it; without LAYER its squares. */
template <bool LAYER> __global__ void __launch_bounds__(NORM_LONG_THREADS, 4) norm_long_moments(norm_call c) {
    __shared__ block_sums<double, 1, NORM_LONG_THREADS> shared;
    int turn = 0;
    begin_chained();
    for (int64_t task = blockIdx.x; task < c.rows * c.units; task += gridDim.x) {
        norm_unit u(c, task % c.units);
        float x[NORM_LONG_ELEMENTS];
        norm_long_read(c, u, c.x, task / c.units, x);
        double mean = 0, sum[1] = {0};
        if (LAYER) {
#pragma unroll
            for (int i = 0; i < NORM_LONG_ELEMENTS; i++)
                sum[0] += (double)x[i];
            block_sum(sum, shared, turn);
            mean = sum[0] / u.n;
            sum[0] = 0;
        }
#pragma unroll
        for (int i = 0; i < NORM_LONG_ELEMENTS; i++)
            if (u.has(i)) sum[0] = fma((double)x[i] - mean, (double)x[i] - mean, sum[0]);
        block_sum(sum, shared, turn);
        if (threadIdx.x == 0) c.moments[task] = {mean, sum[0]};
    }
}

/* ---- Forward ----------------------------------------------------------------------------------------- */

template <bool LAYER> __global__ void __launch_bounds__(NORM_LONG_THREADS, 4) norm_long_y(norm_call c) {
    begin_chained();
    for (int64_t task = blockIdx.x; task < c.rows * c.units; task += gridDim.x) {
        int64_t row = task / c.units, unit = task % c.units;
        norm_unit u(c, unit);
        norm_scale s = norm_long_scale<LAYER>(c, row);
        if (unit == 0 && threadIdx.x == 0) {
            if (c.mean_out) c.mean_out[row] = s.mean;
            if (c.rstd_out) c.rstd_out[row] = s.rstd;
        }
        if (!c.out) continue;
        float x[NORM_LONG_ELEMENTS], gamma[NORM_LONG_ELEMENTS], beta[NORM_LONG_ELEMENTS];
        norm_long_read(c, u, c.x, row, x);
        norm_long_parameter(c, u, c.gamma, 1.0f, gamma);
        norm_long_parameter(c, u, c.beta, 0.0f, beta);
#pragma unroll
        for (int i = 0; i < NORM_LONG_ELEMENTS; i++)
            x[i] = fmaf(norm_xh<LAYER>(s, x[i]), gamma[i], beta[i]);
        norm_long_write(c, u, c.out, row, x, c.add);
    }
}

/* ---- Backward ---------------------------------------------------------------------------------------- */

template <bool LAYER> __global__ void __launch_bounds__(NORM_LONG_THREADS, 3) norm_long_sums(norm_call c) {
    __shared__ block_sums<double, 2, NORM_LONG_THREADS> shared;
    int turn = 0;
    begin_chained();
    for (int64_t task = blockIdx.x; task < c.chunks * c.units; task += gridDim.x) {
        int64_t chunk = task / c.units, unit = task % c.units, end = norm_chunk_begin(c, chunk + 1);
        norm_unit u(c, unit);
        float gamma[NORM_LONG_ELEMENTS], dgamma[NORM_LONG_ELEMENTS], dbeta[NORM_LONG_ELEMENTS];
        norm_long_parameter(c, u, c.gamma, 1.0f, gamma);
#pragma unroll
        for (int i = 0; i < NORM_LONG_ELEMENTS; i++)
            dgamma[i] = dbeta[i] = 0;
        for (int64_t row = norm_chunk_begin(c, chunk); row < end; row++) {
            float x[NORM_LONG_ELEMENTS], dy[NORM_LONG_ELEMENTS], sum_g = 0, sum_gxh = 0;
            norm_long_read(c, u, c.x, row, x);
            norm_long_read(c, u, c.dy, row, dy);
            norm_scale s = norm_long_scale<LAYER>(c, row);
#pragma unroll
            for (int i = 0; i < NORM_LONG_ELEMENTS; i++) {
                float xh = norm_xh<LAYER>(s, x[i]), g = dy[i] * gamma[i];
                dgamma[i] = fmaf(dy[i], xh, dgamma[i]);
                dbeta[i] += dy[i];
                sum_g += g;
                sum_gxh = fmaf(g, xh, sum_gxh);
            }
            if (!c.out) continue;
            double sums[2] = {(double)sum_g, (double)sum_gxh};
            if (!norm_fits(sum_g) || !norm_fits(sum_gxh)) {
                sums[0] = sums[1] = 0;
#pragma unroll
                for (int i = 0; i < NORM_LONG_ELEMENTS; i++) {
                    double g = (double)dy[i] * (double)gamma[i];
                    sums[0] += g;
                    sums[1] = fma(g, (double)norm_xh<LAYER>(s, x[i]), sums[1]);
                }
            }
            block_sum(sums, shared, turn);
            if (threadIdx.x == 0) c.totals[row * c.units + unit] = {sums[0], sums[1]};
        }
        if (!c.sums) continue;
        float *partials = c.partials + chunk * 2 * c.dim + u.from;
#pragma unroll
        for (int i = 0; i < NORM_LONG_ELEMENTS; i++)
            if (u.has(i)) {
                partials[norm_unit::at(i)] = dgamma[i];
                partials[c.dim + norm_unit::at(i)] = dbeta[i];
            }
    }
}

template <bool LAYER, bool Y> __global__ void __launch_bounds__(NORM_LONG_THREADS, 3) norm_long_dx(norm_call c) {
    begin_chained();
    for (int64_t task = blockIdx.x; task < c.rows * c.units; task += gridDim.x) {
        int64_t row = task / c.units;
        norm_unit u(c, task % c.units);
        float x[NORM_LONG_ELEMENTS], dy[NORM_LONG_ELEMENTS], gamma[NORM_LONG_ELEMENTS];
        norm_long_read(c, u, c.x, row, x);
        norm_long_read(c, u, c.dy, row, dy);
        norm_long_parameter(c, u, c.gamma, 1.0f, gamma);
        norm_scale s = norm_long_scale<LAYER>(c, row);
        double sum_g = 0, sum_gxh = 0;
        for (int64_t i = threadIdx.x % 32; i < c.units; i += 32) {
            sum_g += c.totals[row * c.units + i].a;
            sum_gxh += c.totals[row * c.units + i].b;
        }
        float slope = (float)(-(double)s.rstd * (warp_sum(sum_gxh) / (double)c.dim));
        float level = LAYER ? (float)(-(double)s.rstd * (warp_sum(sum_g) / (double)c.dim)) : 0.0f;
        if constexpr (Y) {
            float y[NORM_LONG_ELEMENTS];
            norm_long_parameter(c, u, c.beta, 0.0f, y);
#pragma unroll
            for (int i = 0; i < NORM_LONG_ELEMENTS; i++)
                y[i] = fmaf(norm_xh<LAYER>(s, x[i]), gamma[i], y[i]);
            norm_long_write(c, u, c.y, row, y, c.add_y);
        }
#pragma unroll
        for (int i = 0; i < NORM_LONG_ELEMENTS; i++)
            x[i] = fmaf(s.rstd, dy[i] * gamma[i], fmaf(slope, norm_xh<LAYER>(s, x[i]), level));
        norm_long_write(c, u, c.out, row, x, c.add);
    }
}

template <bool LAYER> vjp_status norm_long_run(const vjp_work *work, const norm_call &c) {
    int64_t tasks = vjp_min(MAX_BLOCKS, c.rows * c.units), sums = vjp_min(MAX_BLOCKS, c.chunks * c.units);
    vjp_status status = VJP_OK;
    if (!c.rstd_in) status = launch(work, true, norm_long_moments<LAYER>, tasks, NORM_LONG_THREADS, 0, c);
    if (status != VJP_OK) return status;
    if (work->pass == VJP_FORWARD) return launch(work, true, norm_long_y<LAYER>, tasks, NORM_LONG_THREADS, 0, c);
    status = launch(work, true, norm_long_sums<LAYER>, sums, NORM_LONG_THREADS, 0, c);
    if (status != VJP_OK) return status;
    if constexpr (!LAYER) {
        norm_call y = c;
        y.out = c.y;
        y.add = c.add_y;
        if (c.y && !c.out) return launch(work, true, norm_long_y<LAYER>, tasks, NORM_LONG_THREADS, 0, y);
        if (c.y) return launch(work, true, norm_long_dx<LAYER, true>, tasks, NORM_LONG_THREADS, 0, c);
    }
    if (!c.out) return VJP_OK;
    return launch(work, true, norm_long_dx<LAYER, false>, tasks, NORM_LONG_THREADS, 0, c);
}

} // namespace
} // namespace vjp

#endif

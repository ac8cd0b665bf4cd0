/* SPDX-License-Identifier: MIT */
/*
 * Norms of rows of fewer than 16 elements: a thread per row, in double. There the result often cancels to almost
 * nothing (the dx of a row of one or two elements is almost zero whatever dy is), which would drown in the rounding of
 * f32.
 *
 * Adjacent threads take adjacent rows, so a warp reads contiguous memory; its elements are a row apart, and all but the
 * first find their cache line in the first-level cache.
 */
#ifndef VJP_CUDA_NORM_SHORT_CUH
#define VJP_CUDA_NORM_SHORT_CUH

#include "cuda/norm/norm.cuh"

namespace vjp {
namespace {

constexpr int NORM_MAX_SHORT = NORM_SHORT - 1;

struct norm_short_statistics {
    double mean, rstd;
};

template <bool LAYER>
__device__ norm_short_statistics norm_short_measure(const norm_call &c, int dim, const float (&x)[NORM_MAX_SHORT]) {
    double mean = 0, squares = 0;
    if (LAYER) {
#pragma unroll
        for (int i = 0; i < NORM_MAX_SHORT; i++)
            if (i < dim) mean += (double)x[i];
        mean /= dim;
    }
#pragma unroll
    for (int i = 0; i < NORM_MAX_SHORT; i++)
        if (i < dim) squares = fma((double)x[i] - mean, (double)x[i] - mean, squares);
    return {mean, 1 / sqrt(squares / dim + c.eps)};
}

__device__ inline float norm_short_y(const norm_short_statistics &s, float x, double gamma, double beta) {
    return (float)(((double)x - s.mean) * s.rstd * gamma + beta);
}

__device__ inline void norm_short_read(const norm_call &c, const void *tensor, int64_t row,
                                       float (&values)[NORM_MAX_SHORT]) {
    norm_with_type(c, [&](auto zero) {
        const auto *from = static_cast<const decltype(zero) *>(tensor) + row * c.dim;
#pragma unroll
        for (int i = 0; i < NORM_MAX_SHORT; i++)
            values[i] = i < c.dim ? to_f32(from[i]) : 0.0f;
    });
}

__device__ inline void norm_short_write(const norm_call &c, void *tensor, int64_t row,
                                        const float (&values)[NORM_MAX_SHORT], bool add) {
    norm_with_type(c, [&](auto zero) {
        auto *to = static_cast<decltype(zero) *>(tensor) + row * c.dim;
#pragma unroll
        for (int i = 0; i < NORM_MAX_SHORT; i++)
            if (i < c.dim) write_one(to + i, values[i], add);
    });
}

/* A parameter in shared memory. */
__device__ inline void norm_short_parameter(const norm_call &c, parameter p, double absent, double *shared) {
    int t = threadIdx.x;
    if (t >= c.dim) return;
    shared[t] = absent;
    if (p.data) norm_with_type(c, [&](auto zero) { shared[t] = (double)read_parameter<decltype(zero)>(p, t); });
}

template <bool LAYER> __global__ void __launch_bounds__(NORM_SHORT_THREADS) norm_short_forward(norm_call c) {
    __shared__ double gamma[NORM_SHORT], beta[NORM_SHORT];
    int dim = (int)c.dim, t = threadIdx.x;
    begin_chained();
    norm_short_parameter(c, c.gamma, 1, gamma);
    norm_short_parameter(c, c.beta, 0, beta);
    __syncthreads();
    int64_t end = norm_chunk_begin(c, blockIdx.x + 1ll);
    for (int64_t row = norm_chunk_begin(c, blockIdx.x) + t; row < end; row += NORM_SHORT_THREADS) {
        float x[NORM_MAX_SHORT];
        norm_short_read(c, c.x, row, x);
        norm_short_statistics s = norm_short_measure<LAYER>(c, dim, x);
        if (c.mean_out) c.mean_out[row] = (float)s.mean;
        if (c.rstd_out) c.rstd_out[row] = (float)s.rstd;
        if (!c.out) continue;
#pragma unroll
        for (int i = 0; i < NORM_MAX_SHORT; i++)
            if (i < dim) x[i] = norm_short_y(s, x[i], gamma[i], beta[i]);
        norm_short_write(c, c.out, row, x, c.add);
    }
}

template <bool LAYER, bool Y> __global__ void __launch_bounds__(NORM_SHORT_THREADS) norm_short_backward(norm_call c) {
    constexpr int WARPS = NORM_SHORT_THREADS / 32;
    __shared__ double gamma[NORM_SHORT], beta[Y ? NORM_SHORT : 1], sums[WARPS][2 * NORM_SHORT];
    int dim = (int)c.dim, t = threadIdx.x;
    begin_chained();
    norm_short_parameter(c, c.gamma, 1, gamma);
    if constexpr (Y) norm_short_parameter(c, c.beta, 0, beta);
    __syncthreads();
    double dgamma[NORM_MAX_SHORT], dbeta[NORM_MAX_SHORT];
#pragma unroll
    for (int i = 0; i < NORM_MAX_SHORT; i++)
        dgamma[i] = dbeta[i] = 0;
    int64_t end = norm_chunk_begin(c, blockIdx.x + 1ll);
    for (int64_t row = norm_chunk_begin(c, blockIdx.x) + t; row < end; row += NORM_SHORT_THREADS) {
        float x[NORM_MAX_SHORT], dy[NORM_MAX_SHORT];
        norm_short_read(c, c.x, row, x);
        norm_short_read(c, c.dy, row, dy);
        norm_short_statistics s = {c.mean_in ? (double)c.mean_in[row] : 0, c.rstd_in ? (double)c.rstd_in[row] : 0};
        if (!c.rstd_in) s = norm_short_measure<LAYER>(c, dim, x);
        double mean_g = 0, mean_gxh = 0;
#pragma unroll
        for (int i = 0; i < NORM_MAX_SHORT; i++)
            if (i < dim) {
                double xh = ((double)x[i] - s.mean) * s.rstd, g = (double)dy[i] * gamma[i];
                dgamma[i] = fma((double)dy[i], xh, dgamma[i]);
                dbeta[i] += (double)dy[i];
                if (LAYER) mean_g += g;
                mean_gxh = fma(g, xh, mean_gxh);
            }
        mean_g /= dim;
        mean_gxh /= dim;
        if constexpr (Y) {
            float y[NORM_MAX_SHORT];
            /* Of an rstd that was saved as f32, the double that the forward used, if it is that of the row. */
            norm_short_statistics measured = norm_short_measure<LAYER>(c, dim, x);
            if ((float)measured.rstd != (float)s.rstd) measured = s;
#pragma unroll
            for (int i = 0; i < NORM_MAX_SHORT; i++)
                if (i < dim) y[i] = norm_short_y(measured, x[i], gamma[i], beta[i]);
            norm_short_write(c, c.y, row, y, c.add_y);
        }
        if (!c.out) continue;
#pragma unroll
        for (int i = 0; i < NORM_MAX_SHORT; i++)
            if (i < dim) {
                double xh = ((double)x[i] - s.mean) * s.rstd, g = (double)dy[i] * gamma[i];
                x[i] = (float)(s.rstd * (g - mean_g - xh * mean_gxh));
            }
        norm_short_write(c, c.out, row, x, c.add);
    }
    if (!c.sums) return;
#pragma unroll
    for (int i = 0; i < NORM_MAX_SHORT; i++)
        if (i < dim) {
            double of_gamma = warp_sum(dgamma[i]), of_beta = warp_sum(dbeta[i]);
            if (t % 32 == 0) {
                sums[t / 32][i] = of_gamma;
                sums[t / 32][dim + i] = of_beta;
            }
        }
    __syncthreads();
    if (t >= 2 * dim) return;
    double sum = 0;
    for (int w = 0; w < WARPS; w++)
        sum += sums[w][t];
    c.partials[(int64_t)blockIdx.x * 2 * dim + t] = (float)sum;
}

template <bool LAYER> vjp_status norm_short_run(const vjp_work *work, const norm_call &c) {
    auto kernel = work->pass == VJP_BACKWARD ? norm_short_backward<LAYER, false> : norm_short_forward<LAYER>;
    if constexpr (!LAYER)
        if (c.y) kernel = norm_short_backward<LAYER, true>;
    return launch(work, true, kernel, c.chunks, NORM_SHORT_THREADS, 0, c);
}

} // namespace
} // namespace vjp

#endif

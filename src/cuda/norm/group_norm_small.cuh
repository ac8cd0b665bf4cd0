/* SPDX-License-Identifier: MIT */
/*
 * group_norm of small groups, in either layout: many groups per block. x and dy are read again for each pass, from the
 * first-level cache (a group has at most 8 KB of f32).
 */
#ifndef VJP_CUDA_GROUP_NORM_SMALL_CUH
#define VJP_CUDA_GROUP_NORM_SMALL_CUH

#include "cuda/norm/group_norm.cuh"

namespace vjp {
namespace {

/* ---- Fewer than 16 elements: a thread per group ------------------------------------------------------ */

/* Below this many elements dx cancels to almost nothing, so everything is in double. */
constexpr int64_t TINY = 16;
constexpr int TINY_THREADS = 128;

template <class T>
__device__ void tiny_group(const group_call &call, int64_t n, int64_t group, int64_t part, bool first) {
    const T *x = static_cast<const T *>(call.x), *dy = static_cast<const T *>(call.dy);
    T *out = static_cast<T *>(call.out);
    int64_t begin = group * call.group_channels, end = begin + call.group_channels, row = n * call.groups + group;
    int64_t base = n * call.channels * call.plane;
    double count = (double)(call.group_channels * call.plane), mean = 0, rstd = 0;
    auto each_place = [&](int64_t c, auto f) {
        for (int64_t k = 0; k < call.plane; k++)
            f(base + c * call.channel_stride + k * call.place_stride);
    };
    if (call.mean_in) {
        mean = call.mean_in[row];
        rstd = call.rstd_in[row];
    } else {
        double sum = 0, squares = 0;
        for (int64_t c = begin; c < end; c++)
            each_place(c, [&](int64_t i) { sum += to_f32(x[i]); });
        mean = sum / count;
        for (int64_t c = begin; c < end; c++)
            each_place(c, [&](int64_t i) {
                double d = to_f32(x[i]) - mean;
                squares += d * d;
            });
        rstd = 1 / sqrt(squares / count + call.eps);
        if (call.mean_out) call.mean_out[row] = (float)mean;
        if (call.rstd_out) call.rstd_out[row] = (float)rstd;
    }
    double mean_g = 0, mean_gxh = 0;
    for (int64_t c = begin; c < end && dy; c++) {
        double sum = 0, product = 0, gamma = gamma_at<T>(call, c);
        each_place(c, [&](int64_t i) {
            sum += to_f32(dy[i]);
            product += to_f32(dy[i]) * ((to_f32(x[i]) - mean) * rstd);
        });
        mean_g += gamma * sum / count;
        mean_gxh += gamma * product / count;
        if (call.partials) add_to_partial(partial_at(call, part, c, 0), first, sum, product);
    }
    for (int64_t c = begin; c < end && out; c++) {
        double gamma = gamma_at<T>(call, c), beta = dy ? 0 : beta_at<T>(call, c);
        each_place(c, [&](int64_t i) {
            double xh = (to_f32(x[i]) - mean) * rstd;
            double value = dy ? rstd * (gamma * to_f32(dy[i]) - mean_g - xh * mean_gxh) : gamma * xh + beta;
            write_one(out + i, (float)value, call.add);
        });
    }
}

template <class T> __global__ void __launch_bounds__(TINY_THREADS) tiny_groups(group_call call) {
    begin_chained();
    int64_t stride = (int64_t)gridDim.x * TINY_THREADS, items = call.parts * call.groups;
    for (int64_t item = (int64_t)blockIdx.x * TINY_THREADS + threadIdx.x; item < items; item += stride) {
        int64_t part = item / call.groups, begin = part * call.each;
        for (int64_t n = begin; n < begin + call.each && n < call.batch; n++)
            tiny_group<T>(call, n, item % call.groups, part, n == begin);
    }
}

/* ---- Up to 1024 elements: some lanes of a warp per group --------------------------------------------- */

/* 32 lanes, chains of 32. */
constexpr int64_t SMALL = 1024;
constexpr int SMALL_THREADS = 256;

/*
 * Lanes of a group, powers of two: `along` the plane, the others across channels. Channels first, adjacent lanes take
 * adjacent places of the plane (place_step 1); channels last, adjacent channels.
 */
struct small_split {
    int lanes, along, place_step, channel_step;
    int units; /* of a channel */
};

/* The sum over the lanes whose numbers differ by steps in [from, to). */
template <class S> __device__ S lanes_sum(S x, int from, int to) {
    for (int step = to / 2; step >= from; step /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

__device__ float lanes_largest(float x, int to) {
    for (int step = to / 2; step; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

/* One lane's part of a group. `units` is 0 for a lane that only takes part in the sums. */
template <class T, int WIDTH> struct small_group {
    const group_call &call;
    const small_split &split;
    int64_t base;
    int units, place, across, channel;

    template <class F> __device__ void each(int64_t c, F f) const {
        if (c >= call.group_channels) return;
        for (int k = place; k < units; k += split.along)
            f(base + c * call.channel_stride + (int64_t)k * WIDTH * call.place_stride);
    }

    __device__ unit<T, WIDTH> load(const void *from, int64_t at) const {
        return load_unit<T, WIDTH>(static_cast<const T *>(from) + at, call.aligned);
    }

    __device__ scale measure(int64_t row, bool save) const {
        double sum = 0, squares = 0, count = (double)(call.group_channels * call.plane);
        float largest = 0;
        for (int64_t c = channel; c < call.group_channels; c += across) {
            float chain = 0;
            each(c, [&](int64_t i) { add_first(load(call.x, i), chain, largest); });
            sum += chain;
        }
        center near = center_of(lanes_sum(sum, 1, split.lanes), count, lanes_largest(largest, split.lanes));
        sum = 0;
        for (int64_t c = channel; c < call.group_channels; c += across) {
            float chain = 0, square_chain = 0;
            each(c, [&](int64_t i) { add_second(load(call.x, i), near, chain, square_chain); });
            sum += chain;
            squares += square_chain;
        }
        moments m = moments_of(near, lanes_sum(sum, 1, split.lanes), lanes_sum(squares, 1, split.lanes), count);
        return measured_scale(call, row, m.mean, m.squares, save);
    }
};

template <class T, int WIDTH, bool BACKWARD>
__device__ void small(const group_call &call, const small_split &split, int64_t n, int64_t group, int64_t part,
                      bool first, bool here) {
    int lane = threadIdx.x % split.lanes, across = split.lanes / split.along;
    int64_t row = n * call.groups + group, group_first = group * call.group_channels;
    small_group<T, WIDTH> g{call,
                            split,
                            n * call.channels * call.plane + group_first * call.channel_stride,
                            here ? split.units : 0,
                            lane / split.place_step % split.along,
                            across,
                            lane / split.channel_step % across};
    scale s{0, 0, 0};
    if (!call.mean_in)
        s = g.measure(row, here && lane == 0);
    else if (here)
        s = saved_scale(call, row);
    affine map{0, 0};
    if constexpr (BACKWARD) {
        double sum_g = 0, sum_gxh = 0;
        for (int64_t from = 0; from < call.group_channels; from += across) { /* every lane, as the sums need them all */
            float chain = 0, product_chain = 0;
            int64_t c = from + g.channel;
            g.each(c, [&](int64_t i) { add_sums(g.load(call.x, i), g.load(call.dy, i), s, chain, product_chain); });
            chain = lanes_sum(chain, split.place_step, split.place_step * split.along);
            product_chain = lanes_sum(product_chain, split.place_step, split.place_step * split.along);
            if (g.place || c >= call.group_channels || !here) continue;
            double sum = chain, product = product_chain + (double)s.rest * sum;
            double gamma = gamma_at<T>(call, group_first + c);
            sum_g += gamma * sum;
            sum_gxh += gamma * product;
            if (call.partials) add_to_partial(partial_at(call, part, group_first + c, 0), first, sum, product);
        }
        map = backward_map(call, s, lanes_sum(sum_g, 1, split.lanes), lanes_sum(sum_gxh, 1, split.lanes));
    }
    if (!call.out) return;
    for (int64_t c = g.channel; c < call.group_channels; c += across) {
        float gamma = gamma_at<T>(call, group_first + c), weight = s.rstd * gamma;
        if constexpr (!BACKWARD) map = forward_map(s, gamma, beta_at<T>(call, group_first + c));
        g.each(c, [&](int64_t i) {
            unit<T, WIDTH> x = g.load(call.x, i), dy;
            if constexpr (BACKWARD) dy = g.load(call.dy, i);
            write_result<T, WIDTH>(call, i, x, BACKWARD ? &dy : nullptr, s, weight, map);
        });
    }
}

template <class T, int WIDTH, bool BACKWARD>
__global__ void __launch_bounds__(SMALL_THREADS, 3) small_groups(group_call call, small_split split) {
    begin_chained();
    int64_t block_groups = SMALL_THREADS / split.lanes, items = call.parts * call.groups;
    for (int64_t block = blockIdx.x; block * block_groups < items; block += gridDim.x) {
        int64_t item = block * block_groups + threadIdx.x / split.lanes;
        bool one = item < items;
        int64_t part = one ? item / call.groups : 0, group = one ? item % call.groups : 0;
        for (int64_t k = 0; k < call.each; k++) {
            int64_t n = part * call.each + k;
            bool here = one && n < call.batch;
            small<T, WIDTH, BACKWARD>(call, split, here ? n : 0, group, part, k == 0, here);
        }
    }
}

} // namespace
} // namespace vjp

#endif

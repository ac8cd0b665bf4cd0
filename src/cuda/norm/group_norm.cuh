/* SPDX-License-Identifier: MIT */
/*
 * What the kernels of group_norm share: the call as the device sees it, a group's scale, the affine maps that give y
 * and dx, and how elements are read and written.
 *
 * With xh = (x - mean) * rstd over a group and g = dy * gamma, all that the backward needs are two sums per channel, B
 * = sum of dy and S = sum of dy * xh: over the batch they are dbeta and dgamma, and weighted by gamma within a group
 * they are mean(g) and mean(g * xh), from which dx is computed (docs/ops/group_norm.md).
 *
 * Elements are handled in units: 16 bytes where the sizes allow it, otherwise one element. Sizes alone decide that and
 * the order of every sum; the alignment of the pointers only decides how a unit is loaded and stored, so it never
 * changes a bit.
 */
#ifndef VJP_CUDA_GROUP_NORM_CUH
#define VJP_CUDA_GROUP_NORM_CUH

#include "cuda/common/kernel.cuh"

namespace vjp {
namespace {

/* Units that one thread adds up in f32 in one chain: 2^24 terms of 0.1 stay within 1e-6. */
constexpr int CHAIN_UNITS = 32;

/*
 * xh = (x * rstd + shift) + rest, with -mean * rstd in two floats: one alone would cost 3e-5 of xh at 1000 +- 1. It is
 * not (x - mean) * rstd, because the last bits of the mean lie below those of most x: every difference would round them
 * off in the same direction, and a sum of 2^22 of them would show it. The last bits of the product are as good as
 * random.
 */
struct scale {
    float rstd, shift, rest;
};

__device__ float normalise(float x, scale s) {
    return fmaf(x, s.rstd, s.shift);
}

/* slope * xh + level, xh without its rest: y itself, or dx = rstd * gamma * dy + (slope * xh + level). */
struct affine {
    float slope, level;
};

struct group_call {
    const void *x, *dy; /* dy is NULL in the forward */
    void *out;          /* y or dx; NULL: not wanted */
    parameter gamma, beta;
    const float *mean_in, *rstd_in; /* both or none */
    float *mean_out, *rstd_out;
    double eps, share; /* share: 1 / elements of a group */
    int64_t batch, channels, groups, group_channels, plane;
    int64_t channel_stride, place_stride;

    /*
     * Sums per channel for dgamma and dbeta, in the workspace: (part, channel, chunk) is at part * part_step + channel
     * * channel_step + chunk * chunk_step. A part is `each` adjacent items of the batch; a chunk is `chunk` places of
     * the plane. NULL: not wanted.
     */
    double2 *partials;
    int64_t parts, each;
    int64_t chunks, chunk;
    int64_t part_step, channel_step, chunk_step;

    /* Per group of each item of the batch, in the workspace, where one kernel passes them to the next. */
    scale *scales;
    affine *maps;

    bool add, aligned;
};

/* ---- Units ------------------------------------------------------------------------------------------- */

template <class T, int WIDTH> struct alignas(WIDTH * sizeof(T)) unit { T v[WIDTH]; };

template <class T, int WIDTH> __device__ unit<T, WIDTH> load_unit(const T *from, bool aligned) {
    unit<T, WIDTH> u;
    if constexpr (WIDTH > 1) {
        if (aligned) {
            *reinterpret_cast<uint4 *>(&u) = *reinterpret_cast<const uint4 *>(from);
            return u;
        }
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
        u.v[i] = from[i];
    return u;
}

/* Overwrites the values. With `add` the old ones are read first, behind a branch that costs nothing otherwise. */
template <class T, int WIDTH> __device__ void write_unit(T *to, float (&values)[WIDTH], bool aligned, bool add) {
    if (add) {
        unit<T, WIDTH> old = load_unit<T, WIDTH>(to, aligned);
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            values[i] += to_f32(old.v[i]);
    }
    if constexpr (WIDTH > 1) {
        if (aligned) {
            write_wide<T>(to, values, false);
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
        write_one<T>(to + i, values[i], false);
}

template <class T, int WIDTH> __device__ void to_floats(const unit<T, WIDTH> &u, float (&values)[WIDTH]) {
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
        values[i] = to_f32(u.v[i]);
}

/* Two from a word, with one instruction each: element by element the upper one would take two. */
template <int WIDTH>
requires(WIDTH > 1) __device__ void to_floats(const unit<bf16, WIDTH> &u, float (&values)[WIDTH]) {
    unsigned words[WIDTH / 2];
    memcpy(words, &u, sizeof words);
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) {
        values[2 * i] = __int_as_float((int)(words[i] << 16));
        values[2 * i + 1] = __int_as_float((int)(words[i] & 0xffff0000u));
    }
}

/* As a tree. Overwrites the values. */
template <int WIDTH> __device__ float add_up(float (&values)[WIDTH]) {
#pragma unroll
    for (int half = WIDTH / 2; half; half /= 2)
#pragma unroll
        for (int i = 0; i < half; i++)
            values[i] += values[i + half];
    return values[0];
}

/* Adds a unit's terms to a thread's chains of `sum` (of dy) and `product` (of dy * xh). */
template <class T, int WIDTH>
__device__ void add_sums(const unit<T, WIDTH> &x, const unit<T, WIDTH> &dy, scale s, float &sum, float &product) {
    float xh[WIDTH], d[WIDTH];
    to_floats(x, xh);
    to_floats(dy, d);
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
        xh[i] = normalise(xh[i], s) * d[i];
    product += add_up(xh);
    sum += add_up(d);
}

/* y of a unit: slope * xh + level; with dy its dx, which adds weight * dy. */
template <class T, int WIDTH>
__device__ void write_result(const group_call &call, int64_t at, const unit<T, WIDTH> &x, const unit<T, WIDTH> *dy,
                             scale s, float weight, affine map) {
    float value[WIDTH], d[WIDTH];
    to_floats(x, value);
    if (dy) to_floats(*dy, d);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        value[i] = fmaf(map.slope, normalise(value[i], s), map.level);
        if (dy) value[i] = fmaf(weight, d[i], value[i]);
    }
    write_unit<T, WIDTH>(static_cast<T *>(call.out) + at, value, call.aligned, call.add);
}

/* ---- Moments ----------------------------------------------------------------------------------------- */

/* Of some elements: their count, their mean, and the sum of their squared distances from it. */
struct moments {
    double count, mean, squares;
};

/*
 * Elements are read twice: their sum in f32 gives a center near the mean, and then the sum of the distances from it
 * corrects the mean. So neither an offset of 1000 nor an outlier costs digits. Distances are scaled, so that their
 * squares stay within f32 at 1e20 and at 1e-20; the scale is no power of two, for the same reason that xh is not (x -
 * mean) * rstd.
 */
struct center {
    float scale, shift; /* distance = x * scale + shift */
};

constexpr float UNEVEN = 1.2360680f;

__device__ center center_of(double sum, double count, float largest) {
    int exponent = __float_as_int(largest) >> 23; /* biased: 0 for the smallest numbers, 255 for infinity */
    exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
    float scale = __int_as_float((254 - exponent) << 23) * UNEVEN;
    /* Elements near 1e38 are finite, but their sum in f32 may not be: then distances are from 0. */
    bool usable = isfinite(sum) || !isfinite(largest);
    return {scale, count > 0 && usable ? (float)(-sum / count * scale) : 0.0f};
}

__device__ moments moments_of(center near, double sum, double squares, double count) {
    if (!(count > 0)) return {0, 0, 0};
    /* 1 / scale, a power of two times UNEVEN, without a division. */
    int exponent = __float_as_int(near.scale) >> 23;
    double inverse = __int_as_float((254 - exponent) << 23) * (1 / (double)UNEVEN), offset = sum / count;
    double rest = (squares - sum * offset) * inverse * inverse;
    return {count, (offset - near.shift) * inverse, rest < 0 ? 0 : rest};
}

template <class T, int WIDTH> __device__ void add_first(const unit<T, WIDTH> &x, float &sum, float &largest) {
    float value[WIDTH];
    to_floats(x, value);
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
        largest = fmaxf(largest, fabsf(value[i]));
    sum += add_up(value);
}

template <class T, int WIDTH>
__device__ void add_second(const unit<T, WIDTH> &x, center near, float &sum, float &squares) {
    float value[WIDTH], square[WIDTH];
    to_floats(x, value);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        value[i] = fmaf(value[i], near.scale, near.shift);
        square[i] = value[i] * value[i];
    }
    sum += add_up(value);
    squares += add_up(square);
}

/* ---- Scales and maps --------------------------------------------------------------------------------- */

__device__ scale scale_of(double mean, double rstd) {
    float near = (float)rstd, shift = (float)(-mean * near);
    return {near, shift, (float)(-mean * near - shift)};
}

__device__ scale saved_scale(const group_call &call, int64_t row) {
    return scale_of(call.mean_in[row], call.rstd_in[row]);
}

/* From the moments of the whole group. `save`: this thread writes the statistics. */
__device__ scale measured_scale(const group_call &call, int64_t row, double mean, double squares, bool save) {
    double variance = squares * call.share, rstd = rsqrt(variance + call.eps);
    if (save && call.mean_out) call.mean_out[row] = (float)mean;
    if (save && call.rstd_out) call.rstd_out[row] = (float)rstd;
    return scale_of(mean, rstd);
}

/* From the group's sums of g and g * xh. */
__device__ affine backward_map(const group_call &call, scale s, double sum_g, double sum_gxh) {
    double slope = -(double)s.rstd * (sum_gxh * call.share);
    return {(float)slope, (float)(-(double)s.rstd * (sum_g * call.share) + slope * s.rest)};
}

/* The map of a channel's y. */
__device__ affine forward_map(scale s, float gamma, float beta) {
    return {gamma, (float)(beta + (double)gamma * s.rest)};
}

template <class T> __device__ float gamma_at(const group_call &call, int64_t channel) {
    return call.gamma.data ? read_parameter<T>(call.gamma, channel) : 1.0f;
}

template <class T> __device__ float beta_at(const group_call &call, int64_t channel) {
    return call.beta.data ? read_parameter<T>(call.beta, channel) : 0.0f;
}

__device__ double2 *partial_at(const group_call &call, int64_t part, int64_t channel, int64_t chunk) {
    return call.partials + part * call.part_step + channel * call.channel_step + chunk * call.chunk_step;
}

/* One thread owns a partial; the first item of its part of the batch sets it. */
__device__ void add_to_partial(double2 *partial, bool first, double sum, double product) {
    double2 old = first ? double2{0, 0} : *partial;
    *partial = {old.x + sum, old.y + product};
}

} // namespace
} // namespace vjp

#endif

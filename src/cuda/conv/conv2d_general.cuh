/* SPDX-License-Identifier: MIT */
/*
 * conv2d, the general path: any sizes, groups and layout, with 64-bit indices. A thread computes one element of y or
 * dx, a block one element of dweight. Taps over padding are left out.
 *
 * Sums are chains of at most CHAIN terms in f32, added in double.
 */
#ifndef VJP_CUDA_CONV2D_GENERAL_CUH
#define VJP_CUDA_CONV2D_GENERAL_CUH

#include "cuda/common/kernel.cuh"

namespace vjp {
namespace {

constexpr int THREADS = 256;

/* A picture's element (n, c, h, w) is at n*image + c*channel + (h*width + w)*pixel. */
struct picture {
    int64_t channels, height, width, image, channel, pixel;
};

picture picture_of(bool channels_last, int64_t channels, int64_t height, int64_t width) {
    int64_t plane = height * width;
    return {channels, height, width, plane * channels, channels_last ? 1 : plane, channels_last ? channels : 1};
}

struct conv_call {
    picture x, y;
    picture window;                /* of weight: [out_channels] images of channels / groups x kernel */
    int64_t batch, channels, outs; /* channels and outs of a group */
    int64_t stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
    bool channels_last;
    const void *x_data, *y_data, *weight; /* y_data: dy */
    void *result;                         /* y or dx */
    bool add;
    parameter bias;
    parameter_output dweight, dbias;
};

struct quotient {
    int64_t quotient, rest;
};

/* 32-bit division takes a fifth of the time. */
__device__ inline quotient divide(int64_t a, int64_t b) {
    if (((a | b) >> 32) == 0) return {(int64_t)((unsigned)a / (unsigned)b), (int64_t)((unsigned)a % (unsigned)b)};
    return {a / b, a % b};
}

struct element {
    int64_t n, c, h, w;
};

/* The coordinates of element i in memory order. */
__device__ inline element element_of(const picture &p, bool channels_last, int64_t i) {
    if (channels_last) {
        quotient c = divide(i, p.channels), w = divide(c.quotient, p.width), h = divide(w.quotient, p.height);
        return {h.quotient, c.rest, h.rest, w.rest};
    }
    quotient w = divide(i, p.width), h = divide(w.quotient, p.height), c = divide(h.quotient, p.channels);
    return {c.quotient, c.rest, h.rest, w.rest};
}

/* N sums: f32 chains of CHAIN terms, added in double. */
template <int N> struct chained_sums {
    double total[N] = {};
    float chain[N] = {};
    int terms = 0;

    /* After `more` terms have been added to each chain; CHAIN is a multiple of them. */
    __device__ void count(int more) {
        if ((terms += more) < (int)CHAIN) return;
#pragma unroll
        for (int i = 0; i < N; i++) {
            total[i] += chain[i];
            chain[i] = 0;
        }
        terms = 0;
    }
    __device__ double value(int i = 0) const {
        return total[i] + chain[i];
    }
};

/* A sum of products. */
struct chained_sum : chained_sums<1> {
    __device__ void add(float a, float b) {
        chain[0] = fmaf(a, b, chain[0]);
        count(1);
    }
};

template <class T> __global__ void __launch_bounds__(THREADS) forward_general(const __grid_constant__ conv_call q) {
    begin_chained();
    const T *x = static_cast<const T *>(q.x_data), *weight = static_cast<const T *>(q.weight);
    T *y = static_cast<T *>(q.result);
    int64_t elements = q.batch * q.y.image;
    for (int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x; t < elements; t += (int64_t)gridDim.x * THREADS) {
        element e = element_of(q.y, q.channels_last, t);
        const T *image = x + e.n * q.x.image + divide(e.c, q.outs).quotient * q.channels * q.x.channel;
        const T *window = weight + e.c * q.window.image;
        chained_sum sum;
        for (int64_t u = 0; u < q.window.height; u++) {
            int64_t h = e.h * q.stride_h - q.padding_h + u * q.dilation_h;
            if (h < 0 || h >= q.x.height) continue;
            for (int64_t v = 0; v < q.window.width; v++) {
                int64_t w = e.w * q.stride_w - q.padding_w + v * q.dilation_w;
                if (w < 0 || w >= q.x.width) continue;
                const T *a = image + (h * q.x.width + w) * q.x.pixel;
                const T *b = window + (u * q.window.width + v) * q.window.pixel;
                for (int64_t c = 0; c < q.channels; c++)
                    sum.add(to_f32(a[c * q.x.channel]), to_f32(b[c * q.window.channel]));
            }
        }
        double value = sum.value();
        if (q.bias.data) value += (double)read_parameter<T>(q.bias, e.c);
        write_one(y + t, (float)value, q.add);
    }
}

/* Whether a tap at distance `offset` from the first window's start begins a window; then which one. */
__device__ inline bool find_window(int64_t offset, int64_t stride, int64_t windows, int64_t &window) {
    if (offset < 0) return false;
    quotient q = divide(offset, stride);
    window = q.quotient;
    return q.rest == 0 && q.quotient < windows;
}

template <class T> __global__ void __launch_bounds__(THREADS) dx_general(const __grid_constant__ conv_call q) {
    begin_chained();
    const T *dy = static_cast<const T *>(q.y_data), *weight = static_cast<const T *>(q.weight);
    T *dx = static_cast<T *>(q.result);
    int64_t elements = q.batch * q.x.image;
    for (int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x; t < elements; t += (int64_t)gridDim.x * THREADS) {
        element e = element_of(q.x, q.channels_last, t);
        quotient group = divide(e.c, q.channels);
        int64_t first = group.quotient * q.outs;
        const T *image = dy + e.n * q.y.image + first * q.y.channel;
        const T *windows = weight + first * q.window.image + group.rest * q.window.channel;
        chained_sum sum;
        for (int64_t u = 0; u < q.window.height; u++) {
            int64_t i, j;
            if (!find_window(e.h + q.padding_h - u * q.dilation_h, q.stride_h, q.y.height, i)) continue;
            for (int64_t v = 0; v < q.window.width; v++) {
                if (!find_window(e.w + q.padding_w - v * q.dilation_w, q.stride_w, q.y.width, j)) continue;
                const T *a = image + (i * q.y.width + j) * q.y.pixel;
                const T *b = windows + (u * q.window.width + v) * q.window.pixel;
                for (int64_t o = 0; o < q.outs; o++)
                    sum.add(to_f32(a[o * q.y.channel]), to_f32(b[o * q.window.image]));
            }
        }
        write_one(dx + t, (float)sum.value(), q.add);
    }
}

/* A block computes one element of dweight: its threads take pixels in turn. */
template <class T> __global__ void __launch_bounds__(THREADS) dweight_general(const __grid_constant__ conv_call q) {
    __shared__ block_sums<double, 1, THREADS> shared;
    begin_chained();
    const T *x = static_cast<const T *>(q.x_data), *dy = static_cast<const T *>(q.y_data);
    int64_t elements = q.y.channels * q.window.image, plane = q.y.height * q.y.width, pixels = q.batch * plane;
    int turn = 0;
    for (int64_t t = blockIdx.x; t < elements; t += gridDim.x) {
        element e = element_of(q.window, q.channels_last, t); /* n: the out channel; h, w: the tap */
        int64_t channel = divide(e.n, q.outs).quotient * q.channels + e.c;
        const T *a = dy + e.n * q.y.channel, *b = x + channel * q.x.channel;
        int64_t down = e.h * q.dilation_h - q.padding_h, across = e.w * q.dilation_w - q.padding_w;
        chained_sum sum;
        for (int64_t p = threadIdx.x; p < pixels; p += THREADS) {
            quotient n = divide(p, plane), row = divide(n.rest, q.y.width);
            int64_t h = row.quotient * q.stride_h + down, w = row.rest * q.stride_w + across;
            if (h < 0 || h >= q.x.height || w < 0 || w >= q.x.width) continue;
            sum.add(to_f32(a[n.quotient * q.y.image + n.rest * q.y.pixel]),
                    to_f32(b[n.quotient * q.x.image + (h * q.x.width + w) * q.x.pixel]));
        }
        double total[1] = {sum.value()};
        block_sum(total, shared, turn);
        if (threadIdx.x == 0) write_parameter<T>(q.dweight, t, (float)total[0]);
    }
}

} // namespace
} // namespace vjp

#endif

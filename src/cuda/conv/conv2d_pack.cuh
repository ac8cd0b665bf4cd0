/* SPDX-License-Identifier: MIT */
/*
 * Copies pictures and weights of any layout and alignment to what conv2d's tiles read: channels last, each group padded
 * with zeros to whole runs of 16 bytes.
 */
#ifndef VJP_CUDA_CONV2D_PACK_CUH
#define VJP_CUDA_CONV2D_PACK_CUH

#include "cuda/conv/conv2d_general.cuh"

namespace vjp {
namespace {

/* A tile of pixels x channels passes through shared memory, so that reads and writes are of neighbours. */
constexpr int PACK = 64;

struct pack_call {
    const void *from;
    void *to;       /* [images, pixels, groups, padded] */
    picture source; /* from */
    int64_t images, pixels;
    int groups, channels, padded; /* channels of a group */
    bool channels_last;
    int64_t pixel_tiles, channel_tiles;
};

template <class T> __global__ void __launch_bounds__(THREADS) pack_picture(const __grid_constant__ pack_call q) {
    constexpr int PITCH = PACK + 4 / (int)sizeof(T); /* an odd number of words */
    constexpr int W = WIDE<T>, VECTORS = PACK / W;
    __shared__ T tile[PACK * PITCH];
    begin_chained();
    quotient at = divide(blockIdx.x, q.channel_tiles), image = divide(at.quotient, q.pixel_tiles);
    int64_t first_pixel = image.rest * PACK;
    int first_channel = (int)at.rest * PACK, channels = q.groups * q.padded;
    const T *from = static_cast<const T *>(q.from) + image.quotient * q.source.image;
    for (int i = (int)threadIdx.x; i < PACK * PACK; i += THREADS) {
        int fast = i % PACK, slow = i / PACK, pixel = q.channels_last ? slow : fast, c = q.channels_last ? fast : slow;
        int group = (first_channel + c) / q.padded, channel = (first_channel + c) % q.padded;
        bool present = first_pixel + pixel < q.pixels && group < q.groups && channel < q.channels;
        tile[pixel * PITCH + c] = present ? from[(first_pixel + pixel) * q.source.pixel +
                                                 ((int64_t)group * q.channels + channel) * q.source.channel]
                                          : from_f32<T>(0.0f);
    }
    __syncthreads();
    T *to = static_cast<T *>(q.to) + image.quotient * q.pixels * channels;
    for (int i = (int)threadIdx.x; i < PACK * VECTORS; i += THREADS) {
        int pixel = i / VECTORS, c = i % VECTORS * W;
        if (first_pixel + pixel >= q.pixels || first_channel + c >= channels) continue;
        wide<T> run;
#pragma unroll
        for (int j = 0; j < W; j++)
            run.v[j] = tile[pixel * PITCH + c + j];
        store_wide(to + (first_pixel + pixel) * channels + first_channel + c, run);
    }
}

struct pack_weight_call {
    const void *from;
    void *to; /* [groups, columns, taps, padded] */
    picture window;
    int groups, channels, outs, taps, padded; /* channels and outs of a group */
    bool transposed;                          /* columns are channels and runs are out channels, for dx */
};

template <class T> __global__ void __launch_bounds__(THREADS) pack_weight(const __grid_constant__ pack_weight_call q) {
    begin_chained();
    int columns = q.transposed ? q.channels : q.outs, terms = q.transposed ? q.outs : q.channels;
    int64_t elements = (int64_t)q.groups * columns * q.taps * q.padded;
    for (int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x; t < elements; t += (int64_t)gridDim.x * THREADS) {
        quotient term = divide(t, q.padded), tap = divide(term.quotient, q.taps),
                 column = divide(tap.quotient, columns);
        int64_t c = q.transposed ? column.rest : term.rest, o = q.transposed ? term.rest : column.rest;
        int64_t at = (column.quotient * q.outs + o) * q.window.image + c * q.window.channel + tap.rest * q.window.pixel;
        static_cast<T *>(q.to)[t] = term.rest < terms ? static_cast<const T *>(q.from)[at] : from_f32<T>(0.0f);
    }
}

} // namespace
} // namespace vjp

#endif

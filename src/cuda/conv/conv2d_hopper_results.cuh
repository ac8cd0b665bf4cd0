/* SPDX-License-Identifier: MIT */
/*
 * How y and dx are written on Hopper (conv2d_hopper_windows.cu): from the accumulators of a warpgroup to either layout,
 * in 16 bytes where that is possible.
 *
 *     function       rows of the accumulators             columns
 *     write_last     pixels                               channels, contiguous in the result
 *     write_first    channels                             pixels, contiguous in the result
 *     write_fours    pixels, four to a thread (TF32)      channels; the pixels are contiguous
 *
 * `bias`: what has been read of it before the products, of the channels that are columns, or of the thread's rows.
 * NULL: nothing.
 */
#ifndef VJP_CUDA_CONV2D_HOPPER_RESULTS_CUH
#define VJP_CUDA_CONV2D_HOPPER_RESULTS_CUH

#include "cuda/conv/conv2d_hopper.cuh"
#include "cuda/conv/conv2d_hopper_transposed.cuh"

namespace vjp {
namespace hopper {
namespace {

struct windows_call {
    CUtensorMap source, weight;
    void *result;
    parameter bias;
    bool add, shares_pixels;
    bool whole; /* results are written in 16 bytes */
    bool pairs; /* or two at a time */
    walk_axis down, across;
    tap_axis tap_down, tap_across;
    result_axis result_down, result_across;
    int kernel_w, columns, plane, rows; /* plane: pixels of the walk over an image, rows: of all */
    int width;                          /* results in a row of the walk */
    int channel_steps, stages;          /* stages: of a tile */
    int image_tiles;                    /* tiles of an image, of ALONG */
    int pixel_tiles, column_tiles;      /* one of them a multiple of CLUSTER */
};

#if VJP_HOPPER

/*
 * Each thread of a quad has 32 bits of each of four chunks of 16 bytes; of chunk i it has those at its own place. It
 * gets the chunk of its own number.
 */
__device__ inline uint4 gather_quad(const uint32_t (&own)[4]) {
    bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    uint32_t got[2], a[4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        got[i] = __shfl_xor_sync(0xffffffffu, odd ? own[2 * i] : own[2 * i + 1], 1);
        a[2 * i] = odd ? got[i] : own[2 * i];
        a[2 * i + 1] = odd ? own[2 * i + 1] : got[i];
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        got[i] = __shfl_xor_sync(0xffffffffu, upper ? a[i] : a[2 + i], 2);
    return upper ? uint4{got[0], got[1], a[2], a[3]} : uint4{a[0], a[1], got[0], got[1]};
}

/* Writes two neighbours, or adds to them: with `add` the sum is rounded once. */
template <class T> __device__ void write_two(T *to, float low, float high, bool add) {
    if constexpr (sizeof(T) == 4) {
        auto *two = reinterpret_cast<float2 *>(to);
        float2 old = add ? *two : float2{0, 0};
        *two = {low + old.x, high + old.y};
    } else {
        auto *two = reinterpret_cast<uint32_t *>(to);
        float2 old = add ? unpack_two<T>(*two) : float2{0, 0};
        *two = pack_two<T>(low + old.x, high + old.y);
    }
}

/* Not inlined, because it is needed for odd sizes alone. NULL: not there. */
template <class T> __device__ __noinline__ void write_each(T *first, T *second, float low, float high, bool add) {
    if (first) write_one(first, low, add);
    if (second) write_one(second, high, add);
}

/* The place of a pixel of the walk in a plane of the result, and its image. */
struct pixel_place {
    int image, at;
    bool inside; /* not behind the end of its row */
};

__device__ inline pixel_place place_of(const windows_call &c, int pixel) {
    int image = pixel / c.plane, rest = pixel % c.plane;
    int row = rest / c.across.count * c.result_down.apart + c.result_down.first, column = rest % c.across.count;
    return {image, row * c.result_across.size + column * c.result_across.apart + c.result_across.first,
            column < c.width};
}

template <class T> __device__ float bias_of(const windows_call &c, int column) {
    return c.bias.data && column < c.columns ? read_parameter<T>(c.bias, column) : 0.f;
}

/* Row i of the thread, which has two of each 64. */
__device__ inline int accumulator_row(int i) {
    int thread = threadIdx.x % WARPGROUP;
    return i / 2 * 64 + thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
}

/* Pixels are rows, channels columns. */
template <class T, int ROWS64, int OUTS>
__device__ void write_last(const windows_call &c, int first_pixel, int first_column,
                           const float (&sum)[ROWS64][OUTS / 2], const float *bias) {
    int quad = threadIdx.x % 4;
    T *to[2 * ROWS64];
#pragma unroll
    for (int i = 0; i < 2 * ROWS64; i++) {
        int pixel = first_pixel + accumulator_row(i);
        pixel_place p = place_of(c, pixel);
        int64_t plane = (int64_t)c.result_down.size * c.result_across.size;
        bool present = pixel < c.rows && p.inside;
        to[i] = present ? static_cast<T *>(c.result) + (p.image * plane + p.at) * c.columns : nullptr;
    }
#pragma unroll
    for (int t = 0; t < OUTS / 32; t++) {
        float plus[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int column = t * 32 + j / 2 * 8 + quad * 2 + j % 2;
            plus[j] = bias ? bias[column] : bias_of<T>(c, first_column + column);
        }
#pragma unroll
        for (int i = 0; i < 2 * ROWS64; i++) {
            float values[8];
#pragma unroll
            for (int j = 0; j < 8; j++)
                values[j] = sum[i / 2][t * 16 + j / 2 * 4 + i % 2 * 2 + j % 2] + plus[j];
            if constexpr (sizeof(T) == 2)
                if (c.whole) {
                    uint32_t two[4];
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        two[j] = pack_two<T>(values[2 * j], values[2 * j + 1]);
                    uint4 chunk = gather_quad(two);
                    int column = first_column + t * 32 + quad * 8;
                    if (to[i] && column < c.columns) *reinterpret_cast<uint4 *>(to[i] + column) = chunk;
                    continue;
                }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int column = first_column + t * 32 + j * 8 + quad * 2;
                if (!to[i] || column >= c.columns) continue;
                if (c.pairs)
                    write_two(to[i] + column, values[2 * j], values[2 * j + 1], c.add);
                else
                    write_each(to[i] + column, column + 1 < c.columns ? to[i] + column + 1 : nullptr, values[2 * j],
                               values[2 * j + 1], c.add);
            }
        }
    }
}

/* Channels are rows, pixels columns: those of the walk over `image` and the next ones, `pixels` of them in all. */
template <class T, int ROWS64, int PIXELS>
__device__ void write_first(const windows_call &c, int image, int first_pixel, int pixels, int first_column,
                            const float (&sum)[ROWS64][PIXELS / 2], const float *bias) {
    int quad = threadIdx.x % 4;
    int64_t plane = (int64_t)c.result_down.size * c.result_across.size;
    auto *result = static_cast<T *>(c.result) + (int64_t)image * c.columns * plane;
    auto place = [&](int pixel) {
        pixel_place p = place_of(c, pixel);
        return pixel < pixels && p.inside ? result + (int64_t)p.image * c.columns * plane + p.at : nullptr;
    };
#pragma unroll
    for (int t = 0; t < PIXELS / 32; t++) {
        T *whole = nullptr, *two[4] = {}, *next[4] = {};
        int chunk_pixel = first_pixel + t * 32 + quad * 8;
        if (c.whole) {
            whole = place(chunk_pixel);
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int pixel = first_pixel + t * 32 + j * 8 + quad * 2;
                two[j] = place(pixel);
                if (!c.pairs) next[j] = place(pixel + 1);
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * ROWS64; i++) {
            int column = first_column + accumulator_row(i);
            bool inside = column < c.columns;
            float plus = bias ? bias[i] : bias_of<T>(c, column), values[8];
#pragma unroll
            for (int j = 0; j < 8; j++)
                values[j] = sum[i / 2][t * 16 + j / 2 * 4 + i % 2 * 2 + j % 2] + plus;
            if constexpr (sizeof(T) == 2)
                if (c.whole) {
                    uint32_t packed[4];
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        packed[j] = pack_two<T>(values[2 * j], values[2 * j + 1]);
                    uint4 chunk = gather_quad(packed);
                    if (whole && inside) *reinterpret_cast<uint4 *>(whole + column * plane) = chunk;
                    continue;
                }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (!inside || (c.pairs && !two[j])) continue;
                if (c.pairs)
                    write_two(two[j] + column * plane, values[2 * j], values[2 * j + 1], c.add);
                else
                    write_each(two[j] ? two[j] + column * plane : nullptr, next[j] ? next[j] + column * plane : nullptr,
                               values[2 * j], values[2 * j + 1], c.add);
            }
        }
    }
}

/* Pixels are rows, in the order of transposed_left: a thread has four successive ones, of one image. */
template <class T, int OUTS>
__device__ void write_fours(const windows_call &c, int image, int first_pixel, int first_column,
                            const float (&sum)[2][OUTS / 2], const float *bias) {
    int thread = threadIdx.x % WARPGROUP, pixel = first_pixel + thread / 32 * BOX_ROWS + own_rows();
    if (image * c.plane >= c.rows || pixel >= c.plane) return; /* planes are whole runs of four */
    T *result = static_cast<T *>(c.result) + (int64_t)image * c.columns * c.plane + pixel;
#pragma unroll
    for (int j = 0; j < OUTS / 4; j++) {
        int column = first_column + j / 2 * 8 + thread % 4 * 2 + j % 2;
        if (column >= c.columns) continue;
        float plus = bias ? bias[column - first_column] : bias_of<T>(c, column), values[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            values[i] = sum[i / 2][j / 2 * 4 + i % 2 * 2 + j % 2] + plus;
        T *to = result + (int64_t)column * c.plane;
        if (c.whole) {
            write_wide(to, values, c.add);
        } else {
            write_each(to, to + 1, values[0], values[1], c.add);
            write_each(to + 2, to + 3, values[2], values[3], c.add);
        }
    }
}

#endif

} // namespace
} // namespace hopper
} // namespace vjp

#endif

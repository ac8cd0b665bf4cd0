/* SPDX-License-Identifier: MIT */
/*
 * conv2d's dbias: sums of dy over all pixels, per channel. Reads dy once.
 *
 *     kernel          for               a block sums
 *     dbias_planes    channels first    a chunk of pixels of a channel
 *     dbias_pixels    channels last     a chunk of pixels of up to 32 runs of channels
 *     dbias_sum       both              (a warp adds the chunks of a channel)
 *
 * On Hopper dweight has the chunks' sums where it is wanted, too (conv2d_hopper_bias.cuh).
 *
 * A thread adds runs of 16 bytes. Aligned runs are copied to shared memory, several at a time: through registers, the
 * compiler would wait for one before it reads the next. Other runs are read element by element.
 *
 * Terms are added in chains of CHAIN in f32, chains and threads in double, along fixed trees. The sizes alone decide
 * which thread adds which terms.
 */
#ifndef VJP_CUDA_CONV2D_BIAS_CUH
#define VJP_CUDA_CONV2D_BIAS_CUH

#include "cuda/conv/conv2d_pack.cuh"

namespace vjp {
namespace {

/* Pixels are split into at most CHUNKS chunks, of at least this many: for planes, and for a thread of dbias_pixels. */
constexpr int64_t MIN_PLANE_CHUNK = 8192, MIN_THREAD_PIXELS = 8;

struct bias_split {
    bool channels_last; /* a plane of one pixel counts as such */
    bool aligned;       /* all runs are */
    int across;         /* channels last: threads over runs of channels, a power of two */
    int64_t tiles;      /* of channels */
    int64_t chunk, chunks;
    double *partial; /* [channels, chunks] */
};

template <class T> bias_split bias_split_of(const conv_call &q) {
    bias_split s{};
    int64_t plane = q.y.height * q.y.width, pixels = q.batch * plane;
    s.channels_last = q.channels_last || plane == 1;
    s.aligned = is_aligned(q.y_data, 16) && (s.channels_last ? q.y.channels : plane) % WIDE<T> == 0;
    s.across = 1;
    if (s.channels_last)
        while (s.across < 32 && s.across * WIDE<T> < q.y.channels)
            s.across *= 2;
    s.tiles = s.channels_last ? vjp_divide_up(q.y.channels, s.across * WIDE<T>) : q.y.channels;
    int64_t min_chunk = s.channels_last ? MIN_THREAD_PIXELS * (THREADS / s.across) : MIN_PLANE_CHUNK;
    s.chunk = vjp_max(min_chunk, vjp_round_up(vjp_divide_up(pixels, CHUNKS), WIDE<T>));
    s.chunks = vjp_divide_up(pixels, s.chunk);
    return s;
}

/*
 * A thread's aligned runs on their way, in a column of shared memory that only it reads: N requests first, then take()
 * and request() in turn. take() returns the oldest run.
 */
template <int N> struct incoming_runs {
    uint4 *column;
    int oldest = 0;

    __device__ explicit incoming_runs(uint4 (&shared)[N * THREADS]) : column(shared + threadIdx.x) {
    }
    __device__ void request(const void *from, bool present) {
        if (present) copy_async(column + oldest * THREADS, from);
        commit_copies();
        oldest = (oldest + 1) % N;
    }
    __device__ uint4 take() const {
        wait_copies<N - 1>();
        return column[oldest * THREADS];
    }
};

template <class T, bool ALIGNED>
__global__ void __launch_bounds__(THREADS) dbias_planes(const __grid_constant__ conv_call q, bias_split s) {
    constexpr int W = WIDE<T>, STEP = THREADS * W, IN_FLIGHT = 4;
    __shared__ block_sums<double, 1, THREADS> shared;
    __shared__ uint4 slots[IN_FLIGHT * THREADS];
    begin_chained();
    incoming_runs<IN_FLIGHT> runs(slots);
    const T *dy = static_cast<const T *>(q.y_data);
    int64_t plane = q.y.height * q.y.width, pixels = q.batch * plane;
    quotient step = divide(STEP, plane); /* images and pixels from a thread's run to its next */
    int turn = 0;
    for (int64_t t = blockIdx.x; t < s.chunks * s.tiles; t += gridDim.x) {
        quotient chunk = divide(t, s.tiles);
        int64_t channel = chunk.rest, begin = chunk.quotient * s.chunk;
        int64_t end = begin + s.chunk < pixels ? begin + s.chunk : pixels;
        /* Pixel `ahead` of all images is the next to be read: pixel in_plane of its image, at dy + at. */
        int64_t ahead = begin + (int)threadIdx.x * W;
        quotient image = divide(ahead, plane);
        int64_t in_plane = image.rest, at = image.quotient * q.y.image + channel * plane + in_plane;
        auto advance = [&] {
            ahead += STEP;
            at += step.quotient * q.y.image + step.rest;
            in_plane += step.rest;
            if (in_plane >= plane) {
                in_plane -= plane;
                at += q.y.image - plane;
            }
        };
        auto request = [&] {
            runs.request(dy + at, ahead < end);
            advance();
        };
        /* A run may be of several images; the last may have fewer pixels. */
        auto gather = [&] {
            bits_of<T> v[W];
            int64_t next = at, next_in_plane = in_plane;
#pragma unroll
            for (int i = 0; i < W; i++) {
                v[i] = ahead + i < end ? reinterpret_cast<const bits_of<T> *>(dy)[next] : bits_of<T>(0);
                next++;
                if (++next_in_plane == plane) {
                    next_in_plane = 0;
                    next += q.y.image - plane;
                }
            }
            advance();
            return run_of(v);
        };
        if constexpr (ALIGNED)
            for (int i = 0; i < IN_FLIGHT; i++)
                request();
        chained_sums<1> sums;
        for (int64_t p = begin + (int)threadIdx.x * W; p < end; p += STEP) {
            uint4 run;
            if constexpr (ALIGNED) {
                run = runs.take();
                request();
            } else {
                run = gather();
            }
            float v[W];
            unpack<T>(run, v);
#pragma unroll
            for (int i = 0; i < W; i++)
                sums.chain[0] += v[i];
            sums.count(W);
        }
        double sum[1] = {sums.value()};
        block_sum(sum, shared, turn);
        if (threadIdx.x == 0) s.partial[channel * s.chunks + chunk.quotient] = sum[0];
    }
}

template <class T, bool ALIGNED>
__global__ void __launch_bounds__(THREADS) dbias_pixels(const __grid_constant__ conv_call q, bias_split s) {
    constexpr int W = WIDE<T>, IN_FLIGHT = 8;
    __shared__ uint4 slots[IN_FLIGHT * THREADS];
    double *shared = reinterpret_cast<double *>(slots); /* later, the threads' sums: [W][THREADS] */
    begin_chained();
    incoming_runs<IN_FLIGHT> runs(slots);
    int64_t channels = q.y.channels, pixels = q.batch * q.y.height * q.y.width;
    int x = (int)threadIdx.x % s.across, y = (int)threadIdx.x / s.across, down = THREADS / s.across;
    for (int64_t t = blockIdx.x; t < s.chunks * s.tiles; t += gridDim.x) {
        quotient chunk = divide(t, s.tiles);
        int64_t channel = (chunk.rest * s.across + x) * W, begin = chunk.quotient * s.chunk;
        int64_t end = begin + s.chunk < pixels ? begin + s.chunk : pixels;
        int count = channels - channel < W ? (int)(channels - channel) : W;
        if (count <= 0) end = begin; /* past the last channel */
        const T *dy = static_cast<const T *>(q.y_data) + channel;
        int64_t ahead = begin + y; /* the next pixel to be read */
        auto request = [&] {
            runs.request(dy + ahead * channels, ahead < end);
            ahead += down;
        };
        if constexpr (ALIGNED)
            for (int i = 0; i < IN_FLIGHT; i++)
                request();
        chained_sums<W> sums;
        for (int64_t p = begin + y; p < end; p += down) {
            uint4 run;
            if constexpr (ALIGNED) {
                run = runs.take();
                request();
            } else {
                run = gather_run(reinterpret_cast<const bits_of<T> *>(dy + p * channels), 1, count);
            }
            float v[W];
            unpack<T>(run, v);
#pragma unroll
            for (int j = 0; j < W; j++)
                sums.chain[j] += v[j];
            sums.count(1);
        }
        __syncthreads(); /* all slots have been read */
#pragma unroll
        for (int j = 0; j < W; j++)
            shared[j * THREADS + threadIdx.x] = sums.value(j);
        __syncthreads();
        for (int rows = down / 2; rows; rows /= 2) {
            if (y < rows)
#pragma unroll
                for (int j = 0; j < W; j++)
                    shared[j * THREADS + threadIdx.x] += shared[j * THREADS + threadIdx.x + rows * s.across];
            __syncthreads();
        }
        if (y == 0)
            for (int j = 0; j < count; j++)
                s.partial[(channel + j) * s.chunks + chunk.quotient] = shared[j * THREADS + x];
        __syncthreads();
    }
}

/* Each lane adds the chunks that are 32 apart, in order; then all lanes along a tree. */
template <class T>
__global__ void __launch_bounds__(THREADS) dbias_sum(const __grid_constant__ conv_call q, bias_split s) {
    begin_chained();
    int lane = (int)threadIdx.x % 32;
    int64_t warps = (int64_t)gridDim.x * (THREADS / 32);
    for (int64_t c = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; c < q.y.channels; c += warps) {
        double sum = 0;
        for (int64_t first = lane; first < s.chunks; first += divide_up(CHUNKS, 32) * 32)
#pragma unroll
            for (int i = 0; i < (int)divide_up(CHUNKS, 32); i++)
                if (first + 32 * i < s.chunks) sum += s.partial[c * s.chunks + first + 32 * i];
        sum = warp_sum(sum);
        if (lane == 0) write_parameter<T>(q.dbias, c, (float)sum);
    }
}

} // namespace
} // namespace vjp

#endif

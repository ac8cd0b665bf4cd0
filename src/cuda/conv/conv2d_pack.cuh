/* SPDX-License-Identifier: MIT */
/*
 * Copies pictures and weights of any layout and alignment to what conv2d's tiles read: channels last, each group padded
 * with zeros to whole runs of 16 bytes.
 *
 *     kernel         for                                                 a thread copies
 *     pack_planes    channels first: a transpose in shared memory        16-byte reads along pixels, then whole runs
 *     pack_runs      channels last, or at most MAX_DIRECT_RUNS runs      one run, element by element
 *     pack_weight    weights                                             one run, element by element
 *
 * transpose_pixels does the reverse for 32 bits: it copies a picture that is channels last to [channels, pixels].
 *
 * A copy does not depend on what the bits mean, so kernels take the unsigned integer of an element's size. The limits
 * of the tiles (conv2d.cu) let 32 bits hold every index.
 */
#ifndef VJP_CUDA_CONV2D_PACK_CUH
#define VJP_CUDA_CONV2D_PACK_CUH

#include "cuda/conv/conv2d_general.cuh"

namespace vjp {
namespace {

template <class T> using bits_of = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;

/* A run as its elements' bits. */
template <class E> __device__ uint4 run_of(const E (&v)[WIDE<E>]) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        if constexpr (sizeof(E) == 4)
            words[i] = v[i];
        else
            words[i] = (unsigned)v[2 * i] | (unsigned)v[2 * i + 1] << 16;
    return {words[0], words[1], words[2], words[3]};
}

/* The run of `count` elements that are `apart` apart, then zeros. */
template <class E> __device__ uint4 gather_run(const E *from, int64_t apart, int count) {
    E v[WIDE<E>];
#pragma unroll
    for (int i = 0; i < WIDE<E>; i++)
        v[i] = i < count ? from[i * apart] : E(0);
    return run_of(v);
}

/* ---- Pictures ---------------------------------------------------------------------------------------- */

struct pack_call {
    const void *from;
    uint4 *to; /* [images, pixels, groups, padded / run] */
    unsigned images, pixels;
    unsigned groups, channels, padded; /* channels of a group */
    bool channels_last;
    unsigned pixel_tiles, channel_tiles;
};

constexpr unsigned NO_CHANNEL = ~0u;

/* Where channel c of a packed picture comes from. */
__device__ inline unsigned source_channel(const pack_call &q, unsigned c) {
    if (q.groups == 1) return c < q.channels ? c : NO_CHANNEL;
    unsigned group = c / q.padded, channel = c % q.padded;
    return group < q.groups && channel < q.channels ? group * q.channels + channel : NO_CHANNEL;
}

/* A block copies PACK_RUNS runs of channels, a row of 16-byte places per channel: 16 KiB. */
constexpr unsigned PACK_PIXELS = 128, PACK_RUNS = 8;

/*
 * Where rows do not begin on 16 bytes, they are copied from the 16-byte boundary before them. Then a row of places
 * holds up to a run of elements that are not its own.
 */
template <class E, bool ALIGNED> constexpr unsigned PACK_STEP = ALIGNED ? PACK_PIXELS : PACK_PIXELS - WIDE<E>;

/*
 * Place p of a row is stored at p ^ (the row's run), so that the warp's reads, words of one place from the same row of
 * all eight runs, are in different banks.
 */
template <class E, bool ALIGNED>
__global__ void __launch_bounds__(THREADS, resident_blocks(THREADS, 8))
    pack_planes(const __grid_constant__ pack_call q) {
    constexpr unsigned W = WIDE<E>, PLACES = PACK_PIXELS / W;
    __shared__ uint4 tile[PACK_RUNS * W * PLACES];
    begin_chained();
    unsigned block = blockIdx.x, first_run = block % q.channel_tiles * PACK_RUNS;
    block /= q.channel_tiles;
    unsigned first_pixel = block % q.pixel_tiles * PACK_STEP<E, ALIGNED>, image = block / q.pixel_tiles;
    unsigned pixels = q.pixels - first_pixel < PACK_STEP<E, ALIGNED> ? q.pixels - first_pixel : PACK_STEP<E, ALIGNED>;

    /* Elements are counted from the 16-byte boundary at or before the first. */
    unsigned before = ALIGNED ? 0 : (unsigned)(reinterpret_cast<uintptr_t>(q.from) % 16 / sizeof(E));
    const E *from = static_cast<const E *>(q.from) - before;
    unsigned plane = q.pixels, whole = q.groups * q.channels * plane, end = before + q.images * whole;
    unsigned first = before + image * whole + first_pixel;
    unsigned place = threadIdx.x % PLACES;
#pragma unroll
    for (unsigned i = 0; i < PACK_RUNS * W; i += THREADS / PLACES) {
        unsigned row = threadIdx.x / PLACES + i;
        unsigned channel = source_channel(q, first_run * W + row);
        bool present = channel != NO_CHANNEL;
        unsigned begin = first + (present ? channel * plane : 0), at = (begin / W + place) * W;
        uint4 *to = tile + row * PLACES + (place ^ row / W);
        if (present && at >= begin + pixels) continue;
        if (!ALIGNED && present && (at < before || at + W > end)) { /* the first or last run of the tensor */
            for (unsigned j = 0; j < W; j++)
                if (at + j >= before && at + j < end) reinterpret_cast<E *>(to)[j] = from[at + j];
            continue;
        }
        copy_async_or_zero(to, reinterpret_cast<const uint4 *>(from + (present ? at : 0)), present);
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();

    /* Eight lanes write the runs of a pixel: 128 bytes. */
    unsigned run = threadIdx.x % PACK_RUNS, runs = q.groups * q.padded / W;
    if (first_run + run >= runs) return;
    uint4 *to = q.to + (image * q.pixels + first_pixel) * runs + first_run + run;
    const uint4 *rows = tile + run * W * PLACES;
    if constexpr (ALIGNED) {
        constexpr unsigned PER_WORD = 4 / sizeof(E);
#pragma unroll
        for (unsigned i = 0; i < PACK_PIXELS / PER_WORD; i += THREADS / PACK_RUNS) {
            unsigned word = threadIdx.x / PACK_RUNS + i, pixel = word * PER_WORD;
            if (pixel >= pixels) break;
            const unsigned *from_word = reinterpret_cast<const unsigned *>(rows + (word / 4 ^ run)) + word % 4;
            unsigned v[W];
#pragma unroll
            for (unsigned j = 0; j < W; j++)
                v[j] = from_word[j * PLACES * 4];
            if constexpr (sizeof(E) == 4) {
                to[pixel * runs] = {v[0], v[1], v[2], v[3]};
            } else { /* a word has two pixels; planes of whole runs have an even number */
                auto pick = [&](unsigned bytes) {
                    return uint4{__byte_perm(v[0], v[1], bytes), __byte_perm(v[2], v[3], bytes),
                                 __byte_perm(v[4], v[5], bytes), __byte_perm(v[6], v[7], bytes)};
                };
                to[pixel * runs] = pick(0x5410);
                to[(pixel + 1) * runs] = pick(0x7632);
            }
        }
    } else {
        unsigned channel = source_channel(q, (first_run + run) * W); /* a run is of one group */
        unsigned shift = first + channel * plane;
#pragma unroll
        for (unsigned i = 0; i < PACK_PIXELS; i += THREADS / PACK_RUNS) {
            unsigned pixel = threadIdx.x / PACK_RUNS + i;
            if (pixel >= pixels) break;
            E v[W];
#pragma unroll
            for (unsigned j = 0; j < W; j++) {
                unsigned at = pixel + (shift + j * plane) % W;
                v[j] = reinterpret_cast<const E *>(rows + j * PLACES + (at / W ^ run))[at % W];
            }
            to[pixel * runs] = run_of(v);
        }
    }
}

/* With so few runs, most of a block of pack_planes would be idle; and writes are of neighbours without a transpose. */
constexpr int64_t MAX_DIRECT_RUNS = 2;

template <class E> __global__ void __launch_bounds__(THREADS) pack_runs(const __grid_constant__ pack_call q) {
    constexpr unsigned W = WIDE<E>;
    begin_chained();
    unsigned runs = q.groups * q.padded / W, i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= q.images * q.pixels * runs) return;
    unsigned fast = q.channels_last ? runs : q.pixels, slow = q.channels_last ? q.pixels : runs;
    unsigned in_fast = i % fast, in_slow = i / fast % slow, image = i / fast / slow;
    unsigned run = q.channels_last ? in_fast : in_slow, pixel = q.channels_last ? in_slow : in_fast;
    unsigned group = q.groups == 1 ? 0 : run * W / q.padded, channel = run * W - group * q.padded;
    unsigned channels = q.groups * q.channels, at = group * q.channels + channel;
    const E *from = static_cast<const E *>(q.from) + (int64_t)image * channels * q.pixels;
    from += q.channels_last ? pixel * channels + at : at * q.pixels + pixel;
    q.to[(image * q.pixels + pixel) * runs + run] =
        gather_run(from, q.channels_last ? 1 : q.pixels, (int)(q.channels - channel));
}

struct transpose_call {
    const uint4 *from;     /* [pixels, runs of four channels] */
    uint4 *to;             /* [channels, whole runs of four pixels]; behind the last pixel, zeros */
    unsigned pixels, runs; /* runs: of channels */
    unsigned channel_tiles;
};

/* A block copies 64 pixels x 64 channels: 16 KiB. */
constexpr unsigned TRANSPOSE_PIXELS = 64, TRANSPOSE_RUNS = 16;

/*
 * Run r of pixel p is stored at r ^ (p / 4), so that a warp's reads, words of four channels from every fourth of 32
 * pixels, are in different banks.
 */
__global__ void __launch_bounds__(THREADS, resident_blocks(THREADS, 8))
    transpose_pixels(const __grid_constant__ transpose_call q) {
    __shared__ uint4 tile[TRANSPOSE_PIXELS * TRANSPOSE_RUNS];
    begin_chained();
    unsigned first_run = blockIdx.x % q.channel_tiles * TRANSPOSE_RUNS;
    unsigned first_pixel = blockIdx.x / q.channel_tiles * TRANSPOSE_PIXELS;
    unsigned run = threadIdx.x % TRANSPOSE_RUNS;
#pragma unroll
    for (unsigned i = 0; i < TRANSPOSE_PIXELS; i += THREADS / TRANSPOSE_RUNS) {
        unsigned row = threadIdx.x / TRANSPOSE_RUNS + i, pixel = first_pixel + row;
        bool present = pixel < q.pixels && first_run + run < q.runs;
        copy_async_or_zero(tile + row * TRANSPOSE_RUNS + (run ^ row / 4),
                           q.from + (present ? (int64_t)pixel * q.runs + first_run + run : 0), present);
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();

    /* Eight lanes write 32 pixels of a channel: 128 bytes. */
    unsigned lane = threadIdx.x % 32, pixel_runs = (q.pixels + 3) / 4;
#pragma unroll
    for (unsigned i = 0; i < 4; i++) {
        unsigned part = threadIdx.x / 32 + i * (THREADS / 32); /* 2 halves of the pixels x 16 runs of channels */
        unsigned four = part % 2 * 8 + lane % 8, from_run = part / 2;
        unsigned channel = (first_run + from_run) * 4 + lane / 8, to_run = first_pixel / 4 + four;
        if (first_run + from_run >= q.runs || to_run >= pixel_runs) continue;
        const unsigned *word = reinterpret_cast<const unsigned *>(tile + (from_run ^ four)) + lane / 8;
        unsigned v[4];
#pragma unroll
        for (unsigned j = 0; j < 4; j++)
            v[j] = word[(four * 4 + j) * TRANSPOSE_RUNS * 4];
        q.to[(int64_t)channel * pixel_runs + to_run] = {v[0], v[1], v[2], v[3]};
    }
}

/* ---- Weights ----------------------------------------------------------------------------------------- */

struct pack_weight_call {
    const void *from;
    uint4 *to; /* [groups, columns, taps, padded / run] */
    picture window;
    unsigned groups, channels, outs, taps, padded; /* channels and outs of a group */
    bool channels_last;
    bool transposed; /* columns are channels and runs are out channels, for dx */
};

/* Neighbouring threads read along the weight's contiguous axis: taps if channels are first, else channels. */
template <class E> __global__ void __launch_bounds__(THREADS) pack_weight(const __grid_constant__ pack_weight_call q) {
    constexpr unsigned W = WIDE<E>;
    begin_chained();
    unsigned columns = q.transposed ? q.channels : q.outs, terms = q.transposed ? q.outs : q.channels;
    unsigned runs = q.padded / W, rest = blockIdx.x * THREADS + threadIdx.x;
    if (rest >= q.groups * columns * q.taps * runs) return;
    /* The axis of channels is that of columns or of runs. */
    unsigned along = q.transposed ? columns : runs, beside = q.transposed ? runs : columns;
    unsigned fast = q.channels_last ? along : q.taps, slow = q.channels_last ? q.taps : along;
    unsigned in_fast = rest % fast;
    rest /= fast;
    unsigned in_slow = rest % slow;
    rest /= slow;
    unsigned in_beside = rest % beside, group = rest / beside;
    unsigned tap = q.channels_last ? in_slow : in_fast, in_along = q.channels_last ? in_fast : in_slow;
    unsigned column = q.transposed ? in_along : in_beside, run = q.transposed ? in_beside : in_along;
    unsigned out = q.transposed ? run * W : column, channel = q.transposed ? column : run * W;
    const E *from = static_cast<const E *>(q.from) + (group * q.outs + out) * q.window.image +
                    channel * q.window.channel + tap * q.window.pixel;
    q.to[((group * columns + column) * q.taps + tap) * runs + run] =
        gather_run(from, q.transposed ? q.window.image : q.window.channel, (int)(terms - run * W));
}

} // namespace
} // namespace vjp

#endif

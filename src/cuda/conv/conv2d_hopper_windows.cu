/* SPDX-License-Identifier: MIT */
/*
 * y and dx of conv2d on Hopper (conv2d_hopper.cuh).
 *
 * A block computes tiles of 256 pixels x 128 channels: one thread feeds stages of 128 bytes of channels of one tap, and
 * two warpgroups multiply, a half of the tile each. Or, where sums are short, they take turns with tiles of 128 pixels,
 * so that one multiplies while the other writes.
 *
 * Shared memory moves 128 bytes per cycle, and nearly limits the products: to read both factors of 64 rows takes 0.75
 * times as long as to multiply them if the right one has 128 columns, and 0.63 times with 256; to write the stages,
 * 0.38 times. So with channels first the right factor is all 256 pixels. With channels last it is the channels, and
 * there 128 of them are faster than tiles of 128 pixels x 256 channels: the backward of [64, 28, 28, 256], 3x3 to 256,
 * takes 201 us instead of 209 in bf16.
 *
 * Two blocks are a cluster. Where the result has several tiles of channels, they have the same pixels, and each loads
 * half of them for both; otherwise they have the same weights, and share those.
 *
 * With channels last and up to 64 of them in the result, loading the same pixels for each tap would take longer than
 * multiplying them. Where windows move by one pixel along a row, a tile's pixels are then those of whole rows, padding
 * included, and a few more: taps of a row read the same ones, shifted. What the windows across the end of a row give is
 * not written.
 *
 * Results are written along the axis that is contiguous: pixels are the left factor where channels are last, the right
 * one where channels are first. In TF32, pictures that stay channels first are the left factor, through registers
 * (conv2d_hopper_transposed.cuh): there a thread has four successive pixels of a channel.
 */
#include "cuda/conv/conv2d_hopper_results.cuh"

namespace vjp {
namespace hopper {
namespace {

constexpr int CONSUMERS = 2, CLUSTER = 2;
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;

/* Taps of a row that read the same pixels, and the most pixels that they lie apart. */
constexpr int SHIFTS = 3, MAX_SHIFT = 8;

/* How pictures are stored: source and result channels last; the result channels first; both. */
enum picture_layout { LAST, FIRST, ALONG };

/* Whether pixels go through registers. */
template <class T, picture_layout LAYOUT> constexpr bool BY_REGISTERS = sizeof(T) == 4 && LAYOUT == ALONG;

/* OUTS: channels of a tile, TAPS: of a stage, TURNS: the warpgroups take turns. */
template <int OUTS_, int TAPS_, bool TURNS_> struct windows_shape {
    static constexpr bool TURNS = TURNS_;
    static constexpr int OUTS = OUTS_, TAPS = TAPS_, PIXELS = TURNS ? 128 : 256;
    static constexpr int LOADED_PIXELS = PIXELS + (TAPS > 1 ? MAX_SHIFT : 0);
    static constexpr int PIXEL_BYTES = LOADED_PIXELS * 128, WEIGHT_BYTES = OUTS * 128;
    static constexpr int STAGES = (208 << 10) / (PIXEL_BYTES + TAPS * WEIGHT_BYTES);
};

template <class S> struct windows_shared {
    char pixels[S::STAGES][S::PIXEL_BYTES], weights[S::STAGES][S::TAPS * S::WEIGHT_BYTES];
    uint64_t full[S::STAGES], empty[S::STAGES];
    float bias[CONSUMERS][2][S::OUTS]; /* of the warpgroup's current tile and its last one */
};

#if VJP_HOPPER

/* The tiles of the thread's block: f(pixel tile, column tile, whether it is the last). Neighbours at work have the same
 * pixels. */
template <class F> __device__ void for_each_tile(const windows_call &c, F f) {
    int rank = block_of_cluster(), columns = c.shares_pixels ? c.column_tiles / CLUSTER : c.column_tiles;
    int pixels = c.shares_pixels ? c.pixel_tiles : c.pixel_tiles / CLUSTER;
#pragma unroll 1
    for (int i = (int)blockIdx.x / CLUSTER; i < pixels * columns; i += (int)gridDim.x / CLUSTER) {
        int pixel = i / columns, column = i % columns;
        bool last = i + (int)gridDim.x / CLUSTER >= pixels * columns;
        if (c.shares_pixels)
            f(pixel, column * CLUSTER + rank, last);
        else
            f(pixel * CLUSTER + rank, column, last);
    }
}

/* Stages in order: f(row of taps, first tap of the row, taps, step of channels). */
template <int TAPS, class F> __device__ void for_each_stage(const windows_call &c, F f) {
#pragma unroll 1
    for (int up = 0; up < c.down.taps; up++)
#pragma unroll 1
        for (int left = 0; left < c.across.taps; left += TAPS)
#pragma unroll 1
            for (int step = 0; step < c.channel_steps; step++)
                f(up, left, TAPS > 1 ? min(TAPS, c.across.taps - left) : 1, step);
}

template <class T, class S, picture_layout LAYOUT>
__device__ void produce(const windows_call &c, windows_shared<S> &shared) {
    constexpr int OUTS = S::OUTS, PIXELS = S::PIXELS, CHANNELS = 128 / (int)sizeof(T), ALL = (1 << CLUSTER) - 1;
    ring<S::STAGES> at;
    int rank = block_of_cluster();
    for_each_tile(c, [&](int pixel_tile, int column_tile, bool) {
        int image, row, column, first = pixel_tile * PIXELS + (c.shares_pixels ? rank * (PIXELS / CLUSTER) : 0);
        if constexpr (LAYOUT == ALONG) {
            image = pixel_tile / c.image_tiles;
            first -= image * c.image_tiles * PIXELS;
        } else {
            int rest = first % c.plane;
            image = first / c.plane;
            row = rest / c.across.count * c.down.stride + c.down.first;
            column = rest % c.across.count * c.across.stride + c.across.first;
        }
        for_each_stage<S::TAPS>(c, [&](int up, int left, int taps, int step) {
            uint64_t &full = shared.full[at.stage];
            char *pixels = shared.pixels[at.stage], *weights = shared.weights[at.stage];
            barrier_wait(shared.empty[at.stage], at.parity ^ 1);
            barrier_expect(full, S::PIXEL_BYTES + taps * S::WEIGHT_BYTES);
            if constexpr (LAYOUT == ALONG) {
                constexpr int BOX = CHANNELS, BOXES = PIXELS / BOX, HALF = BOXES / CLUSTER; /* BOX: pixels */
                if (c.shares_pixels)
#pragma unroll
                    for (int i = 0; i < HALF; i++)
                        load_box_in(ALL, pixels + (rank * HALF + i) * BOX * 128, c.source, full, first + i * BOX, 0,
                                    step * CHANNELS, image);
                else
#pragma unroll
                    for (int i = 0; i < BOXES; i++)
                        load_box(pixels + i * BOX * 128, c.source, full, first + i * BOX, 0, step * CHANNELS, image);
            } else {
                int move_right = left * c.across.apart, move_down = up * c.down.apart;
                if (c.shares_pixels)
                    load_walk_in(ALL, pixels + rank * (PIXELS / CLUSTER) * 128, c.source, full, step * CHANNELS, column,
                                 row, image, move_right, move_down);
                else
                    load_walk(pixels, c.source, full, step * CHANNELS, column, row, image, move_right, move_down);
            }
            for (int i = 0; i < taps; i++) {
                int tap = (c.tap_down.first + up * c.tap_down.next) * c.kernel_w + c.tap_across.first +
                          (left + i) * c.tap_across.next;
                char *to = weights + i * S::WEIGHT_BYTES;
                if (c.shares_pixels)
                    load_box(to, c.weight, full, step * CHANNELS, tap, column_tile * OUTS, 0);
                else
                    load_box_in(ALL, to + rank * (OUTS / CLUSTER) * 128, c.weight, full, step * CHANNELS, tap,
                                column_tile * OUTS + rank * (OUTS / CLUSTER), 0);
            }
            at.advance();
        });
    });
}

/* ---- Products ---------------------------------------------------------------------------------------- */

/* The named barriers of each warpgroup: its turn, and that its bias is in shared memory. */
constexpr int TURN = 1, BIAS_READY = TURN + CONSUMERS;

/*
 * Warpgroups that finish a tile together would both wait for its bias while they write, so they read it before the
 * products: the forward of [64, 28, 28, 256], 3x3 to 256, then takes 80 us instead of 95 in bf16, and 153 instead of
 * 160 in TF32. Of those that take turns, one multiplies while the other waits: they read it as they write.
 */
template <class T, class S, picture_layout LAYOUT>
__device__ void consume(const windows_call &c, windows_shared<S> &shared) {
    constexpr bool PIXEL_ROWS = LAYOUT == LAST || BY_REGISTERS<T, LAYOUT>;
    constexpr bool SPLITS_OUTS = !S::TURNS && !PIXEL_ROWS;
    constexpr int OUTS = S::OUTS, COLUMNS = PIXEL_ROWS ? OUTS : S::PIXELS;
    constexpr int ROWS64 = (PIXEL_ROWS ? S::PIXELS : OUTS) / 64 / (S::TURNS ? 1 : CONSUMERS);
    int group = warpgroup() - 1, thread = threadIdx.x % (BY_REGISTERS<T, LAYOUT> ? 32 : WARPGROUP);
    /* Of the tile's pixels and channels, the first of this warpgroup. */
    int own = S::TURNS ? 0 : group * ROWS64 * 64, own_pixel = SPLITS_OUTS ? 0 : own, own_out = SPLITS_OUTS ? own : 0;
    int turn = 0; /* whose the next tile is */
    [[maybe_unused]] int bias_buffer = 0;
    ring<S::STAGES> at;
    auto release = [&](int stage) {
        if (thread < CLUSTER) barrier_arrive_in(thread, shared.empty[stage]);
    };
    if (S::TURNS && group == 1) group_arrive(TURN, CONSUMERS * WARPGROUP);
    for_each_tile(c, [&](int pixel_tile, int column_tile, bool last_tile) {
        if (S::TURNS && turn++ % CONSUMERS != group) {
            at.skip(c.stages);
            return;
        }
        /* A stage's barrier can be waited for only once the other warpgroup needs none of its earlier phases. */
        if (S::TURNS) group_sync(TURN + group, CONSUMERS * WARPGROUP);
        int pixel = pixel_tile * S::PIXELS + own_pixel, column = column_tile * OUTS + own_out, last = -1;
        float sum[ROWS64][COLUMNS / 2];
        [[maybe_unused]] float bias[PIXEL_ROWS ? 1 : 2 * ROWS64]; /* of one of the columns, or of the thread's rows */
        if constexpr (!S::TURNS) {
            static_assert(OUTS == WARPGROUP);
#pragma unroll
            for (int i = 0; i < (PIXEL_ROWS ? 1 : 2 * ROWS64); i++)
                bias[i] = bias_of<T>(c, column + (PIXEL_ROWS ? (int)threadIdx.x % WARPGROUP : accumulator_row(i)));
        }
        if constexpr (BY_REGISTERS<T, LAYOUT>) {
            transposed_left left;
#pragma unroll 1
            for (int stage = 0; stage < c.stages; stage++) {
                barrier_wait(shared.full[at.stage], at.parity);
                left.multiply(sum, shared.pixels[at.stage] + own_pixel * 128, shared_address(shared.weights[at.stage]),
                              BOX_TERMS, stage > 0, [&] {
                                  if (stage > 0) release(last);
                              });
                last = at.stage;
                at.advance();
            }
            if (S::TURNS && !last_tile) group_arrive(TURN + 1 - group, CONSUMERS * WARPGROUP);
            left.finish();
        } else {
            for_each_stage<S::TAPS>(c, [&](int, int, int taps, int) {
                uint32_t pixels = shared_address(shared.pixels[at.stage]) + (uint32_t)(own_pixel * 128);
                uint32_t weights = shared_address(shared.weights[at.stage]) + (uint32_t)(own_out * 128);
                barrier_wait(shared.full[at.stage], at.parity);
                products_begin();
#pragma unroll 1
                for (int tap = 0; tap < taps; tap++) {
#pragma unroll
                    for (int i = 0; i < 4; i++)
#pragma unroll
                        for (int m = 0; m < ROWS64; m++) {
                            bool keep = last >= 0 || tap > 0 || i > 0;
                            if constexpr (LAYOUT == LAST)
                                product<T, false>(sum[m], over_columns(pixels, 0, m * 64, i),
                                                  over_columns(weights, 0, 0, i), keep);
                            else if constexpr (LAYOUT == FIRST)
                                product<T, false>(sum[m], over_columns(weights, 0, m * 64, i),
                                                  over_columns(pixels, 0, 0, i), keep);
                            else
                                product<T, true>(sum[m], over_columns(weights, 0, m * 64, i),
                                                 over_rows(pixels, SLICE, i), keep);
                        }
                    pixels += (uint32_t)(c.across.apart * 128);
                    weights += (uint32_t)S::WEIGHT_BYTES;
                }
                products_commit();
                products_wait<1>();
                if (last >= 0) release(last);
                last = at.stage;
                at.advance();
            });
            if (S::TURNS && !last_tile) group_arrive(TURN + 1 - group, CONSUMERS * WARPGROUP);
            products_wait<0>();
        }
#pragma unroll
        for (int m = 0; m < ROWS64; m++)
            pin(sum[m]);
        if (last >= 0) release(last);
        if (last < 0) /* no tap reaches this phase */
#pragma unroll
            for (int m = 0; m < ROWS64; m++)
#pragma unroll
                for (float &s : sum[m])
                    s = 0;
        const float *tile_bias = nullptr;
        if constexpr (!S::TURNS && PIXEL_ROWS) {
            /* Until all are past the barrier, some may still read the other buffer, that of the last tile. */
            float *all = shared.bias[group][bias_buffer];
            all[threadIdx.x % WARPGROUP] = bias[0];
            group_sync(BIAS_READY + group, WARPGROUP);
            bias_buffer ^= 1;
            tile_bias = all;
        } else if constexpr (!S::TURNS) {
            tile_bias = bias;
        }
        if constexpr (LAYOUT == LAST) {
            write_last<T, ROWS64, OUTS>(c, pixel, column, sum, tile_bias);
        } else if constexpr (LAYOUT == FIRST) {
            write_first<T, ROWS64, COLUMNS>(c, 0, pixel, c.rows, column, sum, tile_bias);
        } else {
            int image = pixel_tile / c.image_tiles;
            pixel -= image * c.image_tiles * S::PIXELS;
            if constexpr (BY_REGISTERS<T, LAYOUT>)
                write_fours<T, OUTS>(c, image, pixel, column, sum, tile_bias);
            else
                write_first<T, ROWS64, COLUMNS>(c, image, pixel, image * c.plane < c.rows ? c.plane : 0, column, sum,
                                                tile_bias);
        }
    });
}

#endif

template <class T, class S, picture_layout LAYOUT>
__global__ void VJP_IN_CLUSTERS(CLUSTER) __launch_bounds__(THREADS, 1)
    window_products(const __grid_constant__ windows_call c) {
#if VJP_HOPPER
    auto &shared = aligned_shared<windows_shared<S>>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(shared.full[i], 1);
            /* Each warp arrives that has read shared memory by itself. */
            constexpr int ARRIVALS = BY_REGISTERS<T, LAYOUT> ? WARPGROUP / 32 : 1;
            barrier_init(shared.empty[i], ARRIVALS * (S::TURNS ? 1 : CONSUMERS) * CLUSTER);
        }
        barriers_are_ready();
    }
    cluster_sync();
    begin_chained();
    if (threadIdx.x < WARPGROUP) {
        give_registers<40>();
        if (threadIdx.x == 0) produce<T, S, LAYOUT>(c, shared);
    } else {
        take_registers<232>();
        consume<T, S, LAYOUT>(c, shared);
    }
    __syncwarp();
    cluster_sync(); /* the other block may still write and arrive here */
#endif
}

template <class T, class S, picture_layout LAYOUT> vjp_status enqueue(const vjp_work *work, const windows_call &c) {
    int64_t blocks =
        vjp_min((int64_t)c.pixel_tiles * c.column_tiles, state_of(work->device)->multiprocessors / CLUSTER * CLUSTER);
    return launch(work, true, window_products<T, S, LAYOUT>, blocks, THREADS, sizeof(windows_shared<S>), c);
}

/* Rows shorter than this would be too much padding. */
constexpr int MIN_SHIFTED_ROW = 16;

/* With up to this many stages of a sum, writing results takes longer than loading for smaller tiles. */
constexpr int MAX_TURNS = 8;

/* The walk over whole rows for taps that read the same pixels, shifted. */
walk_axis shifted_walk(walk_axis a) {
    a.count += (int)(vjp_min(SHIFTS, a.taps) - 1) * a.apart;
    return a;
}

bool shifts(const windows &w, int outs) {
    const walk_axis &a = w.across;
    return outs == 64 && w.channels_last && a.stride == 1 && a.taps > 1 && a.count >= MIN_SHIFTED_ROW &&
           (SHIFTS - 1) * a.apart <= MAX_SHIFT && can_walk(shifted_walk(a));
}

} // namespace

vjp_status multiply_windows(const vjp_work *work, windows w) {
    windows_call c{};
    int outs = w.columns > 64 ? 128 : 64;
    bool shifted = shifts(w, outs);
    vjp_dtype type = work->storage;
    bool short_sums = w.kernel_h * w.kernel_w == 1 && w.channels <= MAX_TURNS * (type == VJP_F32 ? 32 : 64);
    bool turns = outs == 64 || (short_sums && (w.channels_last || w.along));
    int pixels = turns ? 128 : 256;
    c.width = w.across.count;
    if (shifted) w.across = shifted_walk(w.across);
    int64_t wide = type == VJP_F32 ? 4 : 8, plane = (int64_t)w.down.count * w.across.count;
    c.result = w.result;
    c.bias = w.bias;
    c.add = w.add;
    c.down = w.down;
    c.across = w.across;
    c.tap_down = w.tap_down;
    c.tap_across = w.tap_across;
    c.result_down = w.result_down;
    c.result_across = w.result_across;
    c.kernel_w = (int)w.kernel_w;
    c.columns = (int)w.columns;
    c.plane = (int)plane;
    c.rows = (int)(w.batch * plane);
    c.channel_steps = (int)vjp_divide_up(w.channels, 8 * wide);
    c.stages = (int)(w.down.taps * vjp_divide_up(w.across.taps, shifted ? SHIFTS : 1)) * c.channel_steps;
    c.image_tiles = (int)vjp_divide_up(plane, pixels);
    c.pixel_tiles = (int)(w.along ? w.batch * c.image_tiles : vjp_divide_up(c.rows, pixels));
    c.column_tiles = (int)vjp_divide_up(w.columns, outs);
    c.shares_pixels = c.column_tiles > 1;
    int &shared_tiles = c.shares_pixels ? c.column_tiles : c.pixel_tiles;
    shared_tiles = (int)vjp_round_up(shared_tiles, CLUSTER);
    /* Successive results lie side by side, in runs of a divisor of `run`. */
    bool dense = w.result_down.apart == 1 && w.result_across.apart == 1;
    int64_t run = w.channels_last ? w.columns : dense ? plane : 1;
    size_t pair = 2 * (type == VJP_F32 ? 4 : 2);
    bool wide_results = type == VJP_F32 ? w.along : !w.add && run % 8 == 0;
    c.whole = wide_results && is_aligned(w.result, 16);
    c.pairs = run % 2 == 0 && is_aligned(w.result, pair);
    int64_t taps = w.kernel_h * w.kernel_w;
    bool mapped = make_map(&c.weight, w.weight, taps * w.channels, type, 1, w.columns, taps, w.channels,
                           c.shares_pixels ? outs : outs / CLUSTER);
    if (w.along)
        mapped = mapped && make_map(&c.source, w.source, plane, type, w.batch, w.channels, 1, plane, (int)(8 * wide));
    else
        mapped = mapped && make_walk(&c.source, w.source, type, w.batch, w.down, w.across, w.channels,
                                     c.shares_pixels ? pixels / CLUSTER : pixels + (shifted ? MAX_SHIFT : 0));
    if (!mapped)
        return vjp_refuse(work, VJP_DEVICE_FAILED, "%s: the driver refused the description of a tensor",
                          work->device->name);
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        auto in_tiles = [&](auto layout) {
            constexpr picture_layout LAYOUT = decltype(layout)::value;
            if constexpr (LAYOUT == LAST)
                if (shifted) return enqueue<T, windows_shape<64, SHIFTS, true>, LAYOUT>(work, c);
            if (outs == 64) return enqueue<T, windows_shape<64, 1, true>, LAYOUT>(work, c);
            if constexpr (LAYOUT != FIRST)
                if (turns) return enqueue<T, windows_shape<128, 1, true>, LAYOUT>(work, c);
            return enqueue<T, windows_shape<128, 1, false>, LAYOUT>(work, c);
        };
        if (w.channels_last) return in_tiles(std::integral_constant<picture_layout, LAST>{});
        if (w.along) return in_tiles(std::integral_constant<picture_layout, ALONG>{});
        return in_tiles(std::integral_constant<picture_layout, FIRST>{});
    });
}

} // namespace hopper
} // namespace vjp

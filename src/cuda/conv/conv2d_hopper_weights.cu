/* SPDX-License-Identifier: MIT */
/*
 * dweight of conv2d on Hopper (conv2d_hopper.cuh).
 *
 * The rows of the result are units of 64 channels of one tap. A block computes up to four units x OUTS out channels
 * over a part of the pixels: one thread feeds stages of 128 bytes of pixels (64, or 32 in TF32), two warpgroups
 * multiply. Two blocks are a cluster: where the result has several tiles of out channels, they have the
 * same units and part, and each loads half of the units for both.
 *
 * The sums are over pixels. Products in TF32 need the pixels of dy side by side, and take those of x through registers
 * (conv2d_hopper_transposed.cuh).
 *
 * After so many pixels the sums are added to the part in the workspace: on tensor cores long sums drift towards 0
 * (max_tensor_terms()).
 */
#include "cuda/conv/conv2d_hopper.cuh"
#include "cuda/conv/conv2d_hopper_bias.cuh"
#include "cuda/conv/conv2d_hopper_transposed.cuh"

namespace vjp {
namespace hopper {
namespace {

constexpr int UNITS = 4, CONSUMERS = 2, CLUSTER = 2;
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int UNIT_BYTES = SLICE * 128;

/* Pixels of a stage. */
template <class T> constexpr int DEPTH = 128 / (int)sizeof(T);

constexpr int depth_of(vjp_dtype type) {
    return type == VJP_F32 ? DEPTH<float> : DEPTH<bf16>;
}

/* Whether x goes through registers. */
template <class T, pixel_order ORDER> constexpr bool BY_REGISTERS = sizeof(T) == 4 && ORDER != PLANES;

struct weight_sums_call {
    CUtensorMap x, dy;
    float *partial;
    double *bias; /* NULL: not wanted */
    walk_axis down, across;
    int channels, columns, channel_blocks, units, block_units;
    int unit_tiles, column_tiles, parts, steps, part_steps, chain_steps;
    int plane, image_steps;      /* pixels and steps of an image */
    int step_rows, step_columns; /* DEPTH pixels */
    bool shares_units;
};

template <int OUTS> struct weight_shared {
    static constexpr int STAGES = OUTS == 128 ? 4 : 5;
    char x[STAGES][UNITS * UNIT_BYTES], dy[STAGES][OUTS * 128];
    uint64_t full[STAGES], empty[STAGES];
};

#if VJP_HOPPER

constexpr int OWN = UNITS / CONSUMERS;

/*
 * A warpgroup multiplies 64 out channels by all units, or, where there are no more, by half of the units: the more
 * columns the right factor has, the less shared memory is read (conv2d_hopper_windows.cu).
 */
template <int OUTS> __device__ int own_out(int group) {
    return OUTS > SLICE ? group * SLICE : 0;
}

template <int OUTS> __device__ int own_unit(int group) {
    return OUTS > SLICE ? 0 : group * OWN;
}

struct weight_tile {
    int unit_tile, first_unit, units, column_tile, part, first, steps;

    __device__ explicit weight_tile(const weight_sums_call &c) {
        int index = (int)blockIdx.x / CLUSTER, rank = block_of_cluster();
        if (!c.shares_units) index = (int)blockIdx.x, rank = 0;
        int across = c.shares_units ? c.column_tiles / CLUSTER : c.column_tiles;
        column_tile = index % across * (c.shares_units ? CLUSTER : 1) + rank;
        index /= across;
        unit_tile = index % c.unit_tiles;
        first_unit = unit_tile * c.block_units;
        units = min(c.block_units, c.units - first_unit);
        part = index / c.unit_tiles;
        first = part * c.part_steps;
        steps = max(0, min(c.part_steps, c.steps - first));
    }
};

/* Where a stage begins. A thread that divided for each stage would take longer than its products. */
template <class T, pixel_order ORDER> struct stage_place {
    int image, row, column; /* PLANES has no rows */
    int pixel;              /* of the image, or of all with WALK */

    __device__ stage_place(const weight_sums_call &c, int step) {
        if constexpr (ORDER == WALK) {
            pixel = step * DEPTH<T>;
            image = pixel / c.plane;
        } else {
            image = step / c.image_steps;
            pixel = step % c.image_steps * DEPTH<T>;
        }
        row = pixel % c.plane / c.across.count;
        column = pixel % c.plane % c.across.count;
    }

    __device__ void advance(const weight_sums_call &c) {
        pixel += DEPTH<T>;
        if (ORDER != WALK && pixel >= c.plane) {
            pixel = row = column = 0;
            image++;
        } else if constexpr (ORDER != PLANES) {
            row += c.step_rows;
            column += c.step_columns;
            if (column >= c.across.count) {
                column -= c.across.count;
                row++;
            }
            for (; ORDER == WALK && row >= c.down.count; row -= c.down.count)
                image++;
        }
    }
};

template <class T, int OUTS, pixel_order ORDER>
__device__ void produce(const weight_sums_call &c, weight_shared<OUTS> &shared, const weight_tile &t) {
    constexpr int ALL = (1 << CLUSTER) - 1, CHANNELS = 128 / (int)sizeof(T);
    ring<weight_shared<OUTS>::STAGES> at;
    stage_place<T, ORDER> place(c, t.first);
    int rank = block_of_cluster(), channel[UNITS], left[UNITS], up[UNITS], bytes = OUTS * 128;
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        int unit = t.first_unit + i, tap = unit / c.channel_blocks;
        channel[i] = unit % c.channel_blocks * SLICE;
        left[i] = tap % c.across.taps * c.across.apart;
        up[i] = tap / c.across.taps * c.down.apart;
        if (i >= t.units) continue;
        int boxes = min(SLICE, c.channels - channel[i] + CHANNELS - 1) / CHANNELS; /* that have channels */
        bytes += ORDER == PLANES ? UNIT_BYTES : boxes * CHANNELS * 128;
    }
#pragma unroll 1
    for (int step = 0; step < t.steps; step++) {
        uint64_t &full = shared.full[at.stage];
        int row = place.row * c.down.stride + c.down.first, column = place.column * c.across.stride + c.across.first;
        barrier_wait(shared.empty[at.stage], at.parity ^ 1);
        barrier_expect(full, bytes);
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            char *to = shared.x[at.stage] + i * UNIT_BYTES;
            if (i >= t.units || (c.shares_units && i % CLUSTER != rank)) continue;
            if constexpr (ORDER == PLANES) {
                if (c.shares_units)
                    load_box_in(ALL, to, c.x, full, place.pixel, 0, channel[i], place.image);
                else
                    load_box(to, c.x, full, place.pixel, 0, channel[i], place.image);
            } else {
#pragma unroll
                for (int j = 0; j < SLICE; j += CHANNELS) {
                    char *box = to + j * 128 / CHANNELS * DEPTH<T>;
                    if (j > 0 && channel[i] + j >= c.channels) continue;
                    if (c.shares_units)
                        load_walk_in(ALL, box, c.x, full, channel[i] + j, column, row, place.image, left[i], up[i]);
                    else
                        load_walk(box, c.x, full, channel[i] + j, column, row, place.image, left[i], up[i]);
                }
            }
        }
        if constexpr (ORDER != WALK)
            load_box(shared.dy[at.stage], c.dy, full, place.pixel, 0, t.column_tile * OUTS, place.image);
        else if constexpr (sizeof(T) == 4)
            load_box(shared.dy[at.stage], c.dy, full, place.pixel, 0, t.column_tile * OUTS, 0);
        else
#pragma unroll
            for (int i = 0; i < OUTS / SLICE; i++)
                load_box(shared.dy[at.stage] + i * UNIT_BYTES, c.dy, full, t.column_tile * OUTS + i * SLICE, 0,
                         place.pixel, 0);
        place.advance(c);
        at.advance();
    }
}

/* Where sums of the first out channel of a unit and a channel of it lie. */
__device__ inline float *part_of(const weight_sums_call &c, const weight_tile &t, int unit, int channel) {
    int64_t taps = (int64_t)c.down.taps * c.across.taps;
    return c.partial + ((t.part * taps + unit / c.channel_blocks) * c.channels + channel) * c.columns;
}

/*
 * The sums that are added to are read before the first of them is written. Loads cannot be moved before stores that may
 * be to the same place, so in turns with those, each would take its full time: dweight of [64, 28, 28, 256], 3x3 to
 * 256, then takes 150 us instead of 105 in bf16, and 233 instead of 220 in TF32.
 */

/* Writes the accumulators 4 i + 2 half + {0, 1}: a row of the unit, one of its channels. */
template <int OUTS>
__device__ void write_row(const weight_sums_call &c, const weight_tile &t, int unit_of_tile, int row, int half,
                          bool add, const float (&sum)[OUTS / 2]) {
    int unit = t.first_unit + unit_of_tile, channel = unit % c.channel_blocks * SLICE + row;
    if (unit_of_tile >= t.units || channel >= c.channels) return;
    int first = t.column_tile * OUTS + (int)threadIdx.x % 4 * 2; /* and the next: their number is even */
    auto *part = reinterpret_cast<float2 *>(part_of(c, t, unit, channel) + first);
    float2 old[OUTS / 8] = {};
    if (add)
#pragma unroll
        for (int j = 0; j < OUTS / 8; j++)
            if (first + j * 8 < c.columns) old[j] = part[j * 4];
#pragma unroll
    for (int j = 0; j < OUTS / 8; j++)
        if (first + j * 8 < c.columns)
            part[j * 4] = {sum[j * 4 + half * 2] + old[j].x, sum[j * 4 + half * 2 + 1] + old[j].y};
}

/* Of x through registers: a warp has half of a unit. */
template <int OUTS>
__device__ void write_sums(const weight_sums_call &c, const weight_tile &t, int group, bool add,
                           const float (&sum)[OWN][OUTS / 2]) {
    int warp = threadIdx.x % WARPGROUP / 32;
#pragma unroll
    for (int m = 0; m < OWN; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            write_row<OUTS>(c, t, group * OWN + warp / 2, warp % 2 * BOX_ROWS + own_rows() + m * 2 + half, half, add,
                            sum[m]);
}

/* Of out channels as rows: units are columns. */
template <int OUTS>
__device__ void write_sums(const weight_sums_call &c, const weight_tile &t, int group, bool add,
                           const float (&sum)[1][OUTS]) {
    int thread = threadIdx.x % WARPGROUP, first_unit = own_unit<OUTS>(group);
    int out = t.column_tile * OUTS + own_out<OUTS>(group) + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int u = 0; u < OUTS * 2 / SLICE; u++) {
        int unit = t.first_unit + first_unit + u, first = unit % c.channel_blocks * SLICE + thread % 4 * 2;
        if (first_unit + u >= t.units) continue;
        float *part = part_of(c, t, unit, first) + out, old[SLICE / 2] = {};
        /* f(accumulator of the unit, its place) */
        auto for_each_sum = [&](auto f) {
#pragma unroll
            for (int j = 0; j < SLICE; j += 8) {
                if (first + j >= c.channels) continue; /* the next channel exists, too: their number is even */
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (out + i / 2 * 8 < c.columns) f(j / 2 + i, part + (int64_t)(j + i % 2) * c.columns + i / 2 * 8);
            }
        };
        if (add) for_each_sum([&](int k, const float *from) { old[k] = *from; });
        for_each_sum([&](int k, float *to) { *to = sum[0][u * (SLICE / 2) + k] + old[k]; });
    }
}

/* The sums of dbias: every so many stages, so that the blocks with the same out channels and part share them. */
template <class T, int OUTS, pixel_order ORDER>
__device__ void add_bias(const weight_sums_call &c, weight_shared<OUTS> &shared, const weight_tile &t) {
    bias_sums<T, OUTS, sizeof(T) == 4 || ORDER != WALK> sums;
    ring<weight_shared<OUTS>::STAGES> at;
    int turn = t.first % c.unit_tiles;
#pragma unroll 1
    for (int step = 0; step < t.steps; step++) {
        barrier_wait(shared.full[at.stage], at.parity);
        if (turn == t.unit_tile) sums.add(shared.dy[at.stage]);
        if (++turn == c.unit_tiles) turn = 0;
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty[at.stage]);
        at.advance();
    }
    if (t.part >= c.parts) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int out = t.column_tile * OUTS + sums.first() + i * sums.APART;
        if (out < c.columns) c.bias[((int64_t)out * c.parts + t.part) * c.unit_tiles + t.unit_tile] = sums.total[i];
    }
}

/* Units that do not exist are multiplied, too: what lies in their place is not written. */
template <class T, int OUTS, pixel_order ORDER>
__device__ void consume(const weight_sums_call &c, weight_shared<OUTS> &shared, const weight_tile &t) {
    int group = warpgroup() - 1, thread = threadIdx.x % (BY_REGISTERS<T, ORDER> ? 32 : WARPGROUP);
    int rank = block_of_cluster(), last = 0;
    ring<weight_shared<OUTS>::STAGES> at;
    auto release = [&](int stage) {
        if (c.shares_units ? thread < CLUSTER : thread == rank) barrier_arrive_in(thread, shared.empty[stage]);
    };
    int pixel = ORDER == DY_PLANES ? t.first % c.image_steps * DEPTH<T> : 0; /* of its image */
#pragma unroll 1
    for (int done = 0; done < t.steps; done += c.chain_steps) {
        float sum[BY_REGISTERS<T, ORDER> ? OWN : 1][BY_REGISTERS<T, ORDER> ? OUTS / 2 : OUTS];
        int steps = min(c.chain_steps, t.steps - done);
        if constexpr (BY_REGISTERS<T, ORDER>) {
            transposed_left left;
#pragma unroll 1
            for (int step = 0; step < steps; step++) {
                /* The pixels of x continue in the next image, those of dy are then zero; x may be infinite there. */
                int pixels = ORDER == DY_PLANES ? c.plane - pixel : DEPTH<T>;
                barrier_wait(shared.full[at.stage], at.parity);
                left.multiply(sum, shared.x[at.stage] + group * OWN * UNIT_BYTES, shared_address(shared.dy[at.stage]),
                              pixels, step > 0, [&] {
                                  if (step > 0) release(last);
                              });
                if (ORDER == DY_PLANES && (pixel += DEPTH<T>) >= c.plane) pixel = 0;
                last = at.stage;
                at.advance();
            }
            left.finish();
        } else {
#pragma unroll 1
            for (int step = 0; step < steps; step++) {
                uint32_t x = shared_address(shared.x[at.stage]) + (uint32_t)(own_unit<OUTS>(group) * UNIT_BYTES);
                uint32_t dy = shared_address(shared.dy[at.stage]) + (uint32_t)(own_out<OUTS>(group) * 128);
                barrier_wait(shared.full[at.stage], at.parity);
                products_begin();
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if constexpr (ORDER == PLANES)
                        product<T, false>(sum[0], over_columns(dy, 0, 0, i), over_columns(x, 0, 0, i),
                                          step > 0 || i > 0);
                    else
                        product<T, true, true>(sum[0], over_rows(dy, SLICE, i), over_rows(x, SLICE, i),
                                               step > 0 || i > 0);
                products_commit();
                products_wait<1>();
                if (step > 0) release(last);
                last = at.stage;
                at.advance();
            }
            products_wait<0>();
        }
#pragma unroll
        for (auto &s : sum)
            pin(s);
        release(last);
        write_sums<OUTS>(c, t, group, done > 0, sum);
    }
}

#endif

template <class T, int OUTS, pixel_order ORDER>
__global__ void VJP_IN_CLUSTERS(CLUSTER) __launch_bounds__(THREADS, 1)
    weight_products(const __grid_constant__ weight_sums_call c) {
#if VJP_HOPPER
    auto &shared = aligned_shared<weight_shared<OUTS>>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < weight_shared<OUTS>::STAGES; i++) {
            barrier_init(shared.full[i], 1);
            /* Each warp arrives that has read shared memory by itself. */
            int arrivals = CONSUMERS * (BY_REGISTERS<T, ORDER> ? WARPGROUP / 32 : 1) * (c.shares_units ? CLUSTER : 1);
            barrier_init(shared.empty[i], arrivals + (c.bias ? BIAS_WARPS<OUTS> : 0));
        }
        barriers_are_ready();
    }
    cluster_sync();
    begin_chained();
    weight_tile t(c);
    if (threadIdx.x < WARPGROUP) {
        give_registers<40>();
        int warp = (int)threadIdx.x / 32;
        if (threadIdx.x == 0)
            produce<T, OUTS, ORDER>(c, shared, t);
        else if (c.bias && warp >= 1 && warp <= BIAS_WARPS<OUTS>)
            add_bias<T, OUTS, ORDER>(c, shared, t);
    } else {
        take_registers<232>();
        if (t.part < c.parts) consume<T, OUTS, ORDER>(c, shared, t);
    }
    __syncwarp();
    cluster_sync(); /* the other block may still write and arrive here */
#endif
}

/*
 * Multiprocessors that the split is made for, blocks that begin and end cost as much as this many steps, and so does it
 * to write and add a part of one result. (A step multiplies 64 pixels by a tile, or 32 in TF32, in 0.8 microseconds.)
 */
constexpr int64_t PROCESSORS = 132, BLOCK_STEPS = 6, MOST_PARTS = 2 * PROCESSORS;
constexpr double RESULT_STEPS = 2.6e-6, MAX_PARTIAL = 16 << 20; /* sums of several parts: 64 MiB */

/* What the split follows from. */
struct weight_split {
    int outs, channel_blocks, units, unit_tiles, block_units, column_tiles;
    int64_t steps, image_steps, parts, part_steps;

    explicit weight_split(const weight_sums &w) {
        int64_t plane = (int64_t)w.down.count * w.across.count;
        outs = w.columns > 64 ? 128 : 64;
        channel_blocks = (int)vjp_divide_up(w.channels, SLICE);
        units = w.down.taps * w.across.taps * channel_blocks;
        unit_tiles = (int)vjp_divide_up(units, UNITS);
        block_units = (int)vjp_divide_up(units, unit_tiles);
        column_tiles = (int)vjp_divide_up(w.columns, outs);
        if (column_tiles > 1) column_tiles = (int)vjp_round_up(column_tiles, CLUSTER);
        image_steps = vjp_divide_up(plane, depth_of(w.type));
        steps = w.order == WALK ? vjp_divide_up(w.batch * plane, depth_of(w.type)) : w.batch * image_steps;
        parts = 1;
        double least = 0, results = (double)units * SLICE * (double)w.columns;
        for (int64_t n = 1; n <= vjp_min(MOST_PARTS, steps); n++) {
            if (n > 1 && (double)n * results > MAX_PARTIAL) break;
            int64_t rounds = vjp_divide_up(n * unit_tiles * column_tiles, PROCESSORS);
            double cost =
                (double)(rounds * (vjp_divide_up(steps, n) + BLOCK_STEPS)) + (double)n * results * RESULT_STEPS;
            if (n > 1 && cost >= least) continue;
            least = cost;
            parts = n;
        }
        part_steps = vjp_divide_up(steps, parts);
        parts = vjp_divide_up(steps, part_steps);
    }
};

template <class T, int OUTS, pixel_order ORDER> vjp_status enqueue(const vjp_work *work, const weight_sums_call &c) {
    int64_t blocks = vjp_round_up((int64_t)c.unit_tiles * c.column_tiles * c.parts, CLUSTER);
    return launch(work, true, weight_products<T, OUTS, ORDER>, blocks, THREADS, sizeof(weight_shared<OUTS>), c);
}

template <class T, pixel_order ORDER> vjp_status enqueue(const vjp_work *work, int outs, const weight_sums_call &c) {
    return outs == 64 ? enqueue<T, 64, ORDER>(work, c) : enqueue<T, 128, ORDER>(work, c);
}

} // namespace

int64_t weight_parts(const weight_sums &w) {
    return weight_split(w).parts;
}

int64_t bias_chunks(const weight_sums &w) {
    weight_split s(w);
    return s.parts * s.unit_tiles;
}

vjp_status multiply_weight_sums(const vjp_work *work, const weight_sums &w) {
    weight_split s(w);
    weight_sums_call c{};
    int64_t plane = (int64_t)w.down.count * w.across.count;
    vjp_dtype type = w.type;
    int depth = depth_of(type);
    c.partial = w.partial;
    c.bias = w.bias;
    c.down = w.down;
    c.across = w.across;
    c.channels = (int)w.channels;
    c.columns = (int)w.columns;
    c.channel_blocks = s.channel_blocks;
    c.units = s.units;
    c.block_units = s.block_units;
    c.unit_tiles = s.unit_tiles;
    c.column_tiles = s.column_tiles;
    c.shares_units = s.column_tiles > 1;
    c.parts = (int)s.parts;
    c.steps = (int)s.steps;
    c.part_steps = (int)s.part_steps;
    c.chain_steps = w.chain_pixels / depth;
    c.plane = (int)plane;
    c.image_steps = (int)s.image_steps;
    c.step_rows = depth / w.across.count;
    c.step_columns = depth % w.across.count;
    bool mapped = w.order == PLANES ? make_map(&c.x, w.x, plane, type, w.batch, w.channels, 1, plane, SLICE)
                                    : make_walk(&c.x, w.x, type, w.batch, w.down, w.across, w.channels, depth);
    if (w.order != WALK)
        mapped = mapped && make_map(&c.dy, w.dy, plane, type, w.batch, w.columns, 1, plane, s.outs);
    else if (type == VJP_F32)
        mapped = mapped && make_map(&c.dy, w.dy, w.dy_step, type, 1, w.columns, 1, w.dy_step, s.outs);
    else
        mapped = mapped && make_map(&c.dy, w.dy, w.columns, type, 1, w.batch * plane, 1, w.columns, depth);
    if (!mapped)
        return vjp_refuse(work, VJP_DEVICE_FAILED, "%s: the driver refused the description of a tensor",
                          work->device->name);
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        if (w.order == PLANES) return enqueue<T, PLANES>(work, s.outs, c);
        if constexpr (sizeof(T) == 4)
            if (w.order == DY_PLANES) return enqueue<T, DY_PLANES>(work, s.outs, c);
        return enqueue<T, WALK>(work, s.outs, c);
    });
}

} // namespace hopper
} // namespace vjp

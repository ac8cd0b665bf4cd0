/* SPDX-License-Identifier: MIT */
/*
 * The backward of group_norm, channels first, with a group in the registers of a block, or of a cluster of blocks: x
 * and dy are read once.
 *
 * Blocks are persistent and process group after group. A line is 512 bytes of one channel, 16 for each lane; a warp
 * owns 8 lines of a group, or 4, all of one channel, so that it has one gamma and one pair of sums. A thread copies its
 * own 16 bytes of each line to shared memory (no barrier: no other thread reads them), loads them from there into
 * registers and keeps them until their dx is written. So shared memory holds nothing but what comes next: a place is
 * free for another copy as soon as a line is in registers, long before the group's sums are known, and copies are in
 * flight at all times.
 *
 * At 32x320x64x64 with 32 groups a group is 20 warps of 8 lines in bf16, one block; in f32 40 warps, a cluster of two.
 * Either way a multiprocessor reads 160 KB and writes 80 for each share of a group, 7.4 microseconds at 4.26 TB/s. That
 * is 52,000 instructions that could be issued; 20 warps issue about 900 each in bf16 and 500 in f32, and wait once,
 * about a microsecond, for the sums of all. Meanwhile 200 KB of copies are ahead, of which memory's latency needs 32.
 *
 * Tried on an H200 and slower: the warps of a channel alternating along it, copies that bring 256 bytes into L2, ten
 * smaller stages, and groups taken by ticket, which lets blocks end together but not sooner.
 *
 * Only saved statistics are available at once; others are computed from the staged lines, in two more rounds of sums.
 * The order and places of all sums depend on sizes alone.
 */
#ifndef VJP_CUDA_GROUP_NORM_REGISTERS_CUH
#define VJP_CUDA_GROUP_NORM_REGISTERS_CUH

#include "cuda/norm/group_norm_shared.cuh"

namespace vjp {
namespace {

/* Warps of a multiprocessor, in one block or several: 96 registers per thread, of which 64 hold x and dy. */
constexpr int REGISTER_WARPS = 20;

constexpr int LINE_BYTES = 512;                           /* bytes */
constexpr int STAGE_LINES = 2;                            /* of x, and as many of dy, that are copied together */
constexpr int REGISTER_STAGES = 5;                        /* of the ring */
constexpr int STAGE_BYTES = 2 * STAGE_LINES * LINE_BYTES; /* bytes of a warp */

struct register_split {
    int blocks, warps;   /* of a cluster; of a block */
    int segments, tasks; /* warps of a channel; of a group */
};

/* ---- Sums over a cluster ----------------------------------------------------------------------------- */

/*
 * At the front of shared memory: two numbers from each warp of the cluster, in two sets that calls alternate between.
 * The ring follows, and begins on a multiple of 128 bytes: on an H200 that runs at 0.87 of the limit in bf16 and 0.92
 * in f32, the same code 16 bytes further at 0.80 and 0.84, and 80 bytes further at 0.74 and 0.77.
 */
struct alignas(128) register_sums {
    double2 warp[2][REGISTER_WARPS * MAX_CLUSTER];
    unsigned long long arrived[2]; /* barriers that count the bytes received from the cluster */
};
static_assert(sizeof(register_sums) % 16 == 0, "what follows it is copied to 16 bytes at a time");

struct register_exchange {
    register_sums *sums;
    int rank, blocks, warps;
    unsigned exchanges; /* so far */
};

/*
 * The sum over all warps of the cluster of both numbers, or the largest of the second; a warp's are in all its lanes.
 *
 * Each warp sends its numbers to every block, so one wait is enough. A set is written again after the wait for the
 * other set, which no warp fills before it has read the first.
 */
__device__ double2 cluster_total(register_exchange &exchange, double2 mine, bool largest) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = exchange.blocks * exchange.warps;
    unsigned set = exchange.exchanges % 2, parity = exchange.exchanges / 2 % 2;
    double2 *slots = exchange.sums->warp[set];
    if (exchange.blocks == 1) {
        if (lane == 0) slots[warp] = mine;
        __syncthreads();
    } else {
        unsigned long long *arrival = &exchange.sums->arrived[set];
        double2 *slot = &slots[exchange.rank * exchange.warps + warp];
        if (threadIdx.x == 0) expect(arrival, all * (int)sizeof(double2));
        if (lane < exchange.blocks) {
            send(&slot->x, arrival, lane, mine.x);
            send(&slot->y, arrival, lane, mine.y);
        }
        wait_arrival(arrival, parity);
    }
    exchange.exchanges++;
    double2 total{0, 0};
#pragma unroll 1
    for (int k = lane; k < all; k += 32) {
        total.x += slots[k].x;
        total.y = largest ? fmax(total.y, slots[k].y) : total.y + slots[k].y;
    }
    total.x = warp_sum(total.x);
    if (!largest) {
        total.y = warp_sum(total.y);
        return total;
    }
#pragma unroll
    for (int step = 16; step; step /= 2)
        total.y = fmax(total.y, __shfl_xor_sync(0xffffffffu, total.y, step));
    return total;
}

/* ---- Lines ------------------------------------------------------------------------------------------- */

/* A warp's lines of x and dy as stored. */
template <int LINES> struct register_lines { uint4 x[LINES], dy[LINES]; };

template <class T> __device__ unit<T, WIDE<T>> unit_of(uint4 raw) {
    unit<T, WIDE<T>> u;
    *reinterpret_cast<uint4 *>(&u) = raw;
    return u;
}

/*
 * Makes the compiler convert the lines again from here on. It would rather keep every element as f32, in twice the
 * registers of 16 bits.
 */
template <int LINES> __device__ void convert_again(register_lines<LINES> &lines) {
#pragma unroll
    for (int i = 0; i < LINES; i++)
        asm volatile(""
                     : "+r"(lines.x[i].x), "+r"(lines.x[i].y), "+r"(lines.x[i].z), "+r"(lines.x[i].w),
                       "+r"(lines.dy[i].x), "+r"(lines.dy[i].y), "+r"(lines.dy[i].z), "+r"(lines.dy[i].w));
}

/* The sums of a line's dy and dy * xh, in two chains each. */
template <class T> __device__ void add_line(uint4 raw_x, uint4 raw_dy, scale s, float (&sum)[2], float (&product)[2]) {
    float x[WIDE<T>], dy[WIDE<T>];
    unpack<T>(raw_x, x);
    unpack<T>(raw_dy, dy);
#pragma unroll
    for (int i = 0; i < WIDE<T>; i++) {
        sum[i % 2] += dy[i];
        product[i % 2] = fmaf(normalise(x[i], s), dy[i], product[i % 2]);
    }
}

/* ---- A warp's pipeline ------------------------------------------------------------------------------- */

/*
 * What a group needs besides x and dy, loaded one group ahead. gamma stays as stored until it is used: converted to f32
 * at once, it would be waited for at once.
 */
struct group_inputs {
    float mean, rstd;
    unsigned gamma;
};

template <class T, int LINES, bool USUAL> struct register_pipeline {
    static constexpr int GROUP_STAGES = LINES / STAGE_LINES, LINE_ELEMENTS = LINE_BYTES / (int)sizeof(T);
    static_assert(LINES % STAGE_LINES == 0);
    const group_call &call;
    unsigned char *ring; /* this thread's first 16 bytes */
    int own, span;       /* this thread's first element of a group; elements of a group */
    int channel, rows, stride;
    bool has_lines;   /* this warp has lines */
    int at;           /* bytes from `ring`: the oldest stage */
    int ahead;        /* of the next copy: its row */
    int64_t ahead_at; /* and this thread's first element there */

    __device__ bool aligned() const {
        return USUAL || call.aligned;
    }

    __device__ group_inputs inputs_of(int row) const {
        group_inputs b{0, 0, 0};
        if (row >= rows) return b;
        if (USUAL || call.mean_in) {
            b.mean = call.mean_in[row];
            b.rstd = call.rstd_in[row];
        }
        int64_t index = row % (int)call.groups * call.group_channels + channel;
        if (!call.gamma.data || !has_lines) return b;
        if (sizeof(T) == 4 || call.gamma.f32)
            b.gamma = static_cast<const unsigned *>(call.gamma.data)[index];
        else
            b.gamma = static_cast<const unsigned short *>(call.gamma.data)[index];
        return b;
    }

    __device__ float gamma_of(const group_inputs &b) const {
        if (!call.gamma.data) return 1;
        if (sizeof(T) == 4 || call.gamma.f32) return __int_as_float((int)b.gamma);
        float two[WIDE<T>];
        unpack<T>(uint4{b.gamma, 0, 0, 0}, two);
        return two[0];
    }

    __device__ void point_ahead() {
        ahead_at = (int64_t)ahead * span + own;
    }

    /* Starts the copy of stage `part` of a group. Each is a group of copies, even an empty one: they are counted. */
    __device__ void copy(int part, int to) {
        const T *ahead_x = static_cast<const T *>(call.x) + ahead_at,
                *ahead_dy = static_cast<const T *>(call.dy) + ahead_at;
        if (ahead < rows && has_lines)
#pragma unroll
            for (int i = 0; i < STAGE_LINES; i++) {
                int line = part * STAGE_LINES + i;
                copy_async(ring + to + i * LINE_BYTES, ahead_x + line * LINE_ELEMENTS);
                copy_async(ring + to + (STAGE_LINES + i) * LINE_BYTES, ahead_dy + line * LINE_ELEMENTS);
            }
        commit_copies();
    }

    __device__ void wait() {
        wait_copies<REGISTER_STAGES - 1>();
    }

    /* Starts the first copies, after prefetching their data into L2 while the previous kernel still runs. */
    __device__ void fill(int first) {
        ahead = first;
        point_ahead();
        int64_t here = ahead_at;
        for (int i = 0; aligned() && has_lines && ahead < rows && i < LINES; i++, here += LINE_ELEMENTS) {
            prefetch(static_cast<const T *>(call.x) + here);
            prefetch(static_cast<const T *>(call.dy) + here);
        }
        wait_for_previous();
        if (!aligned()) return;
#pragma unroll
        for (int stage = 0; stage < REGISTER_STAGES; stage++) {
            if (stage && stage % GROUP_STAGES == 0) next_ahead();
            copy(stage % GROUP_STAGES, stage * STAGE_BYTES);
        }
    }

    __device__ void next_ahead() {
        ahead += stride;
        point_ahead();
    }

    __device__ void step() {
        at += STAGE_BYTES;
        if (at == REGISTER_STAGES * STAGE_BYTES) at = 0;
    }

    __device__ uint4 line_at(int place, int i) const {
        return *reinterpret_cast<const uint4 *>(ring + place + i * LINE_BYTES);
    }

    /* Loads a stage into registers. */
    __device__ void load_stage(int part, register_lines<LINES> &lines) {
        wait();
#pragma unroll
        for (int i = 0; i < STAGE_LINES; i++) {
            lines.x[part * STAGE_LINES + i] = line_at(at, i);
            lines.dy[part * STAGE_LINES + i] = line_at(at, STAGE_LINES + i);
        }
    }

    /* Its place is free: starts another copy. */
    __device__ void copy_next(int part) {
        if ((part + REGISTER_STAGES) % GROUP_STAGES == 0) next_ahead();
        copy((part + REGISTER_STAGES) % GROUP_STAGES, at);
        step();
    }

    /* Writes the dx of a line, whose first element of this thread is `to`. */
    __device__ void write(T *to, uint4 raw_x, uint4 raw_dy, scale s, float weight, affine map) const {
        float value[WIDE<T>], dy[WIDE<T>];
        unpack<T>(raw_x, value);
        unpack<T>(raw_dy, dy);
#pragma unroll
        for (int e = 0; e < WIDE<T>; e++)
            value[e] = fmaf(weight, dy[e], fmaf(map.slope, normalise(value[e], s), map.level));
        if constexpr (USUAL)
            __stcs(reinterpret_cast<uint4 *>(to), pack<T>(value));
        else
            write_unit<T, WIDE<T>>(to, value, call.aligned, call.add);
    }

    /* ---- In the general case lines stay in shared memory until their dx is written. */

    /* Calls f(line, x, dy) for the warp's lines. */
    template <class F> __device__ void each_line(F f) const {
        int place = at;
#pragma unroll 1
        for (int part = 0; has_lines && part < GROUP_STAGES; part++) {
#pragma unroll
            for (int i = 0; i < STAGE_LINES; i++)
                f(part * STAGE_LINES + i, line_at(place, i), line_at(place, STAGE_LINES + i));
            place = place + STAGE_BYTES == REGISTER_STAGES * STAGE_BYTES ? 0 : place + STAGE_BYTES;
        }
    }

    /* Waits for a group's lines. Those that are not aligned are copied here, element by element. */
    __device__ void wait_for_group(int row) {
        static_assert(GROUP_STAGES <= REGISTER_STAGES);
        if (call.aligned) {
            wait_copies<REGISTER_STAGES - GROUP_STAGES>();
            return;
        }
        at = 0;
        int64_t from = (int64_t)row * span + own;
#pragma unroll 1
        for (int line = 0; has_lines && line < LINES; line++, from += LINE_ELEMENTS) {
            unsigned char *to = ring + line / STAGE_LINES * STAGE_BYTES + line % STAGE_LINES * LINE_BYTES;
            *reinterpret_cast<unit<T, WIDE<T>> *>(to) =
                load_unit<T, WIDE<T>>(static_cast<const T *>(call.x) + from, false);
            *reinterpret_cast<unit<T, WIDE<T>> *>(to + STAGE_LINES * LINE_BYTES) =
                load_unit<T, WIDE<T>>(static_cast<const T *>(call.dy) + from, false);
        }
    }

    __device__ void release_group() {
        for (int part = 0; call.aligned && part < GROUP_STAGES; part++)
            copy_next(part);
    }

    /* The group's moments, in two passes over the lines. */
    __device__ moments measure(register_exchange &exchange) const {
        double count = span;
        float sum = 0, largest = 0, squares = 0;
        each_line([&](int, uint4 x, uint4) { add_first(unit_of<T>(x), sum, largest); });
#pragma unroll
        for (int step = 16; step; step /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        double2 total = cluster_total(exchange, {warp_sum((double)sum), largest}, true);
        center near = center_of(total.x, count, (float)total.y);
        sum = 0;
        each_line([&](int, uint4 x, uint4) { add_second(unit_of<T>(x), near, sum, squares); });
        total = cluster_total(exchange, {warp_sum((double)sum), warp_sum((double)squares)}, false);
        return moments_of(near, total.x, total.y, count);
    }
};

/*
 * Compiled for the calls of training (USUAL: tensors are aligned, dx is wanted and overwritten, statistics saved) with
 * nothing else in it, and with all choices at run time.
 */
template <class T, int LINES, bool USUAL>
__global__ void __launch_bounds__(32 * REGISTER_WARPS, 1) register_groups(group_call call, register_split split) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200 /* where plan_registers() allows it */
    extern __shared__ __align__(16) unsigned char memory[];
    register_sums *sums = reinterpret_cast<register_sums *>(memory);
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    if (split.blocks > 1) { /* this block has started; the others wait for it before they write to it */
        if (threadIdx.x == 0) {
            make_arrival(&sums->arrived[0]);
            make_arrival(&sums->arrived[1]);
        }
        cluster_arrive();
    }
    let_next_begin();
    int rank = (int)(blockIdx.x % (unsigned)split.blocks), cluster = (int)(blockIdx.x / (unsigned)split.blocks);
    int task = rank * split.warps + warp, channel = task / split.segments, segment = task - channel * split.segments;
    register_exchange exchange{sums, rank, split.blocks, split.warps, 0};
    register_pipeline<T, LINES, USUAL> pipeline{call,
                                                memory + sizeof(register_sums) + warp * REGISTER_STAGES * STAGE_BYTES +
                                                    lane * 16,
                                                channel * (int)call.plane + (segment * LINES * 32 + lane) * WIDE<T>,
                                                (int)(call.group_channels * call.plane),
                                                channel,
                                                (int)(call.batch * call.groups),
                                                (int)(gridDim.x / (unsigned)split.blocks),
                                                task < split.tasks,
                                                0,
                                                0,
                                                0};
    pipeline.fill(cluster);
    group_inputs inputs = pipeline.inputs_of(cluster);
    if (split.blocks > 1) cluster_wait();
    for (int row = cluster; row < pipeline.rows; row += pipeline.stride) {
        group_inputs next = pipeline.inputs_of(row + pipeline.stride);
        register_lines<LINES> lines;
        float sum[2] = {}, product[2] = {}, gamma;
        scale s;
        if constexpr (USUAL) {
            s = scale_of(inputs.mean, inputs.rstd);
#pragma unroll
            for (int part = 0; part < pipeline.GROUP_STAGES; part++) {
                pipeline.load_stage(part, lines);
                pipeline.copy_next(part);
#pragma unroll
                for (int i = part * STAGE_LINES; i < (part + 1) * STAGE_LINES; i++)
                    add_line<T>(lines.x[i], lines.dy[i], s, sum, product);
            }
        } else {
            pipeline.wait_for_group(row);
            if (call.mean_in) {
                s = scale_of(inputs.mean, inputs.rstd);
            } else {
                moments m = pipeline.measure(exchange);
                s = measured_scale(call, row, m.mean, m.squares, false);
            }
            pipeline.each_line([&](int, uint4 x, uint4 dy) { add_line<T>(x, dy, s, sum, product); });
        }
        gamma = pipeline.gamma_of(inputs);
        inputs = next;
        double2 mine{0, 0};
        sum[0] = warp_sum(add_up(sum));
        product[0] = warp_sum(add_up(product));
        if (pipeline.has_lines) {
            mine.x = sum[0];
            mine.y = product[0] + (double)s.rest * mine.x;
            if (call.partials && lane == 0) call.partials[(int64_t)row * split.tasks + task] = mine;
            mine.x *= gamma;
            mine.y *= gamma;
        }
        double2 total = cluster_total(exchange, mine, false);
        affine map = backward_map(call, s, total.x, total.y);
        float weight = s.rstd * gamma;
        T *out = static_cast<T *>(call.out) + ((int64_t)row * pipeline.span + pipeline.own);
        if constexpr (USUAL) {
            convert_again(lines);
#pragma unroll
            for (int i = 0; i < LINES; i++)
                if (pipeline.has_lines)
                    pipeline.write(out + i * pipeline.LINE_ELEMENTS, lines.x[i], lines.dy[i], s, weight, map);
        } else {
            if (call.out)
                pipeline.each_line([&](int i, uint4 x, uint4 dy) {
                    pipeline.write(out + i * pipeline.LINE_ELEMENTS, x, dy, s, weight, map);
                });
            pipeline.release_group();
        }
    }
#else
    (void)call, (void)split;
#endif
}

/* ---- The split --------------------------------------------------------------------------------------- */

struct register_plan {
    register_split split;
    int lines;    /* of a warp */
    int resident; /* blocks per multiprocessor */
    size_t shared;
};

/* With fewer than SPREAD_BLOCKS blocks a group is shared by more of them, down to this many warps each. */
constexpr int64_t MIN_WARPS = 4;

/*
 * False on cards without clusters, and where another path is faster: where the lines of a channel are no multiple of
 * four, a group is too large for a cluster's registers, or more than a quarter of a multiprocessor's warps would be
 * idle.
 */
inline bool plan_registers(const group_call &call, int64_t bytes, bool clusters, int64_t limit, register_plan *plan) {
    int64_t lines = call.plane * bytes / LINE_BYTES, rows = call.batch * call.groups, widest = REGISTER_WARPS;
    if (!clusters || call.plane * bytes % (4 * LINE_BYTES) || call.group_channels > INT_MAX / lines) return false;
    plan->lines = lines % 8 ? 4 : 8;
    int64_t segments = lines / plan->lines, tasks = call.group_channels * segments, blocks = 1;
    while (blocks < MAX_CLUSTER &&
           (tasks > blocks * widest || (rows * blocks < SPREAD_BLOCKS && tasks >= 2 * blocks * MIN_WARPS)))
        blocks *= 2;
    int64_t warps = vjp_divide_up(tasks, blocks);
    if (warps > widest) return false;
    plan->resident = (int)(REGISTER_WARPS / warps);
    plan->split = {(int)blocks, (int)warps, (int)segments, (int)tasks};
    plan->shared = sizeof(register_sums) + (size_t)(warps * REGISTER_STAGES * STAGE_BYTES);
    while (plan->resident && ((int64_t)plan->shared + RESERVED_BYTES) * plan->resident > limit + RESERVED_BYTES)
        plan->resident--;
    return plan->resident && (4 * warps * plan->resident >= 3 * REGISTER_WARPS || rows * blocks < SPREAD_BLOCKS);
}

} // namespace
} // namespace vjp

#endif

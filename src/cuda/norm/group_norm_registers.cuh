/* SPDX-License-Identifier: MIT */
/*
 * group_norm, channels first, with a group in the registers of a block, or of a cluster of blocks: x and dy are read
 * once.
 *
 * Blocks are persistent and process group after group. A line is 512 bytes of one channel, 16 for each lane; a warp
 * owns 4, 8 or (forward) 16 lines of a group, all of one channel, so that it has one gamma and one pair of sums. A
 * thread copies its own 16 bytes of each line to shared memory (no barrier: no other thread reads them), loads them
 * from there into registers and keeps them until their y or dx is written. So shared memory holds nothing but what
 * comes next: a place is free for another copy as soon as a line is in registers, long before the group's sums are
 * known, and copies are in flight at all times.
 *
 * The backward of 32x320x64x64 with 32 groups: a group is 20 warps of 8 lines in bf16, one block; in f32 40 warps, a
 * cluster of two. Either way a multiprocessor reads 160 KB and writes 80 for each share of a group, 7.4 microseconds at
 * 4.26 TB/s. That is 52,000 instructions that could be issued; 20 warps issue about 900 each in bf16 and 500 in f32,
 * and wait once, about a microsecond, for the sums of all. Meanwhile 200 KB of copies are ahead, of which memory's
 * latency needs 32.
 *
 * The forward keeps x alone, so a warp owns twice the lines: a group is 10 warps in bf16, and a multiprocessor holds
 * two groups, so that one computes while the other waits; in f32 a group is 20 warps, one block. The multiprocessor
 * reads 160 KB and writes as much, time to issue 71,000 instructions, of which 20 warps need about 1250 each in bf16
 * and 600 in f32. A mean and then a variance would be two waits for all warps; instead each warp computes both of its
 * own lines, and the group's follow from theirs after one.
 *
 * Tried on an H200 and slower, in the backward: the warps of a channel alternating along it, copies that bring 256
 * bytes into L2, ten smaller stages, and groups taken by ticket, which lets blocks end together but not sooner.
 *
 * The order and places of all sums depend on sizes alone.
 */
#ifndef VJP_CUDA_GROUP_NORM_REGISTERS_CUH
#define VJP_CUDA_GROUP_NORM_REGISTERS_CUH

#include "cuda/norm/group_norm_shared.cuh"

namespace vjp {
namespace {

/* Warps of a multiprocessor, in one block or several: 96 registers per thread, of which 64 hold lines. */
constexpr int REGISTER_WARPS = 20;

constexpr int LINE_BYTES = 512;                       /* bytes */
constexpr int STAGE_LINES = 4;                        /* copied together: of x, or two of x and two of dy */
constexpr int REGISTER_STAGES = 5;                    /* of the ring */
constexpr int STAGE_BYTES = STAGE_LINES * LINE_BYTES; /* bytes of a warp */

struct register_split {
    int blocks, warps;   /* of a cluster; of a block */
    int segments, tasks; /* warps of a channel; of a group */
    int rows, span;      /* groups; elements of each */
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
    int rank, blocks, warps, tasks;
    unsigned exchanges; /* so far */
};

/*
 * The numbers of all warps of the cluster, by task; a warp's are in all its lanes.
 *
 * Each warp sends its numbers to every block, so one wait is enough. A set is written again after the wait for the
 * other set, which no warp fills before it has read the first.
 */
__device__ const double2 *exchange_warps(register_exchange &exchange, double2 mine) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned set = exchange.exchanges % 2, parity = exchange.exchanges / 2 % 2;
    double2 *slots = exchange.sums->warp[set];
    if (exchange.blocks == 1) {
        if (lane == 0) slots[warp] = mine;
        __syncthreads();
    } else {
        unsigned long long *arrival = &exchange.sums->arrived[set];
        double2 *slot = &slots[exchange.rank * exchange.warps + warp];
        if (threadIdx.x == 0) expect(arrival, exchange.blocks * exchange.warps * (int)sizeof(double2));
        if (lane < exchange.blocks) {
            send(&slot->x, arrival, lane, mine.x);
            send(&slot->y, arrival, lane, mine.y);
        }
        wait_arrival(arrival, parity);
    }
    exchange.exchanges++;
    return slots;
}

/* The sums of both numbers over the group. */
__device__ double2 group_total(register_exchange &exchange, double2 mine) {
    const double2 *all = exchange_warps(exchange, mine);
    double2 total{0, 0};
#pragma unroll 1
    for (int k = threadIdx.x % 32; k < exchange.tasks; k += 32) {
        total.x += all[k].x;
        total.y += all[k].y;
    }
    return {warp_sum(total.x), warp_sum(total.y)};
}

/*
 * The group's moments from those of its warps, which have equally many elements; share: 1 / elements of the group.
 * Means are relative to the first warp's, whose distance from the others is part of the variance: so at most a factor
 * of the number of warps is lost in the difference, of double.
 */
__device__ moments group_moments(register_exchange &exchange, moments mine, double share) {
    const double2 *all = exchange_warps(exchange, {mine.mean, mine.squares});
    double first = all[0].x, sum = 0, squares = 0;
#pragma unroll 1
    for (int k = threadIdx.x % 32; k < exchange.tasks; k += 32) {
        double offset = all[k].x - first;
        sum += offset;
        squares += all[k].y + mine.count * offset * offset;
    }
    sum = warp_sum(sum);
    double offset = sum * mine.count * share;
    squares = warp_sum(squares) - sum * mine.count * offset;
    return {mine.count * exchange.tasks, first + offset, squares < 0 ? 0 : squares};
}

/* ---- Lines ------------------------------------------------------------------------------------------- */

/* A warp's lines as stored; without dy in the forward. */
template <int LINES, bool BACKWARD> struct register_lines { uint4 x[LINES], dy[BACKWARD ? LINES : 1]; };

__device__ void convert_again(uint4 &line) {
    asm volatile("" : "+r"(line.x), "+r"(line.y), "+r"(line.z), "+r"(line.w));
}

/*
 * Makes the compiler convert the lines again from here on. It would rather keep every element as f32, in twice the
 * registers of 16 bits.
 */
template <int LINES, bool BACKWARD> __device__ void convert_again(register_lines<LINES, BACKWARD> &lines) {
#pragma unroll
    for (int i = 0; i < LINES; i++) {
        convert_again(lines.x[i]);
        if constexpr (BACKWARD) convert_again(lines.dy[i]);
    }
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

/* Lines of a warp whose mean is the center that its distances are measured from. */
constexpr int CENTER_LINES = 2;

/* Chains of a thread's sums for the moments: each of at most 32 terms. */
constexpr int CHAINS = 4;

template <class T> __device__ void add_elements(uint4 raw, float (&sum)[CHAINS]) {
    float x[WIDE<T>];
    unpack<T>(raw, x);
#pragma unroll
    for (int i = 0; i < WIDE<T>; i++)
        sum[i % CHAINS] += x[i];
}

template <class T>
__device__ void add_distances(uint4 raw, center near, float (&sum)[CHAINS], float (&squares)[CHAINS]) {
    float x[WIDE<T>];
    unpack<T>(raw, x);
#pragma unroll
    for (int i = 0; i < WIDE<T>; i++) {
        float distance = fmaf(x[i], near.scale, near.shift);
        sum[i % CHAINS] += distance;
        squares[i % CHAINS] = fmaf(distance, distance, squares[i % CHAINS]);
    }
}

/*
 * Unscaled squares are good from LEAST_SQUARES, where no term that counts is below the range of f32, to MOST_SQUARES.
 * All elements that training meets are within.
 */
constexpr double LEAST_SQUARES = 0x1p-80, MOST_SQUARES = 0x1p120;

/* ---- A warp's pipeline ------------------------------------------------------------------------------- */

/*
 * What a group needs besides x and dy. The backward, which needs it first, loads it one group ahead; the forward needs
 * it last. gamma and beta stay as stored until they are used: converted to f32 at once, they would be waited for at
 * once.
 */
struct group_inputs {
    float mean, rstd;
    unsigned gamma, beta;
};

template <class T, int LINES, bool BACKWARD, bool USUAL> struct register_pipeline {
    static constexpr int PART_LINES = BACKWARD ? STAGE_LINES / 2 : STAGE_LINES; /* of a tensor in a stage */
    static constexpr int GROUP_STAGES = LINES / PART_LINES, LINE_ELEMENTS = LINE_BYTES / (int)sizeof(T);
    static constexpr int DY_AT = PART_LINES * LINE_BYTES;          /* bytes: dy in a stage */
    static constexpr double COUNT = (double)LINES * LINE_ELEMENTS; /* elements of a warp */
    static_assert(LINES % PART_LINES == 0 && CENTER_LINES <= PART_LINES);
    const group_call &call;
    const register_split &split;
    unsigned char *ring; /* this thread's first 16 bytes */
    int own;             /* this thread's first element of a group */
    int channel, stride;
    bool has_lines; /* this warp has lines */
    int at;         /* bytes from `ring`: the oldest stage */

    __device__ bool aligned() const {
        return USUAL || call.aligned;
    }

    __device__ unsigned stored(parameter p, int64_t index) const {
        if (!p.data || !has_lines) return 0;
        if (sizeof(T) == 4 || p.f32) return static_cast<const unsigned *>(p.data)[index];
        return static_cast<const unsigned short *>(p.data)[index];
    }

    __device__ float value_of(parameter p, unsigned stored, float absent) const {
        if (!p.data) return absent;
        if (sizeof(T) == 4 || p.f32) return __uint_as_float(stored);
        float two[WIDE<T>];
        unpack<T>(uint4{stored, 0, 0, 0}, two);
        return two[0];
    }

    __device__ group_inputs inputs_of(int row) const {
        group_inputs b{0, 0, 0, 0};
        if (row >= split.rows) return b;
        if (BACKWARD && (USUAL || call.mean_in)) {
            b.mean = call.mean_in[row];
            b.rstd = call.rstd_in[row];
        }
        int64_t index = row % (int)call.groups * call.group_channels + channel;
        b.gamma = stored(call.gamma, index);
        if (!BACKWARD) b.beta = stored(call.beta, index);
        return b;
    }

    /* This thread's first element of a group. */
    __device__ int64_t place_of(int row) const {
        return (int64_t)row * split.span + own;
    }

    /* Starts the copy of a stage, counted from a group's first. Each is a group of copies, even an empty one. */
    __device__ void copy(int row, int stage, int to) {
        row += stage / GROUP_STAGES * stride;
        int64_t place = place_of(row) + stage % GROUP_STAGES * PART_LINES * LINE_ELEMENTS;
        const T *x = static_cast<const T *>(call.x) + place, *dy = static_cast<const T *>(call.dy) + place;
        if (row < split.rows && has_lines)
#pragma unroll
            for (int i = 0; i < PART_LINES; i++) {
                copy_async(ring + to + i * LINE_BYTES, x + i * LINE_ELEMENTS);
                if constexpr (BACKWARD) copy_async(ring + to + DY_AT + i * LINE_BYTES, dy + i * LINE_ELEMENTS);
            }
        commit_copies();
    }

    __device__ void wait() {
        wait_copies<REGISTER_STAGES - 1>();
    }

    /* Starts the first copies, after prefetching their data into L2 while the previous kernel still runs. */
    __device__ void fill(int first) {
        int64_t here = place_of(first);
        for (int i = 0; aligned() && has_lines && first < split.rows && i < LINES; i++, here += LINE_ELEMENTS) {
            prefetch(static_cast<const T *>(call.x) + here);
            if constexpr (BACKWARD) prefetch(static_cast<const T *>(call.dy) + here);
        }
        wait_for_previous();
        if (!aligned()) return;
#pragma unroll
        for (int stage = 0; stage < REGISTER_STAGES; stage++)
            copy(first, stage, stage * STAGE_BYTES);
    }

    __device__ void step() {
        at += STAGE_BYTES;
        if (at == REGISTER_STAGES * STAGE_BYTES) at = 0;
    }

    __device__ uint4 line_at(int place, int i) const {
        return *reinterpret_cast<const uint4 *>(ring + place + i * LINE_BYTES);
    }

    /* Loads a stage into registers. */
    __device__ void load_stage(int part, register_lines<LINES, BACKWARD> &lines) {
        wait();
#pragma unroll
        for (int i = 0; i < PART_LINES; i++) {
            lines.x[part * PART_LINES + i] = line_at(at, i);
            if constexpr (BACKWARD) lines.dy[part * PART_LINES + i] = line_at(at + DY_AT, i);
        }
    }

    /* The place of a group's stage is free: starts another copy. */
    __device__ void copy_next(int row, int stage) {
        copy(row, stage + REGISTER_STAGES, at);
        step();
    }

    /* Writes the y or dx of a line, whose first element of this thread is `to`. */
    __device__ void write(T *to, uint4 raw_x, uint4 raw_dy, scale s, float weight, affine map) const {
        float value[WIDE<T>], dy[WIDE<T>];
        unpack<T>(raw_x, value);
        if constexpr (BACKWARD) unpack<T>(raw_dy, dy);
#pragma unroll
        for (int e = 0; e < WIDE<T>; e++) {
            value[e] = fmaf(map.slope, normalise(value[e], s), map.level);
            if constexpr (BACKWARD) value[e] = fmaf(weight, dy[e], value[e]);
        }
        if constexpr (USUAL)
            __stcs(reinterpret_cast<uint4 *>(to), pack<T>(value));
        else
            write_unit<T, WIDE<T>>(to, value, call.aligned, call.add);
    }

    /* ---- In the general case lines stay in shared memory until their y or dx is written. */

    /* Calls f(line, x, dy) for the warp's lines; without a dy in the forward. */
    template <class F> __device__ void each_line(F f) const {
        int place = at;
#pragma unroll 1
        for (int part = 0; has_lines && part < GROUP_STAGES; part++) {
#pragma unroll
            for (int i = 0; i < PART_LINES; i++)
                f(part * PART_LINES + i, line_at(place, i), BACKWARD ? line_at(place + DY_AT, i) : uint4{});
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
        int64_t from = place_of(row);
#pragma unroll 1
        for (int line = 0; has_lines && line < LINES; line++, from += LINE_ELEMENTS) {
            unsigned char *to = ring + line / PART_LINES * STAGE_BYTES + line % PART_LINES * LINE_BYTES;
            *reinterpret_cast<unit<T, WIDE<T>> *>(to) =
                load_unit<T, WIDE<T>>(static_cast<const T *>(call.x) + from, false);
            if constexpr (BACKWARD)
                *reinterpret_cast<unit<T, WIDE<T>> *>(to + DY_AT) =
                    load_unit<T, WIDE<T>>(static_cast<const T *>(call.dy) + from, false);
        }
    }

    __device__ void release_group(int row) {
        for (int part = 0; call.aligned && part < GROUP_STAGES; part++)
            copy_next(row, part);
    }

    /* ---- Moments */

    /*
     * The moments of this warp's lines; in the usual case it loads them into registers, too.
     *
     * Distances are measured from the mean of the first lines, so that the rest can be added as it arrives. A center
     * that is the mean of a share p of the elements is within sqrt(1 / p - 1) standard deviations of their mean,
     * whatever they are, so that the variance loses at most a factor 1 / p of its accuracy, three bits.
     */
    __device__ moments measure(int row, register_lines<LINES, BACKWARD> &lines) {
        float first[CHAINS] = {}, sum[CHAINS] = {}, squares[CHAINS] = {};
        center near;
        if constexpr (USUAL) {
#pragma unroll
            for (int part = 0; part < GROUP_STAGES; part++) {
                load_stage(part, lines);
                copy_next(row, part);
                if (part == 0) {
#pragma unroll
                    for (int i = 0; i < CENTER_LINES; i++)
                        add_elements<T>(lines.x[i], first);
                    near = center_near(first);
                }
#pragma unroll
                for (int i = part * PART_LINES; i < (part + 1) * PART_LINES; i++) {
                    add_distances<T>(lines.x[i], near, sum, squares);
                    convert_again(lines.x[i]);
                }
            }
        } else {
            each_line([&](int i, uint4 x, uint4) {
                if (i < CENTER_LINES) add_elements<T>(x, first);
            });
            near = center_near(first);
            each_line([&](int, uint4 x, uint4) { add_distances<T>(x, near, sum, squares); });
        }
        if (!has_lines) return {COUNT, 0, 0};
        double all = warp_sum((double)add_up(sum)), all_squares = warp_sum((double)add_up(squares));
        /* Squares too small for f32 do not matter beside eps. */
        if (all_squares <= MOST_SQUARES && all_squares + call.eps * COUNT >= LEAST_SQUARES)
            return moments_of(near, all, all_squares, COUNT);
        return measure_exactly(row);
    }

    __device__ center center_near(float (&first)[CHAINS]) const {
        constexpr float SHARE = 1.0f / (CENTER_LINES * LINE_ELEMENTS);
        return {UNEVEN, warp_sum(add_up(first)) * -SHARE * UNEVEN};
    }

    /* The same at the ends of the range and where elements are not finite: in double, from memory. */
    __device__ moments measure_exactly(int row) const {
        const T *from = static_cast<const T *>(call.x) + place_of(row);
        double mean = 0, squares = 0;
        each_element(from, [&](double x) { mean += x; });
        mean = warp_sum(mean) / COUNT;
        each_element(from, [&](double x) { squares += (x - mean) * (x - mean); });
        return {COUNT, mean, warp_sum(squares)};
    }

    /* Calls f(x) for this thread's elements of its lines. */
    template <class F> __device__ void each_element(const T *from, F f) const {
#pragma unroll 1
        for (int i = 0; i < LINES * WIDE<T>; i++)
            f(to_f32(from[i / WIDE<T> * LINE_ELEMENTS + i % WIDE<T>]));
    }
};

/*
 * Compiled for the calls of training (USUAL: tensors are aligned, y or dx is wanted and overwritten, the backward has
 * saved statistics) with nothing else in it, and with all choices at run time.
 */
template <class T, int LINES, bool BACKWARD, bool USUAL>
__global__ void __launch_bounds__(32 * REGISTER_WARPS, 1) register_groups(group_call call, register_split split) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200 /* where plan_registers() allows it */
    unsigned char *memory = dynamic_shared<unsigned char>();
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
    register_exchange exchange{sums, rank, split.blocks, split.warps, split.tasks, 0};
    register_pipeline<T, LINES, BACKWARD, USUAL> pipeline{
        call,
        split,
        memory + sizeof(register_sums) + warp * REGISTER_STAGES * STAGE_BYTES + lane * 16,
        channel * (int)call.plane + (segment * LINES * 32 + lane) * WIDE<T>,
        channel,
        (int)(gridDim.x / (unsigned)split.blocks),
        task < split.tasks,
        0};
    pipeline.fill(cluster);
    group_inputs inputs{};
    if (BACKWARD) inputs = pipeline.inputs_of(cluster);
    if (split.blocks > 1) cluster_wait();
    for (int row = cluster; row < split.rows; row += pipeline.stride) {
        group_inputs next{};
        if (BACKWARD) next = pipeline.inputs_of(row + pipeline.stride);
        register_lines<LINES, BACKWARD> lines;
        float sum[2] = {}, product[2] = {}, weight = 0;
        scale s;
        affine map;
        if constexpr (!USUAL) pipeline.wait_for_group(row);
        if (BACKWARD && (USUAL || call.mean_in)) {
            s = scale_of(inputs.mean, inputs.rstd);
        } else {
            moments m = group_moments(exchange, pipeline.measure(row, lines), call.share);
            if (!BACKWARD) inputs = pipeline.inputs_of(row);
            s = measured_scale(call, row, m.mean, m.squares, task == 0 && lane == 0);
        }
        if constexpr (BACKWARD && USUAL) {
#pragma unroll
            for (int part = 0; part < pipeline.GROUP_STAGES; part++) {
                pipeline.load_stage(part, lines);
                pipeline.copy_next(row, part);
#pragma unroll
                for (int i = part * pipeline.PART_LINES; i < (part + 1) * pipeline.PART_LINES; i++)
                    add_line<T>(lines.x[i], lines.dy[i], s, sum, product);
            }
        } else if constexpr (BACKWARD) {
            pipeline.each_line([&](int, uint4 x, uint4 dy) { add_line<T>(x, dy, s, sum, product); });
        }
        float gamma = pipeline.value_of(call.gamma, inputs.gamma, 1);
        if constexpr (BACKWARD) {
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
            double2 total = group_total(exchange, mine);
            map = backward_map(call, s, total.x, total.y);
            weight = s.rstd * gamma;
        } else {
            map = forward_map(s, gamma, pipeline.value_of(call.beta, inputs.beta, 0));
        }
        inputs = next;
        T *out = static_cast<T *>(call.out) + pipeline.place_of(row);
        if constexpr (USUAL) {
            if constexpr (BACKWARD) convert_again(lines);
#pragma unroll
            for (int i = 0; i < LINES; i++)
                if (pipeline.has_lines)
                    pipeline.write(out + i * pipeline.LINE_ELEMENTS, lines.x[i], lines.dy[BACKWARD ? i : 0], s, weight,
                                   map);
        } else {
            if (call.out)
                pipeline.each_line([&](int i, uint4 x, uint4 dy) {
                    pipeline.write(out + i * pipeline.LINE_ELEMENTS, x, dy, s, weight, map);
                });
            pipeline.release_group(row);
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
 *
 * A warp owns as many lines as its registers hold, but not where groups are few: shorter warps are spread further.
 */
inline bool plan_registers(const group_call &call, int64_t bytes, bool backward, bool clusters, int64_t limit,
                           register_plan *plan) {
    int64_t lines = call.plane * bytes / LINE_BYTES, rows = call.batch * call.groups, widest = REGISTER_WARPS;
    if (!clusters || call.plane * bytes % (4 * LINE_BYTES) || call.group_channels > INT_MAX / lines) return false;
    plan->lines = backward || rows < SPREAD_BLOCKS ? 8 : 16;
    while (lines % plan->lines)
        plan->lines /= 2;
    int64_t segments = lines / plan->lines, tasks = call.group_channels * segments, blocks = 1;
    while (blocks < MAX_CLUSTER &&
           (tasks > blocks * widest || (rows * blocks < SPREAD_BLOCKS && tasks >= 2 * blocks * MIN_WARPS)))
        blocks *= 2;
    int64_t warps = vjp_divide_up(tasks, blocks);
    if (warps > widest) return false;
    plan->resident = (int)(REGISTER_WARPS / warps);
    plan->split = {(int)blocks, (int)warps, (int)segments,
                   (int)tasks,  (int)rows,  (int)(call.group_channels * call.plane)};
    plan->shared = sizeof(register_sums) + (size_t)(warps * REGISTER_STAGES * STAGE_BYTES);
    while (plan->resident && ((int64_t)plan->shared + RESERVED_BYTES) * plan->resident > limit + RESERVED_BYTES)
        plan->resident--;
    return plan->resident && (4 * warps * plan->resident >= 3 * REGISTER_WARPS || rows * blocks < SPREAD_BLOCKS);
}

} // namespace
} // namespace vjp

#endif

/* SPDX-License-Identifier: MIT */
/*
 * group_norm, channels first, of groups that fit in the shared memory of a few multiprocessors: x and dy are read once.
 *
 * Blocks are persistent, as many as the card holds at a time, and process group after group; a group too large for one
 * block is shared by a cluster of 2, 4 or 8. Shared memory is a ring of slots: a thread copies 16 bytes of x and of dy
 * to its own slot, which only it reads, so copies need no barrier. A group stays in the ring while it is read, and as
 * soon as y or dx of a slot is computed, the thread starts its next copy into the slot: so copies are in flight while
 * results are written, and the ring is larger than a group, so that they also are while the next group's sums are
 * computed and exchanged.
 *
 * It takes what group_norm_registers.cuh does not: all such groups on cards without clusters, otherwise mostly those
 * whose channels are not a multiple of 2 KB.
 *
 * The work of a block is split into tasks: a segment of one channel, so that a task has one gamma and one pair of sums.
 * A team of lanes takes a task.
 */
#ifndef VJP_CUDA_GROUP_NORM_SHARED_CUH
#define VJP_CUDA_GROUP_NORM_SHARED_CUH

#include <climits>

#include "cuda/norm/group_norm.cuh"

namespace vjp {
namespace {

/* Warps of a multiprocessor, in one block or in several: 96 registers per thread. */
constexpr int SHARED_WARPS = 20;
constexpr int MAX_CLUSTER = 8; /* blocks, at most: what every card with clusters supports */

/* Slots that are read together: their reads of shared memory overlap. */
constexpr int SHARED_PAIR = 2;
static_assert(SHARED_PAIR == 2, "of an incomplete pair, one is left");

struct shared_split {
    int blocks;                         /* of a cluster */
    int tasks;                          /* of a block */
    int team;                           /* lanes of a task, a power of two */
    int units, segments, segment_units; /* of a channel */
    int rounds, steps;                  /* tasks of a team; units of a task per lane, in a slot each */
    int slots;                          /* of a thread: at least rounds * steps */
    int dy_at;                          /* bytes in shared memory */
};

/* ---- Sums over a block and a cluster ----------------------------------------------------------------- */

/* At the front of shared memory. Calls alternate between two halves: one barrier per call. */
struct shared_sums {
    double warp[2][SHARED_WARPS][2];
    double rank[2][MAX_CLUSTER][3];
    float largest[2][SHARED_WARPS];
    unsigned long long arrived[2]; /* barriers that count the bytes received from the cluster */
};
static_assert(sizeof(shared_sums) % 16 == 0, "what follows it is copied to 16 bytes at a time");

/* What a block of a cluster needs to exchange sums with the others. */
struct shared_exchange {
    shared_sums *sums;
    int rank, blocks;
    int buffer;
    unsigned exchanges; /* so far */
};

/* With `first_lanes` only the first lane of each warp has something to add. */
__device__ void block_total(shared_exchange &exchange, double (&x)[2], float &largest, bool first_lanes) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, buffer = exchange.buffer;
    if (!first_lanes) {
        x[0] = warp_sum(x[0]);
        x[1] = warp_sum(x[1]);
#pragma unroll
        for (int step = 16; step; step /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    }
    if (lane == 0) {
        exchange.sums->warp[buffer][warp][0] = x[0];
        exchange.sums->warp[buffer][warp][1] = x[1];
        exchange.sums->largest[buffer][warp] = largest;
    }
    __syncthreads();
    x[0] = x[1] = 0;
#pragma unroll 4
    for (int w = 0; w < warps; w++) {
        x[0] += exchange.sums->warp[buffer][w][0];
        x[1] += exchange.sums->warp[buffer][w][1];
        largest = fmaxf(largest, exchange.sums->largest[buffer][w]);
    }
    exchange.buffer ^= 1;
}

/* The two halves of a cluster barrier. After waiting, what was written before arriving is visible. */
__device__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/* One thread initialises a barrier that the cluster will write to. */
__device__ void make_arrival(unsigned long long *arrival) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"((unsigned)__cvta_generic_to_shared(arrival))
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
    (void)arrival;
#endif
}

/* One thread sets how many bytes will arrive; some may have arrived before. */
__device__ void expect(unsigned long long *arrival, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"((unsigned)__cvta_generic_to_shared(arrival)),
        "r"(bytes)
        : "memory");
#else
    (void)arrival, (void)bytes;
#endif
}

__device__ void wait_arrival(unsigned long long *arrival, unsigned parity) {
#if __CUDA_ARCH__ >= 900
    unsigned at = (unsigned)__cvta_generic_to_shared(arrival), done = 0;
    while (!done)
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(at), "r"(parity)
                     : "memory");
#else
    (void)arrival, (void)parity;
#endif
}

/* *to = value in the shared memory of a block of the cluster, counted by that block's `arrival`. */
__device__ void send(double *to, unsigned long long *arrival, int rank, double value) {
#if __CUDA_ARCH__ >= 900
    unsigned mine = (unsigned)__cvta_generic_to_shared(to), theirs;
    unsigned my_arrival = (unsigned)__cvta_generic_to_shared(arrival), their_arrival;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(mine), "r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(their_arrival) : "r"(my_arrival), "r"(rank));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(theirs),
                 "l"(__double_as_longlong(value)), "r"(their_arrival)
                 : "memory");
#else
    (void)to, (void)arrival, (void)rank, (void)value;
#endif
}

/*
 * Every block's three numbers, by rank. Each block writes its own into all of them, so that no block reads the memory
 * of one that may have ended. There is no barrier of the cluster: to arrive there a thread waits for all its writes to
 * memory, and with dx that takes longer than the sums do.
 *
 * Two sets of slots alternate. A block writes to a set again after it has received the other set from all blocks; they
 * sent that behind a barrier of their own, after their last read of the first set.
 */
__device__ const double (*exchange_all(shared_exchange &exchange, const double (&mine)[3]))[3] {
    unsigned set = exchange.exchanges % 2, parity = exchange.exchanges / 2 % 2;
    double(*slots)[3] = exchange.sums->rank[set];
    unsigned long long *arrival = &exchange.sums->arrived[set];
    if (threadIdx.x == 0) expect(arrival, exchange.blocks * (int)sizeof(mine));
    if (threadIdx.x < exchange.blocks)
#pragma unroll
        for (int i = 0; i < 3; i++)
            send(&slots[exchange.rank][i], arrival, (int)threadIdx.x, mine[i]);
    wait_arrival(arrival, parity);
    exchange.exchanges++;
    return slots;
}

/* ---- Copies ------------------------------------------------------------------------------------------ */

template <class T, int WIDTH> __device__ void stage(unit<T, WIDTH> *to, const T *from, bool aligned) {
    constexpr int BYTES = WIDTH * (int)sizeof(T);
    if constexpr (BYTES == 16) {
        if (aligned) {
            copy_async(to, from);
            return;
        }
    }
    if (BYTES % 4 == 0 && reinterpret_cast<uintptr_t>(from) % 4 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES; i += 4)
            copy_async_word(reinterpret_cast<char *>(to) + i, reinterpret_cast<const char *>(from) + i);
        return;
    }
    *to = load_unit<T, WIDTH>(from, false);
}

/* Returns when all but the last `max` groups of copies have arrived, or a few more: the number must be a constant. */
__device__ void wait_copies_within(int max) {
    wait_copies<12>();
    if (max < 12) wait_copies<8>();
    if (max < 8) wait_copies<6>();
    if (max < 6) wait_copies<4>();
    if (max < 4) wait_copies<2>();
    if (max < 2) wait_copies<0>();
}

/* ---- A thread's pipeline ----------------------------------------------------------------------------- */

/* A group of one item of the batch, n. A work item is a group of a part of the batch. */
struct group_position {
    int item, part, group, n, end;
};

__device__ group_position position_of(const group_call &call, int item) {
    int groups = (int)call.groups, part = item / groups, each = (int)call.each, end = (part + 1) * each;
    return {item, part, item - part * groups, part * each, end < call.batch ? end : (int)call.batch};
}

__device__ group_position next_position(const group_call &call, const group_position &position, int stride) {
    if (position.n + 1 == position.end) return position_of(call, position.item + stride);
    return {position.item, position.part, position.group, position.n + 1, position.end};
}

/* A team's task in one round. */
struct shared_task {
    int channel, segment;
    int here; /* units of this lane; 0: there is no such task */
};

template <class T, int WIDTH, bool BACKWARD> struct shared_pipeline {
    const group_call &call;
    const shared_split &split;
    unit<T, WIDTH> *x, *dy;      /* this thread's first slot; the next one is `threads` further */
    int threads, first, count;   /* tasks of this block: the first, and how many */
    int team, lane, teams;       /* this lane's position */
    int items, stride;           /* of all clusters; from one of this cluster to its next */
    group_position ahead;        /* of the next copy: its group, */
    int ahead_round, ahead_step; /* round and step, */
    int64_t ahead_at;            /* first element */
    int ahead_here;              /* and the units of its task, 0 after the last group */
    shared_task round_0;         /* often the only one */

    __device__ shared_task task_of(int round) const {
        return round ? find_task(round) : round_0;
    }

    __device__ shared_task find_task(int round) const {
        int slot = team + round * teams, index = first + slot;
        int channel = index / split.segments, segment = index - channel * split.segments;
        int units = split.units - segment * split.segment_units;
        if (units > split.segment_units) units = split.segment_units;
        int here = units > lane ? divide_up(units - lane, split.team) : 0;
        return {channel, segment, slot < count ? here : 0};
    }

    /* This lane's first element of a task. */
    __device__ int64_t place_of(const group_position &position, const shared_task &t) const {
        int64_t channel = position.n * call.channels + position.group * call.group_channels + t.channel;
        return channel * call.plane + ((int64_t)t.segment * split.segment_units + lane) * WIDTH;
    }

    __device__ void begin_ahead() {
        shared_task t = task_of(ahead_round);
        ahead_at = place_of(ahead, t);
        ahead_here = ahead.item < items ? t.here : 0;
    }

    /* Starts the next copy. Each is a group of copies, even an empty one, so that they can be counted. */
    __device__ void copy_next(int slot) {
        if (ahead_step < ahead_here) {
            stage(x + slot, static_cast<const T *>(call.x) + ahead_at, call.aligned);
            if constexpr (BACKWARD) stage(dy + slot, static_cast<const T *>(call.dy) + ahead_at, call.aligned);
        }
        commit_copies();
        ahead_at += split.team * WIDTH;
        if (++ahead_step < split.steps) return;
        ahead_step = 0;
        if (++ahead_round == split.rounds) {
            ahead_round = 0;
            ahead = next_position(call, ahead, stride);
        }
        begin_ahead();
    }

    __device__ void fill(int cluster) {
        round_0 = find_task(0);
        ahead = position_of(call, cluster);
        ahead_round = ahead_step = 0;
        begin_ahead();
        for (int slot = 0; slot < split.slots; slot++)
            copy_next(slot * threads);
    }

    /*
     * Calls f(x, dy, step) for the units of a task, from `slot` on. To read a group, `within` is the number of copies
     * that may still be in flight before its first unit is needed; to release it (RELEASE), slots are filled again.
     */
    template <bool RELEASE, class F> __device__ void each_unit(const shared_task &t, int &slot, int &within, F f) {
        for (int step = 0; step < split.steps; step += SHARED_PAIR) {
            int left = split.steps - step, taken = left < SHARED_PAIR ? left : SHARED_PAIR;
            if constexpr (!RELEASE) {
                within -= taken;
                wait_copies_within(within);
            }
            unit<T, WIDTH> a[SHARED_PAIR], d[SHARED_PAIR];
            int at[SHARED_PAIR];
#pragma unroll
            for (int i = 0; i < SHARED_PAIR; i++) { /* slots are always valid memory, if not always filled */
                at[i] = slot;
                a[i] = load_unit<T, WIDTH>((x + slot)->v, true);
                if constexpr (BACKWARD) d[i] = load_unit<T, WIDTH>((dy + slot)->v, true);
                if (i < taken) slot = slot + threads == split.slots * threads ? 0 : slot + threads;
            }
            /* Together where both exist, so that their reads and sums overlap. */
            if (step + SHARED_PAIR <= t.here) {
#pragma unroll
                for (int i = 0; i < SHARED_PAIR; i++)
                    f(a[i], d[i], step + i);
            } else if (step < t.here) {
                f(a[0], d[0], step);
            }
            if constexpr (RELEASE) {
#pragma unroll
                for (int i = 0; i < SHARED_PAIR; i++)
                    if (i < taken) copy_next(at[i]);
            }
        }
    }

    __device__ void add_over_team(float &a, float &b) const {
        for (int step = split.team / 2; step; step /= 2) {
            a += __shfl_xor_sync(0xffffffffu, a, step);
            b += __shfl_xor_sync(0xffffffffu, b, step);
        }
    }

    __device__ moments measure(shared_exchange &exchange, int start) {
        double total[2] = {0, 0}; /* sum and count */
        float largest = 0, none = 0;
        int slot = start, within = split.slots, elements = 0;
        for (int round = 0; round < split.rounds; round++) {
            shared_task t = task_of(round);
            float chain = 0;
            each_unit<false>(t, slot, within, [&](const auto &a, const auto &, int) { add_first(a, chain, largest); });
            total[0] += chain;
            elements += t.here * WIDTH;
        }
        total[1] = elements;
        block_total(exchange, total, largest, false);
        double all = total[1];
        center near = center_of(total[0], all, largest);
        total[0] = total[1] = 0; /* sum and squares */
        slot = start;
        within = split.slots;
        for (int round = 0; round < split.rounds; round++) {
            float chain = 0, squares = 0;
            each_unit<false>(task_of(round), slot, within,
                             [&](const auto &a, const auto &, int) { add_second(a, near, chain, squares); });
            total[0] += chain;
            total[1] += squares;
        }
        block_total(exchange, total, none, false);
        return moments_of(near, total[0], total[1], all);
    }

    /* Writes the channels' sums to their partials, and returns those of the group, weighted by gamma. */
    __device__ void sum_up(shared_exchange &exchange, const group_position &position, scale s, int start,
                           double (&total)[2]) {
        int slot = start, within = split.slots;
        int64_t group_first = position.group * call.group_channels;
        total[0] = total[1] = 0;
        for (int round = 0; round < split.rounds; round++) {
            shared_task t = task_of(round);
            float chain = 0, product_chain = 0, gamma = t.here ? gamma_at<T>(call, group_first + t.channel) : 0.0f;
            each_unit<false>(t, slot, within,
                             [&](const auto &a, const auto &d, int) { add_sums(a, d, s, chain, product_chain); });
            add_over_team(chain, product_chain);
            if (lane || !t.here) continue;
            double sum = chain, product = product_chain + (double)s.rest * sum;
            total[0] += (double)gamma * sum;
            total[1] += (double)gamma * product;
            if (call.partials)
                add_to_partial(partial_at(call, position.part, group_first + t.channel, t.segment),
                               position.n == position.part * call.each, sum, product);
        }
        if (!call.out) return;
        float none = 0;
        block_total(exchange, total, none, split.team == 32);
        if (exchange.blocks == 1) return;
        const double(*all)[3] = exchange_all(exchange, {total[0], total[1], 0});
        total[0] = total[1] = 0;
#pragma unroll 4
        for (int b = 0; b < exchange.blocks; b++) {
            total[0] += all[b][0];
            total[1] += all[b][1];
        }
    }
};

/* The group's moments from those of its blocks. */
__device__ moments cluster_moments(shared_exchange &exchange, moments mine) {
    if (exchange.blocks == 1) return mine;
    const double(*all)[3] = exchange_all(exchange, {mine.count, mine.mean, mine.squares});
    moments m{0, 0, 0};
#pragma unroll 4
    for (int b = 0; b < exchange.blocks; b++) {
        m.count += all[b][0];
        m.mean += all[b][0] * all[b][1];
    }
    m.mean /= m.count;
#pragma unroll 4
    for (int b = 0; b < exchange.blocks; b++) {
        double offset = all[b][1] - m.mean;
        m.squares += all[b][2] + all[b][0] * offset * offset;
    }
    return m;
}

/* The saved statistics of a group, loaded one group ahead. */
struct saved_statistics {
    float mean, rstd;
};

__device__ saved_statistics saved_of(const group_call &call, const group_position &position, int items) {
    if (!call.mean_in || position.item >= items) return {0, 0};
    int64_t row = position.n * call.groups + position.group;
    return {call.mean_in[row], call.rstd_in[row]};
}

/*
 * A group has over 1024 elements, so an int can number all groups: no card's memory holds more. What a block computes
 * never depends on the number of blocks.
 */
template <class T, int WIDTH, bool BACKWARD>
__global__ void __launch_bounds__(32 * SHARED_WARPS, 1) shared_groups(group_call call, shared_split split) {
    unsigned char *memory = dynamic_shared<unsigned char>();
    shared_sums *sums = reinterpret_cast<shared_sums *>(memory);
    if (split.blocks > 1) { /* this block has started; the others wait for it before they write to it */
        if (threadIdx.x == 0) {
            make_arrival(&sums->arrived[0]);
            make_arrival(&sums->arrived[1]);
        }
        cluster_arrive();
    }
    begin_chained();
    unsigned char *data = memory + sizeof(shared_sums);
    int rank = (int)(blockIdx.x % (unsigned)split.blocks), cluster = (int)(blockIdx.x / (unsigned)split.blocks);
    int first = rank * split.tasks, all = (int)call.group_channels * split.segments;
    shared_exchange exchange{sums, rank, split.blocks, 0, 0};
    shared_pipeline<T, WIDTH, BACKWARD> pipeline{call,
                                                 split,
                                                 reinterpret_cast<unit<T, WIDTH> *>(data) + threadIdx.x,
                                                 reinterpret_cast<unit<T, WIDTH> *>(data + split.dy_at) + threadIdx.x,
                                                 (int)blockDim.x,
                                                 first,
                                                 all - first < split.tasks ? all - first : split.tasks,
                                                 (int)threadIdx.x / split.team,
                                                 (int)threadIdx.x % split.team,
                                                 (int)blockDim.x / split.team,
                                                 (int)(call.parts * call.groups),
                                                 (int)(gridDim.x / (unsigned)split.blocks),
                                                 {},
                                                 0,
                                                 0,
                                                 0,
                                                 0,
                                                 {}};
    pipeline.fill(cluster);
    group_position position = position_of(call, cluster);
    saved_statistics saved = saved_of(call, position, pipeline.items);
    if (split.blocks > 1) cluster_wait();
    int start = 0;
    while (position.item < pipeline.items) {
        int64_t group_first = position.group * call.group_channels, row = position.n * call.groups + position.group;
        shared_task t = pipeline.task_of(0);
        auto gamma_of = [&](const shared_task &task) {
            return task.here ? gamma_at<T>(call, group_first + task.channel) : 0.0f;
        };
        auto beta_of = [&](const shared_task &task) {
            return !BACKWARD && task.here ? beta_at<T>(call, group_first + task.channel) : 0.0f;
        };
        float gamma = gamma_of(t), beta = beta_of(t);
        scale s;
        if (call.mean_in) {
            s = scale_of(saved.mean, saved.rstd);
        } else {
            moments m = cluster_moments(exchange, pipeline.measure(exchange, start));
            s = measured_scale(call, row, m.mean, m.squares, rank == 0 && threadIdx.x == 0);
        }
        affine map{0, 0};
        if constexpr (BACKWARD) {
            double total[2];
            pipeline.sum_up(exchange, position, s, start, total);
            map = backward_map(call, s, total[0], total[1]);
        }
        group_position next = next_position(call, position, pipeline.stride);
        saved = saved_of(call, next, pipeline.items);
        int none = 0;
        for (int round = 0; round < split.rounds; round++) {
            int64_t to = pipeline.place_of(position, t);
            shared_task now = t;
            float weight = s.rstd * gamma;
            if constexpr (!BACKWARD) map = forward_map(s, gamma, beta);
            if (round + 1 < split.rounds) {
                t = pipeline.task_of(round + 1);
                gamma = gamma_of(t);
                beta = beta_of(t);
            }
            pipeline.template each_unit<true>(now, start, none, [&](const auto &a, const auto &d, int step) {
                if (call.out)
                    write_result<T, WIDTH>(call, to + (int64_t)step * split.team * WIDTH, a, BACKWARD ? &d : nullptr, s,
                                           weight, map);
            });
        }
        position = next;
    }
}

/* ---- The split --------------------------------------------------------------------------------------- */

/* The largest part of the ring that a group takes, in quarters: the rest is for copies ahead. */
constexpr int64_t SHARED_QUARTERS = 3;

/* Blocks per multiprocessor, at most: smaller groups wait for their sums more often, so more are resident. */
constexpr int64_t SHARED_RESIDENT = 5;

/* Shared memory that CUDA reserves for each block. */
constexpr int64_t RESERVED_BYTES = 1 << 10;

/*
 * Numbers of segments per channel that are tried, from the smallest possible, for the one that leaves the fewest slots
 * empty.
 */
constexpr int64_t SHARED_TRIES = 8;

/* With fewer blocks than this, a group is shared by more of them, down to this many bytes each. */
constexpr int64_t SPREAD_BLOCKS = 96, SPREAD_BYTES = 16 << 10;

struct shared_plan {
    shared_split split;
    int threads, resident; /* resident: blocks per multiprocessor */
    size_t shared;
};

/*
 * The segments and warps, for `resident` blocks per multiprocessor, that leave the fewest slots empty. False where a
 * group does not fit.
 */
inline bool split_shared(const group_call &call, int64_t units, int64_t unit_bytes, int64_t tensors, int64_t limit,
                         int64_t blocks, int64_t resident, shared_plan *plan) {
    int64_t channels = call.group_channels, team = 1, widest = SHARED_WARPS / resident, best = INT64_MAX;
    while (team < 32 && 2 * team <= units)
        team *= 2;
    int64_t max_segments = units / team;
    int64_t from = vjp_max(vjp_divide_up(units, CHAIN_UNITS * team),
                           vjp_min(max_segments, vjp_divide_up(widest * (32 / team) * blocks, channels)));
    shared_split &split = plan->split;
    for (int64_t tried = from; tried <= vjp_min(max_segments, from + SHARED_TRIES); tried++) {
        int64_t segment_units = vjp_divide_up(units, tried), segments = vjp_divide_up(units, segment_units);
        int64_t tasks = vjp_divide_up(channels * segments, blocks), steps = vjp_divide_up(segment_units, team);
        for (int64_t warps = widest; 4 * warps >= 3 * widest; warps--) {
            int64_t teams = warps * 32 / team, rounds = vjp_divide_up(tasks, teams);
            if (rounds * steps * warps >= best) continue;
            best = rounds * steps * warps;
            split = {(int)blocks,        (int)tasks,  (int)team,  (int)units, (int)segments,
                     (int)segment_units, (int)rounds, (int)steps, 0,          0};
            plan->threads = (int)warps * 32;
        }
    }
    int64_t slot = plan->threads * unit_bytes;
    int64_t room = (limit + RESERVED_BYTES) / resident - RESERVED_BYTES - (int64_t)sizeof(shared_sums);
    int64_t slots = room / (slot * tensors);
    if (best == INT64_MAX || slots < split.rounds * split.steps) return false;
    split.slots = (int)slots;
    split.dy_at = (int)(slots * slot);
    plan->resident = (int)resident;
    plan->shared = sizeof(shared_sums) + (size_t)(slots * slot * tensors);
    return true;
}

/* False where a group does not fit. It keeps `tensors` of `bytes` per element in `limit` bytes per block. */
inline bool plan_shared(const group_call &call, int width, int64_t bytes, int64_t tensors, bool clusters, int64_t limit,
                        shared_plan *plan) {
    int64_t unit_bytes = width * bytes, units = call.plane / width, channels = call.group_channels;
    int64_t hold = limit * SHARED_QUARTERS / 4, rows = call.batch * call.groups;
    if (channels > INT_MAX / units || channels * units > MAX_CLUSTER * hold / (unit_bytes * tensors)) return false;
    int64_t all = channels * units * unit_bytes * tensors, blocks = 1;
    while (clusters && blocks < MAX_CLUSTER &&
           (all > blocks * hold || (rows * blocks < SPREAD_BLOCKS && all > 2 * blocks * SPREAD_BYTES)))
        blocks *= 2;
    if (all > blocks * hold) return false;
    for (int64_t resident = vjp_max(1, vjp_min(SHARED_RESIDENT, blocks * hold / all)); resident; resident--)
        if (split_shared(call, units, unit_bytes, tensors, limit, blocks, resident, plan)) return true;
    return false;
}

} // namespace
} // namespace vjp

#endif

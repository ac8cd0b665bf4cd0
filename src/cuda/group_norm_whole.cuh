/*
 * group_norm, channels first, of groups that fit the shared memory of a few multiprocessors: x and dy are read once.
 *
 * A cluster of 1, 2, 4 or 8 blocks takes a group. Each block copies its part of x and dy to shared memory, sums it up,
 * tells the others its sums, and writes its part of y or dx. A group of 32x320x64x64 with 32 groups has 160 KB of x and
 * as much of dy in f32: 8 blocks of 40 KB each. Five such blocks fit a multiprocessor, each at another point of its
 * way, so that some have copies under way while others wait for their sums.
 *
 * The work of a block is tasks: a segment of one channel, so that a task has one gamma and one pair of sums. A team of
 * lanes takes a task, and a lane copies just what it will itself read: copies need no barrier.
 */
#ifndef VJP_CUDA_GROUP_NORM_WHOLE_CUH
#define VJP_CUDA_GROUP_NORM_WHOLE_CUH

#include <climits>

#include "cuda/group_norm.cuh"

namespace vjp {
namespace {

constexpr int WHOLE_WARPS = 12;  /* of a block, at most */
constexpr int WHOLE_CLUSTER = 8; /* blocks, at most: what every card with clusters can do */

struct whole_cut {
    int blocks;                         /* of a cluster */
    int tasks;                          /* of a block */
    int team;                           /* lanes of a task, a power of two */
    int units, segments, segment_units; /* of a channel */
    int dy_at, gamma_at;                /* bytes in shared memory */
};

/* ---- Sums over a block and a cluster ----------------------------------------------------------------- */

/* At the front of shared memory. Calls take turns with two halves: one barrier a call. */
struct whole_sums {
    double warp[2][WHOLE_WARPS][2];
    double rank[2][WHOLE_CLUSTER][3];
    float largest[2][WHOLE_WARPS];
};
static_assert(sizeof(whole_sums) % 16 == 0, "what follows it is copied to 16 bytes at a time");

/* What a block of a cluster needs to add up with the others. */
struct whole_party {
    whole_sums *sums;
    int rank, blocks;
    int block_turn, cluster_turn;
};

__device__ void block_total(whole_party &party, double (&x)[2], float &largest) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, turn = party.block_turn;
    x[0] = warp_sum(x[0]);
    x[1] = warp_sum(x[1]);
#pragma unroll
    for (int step = 16; step; step /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    if (lane == 0) {
        party.sums->warp[turn][warp][0] = x[0];
        party.sums->warp[turn][warp][1] = x[1];
        party.sums->largest[turn][warp] = largest;
    }
    __syncthreads();
    x[0] = x[1] = 0;
#pragma unroll 4
    for (int w = 0; w < warps; w++) {
        x[0] += party.sums->warp[turn][w][0];
        x[1] += party.sums->warp[turn][w][1];
        largest = fmaxf(largest, party.sums->largest[turn][w]);
    }
    party.block_turn ^= 1;
}

/* Half a barrier of the cluster each. Arriving lets others see what was written before, waiting what they wrote. */
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

/* *to = value in the shared memory of another block of the cluster. */
__device__ void store_at_rank(double *to, int rank, double value) {
#if __CUDA_ARCH__ >= 900
    unsigned mine = (unsigned)__cvta_generic_to_shared(to), theirs;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(mine), "r"(rank));
    asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(theirs), "d"(value) : "memory");
#else
    (void)to, (void)rank, (void)value;
#endif
}

/*
 * Every block's three numbers, by rank. Each block puts its own into all of them, so that afterwards nobody looks
 * into the memory of a block that may have ended. (A block must have begun before one writes there: the kernel sees to
 * that.)
 */
__device__ const double (*everyone(whole_party &party, const double (&mine)[3]))[3] {
    double(*slots)[3] = party.sums->rank[party.cluster_turn];
    if (threadIdx.x < party.blocks)
#pragma unroll
        for (int i = 0; i < 3; i++)
            store_at_rank(&slots[party.rank][i], (int)threadIdx.x, mine[i]);
    cluster_arrive();
    cluster_wait();
    party.cluster_turn ^= 1;
    return slots;
}

/* ---- A block's share of a group ---------------------------------------------------------------------- */

struct whole_task {
    int slot, channel, segment, units; /* units: 0 where there is no such task */
};

template <class T, int WIDTH> __device__ void stage(unit<T, WIDTH> *to, const T *from, bool aligned) {
    if constexpr (WIDTH > 1) {
        if (aligned) {
            copy_async(to, from);
            return;
        }
    }
    *to = load_unit<T, WIDTH>(from, false);
}

template <class T, int WIDTH> struct whole_share {
    const group_call &call;
    const whole_cut &cut;
    unit<T, WIDTH> *x, *dy;
    float *gamma, *beta; /* by task */
    int first, count;    /* tasks */
    int team, lane, teams;

    /* Calls f with this lane's task of every round; all lanes make the same number of rounds. */
    template <class F> __device__ void each_task(F f) const {
        for (int slot = team; slot - team < cut.tasks; slot += teams) {
            int index = first + slot, channel = index / cut.segments, segment = index - channel * cut.segments;
            int units = cut.units - segment * cut.segment_units;
            if (units > cut.segment_units) units = cut.segment_units;
            f(whole_task{slot, channel, segment, slot < count ? units : 0});
        }
    }

    template <class F> __device__ void each_unit(const whole_task &t, F f) const {
#pragma unroll 2
        for (int i = lane; i < t.units; i += cut.team)
            f(t.slot * cut.segment_units + i, i);
    }

    /* The first element of a task; `base` is the number of the group's first channel, counted through the batch. */
    __device__ int64_t place_of(int64_t base, const whole_task &t) const {
        return (base + t.channel) * call.plane + (int64_t)t.segment * cut.segment_units * WIDTH;
    }

    /* From shared memory, 16 bytes in one go. */
    static __device__ unit<T, WIDTH> at(const unit<T, WIDTH> *from) {
        return load_unit<T, WIDTH>(from->v, true);
    }

    __device__ float over_team(float x) const {
        for (int step = cut.team / 2; step; step /= 2)
            x += __shfl_xor_sync(0xffffffffu, x, step);
        return x;
    }

    __device__ moments measure(whole_party &party) const {
        double total[2] = {0, 0}; /* sum and count */
        float largest = 0, none = 0;
        each_task([&](whole_task t) {
            float chain = 0;
            each_unit(t, [&](int k, int) {
                add_first(at(x + k), chain, largest);
                total[1] += WIDTH;
            });
            total[0] += chain;
        });
        block_total(party, total, largest);
        double count = total[1];
        center near = center_of(total[0], count, largest);
        total[0] = total[1] = 0; /* sum and squares */
        each_task([&](whole_task t) {
            float chain = 0, squares = 0;
            each_unit(t, [&](int k, int) { add_second(at(x + k), near, chain, squares); });
            total[0] += chain;
            total[1] += squares;
        });
        block_total(party, total, none);
        return moments_of(near, total[0], total[1], count);
    }
};

/* The group's moments from its blocks'. */
__device__ moments cluster_moments(whole_party &party, moments mine) {
    if (party.blocks == 1) return mine;
    const double(*all)[3] = everyone(party, {mine.count, mine.mean, mine.squares});
    moments m{0, 0, 0};
#pragma unroll 4
    for (int b = 0; b < party.blocks; b++) {
        m.count += all[b][0];
        m.mean += all[b][0] * all[b][1];
    }
    m.mean /= m.count;
#pragma unroll 4
    for (int b = 0; b < party.blocks; b++) {
        double offset = all[b][1] - m.mean;
        m.squares += all[b][2] + all[b][0] * offset * offset;
    }
    return m;
}

/* One group of one of the batch. */
template <class T, int WIDTH, bool BACKWARD>
__device__ void whole(const whole_share<T, WIDTH> &share, whole_party &party, int n, int group, int part, bool first) {
    const group_call &call = share.call;
    int64_t row = n * call.groups + group, group_first = group * call.group_channels;
    int64_t base = n * call.channels + group_first;
    const T *x = static_cast<const T *>(call.x), *dy = static_cast<const T *>(call.dy);
    share.each_task([&](whole_task t) {
        int64_t from = share.place_of(base, t);
        share.each_unit(t, [&](int k, int i) {
            stage(share.x + k, x + from + (int64_t)i * WIDTH, call.aligned);
            if constexpr (BACKWARD) stage(share.dy + k, dy + from + (int64_t)i * WIDTH, call.aligned);
        });
    });
    close_copies();
    if (first)
        share.each_task([&](whole_task t) {
            if (share.lane || !t.units) return;
            share.gamma[t.slot] = gamma_at<T>(call, group_first + t.channel);
            if constexpr (!BACKWARD) share.beta[t.slot] = beta_at<T>(call, group_first + t.channel);
        });
    scale s{0, 0, 0};
    if (call.mean_in) s = saved_scale(call, row);
    wait_copies<0>();
    if (first && party.blocks > 1) cluster_wait(); /* all blocks have begun: see the kernel */
    if (!call.mean_in) {
        moments m = cluster_moments(party, share.measure(party));
        s = measured_scale(call, row, m.mean, m.squares, party.rank == 0 && threadIdx.x == 0);
    }
    slopes line{0, 0};
    if constexpr (BACKWARD) {
        double total[2] = {0, 0};
        float none = 0;
        share.each_task([&](whole_task t) {
            float chain = 0, product_chain = 0;
            share.each_unit(t, [&](int k, int) {
                add_sums(share.at(share.x + k), share.at(share.dy + k), s, chain, product_chain);
            });
            chain = share.over_team(chain);
            product_chain = share.over_team(product_chain);
            if (share.lane || !t.units) return;
            double sum = chain, product = product_chain + (double)s.rest * sum, gamma = share.gamma[t.slot];
            total[0] += gamma * sum;
            total[1] += gamma * product;
            if (call.cells) add_to_cell(cell_at(call, part, group_first + t.channel, t.segment), first, sum, product);
        });
        if (!call.out) return;
        block_total(party, total, none);
        if (party.blocks > 1) {
            const double(*all)[3] = everyone(party, {total[0], total[1], 0});
            total[0] = total[1] = 0;
#pragma unroll 4
            for (int b = 0; b < party.blocks; b++) {
                total[0] += all[b][0];
                total[1] += all[b][1];
            }
        }
        line = slopes_of(call, s, total[0], total[1]);
    } else {
        if (!call.out) return;
        if (first) __syncthreads(); /* gamma and beta, which one lane of a team has read */
    }
    share.each_task([&](whole_task t) {
        if (!t.units) return;
        int64_t to = share.place_of(base, t);
        float gamma = share.gamma[t.slot], weight = s.rstd * gamma;
        if constexpr (!BACKWARD) line = forward_line(s, gamma, share.beta[t.slot]);
        share.each_unit(t, [&](int k, int i) {
            unit<T, WIDTH> values = share.at(share.x + k), d;
            if constexpr (BACKWARD) d = share.at(share.dy + k);
            write_result<T, WIDTH>(call, to + (int64_t)i * WIDTH, values, BACKWARD ? &d : nullptr, s, weight, line);
        });
    });
}

/*
 * A group has over 1024 elements, so that all of them can be numbered by an int: no card's memory holds so many.
 * Two blocks of 12 warps on a multiprocessor leave 80 registers a thread, and so do five of 5 (whole_warps()).
 */
template <class T, int WIDTH, bool BACKWARD>
__global__ void __launch_bounds__(32 * WHOLE_WARPS, 2) whole_groups(group_call call, whole_cut cut) {
    extern __shared__ __align__(16) unsigned char memory[];
    unsigned char *data = memory + sizeof(whole_sums);
    if (cut.blocks > 1) cluster_arrive(); /* this block has begun; the others wait for it before they write to it */
    int rank = (int)(blockIdx.x % (unsigned)cut.blocks);
    int item = (int)(blockIdx.x / (unsigned)cut.blocks), groups = (int)call.groups, part = item / groups;
    int begin = part * (int)call.each, end = (int)(begin + call.each < call.batch ? begin + call.each : call.batch);
    whole_party party{reinterpret_cast<whole_sums *>(memory), rank, cut.blocks, 0, 0};
    int first = rank * cut.tasks, all = (int)call.group_channels * cut.segments;
    float *gamma = reinterpret_cast<float *>(data + cut.gamma_at);
    whole_share<T, WIDTH> share{call,
                                cut,
                                reinterpret_cast<unit<T, WIDTH> *>(data),
                                reinterpret_cast<unit<T, WIDTH> *>(data + cut.dy_at),
                                gamma,
                                gamma + cut.tasks,
                                first,
                                all - first < cut.tasks ? all - first : cut.tasks,
                                (int)threadIdx.x / cut.team,
                                (int)threadIdx.x % cut.team,
                                (int)blockDim.x / cut.team};
    for (int n = begin; n < end; n++)
        whole<T, WIDTH, BACKWARD>(share, party, n, item - part * groups, part, n == begin);
}

/* ---- The cut ----------------------------------------------------------------------------------------- */

/* x and dy of a block, where a group can be cut so far: five blocks then fit a multiprocessor of Hopper. */
constexpr int64_t WHOLE_BYTES = 40 << 10;

/* Tasks of a block at least, so that there is one for each warp: of a block within WHOLE_BYTES, and of a larger one. */
constexpr int64_t WHOLE_TASKS = 8, WHOLE_TASKS_LARGE = WHOLE_WARPS;

/* Warps of a multiprocessor together, with 80 registers a thread; memory that its blocks share. */
constexpr int64_t WHOLE_RESIDENT_WARPS = 25, WHOLE_RESIDENT_BYTES = 220 << 10, WHOLE_RESIDENT = 5;

/* Segments of a channel that are tried beyond the least, for the ones that leave the fewest slots empty. */
constexpr int64_t WHOLE_TRIES = 8;

struct whole_plan {
    whole_cut cut;
    int threads;
    size_t shared;
};

/* Warps of a block: of those that let its neighbours be there too, as many as leave the fewest idle in the last round.
 */
inline int whole_warps(int64_t tasks, int team, int64_t shared) {
    int64_t neighbours = most(1, least(WHOLE_RESIDENT, WHOLE_RESIDENT_BYTES / shared));
    int64_t widest = least(WHOLE_WARPS, WHOLE_RESIDENT_WARPS / neighbours);
    int64_t busy = divide_up(tasks * team, 32), best = 1, slots = INT64_MAX;
    for (int64_t warps = least(busy, widest); warps >= least(busy, 4); warps--)
        if (divide_up(busy, warps) * warps < slots) {
            best = warps;
            slots = divide_up(busy, warps) * warps;
        }
    return (int)best;
}

/* False where a group does not fit; `tensors` of `bytes` an element are kept, in `limit` bytes of a block. */
inline bool plan_whole(const group_call &call, int width, int64_t bytes, int64_t tensors, bool clusters, int64_t limit,
                       whole_plan *plan) {
    int64_t unit_bytes = width * bytes * tensors, units = call.plane / width, channels = call.group_channels;
    if (channels > INT_MAX / units || channels * units > WHOLE_CLUSTER * limit / unit_bytes) return false;
    int64_t blocks = 1, team = 1;
    while (clusters && blocks < WHOLE_CLUSTER && channels * units * unit_bytes > blocks * WHOLE_BYTES)
        blocks *= 2;
    while (team < 32 && 2 * team <= units)
        team *= 2;
    int64_t widest = units / team,
            from = most(divide_up(units, CHAIN_UNITS * team), least(widest, divide_up(WHOLE_TASKS * blocks, channels)));
    whole_cut &cut = plan->cut;
    int64_t slots = INT64_MAX;
    for (int64_t tried = from; tried <= least(widest, from + WHOLE_TRIES); tried++) {
        int64_t segment_units = divide_up(units, tried), segments = divide_up(units, segment_units);
        int64_t tasks = divide_up(channels * segments, blocks);
        if (blocks * tasks * segment_units >= slots) continue;
        slots = blocks * tasks * segment_units;
        cut.tasks = (int)tasks;
        cut.segments = (int)segments;
        cut.segment_units = (int)segment_units;
    }
    cut.blocks = (int)blocks;
    cut.team = (int)team;
    cut.units = (int)units;
    int64_t one = divide_up((int64_t)cut.tasks * cut.segment_units * width * bytes, 16) * 16;
    cut.dy_at = (int)one;
    cut.gamma_at = (int)(one * tensors);
    plan->shared = sizeof(whole_sums) + (size_t)(one * tensors) + 2 * sizeof(float) * (size_t)cut.tasks;
    plan->threads = 32 * whole_warps(cut.tasks, cut.team, (int64_t)plan->shared);
    return (int64_t)plan->shared <= limit;
}

} // namespace
} // namespace vjp

#endif

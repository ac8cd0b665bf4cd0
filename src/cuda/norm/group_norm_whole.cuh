/*
 * group_norm, channels first, of groups that the shared memory of a few multiprocessors holds: x and dy are read once.
 *
 * Blocks stay for the whole call, as many as the card holds at a time, and take group after group; a group too large
 * for one block is shared by a cluster of 2, 4 or 8. Shared memory is a ring of slots: a thread copies 16 bytes of x
 * and of dy to a slot of its own, which it alone reads, so copies need no barrier. A group stays in the ring while it
 * is looked at, and as soon as y or dx of a slot is made, the slot is filled with what comes next on the thread's way:
 * so copies are under way while results are written, and the ring is larger than a group, so that they also are while
 * the next group's sums are made and handed around.
 *
 * A group of 32x320x64x64 with 32 groups has 160 KB of x and as much of dy in f32: two blocks of 640 threads with 8
 * slots each, or in bf16 one such block; the ring has 11 slots, 220 KB, of which 3 (60 KB) are ahead.
 *
 * The work of a block is tasks: a segment of one channel, so that a task has one gamma and one pair of sums. A team of
 * lanes takes a task.
 */
#ifndef VJP_CUDA_GROUP_NORM_WHOLE_CUH
#define VJP_CUDA_GROUP_NORM_WHOLE_CUH

#include <climits>

#include "cuda/norm/group_norm.cuh"

namespace vjp {
namespace {

/* Warps of a multiprocessor together, in one block or in several: 96 registers a thread. */
constexpr int WHOLE_WARPS = 20;
constexpr int WHOLE_CLUSTER = 8; /* blocks, at most: what every card with clusters can do */

/* Slots that are looked at together: their reads of shared memory wait for each other no more than once. */
constexpr int WHOLE_PAIR = 2;
static_assert(WHOLE_PAIR == 2, "of an incomplete pair, one is left");

struct whole_cut {
    int blocks;                         /* of a cluster */
    int tasks;                          /* of a block */
    int team;                           /* lanes of a task, a power of two */
    int units, segments, segment_units; /* of a channel */
    int rounds, walk;                   /* tasks of a team; units of a task that a lane takes: a slot each */
    int slots;                          /* of a thread: rounds * walk at least */
    int dy_at;                          /* bytes in shared memory */
};

/* ---- Sums over a block and a cluster ----------------------------------------------------------------- */

/* At the front of shared memory. Calls take turns with two halves: one barrier a call. */
struct whole_sums {
    double warp[2][WHOLE_WARPS][2];
    double rank[2][WHOLE_CLUSTER][3];
    float largest[2][WHOLE_WARPS];
    unsigned long long arrived[2]; /* barriers that count the bytes which came from the cluster */
};
static_assert(sizeof(whole_sums) % 16 == 0, "what follows it is copied to 16 bytes at a time");

/* What a block of a cluster needs to add up with the others. */
struct whole_party {
    whole_sums *sums;
    int rank, blocks;
    int block_turn;
    unsigned exchanges; /* so far */
};

/* With `first_lanes` only the first lane of each warp has something to add. */
__device__ void block_total(whole_party &party, double (&x)[2], float &largest, bool first_lanes) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, turn = party.block_turn;
    if (!first_lanes) {
        x[0] = warp_sum(x[0]);
        x[1] = warp_sum(x[1]);
#pragma unroll
        for (int step = 16; step; step /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    }
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

/* Half a barrier of the cluster each. Waiting sees what was written before arriving. */
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

/* One thread makes a barrier that the cluster will write to. */
__device__ void make_arrival(unsigned long long *arrival) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"((unsigned)__cvta_generic_to_shared(arrival))
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
    (void)arrival;
#endif
}

/* One thread says how many bytes are to come; others may have come before. */
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
 * Every block's three numbers, by rank. Each block puts its own into all of them, so that nobody looks into the memory
 * of a block that may have ended. No barrier of the cluster: to arrive there a thread waits for all that it has written
 * to memory, and with dx that takes longer than the sums do.
 *
 * Two sets of slots take turns. A block writes to a set again after it has heard from all in the other set; they have
 * spoken there behind a barrier of their own, behind their last look at the first.
 */
__device__ const double (*everyone(whole_party &party, const double (&mine)[3]))[3] {
    unsigned set = party.exchanges % 2, parity = party.exchanges / 2 % 2;
    double(*slots)[3] = party.sums->rank[set];
    unsigned long long *arrival = &party.sums->arrived[set];
    if (threadIdx.x == 0) expect(arrival, party.blocks * (int)sizeof(mine));
    if (threadIdx.x < party.blocks)
#pragma unroll
        for (int i = 0; i < 3; i++)
            send(&slots[party.rank][i], arrival, (int)threadIdx.x, mine[i]);
    wait_arrival(arrival, parity);
    party.exchanges++;
    return slots;
}

/* ---- Copies ------------------------------------------------------------------------------------------ */

/* As copy_async(), 4 bytes: for what is aligned to no more. */
__device__ void copy_async_word(void *shared, const void *global) {
    unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}

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

/* Returns when all but the last `most` groups of copies have arrived, or a few more: the number must be a constant. */
__device__ void wait_copies_within(int most) {
    wait_copies<12>();
    if (most < 12) wait_copies<8>();
    if (most < 8) wait_copies<6>();
    if (most < 6) wait_copies<4>();
    if (most < 4) wait_copies<2>();
    if (most < 2) wait_copies<0>();
}

/* ---- A thread's way ---------------------------------------------------------------------------------- */

/* A group of one of the batch. An item is a group of a part of the batch. */
struct whole_turn {
    int item, part, group, n, end;
};

__device__ whole_turn turn_of(const group_call &call, int item) {
    int groups = (int)call.groups, part = item / groups, each = (int)call.each, end = (part + 1) * each;
    return {item, part, item - part * groups, part * each, end < call.batch ? end : (int)call.batch};
}

__device__ whole_turn next_turn(const group_call &call, const whole_turn &turn, int stride) {
    if (turn.n + 1 == turn.end) return turn_of(call, turn.item + stride);
    return {turn.item, turn.part, turn.group, turn.n + 1, turn.end};
}

/* A team's task of one round. */
struct whole_task {
    int channel, segment;
    int here; /* units of this lane: 0 where there is no such task */
};

template <class T, int WIDTH, bool BACKWARD> struct whole_way {
    const group_call &call;
    const whole_cut &cut;
    unit<T, WIDTH> *x, *dy;      /* this thread's first slot; the next is `threads` further */
    int threads, first, count;   /* tasks of this block: the first one of them, and how many there are */
    int team, lane, teams;       /* this lane's place */
    int items, stride;           /* of all; from one of this cluster's to the next */
    whole_turn ahead;            /* what the next copy takes: its group, */
    int ahead_round, ahead_step; /* round and step, */
    int64_t ahead_at;            /* first element */
    int ahead_here;              /* and the units of its task, 0 behind the last group */
    whole_task round_0;          /* often all there is */

    __device__ whole_task task_of(int round) const {
        return round ? find_task(round) : round_0;
    }

    __device__ whole_task find_task(int round) const {
        int slot = team + round * teams, index = first + slot;
        int channel = index / cut.segments, segment = index - channel * cut.segments;
        int units = cut.units - segment * cut.segment_units;
        if (units > cut.segment_units) units = cut.segment_units;
        int here = units > lane ? (units - lane + cut.team - 1) / cut.team : 0;
        return {channel, segment, slot < count ? here : 0};
    }

    /* This lane's first element of a task. */
    __device__ int64_t place_of(const whole_turn &turn, const whole_task &t) const {
        int64_t channel = turn.n * call.channels + turn.group * call.group_channels + t.channel;
        return channel * call.plane + ((int64_t)t.segment * cut.segment_units + lane) * WIDTH;
    }

    __device__ void begin_ahead() {
        whole_task t = task_of(ahead_round);
        ahead_at = place_of(ahead, t);
        ahead_here = ahead.item < items ? t.here : 0;
    }

    /* Begins the next copy; every one is a group of copies, also an empty one, so that they can be counted. */
    __device__ void copy_next(int slot) {
        if (ahead_step < ahead_here) {
            stage(x + slot, static_cast<const T *>(call.x) + ahead_at, call.aligned);
            if constexpr (BACKWARD) stage(dy + slot, static_cast<const T *>(call.dy) + ahead_at, call.aligned);
        }
        close_copies();
        ahead_at += cut.team * WIDTH;
        if (++ahead_step < cut.walk) return;
        ahead_step = 0;
        if (++ahead_round == cut.rounds) {
            ahead_round = 0;
            ahead = next_turn(call, ahead, stride);
        }
        begin_ahead();
    }

    __device__ void fill(int cluster) {
        round_0 = find_task(0);
        ahead = turn_of(call, cluster);
        ahead_round = ahead_step = 0;
        begin_ahead();
        for (int slot = 0; slot < cut.slots; slot++)
            copy_next(slot * threads);
    }

    /*
     * Calls f(x, dy, step) for the units of a task, from `slot` on. To look at a group, `within` is the number of
     * copies that may still be under way before its first unit is needed; to leave it, slots are filled again.
     */
    template <bool LEAVE, class F> __device__ void each_unit(const whole_task &t, int &slot, int &within, F f) {
        for (int step = 0; step < cut.walk; step += WHOLE_PAIR) {
            int left = cut.walk - step, taken = left < WHOLE_PAIR ? left : WHOLE_PAIR;
            if constexpr (!LEAVE) {
                within -= taken;
                wait_copies_within(within);
            }
            unit<T, WIDTH> a[WHOLE_PAIR], d[WHOLE_PAIR];
            int at[WHOLE_PAIR];
#pragma unroll
            for (int i = 0; i < WHOLE_PAIR; i++) { /* slots always are memory, if not always filled */
                at[i] = slot;
                a[i] = load_unit<T, WIDTH>((x + slot)->v, true);
                if constexpr (BACKWARD) d[i] = load_unit<T, WIDTH>((dy + slot)->v, true);
                if (i < taken) slot = slot + threads == cut.slots * threads ? 0 : slot + threads;
            }
            /* Together where both are there, so that their reads and sums overlap. */
            if (step + WHOLE_PAIR <= t.here) {
#pragma unroll
                for (int i = 0; i < WHOLE_PAIR; i++)
                    f(a[i], d[i], step + i);
            } else if (step < t.here) {
                f(a[0], d[0], step);
            }
            if constexpr (LEAVE) {
#pragma unroll
                for (int i = 0; i < WHOLE_PAIR; i++)
                    if (i < taken) copy_next(at[i]);
            }
        }
    }

    __device__ void add_over_team(float &a, float &b) const {
        for (int step = cut.team / 2; step; step /= 2) {
            a += __shfl_xor_sync(0xffffffffu, a, step);
            b += __shfl_xor_sync(0xffffffffu, b, step);
        }
    }

    __device__ moments measure(whole_party &party, int start) {
        double total[2] = {0, 0}; /* sum and count */
        float largest = 0, none = 0;
        int slot = start, within = cut.slots, elements = 0;
        for (int round = 0; round < cut.rounds; round++) {
            whole_task t = task_of(round);
            float chain = 0;
            each_unit<false>(t, slot, within, [&](const auto &a, const auto &, int) { add_first(a, chain, largest); });
            total[0] += chain;
            elements += t.here * WIDTH;
        }
        total[1] = elements;
        block_total(party, total, largest, false);
        double all = total[1];
        center near = center_of(total[0], all, largest);
        total[0] = total[1] = 0; /* sum and squares */
        slot = start;
        within = cut.slots;
        for (int round = 0; round < cut.rounds; round++) {
            float chain = 0, squares = 0;
            each_unit<false>(task_of(round), slot, within,
                             [&](const auto &a, const auto &, int) { add_second(a, near, chain, squares); });
            total[0] += chain;
            total[1] += squares;
        }
        block_total(party, total, none, false);
        return moments_of(near, total[0], total[1], all);
    }

    /* The channels' sums into their cells; the group's, weighted by gamma, are returned. */
    __device__ void sum_up(whole_party &party, const whole_turn &turn, scale s, int start, double (&total)[2]) {
        int slot = start, within = cut.slots;
        int64_t group_first = turn.group * call.group_channels;
        total[0] = total[1] = 0;
        for (int round = 0; round < cut.rounds; round++) {
            whole_task t = task_of(round);
            float chain = 0, product_chain = 0, gamma = t.here ? gamma_at<T>(call, group_first + t.channel) : 0.0f;
            each_unit<false>(t, slot, within,
                             [&](const auto &a, const auto &d, int) { add_sums(a, d, s, chain, product_chain); });
            add_over_team(chain, product_chain);
            if (lane || !t.here) continue;
            double sum = chain, product = product_chain + (double)s.rest * sum;
            total[0] += (double)gamma * sum;
            total[1] += (double)gamma * product;
            if (call.cells)
                add_to_cell(cell_at(call, turn.part, group_first + t.channel, t.segment),
                            turn.n == turn.part * call.each, sum, product);
        }
        if (!call.out) return;
        float none = 0;
        block_total(party, total, none, cut.team == 32);
        if (party.blocks == 1) return;
        const double(*all)[3] = everyone(party, {total[0], total[1], 0});
        total[0] = total[1] = 0;
#pragma unroll 4
        for (int b = 0; b < party.blocks; b++) {
            total[0] += all[b][0];
            total[1] += all[b][1];
        }
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

/* What a group's first look needs from memory, asked for before it is its turn. */
struct whole_saved {
    float mean, rstd;
};

__device__ whole_saved saved_of(const group_call &call, const whole_turn &turn, int items) {
    if (!call.mean_in || turn.item >= items) return {0, 0};
    int64_t row = turn.n * call.groups + turn.group;
    return {call.mean_in[row], call.rstd_in[row]};
}

/*
 * A group has over 1024 elements, so that all of them can be numbered by an int: no card's memory holds so many.
 * What a block does never depends on how many there are.
 */
template <class T, int WIDTH, bool BACKWARD>
__global__ void __launch_bounds__(32 * WHOLE_WARPS, 1) whole_groups(group_call call, whole_cut cut) {
    extern __shared__ __align__(16) unsigned char memory[];
    whole_sums *sums = reinterpret_cast<whole_sums *>(memory);
    if (cut.blocks > 1) { /* this block has begun; the others wait for it before they write to it */
        if (threadIdx.x == 0) {
            make_arrival(&sums->arrived[0]);
            make_arrival(&sums->arrived[1]);
        }
        cluster_arrive();
    }
    take_turn();
    unsigned char *data = memory + sizeof(whole_sums);
    int rank = (int)(blockIdx.x % (unsigned)cut.blocks), cluster = (int)(blockIdx.x / (unsigned)cut.blocks);
    int first = rank * cut.tasks, all = (int)call.group_channels * cut.segments;
    whole_party party{sums, rank, cut.blocks, 0, 0};
    whole_way<T, WIDTH, BACKWARD> way{call,
                                      cut,
                                      reinterpret_cast<unit<T, WIDTH> *>(data) + threadIdx.x,
                                      reinterpret_cast<unit<T, WIDTH> *>(data + cut.dy_at) + threadIdx.x,
                                      (int)blockDim.x,
                                      first,
                                      all - first < cut.tasks ? all - first : cut.tasks,
                                      (int)threadIdx.x / cut.team,
                                      (int)threadIdx.x % cut.team,
                                      (int)blockDim.x / cut.team,
                                      (int)(call.parts * call.groups),
                                      (int)(gridDim.x / (unsigned)cut.blocks),
                                      {},
                                      0,
                                      0,
                                      0,
                                      0,
                                      {}};
    way.fill(cluster);
    whole_turn turn = turn_of(call, cluster);
    whole_saved saved = saved_of(call, turn, way.items);
    if (cut.blocks > 1) cluster_wait();
    int start = 0;
    while (turn.item < way.items) {
        int64_t group_first = turn.group * call.group_channels, row = turn.n * call.groups + turn.group;
        whole_task t = way.task_of(0);
        auto gamma_of = [&](const whole_task &task) {
            return task.here ? gamma_at<T>(call, group_first + task.channel) : 0.0f;
        };
        auto beta_of = [&](const whole_task &task) {
            return !BACKWARD && task.here ? beta_at<T>(call, group_first + task.channel) : 0.0f;
        };
        float gamma = gamma_of(t), beta = beta_of(t);
        scale s;
        if (call.mean_in) {
            s = scale_of(saved.mean, saved.rstd);
        } else {
            moments m = cluster_moments(party, way.measure(party, start));
            s = measured_scale(call, row, m.mean, m.squares, rank == 0 && threadIdx.x == 0);
        }
        slopes line{0, 0};
        if constexpr (BACKWARD) {
            double total[2];
            way.sum_up(party, turn, s, start, total);
            line = slopes_of(call, s, total[0], total[1]);
        }
        whole_turn next = next_turn(call, turn, way.stride);
        saved = saved_of(call, next, way.items);
        int none = 0;
        for (int round = 0; round < cut.rounds; round++) {
            int64_t to = way.place_of(turn, t);
            whole_task now = t;
            float weight = s.rstd * gamma;
            if constexpr (!BACKWARD) line = forward_line(s, gamma, beta);
            if (round + 1 < cut.rounds) {
                t = way.task_of(round + 1);
                gamma = gamma_of(t);
                beta = beta_of(t);
            }
            way.template each_unit<true>(now, start, none, [&](const auto &a, const auto &d, int step) {
                if (call.out)
                    write_result<T, WIDTH>(call, to + (int64_t)step * cut.team * WIDTH, a, BACKWARD ? &d : nullptr, s,
                                           weight, line);
            });
        }
        turn = next;
    }
}

/* ---- The cut ----------------------------------------------------------------------------------------- */

/* A group takes this much of the ring at most, in quarters: the rest is ahead. */
constexpr int64_t WHOLE_QUARTERS = 3;

/* Blocks of a multiprocessor, at most: smaller groups wait for their sums more often, so more are at work. */
constexpr int64_t WHOLE_RESIDENT = 5;

/* Shared memory that a multiprocessor takes for itself with each block. */
constexpr int64_t WHOLE_RESERVED = 1 << 10;

/* Segments of a channel that are tried beyond the least, for the ones that leave the fewest slots empty. */
constexpr int64_t WHOLE_TRIES = 8;

/* With fewer blocks than this, a group is shared by more of them, down to this many bytes each. */
constexpr int64_t WHOLE_SPREAD = 96, WHOLE_SPREAD_BYTES = 16 << 10;

struct whole_plan {
    whole_cut cut;
    int threads, resident; /* resident: blocks that a multiprocessor holds */
    size_t shared;
};

/*
 * Segments and warps for `resident` blocks a multiprocessor: those that leave the fewest slots empty. False where a
 * group does not fit.
 */
inline bool cut_whole(const group_call &call, int64_t units, int64_t unit_bytes, int64_t tensors, int64_t limit,
                      int64_t blocks, int64_t resident, whole_plan *plan) {
    int64_t channels = call.group_channels, team = 1, widest = WHOLE_WARPS / resident, best = INT64_MAX;
    while (team < 32 && 2 * team <= units)
        team *= 2;
    int64_t most_segments = units / team;
    int64_t from = most(divide_up(units, CHAIN_UNITS * team),
                        least(most_segments, divide_up(widest * (32 / team) * blocks, channels)));
    whole_cut &cut = plan->cut;
    for (int64_t tried = from; tried <= least(most_segments, from + WHOLE_TRIES); tried++) {
        int64_t segment_units = divide_up(units, tried), segments = divide_up(units, segment_units);
        int64_t tasks = divide_up(channels * segments, blocks), walk = divide_up(segment_units, team);
        for (int64_t warps = widest; 4 * warps >= 3 * widest; warps--) {
            int64_t teams = warps * 32 / team, rounds = divide_up(tasks, teams);
            if (rounds * walk * warps >= best) continue;
            best = rounds * walk * warps;
            cut = {(int)blocks,        (int)tasks,  (int)team, (int)units, (int)segments,
                   (int)segment_units, (int)rounds, (int)walk, 0,          0};
            plan->threads = (int)warps * 32;
        }
    }
    int64_t slot = plan->threads * unit_bytes;
    int64_t room = (limit + WHOLE_RESERVED) / resident - WHOLE_RESERVED - (int64_t)sizeof(whole_sums);
    int64_t slots = room / (slot * tensors);
    if (best == INT64_MAX || slots < cut.rounds * cut.walk) return false;
    cut.slots = (int)slots;
    cut.dy_at = (int)(slots * slot);
    plan->resident = (int)resident;
    plan->shared = sizeof(whole_sums) + (size_t)(slots * slot * tensors);
    return true;
}

/* False where a group does not fit; `tensors` of `bytes` an element are kept, in `limit` bytes of a block. */
inline bool plan_whole(const group_call &call, int width, int64_t bytes, int64_t tensors, bool clusters, int64_t limit,
                       whole_plan *plan) {
    int64_t unit_bytes = width * bytes, units = call.plane / width, channels = call.group_channels;
    int64_t hold = limit * WHOLE_QUARTERS / 4, rows = call.batch * call.groups;
    if (channels > INT_MAX / units || channels * units > WHOLE_CLUSTER * hold / (unit_bytes * tensors)) return false;
    int64_t all = channels * units * unit_bytes * tensors, blocks = 1;
    while (clusters && blocks < WHOLE_CLUSTER &&
           (all > blocks * hold || (rows * blocks < WHOLE_SPREAD && all > 2 * blocks * WHOLE_SPREAD_BYTES)))
        blocks *= 2;
    if (all > blocks * hold) return false;
    for (int64_t resident = most(1, least(WHOLE_RESIDENT, blocks * hold / all)); resident; resident--)
        if (cut_whole(call, units, unit_bytes, tensors, limit, blocks, resident, plan)) return true;
    return false;
}

} // namespace
} // namespace vjp

#endif

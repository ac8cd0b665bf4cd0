/*
 * The backward of group_norm, channels first, with a group in the registers of a block, or of a cluster of blocks: x
 * and dy are read once.
 *
 * Blocks stay for the whole call and take group after group. A line is 512 bytes of one channel, 16 for each lane; a
 * warp owns 8 lines of a group, or 4, all of one channel, so that gamma and the sums it leaves are the whole warp's. A
 * thread copies its own 16 bytes of each line to shared memory (no barrier: nobody else reads them), takes them from
 * there into registers and keeps them until their dx is written. So shared memory holds nothing but what comes next:
 * its place is free for another copy as soon as a line is in registers, long before the group's sums are known, and
 * copies are under way at all times.
 *
 * At 32x320x64x64 with 32 groups a group is 20 warps of 8 lines in bf16, one block; in f32 40 warps, a cluster of two.
 * Either way a multiprocessor reads 160 KB and writes 80 for each share of a group, 7.4 microseconds at 4.26 TB/s. That
 * is 52,000 instructions that could be issued; 20 warps issue about 900 each in bf16 and 500 in f32, and wait once,
 * about a microsecond, for the sums of all. Meanwhile 200 KB of copies are ahead, of which memory's latency needs 32.
 *
 * Of the statistics only saved ones are at hand at once; others are measured in the registers, in two more rounds of
 * sums. Order and places of all sums depend on sizes alone.
 */
#ifndef VJP_CUDA_GROUP_NORM_HELD_CUH
#define VJP_CUDA_GROUP_NORM_HELD_CUH

#include "cuda/group_norm_whole.cuh"

namespace vjp {
namespace {

/* Warps of a multiprocessor, in one block or several: 96 registers a thread, of which 64 hold x and dy. */
constexpr int HELD_WARPS = 20;

constexpr int HELD_LINE = 512;                         /* bytes */
constexpr int HELD_PIECE = 2;                          /* lines that are copied together, of x and as many of dy */
constexpr int HELD_STAGES = 5;                         /* pieces that are under way */
constexpr int HELD_STAGE = 2 * HELD_PIECE * HELD_LINE; /* bytes of a warp */

struct held_cut {
    int blocks, warps;   /* of a cluster; of a block */
    int segments, tasks; /* a channel's warps; a group's */
};

/* ---- Sums over a cluster ----------------------------------------------------------------------------- */

#ifndef GROUP_TICKETS
#define GROUP_TICKETS 0
#endif
constexpr int HELD_QUEUE = 8;

/* At the front of shared memory: two numbers from each warp of the cluster. Calls take turns with two sets. */
struct held_sums {
    double2 warp[2][HELD_WARPS * WHOLE_CLUSTER];
    unsigned long long arrived[2]; /* barriers that count the bytes which came from the cluster */
    long long queue[HELD_QUEUE];   /* rows, by turn */
};
static_assert(sizeof(held_sums) % 16 == 0, "what follows it is copied to 16 bytes at a time");

struct held_party {
    held_sums *sums;
    int rank, blocks, warps;
    unsigned exchanges; /* so far */
    int slot;           /* of the queue, filled by rank 0 before the next exchange, which brings it to the others */
};

/*
 * The sum over all warps of the cluster of both numbers, or of the second the largest; a warp's are in all its lanes.
 *
 * Each warp sends its numbers to every block, so that one wait is all. A set is written again behind the wait for the
 * other set, which nobody fills before having read the first.
 */
__device__ double2 held_total(held_party &party, double2 mine, bool largest) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = party.blocks * party.warps;
    unsigned set = party.exchanges % 2, parity = party.exchanges / 2 % 2;
    double2 *cells = party.sums->warp[set];
    if (party.blocks == 1) {
        if (lane == 0) cells[warp] = mine;
        __syncthreads();
    } else {
        unsigned long long *arrival = &party.sums->arrived[set];
        double2 *cell = &cells[party.rank * party.warps + warp];
        int comes = GROUP_TICKETS && party.rank ? (int)sizeof(double) : 0;
        if (threadIdx.x == 0) expect(arrival, all * (int)sizeof(double2) + comes);
        if (lane < party.blocks) {
            send(&cell->x, arrival, lane, mine.x);
            send(&cell->y, arrival, lane, mine.y);
        }
        if (GROUP_TICKETS && party.rank == 0 && threadIdx.x == 0)
            for (int block = 1; block < party.blocks; block++)
                send(reinterpret_cast<double *>(&party.sums->queue[party.slot]), arrival, block,
                     __longlong_as_double(party.sums->queue[party.slot]));
        wait_arrival(arrival, parity);
    }
    party.exchanges++;
    double2 total{0, 0};
#pragma unroll 1
    for (int k = lane; k < all; k += 32) {
        total.x += cells[k].x;
        total.y = largest ? fmax(total.y, cells[k].y) : total.y + cells[k].y;
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

/* All cells of the block are written: counted by channel_totals(). */
__device__ inline void held_arrive(unsigned *arrived) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(arrived, 1u);
}

/* ---- Lines ------------------------------------------------------------------------------------------- */

/* A warp's lines of x and dy as they are stored. */
template <int LINES> struct held_lines { uint4 x[LINES], dy[LINES]; };

template <class T> __device__ unit<T, WIDE<T>> unit_of(uint4 raw) {
    unit<T, WIDE<T>> u;
    *reinterpret_cast<uint4 *>(&u) = raw;
    return u;
}

/*
 * What is made of the lines from here on is made anew. The compiler would rather keep every element as the f32 that it
 * was before, in twice the registers of 16 bits.
 */
template <int LINES> __device__ void held_renew(held_lines<LINES> &lines) {
#pragma unroll
    for (int i = 0; i < LINES; i++)
        asm volatile(""
                     : "+r"(lines.x[i].x), "+r"(lines.x[i].y), "+r"(lines.x[i].z), "+r"(lines.x[i].w),
                       "+r"(lines.dy[i].x), "+r"(lines.dy[i].y), "+r"(lines.dy[i].z), "+r"(lines.dy[i].w));
}

/* Sums of a line's dy and dy * xh, in two chains each. */
template <class T> __device__ void held_add(uint4 raw_x, uint4 raw_dy, scale s, float (&sum)[2], float (&product)[2]) {
    float x[WIDE<T>], dy[WIDE<T>];
    unpack<T>(raw_x, x);
    unpack<T>(raw_dy, dy);
#pragma unroll
    for (int i = 0; i < WIDE<T>; i++) {
        sum[i % 2] += dy[i];
        product[i % 2] = fmaf(normalise(x[i], s), dy[i], product[i % 2]);
    }
}

/* ---- A warp's way ------------------------------------------------------------------------------------ */

/*
 * What a group needs besides x and dy, asked for a group ahead. gamma stays as it is stored until it is used: made an
 * f32 at once, it would be waited for at once.
 */
struct held_before {
    float mean, rstd;
    unsigned gamma;
};

template <class T, int LINES, bool USUAL> struct held_way {
    static constexpr int PIECES = LINES / HELD_PIECE, LINE_ELEMENTS = HELD_LINE / (int)sizeof(T);
    static_assert(LINES % HELD_PIECE == 0);
    /* The last piece of a turn copies of the row that is one less turns on; its number has come the turn before. */
    static constexpr int DEALT = (PIECES - 1 + HELD_STAGES) / PIECES + 1;
    static_assert(DEALT < HELD_QUEUE);
    const group_call &call;
    held_sums *sums;
    unsigned char *ring; /* this thread's first 16 bytes */
    int own, span;       /* this thread's first element of a group; elements of a group */
    int channel, rows, stride;
    bool live;        /* this warp has lines */
    int at;           /* bytes from `ring`: the oldest piece */
    int ahead;        /* what the next copy takes: its row */
    int64_t ahead_at; /* and this thread's first element there */

    __device__ bool aligned() const {
        return USUAL || call.aligned;
    }

    /* The row of the block's turn `turn`, where rows are taken by ticket. */
    __device__ int row_of(int turn) const {
        return (int)*(volatile long long *)&sums->queue[turn % HELD_QUEUE];
    }

    __device__ held_before before(int row) const {
        held_before b{0, 0, 0};
        if (row >= rows) return b;
        if (USUAL || call.mean_in) {
            b.mean = call.mean_in[row];
            b.rstd = call.rstd_in[row];
        }
        int64_t index = row % (int)call.groups * call.group_channels + channel;
        if (!call.gamma.data || !live) return b;
        if (sizeof(T) == 4 || call.gamma.f32)
            b.gamma = static_cast<const unsigned *>(call.gamma.data)[index];
        else
            b.gamma = static_cast<const unsigned short *>(call.gamma.data)[index];
        return b;
    }

    __device__ float gamma_of(const held_before &b) const {
        if (!call.gamma.data) return 1;
        if (sizeof(T) == 4 || call.gamma.f32) return __int_as_float((int)b.gamma);
        float two[WIDE<T>];
        unpack<T>(uint4{b.gamma, 0, 0, 0}, two);
        return two[0];
    }

    __device__ void point_ahead() {
        ahead_at = (int64_t)ahead * span + own;
    }

    /* Begins the copy of a piece to where `at` is. Every one is a group of copies, also an empty one: they are counted.
     */
    __device__ void copy(int piece, int to) {
        const T *ahead_x = static_cast<const T *>(call.x) + ahead_at,
                *ahead_dy = static_cast<const T *>(call.dy) + ahead_at;
        if (ahead < rows && live)
#pragma unroll
            for (int i = 0; i < HELD_PIECE; i++) {
                int line = (piece * HELD_PIECE + i) * LINE_ELEMENTS;
                copy_async(ring + to + i * HELD_LINE, ahead_x + line);
                copy_async(ring + to + (HELD_PIECE + i) * HELD_LINE, ahead_dy + line);
            }
        close_copies();
    }

    __device__ void wait() {
        wait_copies<HELD_STAGES - 1>();
    }

    /* Begins the first copies; what they take is brought into L2 while the kernel ahead still runs. */
    __device__ void fill(int first) {
        ahead = first;
        point_ahead();
        for (int i = 0; aligned() && live && ahead < rows && i < LINES; i++) {
            prefetch(static_cast<const T *>(call.x) + (ahead_at + i * LINE_ELEMENTS));
            prefetch(static_cast<const T *>(call.dy) + (ahead_at + i * LINE_ELEMENTS));
        }
        wait_for_previous();
        if (!aligned()) return;
#pragma unroll
        for (int stage = 0; stage < HELD_STAGES; stage++) {
            if (stage && stage % PIECES == 0) point_to(ahead + stride);
            copy(stage % PIECES, stage * HELD_STAGE);
        }
    }

    __device__ void point_to(int row) {
        ahead = row;
        point_ahead();
    }

    __device__ void step() {
        at += HELD_STAGE;
        if (at == HELD_STAGES * HELD_STAGE) {
            at = 0;
        }
    }

    __device__ uint4 line_at(int place, int i) const {
        return *reinterpret_cast<const uint4 *>(ring + place + i * HELD_LINE);
    }

    /* A piece into registers. */
    __device__ void take(int piece, held_lines<LINES> &lines) {
        wait();
#pragma unroll
        for (int i = 0; i < HELD_PIECE; i++) {
            lines.x[piece * HELD_PIECE + i] = line_at(at, i);
            lines.dy[piece * HELD_PIECE + i] = line_at(at, HELD_PIECE + i);
        }
    }

    /* Its place is free: another copy. */
    __device__ void refill(int turn, int piece) {
        if ((piece + HELD_STAGES) % PIECES == 0)
            point_to(GROUP_TICKETS ? row_of(turn + (piece + HELD_STAGES) / PIECES) : ahead + stride);
        copy((piece + HELD_STAGES) % PIECES, at);
        step();
    }

    /* dx of a line of this warp's first element `to`. */
    __device__ void write(T *to, uint4 raw_x, uint4 raw_dy, scale s, float weight, slopes line) const {
        float value[WIDE<T>], dy[WIDE<T>];
        unpack<T>(raw_x, value);
        unpack<T>(raw_dy, dy);
#pragma unroll
        for (int e = 0; e < WIDE<T>; e++)
            value[e] = fmaf(weight, dy[e], fmaf(line.slope, normalise(value[e], s), line.level));
        if constexpr (USUAL)
            __stcs(reinterpret_cast<uint4 *>(to), pack<T>(value));
        else
            write_unit<T, WIDE<T>>(to, value, call.aligned, call.add);
    }

    /* ---- Where not all is usual, lines stay in shared memory until their dx is written. */

    /* Calls f(line, x, dy) for the warp's lines. */
    template <class F> __device__ void each_line(F f) const {
        int place = at;
#pragma unroll 1
        for (int piece = 0; live && piece < PIECES; piece++) {
#pragma unroll
            for (int i = 0; i < HELD_PIECE; i++)
                f(piece * HELD_PIECE + i, line_at(place, i), line_at(place, HELD_PIECE + i));
            place = place + HELD_STAGE == HELD_STAGES * HELD_STAGE ? 0 : place + HELD_STAGE;
        }
    }

    /* Lines of a group that are not aligned come an element at a time. */
    __device__ void arrive(int row) {
        static_assert(PIECES <= HELD_STAGES);
        if (call.aligned) {
            wait_copies<HELD_STAGES - PIECES>();
            return;
        }
        at = 0;
        int64_t from = (int64_t)row * span + own;
#pragma unroll 1
        for (int line = 0; live && line < LINES; line++) {
            unsigned char *to = ring + line / HELD_PIECE * HELD_STAGE + line % HELD_PIECE * HELD_LINE;
            *reinterpret_cast<unit<T, WIDE<T>> *>(to) =
                load_unit<T, WIDE<T>>(static_cast<const T *>(call.x) + (from + line * LINE_ELEMENTS), false);
            *reinterpret_cast<unit<T, WIDE<T>> *>(to + HELD_PIECE * HELD_LINE) =
                load_unit<T, WIDE<T>>(static_cast<const T *>(call.dy) + (from + line * LINE_ELEMENTS), false);
        }
    }

    __device__ void leave(int turn) {
        for (int piece = 0; call.aligned && piece < PIECES; piece++)
            refill(turn, piece);
    }

    /* The group's moments, by two looks at the lines. */
    __device__ moments measure(held_party &party) const {
        double count = span;
        float sum = 0, largest = 0, squares = 0;
        each_line([&](int, uint4 x, uint4) { add_first(unit_of<T>(x), sum, largest); });
#pragma unroll
        for (int step = 16; step; step /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        double2 total = held_total(party, {warp_sum((double)sum), largest}, true);
        center near = center_of(total.x, count, (float)total.y);
        sum = 0;
        each_line([&](int, uint4 x, uint4) { add_second(unit_of<T>(x), near, sum, squares); });
        total = held_total(party, {warp_sum((double)sum), warp_sum((double)squares)}, false);
        return moments_of(near, total.x, total.y, count);
    }
};

/*
 * Compiled for what training calls (USUAL: tensors are aligned, dx is wanted and overwritten, statistics saved) with
 * nothing in it but that, and with all choices at run time.
 */
template <class T, int LINES, bool USUAL>
__global__ void __launch_bounds__(32 * HELD_WARPS, 1) held_groups(group_call call, held_cut cut) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200 /* where plan_held() lets it run */
    extern __shared__ __align__(16) unsigned char memory[];
    held_sums *sums = reinterpret_cast<held_sums *>(memory);
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    if (cut.blocks > 1) { /* this block has begun; the others wait for it before they write to it */
        if (threadIdx.x == 0) {
            make_arrival(&sums->arrived[0]);
            make_arrival(&sums->arrived[1]);
        }
        cluster_arrive();
    }
    let_next_begin();
    int rank = (int)(blockIdx.x % (unsigned)cut.blocks), cluster = (int)(blockIdx.x / (unsigned)cut.blocks);
    int task = rank * cut.warps + warp, channel = task / cut.segments, segment = task - channel * cut.segments;
    held_party party{sums, rank, cut.blocks, cut.warps, 0, 0};
    held_way<T, LINES, USUAL> way{call,
                                  sums,
                                  memory + sizeof(held_sums) + warp * HELD_STAGES * HELD_STAGE + lane * 16,
                                  channel * (int)call.plane + (segment * LINES * 32 + lane) * WIDE<T>,
                                  (int)(call.group_channels * call.plane),
                                  channel,
                                  (int)(call.batch * call.groups),
                                  (int)(gridDim.x / (unsigned)cut.blocks),
                                  task < cut.tasks,
                                  0,
                                  0,
                                  0};
    PROBE(call.probe, 0, 0);
    way.fill(cluster);
    PROBE(call.probe, 0, 1);
    held_before before = way.before(cluster);
#if GROUP_TICKETS
    /* The first rows are dealt out; each turn takes a ticket for one that is DEALT turns on. */
    constexpr int DEALT = way.DEALT;
    if (threadIdx.x < DEALT) sums->queue[threadIdx.x] = cluster + (int)threadIdx.x * way.stride;
    __syncthreads();
#endif
    if (cut.blocks > 1) cluster_wait();
    int row = cluster;
    for (int turn = 0; row < way.rows; turn++) {
        auto next = [&] { return GROUP_TICKETS ? way.row_of(turn + 1) : row + way.stride; };
        held_before after = way.before(next());
#if GROUP_TICKETS
        unsigned ticket = 0;
        if (rank == 0 && threadIdx.x == 0) ticket = atomicAdd(call.tickets, 1u);
        /* Later: it is not waited for. */
        auto keep_ticket = [&] {
            party.slot = (turn + DEALT) % HELD_QUEUE;
            if (rank == 0 && threadIdx.x == 0) sums->queue[party.slot] = (int)ticket + DEALT * way.stride;
        };
#else
        auto keep_ticket = [] {};
#endif
        held_lines<LINES> lines;
        float sum[2] = {}, product[2] = {}, gamma;
        scale s;
        if constexpr (USUAL) {
            s = scale_of(before.mean, before.rstd);
#pragma unroll
            for (int piece = 0; piece < way.PIECES; piece++) {
                way.take(piece, lines);
                if (piece == way.PIECES / 2) keep_ticket();
                way.refill(turn, piece);
#pragma unroll
                for (int i = piece * HELD_PIECE; i < (piece + 1) * HELD_PIECE; i++)
                    held_add<T>(lines.x[i], lines.dy[i], s, sum, product);
            }
        } else {
            way.arrive(row);
            keep_ticket();
            if (call.mean_in) {
                s = scale_of(before.mean, before.rstd);
            } else {
                moments m = way.measure(party);
                s = measured_scale(call, row, m.mean, m.squares, false);
            }
            way.each_line([&](int, uint4 x, uint4 dy) { held_add<T>(x, dy, s, sum, product); });
        }
        gamma = way.gamma_of(before);
        before = after;
        double2 mine{0, 0};
        sum[0] = warp_sum(add_up(sum));
        product[0] = warp_sum(add_up(product));
        if (way.live) {
            mine.x = sum[0];
            mine.y = product[0] + (double)s.rest * mine.x;
            if (call.cells && lane == 0) call.cells[(int64_t)row * cut.tasks + task] = mine;
            mine.x *= gamma;
            mine.y *= gamma;
        }
        double2 total = held_total(party, mine, false);
        if (call.arrived && next() >= way.rows) held_arrive(call.arrived); /* the block's last cells */
        slopes line = slopes_of(call, s, total.x, total.y);
        float weight = s.rstd * gamma;
        T *out = static_cast<T *>(call.out) + ((int64_t)row * way.span + way.own);
        if constexpr (USUAL) {
            held_renew(lines);
#pragma unroll
            for (int i = 0; i < LINES; i++)
                if (way.live) way.write(out + i * way.LINE_ELEMENTS, lines.x[i], lines.dy[i], s, weight, line);
        } else {
            if (call.out)
                way.each_line(
                    [&](int i, uint4 x, uint4 dy) { way.write(out + i * way.LINE_ELEMENTS, x, dy, s, weight, line); });
            way.leave(turn);
        }
        row = next();
    }
#if GROUP_TICKETS
    if (rank == 0 && threadIdx.x == 0) { /* the last leaves zeros to the next call */
        __threadfence();
        if (atomicAdd(call.tickets + 1, 1u) == (unsigned)way.stride - 1) call.tickets[0] = call.tickets[1] = 0;
    }
#endif
    PROBE(call.probe, 0, 2);
#else
    (void)call, (void)cut;
#endif
}

/* ---- The cut ----------------------------------------------------------------------------------------- */

struct held_plan {
    held_cut cut;
    int lines;    /* of a warp */
    int resident; /* blocks that a multiprocessor holds */
    size_t shared;
};

/* Fewer blocks than WHOLE_SPREAD share a group among more of them, down to this many warps each. */
constexpr int64_t HELD_LEAST_WARPS = 4;

/*
 * False on cards without clusters, and where another form does better: where lines do not come by fours in a channel, a
 * group is too large for a cluster's registers, or it would leave more than a quarter of a multiprocessor's warps idle.
 */
inline bool plan_held(const group_call &call, int64_t bytes, bool clusters, int64_t limit, held_plan *plan) {
    int64_t lines = call.plane * bytes / HELD_LINE, rows = call.batch * call.groups, widest = HELD_WARPS;
    if (!clusters || call.plane * bytes % (4 * HELD_LINE) || call.group_channels > INT_MAX / lines) return false;
    plan->lines = lines % 8 ? 4 : 8;
    int64_t segments = lines / plan->lines, tasks = call.group_channels * segments, blocks = 1;
    while (blocks < WHOLE_CLUSTER &&
           (tasks > blocks * widest || (rows * blocks < WHOLE_SPREAD && tasks >= 2 * blocks * HELD_LEAST_WARPS)))
        blocks *= 2;
    int64_t warps = divide_up(tasks, blocks);
    if (warps > widest) return false;
    plan->resident = (int)(HELD_WARPS / warps);
    plan->cut = {(int)blocks, (int)warps, (int)segments, (int)tasks};
    plan->shared = sizeof(held_sums) + (size_t)(warps * HELD_STAGES * HELD_STAGE);
    while (plan->resident && ((int64_t)plan->shared + WHOLE_RESERVED) * plan->resident > limit + WHOLE_RESERVED)
        plan->resident--;
    return plan->resident && (4 * warps * plan->resident >= 3 * HELD_WARPS || rows * blocks < WHOLE_SPREAD);
}

} // namespace
} // namespace vjp

#endif

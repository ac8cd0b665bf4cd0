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
 * Tried on an H200 and slower: the pieces of a channel's warps taking turns along it, copies that bring 256 bytes into
 * L2, ten smaller pieces under way, and groups taken by ticket, which lets blocks end together but not sooner.
 *
 * Of the statistics only saved ones are at hand at once; others are measured in the registers, in two more rounds of
 * sums. Order and places of all sums depend on sizes alone.
 */
#ifndef VJP_CUDA_GROUP_NORM_HELD_CUH
#define VJP_CUDA_GROUP_NORM_HELD_CUH

#include "cuda/norm/group_norm_whole.cuh"

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

/*
 * At the front of shared memory: two numbers from each warp of the cluster. Calls take turns with two sets. The ring
 * follows, and begins on a multiple of 128 bytes: on an H200 that runs at 0.87 of the limit in bf16 and 0.92 in f32,
 * the same code 16 bytes further at 0.80 and 0.84, and 80 bytes further at 0.74 and 0.77.
 */
struct alignas(128) held_sums {
    double2 warp[2][HELD_WARPS * WHOLE_CLUSTER];
    unsigned long long arrived[2]; /* barriers that count the bytes which came from the cluster */
};
static_assert(sizeof(held_sums) % 16 == 0, "what follows it is copied to 16 bytes at a time");

struct held_party {
    held_sums *sums;
    int rank, blocks, warps;
    unsigned exchanges; /* so far */
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
        if (threadIdx.x == 0) expect(arrival, all * (int)sizeof(double2));
        if (lane < party.blocks) {
            send(&cell->x, arrival, lane, mine.x);
            send(&cell->y, arrival, lane, mine.y);
        }
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
    const group_call &call;
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
                int line = piece * HELD_PIECE + i;
                copy_async(ring + to + i * HELD_LINE, ahead_x + line * LINE_ELEMENTS);
                copy_async(ring + to + (HELD_PIECE + i) * HELD_LINE, ahead_dy + line * LINE_ELEMENTS);
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
        int64_t here = ahead_at;
        for (int i = 0; aligned() && live && ahead < rows && i < LINES; i++, here += LINE_ELEMENTS) {
            prefetch(static_cast<const T *>(call.x) + here);
            prefetch(static_cast<const T *>(call.dy) + here);
        }
        wait_for_previous();
        if (!aligned()) return;
#pragma unroll
        for (int stage = 0; stage < HELD_STAGES; stage++) {
            if (stage && stage % PIECES == 0) next_ahead();
            copy(stage % PIECES, stage * HELD_STAGE);
        }
    }

    __device__ void next_ahead() {
        ahead += stride;
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
    __device__ void refill(int piece) {
        if ((piece + HELD_STAGES) % PIECES == 0) next_ahead();
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
        for (int line = 0; live && line < LINES; line++, from += LINE_ELEMENTS) {
            unsigned char *to = ring + line / HELD_PIECE * HELD_STAGE + line % HELD_PIECE * HELD_LINE;
            *reinterpret_cast<unit<T, WIDE<T>> *>(to) =
                load_unit<T, WIDE<T>>(static_cast<const T *>(call.x) + from, false);
            *reinterpret_cast<unit<T, WIDE<T>> *>(to + HELD_PIECE * HELD_LINE) =
                load_unit<T, WIDE<T>>(static_cast<const T *>(call.dy) + from, false);
        }
    }

    __device__ void leave() {
        for (int piece = 0; call.aligned && piece < PIECES; piece++)
            refill(piece);
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
    held_party party{sums, rank, cut.blocks, cut.warps, 0};
    held_way<T, LINES, USUAL> way{call,
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
    way.fill(cluster);
    held_before before = way.before(cluster);
    if (cut.blocks > 1) cluster_wait();
    for (int row = cluster; row < way.rows; row += way.stride) {
        held_before after = way.before(row + way.stride);
        held_lines<LINES> lines;
        float sum[2] = {}, product[2] = {}, gamma;
        scale s;
        if constexpr (USUAL) {
            s = scale_of(before.mean, before.rstd);
#pragma unroll
            for (int piece = 0; piece < way.PIECES; piece++) {
                way.take(piece, lines);
                way.refill(piece);
#pragma unroll
                for (int i = piece * HELD_PIECE; i < (piece + 1) * HELD_PIECE; i++)
                    held_add<T>(lines.x[i], lines.dy[i], s, sum, product);
            }
        } else {
            way.arrive(row);
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
            way.leave();
        }
    }
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

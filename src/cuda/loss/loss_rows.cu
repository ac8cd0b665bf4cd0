/* SPDX-License-Identifier: MIT */
/*
 * The losses of rows of logits and their gradients; loss_rows.cuh has the contract. Losses read the logits once;
 * gradients read them once and write dlogits. Where there is no lse, the row is measured first and read again, from
 * registers or the second-level cache.
 *
 *     path    a row touches at most      what
 *     teams   128 windows of 16 bytes    1 to 32 lanes of a warp per row, the row in registers
 *     blocks  more                       128 to 512 threads per row, 4 to 8 windows in flight each
 *
 * (row_sums.cuh describes windows and the sums of a row.) Blocks take chunks of rows, split by rows and classes alone.
 * A chunk's sum of losses and count of rows are left in the workspace, in double; one more block adds them in a fixed
 * order. The gradient of a mean needs the number of rows that take part: a launch of its own leaves up to 128 counts
 * that every warp then adds, so the host never needs the number.
 *
 * Every kernel is launched `chained` and touches no memory before wait_for_previous().
 */
#include "cuda/loss/row_sums.cuh"

namespace vjp {
namespace {

/* ---- Losses ------------------------------------------------------------------------------------------ */

/*
 * Threads of a block of teams, and the most blocks: four times what a large Hopper card holds at once (4 on each of 132
 * multiprocessors), so that those that finish early take others.
 */
constexpr int TEAM_THREADS = 256;
constexpr int64_t TEAM_CHUNKS = 4 * 4 * 132;

/*
 * Threads per row where a row has a block, and the windows up to which these numbers are used. A multiprocessor has
 * several small blocks, of which some load while others begin or add their sums.
 */
constexpr int FEW_THREADS = 128, SOME_THREADS = 256, MANY_THREADS = 512;
constexpr int64_t FEW_THREADS_WINDOWS = 2048, SOME_THREADS_WINDOWS = 8192;

/* Calls f with the threads of a block. */
template <class F> vjp_status with_threads(const loss_call &c, F f) {
    if (c.threads == FEW_THREADS) return f(std::integral_constant<int, FEW_THREADS>{});
    if (c.threads == SOME_THREADS) return f(std::integral_constant<int, SOME_THREADS>{});
    return f(std::integral_constant<int, MANY_THREADS>{});
}

/* The most chunks of rows that have a block each: partial sums that the last block reads in a few microseconds. */
constexpr int64_t BLOCK_CHUNKS = 16384;

/* Threads of a multiprocessor that leave each 64 registers: 8 windows in flight take 32. */
constexpr int BUSY_THREADS = 1024;

constexpr int blocks_at_once(int threads) {
    return resident_blocks(threads, BUSY_THREADS / threads);
}

/*
 * Stores a row's lse and adds its loss. `z` is the target's logit, if the row takes part. A term whose weight is 0 is
 * left out: 0 * Inf would be NaN.
 */
template <bool SMOOTH>
__device__ void finish_row(const loss_call &c, int64_t row, bool takes_part, float z, const row_sums &s,
                           double (&total)[2]) {
    double log_sum = log_of(s.sum), loss = log_sum;
    if (c.lse_out) c.lse_out[c.first_row + row] = (float)((double)s.max + log_sum);
    if (!takes_part) return;
    if (!SMOOTH || c.smoothing != 1) loss += (1 - c.smoothing) * ((double)s.max - (double)z);
    if (SMOOTH) loss += c.smoothing * (s.below / (double)c.classes);
    total[0] += loss;
    total[1] += 1;
}

template <class T> __device__ float logit_at(const loss_call &c, int64_t row, int64_t target) {
    return target < 0 ? 0.0f : to_f32(static_cast<const T *>(c.logits)[row * c.width + target]);
}

/* A team's windows of a row: window lane + j * threads of its lane. Without a row all are -Inf. */
template <class T> struct team_row {
    uint4 raw[BATCH];
    int begin[BATCH], end[BATCH];

    __device__ team_row(const loss_call &c, const row_windows<T> &r, int lane, bool wanted) {
        const T *row = static_cast<const T *>(c.logits) + r.from;
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            int64_t window = lane + j * c.threads;
            bool has = wanted && window < r.count;
            raw[j] = has ? load_window(r, row, window, c.aligned) : no_window<T>();
            begin[j] = end[j] = 0;
            if (has) window_range(r, r.at(window), begin[j], end[j]);
        }
    }
};

template <class T, bool SMOOTH>
__global__ void __launch_bounds__(TEAM_THREADS, blocks_at_once(TEAM_THREADS)) measure_teams(loss_call c) {
    __shared__ block_sums<double, 2, TEAM_THREADS> shared;
    int lane = threadIdx.x & (c.threads - 1), team = threadIdx.x >> c.team_bits, turn = 0;
    int teams = TEAM_THREADS >> c.team_bits;
    double total[2] = {0, 0};
    begin_chained();
    int64_t end = chunk_begin(c, blockIdx.x + 1ll);
    /* All threads run the loop equally often: lanes are merged by whole warps. */
    for (int64_t base = chunk_begin(c, blockIdx.x); base < end; base += teams) {
        int64_t row = base + team, target = row < end ? class_of(c, row, lane == 0) : -1;
        bool wanted = row < end && (c.lse_out || target >= 0);
        row_windows<T> r(c, wanted ? row : 0);
        team_row<T> mine(c, r, lane, wanted);
        float z = lane == 0 ? logit_at<T>(c, row, target) : 0.0f;
        row_sums s = {-CUDART_INF_F, 0, 0, 0};
        add_windows<T, SMOOTH>(s, mine.raw, mine.begin, mine.end);
        merge_lanes<T, SMOOTH>(s, c.threads);
        if (lane == 0 && wanted) finish_row<SMOOTH>(c, row, target >= 0, z, s, total);
    }
    block_sum(total, shared, turn);
    if (threadIdx.x == 0 && c.loss) c.partials[blockIdx.x] = {total[0], total[1]};
}

template <class T, bool SMOOTH, int THREADS>
__global__ void __launch_bounds__(THREADS, blocks_at_once(THREADS)) measure_blocks(loss_call c) {
    __shared__ warp_sums<THREADS> shared;
    int turn = 0;
    double total[2] = {0, 0};
    begin_chained();
    int64_t end = chunk_begin(c, blockIdx.x + 1ll);
    for (int64_t row = chunk_begin(c, blockIdx.x); row < end; row++) {
        int64_t target = class_of(c, row, threadIdx.x == 0);
        if (!c.lse_out && target < 0) continue;
        float z = threadIdx.x == 0 ? logit_at<T>(c, row, target) : 0.0f;
        row_sums s = measure<T, SMOOTH, true, THREADS>(c, row_windows<T>(c, row), shared, turn);
        if (threadIdx.x == 0) finish_row<SMOOTH>(c, row, target >= 0, z, s, total);
    }
    if (threadIdx.x == 0 && c.loss) c.partials[blockIdx.x] = {total[0], total[1]};
}

/* One block adds the chunks. Where no row takes part the loss is 0. */
constexpr int FINISH_THREADS = 1024;

__global__ void __launch_bounds__(FINISH_THREADS) finish_loss(loss_call c) {
    __shared__ block_sums<double, 2, FINISH_THREADS> shared;
    int turn = 0;
    double total[2] = {0, 0};
    begin_chained();
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < c.chunks; i += FINISH_THREADS) {
        double2 part = __ldcg(reinterpret_cast<const double2 *>(c.partials + i));
        total[0] += part.x;
        total[1] += part.y;
    }
    block_sum(total, shared, turn);
    if (threadIdx.x != 0) return;
    double loss = c.mean && total[1] > 0 ? total[0] / total[1] : total[0];
    *c.loss = (float)(c.add_loss ? (double)*c.loss + loss : loss);
}

/* ---- Gradients --------------------------------------------------------------------------------------- */

/* Rows per block of the count, at least, and the most blocks: every warp adds their counts again. */
constexpr int COUNT_THREADS = 512;
constexpr int64_t COUNT_ROWS = 4096, COUNT_BLOCKS = 128;

__global__ void __launch_bounds__(COUNT_THREADS) count_rows(loss_call c) {
    __shared__ block_sums<double, 1, COUNT_THREADS> shared;
    int turn = 0;
    int64_t count = 0;
    begin_chained();
#pragma unroll 4
    for (int64_t row = (int64_t)blockIdx.x * COUNT_THREADS + threadIdx.x; row < c.rows;
         row += c.count_blocks * COUNT_THREADS)
        count += class_of(c, row, false) >= 0;
    double total[1] = {(double)count};
    block_sum(total, shared, turn);
    if (threadIdx.x == 0) c.counts[blockIdx.x] = total[0];
}

/* dloss, divided by the rows that take part if the loss is their mean. Every lane of the warp must call it. */
__device__ inline float scale_of(const loss_call &c) {
    double dloss = (double)*c.dloss, count = 0;
    if (!c.counts) return (float)dloss;
    for (int64_t i = threadIdx.x % 32; i < c.count_blocks; i += 32)
        count += __ldcg(c.counts + i);
    return (float)(dloss / warp_sum(count));
}

/* Where no row takes part, every gradient is 0, and the factor must not make NaN of it. */
__global__ void __launch_bounds__(32) write_factors(loss_call c, float unit, float *factors) {
    begin_chained();
    double count = 0;
    for (int64_t i = threadIdx.x; c.counts && i < c.count_blocks; i += 32)
        count += __ldcg(c.counts + i);
    count = warp_sum(count);
    if (threadIdx.x != 0) return;
    double divisor = c.counts ? count : 1;
    factors[0] = divisor == 0 ? 0.0f : (float)((double)*c.dloss / divisor / (double)unit);
    factors[1] = 0;
    factors[2] = 1;
    factors[UNIT_FACTOR] = unit;
}

/* What the gradients of a row are computed with. */
enum row_mode { SAVED, MEASURED, MEASURED_SMOOTH }; /* its lse; its sums, which smoothing needs more of for the loss */

/* dlogits = scale (inverse exp(z - shift) - q), q one number at the target and another elsewhere. */
struct row_gradient {
    int64_t target;  /* position in the row; outside of it where the row has only some classes */
    bool takes_part; /* false: the gradient is 0 */
    float shift, inverse, scale, at_target, elsewhere;

    __device__ row_gradient(const loss_call &c, int64_t target, float scale)
        : target(target - c.first_class), takes_part(target >= 0), shift(0), inverse(1), scale(scale),
          at_target(c.at_target), elsewhere(c.elsewhere) {
    }
    /* exp(z - lse) is p itself. */
    __device__ void use(float lse) {
        shift = lse;
    }
    __device__ void use(const row_sums &s) {
        shift = finite_shift(s.max);
        inverse = (float)(1 / s.sum);
    }
};

/* Writes the gradient of the window of logits `raw`, whose first element is element i of the row. */
template <class T>
__device__ void write_gradient(const loss_call &c, const row_gradient &g, const row_windows<T> &r, uint4 raw, int64_t i,
                               bool wide) {
    int64_t distance = g.target - i;
    int at = distance >= 0 && distance < WIDE<T> ? (int)distance : -1;
    float d[WIDE<T>];
    unpack<T>(raw, d);
#pragma unroll
    for (int e = 0; e < WIDE<T>; e++) {
        float q = e == at ? g.at_target : g.elsewhere, p = exp_of<T>(d[e] - g.shift);
        d[e] = g.takes_part ? fmaf(p, g.inverse, -q) * g.scale : 0.0f;
    }
    write_window(r, static_cast<T *>(c.dlogits) + r.from, i, d, wide, c.add);
}

template <class T, row_mode MODE>
__global__ void __launch_bounds__(TEAM_THREADS, blocks_at_once(TEAM_THREADS)) gradient_teams(loss_call c) {
    __shared__ block_sums<double, 2, TEAM_THREADS> shared;
    constexpr bool SMOOTH = MODE == MEASURED_SMOOTH;
    int lane = threadIdx.x & (c.threads - 1), team = threadIdx.x >> c.team_bits, turn = 0;
    int teams = TEAM_THREADS >> c.team_bits;
    double total[2] = {0, 0};
    begin_chained();
    float scale = scale_of(c);
    int64_t end = chunk_begin(c, blockIdx.x + 1ll);
    for (int64_t base = chunk_begin(c, blockIdx.x); base < end; base += teams) {
        int64_t row = base + team, target = row < end ? class_of(c, row, lane == 0) : -1;
        bool has = row < end, wanted = has && (target >= 0 || (MODE != SAVED && c.lse_out));
        row_gradient g(c, target, scale);
        row_windows<T> r(c, has ? row : 0);
        team_row<T> mine(c, r, lane, wanted);
        if (MODE == SAVED) {
            if (has) g.use(c.lse[c.first_row + row]);
        } else {
            float z = lane == 0 ? logit_at<T>(c, row, target) : 0.0f;
            row_sums s = {-CUDART_INF_F, 0, 0, 0};
            add_windows<T, SMOOTH>(s, mine.raw, mine.begin, mine.end);
            merge_lanes<T, SMOOTH>(s, c.threads);
            g.use(s);
            if (lane == 0 && wanted && (c.loss || c.lse_out)) finish_row<SMOOTH>(c, row, target >= 0, z, s, total);
        }
        if (!has || (!g.takes_part && c.add)) continue;
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            int64_t window = lane + j * c.threads;
            if (window < r.count) write_gradient(c, g, r, mine.raw[j], r.at(window), c.aligned && r.is_whole(window));
        }
    }
    if (MODE == SAVED || !c.loss) return;
    block_sum(total, shared, turn);
    if (threadIdx.x == 0) c.partials[blockIdx.x] = {total[0], total[1]};
}

/*
 * The whole windows of a row. A row that was measured just now is read from its end: its last windows are the likeliest
 * to be in the second-level cache still.
 */
template <class T, bool BACKWARDS, bool ALIGNED, int THREADS>
__device__ void write_whole_windows(const loss_call &c, const row_gradient &g, const row_windows<T> &r) {
    const T *row = static_cast<const T *>(c.logits) + r.from;
    for (int64_t n = r.first + threadIdx.x; n < r.last; n += BATCH * THREADS) {
        uint4 raw[BATCH];
        int64_t window[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            window[j] = n + j * THREADS;
            if (window[j] >= r.last)
                window[j] = -1;
            else if (BACKWARDS)
                window[j] = r.first + r.last - 1 - window[j];
            raw[j] =
                window[j] >= 0 && g.takes_part ? load_whole<T, true, ALIGNED>(r, row, r.at(window[j])) : no_window<T>();
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            if (window[j] >= 0) write_gradient(c, g, r, raw[j], r.at(window[j]), ALIGNED);
    }
}

template <class T, row_mode MODE, int THREADS>
__global__ void __launch_bounds__(THREADS, blocks_at_once(THREADS)) gradient_blocks(loss_call c) {
    __shared__ warp_sums<THREADS> shared;
    constexpr bool SMOOTH = MODE == MEASURED_SMOOTH;
    int turn = 0;
    double total[2] = {0, 0};
    begin_chained();
    float scale = scale_of(c);
    int64_t end = chunk_begin(c, blockIdx.x + 1ll);
    for (int64_t row = chunk_begin(c, blockIdx.x); row < end; row++) {
        int64_t target = class_of(c, row, threadIdx.x == 0);
        row_gradient g(c, target, scale);
        row_windows<T> r(c, row);
        if (MODE == SAVED) {
            g.use(c.lse[c.first_row + row]);
        } else if (g.takes_part || c.lse_out) {
            /* Before the barrier of measure(): afterwards gradients are written over the logits. */
            float z = threadIdx.x == 0 ? logit_at<T>(c, row, target) : 0.0f;
            row_sums s = measure<T, SMOOTH, false, THREADS>(c, r, shared, turn);
            g.use(s);
            if (threadIdx.x == 0 && (c.loss || c.lse_out)) finish_row<SMOOTH>(c, row, g.takes_part, z, s, total);
        }
        if (!g.takes_part && c.add) continue;
        if (c.aligned)
            write_whole_windows<T, MODE != SAVED, true, THREADS>(c, g, r);
        else
            write_whole_windows<T, MODE != SAVED, false, THREADS>(c, g, r);
        int64_t window = r.partial();
        if (window < 0) continue;
        uint4 raw = load_elements(r, static_cast<const T *>(c.logits) + r.from, r.at(window));
        write_gradient(c, g, r, raw, r.at(window), false);
    }
    if (MODE != SAVED && threadIdx.x == 0 && c.loss) c.partials[blockIdx.x] = {total[0], total[1]};
}

} // namespace

/* ---- Calls ------------------------------------------------------------------------------------------- */

loss_call loss_call_of(const vjp_cross_entropy_sizes &s) {
    loss_call c{};
    c.rows = s.rows;
    c.width = c.classes = s.classes;
    c.ignore_index = s.ignore_index;
    c.smoothing = s.smoothing;
    c.at_target = (float)s.at_target;
    c.elsewhere = (float)s.elsewhere;
    c.mean = s.mean;
    return c;
}

void plan_rows(vjp_dtype storage, loss_call *c) {
    int64_t wide = 16 / (int64_t)vjp_dtype_size(storage);
    int64_t windows = c->width % wide == 0 ? c->width / wide : vjp_divide_up(c->width - 1, wide) + 1;
    for (c->threads = 1, c->team_bits = 0; c->threads < 32 && c->threads * BATCH < windows; c->threads *= 2)
        c->team_bits++;
    if (c->threads * BATCH >= windows) {
        c->chunks = vjp_min(TEAM_CHUNKS, vjp_divide_up(c->rows, TEAM_THREADS >> c->team_bits));
    } else {
        c->threads = windows <= FEW_THREADS_WINDOWS    ? FEW_THREADS
                     : windows <= SOME_THREADS_WINDOWS ? SOME_THREADS
                                                       : MANY_THREADS;
        c->chunks = vjp_min(BLOCK_CHUNKS, c->rows);
    }
    c->chunk_rows = c->chunks ? c->rows / c->chunks : 0;
    c->longer_chunks = c->chunks ? c->rows % c->chunks : 0;
    c->aligned = is_aligned(c->logits, 16) && is_aligned(c->dlogits, 16);
}

vjp_status enqueue_losses(const vjp_work *work, const loss_call &c) {
    return with_type(work->storage, [&](auto zero) {
        return with_bool(c.smoothing != 0, [&](auto smooth) {
            using T = decltype(zero);
            constexpr bool SMOOTH = decltype(smooth)::value;
            if (c.threads <= 32) return launch(work, true, measure_teams<T, SMOOTH>, c.chunks, TEAM_THREADS, 0, c);
            return with_threads(c, [&](auto threads) {
                constexpr int THREADS = decltype(threads)::value;
                return launch(work, true, measure_blocks<T, SMOOTH, THREADS>, c.chunks, THREADS, 0, c);
            });
        });
    });
}

vjp_status enqueue_loss(const vjp_work *work, const loss_call &c) {
    return launch(work, true, finish_loss, 1, FINISH_THREADS, 0, c);
}

int64_t count_blocks_of(int64_t rows) {
    return vjp_min(COUNT_BLOCKS, vjp_divide_up(rows, COUNT_ROWS));
}

vjp_status enqueue_count(const vjp_work *work, const loss_call &c) {
    return launch(work, true, count_rows, c.count_blocks, COUNT_THREADS, 0, c);
}

vjp_status enqueue_factors(const vjp_work *work, const loss_call &c, float unit, float *factors) {
    return launch(work, true, write_factors, 1, 32, 0, c, unit, factors);
}

namespace {

template <class T, row_mode MODE> vjp_status launch_gradients(const vjp_work *work, const loss_call &c) {
    if (c.threads <= 32) return launch(work, true, gradient_teams<T, MODE>, c.chunks, TEAM_THREADS, 0, c);
    return with_threads(c, [&](auto threads) {
        constexpr int THREADS = decltype(threads)::value;
        return launch(work, true, gradient_blocks<T, MODE, THREADS>, c.chunks, THREADS, 0, c);
    });
}

} // namespace

vjp_status enqueue_gradients(const vjp_work *work, const loss_call &c) {
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        if (c.lse) return launch_gradients<T, SAVED>(work, c);
        /* Without a loss the sum that only smoothing needs is left out; it changes no other bit. */
        if (c.loss && c.smoothing != 0) return launch_gradients<T, MEASURED_SMOOTH>(work, c);
        return launch_gradients<T, MEASURED>(work, c);
    });
}

} // namespace vjp

/* SPDX-License-Identifier: MIT */
/*
 * cross_entropy on CUDA. The forward reads the logits once; the backward reads them once and writes dlogits. Where the
 * backward has no lse, it measures a row first and reads it again, from registers or the second-level cache.
 *
 *     path    a row touches at most      what
 *     teams   128 windows of 16 bytes    1 to 32 lanes of a warp per row, the row in registers
 *     blocks  more                       128 threads per row (512 from 1025 windows on), 4 to 8 windows in flight each
 *
 * (cross_entropy.cuh describes windows and the sums of a row.) Blocks take chunks of rows, split by rows and classes
 * alone. The forward leaves a chunk's sum of losses and count of rows in the workspace, in double; one more block adds
 * them in a fixed order. The backward of a mean counts the rows that take part in a launch of its own, into up to 128
 * counts that every warp then adds: the host never needs the number.
 *
 * Every kernel is launched `chained` and touches no memory before wait_for_previous().
 */
#include "cuda/loss/cross_entropy.cuh"

namespace vjp {
namespace {

/* ---- Forward ----------------------------------------------------------------------------------------- */

/*
 * Threads of a block of teams, and the most blocks: four times what a large Hopper card holds at once (4 on each of 132
 * multiprocessors), so that those that finish early take others.
 */
constexpr int TEAM_THREADS = 256;
constexpr int64_t TEAM_CHUNKS = 4 * 4 * 132;

/* Threads per row where a row has a block, and the windows up to which the smaller number is used. */
constexpr int FEW_THREADS = 128, MANY_THREADS = 512;
constexpr int64_t FEW_THREADS_WINDOWS = 1024;

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
    if (c.lse_out) c.lse_out[row] = (float)((double)s.max + log_sum);
    if (!takes_part) return;
    if (!SMOOTH || c.smoothing != 1) loss += (1 - c.smoothing) * ((double)s.max - (double)z);
    if (SMOOTH) loss += c.smoothing * (s.below / (double)c.classes);
    total[0] += loss;
    total[1] += 1;
}

template <class T> __device__ float logit_at(const loss_call &c, int64_t row, int64_t target) {
    return target < 0 ? 0.0f : to_f32(static_cast<const T *>(c.logits)[row * c.classes + target]);
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
__global__ void __launch_bounds__(TEAM_THREADS, blocks_at_once(TEAM_THREADS)) forward_teams(loss_call c) {
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
__global__ void __launch_bounds__(THREADS, blocks_at_once(THREADS)) forward_blocks(loss_call c) {
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
    *c.loss = (float)(c.add ? (double)*c.loss + loss : loss);
}

/* ---- Backward ---------------------------------------------------------------------------------------- */

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

/* dlogits = scale (inverse exp(z - shift) - q), q one number at the target and another elsewhere. */
struct row_gradient {
    int64_t target; /* -1: the row takes no part and its gradient is 0 */
    float shift, inverse, scale, at_target, elsewhere;

    __device__ row_gradient(const loss_call &c, int64_t target, float scale)
        : target(target), shift(0), inverse(1), scale(scale), at_target(c.at_target), elsewhere(c.elsewhere) {
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
        d[e] = g.target < 0 ? 0.0f : fmaf(p, g.inverse, -q) * g.scale;
    }
    write_window(r, static_cast<T *>(c.dlogits) + r.from, i, d, wide, c.add);
}

template <class T, bool SAVED>
__global__ void __launch_bounds__(TEAM_THREADS, blocks_at_once(TEAM_THREADS)) backward_teams(loss_call c) {
    int lane = threadIdx.x & (c.threads - 1), team = threadIdx.x >> c.team_bits;
    int teams = TEAM_THREADS >> c.team_bits;
    begin_chained();
    float scale = scale_of(c);
    int64_t end = chunk_begin(c, blockIdx.x + 1ll);
    for (int64_t base = chunk_begin(c, blockIdx.x); base < end; base += teams) {
        int64_t row = base + team;
        bool has = row < end;
        row_gradient g(c, has ? class_of(c, row, lane == 0) : -1, scale);
        row_windows<T> r(c, has ? row : 0);
        team_row<T> mine(c, r, lane, g.target >= 0);
        if (SAVED) {
            if (has) g.use(c.lse[row]);
        } else {
            row_sums s = {-CUDART_INF_F, 0, 0, 0};
            add_windows<T, false>(s, mine.raw, mine.begin, mine.end);
            merge_lanes<T, false>(s, c.threads);
            g.use(s);
        }
        if (!has || (g.target < 0 && c.add)) continue;
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            int64_t window = lane + j * c.threads;
            if (window < r.count) write_gradient(c, g, r, mine.raw[j], r.at(window), c.aligned && r.is_whole(window));
        }
    }
}

/*
 * The whole windows of a row. A row that was measured just now is read from its end: its last windows are the likeliest
 * to be in the second-level cache still.
 */
template <class T, bool SAVED, bool ALIGNED, int THREADS>
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
            else if (!SAVED)
                window[j] = r.first + r.last - 1 - window[j];
            raw[j] = window[j] >= 0 && g.target >= 0 ? load_whole<T, true, ALIGNED>(r, row, r.at(window[j]))
                                                     : no_window<T>();
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            if (window[j] >= 0) write_gradient(c, g, r, raw[j], r.at(window[j]), ALIGNED);
    }
}

template <class T, bool SAVED, int THREADS>
__global__ void __launch_bounds__(THREADS, blocks_at_once(THREADS)) backward_blocks(loss_call c) {
    __shared__ warp_sums<THREADS> shared;
    int turn = 0;
    begin_chained();
    float scale = scale_of(c);
    int64_t end = chunk_begin(c, blockIdx.x + 1ll);
    for (int64_t row = chunk_begin(c, blockIdx.x); row < end; row++) {
        row_gradient g(c, class_of(c, row, threadIdx.x == 0), scale);
        if (g.target < 0 && c.add) continue;
        row_windows<T> r(c, row);
        if (SAVED)
            g.use(c.lse[row]);
        else if (g.target >= 0)
            g.use(measure<T, false, false, THREADS>(c, r, shared, turn));
        if (c.aligned)
            write_whole_windows<T, SAVED, true, THREADS>(c, g, r);
        else
            write_whole_windows<T, SAVED, false, THREADS>(c, g, r);
        int64_t window = r.partial();
        if (window < 0) continue;
        uint4 raw = load_elements(r, static_cast<const T *>(c.logits) + r.from, r.at(window));
        write_gradient(c, g, r, raw, r.at(window), false);
    }
}

/* ---- Calls ------------------------------------------------------------------------------------------- */

/* Decides how a call is split, lays the workspace out and returns its bytes. */
size_t plan(const vjp_work *work, loss_call *c) {
    int64_t wide = 16 / (int64_t)vjp_dtype_size(work->storage);
    int64_t windows = c->classes % wide == 0 ? c->classes / wide : vjp_divide_up(c->classes - 1, wide) + 1;
    for (c->threads = 1, c->team_bits = 0; c->threads < 32 && c->threads * BATCH < windows; c->threads *= 2)
        c->team_bits++;
    if (c->threads * BATCH >= windows) {
        c->chunks = vjp_min(TEAM_CHUNKS, vjp_divide_up(c->rows, TEAM_THREADS >> c->team_bits));
    } else {
        c->threads = windows <= FEW_THREADS_WINDOWS ? FEW_THREADS : MANY_THREADS;
        c->chunks = vjp_min(BLOCK_CHUNKS, c->rows);
    }
    c->chunk_rows = c->chunks ? c->rows / c->chunks : 0;
    c->longer_chunks = c->chunks ? c->rows % c->chunks : 0;
    c->count_blocks = vjp_min(COUNT_BLOCKS, vjp_divide_up(c->rows, COUNT_ROWS));
    workspace_layout layout(work->workspace);
    if (work->pass == VJP_FORWARD)
        c->partials = layout.take<partial_loss>(c->chunks);
    else if (c->mean)
        c->counts = layout.take<double>(c->count_blocks);
    return layout.max;
}

loss_call call_of(const vjp_work *work) {
    vjp_cross_entropy_sizes s = vjp_cross_entropy_sizes_of(work);
    loss_call c{};
    c.rows = s.rows;
    c.classes = s.classes;
    c.ignore_index = s.ignore_index;
    c.smoothing = s.smoothing;
    c.at_target = (float)s.at_target;
    c.elsewhere = (float)s.elsewhere;
    c.mean = s.mean;
    return c;
}

size_t workspace(const vjp_work *work) {
    loss_call c = call_of(work);
    return plan(work, &c);
}

vjp_status forward(const vjp_work *work) {
    loss_call c = call_of(work);
    c.loss = static_cast<float *>(vjp_data(work, CROSS_ENTROPY_LOSS));
    c.lse_out = static_cast<float *>(vjp_data(work, CROSS_ENTROPY_LSE));
    c.logits = vjp_data(work, CROSS_ENTROPY_LOGITS);
    c.target = vjp_data(work, CROSS_ENTROPY_TARGET);
    c.target_type = vjp_type(work, CROSS_ENTROPY_TARGET);
    c.add = vjp_accumulates(work, CROSS_ENTROPY_LOSS);
    c.aligned = is_aligned(c.logits, 16);
    if (!c.loss && !c.lse_out) return VJP_OK;
    c.found = findings_of(work);
    plan(work, &c);
    vjp_status status = with_type(work->storage, [&](auto zero) {
        return with_bool(c.smoothing != 0, [&](auto smooth) {
            using T = decltype(zero);
            constexpr bool SMOOTH = decltype(smooth)::value;
            if (c.threads <= 32) return launch(work, true, forward_teams<T, SMOOTH>, c.chunks, TEAM_THREADS, 0, c);
            if (c.threads == FEW_THREADS)
                return launch(work, true, forward_blocks<T, SMOOTH, FEW_THREADS>, c.chunks, FEW_THREADS, 0, c);
            return launch(work, true, forward_blocks<T, SMOOTH, MANY_THREADS>, c.chunks, MANY_THREADS, 0, c);
        });
    });
    if (status != VJP_OK || !c.loss) return status;
    return launch(work, true, finish_loss, 1, FINISH_THREADS, 0, c);
}

vjp_status backward(const vjp_work *work) {
    loss_call c = call_of(work);
    c.dlogits = vjp_data(work, CROSS_ENTROPY_B_DLOGITS);
    c.dloss = static_cast<const float *>(vjp_data(work, CROSS_ENTROPY_B_DLOSS));
    c.logits = vjp_data(work, CROSS_ENTROPY_B_LOGITS);
    c.target = vjp_data(work, CROSS_ENTROPY_B_TARGET);
    c.target_type = vjp_type(work, CROSS_ENTROPY_B_TARGET);
    c.lse = static_cast<const float *>(vjp_data(work, CROSS_ENTROPY_B_LSE));
    c.add = vjp_accumulates(work, CROSS_ENTROPY_B_DLOGITS);
    c.aligned = is_aligned(c.logits, 16) && is_aligned(c.dlogits, 16);
    if (!c.dlogits || c.rows == 0) return VJP_OK;
    c.found = findings_of(work);
    plan(work, &c);
    vjp_status status = VJP_OK;
    if (c.counts) status = launch(work, true, count_rows, c.count_blocks, COUNT_THREADS, 0, c);
    if (status != VJP_OK) return status;
    return with_type(work->storage, [&](auto zero) {
        return with_bool(c.lse, [&](auto saved) {
            using T = decltype(zero);
            constexpr bool SAVED = decltype(saved)::value;
            if (c.threads <= 32) return launch(work, true, backward_teams<T, SAVED>, c.chunks, TEAM_THREADS, 0, c);
            if (c.threads == FEW_THREADS)
                return launch(work, true, backward_blocks<T, SAVED, FEW_THREADS>, c.chunks, FEW_THREADS, 0, c);
            return launch(work, true, backward_blocks<T, SAVED, MANY_THREADS>, c.chunks, MANY_THREADS, 0, c);
        });
    });
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_cross_entropy[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_cross_entropy[VJP_PASS_COUNT] = {
    {vjp::forward, vjp::workspace, VJP_STORAGE_16_32},
    {vjp::backward, vjp::workspace, VJP_STORAGE_16_32},
};
}

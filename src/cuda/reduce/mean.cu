/* SPDX-License-Identifier: MIT */
/*
 * mean on CUDA: x as [outer, length, inner], averaged along length. Every element is read once.
 *
 *     path     when                                   what
 *     lines    inner is 1                             1, 4, 32 or 256 threads per line, by its length; a long line is
 *                                                     split into segments, whose sums another kernel adds
 *     short    length up to 32, or up to 256 with     a thread per vector of adjacent results
 *              many results
 *     columns  otherwise                              column_sums.cuh
 *
 * f32 sums have 16 to 32 adjacent terms on a line, in pairs, and 4 in a column; those are added in double. Where f32
 * cannot hold such a sum its terms are added in double, so that the mean of the largest numbers is right. The order
 * follows from the sizes and the dtype alone: accesses of single elements, where addresses allow no others, change no
 * bit.
 *
 * The backward writes dy / length to every element of the mean: an elementwise op whose input is repeated.
 */
#include "cuda/elementwise/column_sums.cuh"

namespace vjp {
namespace {

struct mean_call {
    const void *x;
    void *y;
    bool add;
    int64_t outer, length, inner;
    int64_t segment, segments; /* elements of a segment of a line, and how many */
    double *partial;           /* [outer, segments] where there are several */
    divider vectors;           /* short: vectors of results for each outer */
};

/* ---- Lines ------------------------------------------------------------------------------------------- */

constexpr int LINE_THREADS = 256;

/* Vectors in flight per thread: 64 bytes. */
constexpr int LINE_VECTORS = 4;

/* Teams have 1, 4, 32 or 256 threads; the longest line of each but the last. */
constexpr int64_t SINGLE_LINE = 32, SMALL_LINE = 256, WARP_LINE = 8192;

/* Blocks that the segments of long lines are split into: 64 KiB each of a 256 MiB line. */
constexpr int64_t LINE_BLOCKS = 4096;

/* Up to W elements, of which `left` are in the line. */
template <class T, bool VECTORS> __device__ uint4 load_line(const T *from, int64_t left) {
    constexpr int W = WIDE<T>;
    if constexpr (VECTORS) return load_elements<T, W>(from);
    uint4 raw = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < W; k++)
        if (k < left) set_element<T>(raw, k, element_bits(from + k));
    return raw;
}

/* The sum of a vector, in pairs. */
template <class T> __device__ float vector_sum(const uint4 &raw) {
    float v[WIDE<T>];
    unpack<T>(raw, v);
#pragma unroll
    for (int by = WIDE<T> / 2; by; by /= 2)
#pragma unroll
        for (int k = 0; k < by; k++)
            v[k] += v[k + by];
    return v[0];
}

/* A thread's part of the sum of `count` elements, of which the team takes TEAM vectors at a time. */
template <class T, int TEAM, bool VECTORS> __device__ double sum_own(const T *x, int64_t count, int lane) {
    constexpr int W = WIDE<T>, STEP = TEAM * W;
    double sum = 0;
    for (int64_t i = lane * W; i < count; i += STEP * LINE_VECTORS) {
        uint4 raw[LINE_VECTORS];
#pragma unroll
        for (int u = 0; u < LINE_VECTORS; u++) {
            int64_t at = i + u * STEP;
            raw[u] = at < count ? load_line<T, VECTORS>(x + at, count - at) : uint4{0, 0, 0, 0};
        }
        float part[LINE_VECTORS];
#pragma unroll
        for (int u = 0; u < LINE_VECTORS; u++)
            part[u] = vector_sum<T>(raw[u]);
        float all = (part[0] + part[1]) + (part[2] + part[3]);
        if (fabsf(all) <= FLT_MAX) {
            sum += (double)all;
            continue;
        }
#pragma unroll
        for (int u = 0; u < LINE_VECTORS; u++) {
            float v[W];
            unpack<T>(raw[u], v);
#pragma unroll
            for (int k = 0; k < W; k++)
                sum += (double)v[k];
        }
    }
    return sum;
}

template <class T, int TEAM, bool VECTORS> __global__ void __launch_bounds__(LINE_THREADS, 4) sum_lines(mean_call c) {
    static_assert(LINE_VECTORS == 4);
    constexpr int TEAMS = LINE_THREADS / TEAM;
    __shared__ block_sums<double, 1, TEAM == LINE_THREADS ? TEAM : 32> shared;
    begin_chained();
    int lane = (int)threadIdx.x % TEAM, turn = 0;
    int64_t items = c.outer * c.segments;
    for (int64_t first = (int64_t)blockIdx.x * TEAMS; first < items; first += (int64_t)gridDim.x * TEAMS) {
        int64_t item = first + (int64_t)threadIdx.x / TEAM, line = c.segments == 1 ? item : item / c.segments;
        double sum[1] = {0};
        if (item < items) {
            int64_t begin = (item - line * c.segments) * c.segment, left = c.length - begin;
            const T *x = static_cast<const T *>(c.x) + line * c.length + begin;
            sum[0] = sum_own<T, TEAM, VECTORS>(x, left < c.segment ? left : c.segment, lane);
        }
        if constexpr (TEAM == LINE_THREADS) {
            block_sum(sum, shared, turn);
        } else {
#pragma unroll
            for (int step = TEAM / 2; step; step /= 2)
                sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], step);
        }
        if (lane != 0 || item >= items) continue;
        if (c.segments > 1)
            c.partial[item] = sum[0];
        else
            write_one(static_cast<T *>(c.y) + line, (float)(sum[0] / (double)c.length), c.add);
    }
}

/* The threads of a line's team. */
int line_team(int64_t length) {
    return length <= SINGLE_LINE ? 1 : length <= SMALL_LINE ? 4 : length <= WARP_LINE ? 32 : LINE_THREADS;
}

void split_lines(mean_call *c, int64_t wide) {
    c->segment = c->length;
    c->segments = 1;
    int64_t unit = LINE_THREADS * LINE_VECTORS * wide;
    int64_t segments = vjp_min(vjp_divide_up(c->length, unit), LINE_BLOCKS / c->outer);
    if (line_team(c->length) < LINE_THREADS || segments <= 1) return;
    c->segment = vjp_round_up(vjp_divide_up(c->length, segments), unit);
    c->segments = vjp_divide_up(c->length, c->segment);
}

template <class T, int TEAM> vjp_status run_team(const vjp_work *work, const mean_call &c) {
    bool in_vectors = c.length % WIDE<T> == 0 && is_aligned(c.x, 16);
    int64_t blocks = vjp_min(vjp_divide_up(c.outer * c.segments, LINE_THREADS / TEAM), MAX_BLOCKS);
    return launch(work, true, in_vectors ? sum_lines<T, TEAM, true> : sum_lines<T, TEAM, false>, blocks, LINE_THREADS,
                  0, c);
}

template <class T> vjp_status run_lines(const vjp_work *work, const mean_call &c) {
    switch (line_team(c.length)) {
    case 1: return run_team<T, 1>(work, c);
    case 4: return run_team<T, 4>(work, c);
    case 32: return run_team<T, 32>(work, c);
    }
    vjp_status status = run_team<T, LINE_THREADS>(work, c);
    if (status != VJP_OK || c.segments == 1) return status;
    column_call all{}; /* the segments of a line are the chunks of a column */
    all.matrices = c.outer;
    all.dim = 1;
    all.chunks = c.segments;
    all.partial = c.partial;
    all.to = parameter_output_of(work, MEAN_Y);
    all.divisor = (double)c.length;
    return run_finish_columns<T>(work, all);
}

/* ---- Short columns ----------------------------------------------------------------------------------- */

constexpr int SHORT_THREADS = 256;
constexpr int SHORT_ROWS = 4; /* in flight, and terms of an f32 sum */

/* Columns that a thread adds alone, and longer ones where there are threads enough to fill a card. */
constexpr int64_t SHORT_LENGTH = 32, LONGER_LENGTH = 256, MANY_RESULTS = 65536;

template <class T, int W> __global__ void __launch_bounds__(SHORT_THREADS, 4) sum_short(mean_call c) {
    begin_chained();
    int64_t items = c.outer * (int64_t)c.vectors.by;
    for (int64_t item = (int64_t)blockIdx.x * SHORT_THREADS + threadIdx.x; item < items;
         item += (int64_t)gridDim.x * SHORT_THREADS) {
        int64_t vector, outer = divide(c.vectors, item, &vector);
        const T *x = static_cast<const T *>(c.x) + outer * c.length * c.inner + vector * W;
        T *y = static_cast<T *>(c.y) + outer * c.inner + vector * W;
        uint4 old = {0, 0, 0, 0};
        if (c.add) old = load_elements<T, W>(y);
        double sum[W] = {};
        for (int64_t row = 0; row < c.length; row += SHORT_ROWS) {
            uint4 raw[SHORT_ROWS];
#pragma unroll
            for (int u = 0; u < SHORT_ROWS; u++)
                raw[u] = row + u < c.length ? load_elements<T, W>(x + (row + u) * c.inner) : uint4{0, 0, 0, 0};
            float v[SHORT_ROWS][W];
#pragma unroll
            for (int u = 0; u < SHORT_ROWS; u++)
                unpack_elements<T, W>(raw[u], v[u]);
#pragma unroll
            for (int k = 0; k < W; k++) {
                float all = (v[0][k] + v[1][k]) + (v[2][k] + v[3][k]);
                bool fits = fabsf(all) <= FLT_MAX;
                sum[k] +=
                    fits ? (double)all : ((double)v[0][k] + (double)v[1][k]) + ((double)v[2][k] + (double)v[3][k]);
            }
        }
        float mean[W];
#pragma unroll
        for (int k = 0; k < W; k++)
            mean[k] = (float)(sum[k] / (double)c.length);
        store_elements<T, W>(y, mean, old, c.add);
    }
}

template <class T> vjp_status run_short(const vjp_work *work, mean_call c) {
    static_assert(SHORT_ROWS == 4);
    bool in_vectors = c.inner % WIDE<T> == 0 && is_aligned(c.x, 16) && is_aligned(c.y, 16);
    int64_t vectors = in_vectors ? c.inner / WIDE<T> : c.inner;
    c.vectors = divider_of(vectors);
    int64_t blocks = vjp_min(vjp_divide_up(c.outer * vectors, SHORT_THREADS), MAX_BLOCKS);
    return launch(work, true, in_vectors ? sum_short<T, WIDE<T>> : sum_short<T, 1>, blocks, SHORT_THREADS, 0, c);
}

/* ---- Forward ----------------------------------------------------------------------------------------- */

struct same : formula {
    template <int W> __device__ void operator()(int64_t, const float (&in)[1][W], float (&out)[1][W]) const {
#pragma unroll
        for (int k = 0; k < W; k++)
            out[0][k] = in[0][k];
    }
};

enum mean_path { MEAN_LINES, MEAN_SHORT, MEAN_COLUMNS };

struct mean_plan {
    mean_path path;
    mean_call call;
    column_call columns;
    size_t bytes; /* of workspace */
};

/* Depends on the sizes and the dtype only; nothing to do where there are no results. */
mean_plan plan_of(const vjp_work *work, void *workspace) {
    vjp_mean_sizes s = vjp_mean_sizes_of(work);
    int64_t wide = work->storage == VJP_F32 ? WIDE<float> : WIDE<bf16>;
    mean_plan p{};
    p.call.outer = s.outer;
    p.call.length = s.length;
    p.call.inner = s.inner;
    p.call.x = vjp_data(work, MEAN_X);
    p.call.y = vjp_data(work, MEAN_Y);
    p.call.add = vjp_accumulates(work, MEAN_Y);
    if (!work->tensor[MEAN_Y] || s.outer * s.inner == 0) return p;
    bool many = s.length <= LONGER_LENGTH && s.outer * s.inner >= MANY_RESULTS;
    p.path = s.inner == 1 ? MEAN_LINES : s.length <= SHORT_LENGTH || many ? MEAN_SHORT : MEAN_COLUMNS;
    workspace_layout layout(workspace);
    if (p.path == MEAN_LINES) {
        split_lines(&p.call, wide);
        p.call.partial = layout.take<double>(p.call.segments > 1 ? s.outer * p.call.segments : 0);
    } else if (p.path == MEAN_COLUMNS) {
        p.columns = column_plan(s.outer, s.length, s.inner, wide);
        p.columns.in[0] = p.call.x;
        p.columns.to = parameter_output_of(work, MEAN_Y);
        p.columns.divisor = (double)s.length;
        column_workspace(p.columns, layout, &p.columns.partial);
    }
    p.bytes = layout.max;
    return p;
}

vjp_status forward(const vjp_work *work) {
    mean_plan p = plan_of(work, work->workspace);
    if (!p.call.y || p.call.outer * p.call.inner == 0) return VJP_OK;
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        if (p.path == MEAN_LINES) return run_lines<T>(work, p.call);
        if (p.path == MEAN_SHORT) return run_short<T>(work, p.call);
        return run_columns<T, 1, 1>(work, same{}, p.columns);
    });
}

size_t forward_workspace(const vjp_work *work) {
    return plan_of(work, nullptr).bytes;
}

/* ---- Backward ---------------------------------------------------------------------------------------- */

struct shared_out : formula {
    static constexpr bool HAS_OVERWRITE = true;
    static constexpr int ROW = 0;

    float share;

    template <int W> __device__ void operator()(int64_t, const float (&in)[1][W], float (&out)[1][W]) const {
#pragma unroll
        for (int k = 0; k < W; k++)
            out[0][k] = share * in[0][k];
    }
};

vjp_status backward(const vjp_work *work) {
    vjp_mean_sizes s = vjp_mean_sizes_of(work);
    int64_t inner = vjp_max(s.inner, 1);
    shared_out f{};
    f.share = (float)(1 / (double)s.length);
    element_call c{.in = {vjp_data(work, MEAN_B_DY)},
                   .out = {vjp_data(work, MEAN_B_DX)},
                   .add = {vjp_accumulates(work, MEAN_B_DX)},
                   .count = s.outer * s.length * s.inner,
                   .row = {divider_of(inner), divider_of(s.length * inner), repetition::SINGLE}};
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        return run_elements<true>(work, f, types<T>{}, types<T>{}, c);
    });
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_mean[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_mean[VJP_PASS_COUNT] = {
    {vjp::forward, vjp::forward_workspace, VJP_STORAGE_16_32},
    {vjp::backward, nullptr, VJP_STORAGE_16_32},
};
}

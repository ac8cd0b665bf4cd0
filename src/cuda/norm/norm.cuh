/* SPDX-License-Identifier: MIT */
/*
 * What layer_norm (LAYER: each row's mean is subtracted) and rms_norm share on the GPU. With xh = (x - mean) * rstd and
 * g = dy * gamma (docs/ops/layer_norm.md derives it):
 *
 *     y  = xh * gamma + beta
 *     dx = rstd * (g - mean(g) - xh * mean(g * xh)),  dgamma = sum of dy * xh,  dbeta = sum of dy over rows
 *
 * rms_norm's backward also gives y where it is wanted, with the forward's bits: kernels with Y are those that do.
 *
 * Three paths, chosen by dim alone. Each has one order of additions, whatever the alignment of the tensors:
 *
 *     path   dim              what                                                            file
 *     short  below 16         a thread per row, in double                                     norm_short.cuh
 *     rows   16 to 8192       a team of threads per row, x and dy read from memory once       norm_rows.cuh
 *     long   above 8192       rows split into units of columns, x and dy read twice for dx    norm_long.cuh
 *
 * All three leave column sums of fixed chunks of rows in the workspace, partials[chunk][dgamma, dbeta][dim] in f32;
 * norm_finish() adds them in order, in double. How rows are split into chunks follows from rows and dim.
 *
 * Every kernel here is launched `chained`: it may be resident before the previous kernel is done, and touches no memory
 * before wait_for_previous().
 */
#ifndef VJP_CUDA_NORM_CUH
#define VJP_CUDA_NORM_CUH

#include <cfloat>

#include "cuda/common/kernel.cuh"

namespace vjp {
namespace {

/* Rows shorter than this: norm_short.cuh. */
constexpr int NORM_SHORT = 16;

/* Rows longer than this: norm_long.cuh. 512 threads keep the sums of 16 columns each in registers. */
constexpr int64_t NORM_MAX_DIM = 8192;

/* Columns of a unit of a long row. */
constexpr int NORM_UNIT = 2048;

enum norm_path { NORM_PATH_SHORT, NORM_PATH_ROWS, NORM_PATH_LONG };

/* The results of one unit of a long row: its statistics, or its sums of g and g * xh. */
struct norm_pair {
    double a, b;
};

/* The arguments of the kernels, forward or backward. */
struct norm_call {
    const void *x, *dy;
    void *out; /* y or dx; NULL: not wanted */
    bool add;  /* out += */
    parameter gamma, beta;
    parameter_output dgamma, dbeta;
    float *mean_out, *rstd_out;
    const float *mean_in, *rstd_in; /* rstd_in is NULL where statistics are computed again */
    int64_t rows, dim;
    double eps;
    vjp_dtype storage;
    bool layer; /* layer_norm */

    /* The plan: */
    norm_path path;
    int64_t chunks, chunk_rows, longer_chunks; /* the first `longer_chunks` have a row more than `chunk_rows` */
    int64_t units;
    float inverse, bias; /* 1 / dim, and eps, in f32 */
    bool sums;           /* dgamma or dbeta is wanted */
    float *partials;
    norm_pair *moments, *totals; /* long rows: [rows][units], statistics and sums of g and g * xh */
    bool in_vectors;             /* rows are a whole number of 16-byte vectors */
    bool aligned;                /* and begin at multiples of 16 bytes */
    int team;                    /* threads per row, see norm_team_threads() */
    int stages, stage_bytes;     /* rows staged in shared memory, and bytes of one, of all its tensors */

    void *y; /* rms_norm's backward: the forward's y, made again; NULL: not wanted. beta is for it alone */
    bool add_y;
};

/*
 * Calls f with a value of the C++ type of the tensors. For the kernels of rare sizes, which are compiled once for all
 * types: the branch costs them little, and an instance per type would cost seconds of compilation.
 */
template <class F> __device__ void norm_with_type(const norm_call &c, F f) {
    if (c.storage == VJP_BF16)
        f(bf16{});
    else if (c.storage == VJP_F16)
        f(f16{});
    else
        f(float{});
}

__device__ inline int64_t norm_chunk_begin(const norm_call &c, int64_t chunk) {
    return chunk * c.chunk_rows + (chunk < c.longer_chunks ? chunk : c.longer_chunks);
}

/*
 * xh = (x - mean) * rstd + rest. x - mean is exact to the last bit of the difference even at 1000 +- 1; `rest` is what
 * a mean loses by being stored in f32. For a saved mean rest is 0.
 */
struct norm_scale {
    float rstd, mean, rest;
};

template <bool LAYER> __device__ float norm_xh(const norm_scale &s, float x) {
    return LAYER ? fmaf(x - s.mean, s.rstd, s.rest) : x * s.rstd;
}

/* False for a sum that f32 does not hold, and for NaN. */
__device__ inline bool norm_fits(float sum) {
    return fabsf(sum) <= FLT_MAX;
}

__device__ inline norm_scale norm_scale_of(double mean, double variance, double eps) {
    norm_scale s;
    s.rstd = (float)(1 / sqrt(variance + eps));
    s.mean = (float)mean;
    s.rest = -(float)(mean - (double)s.mean) * s.rstd;
    return s;
}

template <bool LAYER> __device__ norm_scale norm_scale_saved(const norm_call &c, int64_t row) {
    return {c.rstd_in[row], LAYER ? c.mean_in[row] : 0.0f, 0.0f};
}

/* ---- Sums of the chunks ------------------------------------------------------------------------------ */

/*
 * A block adds 32 columns; each of its warps adds an equal share of the chunks, with NORM_BATCH loads in flight at
 * once: the partials are still in L2, so this kernel is all latency. With 16 warps it is one trip to L2 for the usual
 * 264 chunks. A large Hopper card holds NORM_FINISH_AT_ONCE such blocks, two per multiprocessor; where columns take
 * more, blocks have 4 warps, eight fit on a multiprocessor, and no block waits for another to end. On an H200 in bf16,
 * with 16 warps and with 4, of the limit: 0.80 and 0.77 at 16384 x 1024 (64 blocks), 0.90 and 0.91 at 8192 x 8192
 * (512); 16384 x 4096 (256) reaches 0.94 with 16.
 *
 * Starting when the last chunk has counted itself, before its kernel has ended, was slower (0.77 instead of 0.80).
 */
constexpr int NORM_FINISH_COLUMNS = 32, NORM_BATCH = 17;
constexpr int NORM_FINISH_WARPS = 16, NORM_FINISH_FEWER_WARPS = 4;
constexpr int64_t NORM_FINISH_AT_ONCE = 2 * 132;

template <int WARPS> __global__ void __launch_bounds__(32 * WARPS, 32 / WARPS) norm_finish(norm_call c) {
    static_assert(NORM_FINISH_COLUMNS == 32);
    __shared__ double sums[WARPS][NORM_FINISH_COLUMNS];
    let_next_begin();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t both = 2 * c.dim, column = (int64_t)blockIdx.x * NORM_FINISH_COLUMNS + lane;
    int64_t from = c.chunks * warp / WARPS, to = c.chunks * (warp + 1) / WARPS;
    double sum = 0;
    wait_for_previous();
    for (int64_t chunk = from; chunk < to && column < both; chunk += NORM_BATCH) {
        float part[NORM_BATCH];
#pragma unroll
        for (int i = 0; i < NORM_BATCH; i++)
            part[i] = chunk + i < to ? __ldcg(c.partials + (chunk + i) * both + column) : 0.0f;
#pragma unroll
        for (int i = 0; i < NORM_BATCH; i++)
            sum += (double)part[i];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= both) return;
#pragma unroll
    for (int i = 1; i < WARPS; i++)
        sum += sums[i][lane];
    bool is_beta = column >= c.dim;
    parameter_output out = is_beta ? c.dbeta : c.dgamma;
    if (out.data)
        norm_with_type(
            c, [&](auto zero) { write_parameter<decltype(zero)>(out, is_beta ? column - c.dim : column, (float)sum); });
}

inline vjp_status norm_finish_run(const vjp_work *work, const norm_call &c) {
    int64_t both = vjp_divide_up(2 * c.dim, NORM_FINISH_COLUMNS); /* decides the bits: the same whatever is wanted */
    int64_t blocks = c.dbeta.data ? both : vjp_divide_up(c.dim, NORM_FINISH_COLUMNS);
    if (both <= NORM_FINISH_AT_ONCE)
        return launch(work, true, norm_finish<NORM_FINISH_WARPS>, blocks, 32 * NORM_FINISH_WARPS, 0, c);
    return launch(work, true, norm_finish<NORM_FINISH_FEWER_WARPS>, blocks, 32 * NORM_FINISH_FEWER_WARPS, 0, c);
}

/* ---- The plan ---------------------------------------------------------------------------------------- */

/*
 * Threads per row and columns per thread, for rows of 16 to 8192 elements. A block of 512 threads leaves each 128
 * registers, which is what gamma, the sums and a row of 16 columns take.
 */
constexpr int NORM_ROWS_THREADS = 512;

constexpr int norm_team_threads(int64_t dim) {
    return dim <= 64 ? 8 : dim <= 256 ? 16 : dim <= 1024 ? 64 : dim <= 4096 ? 256 : 512;
}

__host__ __device__ constexpr int norm_team_elements(int team) {
    return team == 8 ? 8 : 16;
}

/*
 * Threads of a block: NORM_ROWS_THREADS per multiprocessor, in two blocks where a row leaves room for that, so that
 * each hides the beginning and end of the other.
 */
__host__ __device__ constexpr int norm_block_threads(int team) {
    return team <= NORM_ROWS_THREADS / 2 ? NORM_ROWS_THREADS / 2 : NORM_ROWS_THREADS;
}

/* One chunk per multiprocessor. */
constexpr int64_t NORM_CHUNKS = CHUNKS / 2;

/*
 * Blocks of 256 threads that a multiprocessor holds. In 16 bits a forward has half the bytes for the same instructions
 * and barriers, and fewer registers than a backward: a third block hides more of the others' sums. (In f32,
 * and with a mean, it would spill.)
 */
#ifndef NORM_FORWARD_BLOCKS
#define NORM_FORWARD_BLOCKS 3
#endif

__host__ __device__ constexpr int norm_resident_blocks(int team, bool layer, bool backward, int element_bytes) {
    if (norm_block_threads(team) == NORM_ROWS_THREADS) return 1;
    return layer || backward || element_bytes == 4 ? 2 : NORM_FORWARD_BLOCKS;
}

/* Blocks of 256 threads, a row per thread: four blocks per multiprocessor hide one another's latency. */
constexpr int NORM_SHORT_THREADS = 256;
constexpr int64_t NORM_SHORT_CHUNKS = 4 * NORM_CHUNKS;

/* Blocks that share the units of long rows, three per multiprocessor: they hide one another's loads and barriers. */
constexpr int64_t NORM_LONG_BLOCKS = 3 * NORM_CHUNKS;

/* Decides how a call is split, lays the workspace out and returns its bytes. */
inline size_t norm_plan(const vjp_work *work, norm_call *c) {
    int64_t rows = c->rows, dim = c->dim;
    c->path = dim < NORM_SHORT ? NORM_PATH_SHORT : dim <= NORM_MAX_DIM ? NORM_PATH_ROWS : NORM_PATH_LONG;
    c->storage = work->storage;
    c->add = c->add && c->out;
    c->units = vjp_divide_up(dim, NORM_UNIT);
    c->inverse = 1.0f / (float)dim;
    c->bias = (float)c->eps;
    if (c->path == NORM_PATH_SHORT) {
        c->chunks = vjp_min(NORM_SHORT_CHUNKS, vjp_divide_up(rows, NORM_SHORT_THREADS));
    } else {
        bool is_long = c->path == NORM_PATH_LONG;
        int team = norm_team_threads(dim), threads = norm_block_threads(team);
        int64_t teams = is_long ? 1 : threads / team;
        int64_t blocks = NORM_CHUNKS * norm_resident_blocks(team, c->layer, work->pass == VJP_BACKWARD,
                                                            (int)vjp_dtype_size(work->storage));
        c->team = team;
        c->chunks = vjp_min(is_long ? vjp_max(1, NORM_LONG_BLOCKS / c->units) : blocks, vjp_divide_up(rows, teams));
        if (c->sums) c->chunks = vjp_max(c->chunks, vjp_divide_up(rows, teams * CHAIN));
    }
    c->chunk_rows = c->chunks ? rows / c->chunks : 0;
    c->longer_chunks = c->chunks ? rows % c->chunks : 0;

    int64_t pairs = c->path == NORM_PATH_LONG ? rows * c->units : 0;
    workspace_layout layout(work->workspace);
    c->moments = layout.take<norm_pair>(c->rstd_in ? 0 : pairs);
    c->totals = layout.take<norm_pair>(work->pass == VJP_BACKWARD ? pairs : 0);
    c->partials = layout.take<float>(c->sums ? 2 * c->chunks * dim : 0);
    return layout.max;
}

} // namespace
} // namespace vjp

#endif

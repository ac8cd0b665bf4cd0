/* SPDX-License-Identifier: MIT */
/*
 * linear's passes over rows, between and beside the matrix products: the epilogue (bias and activation of a product),
 * dpre with the column sums for dbias, and sums of parts.
 *
 * A matrix [rows, columns] is split into tiles of columns and chunks of rows, one block each. A thread owns as many
 * columns as 16 bytes of T hold and moves down the chunk, ROWS rows in flight. With 16-byte accesses (WIDE_ROWS) its
 * columns are adjacent; where alignment or width forbids those, they are as far apart as there are threads across, so
 * that a warp's loads are still adjacent. Either way a column's rows are added by the same threads in the same order:
 * the bits are the same.
 */
#ifndef VJP_CUDA_LINEAR_ROWS_CUH
#define VJP_CUDA_LINEAR_ROWS_CUH

#include <type_traits>

#include "cuda/linear/activation.cuh"

namespace vjp {
namespace {

constexpr int THREADS = 256;

/* Rows in flight: of dy and pre in bf16, 128 bytes per thread, so 96 KB on a multiprocessor that holds three blocks. */
constexpr int ROWS = 4;

/* Threads across a tile: a warp reads 512 neighbouring bytes. */
constexpr int64_t MAX_ACROSS = 32;

/*
 * Enough blocks to fill any card several times, the chunks for columns that one tile holds, and the fewest steps that
 * are worth starting a block for: 16384 x 4096 in bf16 is 2048 blocks of 128 rows. Depends on sizes alone, since chunks
 * decide the bits.
 */
constexpr int64_t BLOCKS = 4096, MIN_CHUNK_LIMIT = 64, MIN_STEPS = 4;

struct tiling {
    int64_t rows, columns;
    int across, down; /* threads over columns, and rows that they cover at a time */
    int tiles;
    int64_t chunk, chunks; /* rows of a chunk, and number of chunks */
};

tiling tiling_of(int64_t rows, int64_t columns, int wide) {
    tiling t{};
    t.rows = rows;
    t.columns = columns;
    if (rows == 0 || columns == 0) return t;
    int64_t vectors = vjp_divide_up(columns, wide), tiles = vjp_divide_up(vectors, MAX_ACROSS);
    t.tiles = (int)tiles;
    t.across = (int)vjp_divide_up(vectors, tiles);
    t.down = THREADS / t.across;
    int64_t step = t.down * ROWS, max_chunks = vjp_max(MIN_CHUNK_LIMIT, BLOCKS / tiles);
    t.chunk = step * vjp_max(MIN_STEPS, vjp_divide_up(rows, step * max_chunks));
    t.chunks = vjp_divide_up(rows, t.chunk);
    return t;
}

/* A thread's position. */
struct place {
    int x, y;
    int64_t first, column; /* of the tile; the thread's own */
    int apart;             /* elements between its columns */
    int64_t row, end;
    bool idle;
};

/* `backwards`: chunks in reverse order. */
template <int W, bool WIDE_ROWS> __device__ place place_of(const tiling &t, bool backwards = false) {
    place p;
    unsigned chunk = blockIdx.x / (unsigned)t.tiles, tile = blockIdx.x % (unsigned)t.tiles;
    if (backwards) chunk = (unsigned)t.chunks - 1 - chunk;
    p.x = (int)(threadIdx.x % (unsigned)t.across);
    p.y = (int)(threadIdx.x / (unsigned)t.across);
    p.first = (int64_t)tile * t.across * W;
    p.column = p.first + (WIDE_ROWS ? p.x * W : p.x);
    p.apart = WIDE_ROWS ? 1 : t.across;
    p.row = chunk * t.chunk + p.y;
    p.end = (chunk + 1) * t.chunk;
    if (p.end > t.rows) p.end = t.rows;
    p.idle = p.y >= t.down || p.column >= t.columns;
    return p;
}

/* Whether the thread's column j is in the matrix. */
template <bool WIDE_ROWS> __device__ bool has_column(const tiling &t, const place &p, int j) {
    return WIDE_ROWS || p.column + (int64_t)j * p.apart < t.columns;
}

/* A thread's columns of a row. */
template <class S, int W> struct alignas(16) fragment { S v[W]; };

/*
 * Moves all fragments one place forward. Where all activations are in one kernel, its loop over the rows in flight
 * takes the first and then shifts: compiled once, not once per row, it is a quarter of the code. With LINEAR_SHIFTS 1
 * all kernels shift: 0.40 of the PTX without shifts instead of 0.71, for up to six moves more per element.
 */
#ifndef LINEAR_SHIFTS
#define LINEAR_SHIFTS 0
#endif

template <class S, int W, int N> __device__ void shift(fragment<S, W> (&rows)[N]) {
#pragma unroll
    for (int u = 0; u + 1 < N; u++)
        rows[u] = rows[u + 1];
}

template <bool WIDE_ROWS, class S, int W>
__device__ void load_fragment(fragment<S, W> &to, const S *row, const tiling &t, const place &p) {
    if constexpr (WIDE_ROWS) {
#pragma unroll
        for (int i = 0; i < W; i += WIDE<S>)
            *reinterpret_cast<uint4 *>(&to.v[i]) = __ldcs(reinterpret_cast<const uint4 *>(row + p.column + i));
    } else {
#pragma unroll
        for (int j = 0; j < W; j++)
            to.v[j] = has_column<WIDE_ROWS>(t, p, j) ? row[p.column + (int64_t)j * p.apart] : from_f32<S>(0.0f);
    }
}

/* Stores 16 bytes that the next kernel reads. */
template <class S> __device__ void store_wide_now(S *to, const wide<S> &w) {
    store_global(to, *reinterpret_cast<const uint4 *>(&w));
}

template <bool WIDE_ROWS, class S, int W>
__device__ void store_fragment(S *row, const float (&values)[W], const tiling &t, const place &p) {
    if constexpr (WIDE_ROWS) {
#pragma unroll
        for (int i = 0; i < W; i += WIDE<S>) {
            wide<S> w;
#pragma unroll
            for (int j = 0; j < WIDE<S>; j++)
                w.v[j] = from_f32<S>(values[i + j]);
            store_wide_now(row + p.column + i, w);
        }
    } else {
#pragma unroll
        for (int j = 0; j < W; j++)
            if (has_column<WIDE_ROWS>(t, p, j)) row[p.column + (int64_t)j * p.apart] = from_f32<S>(values[j]);
    }
}

template <class T, bool WIDE_ROWS, int W>
__device__ void read_bias(float (&bias)[W], parameter from, const tiling &t, const place &p) {
#pragma unroll
    for (int j = 0; j < W; j++)
        bias[j] =
            from.data && has_column<WIDE_ROWS>(t, p, j) ? read_parameter<T>(from, p.column + (int64_t)j * p.apart) : 0;
}

/* ---- Forward: bias, activation and residual of a product ------------------------------------------------------- */

struct epilogue {
    const void *sums; /* of type S; NULL: 0. May be y or pre: a thread reads its elements before it writes */
    parameter bias;
    parameter_output pre;
    void *y; /* NULL: not wanted */
    bool add;
    const void *residual; /* NULL: none */
    int activation;
};

/*
 * pre = sums + bias, y = act(pre) + residual. Reads and writes each once, so it runs at copy speed. The last rows come
 * first: what the product wrote last may still be in L2.
 */
template <class T, class S, int ACTIVATION, bool WIDE_ROWS>
__global__ void __launch_bounds__(THREADS, ACTIVATION == ANY_ACTIVATION ? 2 : 4) epilogue_rows(epilogue f, tiling t) {
    begin_chained();
    constexpr int W = WIDE<T>;
    constexpr bool SHIFTS = LINEAR_SHIFTS || ACTIVATION == ANY_ACTIVATION;
    place p = place_of<W, WIDE_ROWS>(t, true);
    if (p.idle) return;
    float bias[W];
    read_bias<T, WIDE_ROWS>(bias, f.bias, t, p);
    for (int64_t row = p.row; row < p.end; row += t.down * ROWS) {
        fragment<S, W> sums[ROWS];
#pragma unroll
        for (int u = 0; u < ROWS; u++) {
            int64_t at = row + u * t.down;
            if (f.sums && at < p.end)
                load_fragment<WIDE_ROWS>(sums[u], static_cast<const S *>(f.sums) + at * t.columns, t, p);
            else
                sums[u] = {};
        }
#pragma unroll(SHIFTS ? 1 : ROWS)
        for (int u = 0; u < ROWS; u++) {
            int64_t at = row + u * t.down;
            if (at >= p.end) break;
            float value[W];
            fragment<S, W> sum = sums[SHIFTS ? 0 : u];
            if constexpr (SHIFTS) shift(sums);
#pragma unroll
            for (int j = 0; j < W; j++)
                value[j] = f.bias.data ? to_f32(sum.v[j]) + bias[j] : to_f32(sum.v[j]);
            if (f.pre.data && f.pre.f32)
                store_fragment<WIDE_ROWS>(static_cast<float *>(f.pre.data) + at * t.columns, value, t, p);
            else if (f.pre.data)
                store_fragment<WIDE_ROWS>(static_cast<T *>(f.pre.data) + at * t.columns, value, t, p);
            if (!f.y) continue;
            T *y = static_cast<T *>(f.y) + at * t.columns;
            fragment<T, W> old{}, residual{};
            if (f.add) load_fragment<WIDE_ROWS>(old, y, t, p);
            if (f.residual)
                load_fragment<WIDE_ROWS>(residual, static_cast<const T *>(f.residual) + at * t.columns, t, p);
#pragma unroll
            for (int j = 0; j < W; j++) {
                value[j] = activate<ACTIVATION>(f.activation, value[j]);
                if (f.residual) value[j] += to_f32(residual.v[j]);
                if (f.add) value[j] += to_f32(old.v[j]);
            }
            store_fragment<WIDE_ROWS>(y, value, t, p);
        }
    }
}

/* ---- Backward: dpre, and the sums of its columns ----------------------------------------------------- */

/* What rounding dpre to 16 bits loses is stored scaled by this, so that it is in f16's range. */
template <class T> constexpr float LOST_SCALE = 1;
template <> constexpr float LOST_SCALE<bf16> = 0x1p+8f;
template <> constexpr float LOST_SCALE<f16> = 0x1p+11f;

struct dpre_call {
    const void *dy;
    const void *pre; /* of type P; NULL: 0 */
    parameter bias;  /* of a pre that is computed again */
    int activation;
    float slope_of_nan;
    void *dpre;      /* of type T; NULL: only sums are wanted. May be pre */
    void *lost;      /* of type T; NULL: not wanted */
    double *partial; /* [chunks, columns]; NULL: not wanted */
};

/* Adds a tile's columns over the block's rows of threads, in their order. */
template <int W, bool WIDE_ROWS>
__device__ void write_partial(double *partial, const double (&sum)[W], const tiling &t, const place &p) {
    __shared__ double shared[THREADS * W]; /* [down][across * W] */
    int width = t.across * W;
    if (p.y < t.down)
#pragma unroll
        for (int j = 0; j < W; j++)
            shared[p.y * width + (WIDE_ROWS ? p.x * W + j : p.x + j * t.across)] = sum[j];
    __syncthreads();
    for (int c = (int)threadIdx.x; c < width && p.first + c < t.columns; c += THREADS) {
        double total = 0;
        for (int y = 0; y < t.down; y++)
            total += shared[y * width + c];
        partial[(blockIdx.x / (unsigned)t.tiles) * t.columns + p.first + c] = total;
    }
}

/* Writes what rounding the values to T loses; for an infinity 0. */
template <bool WIDE_ROWS, class T, int W>
__device__ void write_lost(T *row, const float (&values)[W], const tiling &t, const place &p) {
    float lost[W];
#pragma unroll
    for (int j = 0; j < W; j++) {
        float kept = to_f32(from_f32<T>(values[j]));
        lost[j] = isfinite(kept) ? (values[j] - kept) * LOST_SCALE<T> : 0.0f;
    }
    store_fragment<WIDE_ROWS>(row, lost, t, p);
}

/*
 * dpre = dy * act'(pre): reads dy and pre and writes dpre, each once: 6 bytes per element in bf16, 12 in f32. Sums are
 * added in double after ROWS terms, which costs a conversion and an addition for every fourth element and leaves no
 * chain that could lose digits.
 */
template <class T, class P, int ACTIVATION, bool WIDE_ROWS>
__global__ void __launch_bounds__(THREADS, 2) dpre_rows(dpre_call s, tiling t) {
    begin_chained();
    constexpr int W = WIDE<T>;
    constexpr int FLIGHT = WIDE_ROWS ? ROWS : 2; /* with single elements, more would not fit into the registers */
    constexpr bool SHIFTS = LINEAR_SHIFTS || ACTIVATION == ANY_ACTIVATION;
    constexpr bool AGAIN = std::is_same_v<P, float>; /* pre may be the product alone, in f32 */
    bool plain =
        ACTIVATION == VJP_ACTIVATION_NONE || (ACTIVATION == ANY_ACTIVATION && s.activation == VJP_ACTIVATION_NONE);
    place p = place_of<W, WIDE_ROWS>(t);
    float bias[W];
    if constexpr (AGAIN)
        if (!p.idle) read_bias<T, WIDE_ROWS>(bias, s.bias, t, p);
    double sum[W] = {};
    for (int64_t row = p.row; row < p.end && !p.idle; row += t.down * ROWS) {
        float group[W] = {};
#pragma unroll
        for (int first = 0; first < ROWS; first += FLIGHT) {
            fragment<T, W> dy[FLIGHT];
            fragment<P, W> pre[FLIGHT];
#pragma unroll
            for (int u = 0; u < FLIGHT; u++) {
                int64_t at = row + (first + u) * t.down;
                if (at < p.end) load_fragment<WIDE_ROWS>(dy[u], static_cast<const T *>(s.dy) + at * t.columns, t, p);
                if (!plain && s.pre && at < p.end)
                    load_fragment<WIDE_ROWS>(pre[u], static_cast<const P *>(s.pre) + at * t.columns, t, p);
                else
                    pre[u] = {};
            }
#pragma unroll(SHIFTS ? 1 : FLIGHT)
            for (int u = 0; u < FLIGHT; u++) {
                int64_t at = row + (first + u) * t.down;
                if (at >= p.end) break;
                float value[W];
                fragment<T, W> own_dy = dy[SHIFTS ? 0 : u];
                fragment<P, W> own_pre = pre[SHIFTS ? 0 : u];
                if constexpr (SHIFTS) {
                    shift(dy);
                    shift(pre);
                }
#pragma unroll
                for (int j = 0; j < W; j++) {
                    value[j] = to_f32(own_dy.v[j]);
                    if (plain) continue;
                    float x = to_f32(own_pre.v[j]);
                    if constexpr (AGAIN)
                        if (s.bias.data) x += bias[j];
                    float slope = activate_slope<ACTIVATION>(s.activation, x);
                    value[j] *= x != x ? s.slope_of_nan : slope;
                }
#pragma unroll
                for (int j = 0; j < W; j++)
                    group[j] += value[j];
                if (s.dpre) store_fragment<WIDE_ROWS>(static_cast<T *>(s.dpre) + at * t.columns, value, t, p);
                if constexpr (sizeof(T) == 2)
                    if (s.lost) write_lost<WIDE_ROWS>(static_cast<T *>(s.lost) + at * t.columns, value, t, p);
            }
        }
#pragma unroll
        for (int j = 0; j < W; j++)
            sum[j] += group[j];
    }
    if (s.partial) write_partial<W, WIDE_ROWS>(s.partial, sum, t, p);
}

/* ---- Sums of parts ----------------------------------------------------------------------------------- */

struct parts_call {
    const void *parts;             /* [count, columns] of type S */
    int64_t count, columns, apart; /* elements from one part to the next */
    int slices;                    /* threads that share a column */
    parameter_output to;
};

/* Parts in flight per thread, and parts that a thread adds before another one helps. */
constexpr int PARTS = 4;
constexpr int64_t PARTS_EACH = 8;

/* Threads that share a column. Adjacent columns fill at least 32 bytes, if there are so many. */
int slices_of(int64_t count, int64_t columns) {
    int limit = columns >= 8 ? 32 : THREADS, slices = 1;
    while (slices < limit && slices * PARTS_EACH < count)
        slices *= 2;
    return slices;
}

template <class T, class S> __global__ void __launch_bounds__(THREADS) sum_parts(parts_call s) {
    __shared__ double shared[THREADS];
    begin_chained();
    int across = THREADS / s.slices, x = (int)threadIdx.x % across, y = (int)threadIdx.x / across;
    int64_t column = (int64_t)blockIdx.x * across + x;
    double sum = 0;
    if (column < s.columns) {
        const S *parts = static_cast<const S *>(s.parts) + column;
        for (int64_t i = y; i < s.count; i += (int64_t)s.slices * PARTS) {
            S part[PARTS];
#pragma unroll
            for (int u = 0; u < PARTS; u++) {
                int64_t at = i + (int64_t)u * s.slices;
                part[u] = at < s.count ? parts[at * s.apart] : S(0);
            }
#pragma unroll
            for (int u = 0; u < PARTS; u++)
                sum += part[u];
        }
    }
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (y > 0 || column >= s.columns) return;
    for (int k = 1; k < s.slices; k++)
        sum += shared[k * across + x];
    write_parameter<T>(s.to, column, (float)sum);
}

/*
 * The same for parts of f32 that are few and wide, added up to an f32 result: four columns per thread, all in flight,
 * because moving them is all it costs. Same order, same bits.
 */
constexpr int64_t FEW_PARTS = 12;

__global__ void __launch_bounds__(THREADS) sum_few_parts(parts_call s) {
    begin_chained();
    int64_t column = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * 4;
    if (column >= s.columns) return;
    const float *parts = static_cast<const float *>(s.parts) + column;
    float4 part[FEW_PARTS];
#pragma unroll
    for (int i = 0; i < FEW_PARTS; i++)
        if (i < s.count) part[i] = __ldcs(reinterpret_cast<const float4 *>(parts + i * s.apart));
    double sum[4] = {};
#pragma unroll
    for (int i = 0; i < FEW_PARTS; i++)
        if (i < s.count) {
            sum[0] += part[i].x;
            sum[1] += part[i].y;
            sum[2] += part[i].z;
            sum[3] += part[i].w;
        }
    const float sums[4] = {(float)sum[0], (float)sum[1], (float)sum[2], (float)sum[3]};
    write_wide(static_cast<float *>(s.to.data) + column, sums, s.to.add);
}

/* ---- Few results of long sums ------------------------------------------------------------------------ */

/*
 * Tall and narrow factors, such as for the weight gradient of a few features over millions of rows: a matrix kernel
 * would have one tile to compute, in one f32 chain. Here a block adds a chunk of one result's products in double; the
 * factors are so narrow that reading them again for each result stays in cache.
 */
constexpr int64_t FEW_RESULTS = 16, LONG_SUM = 1024, SUM_CHUNK = 8192;

struct narrow_product {
    const void *a, *b;
    int64_t n, k;
    int64_t a_m, a_k, b_k, b_n; /* distances: element (i, k) of a is at i*a_m + k*a_k */
    int results;
    float scale;
    double *partial; /* [chunks, results] */
};

template <class T> __global__ void __launch_bounds__(THREADS) sum_narrow(narrow_product q) {
    __shared__ block_sums<double, 1, THREADS> shared;
    begin_chained();
    int64_t chunk = blockIdx.x / (unsigned)q.results, result = blockIdx.x % (unsigned)q.results;
    const T *a = static_cast<const T *>(q.a) + result / q.n * q.a_m;
    const T *b = static_cast<const T *>(q.b) + result % q.n * q.b_n;
    int64_t end = (chunk + 1) * SUM_CHUNK < q.k ? (chunk + 1) * SUM_CHUNK : q.k;
    double sum[1] = {0};
#pragma unroll 4
    for (int64_t k = chunk * SUM_CHUNK + threadIdx.x; k < end; k += THREADS)
        sum[0] = fma((double)to_f32(a[k * q.a_k]), (double)to_f32(b[k * q.b_k]), sum[0]);
    int turn = 0;
    block_sum(sum, shared, turn);
    if (threadIdx.x == 0) q.partial[blockIdx.x] = sum[0] * q.scale;
}

} // namespace
} // namespace vjp

#endif

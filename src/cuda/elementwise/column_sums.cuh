/* SPDX-License-Identifier: MIT */
/*
 * Sums down the columns of matrices: db of add and mul, and mean over axes that are not the last. What is summed is the
 * last output of an elementwise formula; another output (da) is written in passing, so every input is read once.
 *
 * A matrix [rows, dim] is read as lines. Rows of fewer than NARROW elements are joined: [rows, 3] is read as lines of
 * 264 elements, the last maybe shorter, and columns that are 3 apart are added at the end of a block. So every access
 * is wide. Lines are split into tiles of columns and chunks of lines, one block each. A thread owns as many columns as
 * 16 bytes of T hold and adds COLUMN_LINES lines in f32, those sums in double; then the block adds its threads' sums,
 * in pairs. One chunk writes the results; several leave sums in the workspace, in double, which another kernel adds in
 * order. Everything depends on the sizes and the dtype alone.
 *
 * Where f32 cannot hold the sum of COLUMN_LINES terms, they are added in double: the numbers of a mean may be near the
 * largest.
 *
 * Where addresses or widths forbid 16-byte accesses, a thread's columns are as far apart as there are threads across,
 * so that a warp's accesses are still adjacent. A column's terms are the same and in the same order: so are the bits.
 */
#ifndef VJP_CUDA_COLUMN_SUMS_CUH
#define VJP_CUDA_COLUMN_SUMS_CUH

#include <cfloat>

#include "cuda/elementwise/elementwise.cuh"

namespace vjp {
namespace {

constexpr int COLUMN_THREADS = 256;

/* Lines that a thread loads before it adds the first, and terms of an f32 sum. */
constexpr int COLUMN_LINES = 4;

/* Rows shorter than this are joined to lines of JOINED elements or more, if that leaves MIN_JOINED lines. */
constexpr int64_t NARROW = 128, JOINED = 256, MIN_JOINED = 16;

/*
 * Enough blocks to fill any card several times; the fewest steps that are worth starting a block for; the rows of
 * threads of a block where there are enough lines: a warp then reads 512 adjacent bytes.
 */
constexpr int64_t COLUMN_BLOCKS = 4096, MIN_COLUMN_STEPS = 4, COLUMN_DOWN = 8;

struct column_call {
    const void *in[ELEMENT_INPUTS]; /* NULL: 0; the row is not among them */
    parameter row;                  /* of dim elements, for the formula's input ROW */
    void *out;                      /* the formula's first output if it has two; NULL: not wanted */
    bool add;
    parameter_output to; /* the sums, [matrices, dim], divided by `divisor` */
    double divisor;

    int64_t matrices, dim;
    int64_t total, width, lines; /* a matrix is `total` elements, read as `lines` lines of `width` */
    int64_t tiles, chunk, chunks;
    int across, down;  /* threads over columns, and lines that they cover at a time */
    int groups, group; /* sums of a block: `groups` for each of `group` results */
    bool joined;
    double *partial; /* [matrices, chunks, dim] where there are several chunks */
};

/* The split, from the sizes and the elements of a vector. */
inline column_call column_plan(int64_t matrices, int64_t rows, int64_t dim, int64_t wide) {
    column_call c{};
    c.divisor = 1;
    c.matrices = matrices;
    c.dim = dim;
    c.total = rows * dim;
    if (matrices == 0 || c.total == 0) return c;
    int64_t joined = dim < NARROW ? vjp_round_up(JOINED, 8 * dim) : 0;
    c.joined = joined && c.total >= MIN_JOINED * joined;
    c.width = c.joined ? joined : dim;
    c.lines = vjp_divide_up(c.total, c.width);
    int64_t down = 1, vectors = vjp_divide_up(c.width, wide);
    while (down < COLUMN_DOWN && down * COLUMN_LINES < c.lines)
        down *= 2;
    c.tiles = c.joined ? 1 : vjp_divide_up(vectors, COLUMN_THREADS / down); /* joined rows are at most 1016 wide */
    c.across = (int)vjp_divide_up(vectors, c.tiles);
    c.down = COLUMN_THREADS / c.across;
    c.group = c.joined ? (int)dim : c.across * (int)wide;
    c.groups = c.joined ? c.down * (int)(c.width / dim) : c.down;
    int64_t step = c.down * COLUMN_LINES, limit = vjp_max(COLUMN_BLOCKS / c.tiles / matrices, 1);
    c.chunk = step * vjp_max(MIN_COLUMN_STEPS, vjp_divide_up(c.lines, step * limit));
    c.chunks = vjp_divide_up(c.lines, c.chunk);
    return c;
}

inline size_t column_workspace(const column_call &c, workspace_layout &layout, double **partial) {
    *partial = layout.take<double>(c.chunks > 1 ? c.matrices * c.chunks * c.dim : 0);
    return layout.max;
}

/* ---- A thread's columns of a line -------------------------------------------------------------------- */

/* Where they are: element k is at + k * apart of a matrix. */
struct column_place {
    int64_t column, at;
    int apart;
};

__device__ inline bool has_element(const column_call &c, const column_place &p, int k) {
    return p.column + (int64_t)k * p.apart < c.width && p.at + (int64_t)k * p.apart < c.total;
}

/* Whether they can be one access: the last of joined lines may end within a vector. */
template <bool VECTORS, int W> __device__ bool is_vector(const column_call &c, const column_place &p) {
    return VECTORS && p.at + W <= c.total;
}

template <class T, bool VECTORS>
__device__ uint4 load_columns(const column_call &c, const column_place &p, const void *matrix) {
    constexpr int W = WIDE<T>;
    const T *from = static_cast<const T *>(matrix) + p.at;
    if (is_vector<VECTORS, W>(c, p)) return load_elements<T, W>(from);
    uint4 raw = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < W; k++)
        if (has_element(c, p, k)) set_element<T>(raw, k, element_bits(from + (int64_t)k * p.apart));
    return raw;
}

template <class T, bool VECTORS>
__device__ void store_columns(const column_call &c, const column_place &p, void *matrix, const float (&values)[WIDE<T>],
                              const uint4 &old) {
    constexpr int W = WIDE<T>;
    T *to = static_cast<T *>(matrix) + p.at;
    if (is_vector<VECTORS, W>(c, p)) {
        store_elements<T, W>(to, values, old, c.add);
        return;
    }
    float before[W];
    unpack_elements<T, W>(old, before);
#pragma unroll
    for (int k = 0; k < W; k++)
        if (has_element(c, p, k)) to[(int64_t)k * p.apart] = from_f32<T>(c.add ? before[k] + values[k] : values[k]);
}

/* ---- Sums of chunks ---------------------------------------------------------------------------------- */

/* Adds the sums of a block in pairs, until the first `group` of `shared` are its results. */
__device__ inline void fold_groups(double *shared, int groups, int group) {
    for (int n = groups; n > 1;) {
        int half = (n + 1) / 2;
        for (int k = (int)threadIdx.x; k < (n - half) * group; k += COLUMN_THREADS)
            shared[k] += shared[k + half * group];
        n = half;
        __syncthreads();
    }
}

template <class T> __device__ void write_sum(const column_call &c, int64_t i, double sum) {
    write_parameter<T>(c.to, i, (float)(sum / c.divisor));
}

/*
 * Steps ahead of the loads that a step's lines are brought into L2. Loads of one step are 32 KiB on a multiprocessor
 * that holds two blocks, hardly enough in flight, and more would not fit into the registers.
 */
#ifndef COLUMN_STEPS_AHEAD
#define COLUMN_STEPS_AHEAD 2
#endif

/* Brings the lines of the step that begins at `line` into L2, as far as they are in the chunk. */
template <class T, int PLAIN>
__device__ void prefetch_lines(const column_call &c, int64_t start, int64_t column, int64_t line, int64_t end) {
#pragma unroll
    for (int u = 0; u < COLUMN_LINES; u++) {
        int64_t own = line + u * c.down, at = own * c.width + column;
        if (own >= end || at >= c.total) break;
#pragma unroll
        for (int i = 0; i < PLAIN; i++)
            if (c.in[i]) prefetch(static_cast<const char *>(c.in[i]) + start + at * (int64_t)sizeof(T));
    }
}

template <class Formula, class T, bool VECTORS, int INPUTS, int OUTPUTS>
__global__ void __launch_bounds__(COLUMN_THREADS, 2) sum_columns(Formula f, column_call c) {
    constexpr int W = WIDE<T>, PLAIN = Formula::ROW < 0 ? INPUTS : INPUTS - 1;
    static_assert(Formula::ROW < 0 || Formula::ROW == INPUTS - 1);
    __shared__ double shared[COLUMN_THREADS * W]; /* [down][across * W] */
    begin_chained();
    int x = (int)threadIdx.x % c.across, y = (int)threadIdx.x / c.across;
    int64_t items = c.matrices * c.chunks * c.tiles;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        int64_t above = item / c.tiles, tile = item - above * c.tiles, matrix = above / c.chunks;
        int64_t chunk = above - matrix * c.chunks, first = tile * c.across * W;
        column_place p;
        p.column = first + (VECTORS ? x * W : x);
        p.apart = VECTORS ? 1 : c.across;
        int64_t start = matrix * c.total * (int64_t)sizeof(T); /* bytes before the matrix */
        int64_t end = (chunk + 1) * c.chunk < c.lines ? (chunk + 1) * c.chunk : c.lines;
        bool idle = y >= c.down || p.column >= c.width;
        float in[INPUTS][W] = {};
        if constexpr (Formula::ROW >= 0)
#pragma unroll
            for (int k = 0; k < W; k++) {
                int64_t column = p.column + (int64_t)k * p.apart;
                if (c.row.data && !idle && column < c.width)
                    in[Formula::ROW][k] = read_parameter<T>(c.row, c.joined ? (int)column % (int)c.dim : column);
            }
        double sum[W] = {};
        int64_t step = c.down * COLUMN_LINES, ahead = step;
        for (int64_t line = chunk * c.chunk + y; line < end && !idle; line += step) {
            uint4 raw[PLAIN][COLUMN_LINES], old[COLUMN_LINES];
#pragma unroll
            for (int u = 0; u < COLUMN_LINES; u++) {
                int64_t own = line + u * c.down;
                p.at = own * c.width + p.column;
#pragma unroll
                for (int i = 0; i < PLAIN; i++)
                    raw[i][u] = own < end && c.in[i]
                                    ? load_columns<T, VECTORS>(c, p, static_cast<const char *>(c.in[i]) + start)
                                    : uint4{0, 0, 0, 0};
                old[u] = {0, 0, 0, 0};
                if (OUTPUTS == 2 && c.out && c.add && own < end)
                    old[u] = load_columns<T, VECTORS>(c, p, static_cast<const char *>(c.out) + start);
            }
            if constexpr (VECTORS)
                for (; ahead <= COLUMN_STEPS_AHEAD * step; ahead += step)
                    prefetch_lines<T, PLAIN>(c, start, p.column, line + ahead, end);
            ahead -= step;
            float group[W] = {}, out[OUTPUTS][W];
            auto compute = [&](int u) {
#pragma unroll
                for (int i = 0; i < PLAIN; i++)
                    unpack_elements<T, W>(raw[i][u], in[i]);
                f(0, in, out);
            };
#pragma unroll
            for (int u = 0; u < COLUMN_LINES; u++) {
                int64_t own = line + u * c.down;
                if (own >= end) break;
                compute(u);
                p.at = own * c.width + p.column;
                if (OUTPUTS == 2 && c.out)
                    store_columns<T, VECTORS>(c, p, static_cast<char *>(c.out) + start, out[0], old[u]);
#pragma unroll
                for (int k = 0; k < W; k++)
                    group[k] += out[OUTPUTS - 1][k];
            }
            bool fits = true;
#pragma unroll
            for (int k = 0; k < W; k++)
                fits = fits && fabsf(group[k]) <= FLT_MAX;
            if (fits) {
#pragma unroll
                for (int k = 0; k < W; k++)
                    sum[k] += (double)group[k];
            } else {
#pragma unroll
                for (int u = 0; u < COLUMN_LINES; u++) {
                    if (line + u * c.down >= end) break;
                    compute(u);
#pragma unroll
                    for (int k = 0; k < W; k++)
                        sum[k] += (double)out[OUTPUTS - 1][k];
                }
            }
        }
        if (y < c.down)
#pragma unroll
            for (int k = 0; k < W; k++)
                shared[y * c.across * W + (VECTORS ? x * W + k : x + k * c.across)] = sum[k];
        __syncthreads();
        fold_groups(shared, c.groups, c.group);
        for (int k = (int)threadIdx.x; k < c.group && first + k < c.dim; k += COLUMN_THREADS) {
            if (c.chunks == 1)
                write_sum<T>(c, matrix * c.dim + first + k, shared[k]);
            else
                c.partial[above * c.dim + first + k] = shared[k];
        }
        __syncthreads();
    }
}

/* ---- Sums of all chunks ------------------------------------------------------------------------------ */

/* Parts in flight per thread, and parts that a thread adds before another one helps. */
constexpr int COLUMN_PARTS = 4;
constexpr int64_t COLUMN_PARTS_EACH = 8;

/* `slices` threads share a result; adjacent results fill at least 64 bytes, if there are so many. */
template <class T> __global__ void __launch_bounds__(COLUMN_THREADS) finish_columns(column_call c, int slices) {
    __shared__ double shared[COLUMN_THREADS];
    begin_chained();
    int across = COLUMN_THREADS / slices, x = (int)threadIdx.x % across, y = (int)threadIdx.x / across;
    int64_t results = c.matrices * c.dim;
    for (int64_t first = (int64_t)blockIdx.x * across; first < results; first += (int64_t)gridDim.x * across) {
        int64_t result = first + x;
        double sum = 0;
        if (result < results) {
            int64_t matrix = result / c.dim;
            const double *parts = c.partial + matrix * c.chunks * c.dim + (result - matrix * c.dim);
            for (int64_t i = y; i < c.chunks; i += (int64_t)slices * COLUMN_PARTS) {
                double part[COLUMN_PARTS];
#pragma unroll
                for (int u = 0; u < COLUMN_PARTS; u++) {
                    int64_t at = i + (int64_t)u * slices;
                    part[u] = at < c.chunks ? parts[at * c.dim] : 0;
                }
#pragma unroll
                for (int u = 0; u < COLUMN_PARTS; u++)
                    sum += part[u];
            }
        }
        shared[threadIdx.x] = sum;
        __syncthreads();
        if (y == 0 && result < results) {
            for (int k = 1; k < slices; k++)
                sum += shared[k * across + x];
            write_sum<T>(c, result, sum);
        }
        __syncthreads();
    }
}

/* Writes the results from the sums of the chunks; with none, zeros. */
template <class T> vjp_status run_finish_columns(const vjp_work *work, const column_call &c) {
    int64_t results = c.matrices * c.dim;
    int limit = results >= 8 ? 32 : COLUMN_THREADS, slices = 1;
    while (slices < limit && slices * COLUMN_PARTS_EACH < c.chunks)
        slices *= 2;
    int64_t blocks = vjp_min(vjp_divide_up(results, COLUMN_THREADS / slices), MAX_BLOCKS);
    return launch(work, true, finish_columns<T>, blocks, COLUMN_THREADS, 0, c, slices);
}

/* Runs a planned call whose operands are set. */
template <class T, int INPUTS, int OUTPUTS, class Formula>
vjp_status run_columns(const vjp_work *work, const Formula &f, const column_call &c) {
    bool in_vectors = c.width % WIDE<T> == 0 && (c.matrices == 1 || c.total % WIDE<T> == 0) && is_aligned(c.out, 16);
    for (const void *in : c.in)
        in_vectors = in_vectors && is_aligned(in, 16);
    int64_t blocks = vjp_min(c.matrices * c.chunks * c.tiles, MAX_BLOCKS);
    vjp_status status = launch(work, true,
                               in_vectors ? sum_columns<Formula, T, true, INPUTS, OUTPUTS>
                                          : sum_columns<Formula, T, false, INPUTS, OUTPUTS>,
                               blocks, COLUMN_THREADS, 0, f, c);
    if (status != VJP_OK || c.chunks == 1) return status;
    return run_finish_columns<T>(work, c);
}

} // namespace
} // namespace vjp

#endif

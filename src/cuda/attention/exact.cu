/* SPDX-License-Identifier: MIT */
/*
 * attention in f32 arithmetic, for every dtype, dim and input. A block of 256 threads owns 64 rows of the result and
 * goes through the other dimension in tiles of 64: scores of 64 x 64, four by four per thread, then products of their
 * weights with 64 rows of the other operand. A thread reads four terms of four rows and of four columns at once, so
 * that for 64 FMAs there are eight reads of 16 bytes.
 *
 * The forward goes through the keys twice. The first time it finds the maximum and the sum of every row, the second
 * time it sums weights that are divided already: all sums stay between the smallest and the largest value, so that
 * values near the end of f32's range do not overflow, and nothing has to be corrected later. Terms that a row does not
 * see are left out instead of multiplied by 0. <dy, y> is summed in the order of dP: where one weight is 1 and the
 * others are 0, their difference is exactly 0.
 */
#include "cuda/attention/attention.cuh"

namespace vjp {
namespace {

constexpr int THREADS = 256, SIDE = 64, DEPTH = 32, EACH = 4;
constexpr int CHUNKS = FLAG_COLUMNS / SIDE; /* of columns of the result, per block */
constexpr int RESIDENT = 2;                 /* blocks of a multiprocessor */

/* The grid where only flagged blocks are computed, usually none. */
constexpr int64_t RARE_BLOCKS = 132;

/* A head's rows in a tensor [batch, rows, heads, dim] whose rows follow at a distance of `step`. */
template <class T> struct head_rows {
    const T *data;
    int64_t step;
    int count, dim;
    bool by_four; /* elements can be loaded four at a time */

    __device__ head_rows(const void *tensor, int64_t row_step, int64_t batch, int64_t rows, int64_t head,
                         int64_t columns)
        : data(static_cast<const T *>(tensor) + batch * rows * row_step + head * columns), step(row_step),
          count((int)rows), dim((int)columns),
          by_four(dim % 4 == 0 && step % 4 == 0 && reinterpret_cast<uintptr_t>(data) % (4 * sizeof(T)) == 0) {
    }

    __device__ float at(int row, int column) const {
        return row < count && column < dim ? to_f32(data[row * step + column]) : 0;
    }

    /* Columns from `column` on, a multiple of 4. */
    __device__ float4 four_at(int row, int column) const {
        if (!by_four)
            return make_float4(at(row, column), at(row, column + 1), at(row, column + 2), at(row, column + 3));
        if (row >= count || column >= dim) return make_float4(0, 0, 0, 0);
        struct alignas(4 * sizeof(T)) four {
            T v[4];
        } raw = *reinterpret_cast<const four *>(data + row * step + column);
        return make_float4(to_f32(raw.v[0]), to_f32(raw.v[1]), to_f32(raw.v[2]), to_f32(raw.v[3]));
    }
};

/*
 * 64 rows in shared memory. Threads read 16 bytes at a time: rows are 16 bytes more than a multiple of 128 apart, so
 * that the same columns of eight adjacent rows are in different banks.
 */
template <int COLUMNS> struct staged_rows {
    alignas(16) float row[SIDE][COLUMNS + 4];

    template <class T> __device__ void load(const head_rows<T> &from, int first, int column) {
#pragma unroll
        for (int e = threadIdx.x; e < SIDE * COLUMNS / 4; e += THREADS) {
            int r = e / (COLUMNS / 4), c = e % (COLUMNS / 4) * 4;
            *reinterpret_cast<float4 *>(&row[r][c]) = from.four_at(first + r, column + c);
        }
    }

    __device__ void read(float (&four)[4], int r, int c) const {
        float4 v = *reinterpret_cast<const float4 *>(&row[r][c]);
        four[0] = v.x, four[1] = v.y, four[2] = v.z, four[3] = v.w;
    }
};

/* Operands of scores and of sums are never there at the same time: 48 KiB are not enough for all. */
struct exact_shared {
    union {
        struct {
            staged_rows<DEPTH> left, right, y;
        };
        staged_rows<SIDE> operand;
    };
    staged_rows<SIDE> weight;
    float delta[SIDE];
};

/*
 * Thread (x, y) of 16 x 16 has rows y + 16 i of a tile. Of scores it has columns x + 16 j, which are rows of the right
 * operand; of results columns 4 x + j.
 */
__device__ inline int tile_x() {
    return threadIdx.x % 16;
}

__device__ inline int tile_y() {
    return threadIdx.x / 16;
}

/*
 * sum[i][j] = <left row, right row> over dim, in order. `beside` may stage more of the same columns and use it
 * together with the operands.
 */
template <class T, class Beside>
__device__ void tile_products(exact_shared &shared, float (&sum)[EACH][EACH], const head_rows<T> &left, int left_row,
                              const head_rows<T> &right, int right_row, Beside &&beside) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++)
            sum[i][j] = 0;
    for (int begin = 0; begin < left.dim; begin += DEPTH) {
        __syncthreads();
        shared.left.load(left, left_row, begin);
        shared.right.load(right, right_row, begin);
        beside.stage(shared, begin);
        __syncthreads();
        beside.use(shared);
        int depth = min(DEPTH, left.dim - begin);
#pragma unroll 1
        for (int d = 0; d < depth; d += 4) { /* columns beyond dim are 0 */
            float a[EACH][4];
#pragma unroll
            for (int i = 0; i < EACH; i++)
                shared.left.read(a[i], tile_y() + 16 * i, d);
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                float b[4];
                shared.right.read(b, tile_x() + 16 * j, d);
#pragma unroll
                for (int e = 0; e < 4; e++)
#pragma unroll
                    for (int i = 0; i < EACH; i++)
                        sum[i][j] = fmaf(a[i][e], b[e], sum[i][j]);
            }
        }
    }
}

struct nothing_beside {
    __device__ void stage(exact_shared &, int) {
    }
    __device__ void use(const exact_shared &) {
    }
};

template <class T>
__device__ void tile_products(exact_shared &shared, float (&sum)[EACH][EACH], const head_rows<T> &left, int left_row,
                              const head_rows<T> &right, int right_row) {
    tile_products(shared, sum, left, left_row, right, right_row, nothing_beside{});
}

/* <dy, y> of 64 rows, over dim in order, beside a product whose left or right operand is dy. */
template <class T, bool LEFT> struct deltas_beside {
    head_rows<T> y;
    head_rows<float> y_f32;
    bool is_f32;
    int row;
    float sum = 0; /* of row threadIdx.x of the tile */

    __device__ deltas_beside(const attention_call &a, int64_t batch, int64_t head, int first)
        : y(a.out, a.y_step, batch, a.time, head, a.dim), y_f32(a.out, a.y_step, batch, a.time, head, a.dim),
          is_f32(a.y_f32), row(first) {
    }

    __device__ void stage(exact_shared &shared, int column) {
        if (is_f32)
            shared.y.load(y_f32, row, column);
        else
            shared.y.load(y, row, column);
    }

    __device__ void use(const exact_shared &shared) {
        if (threadIdx.x >= SIDE) return;
#pragma unroll 1
        for (int d = 0; d < DEPTH; d += 4) {
            float of_dy[4], of_y[4];
            (LEFT ? shared.left : shared.right).read(of_dy, threadIdx.x, d);
            shared.y.read(of_y, threadIdx.x, d);
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum = fmaf(of_dy[e], of_y[e], sum);
        }
    }

    /* Gives all threads the sums, in shared.delta. */
    __device__ void publish(exact_shared &shared) const {
        if (threadIdx.x < SIDE) shared.delta[threadIdx.x] = sum;
        __syncthreads();
    }
};

/* Terms of a tile that row r of the result leaves out: those below first[r], and from end[r] on. */
struct term_limits {
    int first[EACH], end[EACH];

    /* Whether the rows of the warp's threads have all terms. */
    __device__ bool all() const {
        bool all = true;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            all = all && first[i] <= 0 && end[i] >= SIDE;
        return __all_sync(0xffffffffu, all);
    }
};

template <bool ALL>
__device__ void sum_terms(const exact_shared &shared, float (&sum)[EACH][EACH], const term_limits &limits) {
#pragma unroll 1
    for (int k = 0; k < SIDE; k += 4) {
        float a[EACH][4];
#pragma unroll
        for (int i = 0; i < EACH; i++)
            shared.weight.read(a[i], tile_y() + 16 * i, k);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float b[EACH];
            shared.operand.read(b, k + e, 4 * tile_x());
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (!ALL && (k + e < limits.first[i] || k + e >= limits.end[i])) continue;
#pragma unroll
                for (int j = 0; j < EACH; j++)
                    sum[i][j] = fmaf(a[i][e], b[j], sum[i][j]);
            }
        }
    }
}

/*
 * total[c][i][j] += the sum over the tile's 64 terms of weight (in shared memory) times rows of `right`, for the
 * columns from `column` on, 64 in each of CHUNKS.
 */
template <class T>
__device__ void add_products(exact_shared &shared, float (&total)[CHUNKS][EACH][EACH], const head_rows<T> &right,
                             int right_row, int column, const term_limits &limits) {
    bool all = limits.all();
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        if (column + c * SIDE >= right.dim) continue;
        __syncthreads();
        shared.operand.load(right, right_row, column + c * SIDE);
        __syncthreads();
        float sum[EACH][EACH] = {};
        if (all)
            sum_terms<true>(shared, sum, limits);
        else
            sum_terms<false>(shared, sum, limits);
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int j = 0; j < EACH; j++)
                total[c][i][j] += sum[i][j];
    }
}

template <class T>
__device__ void store_products(void *to, int64_t step, bool add, int64_t batch, int64_t rows, int64_t head, int64_t dim,
                               int row, int column, const float (&total)[CHUNKS][EACH][EACH], float factor) {
    T *first = static_cast<T *>(to) + batch * rows * step + head * dim;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                int r = row + tile_y() + 16 * i, d = column + c * SIDE + 4 * tile_x() + j;
                if (r < rows && d < dim) write_one(first + r * step + d, total[c][i][j] * factor, add);
            }
}

/* Over the sixteen threads of a row of a tile. */
__device__ inline float row_top(float x) {
#pragma unroll
    for (int step = 8; step; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

__device__ inline float row_total(float x) {
#pragma unroll
    for (int step = 8; step; step /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

/* A launch: blocks of rows of every head, and groups of CHUNKS x 64 columns. */
struct exact_call {
    attention_call a;
    attention_flags flags;
    int64_t heads; /* of the result, over all batches */
    int row_blocks, column_groups;
};

/* `index`: of a block of rows and a group of columns. */
__device__ inline bool is_wanted(const exact_call &c, int64_t heads_per_batch, int64_t index) {
    int64_t head = index / c.column_groups / c.row_blocks;
    int64_t kv_head = head % heads_per_batch / (heads_per_batch / c.a.kv_heads);
    if (c.flags.block) return c.flags.block[index];
    return !c.flags.head || c.flags.head[head / heads_per_batch * c.a.kv_heads + kv_head];
}

/*
 * Calls f(batch, head, first row, first column) for the blocks that this thread block computes. Its threads look at as
 * many flags at once; usually none is set.
 */
template <class F> __device__ void for_blocks(const exact_call &c, int64_t heads_per_batch, int columns, F f) {
    int64_t count = c.heads * c.row_blocks * c.column_groups, step = gridDim.x;
    for (int64_t from = blockIdx.x; from < count; from += step * THREADS) {
        int64_t mine = from + step * threadIdx.x;
        if (!__syncthreads_or(mine < count && is_wanted(c, heads_per_batch, mine))) continue;
        for (int64_t index = from; index < count && index < from + step * THREADS; index += step) {
            int64_t own = index / c.column_groups, head = own / c.row_blocks;
            if (!is_wanted(c, heads_per_batch, index)) continue;
            f(head / heads_per_batch, head % heads_per_batch, (int)(own % c.row_blocks) * SIDE,
              (int)(index % c.column_groups) * columns);
        }
    }
}

/* ---- Forward ----------------------------------------------------------------------------------------- */

template <class T> __global__ void __launch_bounds__(THREADS, RESIDENT) forward(exact_call c) {
    __shared__ exact_shared shared;
    const attention_call &a = c.a;
    begin_chained();
    for_blocks(c, a.heads, CHUNKS * SIDE, [&](int64_t batch, int64_t head, int row, int column) {
        head_rows<T> q(a.q, a.q_step, batch, a.time, head, a.dim);
        head_rows<T> k(a.k, a.k_step, batch, a.keys, head / a.group, a.dim);
        head_rows<T> v(a.v, a.v_step, batch, a.keys, head / a.group, a.dim);
        int offset = (int)(a.keys - a.time), keys = (int)a.keys;
        int begin = first_key(a, batch, row);
        int end = keys_seen(a.causal, min(row + SIDE, (int)a.time) - 1, offset, keys);
        int low[EACH], seen[EACH];
        float top[EACH], s[EACH][EACH];
        double sum[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            low[i] = first_key(a, batch, row + tile_y() + 16 * i);
            seen[i] = keys_seen(a.causal, row + tile_y() + 16 * i, offset, keys);
            top[i] = -CUDART_INF_F;
            sum[i] = 0;
        }
        for (int n = begin; n < end; n += SIDE) {
            tile_products(shared, s, q, row, k, n);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                float high = -CUDART_INF_F, part = 0;
                bool nan = false;
#pragma unroll
                for (int j = 0; j < EACH; j++) {
                    int key = n + tile_x() + 16 * j;
                    s[i][j] = key < seen[i] && key >= low[i] ? s[i][j] * a.scale : -CUDART_INF_F;
                    high = fmaxf(high, s[i][j]);
                    nan = nan || s[i][j] != s[i][j];
                }
                high = fmaxf(row_top(high), top[i]);
#pragma unroll
                for (int j = 0; j < EACH; j++)
                    part += high == -CUDART_INF_F ? 0 : expf(s[i][j] - high);
                if (nan) part = CUDART_NAN_F;
                part = row_total(part);
                if (high > top[i] && sum[i] != 0) sum[i] *= exp((double)top[i] - (double)high);
                top[i] = high;
                sum[i] += (double)part;
            }
        }
        float total[CHUNKS][EACH][EACH] = {};
        float inverse[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int r = row + tile_y() + 16 * i;
            int64_t at = (batch * a.heads + head) * a.time + r;
            inverse[i] = (float)(1 / sum[i]);
            if (tile_x() != 0 || r >= a.time || column != 0) continue;
            if (a.lse) a.lse[at] = seen[i] > 0 ? (float)((double)top[i] + log(sum[i])) : -CUDART_INF_F;
            if (a.row_max) a.row_max[at] = top[i];
            if (a.row_log) a.row_log[at] = (float)log(sum[i]);
        }
        for (int n = begin; n < end && a.y; n += SIDE) {
            term_limits limits;
            tile_products(shared, s, q, row, k, n);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                limits.end[i] = seen[i] - n;
                limits.first[i] = low[i] - n;
#pragma unroll
                for (int j = 0; j < EACH; j++)
                    shared.weight.row[tile_y() + 16 * i][tile_x() + 16 * j] =
                        expf(s[i][j] * a.scale - top[i]) * inverse[i];
            }
            add_products<T>(shared, total, v, n, column, limits);
        }
        if (a.y && a.y_f32)
            store_products<float>(a.y, a.y_step, false, batch, a.time, head, a.dim, row, column, total, 1);
        else if (a.y)
            store_products<T>(a.y, a.y_step, a.add_y, batch, a.time, head, a.dim, row, column, total, 1);
    });
}

/* ---- Backward ---------------------------------------------------------------------------------------- */

template <class T> __global__ void __launch_bounds__(THREADS, RESIDENT) gradient_dq(exact_call c) {
    __shared__ exact_shared shared;
    const attention_call &a = c.a;
    begin_chained();
    for_blocks(c, a.heads, CHUNKS * SIDE, [&](int64_t batch, int64_t head, int row, int column) {
        head_rows<T> q(a.q, a.q_step, batch, a.time, head, a.dim), dy(a.dy, a.y_step, batch, a.time, head, a.dim);
        head_rows<T> k(a.k, a.k_step, batch, a.keys, head / a.group, a.dim);
        head_rows<T> v(a.v, a.v_step, batch, a.keys, head / a.group, a.dim);
        int offset = (int)(a.keys - a.time), keys = (int)a.keys;
        int begin = first_key(a, batch, row);
        int end = keys_seen(a.causal, min(row + SIDE, (int)a.time) - 1, offset, keys);
        int low[EACH];
        float top[EACH], log_sum[EACH], s[EACH][EACH], dp[EACH][EACH];
        float total[CHUNKS][EACH][EACH] = {};
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int r = row + tile_y() + 16 * i;
            int64_t at = (batch * a.heads + head) * a.time + r;
            low[i] = first_key(a, batch, r);
            top[i] = r < a.time ? a.row_max[at] : 0;
            log_sum[i] = r < a.time && a.row_log ? a.row_log[at] : 0;
        }
        for (int n = begin; n < end; n += SIDE) {
            term_limits limits;
            tile_products(shared, s, q, row, k, n);
            if (n == begin) {
                deltas_beside<T, true> deltas(a, batch, head, row);
                tile_products(shared, dp, dy, row, v, n, deltas);
                deltas.publish(shared);
            } else {
                tile_products(shared, dp, dy, row, v, n);
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                limits.end[i] = keys_seen(a.causal, row + tile_y() + 16 * i, offset, keys) - n;
                limits.first[i] = low[i] - n;
#pragma unroll
                for (int j = 0; j < EACH; j++)
                    shared.weight.row[tile_y() + 16 * i][tile_x() + 16 * j] =
                        expf(s[i][j] * a.scale - top[i] - log_sum[i]) * (dp[i][j] - shared.delta[tile_y() + 16 * i]);
            }
            add_products<T>(shared, total, k, n, column, limits);
        }
        store_products<T>(a.dq, a.dq_step, a.add_dq, batch, a.time, head, a.dim, row, column, total, a.scale);
    });
}

/* Keys are rows here, and queries the terms of the sums; the heads that share the keys follow one another. */
template <class T> __global__ void __launch_bounds__(THREADS, RESIDENT) gradient_dkv(exact_call c) {
    __shared__ exact_shared shared;
    const attention_call &a = c.a;
    begin_chained();
    for_blocks(c, a.kv_heads, CHUNKS * SIDE, [&](int64_t batch, int64_t kv_head, int row, int column) {
        head_rows<T> k(a.k, a.k_step, batch, a.keys, kv_head, a.dim);
        head_rows<T> v(a.v, a.v_step, batch, a.keys, kv_head, a.dim);
        int offset = (int)(a.keys - a.time);
        int begin = a.causal ? max(0, row - offset) / SIDE * SIDE : 0;
        int end = end_query(a, batch, row + SIDE - 1), ends[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++)
            ends[i] = end_query(a, batch, row + tile_y() + 16 * i);
        float dk[CHUNKS][EACH][EACH] = {}, dv[CHUNKS][EACH][EACH] = {}, s[EACH][EACH], dp[EACH][EACH];
        for (int64_t head = kv_head * a.group; head < (kv_head + 1) * a.group; head++) {
            head_rows<T> q(a.q, a.q_step, batch, a.time, head, a.dim), dy(a.dy, a.y_step, batch, a.time, head, a.dim);
            for (int m = begin; m < end; m += SIDE) {
                term_limits limits;
                float top[EACH], log_sum[EACH];
                tile_products(shared, s, k, row, q, m);
                deltas_beside<T, false> deltas(a, batch, head, m);
                tile_products(shared, dp, v, row, dy, m, deltas);
                deltas.publish(shared);
#pragma unroll
                for (int j = 0; j < EACH; j++) {
                    int r = m + tile_x() + 16 * j;
                    int64_t at = (batch * a.heads + head) * a.time + r;
                    top[j] = r < a.time ? a.row_max[at] : 0;
                    log_sum[j] = r < a.time && a.row_log ? a.row_log[at] : 0;
                }
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    int key = row + tile_y() + 16 * i;
                    limits.first[i] = a.causal ? key - offset - m : 0;
                    limits.end[i] = ends[i] - m;
#pragma unroll
                    for (int j = 0; j < EACH; j++) {
                        s[i][j] = expf(s[i][j] * a.scale - top[j] - log_sum[j]);
                        dp[i][j] = s[i][j] * (dp[i][j] - shared.delta[tile_x() + 16 * j]);
                        shared.weight.row[tile_y() + 16 * i][tile_x() + 16 * j] = s[i][j];
                    }
                }
                add_products<T>(shared, dv, dy, m, column, limits);
                __syncthreads();
#pragma unroll
                for (int i = 0; i < EACH; i++)
#pragma unroll
                    for (int j = 0; j < EACH; j++)
                        shared.weight.row[tile_y() + 16 * i][tile_x() + 16 * j] = dp[i][j];
                add_products<T>(shared, dk, q, m, column, limits);
            }
        }
        if (a.dk) store_products<T>(a.dk, a.dk_step, a.add_dk, batch, a.keys, kv_head, a.dim, row, column, dk, a.scale);
        if (a.dv) store_products<T>(a.dv, a.dv_step, a.add_dv, batch, a.keys, kv_head, a.dim, row, column, dv, 1);
    });
}

/* ---- Launching --------------------------------------------------------------------------------------- */

enum class part { forward, dq, dkv };

template <part PART, class T> constexpr auto kernel_of() {
    if constexpr (PART == part::forward)
        return forward<T>;
    else if constexpr (PART == part::dq)
        return gradient_dq<T>;
    else
        return gradient_dkv<T>;
}

template <part PART> vjp_status enqueue(const vjp_work *work, const attention_call &a, attention_flags flags) {
    exact_call c{a, flags, a.batch * (PART == part::dkv ? a.kv_heads : a.heads),
                 (int)vjp_divide_up(PART == part::dkv ? a.keys : a.time, SIDE),
                 (int)vjp_divide_up(a.dim, CHUNKS * SIDE)};
    int64_t blocks = c.heads * c.row_blocks * c.column_groups;
    if (flags.block || flags.head) blocks = vjp_min(blocks, RARE_BLOCKS);
    return with_type(work->storage, [&](auto zero) {
        return launch(work, true, kernel_of<PART, decltype(zero)>(), vjp_min(blocks, MAX_BLOCKS), THREADS, 0, c);
    });
}

} // namespace

vjp_status exact_forward(const vjp_work *work, const attention_call &a, attention_flags flags) {
    return enqueue<part::forward>(work, a, flags);
}

vjp_status exact_dq(const vjp_work *work, const attention_call &a, attention_flags flags) {
    return enqueue<part::dq>(work, a, flags);
}

vjp_status exact_dkv(const vjp_work *work, const attention_call &a, attention_flags flags) {
    return enqueue<part::dkv>(work, a, flags);
}

} // namespace vjp

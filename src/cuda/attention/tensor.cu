/* SPDX-License-Identifier: MIT */
/*
 * attention with products of warps (mma.sync), from compute capability 8.0 on. A block of four warps owns 64 rows of
 * the result, sixteen per warp, and goes through the other dimension in tiles of SIDE rows that cp.async brings to
 * shared memory, one tile ahead where there is room. Everything but the inputs stays in registers: scores become the
 * left operand of the next product where they are.
 *
 * For dk and dv the scores are computed transposed: keys are the rows, queries the tile. A block computes at most 128
 * columns of the result; with a larger dim several blocks compute the same scores.
 *
 * A tile in shared memory is [rows][D], its 16-byte chunks at chunk ^ (row % 8), so that ldmatrix meets no bank twice.
 *
 * f32 is multiplied as TF32, where the device was opened for that. Each thread rounds the elements that it copied, in
 * shared memory, once for all warps that read them. An 8 x 8 matrix of 16 bits is one of 8 x 4 in 32, so operands of
 * scores are loaded alike; there is no transposed load of 32 bits, and operands of sums are loaded one by one.
 */
#include "cuda/attention/fast.cuh"

namespace vjp {
namespace tensor {
namespace {

constexpr int THREADS = 128, ROWS = 64;

/*
 * D: the dim, filled up with zeros. COLUMNS: of the result, per block. All tiles fit into the 99 KiB of the smaller
 * cards, but for the backward of f32 with a dim above 128: it needs 160.
 */
template <class T, int D> struct shape {
    static constexpr int ROW_BYTES = D * (int)sizeof(T), CHUNKS = ROW_BYTES / 16;
    static constexpr int SIDE = ROW_BYTES > 512 ? 16 : ROW_BYTES > 256 ? 32 : 64;
    static constexpr int STAGES = ROW_BYTES > 256 ? 1 : 2, COLUMNS = D > 128 ? 128 : D;
    static constexpr uint32_t TILE = SIDE * ROW_BYTES;
};

struct tensor_call {
    attention_call a;
    tile_order order; /* of blocks of rows; columns are the fastest */
    row_numbers rows;
    int *flags;
    int column_groups;
};

/* ---- Tiles ------------------------------------------------------------------------------------------- */

template <class T, int D> __device__ uint32_t chunk_offset(int row, int chunk) {
    return (uint32_t)((row * shape<T, D>::CHUNKS + (chunk ^ (row & 7))) * 16);
}

/*
 * The same row `chunks` further on, an even number, from an address in the first two chunks. All of a loop's addresses
 * come from four: offsets of each would take a register or two operations.
 */
__device__ inline uint32_t chunks_on(uint32_t address, int chunks) {
    return (address ^ (uint32_t)(chunks % 8 * 16)) + (uint32_t)(chunks / 8 * 128);
}

/*
 * Begins to copy `count` rows of a head from `row` on; what is outside the tensor becomes 0. A thread copies the same
 * chunk of every NEXT-th row and keeps one pointer: offsets of all its rows would take more registers.
 */
template <class T, int D>
__device__ void load_tile(uint32_t to, const void *tensor, int64_t step, const tile &t, int64_t rows, int64_t head,
                          int64_t dim, int row, int count) {
    constexpr int CHUNKS = shape<T, D>::CHUNKS, NEXT = THREADS / CHUNKS;
    int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
    const T *begin = static_cast<const T *>(tensor) + t.batch * rows * step + head * dim;
    const T *from = begin + (row + first) * step + chunk * WIDE<T>;
    for (int r = first; r < count; r += NEXT, from += NEXT * step) {
        bool inside = row + r < rows && chunk * WIDE<T> < dim;
        copy_async_if(inside, to + chunk_offset<T, D>(r, chunk), inside ? from : begin);
    }
}

/*
 * Rounds what this thread has copied of COUNT rows to TF32; other types are what the products take. Tiles may follow
 * each other: each has whole rounds of load_tile().
 */
template <class T, int D, int COUNT> __device__ void round_rows(uint32_t rows) {
    if constexpr (std::is_same_v<T, float>) {
        constexpr int CHUNKS = shape<T, D>::CHUNKS, NEXT = THREADS / CHUNKS;
        int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
#pragma unroll 4
        for (int r = 0; r < COUNT; r += NEXT) {
            uint32_t at = rows + chunk_offset<T, D>(first + r, chunk);
            float4 x;
            load_shared(at, x);
            store_shared(at, uint4{round_tf32(x.x), round_tf32(x.y), round_tf32(x.z), round_tf32(x.w)});
        }
    }
}

/* f32 is multiplied as TF32. */
template <class T> __device__ void multiply(float *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
    multiply_matrices<std::conditional_t<std::is_same_v<T, float>, tf32, T>>(d, a, b0, b1);
}

/* d = the products of the warp's sixteen rows of `left` with the SIDE rows of `right`, over all columns. */
template <class T, int D, int COUNT> __device__ void tile_scores(float (&d)[COUNT], uint32_t left, uint32_t right) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        d[i] = 0;
    uint32_t own = left + chunk_offset<T, D>(warp * 16 + lane % 16, lane / 16);
    uint32_t other = right + chunk_offset<T, D>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < D / TERMS<T>; step++) {
        uint32_t a[4];
        load_matrices<false>(a, chunks_on(own, 2 * step));
#pragma unroll
        for (int n = 0; n < COUNT / 8; n++) { /* sixteen rows of `right` */
            uint32_t b[4];
            load_matrices<false>(b, chunks_on(other, 2 * step) + 16 * n * shape<T, D>::ROW_BYTES);
            multiply<T>(d + 8 * n, a, b[0], b[1]);
            multiply<T>(d + 8 * n + 4, a, b[2], b[3]);
        }
    }
}

/*
 * d += the left operands `a`, sixteen rows by SIDE, times the SIDE rows of `right`, columns from `column` on, a
 * multiple of 64. Of TF32 the rows are in the order of fragments(); a warp reads two chunks of four rows at once, from
 * 32 banks.
 */
template <class T, int D, int COUNT>
__device__ void tile_sums(float (&d)[COUNT], const uint32_t *a, uint32_t right, int column) {
    constexpr bool TF32 = std::is_same_v<T, float>;
    int lane = threadIdx.x % 32;
    right += column * (int)sizeof(T);
    uint32_t even = right + chunk_offset<T, D>(TF32 ? lane % 4 * 2 : lane % 16, lane / 16);
    uint32_t odd = right + chunk_offset<T, D>(lane % 4 * 2 + 1, lane / 16) + lane / 4 % 4 * 4;
    if constexpr (TF32) even += lane / 4 % 4 * 4;
#pragma unroll
    for (int step = 0; step < shape<T, D>::SIDE / TERMS<T>; step++)
#pragma unroll
        for (int n = 0; n < COUNT / 8; n++) { /* sixteen columns */
            int down = TERMS<T> * step * shape<T, D>::ROW_BYTES;
            uint32_t b[4];
            if constexpr (TF32) {
                load_shared(chunks_on(even, 4 * n) + down, b[0]);
                load_shared(chunks_on(odd, 4 * n) + down, b[1]);
                load_shared(chunks_on(even, 4 * n + 2) + down, b[2]);
                load_shared(chunks_on(odd, 4 * n + 2) + down, b[3]);
            } else {
                load_matrices<true>(b, chunks_on(even, 2 * n) + down);
            }
            multiply<T>(d + 8 * n, a + 4 * step, b[0], b[1]);
            multiply<T>(d + 8 * n + 4, a + 4 * step, b[2], b[3]);
        }
}

template <int COUNT> __device__ void clear(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        d[i] = 0;
}

/* Whether a sum over `count` tiles is more than one chain, and whether one ends with tile i but the sum does not. */
template <class T, int D> __device__ bool has_chains(const attention_call &a, int count) {
    return in_chains<T>(a) && count > CHAIN_BLOCKS<shape<T, D>::SIDE>;
}

template <class T, int D> __device__ bool chain_ends(const attention_call &a, int i, int count) {
    return in_chains<T>(a) && i + 1 < count && (i + 1) % CHAIN_BLOCKS<shape<T, D>::SIDE> == 0;
}

template <int COUNT> __device__ bool all_finite(const float (&d)[COUNT], float low_factor, float high_factor) {
    bool finite = true;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        finite = finite && fabsf(d[i] * (i / 2 % 2 ? high_factor : low_factor)) < CUDART_INF_F;
    return finite;
}

/* The tile of a block, its first column, and the thread's first row. */
struct place {
    tile t;
    int column, first, own;

    __device__ place(const tensor_call &c, int columns)
        : t(c.order.at((int)(blockIdx.x / (unsigned)c.column_groups))),
          column((int)(blockIdx.x % (unsigned)c.column_groups) * columns), first(t.block * ROWS),
          own(first + (int)threadIdx.x / 32 * 16 + (int)threadIdx.x % 32 / 4) {
    }
};

/* Whether this block's result is left to the exact path. */
__device__ inline void leave(const tensor_call &c, const place &p, int columns, bool left) {
    int64_t head = (int64_t)p.t.batch * c.order.heads_per_batch + p.t.head;
    if (threadIdx.x == 0) c.flags[(head * c.order.blocks + p.t.block) * c.column_groups + p.column / columns] = left;
}

__device__ inline uint32_t shared_memory() {
    return shared_address(dynamic_shared<char, 128>());
}

/*
 * The loop over pairs of tiles: load(i, pair) begins to copy pair i of `count` to `pair`, use(i, pair) computes with it
 * when it is there. Pairs are in shared memory behind the KEPT tiles of ROWS rows that stay.
 */
template <class T, int D, int KEPT, class L, class U> __device__ void for_tiles(int count, L load, U use) {
    using S = shape<T, D>;
    uint32_t kept = shared_memory(), pairs = kept + KEPT * ROWS * S::ROW_BYTES;
    load(0, pairs);
    commit_copies();
    for (int i = 0; i < count; i++) {
        uint32_t pair = pairs + i % S::STAGES * 2 * S::TILE;
        if constexpr (S::STAGES > 1) {
            if (i + 1 < count) load(i + 1, pairs + (i + 1) % S::STAGES * 2 * S::TILE);
            commit_copies();
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        if (i == 0) round_rows<T, D, KEPT * ROWS>(kept);
        round_rows<T, D, 2 * S::SIDE>(pair);
        __syncthreads();
        use(i, pair);
        __syncthreads();
        if constexpr (S::STAGES == 1) {
            if (i + 1 < count) load(i + 1, pairs);
            commit_copies();
        }
    }
}

/* ---- Kernels ----------------------------------------------------------------------------------------- */

/* `kept`: tiles of rows that stay in shared memory. */
template <class T, int D> constexpr size_t shared_bytes(int kept) {
    using S = shape<T, D>;
    return (size_t)(kept * ROWS + 2 * S::STAGES * S::SIDE) * S::ROW_BYTES;
}

/*
 * For __launch_bounds__: three blocks, which leaves each thread 168 registers, where the 227 KiB of a multiprocessor of
 * an H200 hold three. Not for dk and dv: two sums per thread need more registers.
 */
template <class T, int D> constexpr int resident(int kept) {
    return 3 * shared_bytes<T, D>(kept) <= 227 << 10 ? 3 : 1;
}

template <class T, int D, bool LAST>
__global__ void __launch_bounds__(THREADS, resident<T, D>(1)) forward(tensor_call c) {
    using S = shape<T, D>;
    constexpr int SIDE = S::SIDE;
    const attention_call &a = c.a;
    begin_chained();
    place p(c, S::COLUMNS);
    uint32_t q = shared_memory();
    int offset = (int)(a.keys - a.time), keys = (int)a.keys, lane = threadIdx.x % 32;
    int64_t kv_head = p.t.head / a.group;
    int seen[2] = {keys_seen(a.causal, p.own, offset, keys), keys_seen(a.causal, p.own + 8, offset, keys)};
    int all = keys_seen(a.causal, p.first + (int)threadIdx.x / 32 * 16, offset, keys);
    int whole = LAST ? first_key(a, p.t.batch, p.first + (int)threadIdx.x / 32 * 16 + 15) : 0;
    float o[S::COLUMNS / 2], scores[SIDE / 2], correction[2], factor = a.scale * LOG2_E;
    uint32_t weights[SIDE / 8 * sizeof(T)];
    softmax_rows rows = {{-CUDART_INF_F, -CUDART_INF_F}, {0, 0}};
    sums_aside<S::COLUMNS / 2, THREADS> aside(a.aside);
    int begin = LAST ? first_key(a, p.t.batch, p.first) / SIDE : 0;
    int count = key_blocks<SIDE>(a, a.causal, (p.t.block + 1) * ROWS) - begin;
    clear(o);
    load_tile<T, D>(q, a.q, a.q_step, p.t, a.time, p.t.head, a.dim, p.first, ROWS);
    for_tiles<T, D, 1>(
        count,
        [&](int i, uint32_t pair) {
            int key = (begin + i) * SIDE;
            load_tile<T, D>(pair, a.k, a.k_step, p.t, keys, kv_head, a.dim, key, SIDE);
            load_tile<T, D>(pair + S::TILE, a.v, a.v_step, p.t, keys, kv_head, a.dim, key, SIDE);
        },
        [&](int i, uint32_t pair) {
            tile_scores<T, D>(scores, q, pair);
            int first = (begin + i) * SIDE, low[2] = {0, 0};
            bool masked = first + SIDE > all || (LAST && first < whole);
            for (int r = 0; LAST && masked && r < 2; r++)
                low[r] = first_key(a, p.t.batch, p.own + 8 * r) - first;
            weigh(scores, rows, correction, factor, masked,
                  [&](int r, int key) { return key >= seen[r] - first || (LAST && key < low[r]); });
            correct(o, correction);
#pragma unroll 1
            for (int part = 0; part < (a.y_f32 ? 2 : 1); part++) {
                /* Where y is for the backward: also the product with what the weights lost when they were rounded. */
                if (part) subtract_fragments<T>(scores, weights);
                fragments<T>(weights, scores);
                tile_sums<T, D>(o, weights, pair + S::TILE, p.column);
            }
            if (chain_ends<T, D>(a, i, count)) {
                aside.add_weighted(o, rows, factor, i < CHAIN_BLOCKS<SIDE>);
                clear(o);
            }
        });
    if (has_chains<T, D>(a, count)) aside.add_weighted_to(o, rows, factor);
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = rows.sum[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        inverse[r] = 1 / sum;
        if (a.lse && p.column == 0 && lane % 4 == 0 && p.own + 8 * r < a.time)
            a.lse[((int64_t)p.t.batch * a.heads + p.t.head) * a.time + p.own + 8 * r] =
                rows.max[r] * a.scale + logf(sum);
    }
    if (!a.y) return;
    bool left = __syncthreads_or(!all_finite(o, inverse[0], inverse[1]));
    leave(c, p, S::COLUMNS, left);
    if (!left)
        write_rows<T>(a.y, a.y_step, a.y_f32, a.add_y, p.t, a.time, a.dim, p.first, o, inverse[0], inverse[1],
                      p.column);
}

template <class T, int D, bool LAST>
__global__ void __launch_bounds__(THREADS, resident<T, D>(2)) gradient_dq(tensor_call c) {
    using S = shape<T, D>;
    constexpr int SIDE = S::SIDE;
    const attention_call &a = c.a;
    begin_chained();
    place p(c, S::COLUMNS);
    uint32_t q = shared_memory(), dy = q + ROWS * S::ROW_BYTES;
    int offset = (int)(a.keys - a.time), keys = (int)a.keys, column = threadIdx.x % 4 * 2;
    int64_t kv_head = p.t.head / a.group, head = p.t.batch * a.heads + p.t.head;
    int seen[2] = {keys_seen(a.causal, p.own, offset, keys), keys_seen(a.causal, p.own + 8, offset, keys)};
    int all = keys_seen(a.causal, p.first + (int)threadIdx.x / 32 * 16, offset, keys);
    int whole = LAST ? first_key(a, p.t.batch, p.first + (int)threadIdx.x / 32 * 16 + 15) : 0;
    const float *lse = c.rows.lse + head * c.rows.padded + p.own, *delta = c.rows.delta + head * c.rows.padded + p.own;
    float own_lse[2] = {lse[0], lse[8]}, own_delta[2] = {delta[0], delta[8]};
    float dq[S::COLUMNS / 2], scores[SIDE / 2], dp[SIDE / 2], factor = a.scale * LOG2_E;
    uint32_t ds[SIDE / 8 * sizeof(T)];
    sums_aside<S::COLUMNS / 2, THREADS> aside(a.aside);
    int begin = LAST ? first_key(a, p.t.batch, p.first) / SIDE : 0;
    int count = key_blocks<SIDE>(a, a.causal, (p.t.block + 1) * ROWS) - begin;
    clear(dq);
    load_tile<T, D>(q, a.q, a.q_step, p.t, a.time, p.t.head, a.dim, p.first, ROWS);
    load_tile<T, D>(dy, a.dy, a.y_step, p.t, a.time, p.t.head, a.dim, p.first, ROWS);
    for_tiles<T, D, 2>(
        count,
        [&](int i, uint32_t pair) {
            int key = (begin + i) * SIDE;
            load_tile<T, D>(pair, a.k, a.k_step, p.t, keys, kv_head, a.dim, key, SIDE);
            load_tile<T, D>(pair + S::TILE, a.v, a.v_step, p.t, keys, kv_head, a.dim, key, SIDE);
        },
        [&](int i, uint32_t pair) {
            tile_scores<T, D>(scores, q, pair);
            tile_scores<T, D>(dp, dy, pair + S::TILE);
            int first = (begin + i) * SIDE;
            bool masked = first + SIDE > all || (LAST && first < whole);
            int low[2] = {0, 0};
            for (int r = 0; LAST && masked && r < 2; r++)
                low[r] = first_key(a, p.t.batch, p.own + 8 * r);
#pragma unroll
            for (int e = 0; e < SIDE / 2; e++) {
                int r = e / 2 % 2, key = first + e / 4 * 8 + column + e % 2;
                dp[e] = exp2_fast(fmaf(scores[e], factor, -own_lse[r])) * (dp[e] - own_delta[r]);
                if (masked && (key >= seen[r] || (LAST && key < low[r]))) dp[e] = 0;
            }
            fragments<T>(ds, dp);
            tile_sums<T, D>(dq, ds, pair, p.column);
            if (chain_ends<T, D>(a, i, count)) {
                aside.add(dq, i < CHAIN_BLOCKS<SIDE>);
                clear(dq);
            }
        });
    if (has_chains<T, D>(a, count)) aside.add_to(dq);
    float back = a.scale / WEIGHT_ONE<T>;
    bool left = __syncthreads_or(!all_finite(dq, back, back));
    leave(c, p, S::COLUMNS, left);
    if (!left) write_rows<T>(a.dq, a.dq_step, false, a.add_dq, p.t, a.time, a.dim, p.first, dq, back, back, p.column);
}

template <class T, int D, bool LAST> __global__ void __launch_bounds__(THREADS) gradient_dkv(tensor_call c) {
    using S = shape<T, D>;
    constexpr int SIDE = S::SIDE;
    const attention_call &a = c.a;
    begin_chained();
    place p(c, S::COLUMNS);
    uint32_t k = shared_memory(), v = k + ROWS * S::ROW_BYTES;
    int offset = (int)(a.keys - a.time), column = threadIdx.x % 4 * 2;
    float dk[S::COLUMNS / 2], dv[S::COLUMNS / 2], scores[SIDE / 2], dp[SIDE / 2], factor = a.scale * LOG2_E;
    uint32_t operand[SIDE / 8 * sizeof(T)];
    int first = first_queries<ROWS, SIDE>(a, a.causal, p.t.block);
    int end =
        LAST ? max(0, end_query(a, p.t.batch, p.first + ROWS - 1) - 1) / SIDE + 1 : ((int)a.time + SIDE - 1) / SIDE;
    int ends[2] = {LAST ? end_query(a, p.t.batch, p.own) : 0, LAST ? end_query(a, p.t.batch, p.own + 8) : 0};
    int whole = LAST ? end_query(a, p.t.batch, p.first + (int)threadIdx.x / 32 * 16) : 0;
    int per_head = end - first, count = per_head * (int)a.group;
    sums_aside<S::COLUMNS / 2, THREADS, 2> dk_aside(a.aside, 0), dv_aside(a.aside, 1);
    clear(dk);
    clear(dv);
    load_tile<T, D>(k, a.k, a.k_step, p.t, a.keys, p.t.head, a.dim, p.first, ROWS);
    load_tile<T, D>(v, a.v, a.v_step, p.t, a.keys, p.t.head, a.dim, p.first, ROWS);
    auto head_of = [&](int i) { return p.t.head * (int)a.group + i / per_head; };
    auto query_of = [&](int i) { return (end - 1 - i % per_head) * SIDE; }; /* from the last one down */
    for_tiles<T, D, 2>(
        count,
        [&](int i, uint32_t pair) {
            load_tile<T, D>(pair, a.q, a.q_step, p.t, a.time, head_of(i), a.dim, query_of(i), SIDE);
            load_tile<T, D>(pair + S::TILE, a.dy, a.y_step, p.t, a.time, head_of(i), a.dim, query_of(i), SIDE);
        },
        [&](int i, uint32_t pair) {
            uint32_t q = pair, dy = pair + S::TILE;
            int query = query_of(i);
            int64_t row = (p.t.batch * a.heads + head_of(i)) * c.rows.padded + query + column;
            tile_scores<T, D>(scores, k, q);
            int warp_key = p.first + (int)threadIdx.x / 32 * 16;
            bool masked = a.causal && (warp_key + 15 > query + offset || (LAST && query + SIDE > whole));
            /* Whether the key is after the query's own time, or before its first key. */
            auto is_hidden = [&](int e) {
                int r = e / 2 % 2, key = p.own + 8 * r, at = query + e / 4 * 8 + column + e % 2;
                return masked && (key > at + offset || (LAST && at >= ends[r]));
            };
#pragma unroll
            for (int e = 0; e < SIDE / 2; e++) {
                scores[e] = exp2_fast(fmaf(scores[e], factor, -c.rows.lse[row + e / 4 * 8 + e % 2]));
                if (is_hidden(e)) scores[e] = 0;
            }
            fragments<T>(operand, scores);
            tile_sums<T, D>(dv, operand, dy, p.column);
            tile_scores<T, D>(dp, v, dy);
#pragma unroll
            for (int e = 0; e < SIDE / 2; e++) {
                dp[e] = scores[e] * (dp[e] - c.rows.delta[row + e / 4 * 8 + e % 2]);
                if (is_hidden(e)) dp[e] = 0;
            }
            fragments<T>(operand, dp);
            tile_sums<T, D>(dk, operand, q, p.column);
            if (chain_ends<T, D>(a, i, count)) {
                dk_aside.add(dk, i < CHAIN_BLOCKS<SIDE>);
                dv_aside.add(dv, i < CHAIN_BLOCKS<SIDE>);
                clear(dk);
                clear(dv);
            }
        });
    if (has_chains<T, D>(a, count)) {
        dk_aside.add_to(dk);
        dv_aside.add_to(dv);
    }
    float dk_factor = a.scale / WEIGHT_ONE<T>, dv_factor = 1 / WEIGHT_ONE<T>;
    bool outside[2] = {p.own >= a.keys, p.own + 8 >= a.keys}, good = true; /* rows past the end may hold anything */
#pragma unroll
    for (int i = 0; i < S::COLUMNS / 2; i++)
        good = good && (outside[i / 2 % 2] ||
                        (fabsf(dk[i] * dk_factor) < CUDART_INF_F && fabsf(dv[i] * dv_factor) < CUDART_INF_F));
    bool left = __syncthreads_or(!good);
    leave(c, p, S::COLUMNS, left);
    if (left) return;
    if (a.dk)
        write_rows<T>(a.dk, a.dk_step, false, a.add_dk, p.t, a.keys, a.dim, p.first, dk, dk_factor, dk_factor,
                      p.column);
    if (a.dv)
        write_rows<T>(a.dv, a.dv_step, false, a.add_dv, p.t, a.keys, a.dim, p.first, dv, dv_factor, dv_factor,
                      p.column);
}

/* ---- Launching --------------------------------------------------------------------------------------- */

/* Calls f with the type and the dim filled up: 64, 128 or 256. */
template <class F> auto with_shape(vjp_dtype storage, int64_t dim, F f) {
    return with_type(storage, [&](auto zero) {
        if (dim <= 64) return f(zero, std::integral_constant<int, 64>{});
        if (dim <= 128) return f(zero, std::integral_constant<int, 128>{});
        return f(zero, std::integral_constant<int, 256>{});
    });
}

/* The same and whether queries see the last keys only. */
template <class F> vjp_status with_variant(const fast_call &c, F f) {
    return with_shape(c.work->storage, c.a.dim, [&](auto zero, auto dim) {
        return with_bool(c.a.first_keys || c.a.window < c.a.keys, [&](auto last) { return f(zero, dim, last); });
    });
}

template <class T, int D> tensor_call call_of(const fast_call &c, bool keys) {
    const attention_call a = c.over(keys ? c.a.group * c.a.time : c.a.keys);
    int64_t heads = keys ? a.kv_heads : a.heads, rows = keys ? a.keys : a.time;
    int64_t bytes = 2 * (keys ? a.group * a.time : a.keys) * shape<T, D>::ROW_BYTES;
    return {a,
            order_of(a.batch * heads, heads, keys ? 1 : a.group, bytes, vjp_divide_up(rows, ROWS), !keys && a.causal),
            c.rows, c.flags, (int)vjp_divide_up(a.dim, shape<T, D>::COLUMNS)};
}

} // namespace

bool fits(const vjp_work *work, const attention_call &a) {
    int limit = 0;
    cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, state_of(work->device)->ordinal);
    return with_shape(work->storage, a.dim, [&](auto zero, auto dim) {
        return shared_bytes<decltype(zero), decltype(dim)::value>(a.dy ? 2 : 1) <= (size_t)limit;
    });
}

aside_numbers asides(const vjp_work *work, const attention_call &a) {
    return with_shape(work->storage, a.dim, [&](auto zero, auto dim) {
        constexpr int COLUMNS = shape<decltype(zero), decltype(dim)::value>::COLUMNS;
        int64_t groups = vjp_divide_up(a.dim, COLUMNS) * a.batch;
        int64_t rows = groups * a.heads * vjp_divide_up(a.time, ROWS);
        int64_t keys = groups * a.kv_heads * vjp_divide_up(a.keys, ROWS);
        int64_t one = sums_aside<COLUMNS / 2, THREADS>::NUMBERS, two = sums_aside<COLUMNS / 2, THREADS, 2>::NUMBERS;
        return aside_numbers{rows * one, rows * one, keys * two};
    });
}

vjp_status enqueue_forward(const fast_call &c) {
    return with_variant(c, [&](auto zero, auto dim, auto last) {
        using T = decltype(zero);
        constexpr int D = decltype(dim)::value;
        tensor_call call = call_of<T, D>(c, false);
        return launch(c.work, true, forward<T, D, decltype(last)::value>,
                      (int64_t)call.order.count() * call.column_groups, THREADS, shared_bytes<T, D>(1), call);
    });
}

vjp_status enqueue_dq(const fast_call &c) {
    return with_variant(c, [&](auto zero, auto dim, auto last) {
        using T = decltype(zero);
        constexpr int D = decltype(dim)::value;
        tensor_call call = call_of<T, D>(c, false);
        return launch(c.work, true, gradient_dq<T, D, decltype(last)::value>,
                      (int64_t)call.order.count() * call.column_groups, THREADS, shared_bytes<T, D>(2), call);
    });
}

vjp_status enqueue_dkv(const fast_call &c) {
    return with_variant(c, [&](auto zero, auto dim, auto last) {
        using T = decltype(zero);
        constexpr int D = decltype(dim)::value;
        tensor_call call = call_of<T, D>(c, true);
        return launch(c.work, true, gradient_dkv<T, D, decltype(last)::value>,
                      (int64_t)call.order.count() * call.column_groups, THREADS, shared_bytes<T, D>(2), call);
    });
}

} // namespace tensor
} // namespace vjp

/* SPDX-License-Identifier: MIT */
/*
 * What the two paths on tensor cores share: the order of tiles, the numbers of each row that the backward needs, the
 * online softmax of accumulators, and flags for the exact path. 64 rows belong to four warps, sixteen to each.
 */
#ifndef VJP_CUDA_ATTENTION_FAST_CUH
#define VJP_CUDA_ATTENTION_FAST_CUH

#include "cuda/attention/attention.cuh"
#include "cuda/common/fragments.cuh"

namespace vjp {

/* A tile of work: a block of rows of one head. */
struct tile {
    int block, head, batch;
};

/* `heads` heads, of all batches, in sections of `section`; `blocks` blocks of rows each. */
struct tile_order {
    int heads, heads_per_batch, section, blocks;
    bool descending;

    __host__ __device__ int count() const {
        return heads * blocks;
    }

    /*
     * The tiles of a persistent block, one in each round. Tiles become shorter, so every other round goes backwards:
     * the block with the longest tile of one round has the shortest of the next.
     */
    __device__ bool has(int round) const {
        return round * (int)gridDim.x < count();
    }

    __device__ int index(int round) const {
        return round * (int)gridDim.x + (int)(round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    }

    __device__ tile at(int index) const {
        int first = index / (section * blocks) * section, rest = index % (section * blocks);
        int here = min(section, heads - first), block = rest / here, head = first + rest % here;
        return {descending ? blocks - 1 - block : block, head % heads_per_batch, head / heads_per_batch};
    }
};

/*
 * Of each row lse in units of log 2, minus WEIGHT_BITS, and <dy, y>; [batch * heads][padded time], +inf and 0 in the
 * padding. A lse that is a NaN leaves all that depends on the row to the exact path.
 */
struct row_numbers {
    float *lse, *delta;
    int64_t padded;
};

/*
 * The backward's weights are 2^WEIGHT_BITS times too large, so that 16-bit floats keep small ones, and f16 also small
 * dS, apart from 0: a weight of 1/4096 has 12 bits and not 10. (bf16 would not need it, but f16 keeps its weights, too,
 * where they are kept for dS. TF32 has the range of f32.) What overflows is left to the exact path.
 */
template <class T> constexpr int WEIGHT_BITS = std::is_same_v<T, f16> ? 8 : std::is_same_v<T, bf16> ? 14 : 0;
template <class T> constexpr float WEIGHT_ONE = 1 << WEIGHT_BITS<T>;

/* ---- Which rows and keys -------------------------------------------------------------------------------- */

/* The keys that a query sees: all, those up to its own time, the last ones of these by a window or by `first`. */
enum class visible { all, causal, window, first };

/* The end of the blocks of keys that the queries before `end` need. */
template <int KEYS> __device__ int key_blocks(const attention_call &a, bool causal, int end) {
    int last = min(end, (int)a.time) - 1;
    return (keys_seen(causal, last, (int)(a.keys - a.time), (int)a.keys) + KEYS - 1) / KEYS;
}

/* The first block of queries that sees a block of keys. */
template <int KEYS, int QUERIES> __device__ int first_queries(const attention_call &a, bool causal, int block) {
    return causal ? max(0, block * KEYS - (int)(a.keys - a.time)) / QUERIES : 0;
}

/* The first block of keys that a query and those after it need. */
template <int KEYS, bool FIRST> __device__ int first_keys(const attention_call &a, int batch, int query) {
    return first_key<FIRST>(a, batch, query) / KEYS;
}

/*
 * The end of the blocks of queries that see a key of this block. It is at least one: keys before the first one of the
 * first query are seen by none, and a block whose weights are all 0 gives their gradient.
 */
template <int KEYS, int QUERIES, bool FIRST> __device__ int end_queries(const attention_call &a, const tile &t) {
    return max(0, end_query<FIRST>(a, t.batch, (t.block + 1) * KEYS - 1) - 1) / QUERIES + 1;
}

/* Whether the 64 rows from `row` on of a head, counted over all batches, are left to the exact path. */
__device__ inline void set_flag(int *flags, int64_t rows, int head, int row, bool left) {
    if (row < rows) flags[head * vjp::divide_up(rows, (int64_t)FLAG_ROWS) + row / FLAG_ROWS] = left;
}

/* ---- Softmax -------------------------------------------------------------------------------------------- */

/* The maxima and sums of a thread's two rows: r and r + 8. A sum covers the thread's own columns until the end. */
struct softmax_rows {
    float max[2], sum[2];
};

/* What scores times `factor` are relative to, with this maximum; -inf: of a row that has seen no key yet. */
__device__ inline float weight_base(float top, float factor) {
    return top == -CUDART_INF_F ? 0 : top * factor;
}

/*
 * Turns scores into weights relative to the new maximum; `correction` is what earlier sums are multiplied with.
 * `masked`: whether any row sees less than all keys of this block; hides(r, key): whether the thread's row r does not
 * see the block's `key`.
 */
template <int COUNT, class H>
__device__ void weigh(float (&s)[COUNT], softmax_rows &rows, float (&correction)[2], float factor, bool masked,
                      H hides) {
    int column = threadIdx.x % 4 * 2;
    if (masked) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (hides(i / 2 % 2, i / 4 * 8 + column + i % 2)) s[i] = -CUDART_INF_F;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = rows.max[r];
#pragma unroll
        for (int i = 2 * r; i < COUNT; i += 4)
            top = fmaxf(top, fmaxf(s[i], s[i + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        float base = weight_base(top, factor);
        correction[r] = exp2_fast(fmaf(rows.max[r], factor, -base));
        rows.max[r] = top;
        float sum = rows.sum[r] * correction[r];
#pragma unroll
        for (int i = 2 * r; i < COUNT; i += 4) {
            s[i] = exp2_fast(fmaf(s[i], factor, -base));
            s[i + 1] = exp2_fast(fmaf(s[i + 1], factor, -base));
            sum += s[i] + s[i + 1];
        }
        rows.sum[r] = sum;
    }
}

template <int COUNT> __device__ void correct(float (&o)[COUNT], const float (&correction)[2]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        o[i] *= correction[i / 2 % 2];
}

/* ---- Long sums ------------------------------------------------------------------------------------------ */

/*
 * A chain of sums on the tensor cores drifts towards 0 (docs/ops/linear.md): after 16384 terms of one sign by up to
 * 1.1e-4 on Hopper, 2.2e-4 on cards before. So a sum over more keys or queries is several shorter chains: at the end of
 * each a thread adds its sums to those in memory of its own, and the next chain begins at 0. Not so in bf16, which may
 * be off by 4e-3: its kernels would take 1 % longer, however short the sum.
 */
constexpr int LONG_SUM = 16384, CHAIN_TERMS = 4096;
template <int SIDE> constexpr int CHAIN_BLOCKS = CHAIN_TERMS / SIDE;

/* Whether a sum over so many rows is more than one chain. */
inline bool is_long(const vjp_work *work, int64_t rows) {
    return work->storage != VJP_BF16 && rows > LONG_SUM;
}

template <class T> __device__ bool in_chains(const attention_call &a) {
    return !std::is_same_v<T, bf16> && a.aside;
}

/* Blocks are summed from `last` down, and a chain ends at every multiple of CHAIN_BLOCKS: the first of these, or -1. */
template <int SIDE> __device__ int first_chain(int last) {
    return last > 0 ? (last - 1) / CHAIN_BLOCKS<SIDE> * CHAIN_BLOCKS<SIDE> : -1;
}

/* COUNT sums of each thread of a block, and their rows' maxima where they are of weighted values. */
template <int COUNT, int THREADS, int SETS = 1> struct sums_aside {
    static constexpr int VECTORS = COUNT / 4 + 1;
    static constexpr int64_t NUMBERS = 4 * VECTORS * THREADS * SETS; /* of a block */
    float4 *own;

    __device__ explicit sums_aside(float *memory, int set = 0)
        : own(reinterpret_cast<float4 *>(memory + blockIdx.x * NUMBERS) + set * VECTORS * THREADS + threadIdx.x) {
    }

    /* d += what is kept, times a factor for each of the thread's rows. */
    __device__ void add_to(float (&d)[COUNT], float low = 1, float high = 1) const {
#pragma unroll
        for (int i = 0; i < COUNT / 4; i++) {
            float4 kept = own[i * THREADS];
            d[4 * i] = fmaf(kept.x, low, d[4 * i]);
            d[4 * i + 1] = fmaf(kept.y, low, d[4 * i + 1]);
            d[4 * i + 2] = fmaf(kept.z, high, d[4 * i + 2]);
            d[4 * i + 3] = fmaf(kept.w, high, d[4 * i + 3]);
        }
    }

    /* Keeps d, and what was kept before, if anything was. */
    __device__ void add(float (&d)[COUNT], bool first) const {
        if (!first) add_to(d);
        put(d);
    }

    __device__ void add_weighted_to(float (&d)[COUNT], const softmax_rows &rows, float factor) const {
        float4 kept = own[COUNT / 4 * THREADS];
        add_to(d, exp2_fast(fmaf(kept.x, factor, -weight_base(rows.max[0], factor))),
               exp2_fast(fmaf(kept.y, factor, -weight_base(rows.max[1], factor))));
    }

    __device__ void add_weighted(float (&d)[COUNT], const softmax_rows &rows, float factor, bool first) const {
        if (!first) add_weighted_to(d, rows, factor);
        put(d);
        own[COUNT / 4 * THREADS] = {rows.max[0], rows.max[1], 0, 0};
    }

  private:
    __device__ void put(const float (&d)[COUNT]) const {
#pragma unroll
        for (int i = 0; i < COUNT / 4; i++)
            own[i * THREADS] = {d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]};
    }
};

/* ---- Results -------------------------------------------------------------------------------------------- */

/*
 * Writes 64 rows of four warps' accumulators, times their factors, to a tensor [batch, rows, heads, dim], rows at a
 * distance of `step`, columns from `column` on; with `as_f32` to one of f32.
 */
template <class T, int COUNT>
__device__ void write_rows(void *to, int64_t step, bool as_f32, bool add, const tile &t, int64_t rows, int64_t dim,
                           int first, const float (&d)[COUNT], float low_factor, float high_factor, int column = 0) {
    int thread = threadIdx.x % 128, own = first + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (own + 8 * r >= rows) continue;
        int64_t at = (t.batch * rows + own + 8 * r) * step + t.head * dim + column + thread % 4 * 2;
        float factor = r ? high_factor : low_factor;
#pragma unroll
        for (int i = 0; i < COUNT / 4; i++)
#pragma unroll
            for (int j = 0; j < 2 && column + 8 * i < dim; j++) {
                float value = d[4 * i + 2 * r + j] * factor;
                if (as_f32)
                    static_cast<float *>(to)[at + 8 * i + j] = value;
                else
                    write_one(static_cast<T *>(to) + at + 8 * i + j, value, add);
            }
    }
}

/* ---- The two paths -------------------------------------------------------------------------------------- */

/* A launch of one kernel. `flags`: see set_flag(). */
struct fast_call {
    const vjp_work *work;
    attention_call a;
    row_numbers rows; /* of the backward */
    int *flags;
    float *aside; /* for long sums */

    /* The call of a kernel that sums over so many rows. */
    attention_call over(int64_t rows) const {
        attention_call call = a;
        call.aside = is_long(work, rows) ? aside : nullptr;
        return call;
    }
};

/* How many numbers the blocks of each kernel keep of long sums. */
struct aside_numbers {
    int64_t forward, dq, dkv;
};

namespace hopper {
aside_numbers asides(const vjp_work *work, const attention_call &a);
vjp_status enqueue_forward(const fast_call &c);
vjp_status enqueue_dq(const fast_call &c);
vjp_status enqueue_dkv(const fast_call &c);

/* The sums of dq, each of 64 queries in the order of a warpgroup's accumulators: [batch * heads][blocks][8][128][4]. */
struct dq_sums {
    float *sum;
    int *turn;     /* [batch * heads][blocks]: how many tiles have added theirs; 0 before the launch */
    int *next;     /* the next tile; 0 before the launch */
    int64_t turns; /* how many they are; `next` follows them */
    int blocks;    /* of 64 queries, an even number */
};

/* dq, dk and dv in one kernel, where all are wanted and the dim is small enough. */
bool takes_gradients(const attention_call &a);
dq_sums dq_sums_of(const attention_call &a, workspace_layout &layout);
vjp_status enqueue_gradients(const fast_call &c, const dq_sums &dq, int *key_flags);
} // namespace hopper

namespace tensor {
/* Whether the card's shared memory holds the tiles of this pass. */
bool fits(const vjp_work *work, const attention_call &a);
aside_numbers asides(const vjp_work *work, const attention_call &a);
vjp_status enqueue_forward(const fast_call &c);
vjp_status enqueue_dq(const fast_call &c);
vjp_status enqueue_dkv(const fast_call &c);
} // namespace tensor

/* The order of `blocks` blocks of every head; `shared`: how many heads in a row use the same `bytes`. */
tile_order order_of(int64_t heads, int64_t heads_per_batch, int64_t shared, int64_t bytes, int64_t blocks,
                    bool descending);

} // namespace vjp

#endif

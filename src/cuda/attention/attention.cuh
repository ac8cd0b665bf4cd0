/* SPDX-License-Identifier: MIT */
/*
 * What the paths of attention share. attention.cu chooses among them:
 *
 *     path     when                                           what
 *     hopper   compute capability 9.0, bf16 or f16, dim a     asynchronous products of warpgroups, fed by the copy
 *              multiple of 8 up to 128, aligned               engine
 *     tensor   bf16 or f16 otherwise, f32 where the device    products of warps (mma.sync), of f32 rounded to TF32
 *              is for TF32; dim a multiple of 8 up to 256,
 *              aligned
 *     exact    otherwise, and whatever the others leave       f32 arithmetic, one FMA after another
 *
 * Aligned: every tensor begins at a multiple of 16 bytes, and its rows follow at one.
 *
 * No path stores a matrix of scores. The backward is two kernels that each compute the scores again, one for dq, one
 * for dk and dv: seven products instead of five, but every sum is made by one block, in a fixed order. On Hopper dims
 * up to 64 have one kernel with five products, whose blocks take turns to add to dq (hopper_gradients.cuh).
 *
 * The fast paths multiply masked weights, which are 0, with whatever is in the tile: a NaN in a value that a query
 * must not see would reach it. Its sums of weighted values can overflow although their average fits. So a warpgroup
 * whose result is not finite does not store it but sets a flag, and the exact path, launched last, computes flagged
 * rows.
 */
#ifndef VJP_CUDA_ATTENTION_CUH
#define VJP_CUDA_ATTENTION_CUH

#include "cuda/common/kernel.cuh"

namespace vjp {

constexpr float LOG2_E = 1.4426950408889634f;

/*
 * A flag is for 64 rows (of queries in the forward and for dq, of keys for dk and dv) and 128 columns: flags are
 * [batch, heads, blocks of rows, groups of columns].
 */
constexpr int FLAG_ROWS = 64, FLAG_COLUMNS = 128;

struct attention_call {
    const void *q, *k, *v;
    const void *dy, *out;   /* of the backward: dy, and the forward's y */
    void *y, *dq, *dk, *dv; /* NULL: not wanted */
    const float *lse_in;
    float *lse;
    bool add_y, add_dq, add_dk, add_dv;
    bool y_f32; /* y, or `out`, is of f32 in the workspace: computed again for the backward */
    int64_t batch, time, keys, heads, kv_heads, group, dim;
    /* Elements from one row of a tensor, all heads of a time, to the next. y's also of dy and `out`: always packed. */
    int64_t q_step, k_step, v_step, dq_step, dk_step, dv_step, y_step;
    bool causal;
    int64_t window; /* of causal: how many of its last keys a query sees; all are `keys` */
    /* Where the call has `first`, both ends of what it and the window leave visible (first.cu); else NULL. */
    int *first_keys;  /* [batch, time]: the first key that a query sees */
    int *end_queries; /* [batch, keys], of the backward: the end of the queries that see a key */
    float scale;
    /* Of each row of scores, [batch, heads, time]: a weight is exp((score - row_max) - row_log). */
    float *row_max, *row_log; /* row_log NULL: 0 */
    float *aside;             /* of the fast paths: memory for long sums (fast.cuh), or NULL where none is that long */
};

/*
 * Which blocks of rows a launch of the exact path computes: those whose number is not 0, by block or else by
 * head (one number per batch and head of k); all where both are NULL.
 */
struct attention_flags {
    const int *block, *head;
};

inline attention_call attention_call_of(const vjp_work *work) {
    vjp_attention_sizes s = vjp_attention_sizes_of(work);
    attention_call a{};
    a.batch = s.batch;
    a.time = s.time;
    a.keys = s.keys;
    a.heads = s.heads;
    a.kv_heads = s.kv_heads;
    a.group = s.group;
    a.dim = s.dim;
    a.y_step = s.heads * s.dim;
    a.causal = s.causal;
    a.window = s.window ? s.window : s.keys;
    a.scale = (float)s.scale;
    return a;
}

/* The end of the keys that a query sees, with `offset` keys - time. */
__device__ inline int keys_seen(bool causal, int query, int offset, int keys) {
    return causal ? min(query + offset + 1, keys) : keys;
}

/*
 * The first key that a query sees, with `first` or else by the window. It never decreases from one query to the next.
 * Queries past the end are like the last one.
 */
template <bool FIRST> __device__ int first_key(const attention_call &a, int64_t batch, int query) {
    if (FIRST) return a.first_keys[batch * a.time + min(query, (int)a.time - 1)];
    return max(0, keys_seen(a.causal, query, (int)(a.keys - a.time), (int)a.keys) - (int)a.window);
}

/* The end of the queries that see a key; 0 or less where none does. It never decreases from one key to the next. */
template <bool FIRST> __device__ int end_query(const attention_call &a, int64_t batch, int key) {
    if (FIRST) return a.end_queries[batch * a.keys + min(key, (int)a.keys - 1)];
    return key + min((int)a.time - key, (int)(a.window - (a.keys - a.time)));
}

/* The same where the kernel serves both. */
__device__ inline int first_key(const attention_call &a, int64_t batch, int query) {
    return a.first_keys ? first_key<true>(a, batch, query) : first_key<false>(a, batch, query);
}

__device__ inline int end_query(const attention_call &a, int64_t batch, int key) {
    return a.end_queries ? end_query<true>(a, batch, key) : end_query<false>(a, batch, key);
}

/* ---- The paths --------------------------------------------------------------------------------------- */

/* first.cu: sets first_keys and end_queries where the call has `first`, and reports bad values of it. */
vjp_status find_visible(const vjp_work *work, attention_call &a, workspace_layout &layout);

/* exact.cu. The forward writes y, lse, row_max and row_log, each where it is not NULL. */
vjp_status exact_forward(const vjp_work *work, const attention_call &a, attention_flags flags);
vjp_status exact_dq(const vjp_work *work, const attention_call &a, attention_flags flags);
vjp_status exact_dkv(const vjp_work *work, const attention_call &a, attention_flags flags);

/* fast.cu: on tensor cores. `takes`: whether it computes this call. Without a base the layout only counts. */
bool fast_takes(const vjp_work *work, const attention_call &a);
vjp_status fast_forward(const vjp_work *work, const attention_call &a, workspace_layout &layout);
vjp_status fast_backward(const vjp_work *work, const attention_call &a, bool recomputed, workspace_layout &layout);

} // namespace vjp

#endif

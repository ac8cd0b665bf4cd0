/* SPDX-License-Identifier: MIT */
/*
 * attention's dk and dv on Hopper. Scores are computed transposed, keys by queries, so that the weights and dS are in
 * registers as the left operands of the products with dy and q: nothing but the inputs goes through shared memory. A
 * consumer warpgroup owns 64 keys and sums over the queries that see them, and over the heads that share them, in one
 * fixed order: from the last query down, so that blocks which run at the same time read the same queries.
 *
 * A step computes the scores of 96 or 128 queries and adds the last step's dS to dk; then adds the weights to dv and
 * computes dP. Each pair of products is issued at once, and the consumers take turns. The weights are kept in 16 bits
 * for dS: there are no registers for both them and dP in f32.
 */
#ifndef VJP_CUDA_HOPPER_DKV_CUH
#define VJP_CUDA_HOPPER_DKV_CUH

#include "cuda/attention/hopper_dq.cuh"

namespace vjp {
namespace hopper {

/* Where dk and dv go. */
struct key_results {
    CUtensorMap dk, dv;
    int *flags; /* see set_flag() */
};

struct dkv_call {
    CUtensorMap q, dy, k, v;
    key_results out;
    tile_order order; /* of key blocks and heads of k */
    row_numbers rows;
    attention_call a;
};

template <int D> struct dkv_shape {
    static constexpr int CONSUMERS = 2, KEYS = 64 * CONSUMERS, QUERIES = D == 64 ? 128 : 96, STAGES = 3;
    static constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
};

template <class T, int D> struct dkv_shared {
    using shape = dkv_shape<D>;
    alignas(TILE_ALIGNMENT) T k[shape::KEYS * D];
    alignas(TILE_ALIGNMENT) T v[shape::KEYS * D];
    alignas(TILE_ALIGNMENT) T q[shape::STAGES][shape::QUERIES * D];
    alignas(TILE_ALIGNMENT) T dy[shape::STAGES][shape::QUERIES * D];
    alignas(16) float lse[shape::STAGES][shape::QUERIES];
    alignas(16) float delta[shape::STAGES][shape::QUERIES];
    uint64_t k_full, k_empty, q_full[shape::STAGES], q_empty[shape::STAGES], dy_full[shape::STAGES],
        dy_empty[shape::STAGES];
};

#if VJP_HOPPER

/* The 64 keys of a consumer, and of them the thread's own: `own` and the eighth after it. */
struct key_rows {
    int begin, own, batch;
    int whole; /* with a window or `first`: queries before it see all 64, as far as their own time allows */
};

template <visible V> __device__ key_rows key_rows_of(const attention_call &a, const tile &t, int begin) {
    constexpr bool FIRST = V == visible::first, LAST = FIRST || V == visible::window;
    int thread = threadIdx.x % WARPGROUP;
    return {begin, begin + thread / 32 * 16 + thread % 32 / 4, t.batch, LAST ? end_query<FIRST>(a, t.batch, begin) : 0};
}

/*
 * Turns scores into weights, 64 keys by the queries from `query` on, with the lse of these. `past_end`: keys past the
 * last one have weight 0, too; without, they have any, finite or not.
 */
template <visible V, int COUNT>
__device__ void weigh_keys(float (&s)[COUNT], const attention_call &a, const key_rows &keys, int query,
                           const float *lse_of, bool past_end = false) {
    constexpr bool CAUSAL = V != visible::all, FIRST = V == visible::first, LAST = FIRST || V == visible::window;
    float factor = a.scale * LOG2_E;
    int offset = (int)(a.keys - a.time), column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++) {
        float2 lse = *reinterpret_cast<const float2 *>(lse_of + column + 8 * i);
#pragma unroll
        for (int j = 0; j < 4; j++)
            s[4 * i + j] = exp2_fast(fmaf(s[4 * i + j], factor, j % 2 ? -lse.y : -lse.x));
    }
    if ((CAUSAL && keys.begin + 63 > query + offset) || (LAST && query + 2 * COUNT > keys.whole)) {
        int limit = keys.own - query - column - offset;
        int past[2] = {0, 0};
        for (int r = 0; LAST && r < 2; r++)
            past[r] = end_query<FIRST>(a, keys.batch, keys.own + 8 * r) - query - column;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int at = i / 4 * 8 + i % 2, r = i / 2 % 2;
            if ((CAUSAL && at - 8 * r < limit) || (LAST && at >= past[r])) s[i] = 0;
        }
    }
    if (past_end && keys.begin + 64 > (int)a.keys) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (keys.own + i / 2 % 2 * 8 >= (int)a.keys) s[i] = 0;
    }
}

/* dS from the weights, packed as W, from dP, and <dy, y> of the queries. */
template <class T, class W, int COUNT>
__device__ void score_gradients(uint32_t (&ds)[COUNT / 2], const uint32_t (&p)[COUNT / 2], const float (&dp)[COUNT],
                                const float *delta_of) {
    const float *delta_at = delta_of + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++) {
        float2 delta = *reinterpret_cast<const float2 *>(delta_at + 8 * i), low = unpack_two<W>(p[2 * i]),
               high = unpack_two<W>(p[2 * i + 1]);
        ds[2 * i] = pack_two<T>(low.x * (dp[4 * i] - delta.x), low.y * (dp[4 * i + 1] - delta.y));
        ds[2 * i + 1] = pack_two<T>(high.x * (dp[4 * i + 2] - delta.x), high.y * (dp[4 * i + 3] - delta.y));
    }
}

/*
 * Stores the sums of a consumer's keys through 64 x D elements of shared memory for each, which the copy engine reads
 * until stores_read(); or sets the block's flag.
 */
template <class T, int D>
__device__ void store_keys(const attention_call &a, const key_results &out, const tile &t, int group,
                           const key_rows &keys, const float (&dk)[D / 2], const float (&dv)[D / 2], char *staged_dk,
                           char *staged_dv) {
    float dk_factor = a.scale / WEIGHT_ONE<T>, dv_factor = 1 / WEIGHT_ONE<T>;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < D / 2; i++)
        finite &=
            (is_finite(dk[i] * dk_factor) & is_finite(dv[i] * dv_factor)) | (keys.own + i / 2 % 2 * 8 >= (int)a.keys);
    bool left = group_any(OWN + group, !finite);
    if (threadIdx.x % WARPGROUP == 0) set_flag(out.flags, a.keys, t.batch * (int)a.kv_heads + t.head, keys.begin, left);
    if (left) return;
    if (a.dk && a.add_dk)
        write_rows<T>(a.dk, a.dk_step, false, true, t, a.keys, a.dim, keys.begin, dk, dk_factor, dk_factor);
    else if (a.dk)
        store_rows<T, D>(out.dk, staged_dk, t, group, keys.begin, dk, dk_factor, dk_factor);
    if (a.dv && a.add_dv)
        write_rows<T>(a.dv, a.dv_step, false, true, t, a.keys, a.dim, keys.begin, dv, dv_factor, dv_factor);
    else if (a.dv)
        store_rows<T, D>(out.dv, staged_dv, t, group, keys.begin, dv, dv_factor, dv_factor);
}

template <class T, int D, visible V> __device__ void dkv_produce(const dkv_call &c, dkv_shared<T, D> &shared) {
    using shape = dkv_shape<D>;
    constexpr int QUERIES = shape::QUERIES, BYTES = QUERIES * D * 2 + QUERIES * 4;
    ring<shape::STAGES> at;
    uint32_t k_parity = 0;
    constexpr bool CAUSAL = V != visible::all, FIRST = V == visible::first, LAST = FIRST || V == visible::window;
    int all = ((int)c.a.time + QUERIES - 1) / QUERIES;
    for (int round = 0; c.order.has(round); round++) {
        int index = c.order.index(round);
        if (index >= c.order.count()) continue;
        tile t = c.order.at(index);
        barrier_wait(shared.k_empty, k_parity ^ 1);
        barrier_expect(shared.k_full, 2 * shape::KEYS * D * 2);
#pragma unroll
        for (int d = 0; d < D; d += SLICE) {
            load_box(shared.k + d * shape::KEYS, c.k, shared.k_full, d, t.head, t.block * shape::KEYS, t.batch);
            load_box(shared.v + d * shape::KEYS, c.v, shared.k_full, d, t.head, t.block * shape::KEYS, t.batch);
        }
        k_parity ^= 1;
        int first = first_queries<shape::KEYS, QUERIES>(c.a, CAUSAL, t.block);
        int end = LAST ? end_queries<shape::KEYS, QUERIES, FIRST>(c.a, t) : all;
        for (int h = t.head * (int)c.a.group; h < (t.head + 1) * (int)c.a.group; h++) {
            int64_t row = (t.batch * c.a.heads + h) * c.rows.padded;
            for (int m = end - 1; m >= first; m--) {
                barrier_wait(shared.q_empty[at.stage], at.parity ^ 1);
                barrier_expect(shared.q_full[at.stage], BYTES);
#pragma unroll
                for (int d = 0; d < D; d += SLICE)
                    load_box(shared.q[at.stage] + d * QUERIES, c.q, shared.q_full[at.stage], d, h, m * QUERIES,
                             t.batch);
                load_bytes(shared.lse[at.stage], c.rows.lse + row + m * QUERIES, QUERIES * 4, shared.q_full[at.stage]);
                barrier_wait(shared.dy_empty[at.stage], at.parity ^ 1);
                barrier_expect(shared.dy_full[at.stage], BYTES);
#pragma unroll
                for (int d = 0; d < D; d += SLICE)
                    load_box(shared.dy[at.stage] + d * QUERIES, c.dy, shared.dy_full[at.stage], d, h, m * QUERIES,
                             t.batch);
                load_bytes(shared.delta[at.stage], c.rows.delta + row + m * QUERIES, QUERIES * 4,
                           shared.dy_full[at.stage]);
                at.advance();
            }
        }
    }
}

template <class T, int D, visible V> __device__ void dkv_consume(const dkv_call &c, dkv_shared<T, D> &shared) {
    using shape = dkv_shape<D>;
    constexpr int QUERIES = shape::QUERIES, KEYS = shape::KEYS;
    int group = warpgroup() - 1, thread = threadIdx.x % WARPGROUP, lane = thread % 32;
    ring<shape::STAGES> at;
    uint32_t k_parity = 0;
    uint32_t k = shared_address(shared.k), v = shared_address(shared.v);
    constexpr bool CAUSAL = V != visible::all, FIRST = V == visible::first, LAST = FIRST || V == visible::window;
    int all = ((int)c.a.time + QUERIES - 1) / QUERIES;
    if (group == 1) group_arrive(TURN, 2 * WARPGROUP);
    for (int round = 0; c.order.has(round); round++) {
        int index = c.order.index(round);
        if (index >= c.order.count()) continue;
        tile t = c.order.at(index);
        key_rows keys = key_rows_of<V>(c.a, t, t.block * KEYS + group * 64);
        float dk[D / 2], dv[D / 2];
        uint32_t p[QUERIES / 4], ds[QUERIES / 4];
        sums_aside<D / 2, shape::THREADS, 2> dk_aside(c.a.aside, 0), dv_aside(c.a.aside, 1);
        int first = first_queries<KEYS, QUERIES>(c.a, CAUSAL, t.block);
        int end = LAST ? end_queries<KEYS, QUERIES, FIRST>(c.a, t) : all;
        int steps = (end - first) * (int)c.a.group, m = end - 1;
        auto turn_begins = [&]() { group_sync(TURN + group, 2 * WARPGROUP); };
        auto turn_ends = [&]() { group_arrive(TURN + 1 - group, 2 * WARPGROUP); };
        auto issue_scores = [&](float(&s)[QUERIES / 2]) {
            uint32_t q = shared_address(shared.q[at.stage]);
            barrier_wait(shared.q_full[at.stage], at.parity);
            products_begin();
#pragma unroll
            for (int i = 0; i < D / 16; i++)
                product<T, false>(s, over_columns(k, KEYS, group * 64, i), over_columns(q, QUERIES, 0, i), i > 0);
            products_commit();
        };
        auto make_weights = [&](float(&s)[QUERIES / 2]) {
            weigh_keys<V>(s, c.a, keys, m * QUERIES, shared.lse[at.stage]);
            fragments<T>(p, s);
        };
        /* dv with the weights; dP, and from it dS. */
        auto use_weights = [&](bool keep) {
            float dp[QUERIES / 2];
            uint32_t dy = shared_address(shared.dy[at.stage]);
            barrier_wait(shared.dy_full[at.stage], at.parity);
            turn_begins();
            products_begin();
#pragma unroll
            for (int i = 0; i < QUERIES / 16; i++)
                product<T, true>(dv, p + 4 * i, over_rows(dy, QUERIES, i), keep || i > 0);
#pragma unroll
            for (int i = 0; i < D / 16; i++)
                product<T, false>(dp, over_columns(v, KEYS, group * 64, i), over_columns(dy, QUERIES, 0, i), i > 0);
            products_commit();
            turn_ends();
            products_wait<0>();
            pin(dp);
            score_gradients<T, T>(ds, p, dp, shared.delta[at.stage]);
            if (lane == 0) barrier_arrive(shared.dy_empty[at.stage]);
            at.advance();
            if (--m < first) m = end - 1;
        };
        auto issue_dk = [&](bool keep) {
            uint32_t q = shared_address(shared.q[(at.stage + shape::STAGES - 1) % shape::STAGES]);
            products_begin();
#pragma unroll
            for (int i = 0; i < QUERIES / 16; i++)
                product<T, true>(dk, ds + 4 * i, over_rows(q, QUERIES, i), keep || i > 0);
        };
        auto release_last = [&]() { /* the queries of the step before: dk has them */
                                    if (lane == 0)
                                        barrier_arrive(shared.q_empty[(at.stage + shape::STAGES - 1) % shape::STAGES]);
        };
        barrier_wait(shared.k_full, k_parity);
        k_parity ^= 1;
        {
            float s[QUERIES / 2];
            turn_begins();
            issue_scores(s);
            turn_ends();
            products_wait<0>();
            pin(s);
            make_weights(s);
            use_weights(false);
        }
        bool keep = false;
        for (int step = 1; step < steps; step++) {
            float s[QUERIES / 2];
            barrier_wait(shared.q_full[at.stage], at.parity);
            turn_begins();
            issue_dk(keep);
            issue_scores(s);
            turn_ends();
            products_wait<0>();
            pin(s);
            release_last();
            make_weights(s);
            keep = !in_chains<T>(c.a) || step % CHAIN_BLOCKS<QUERIES>;
            if (!keep) {
                pin(dk);
                pin(dv);
                dk_aside.add(dk, step == CHAIN_BLOCKS<QUERIES>);
                dv_aside.add(dv, step == CHAIN_BLOCKS<QUERIES>);
            }
            use_weights(keep);
        }
        issue_dk(keep);
        products_commit();
        products_wait<0>();
        pin(dv);
        pin(dk);
        release_last();
        if (in_chains<T>(c.a) && steps > CHAIN_BLOCKS<QUERIES>) {
            dk_aside.add_to(dk);
            dv_aside.add_to(dv);
        }
        /* Both consumers are done with the keys and values: their memory takes the results. */
        group_sync(BOTH, 2 * WARPGROUP);
        store_keys<T, D>(c.a, c.out, t, group, keys, dk, dv, reinterpret_cast<char *>(shared.k + group * 64 * D),
                         reinterpret_cast<char *>(shared.v + group * 64 * D));
        if (thread == 0) stores_read();
        group_sync(OWN + group, WARPGROUP);
        if (lane == 0) barrier_arrive(shared.k_empty);
    }
}

#endif

template <class T, int D, visible V>
__global__ void __launch_bounds__(dkv_shape<D>::THREADS, 1) backward_dkv(const __grid_constant__ dkv_call c) {
#if VJP_HOPPER
    using shape = dkv_shape<D>;
    auto &shared = aligned_shared<dkv_shared<T, D>>();
    if (threadIdx.x == 0) {
        barrier_init(shared.k_full, 1);
        barrier_init(shared.k_empty, 4 * shape::CONSUMERS);
        for (int i = 0; i < shape::STAGES; i++) {
            barrier_init(shared.q_full[i], 1);
            barrier_init(shared.dy_full[i], 1);
            barrier_init(shared.q_empty[i], 4 * shape::CONSUMERS);
            barrier_init(shared.dy_empty[i], 4 * shape::CONSUMERS);
        }
        barriers_are_ready();
    }
    __syncthreads();
    begin_chained();
    if (threadIdx.x < WARPGROUP) {
        give_registers<24>();
        if (threadIdx.x == 0) dkv_produce<T, D, V>(c, shared);
    } else {
        take_registers<240>();
        dkv_consume<T, D, V>(c, shared);
        if (threadIdx.x % WARPGROUP == 0) stores_done();
    }
#endif
}

} // namespace hopper
} // namespace vjp

#endif

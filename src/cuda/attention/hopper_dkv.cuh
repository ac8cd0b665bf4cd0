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

struct dkv_call {
    CUtensorMap q, dy, k, v, dk, dv;
    tile_order order; /* of key blocks and heads of k */
    row_numbers rows;
    attention_call a;
    int *flags; /* see set_flag() */
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
    int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP, lane = thread % 32;
    ring<shape::STAGES> at;
    uint32_t k_parity = 0;
    uint32_t k = shared_address(shared.k), v = shared_address(shared.v);
    float factor = c.a.scale * LOG2_E;
    int offset = (int)(c.a.keys - c.a.time), column = thread % 4 * 2;
    constexpr bool CAUSAL = V != visible::all, FIRST = V == visible::first, LAST = FIRST || V == visible::window;
    int all = ((int)c.a.time + QUERIES - 1) / QUERIES;
    if (group == 1) group_arrive(TURN, 2 * WARPGROUP);
    for (int round = 0; c.order.has(round); round++) {
        int index = c.order.index(round);
        if (index >= c.order.count()) continue;
        tile t = c.order.at(index);
        int head = t.batch * (int)c.a.kv_heads + t.head;
        int begin = t.block * KEYS + group * 64, own = begin + thread / 32 * 16 + lane / 4;
        float dk[D / 2], dv[D / 2];
        uint32_t p[QUERIES / 4], ds[QUERIES / 4];
        int first = first_queries<KEYS, QUERIES>(c.a, CAUSAL, t.block);
        int end = LAST ? end_queries<KEYS, QUERIES, FIRST>(c.a, t) : all;
        /* Queries before this one see all keys of the warpgroup, as far as their own time allows. */
        int whole = LAST ? end_query<FIRST>(c.a, t.batch, begin) : 0;
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
            const float *lse = shared.lse[at.stage] + column;
#pragma unroll
            for (int i = 0; i < QUERIES / 8; i++) {
                float2 own_lse = *reinterpret_cast<const float2 *>(lse + 8 * i);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    s[4 * i + j] = exp2_fast(fmaf(s[4 * i + j], factor, j % 2 ? -own_lse.y : -own_lse.x));
            }
            if ((CAUSAL && begin + 63 > m * QUERIES + offset) || (LAST && (m + 1) * QUERIES > whole)) {
                int limit = own - m * QUERIES - column - offset;
                int past[2] = {0, 0};
                for (int r = 0; LAST && r < 2; r++)
                    past[r] = end_query<FIRST>(c.a, t.batch, own + 8 * r) - m * QUERIES - column;
#pragma unroll
                for (int i = 0; i < QUERIES / 2; i++) {
                    int query = i / 4 * 8 + i % 2, r = i / 2 % 2;
                    if (query - 8 * r < limit || (LAST && query >= past[r])) s[i] = 0;
                }
            }
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
            const float *delta = shared.delta[at.stage] + column;
#pragma unroll
            for (int i = 0; i < QUERIES / 8; i++) {
                float2 own_delta = *reinterpret_cast<const float2 *>(delta + 8 * i), low = unpack_two<T>(p[2 * i]),
                       high = unpack_two<T>(p[2 * i + 1]);
                ds[2 * i] = pack_two<T>(low.x * (dp[4 * i] - own_delta.x), low.y * (dp[4 * i + 1] - own_delta.y));
                ds[2 * i + 1] =
                    pack_two<T>(high.x * (dp[4 * i + 2] - own_delta.x), high.y * (dp[4 * i + 3] - own_delta.y));
            }
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
        for (int step = 1; step < steps; step++) {
            float s[QUERIES / 2];
            barrier_wait(shared.q_full[at.stage], at.parity);
            turn_begins();
            issue_dk(step > 1);
            issue_scores(s);
            turn_ends();
            products_wait<0>();
            pin(s);
            release_last();
            make_weights(s);
            use_weights(true);
        }
        issue_dk(steps > 1);
        products_commit();
        products_wait<0>();
        pin(dv);
        pin(dk);
        release_last();
        float dk_factor = c.a.scale / WEIGHT_ONE<T>, dv_factor = 1 / WEIGHT_ONE<T>;
        bool finite = true;
#pragma unroll
        for (int i = 0; i < D / 2; i++)
            finite = finite && ((fabsf(dk[i] * dk_factor) < CUDART_INF_F && fabsf(dv[i] * dv_factor) < CUDART_INF_F) ||
                                own + i / 2 % 2 * 8 >= c.a.keys);
        /* Both consumers are done with the keys and values: their memory takes the results. */
        group_sync(BOTH, 2 * WARPGROUP);
        bool left = group_any(OWN + group, !finite);
        if (thread == 0) set_flag(c.flags, c.a.keys, head, begin, left);
        if (!left) {
            if (c.a.dk && c.a.add_dk)
                write_rows<T>(c.a.dk, c.a.dk_step, false, true, t, c.a.keys, c.a.dim, begin, dk, dk_factor, dk_factor);
            else if (c.a.dk)
                store_rows<T, D>(c.dk, reinterpret_cast<char *>(shared.k + group * 64 * D), t, group, begin, dk,
                                 dk_factor, dk_factor);
            if (c.a.dv && c.a.add_dv)
                write_rows<T>(c.a.dv, c.a.dv_step, false, true, t, c.a.keys, c.a.dim, begin, dv, dv_factor, dv_factor);
            else if (c.a.dv)
                store_rows<T, D>(c.dv, reinterpret_cast<char *>(shared.v + group * 64 * D), t, group, begin, dv,
                                 dv_factor, dv_factor);
        }
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

/* SPDX-License-Identifier: MIT */
/*
 * attention's dq on Hopper: for 64 queries per consumer warpgroup the scores and dP of one block of keys after another,
 * dS in registers, and its product with the keys. The scores of the next block are issued before the last product of
 * the one before is done. lse and <dy, y> of the rows come from attention_rows() (hopper.cu).
 */
#ifndef VJP_CUDA_HOPPER_DQ_CUH
#define VJP_CUDA_HOPPER_DQ_CUH

#include "cuda/attention/hopper_tiles.cuh"

namespace vjp {
namespace hopper {

struct dq_call {
    CUtensorMap q, dy, k, v, dq;
    tile_order order;
    row_numbers rows;
    attention_call a;
    int *flags; /* see set_flag() */
};

template <int D> struct dq_shape {
    static constexpr int CONSUMERS = 2, ROWS = 64 * CONSUMERS, KEYS = D == 64 ? 128 : 96, STAGES = D == 64 ? 4 : 2;
    static constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
};

template <class T, int D> struct dq_shared {
    using shape = dq_shape<D>;
    alignas(TILE_ALIGNMENT) T q[shape::ROWS * D];
    alignas(TILE_ALIGNMENT) T dy[shape::ROWS * D];
    alignas(TILE_ALIGNMENT) T dq[shape::ROWS * D];
    alignas(TILE_ALIGNMENT) T k[shape::STAGES][shape::KEYS * D];
    alignas(TILE_ALIGNMENT) T v[shape::STAGES][shape::KEYS * D];
    uint64_t q_full, q_empty, k_full[shape::STAGES], k_empty[shape::STAGES], v_full[shape::STAGES],
        v_empty[shape::STAGES];
};

#if VJP_HOPPER

template <class T, int D, visible V> __device__ void dq_produce(const dq_call &c, dq_shared<T, D> &shared) {
    using shape = dq_shape<D>;
    ring<shape::STAGES> at;
    uint32_t q_parity = 0;
    constexpr int KV_BYTES = shape::KEYS * D * 2;
    constexpr bool CAUSAL = V != visible::all, FIRST = V == visible::first, LAST = FIRST || V == visible::window;
    for (int round = 0; c.order.has(round); round++) {
        int index = c.order.index(round);
        if (index >= c.order.count()) continue;
        tile t = c.order.at(index);
        int kv_head = t.head / (int)c.a.group;
        barrier_wait(shared.q_empty, q_parity ^ 1);
        barrier_expect(shared.q_full, 2 * shape::ROWS * D * 2);
#pragma unroll
        for (int d = 0; d < D; d += SLICE) {
            load_box(shared.q + d * shape::ROWS, c.q, shared.q_full, d, t.head, t.block * shape::ROWS, t.batch);
            load_box(shared.dy + d * shape::ROWS, c.dy, shared.q_full, d, t.head, t.block * shape::ROWS, t.batch);
        }
        q_parity ^= 1;
        int begin = LAST ? first_keys<shape::KEYS, FIRST>(c.a, t.batch, t.block * shape::ROWS) : 0;
        for (int n = key_blocks<shape::KEYS>(c.a, CAUSAL, (t.block + 1) * shape::ROWS) - 1; n >= begin; n--) {
            barrier_wait(shared.k_empty[at.stage], at.parity ^ 1);
            barrier_expect(shared.k_full[at.stage], KV_BYTES);
#pragma unroll
            for (int d = 0; d < D; d += SLICE)
                load_box(shared.k[at.stage] + d * shape::KEYS, c.k, shared.k_full[at.stage], d, kv_head,
                         n * shape::KEYS, t.batch);
            barrier_wait(shared.v_empty[at.stage], at.parity ^ 1);
            barrier_expect(shared.v_full[at.stage], KV_BYTES);
#pragma unroll
            for (int d = 0; d < D; d += SLICE)
                load_box(shared.v[at.stage] + d * shape::KEYS, c.v, shared.v_full[at.stage], d, kv_head,
                         n * shape::KEYS, t.batch);
            at.advance();
        }
    }
}

template <class T, int D, visible V> __device__ void dq_consume(const dq_call &c, dq_shared<T, D> &shared) {
    using shape = dq_shape<D>;
    constexpr int KEYS = shape::KEYS;
    constexpr bool CAUSAL = V != visible::all, FIRST = V == visible::first, LAST = FIRST || V == visible::window;
    int group = warpgroup() - 1, thread = threadIdx.x % WARPGROUP, lane = thread % 32;
    ring<shape::STAGES> k_at, v_at;
    uint32_t q_parity = 0;
    uint32_t q = shared_address(shared.q), dy = shared_address(shared.dy);
    float factor = c.a.scale * LOG2_E;
    int offset = (int)(c.a.keys - c.a.time), column = thread % 4 * 2;
    if (group == 1) group_arrive(TURN, 2 * WARPGROUP);
    for (int round = 0; c.order.has(round); round++) {
        int index = c.order.index(round);
        if (index >= c.order.count()) continue;
        tile t = c.order.at(index);
        int head = t.batch * (int)c.a.heads + t.head;
        int n = key_blocks<KEYS>(c.a, CAUSAL, (t.block + 1) * shape::ROWS) - 1;
        int begin = LAST ? first_keys<KEYS, FIRST>(c.a, t.batch, t.block * shape::ROWS) : 0;
        int first = t.block * shape::ROWS + group * 64, own = first + thread / 32 * 16 + lane / 4;
        int all = keys_seen(CAUSAL, first, offset, (int)c.a.keys);
        int seen[2] = {keys_seen(CAUSAL, own, offset, (int)c.a.keys),
                       keys_seen(CAUSAL, own + 8, offset, (int)c.a.keys)};
        int whole = LAST ? first_key<FIRST>(c.a, t.batch, first + 63) : 0;
        const float *lse_at = c.rows.lse + head * c.rows.padded + own;
        const float *delta_at = c.rows.delta + head * c.rows.padded + own;
        float lse[2] = {lse_at[0], lse_at[8]}, delta[2] = {delta_at[0], delta_at[8]};
        float s[KEYS / 2], dp[KEYS / 2], dq[D / 2];
        uint32_t ds[KEYS / 4];
        sums_aside<D / 2, shape::THREADS> aside(c.a.aside);
        auto chain = [&]() {
            return first_chain<KEYS>(key_blocks<KEYS>(c.a, CAUSAL, (t.block + 1) * shape::ROWS) - 1);
        };
        auto issue_scores = [&]() {
            uint32_t k = shared_address(shared.k[k_at.stage]), v = shared_address(shared.v[v_at.stage]);
            barrier_wait(shared.k_full[k_at.stage], k_at.parity);
            products_begin();
#pragma unroll
            for (int step = 0; step < D / 16; step++)
                product<T, false>(s, over_columns(q, shape::ROWS, group * 64, step), over_columns(k, KEYS, 0, step),
                                  step > 0);
            products_commit();
            barrier_wait(shared.v_full[v_at.stage], v_at.parity);
#pragma unroll
            for (int step = 0; step < D / 16; step++)
                product<T, false>(dp, over_columns(dy, shape::ROWS, group * 64, step), over_columns(v, KEYS, 0, step),
                                  step > 0);
            products_commit();
        };
        auto issue_gradient = [&](bool keep) {
            uint32_t k = shared_address(shared.k[(k_at.stage + shape::STAGES - 1) % shape::STAGES]);
            products_begin();
#pragma unroll
            for (int step = 0; step < KEYS / 16; step++)
                product<T, true>(dq, ds + 4 * step, over_rows(k, KEYS, step), keep || step > 0);
            products_commit();
        };
        auto release_last =
            [&]() { /* the keys of the block before: the product with them is done */
                    if (lane == 0) barrier_arrive(shared.k_empty[(k_at.stage + shape::STAGES - 1) % shape::STAGES]);
            };
        auto make_ds = [&]() {
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++)
                s[i] = exp2_fast(fmaf(s[i], factor, -lse[i / 2 % 2]));
            products_wait<0>();
            pin(dp);
            if (lane == 0) barrier_arrive(shared.v_empty[v_at.stage]);
            v_at.advance();
            k_at.advance();
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++)
                dp[i] = s[i] * (dp[i] - delta[i / 2 % 2]);
            if ((n + 1) * KEYS > all || (LAST && n * KEYS < whole)) {
                int low[2] = {0, 0};
                for (int r = 0; LAST && r < 2; r++)
                    low[r] = first_key<FIRST>(c.a, t.batch, own + 8 * r);
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++) {
                    int key = n * KEYS + i / 4 * 8 + column + i % 2, r = i / 2 % 2;
                    if (key >= seen[r] || (LAST && key < low[r])) dp[i] = 0;
                }
            }
            fragments<T>(ds, dp);
        };
        barrier_wait(shared.q_full, q_parity);
        q_parity ^= 1;
        group_sync(TURN + group, 2 * WARPGROUP);
        issue_scores();
        group_arrive(TURN + 1 - group, 2 * WARPGROUP);
        products_wait<1>();
        pin(s);
        make_ds();
        bool keep = false;
        for (n--; n >= begin; n--) {
            group_sync(TURN + group, 2 * WARPGROUP);
            issue_gradient(keep);
            issue_scores();
            group_arrive(TURN + 1 - group, 2 * WARPGROUP);
            products_wait<1>();
            pin(s);
            release_last();
            make_ds();
            keep = !in_chains<T>(c.a) || n % CHAIN_BLOCKS<KEYS>;
            if (!keep) {
                pin(dq);
                aside.add(dq, n == chain());
            }
        }
        issue_gradient(keep);
        products_wait<0>();
        pin(dq);
        release_last();
        if (in_chains<T>(c.a) && chain() >= begin) aside.add_to(dq);
        if (lane == 0) barrier_arrive(shared.q_empty);
        float back = c.a.scale / WEIGHT_ONE<T>;
        bool finite = true;
#pragma unroll
        for (int i = 0; i < D / 2; i++)
            finite &= is_finite(dq[i] * back);
        if (thread == 0) stores_read();
        bool left = group_any(OWN + group, !finite);
        if (thread == 0) set_flag(c.flags, c.a.time, head, first, left);
        if (left) continue;
        if (c.a.add_dq)
            write_rows<T>(c.a.dq, c.a.dq_step, false, true, t, c.a.time, c.a.dim, first, dq, back, back);
        else
            store_rows<T, D>(c.dq, reinterpret_cast<char *>(shared.dq + group * 64 * D), t, group, first, dq, back,
                             back);
    }
}

#endif

template <class T, int D, visible V>
__global__ void __launch_bounds__(dq_shape<D>::THREADS, 1) backward_dq(const __grid_constant__ dq_call c) {
#if VJP_HOPPER
    using shape = dq_shape<D>;
    auto &shared = aligned_shared<dq_shared<T, D>>();
    if (threadIdx.x == 0) {
        barrier_init(shared.q_full, 1);
        barrier_init(shared.q_empty, 4 * shape::CONSUMERS);
        for (int i = 0; i < shape::STAGES; i++) {
            barrier_init(shared.k_full[i], 1);
            barrier_init(shared.v_full[i], 1);
            barrier_init(shared.k_empty[i], 4 * shape::CONSUMERS);
            barrier_init(shared.v_empty[i], 4 * shape::CONSUMERS);
        }
        barriers_are_ready();
    }
    __syncthreads();
    begin_chained();
    if (threadIdx.x < WARPGROUP) {
        give_registers<24>();
        if (threadIdx.x == 0) dq_produce<T, D, V>(c, shared);
    } else {
        take_registers<240>();
        dq_consume<T, D, V>(c, shared);
        if (threadIdx.x % WARPGROUP == 0) stores_done();
    }
#endif
}

} // namespace hopper
} // namespace vjp

#endif

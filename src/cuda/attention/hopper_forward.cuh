/* SPDX-License-Identifier: MIT */
/*
 * attention's forward on Hopper. A block computes tiles of 64 rows for each of its consumer warpgroups, one tile after
 * another; a producer thread keeps the copy engine ahead of them: Q of this tile and the next, K and V in a ring.
 *
 * A consumer has two products in flight: while the tensor cores compute the scores of the next keys and the weighted
 * sum of the last ones, it has no other work; while it computes weights, the other consumers' products run. Named
 * barriers let the consumers issue their products in turn, so that they stay out of step.
 *
 * Tiles are ordered so that long ones (late queries of a causal pass) come first, and heads that share keys run
 * together, in sections whose keys and values stay in the second-level cache. The last tile ends with the last query,
 * and the rows that are too many are before the first one, where a causal pass has least to do. A consumer whose rows
 * are such, or do not see the tile's last keys, lets the others go on without it.
 */
#ifndef VJP_CUDA_HOPPER_FORWARD_CUH
#define VJP_CUDA_HOPPER_FORWARD_CUH

#include "cuda/attention/hopper_tiles.cuh"

namespace vjp {
namespace hopper {

struct forward_call {
    CUtensorMap q, k, v, y;
    tile_order order;
    int before; /* rows of the first tile that come before the first query, a multiple of 64 */
    attention_call a;
    int *flags; /* see set_flag() */
};

template <int D> struct forward_shape {
    static constexpr int CONSUMERS = D == 64 ? 3 : 2, ROWS = 64 * CONSUMERS, KEYS = 128, STAGES = D == 64 ? 4 : 2;
    static constexpr int TILES = 2; /* of q */
    static constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
    static constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 24, CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 240;
};

template <class T, int D> struct forward_shared {
    using shape = forward_shape<D>;
    alignas(TILE_ALIGNMENT) T q[shape::TILES][shape::ROWS * D];
    alignas(TILE_ALIGNMENT) T y[shape::ROWS * D]; /* [consumer][64 rows] */
    alignas(TILE_ALIGNMENT) T k[shape::STAGES][shape::KEYS * D];
    alignas(TILE_ALIGNMENT) T v[shape::STAGES][shape::KEYS * D];
    uint64_t q_full[shape::TILES], q_empty[shape::TILES], k_full[shape::STAGES], k_empty[shape::STAGES],
        v_full[shape::STAGES], v_empty[shape::STAGES];
};

#if VJP_HOPPER

template <class T, int D, visible V>
__device__ void forward_produce(const forward_call &c, forward_shared<T, D> &shared) {
    using shape = forward_shape<D>;
    ring<shape::STAGES> at;
    ring<shape::TILES> q_at;
    constexpr int KV_BYTES = shape::KEYS * D * 2;
    constexpr bool CAUSAL = V != visible::all, FIRST = V == visible::first, LAST = FIRST || V == visible::window;
    for (int round = 0; c.order.has(round); round++) {
        int index = c.order.index(round);
        if (index >= c.order.count()) continue;
        tile t = c.order.at(index);
        int kv_head = t.head / (int)c.a.group, row = t.block * shape::ROWS - c.before;
        barrier_wait(shared.q_empty[q_at.stage], q_at.parity ^ 1);
        barrier_expect(shared.q_full[q_at.stage], shape::ROWS * D * 2);
#pragma unroll
        for (int d = 0; d < D; d += SLICE)
            load_box(shared.q[q_at.stage] + d * shape::ROWS, c.q, shared.q_full[q_at.stage], d, t.head, row, t.batch);
        q_at.advance();
        int begin = LAST ? first_keys<shape::KEYS, FIRST>(c.a, t.batch, max(row, 0)) : 0;
        for (int n = key_blocks<shape::KEYS>(c.a, CAUSAL, row + shape::ROWS) - 1; n >= begin; n--) {
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

/* Stores a consumer's 64 rows from `first` on, or sets the block's flag. */
template <class T, int D>
__device__ void forward_store(const forward_call &c, forward_shared<T, D> &shared, const tile &t, int group, int first,
                              float (&o)[D / 2], softmax_rows &rows) {
    int thread = threadIdx.x % WARPGROUP, lane = thread % 32, own = first + thread / 32 * 16 + lane / 4;
    float inverse[2];
    bool finite = true;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = rows.sum[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        inverse[r] = 1 / sum;
        if (c.a.lse && lane % 4 == 0 && own + 8 * r < c.a.time)
            c.a.lse[((int64_t)t.batch * c.a.heads + t.head) * c.a.time + own + 8 * r] =
                rows.max[r] * c.a.scale + logf(sum);
    }
#pragma unroll
    for (int i = 0; i < D / 2; i++)
        finite &= is_finite(o[i] * inverse[i / 2 % 2]);
    if (!c.a.y) return;
    if (thread == 0) stores_read();              /* the last tile's store has left the shared memory */
    bool left = group_any(OWN + group, !finite); /* all rows of this warpgroup are finite, or none is stored */
    if (thread == 0) set_flag(c.flags, c.a.time, t.batch * (int)c.a.heads + t.head, first, left);
    if (left) return;
    if (c.a.add_y)
        write_rows<T>(c.a.y, c.a.y_step, false, true, t, c.a.time, c.a.dim, first, o, inverse[0], inverse[1]);
    else
        store_rows<T, D>(c.y, reinterpret_cast<char *>(shared.y + group * 64 * D), t, group, first, o, inverse[0],
                         inverse[1]);
}

/* Where a ring is after so many blocks. A count takes fewer registers than a ring<>, and there are none left. */
template <int STAGES> struct place {
    static_assert(STAGES == 2 || STAGES == 4); /* a power of two: the count may begin again at 0 */
    int stage;
    uint32_t parity;

    __device__ explicit place(unsigned count) : stage(count % STAGES), parity(count / STAGES % 2) {
    }
};

template <class T, int D, visible V>
__device__ void forward_consume(const forward_call &c, forward_shared<T, D> &shared) {
    using shape = forward_shape<D>;
    using block_place = place<shape::STAGES>;
    constexpr int KEYS = shape::KEYS;
    constexpr bool CAUSAL = V != visible::all, FIRST = V == visible::first, LAST = FIRST || V == visible::window;
    int group = warpgroup() - 1, thread = threadIdx.x % WARPGROUP, lane = thread % 32;
    int next = (group + 1) % shape::CONSUMERS;
    unsigned block = 0, tiles = 0; /* so far */
    float factor = c.a.scale * LOG2_E;
    int offset = (int)(c.a.keys - c.a.time);
    if (group == shape::CONSUMERS - 1) group_arrive(TURN, 2 * WARPGROUP);
    for (int round = 0; c.order.has(round); round++) {
        int index = c.order.index(round);
        if (index >= c.order.count()) continue;
        tile t = c.order.at(index);
        int row = t.block * shape::ROWS - c.before, first = row + group * 64;
        int n = key_blocks<KEYS>(c.a, CAUSAL, row + shape::ROWS) - 1;
        int begin = LAST ? first_keys<KEYS, FIRST>(c.a, t.batch, max(row, 0)) : 0;
        /* The end of the blocks that its rows see, and the first key that all of them see. */
        int end = first < 0 ? begin : key_blocks<KEYS>(c.a, CAUSAL, first + 64);
        int whole = LAST ? first_key<FIRST>(c.a, t.batch, max(first, 0) + 63) : 0;
        sums_aside<D / 2, shape::THREADS> aside(c.a.aside);
        auto chain = [&]() { return first_chain<KEYS>(key_blocks<KEYS>(c.a, CAUSAL, first + 64) - 1); };
        float s[KEYS / 2], o[D / 2], correction[2];
        uint32_t p[KEYS / 4];
        softmax_rows rows = {{-CUDART_INF_F, -CUDART_INF_F}, {0, 0}};

        auto wait_for = [&](uint64_t *full, unsigned number) {
            block_place at(number);
            barrier_wait(full[at.stage], at.parity);
        };
        auto release = [&](uint64_t &barrier) {
            if (lane == 0) barrier_arrive(barrier);
        };
        auto issue_scores = [&]() {
            uint32_t q = shared_address(shared.q[tiles % shape::TILES]);
            uint32_t k = shared_address(shared.k[block % shape::STAGES]);
            products_begin();
#pragma unroll
            for (int step = 0; step < D / 16; step++)
                product<T, false>(s, over_columns(q, shape::ROWS, group * 64, step), over_columns(k, KEYS, 0, step),
                                  step > 0);
            products_commit();
        };
        /* Of the block before. */
        auto issue_sums = [&](bool keep) {
            uint32_t v = shared_address(shared.v[(block - 1) % shape::STAGES]);
            products_begin();
#pragma unroll
            for (int step = 0; step < KEYS / 16; step++)
                product<T, true>(o, p + 4 * step, over_rows(v, KEYS, step), keep || step > 0);
            products_commit();
        };
        auto weigh_block = [&]() {
            bool masked =
                (n + 1) * KEYS > keys_seen(CAUSAL, first, offset, (int)c.a.keys) || (LAST && n * KEYS < whole);
            int end[2] = {KEYS, KEYS}, low[2] = {0, 0};
            for (int r = 0; masked && r < 2; r++) { /* not kept: there are no registers for it */
                int own = first + thread / 32 * 16 + lane / 4 + 8 * r;
                end[r] = keys_seen(CAUSAL, own, offset, (int)c.a.keys) - n * KEYS;
                if (LAST) low[r] = FIRST ? first_key<true>(c.a, t.batch, own) - n * KEYS : end[r] - (int)c.a.window;
            }
            weigh(s, rows, correction, factor, masked,
                  [&](int r, int key) { return key >= end[r] || (LAST && key < low[r]); });
        };

        barrier_wait(shared.q_full[tiles % shape::TILES], tiles / shape::TILES % 2);
        /* It waits for what it does not need, too: letting go of a stage twice would count for another consumer. */
        for (; n >= end; n--, block++) {
            wait_for(shared.k_full, block);
            release(shared.k_empty[block % shape::STAGES]);
            wait_for(shared.v_full, block);
            release(shared.v_empty[block % shape::STAGES]);
            group_sync(TURN + group, 2 * WARPGROUP);
            group_arrive(TURN + next, 2 * WARPGROUP);
        }
        if (first < 0) {
            release(shared.q_empty[tiles++ % shape::TILES]);
            continue;
        }
        wait_for(shared.k_full, block);
        group_sync(TURN + group, 2 * WARPGROUP);
        issue_scores();
        group_arrive(TURN + next, 2 * WARPGROUP);
        products_wait<0>();
        pin(s);
        release(shared.k_empty[block++ % shape::STAGES]);
        weigh_block();
        fragments<T>(p, s);
        bool keep = false;
        for (n--; n >= begin; n--) {
            wait_for(shared.k_full, block);
            group_sync(TURN + group, 2 * WARPGROUP);
            issue_scores();
            wait_for(shared.v_full, block - 1);
            issue_sums(keep);
            group_arrive(TURN + next, 2 * WARPGROUP);
            products_wait<1>();
            pin(s);
            release(shared.k_empty[block % shape::STAGES]);
            weigh_block();
            products_wait<0>();
            pin(o);
            release(shared.v_empty[(block - 1) % shape::STAGES]);
            correct(o, correction);
            fragments<T>(p, s);
            keep = !in_chains<T>(c.a) || n % CHAIN_BLOCKS<KEYS>;
            if (!keep) aside.add_weighted(o, rows, factor, n == chain());
            block++;
        }
        release(shared.q_empty[tiles++ % shape::TILES]);
        wait_for(shared.v_full, block - 1);
        issue_sums(keep);
        products_wait<0>();
        pin(o);
        release(shared.v_empty[(block - 1) % shape::STAGES]);
        if (in_chains<T>(c.a) && chain() >= begin) aside.add_weighted_to(o, rows, factor);
        forward_store<T, D>(c, shared, t, group, first, o, rows);
    }
}

#endif

template <class T, int D, visible V>
__global__ void __launch_bounds__(forward_shape<D>::THREADS, 1) forward(const __grid_constant__ forward_call c) {
#if VJP_HOPPER
    using shape = forward_shape<D>;
    auto &shared = aligned_shared<forward_shared<T, D>>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < shape::TILES; i++) {
            barrier_init(shared.q_full[i], 1);
            barrier_init(shared.q_empty[i], 4 * shape::CONSUMERS);
        }
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
        give_registers<shape::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            prefetch_map(c.q);
            prefetch_map(c.k);
            prefetch_map(c.v);
            forward_produce<T, D, V>(c, shared);
        }
    } else {
        take_registers<shape::CONSUMER_REGISTERS>();
        forward_consume<T, D, V>(c, shared);
        if (threadIdx.x % WARPGROUP == 0) stores_done();
    }
#endif
}

} // namespace hopper
} // namespace vjp

#endif

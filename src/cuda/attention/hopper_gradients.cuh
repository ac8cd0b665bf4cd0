/* SPDX-License-Identifier: MIT */
/*
 * attention's dq, dk and dv in one kernel on Hopper, for dims up to 64: five products instead of the seven of
 * hopper_dq.cuh and hopper_dkv.cuh. A tile is 128 keys of one head of k. As in hopper_dkv.cuh a consumer warpgroup owns
 * 64 of the keys, with weights and dS transposed in registers; dS also goes through shared memory, where both consumers
 * find it for their half of the queries' dq.
 *
 * dq of a block of queries is a sum over tiles. They add to it in one fixed order, from the last keys down: a number
 * for each half block of queries says whose turn it is, a thread for each consumer waits for it and lets the copy
 * engine add. A block takes its tiles from a counter, those of a head from the last keys down, and goes through the
 * queries upwards. So whoever is waited for has begun earlier and will get there, however many blocks run at once; and
 * in a causal pass, where tile n begins with query block n, it is one step ahead, and blocks hardly wait.
 *
 * Steps follow each other without a pause between tiles. A step computes
 *   1. the scores, and behind them dk and dv of the step before; meanwhile the weights;
 *   2. dP, and behind it dq of the step before, for which the other consumer's dS is there by now; meanwhile dS.
 * The first step of a tile finds the sums of the last tile complete after 1 and stores them.
 *
 * Weights wait for dP in f16, whatever the type is: in bf16 their error would add to that of dS. There are no registers
 * for f32.
 */
#ifndef VJP_CUDA_HOPPER_GRADIENTS_CUH
#define VJP_CUDA_HOPPER_GRADIENTS_CUH

#include "cuda/attention/hopper_dkv.cuh"

namespace vjp {
namespace hopper {

struct gradients_call : dkv_call {
    dq_sums dq;
};

struct gradients_shape {
    static constexpr int D = 64, CONSUMERS = 2, KEYS = 64 * CONSUMERS, QUERIES = 128, STAGES = 3, TILES = 2;
    static constexpr int THREADS = WARPGROUP * (CONSUMERS + 1), SUM = 64 * D;
};

template <class T> struct gradients_shared {
    using shape = gradients_shape;
    alignas(TILE_ALIGNMENT) T k[shape::TILES][shape::KEYS * shape::D];
    alignas(TILE_ALIGNMENT) T v[shape::KEYS * shape::D];
    alignas(TILE_ALIGNMENT) T q[shape::STAGES][shape::QUERIES * shape::D];
    alignas(TILE_ALIGNMENT) T dy[shape::STAGES][shape::QUERIES * shape::D];
    alignas(TILE_ALIGNMENT) T ds[shape::QUERIES * shape::KEYS];      /* a tile of 128 columns: the queries */
    alignas(TILE_ALIGNMENT) float out[shape::CONSUMERS][shape::SUM]; /* a consumer's dq; or its dk and dv */
    alignas(16) float lse[shape::STAGES][shape::QUERIES];
    alignas(16) float delta[shape::STAGES][shape::QUERIES];
    int tile[shape::TILES]; /* its number, -1: there is none any more */
    uint64_t k_full[shape::TILES], k_empty[shape::TILES], v_full, v_empty, q_full[shape::STAGES],
        q_empty[shape::STAGES]; /* q with dy, lse and delta */
    uint64_t ds_full, ds_empty, dq_full[shape::CONSUMERS], dq_empty[shape::CONSUMERS];
};

#if VJP_HOPPER

template <class T, visible V> __device__ void gradients_produce(const gradients_call &c, gradients_shared<T> &shared) {
    using shape = gradients_shape;
    constexpr int QUERIES = shape::QUERIES, KEYS = shape::KEYS, D = shape::D;
    constexpr bool CAUSAL = V != visible::all, FIRST = V == visible::first, LAST = FIRST || V == visible::window;
    ring<shape::STAGES> at;
    ring<shape::TILES> keys;
    uint32_t v_parity = 0;
    int all = ((int)c.a.time + QUERIES - 1) / QUERIES;
    for (;; keys.advance(), v_parity ^= 1) {
        int index = atomicAdd(c.dq.next, 1);
        barrier_wait(shared.k_empty[keys.stage], keys.parity ^ 1);
        shared.tile[keys.stage] = index < c.order.count() ? index : -1;
        if (index >= c.order.count()) {
            barrier_arrive(shared.k_full[keys.stage]);
            return;
        }
        tile t = c.order.at(index);
        barrier_expect(shared.k_full[keys.stage], KEYS * D * 2);
        load_box(shared.k[keys.stage], c.k, shared.k_full[keys.stage], 0, t.head, t.block * KEYS, t.batch);
        int first = first_queries<KEYS, QUERIES>(c.a, CAUSAL, t.block);
        int end = LAST ? end_queries<KEYS, QUERIES, FIRST>(c.a, t) : all;
        for (int h = t.head * (int)c.a.group; h < (t.head + 1) * (int)c.a.group; h++) {
            int64_t row = (t.batch * c.a.heads + h) * c.rows.padded;
#pragma unroll 1
            for (int m = first; m < end; m++) {
                uint64_t &full = shared.q_full[at.stage];
                barrier_wait(shared.q_empty[at.stage], at.parity ^ 1);
                barrier_expect(full, 2 * QUERIES * D * 2 + 2 * QUERIES * 4);
                load_box(shared.q[at.stage], c.q, full, 0, h, m * QUERIES, t.batch);
                load_bytes(shared.lse[at.stage], c.rows.lse + row + m * QUERIES, QUERIES * 4, full);
                load_box(shared.dy[at.stage], c.dy, full, 0, h, m * QUERIES, t.batch);
                load_bytes(shared.delta[at.stage], c.rows.delta + row + m * QUERIES, QUERIES * 4, full);
                at.advance();
                if (m == first &&
                    h == t.head * (int)c.a.group) { /* not before: the last tile's last step needs its v */
                    barrier_wait(shared.v_empty, v_parity ^ 1);
                    barrier_expect(shared.v_full, KEYS * D * 2);
                    load_box(shared.v, c.v, shared.v_full, 0, t.head, t.block * KEYS, t.batch);
                }
            }
        }
    }
}

/* Adds a consumer's parts of dq to their sums, each when it is its turn. */
template <class T, visible V> __device__ void add_dq(const gradients_call &c, gradients_shared<T> &shared, int group) {
    using shape = gradients_shape;
    constexpr int QUERIES = shape::QUERIES, KEYS = shape::KEYS, BYTES = shape::SUM * (int)sizeof(float);
    constexpr bool CAUSAL = V != visible::all, FIRST = V == visible::first, LAST = FIRST || V == visible::window;
    ring<shape::TILES> keys;
    uint32_t parity = 0;
    for (;; keys.advance()) {
        barrier_wait(shared.k_full[keys.stage], keys.parity);
        int index = shared.tile[keys.stage];
        barrier_arrive(shared.k_empty[keys.stage]);
        if (index < 0) return;
        tile t = c.order.at(index);
        int first = first_queries<KEYS, QUERIES>(c.a, CAUSAL, t.block);
        int end = LAST ? end_queries<KEYS, QUERIES, FIRST>(c.a, t) : ((int)c.a.time + QUERIES - 1) / QUERIES;
        for (int h = t.head * (int)c.a.group; h < (t.head + 1) * (int)c.a.group; h++) {
            int row = (t.batch * (int)c.a.heads + h) * c.dq.blocks + group;
#pragma unroll 1
            for (int m = first; m < end; m++, parity ^= 1) {
                int last = CAUSAL ? ((m + 1) * QUERIES - 1 + (int)(c.a.keys - c.a.time)) / KEYS : c.order.blocks - 1;
                int turn = min(last, c.order.blocks - 1) - t.block, slot = row + 2 * m;
                float *sum = c.dq.sum + (int64_t)slot * shape::SUM;
                barrier_wait(shared.dq_full[group], parity);
                if (turn == 0) {
                    store_bytes(sum, shared.out[group], BYTES);
                } else {
                    wait_for_turn(c.dq.turn + slot, turn);
                    add_numbers(sum, shared.out[group], BYTES);
                }
                commit_stores();
                stores_read();
                barrier_arrive(shared.dq_empty[group]);
                stores_done();
                set_turn(c.dq.turn + slot, turn + 1);
            }
        }
    }
}

template <class T, visible V> __device__ void gradients_consume(const gradients_call &c, gradients_shared<T> &shared) {
    using shape = gradients_shape;
    constexpr int QUERIES = shape::QUERIES, KEYS = shape::KEYS, D = shape::D;
    constexpr bool CAUSAL = V != visible::all, FIRST = V == visible::first, LAST = FIRST || V == visible::window;
    int group = warpgroup() - 1, thread = threadIdx.x % WARPGROUP, lane = thread % 32;
    float dk[D / 2], dv[D / 2];
    uint32_t p[QUERIES / 4], ds[QUERIES / 4]; /* packed; ready as left operands when a step has ended */
    ring<shape::STAGES> at;
    ring<shape::TILES> keys_at;
    /* Of the step before: whether there is one, the parity of its number, its tile's number. */
    bool begun = false;
    uint32_t parity = 1;
    int last_index = 0;
#pragma unroll
    for (int i = 0; i < QUERIES / 4; i++)
        p[i] = ds[i] = 0;

    auto turn_begins = [&]() { group_sync(TURN + group, 2 * WARPGROUP); };
    auto turn_ends = [&]() { group_arrive(TURN + 1 - group, 2 * WARPGROUP); };
    auto arrive = [&](uint64_t &barrier) {
        if (lane == 0) barrier_arrive(barrier);
    };
    auto last_stage = [&]() { return (at.stage + shape::STAGES - 1) % shape::STAGES; };
    auto issue_dk_dv = [&](bool keep) {
        uint32_t q = shared_address(shared.q[last_stage()]), dy = shared_address(shared.dy[last_stage()]);
#pragma unroll
        for (int i = 0; i < QUERIES / 16; i++)
            product<T, true>(dk, ds + 4 * i, over_rows(q, QUERIES, i), keep || i > 0);
#pragma unroll
        for (int i = 0; i < QUERIES / 16; i++)
            product<T, true>(dv, p + 4 * i, over_rows(dy, QUERIES, i), keep || i > 0);
        products_commit();
    };
    auto issue_dq = [&](float(&dq)[D / 2], int k_stage) {
        uint32_t half = shared_address(shared.ds) + (uint32_t)(group * KEYS * 128);
        uint32_t k = shared_address(shared.k[k_stage]);
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++)
            product<T, true, true>(dq, over_rows(half, KEYS, i), over_rows(k, KEYS, i), i > 0);
        products_commit();
    };
    /* The copy engine has read this consumer's `out`: its sums of a tile, or its dq. */
    auto wait_out = [&](bool of_tile) {
        if (of_tile) {
            if (thread == 0) stores_read();
            group_sync(OWN + group, WARPGROUP);
        }
        barrier_wait(shared.dq_empty[group], parity ^ 1);
    };
    auto write_dq = [&](const float(&dq)[D / 2]) {
        float4 *out = reinterpret_cast<float4 *>(shared.out[group]);
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            out[i * WARPGROUP + thread] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
    };
    /* A tile's blocks of queries, over all heads that share its keys. */
    auto steps_of = [&](const tile &t) {
        int first = first_queries<KEYS, QUERIES>(c.a, CAUSAL, t.block);
        int end = LAST ? end_queries<KEYS, QUERIES, FIRST>(c.a, t) : ((int)c.a.time + QUERIES - 1) / QUERIES;
        return (end - first) * (int)c.a.group;
    };
    sums_aside<D / 2, shape::THREADS, 2> dk_aside(c.a.aside, 0), dv_aside(c.a.aside, 1);
    auto store_tile = [&]() {
        tile t = c.order.at(last_index);
        if (in_chains<T>(c.a) && steps_of(t) > CHAIN_BLOCKS<QUERIES>) {
            dk_aside.add_to(dk);
            dv_aside.add_to(dv);
        }
        key_rows keys = key_rows_of<V>(c.a, t, t.block * KEYS + group * 64);
        char *out = reinterpret_cast<char *>(shared.out[group]);
        wait_out(false);
        store_keys<T, D>(c.a, c.out, t, group, keys, dk, dv, out, out + 64 * D * 2);
    };

    if (group == 1) group_arrive(TURN, 2 * WARPGROUP);
    bool keep = false;
    for (;; keys_at.advance()) {
        barrier_wait(shared.k_full[keys_at.stage], keys_at.parity);
        int index = shared.tile[keys_at.stage];
        if (index < 0) break;
        tile t = c.order.at(index);
        key_rows keys = key_rows_of<V>(c.a, t, t.block * KEYS + group * 64);
        int first = first_queries<KEYS, QUERIES>(c.a, CAUSAL, t.block);
        int end = LAST ? end_queries<KEYS, QUERIES, FIRST>(c.a, t) : ((int)c.a.time + QUERIES - 1) / QUERIES;
        int left = (end - first) * (int)c.a.group, m = first;
        for (bool fresh = true; left > 0; fresh = false, left--) {
            {
                float s[QUERIES / 2];
                uint32_t q = shared_address(shared.q[at.stage]), k = shared_address(shared.k[keys_at.stage]);
                barrier_wait(shared.q_full[at.stage], at.parity);
                turn_begins();
                products_begin();
#pragma unroll
                for (int i = 0; i < D / 16; i++)
                    product<T, false>(s, over_columns(k, KEYS, group * 64, i), over_columns(q, QUERIES, 0, i), i > 0);
                products_commit();
                issue_dk_dv(keep);
                turn_ends();
                products_wait<1>();
                pin(s);
                weigh_keys<V>(s, c.a, keys, m * QUERIES, shared.lse[at.stage], true);
                products_wait<0>();
                pin(dk);
                pin(dv);
                fragments<f16>(p, s);
            }
            if (begun) arrive(shared.q_empty[last_stage()]);
            if (begun && fresh) store_tile();
            keep = !fresh && (!in_chains<T>(c.a) || left % CHAIN_BLOCKS<QUERIES>);
            if (!fresh && !keep) {
                bool first = left + CHAIN_BLOCKS<QUERIES> >= steps_of(t);
                dk_aside.add(dk, first);
                dv_aside.add(dv, first);
            }
            float dp[QUERIES / 2], dq[D / 2];
            uint32_t dy = shared_address(shared.dy[at.stage]), v = shared_address(shared.v);
            if (fresh) barrier_wait(shared.v_full, keys_at.stage);
            if (begun) barrier_wait(shared.ds_full, parity);
            turn_begins();
            products_begin();
#pragma unroll
            for (int i = 0; i < D / 16; i++)
                product<T, false>(dp, over_columns(v, KEYS, group * 64, i), over_columns(dy, QUERIES, 0, i), i > 0);
            products_commit();
            issue_dq(dq, keys_at.stage ^ (int)fresh);
            turn_ends();
            products_wait<1>();
            pin(dp);
            score_gradients<T, f16>(ds, p, dp, shared.delta[at.stage]);
            products_wait<0>();
            pin(dq);
            if (left == 1) arrive(shared.v_empty);
            if (begun) {
                arrive(shared.ds_empty);
                if (fresh) arrive(shared.k_empty[keys_at.stage ^ 1]);
                wait_out(fresh);
                write_dq(dq);
            }
#pragma unroll
            for (int i = 0; i < QUERIES / 4; i++) {
                float2 two = unpack_two<f16>(p[i]);
                p[i] = pack_two<T>(two.x, two.y);
            }
            if (begun) barrier_wait(shared.ds_empty, parity);
            write_packed(reinterpret_cast<char *>(shared.ds), KEYS, group * 64, ds);
            publish_shared();
            __syncwarp();
            if (begun) arrive(shared.dq_full[group]);
            arrive(shared.ds_full);
            parity ^= 1;
            begun = true;
            at.advance();
            if (++m == end) m = first;
        }
        last_index = index;
    }
    if (begun) {
        float dq[D / 2];
        barrier_wait(shared.ds_full, parity);
        products_begin();
        issue_dk_dv(keep);
        issue_dq(dq, keys_at.stage ^ 1);
        products_wait<0>();
        pin(dk);
        pin(dv);
        pin(dq);
        store_tile();
        wait_out(true);
        write_dq(dq);
        publish_shared();
        __syncwarp();
        arrive(shared.dq_full[group]);
    }
}

#endif

template <class T, visible V>
__global__ void __launch_bounds__(gradients_shape::THREADS, 1)
    backward_gradients(const __grid_constant__ gradients_call c) {
#if VJP_HOPPER
    using shape = gradients_shape;
    auto &shared = aligned_shared<gradients_shared<T>>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < shape::STAGES; i++) {
            barrier_init(shared.q_full[i], 1);
            barrier_init(shared.q_empty[i], 4 * shape::CONSUMERS);
        }
        for (int i = 0; i < shape::TILES; i++) {
            barrier_init(shared.k_full[i], 1);
            barrier_init(shared.k_empty[i], 5 * shape::CONSUMERS);
        }
        barrier_init(shared.v_full, 1);
        barrier_init(shared.v_empty, 4 * shape::CONSUMERS);
        barrier_init(shared.ds_full, 4 * shape::CONSUMERS);
        barrier_init(shared.ds_empty, 4 * shape::CONSUMERS);
        for (int i = 0; i < shape::CONSUMERS; i++) {
            barrier_init(shared.dq_full[i], 4);
            barrier_init(shared.dq_empty[i], 1);
        }
        barriers_are_ready();
    }
    __syncthreads();
    begin_chained();
    if (threadIdx.x < WARPGROUP) {
        give_registers<24>();
        int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) {
            if (warp == 0) gradients_produce<T, V>(c, shared);
            if (warp > 0 && warp <= shape::CONSUMERS) add_dq<T, V>(c, shared, warp - 1);
        }
    } else {
        take_registers<240>();
        gradients_consume<T, V>(c, shared);
        if (threadIdx.x % WARPGROUP == 0) stores_done();
    }
#endif
}

struct finish_call {
    CUtensorMap out;
    attention_call a;
    dq_sums dq;
    int *flags; /* see set_flag() */
};

/* dq from its sums, 64 queries of a head for each block. */
template <class T> __global__ void __launch_bounds__(WARPGROUP) finish_dq(const __grid_constant__ finish_call c) {
#if VJP_HOPPER
    constexpr int D = gradients_shape::D;
    __shared__ __align__(TILE_ALIGNMENT) T staged[64 * D];
    begin_chained();
    int blocks = (int)divide_up(c.a.time, (int64_t)64);
    int block = blockIdx.x % blocks, head = blockIdx.x / blocks, first = block * 64;
    tile t = {block, head % (int)c.a.heads, head / (int)c.a.heads};
    const float4 *sum = reinterpret_cast<const float4 *>(c.dq.sum) +
                        ((int64_t)head * c.dq.blocks + block) * (gradients_shape::SUM / 4) + threadIdx.x;
    float dq[D / 2], factor = c.a.scale / WEIGHT_ONE<T>;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < D / 8; i++)
        *reinterpret_cast<float4 *>(dq + 4 * i) = __ldcs(sum + i * WARPGROUP);
#pragma unroll
    for (int i = 0; i < D / 2; i++)
        finite &= is_finite(dq[i] * factor);
    bool left = group_any(OWN, !finite);
    if (threadIdx.x == 0) set_flag(c.flags, c.a.time, head, first, left);
    if (left) return;
    if (c.a.add_dq)
        write_rows<T>(c.a.dq, c.a.dq_step, false, true, t, c.a.time, c.a.dim, first, dq, factor, factor);
    else
        store_rows<T, D>(c.out, reinterpret_cast<char *>(staged), t, 0, first, dq, factor, factor);
    if (threadIdx.x == 0) stores_done();
#endif
}

} // namespace hopper
} // namespace vjp

#endif

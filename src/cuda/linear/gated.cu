/* SPDX-License-Identifier: MIT */
/*
 * A product that ends with swiglu's backward, on Hopper; gated.cuh has the contract.
 *
 * A block stays and computes tiles of 128 x 128 numbers of dy. One warp feeds stages of 64 terms by the copy engine.
 * Two warpgroups take turns: one multiplies a tile while the other turns its last tile into gradients. Two blocks,
 * whose tiles lie below one another, are a cluster: each loads its own rows of dz and half of w's columns for both.
 *
 * Gate and up come, and results leave, through shared memory in two parts of 64 rows, loaded by a second warp and
 * stored by a third: a tile moves 160 KiB, so while one part is computed the other is stored or loaded. A thread puts
 * its results where it has read.
 *
 * swiglu must take less time than the products of a tile, 8192 cycles for 1024 terms, or it is what the card waits for:
 * hence silu_to_16_bits(). Straight code for a thread's 128 numbers is 60 KiB, which the instruction cache holds.
 *
 * Warps besides those that multiply, as in gated_forward.cu, are too few for the gradients: with three of them this
 * pair took a third longer. A product that ended with rope gained nothing: docs/graph.md.
 */
#include "cuda/linear/gated.cuh"

#include "cuda/common/hopper.cuh"
#include "cuda/elementwise/silu.cuh"

namespace vjp {
namespace hopper {
namespace {

constexpr int TILE = 128, DEPTH = 64, STAGES = 4, CONSUMERS = 2, CLUSTER = 2, THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int HALF = TILE * DEPTH * 2; /* bytes of a stage: as many of dz, then of w */
constexpr int OUTPUTS = 3, SLICES = TILE / SLICE, PARTS = 2, ROWS = TILE / PARTS;

struct gated_call {
    CUtensorMap dz, w, in[2], out[OUTPUTS]; /* gate and up; dgate, dup and y */
    int columns, pairs;                     /* of tiles: in a row, and of all, two that lie below one another */
    int steps;
    bool writes_y;
};

struct gated_shared {
    char stage[STAGES][2 * HALF];
    char out[PARTS][OUTPUTS][SLICES][ROWS * 128]; /* results, and before them gate and up */
    uint64_t full[STAGES], empty[STAGES], in_full[PARTS], out_full[PARTS];
    uint64_t out_empty[PARTS][CONSUMERS]; /* a phase for each tile of a consumer: free for the other one */
};

#if VJP_HOPPER

constexpr int TURN = 1; /* named barriers: a consumer's turn to multiply */

struct gated_tile {
    int row, column;

    __device__ gated_tile(const gated_call &c, int pair)
        : row(pair / c.columns * CLUSTER + block_of_cluster()), column(pair % c.columns) {
    }
};

/* Calls work(tile, number) for the block's tiles from its `first` on, every `apart` of them. */
template <class Work> __device__ void for_tiles(const gated_call &c, int first, int apart, Work work) {
    int clusters = (int)gridDim.x / CLUSTER;
#pragma unroll 1
    for (int n = first, pair = (int)blockIdx.x / CLUSTER + first * clusters; pair < c.pairs;
         n += apart, pair += apart * clusters)
        work(gated_tile(c, pair), n);
}

__device__ inline void produce(const gated_call &c, gated_shared &shared) {
    int rank = block_of_cluster();
    ring<STAGES> at;
    for_tiles(c, 0, 1, [&](const gated_tile &t, int) {
#pragma unroll 1
        for (int step = 0; step < c.steps; step++, at.advance()) {
            uint64_t &full = shared.full[at.stage];
            char *dz = shared.stage[at.stage], *w = dz + HALF + rank * (HALF / CLUSTER);
            barrier_wait(shared.empty[at.stage], at.parity ^ 1);
            barrier_expect(full, 2 * HALF);
            load_box(dz, c.dz, full, step * DEPTH, 0, t.row * TILE, 0);
            load_box_in((1 << CLUSTER) - 1, w, c.w, full, t.column * TILE + rank * SLICE, 0, step * DEPTH, 0);
        }
    });
}

/* Waits until tile n may use a part of `out`: that of the tile before it, the other consumer's, is stored. */
__device__ inline void wait_out(gated_shared &shared, int part, int n) {
    if (n > 0) barrier_wait(shared.out_empty[part][(n - 1) % CONSUMERS], (uint32_t)((n - 1) / CONSUMERS) & 1);
}

__device__ inline void load_gates(const gated_call &c, gated_shared &shared) {
    for_tiles(c, 0, 1, [&](const gated_tile &t, int n) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            wait_out(shared, part, n);
            barrier_expect(shared.in_full[part], 2 * SLICES * ROWS * 128);
#pragma unroll
            for (int i = 0; i < 2 * SLICES; i++)
                load_box(shared.out[part][i / SLICES][i % SLICES], c.in[i / SLICES], shared.in_full[part],
                         t.column * TILE + i % SLICES * SLICE, 0, t.row * TILE + part * ROWS, 0);
        }
    });
}

__device__ inline void store_results(const gated_call &c, gated_shared &shared) {
    for_tiles(c, 0, 1, [&](const gated_tile &t, int n) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            barrier_wait(shared.out_full[part], n & 1);
#pragma unroll
            for (int i = 0; i < OUTPUTS; i++)
#pragma unroll
                for (int slice = 0; slice < SLICES; slice++)
                    if (i < 2 || c.writes_y)
                        store_box(c.out[i], shared.out[part][i][slice], (t.column * SLICES + slice) * SLICE, 0,
                                  t.row * TILE + part * ROWS, 0);
            commit_stores();
            stores_read();
            barrier_arrive(shared.out_empty[part][n % CONSUMERS]);
        }
    });
    stores_done();
}

/*
 * dy of a tile, 64 rows each. Consumers take turns: one that waited for a stage of its next tile while the other still
 * has that stage's phases before it would take an older phase for its own.
 */
template <class T>
__device__ void multiply_tile(const gated_call &c, gated_shared &shared, ring<STAGES> &at, int group,
                              float (&upper)[TILE / 2], float (&lower)[TILE / 2]) {
    int thread = threadIdx.x % WARPGROUP, last = 0;
    auto release = [&](int stage) {
        if (thread < CLUSTER) barrier_arrive_in(thread, shared.empty[stage]);
    };
    group_sync(TURN + group, CONSUMERS * WARPGROUP);
#pragma unroll 1
    for (int step = 0; step < c.steps; step++) {
        uint32_t dz = shared_address(shared.stage[at.stage]), w = dz + HALF;
        barrier_wait(shared.full[at.stage], at.parity);
        products_begin();
#pragma unroll
        for (int i = 0; i < DEPTH / 16; i++) {
            product<T, true>(upper, over_columns(dz, TILE, 0, i), over_rows(w, DEPTH, i), step > 0 || i > 0);
            product<T, true>(lower, over_columns(dz, TILE, 64, i), over_rows(w, DEPTH, i), step > 0 || i > 0);
        }
        products_commit();
        products_wait<1>();
        if (step > 0) release(last);
        last = at.stage;
        at.advance();
    }
    group_arrive(TURN + 1 - group, CONSUMERS * WARPGROUP);
    products_wait<0>();
    pin(upper);
    pin(lower);
    release(last);
}

/*
 * A part of dgate, dup and y, from gate and up in the same places. These are read BATCH at a time: the compiler may not
 * move a read before a write, and would wait for each.
 */
constexpr int BATCH = 8;

template <class T> __device__ void put_gradients(gated_shared &shared, int part, const float (&dy)[TILE / 2]) {
    int thread = threadIdx.x % WARPGROUP, own = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int begin = 0; begin < TILE / 4; begin += BATCH) {
        uint32_t *at[BATCH][OUTPUTS], gate[BATCH], up[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            uint32_t offset = tile_offset(ROWS, own + i % 2 * 8, (begin + i) / 2 * 8 + thread % 4 * 2);
            for (int k = 0; k < OUTPUTS; k++)
                at[i][k] = reinterpret_cast<uint32_t *>(shared.out[part][k][0] + offset);
            gate[i] = *at[i][0];
            up[i] = *at[i][1];
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float *two = dy + 2 * (begin + i);
            float2 d = unpack_two<T>(pack_two<T>(two[0], two[1])), g = unpack_two<T>(gate[i]), u = unpack_two<T>(up[i]);
            gated_slopes low = gated_gradient<T>(d.x, g.x, u.x), high = gated_gradient<T>(d.y, g.y, u.y);
            *at[i][0] = pack_two<T>(low.dgate, high.dgate);
            *at[i][1] = pack_two<T>(low.dup, high.dup);
            *at[i][2] = pack_two<T>(low.y, high.y);
        }
    }
}

template <class T> __device__ void consume(const gated_call &c, gated_shared &shared, int group) {
    ring<STAGES> at;
    at.skip(group * c.steps);
    if (group == 1) group_arrive(TURN, CONSUMERS * WARPGROUP);
    for_tiles(c, group, CONSUMERS, [&](const gated_tile &, int n) {
        float upper[TILE / 2], lower[TILE / 2];
        multiply_tile<T>(c, shared, at, group, upper, lower);
        at.skip(c.steps); /* the other consumer's */
        auto put_part = [&](int part, const float(&dy)[TILE / 2]) {
            wait_out(shared, part, n);
            barrier_wait(shared.in_full[part], n & 1);
            put_gradients<T>(shared, part, dy);
            publish_shared();
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(shared.out_full[part]);
            __syncwarp(); /* the next products need whole warps */
        };
        put_part(0, upper);
        put_part(1, lower);
    });
}

#endif

template <class T>
__global__ void VJP_IN_CLUSTERS(CLUSTER) __launch_bounds__(THREADS, 1)
    multiply_with_swiglu(const __grid_constant__ gated_call c) {
#if VJP_HOPPER
    auto &shared = aligned_shared<gated_shared>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.full[i], 1);
            barrier_init(shared.empty[i], CLUSTER);
        }
        for (int part = 0; part < PARTS; part++) {
            barrier_init(shared.in_full[part], 1);
            barrier_init(shared.out_full[part], WARPGROUP / 32);
            for (int i = 0; i < CONSUMERS; i++)
                barrier_init(shared.out_empty[part][i], 1);
        }
        barriers_are_ready();
    }
    cluster_sync();
    begin_chained();
    if (threadIdx.x < WARPGROUP) {
        give_registers<40>();
        int warp = (int)threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) {
            if (warp == 0) produce(c, shared);
            if (warp == 1) store_results(c, shared);
            if (warp == 2) load_gates(c, shared);
        }
    } else {
        take_registers<232>();
        consume<T>(c, shared, warpgroup() - 1);
    }
    __syncwarp();
    cluster_sync(); /* the other block may still write and arrive here */
#endif
}

} // namespace
} // namespace hopper

bool gated_product_pays(const vjp_device *device, const gated_product &p) {
    const device_state *state = state_of(device);
    if (!VJP_CUDA_HOPPER || state->capability != 90 || p.dtype == VJP_F32 || p.terms % 8 || p.columns % 8 ||
        p.terms < 1)
        return false;
    constexpr int64_t MAX_SIDE = INT32_MAX / 2; /* the copy engine's coordinates have 32 bits */
    if (p.rows > MAX_SIDE || p.columns > MAX_SIDE || p.terms > MAX_SIDE) return false;
    /* With fewer tiles some blocks have one more than the others, and all wait for these. */
    int64_t tiles = vjp_divide_up(p.rows, hopper::TILE) * vjp_divide_up(p.columns, hopper::TILE);
    return tiles >= 4 * state->multiprocessors && tiles <= INT32_MAX / 4;
}

vjp_status multiply_gated(const vjp_work *work, const gated_product &p, bool *done) {
    hopper::gated_call c{};
    const bool left = hopper::make_map(&c.dz, p.dz, p.terms, p.dtype, 1, p.rows, 1, p.terms, hopper::TILE);
    *done = left && hopper::make_map(&c.w, p.w, p.columns, p.dtype, 1, p.terms, 1, p.columns, hopper::DEPTH);
    const std::pair<CUtensorMap *, const void *> parts[] = {
        {&c.in[0], p.gate}, {&c.in[1], p.up}, {&c.out[0], p.dgate}, {&c.out[1], p.dup}, {&c.out[2], p.y}};
    for (auto [map, data] : parts)
        if (data && *done)
            *done = hopper::make_map(map, data, p.columns, p.dtype, 1, p.rows, 1, p.columns, hopper::ROWS);
    if (!*done) return VJP_OK;
    c.columns = (int)vjp_divide_up(p.columns, hopper::TILE);
    c.pairs = (int)vjp_divide_up(p.rows, hopper::TILE * hopper::CLUSTER) * c.columns;
    c.steps = (int)vjp_divide_up(p.terms, hopper::DEPTH);
    c.writes_y = p.y;
    int64_t clusters = vjp_min(c.pairs, vjp_max(1, state_of(work->device)->multiprocessors / hopper::CLUSTER));
    auto kernel = p.dtype == VJP_BF16 ? hopper::multiply_with_swiglu<bf16> : hopper::multiply_with_swiglu<f16>;
    return launch(work, true, kernel, clusters * hopper::CLUSTER, hopper::THREADS, sizeof(hopper::gated_shared), c);
}

} // namespace vjp

/* SPDX-License-Identifier: MIT */
/*
 * Products over rows on Hopper; long_sums.cuh has the contract.
 *
 * A block computes tiles of 128 x 192 results: four warps feed five stages of 64 rows by the copy engine, two
 * warpgroups multiply, 64 of the tile's rows each. Two blocks, whose tiles lie below one another, are a cluster: each
 * loads its own columns of a, and half of the rows of b for both. Blocks could take several tiles, but the caller gives
 * each one: for more, products of cuBLASLt that are added are faster.
 *
 * The tensor cores truncate what an addition shifts out, so a long chain of additions drifts towards 0. After
 * CHAIN_TERMS terms a chain is added to a sum in registers, rounded to nearest, and a new one begins.
 */
#include "cuda/gemm/long_sums.cuh"

#include "cuda/common/hopper.cuh"

namespace vjp {
namespace hopper {
namespace {

constexpr int TILE_M = 128, TILE_N = 192, DEPTH = 64, STAGES = 5, CONSUMERS = 2, CLUSTER = 2;
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;

struct long_sums_call {
    CUtensorMap a, b;
    float *result;
    int64_t m, n, m_step, n_step, item; /* of the result, and the distances between its elements and parts */
    int m_tiles, n_tiles, parts, steps, part_steps;
    float scale;
    bool add;
};

struct long_sums_shared {
    char a[STAGES][TILE_M * DEPTH * 2], b[STAGES][TILE_N * DEPTH * 2];
    uint64_t full[STAGES], empty[STAGES];
};

#if VJP_HOPPER

constexpr int PRODUCERS = 1 + TILE_N / SLICE; /* warps */
constexpr int CHAIN_TERMS = 1024;

/* A tile of a block, and its rows of a and b in units of DEPTH. */
struct long_sums_tile {
    int m, n, part, first, steps;

    __device__ long_sums_tile(const long_sums_call &c, int index) {
        int across = c.m_tiles / CLUSTER;
        m = index % across * CLUSTER + block_of_cluster();
        n = index / across % c.n_tiles;
        part = index / across / c.n_tiles;
        first = part * c.part_steps;
        steps = min(c.part_steps, c.steps - first);
    }
};

/* The tiles of the thread's cluster. */
template <class Work> __device__ void for_each_tile(const long_sums_call &c, Work work) {
    int count = c.m_tiles / CLUSTER * c.n_tiles * c.parts;
#pragma unroll 1
    for (int i = (int)blockIdx.x / CLUSTER; i < count; i += (int)gridDim.x / CLUSTER)
        work(long_sums_tile(c, i));
}

/*
 * The first warp loads the block's columns of a; each of the others half of the rows of 64 columns of b, for both
 * blocks. A thread that issued all of that would need longer than a step's products.
 */
__device__ void produce(const long_sums_call &c, long_sums_shared &shared, int warp) {
    constexpr int ROWS = DEPTH / CLUSTER;
    int slice = warp - 1, row = block_of_cluster() * ROWS;
    ring<STAGES> at;
    for_each_tile(c, [&](const long_sums_tile &t) {
#pragma unroll 1
        for (int step = t.first; step < t.first + t.steps; step++) {
            uint64_t &full = shared.full[at.stage];
            barrier_wait(shared.empty[at.stage], at.parity ^ 1);
            if (warp == 0) {
                barrier_expect(full, TILE_M * DEPTH * 2);
#pragma unroll
                for (int i = 0; i < TILE_M / SLICE; i++)
                    load_box(shared.a[at.stage] + i * DEPTH * 128, c.a, full, t.m * TILE_M + i * SLICE, 0, step * DEPTH,
                             0);
            } else {
                barrier_expect(full, SLICE * DEPTH * 2);
                load_box_in((1 << CLUSTER) - 1, shared.b[at.stage] + (slice * DEPTH + row) * 128, c.b, full,
                            t.n * TILE_N + slice * SLICE, 0, step * DEPTH + row, 0);
            }
            at.advance();
        }
    });
}

__device__ void write_sums(const long_sums_call &c, const long_sums_tile &t, int group,
                           const float (&sum)[TILE_N / 2]) {
    int thread = threadIdx.x % WARPGROUP, lane = thread % 32;
    int64_t row = (int64_t)t.m * TILE_M + group * 64 + thread / 32 * 16 + lane / 4;
    int64_t column = (int64_t)t.n * TILE_N + lane % 4 * 2;
    float *to = c.result + t.part * c.item + row * c.m_step + column * c.n_step;
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i++) {
        int down = i / 2 % 2 * 8, right = i / 4 * 8 + i % 2;
        if (row + down >= c.m || column + right >= c.n) continue;
        float *at = to + down * c.m_step + right * c.n_step;
        *at = fmaf(sum[i], c.scale, c.add ? *at : 0.f);
    }
}

template <class T> __device__ void consume(const long_sums_call &c, long_sums_shared &shared) {
    int group = warpgroup() - 1, thread = threadIdx.x % WARPGROUP;
    ring<STAGES> at;
    auto release = [&](int stage) {
        if (thread < CLUSTER) barrier_arrive_in(thread, shared.empty[stage]);
    };
    for_each_tile(c, [&](const long_sums_tile &t) {
        float sum[TILE_N / 2], chain[TILE_N / 2];
#pragma unroll
        for (int i = 0; i < TILE_N / 2; i++)
            sum[i] = 0;
#pragma unroll 1
        for (int done = 0; done < t.steps; done += CHAIN_TERMS / DEPTH) {
            int steps = min(CHAIN_TERMS / DEPTH, t.steps - done), last = at.stage;
            for (int step = 0; step < steps; step++) {
                uint32_t a = shared_address(shared.a[at.stage]) + (uint32_t)(group * DEPTH * 128);
                uint32_t b = shared_address(shared.b[at.stage]);
                barrier_wait(shared.full[at.stage], at.parity);
                products_begin();
#pragma unroll
                for (int i = 0; i < DEPTH / 16; i++)
                    product<T, true, true>(chain, over_rows(a, DEPTH, i), over_rows(b, DEPTH, i), step > 0 || i > 0);
                products_commit();
                products_wait<1>();
                if (step > 0) release(last);
                last = at.stage;
                at.advance();
            }
            products_wait<0>();
            pin(chain);
            release(last);
#pragma unroll
            for (int i = 0; i < TILE_N / 2; i++)
                sum[i] += chain[i];
        }
        write_sums(c, t, group, sum);
    });
}

#endif

template <class T>
__global__ void VJP_IN_CLUSTERS(CLUSTER) __launch_bounds__(THREADS, 1)
    sum_over_rows(const __grid_constant__ long_sums_call c) {
#if VJP_HOPPER
    auto &shared = aligned_shared<long_sums_shared>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.full[i], PRODUCERS);
            barrier_init(shared.empty[i], CONSUMERS * CLUSTER);
        }
        barriers_are_ready();
    }
    cluster_sync();
    begin_chained();
    if (threadIdx.x < WARPGROUP) {
        give_registers<40>();
        int warp = (int)threadIdx.x / 32;
        if (warp < PRODUCERS && threadIdx.x % 32 == 0) produce(c, shared, warp);
    } else {
        take_registers<232>();
        consume<T>(c, shared);
    }
    __syncwarp();
    cluster_sync(); /* the other block may still write and arrive here */
#endif
}

} // namespace
} // namespace hopper

namespace {

/* The longer side of the result lies along the longer side of the tiles: then the tiles at work read the least. */
struct tiling_of_sums {
    bool swapped;
    int64_t m_tiles, n_tiles;

    explicit tiling_of_sums(const product &p) {
        swapped = p.m > p.n;
        m_tiles = vjp_round_up(vjp_divide_up(swapped ? p.n : p.m, hopper::TILE_M), hopper::CLUSTER);
        n_tiles = vjp_divide_up(swapped ? p.m : p.n, hopper::TILE_N);
    }
};

constexpr int64_t MAX_PARTS = 4, LEAST_TERMS = 4096; /* of a part, where there are several */
constexpr double LEAST_USE = 0.8;

} // namespace

/*
 * Each block gets one tile, or most of the card waits for those with two. The use is the share of the card's
 * multiplications that count: multiprocessors with a tile, and the parts of tiles inside the result.
 */
int64_t long_sum_parts(const vjp_work *work, const product &p) {
    const device_state *state = state_of(work->device);
    if (!VJP_CUDA_HOPPER || state->capability != 90 || p.storage == VJP_F32 || !p.f32 || p.items != 1 || p.factors ||
        p.bias || p.addend || !p.a.transposed || p.b.transposed ||
        p.k <= max_tensor_terms(work->device, p.storage, true) || p.a.row % 8 || p.b.row % 8)
        return 0;
    tiling_of_sums t(p);
    int64_t tiles = t.m_tiles * t.n_tiles;
    int64_t parts = vjp_min(vjp_min(MAX_PARTS, state->multiprocessors / tiles), vjp_max(1, p.k / LEAST_TERMS));
    double inside = (double)p.m * (double)p.n / (double)(tiles * hopper::TILE_M * hopper::TILE_N);
    return parts * tiles * inside > LEAST_USE * state->multiprocessors ? parts : 0;
}

vjp_status multiply_long_sums(const vjp_work *work, const product &p, int64_t parts) {
    tiling_of_sums t(p);
    const factor &a = t.swapped ? p.b : p.a, &b = t.swapped ? p.a : p.b;
    hopper::long_sums_call c{};
    c.m = t.swapped ? p.n : p.m;
    c.n = t.swapped ? p.m : p.n;
    if (!hopper::make_map(&c.a, a.data, a.row, p.storage, 1, p.k, 1, c.m, hopper::DEPTH) ||
        !hopper::make_map(&c.b, b.data, b.row, p.storage, 1, p.k, 1, c.n, hopper::DEPTH / hopper::CLUSTER))
        return vjp_refuse(work, VJP_DEVICE_FAILED, "%s: the driver refused the description of a tensor",
                          work->device->name);
    c.result = static_cast<float *>(p.result);
    c.m_step = t.swapped ? 1 : p.n;
    c.n_step = t.swapped ? p.n : 1;
    c.item = p.item;
    c.m_tiles = (int)t.m_tiles;
    c.n_tiles = (int)t.n_tiles;
    c.parts = (int)parts;
    c.steps = (int)vjp_divide_up(p.k, hopper::DEPTH);
    c.part_steps = (int)vjp_divide_up(c.steps, parts);
    c.scale = p.scale;
    c.add = p.add;
    int64_t blocks = vjp_min(parts * t.m_tiles * t.n_tiles, state_of(work->device)->multiprocessors / 2 * 2);
    size_t shared = sizeof(hopper::long_sums_shared);
    if (p.storage == VJP_BF16)
        return launch(work, true, hopper::sum_over_rows<bf16>, blocks, hopper::THREADS, shared, c);
    return launch(work, true, hopper::sum_over_rows<f16>, blocks, hopper::THREADS, shared, c);
}

} // namespace vjp

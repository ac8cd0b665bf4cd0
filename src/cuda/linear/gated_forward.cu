/* SPDX-License-Identifier: MIT */
/*
 * Two products on Hopper that end with swiglu; gated.cuh has the contract.
 *
 * A block stays and computes tiles of 128 rows by 128 columns of gate and as many of up: one warp feeds stages of 64
 * terms by the copy engine, two warpgroups multiply, 64 rows by all 256 columns each. Two blocks, whose tiles lie below
 * one another, are a cluster: each loads its own rows of x, and one the weights of gate, the other those of up, for
 * both.
 *
 * Tiles that wide read the least for each multiplication, and so draw the least power: with tiles of 128 x 128 a
 * product of 16384 x 2816 x 1024, repeated without a pause on a card at its limit, took 157 us and not 143. But the
 * sums fill the registers, so no warpgroup can multiply while another ends a tile. Therefore ending is short: sums go
 * to shared memory, rounded, and three warps besides the loading one store them, and compute y from there, while the
 * next tile is multiplied. swiglu's backward is too much for three warps: gated.cu has smaller tiles.
 *
 * Tiles are taken from the end, as by other kernels that a product follows (docs/training.md).
 */
#include "cuda/linear/gated.cuh"

#include "cuda/common/hopper.cuh"
#include "cuda/elementwise/silu.cuh"

namespace vjp {
namespace hopper {
namespace {

constexpr int TILE = 128, WIDTH = 2 * TILE, DEPTH = 64, STAGES = 3, CONSUMERS = 2, CLUSTER = 2;
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP, ROWS = TILE / CONSUMERS, SLICES = TILE / SLICE;

/* Tiles: pairs that lie below one another, in a row of all, in a row of a band; and the stages of each. */
struct forward_call {
    CUtensorMap x, weight[CLUSTER], gate, up, y;
    int rows, columns, band, steps;
    bool writes_gate, writes_up;
};

/*
 * Gate and up leave in slices of 64 x 64; y takes the place of gate. A slice has two barriers `written`, each for every
 * second tile: a warp that ends tiles need not have waited for the tile before, and would take the end of its phase for
 * that of its own. The phase of two tiles before is over, because one warpgroup is at most STAGES stages ahead of the
 * other, and a tile has more.
 */
struct forward_shared {
    char x[STAGES][TILE * DEPTH * 2], weight[STAGES][WIDTH * DEPTH * 2];
    char gate[CONSUMERS][SLICES][ROWS * 128], up[CONSUMERS][SLICES][ROWS * 128];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t written[2][CONSUMERS][SLICES], free[CONSUMERS][SLICES];
};

#if VJP_HOPPER

constexpr int ENDING_WARPS = 3;

struct forward_tile {
    int row, column;

    /* Bands of columns, in each row by row: the tiles at work need few rows of x, and weights that stay in L2. */
    __device__ forward_tile(const forward_call &c, int index) {
        int from_start = c.rows * c.columns - 1 - index;
        int size = c.rows * c.band, band = from_start / size, rest = from_start % size;
        int width = min(c.band, c.columns - band * c.band);
        row = rest / width * CLUSTER + block_of_cluster();
        column = band * c.band + rest % width;
    }
};

/* Calls work(tile, its number) for the block's tiles. */
template <class Work> __device__ void for_tiles(const forward_call &c, Work work) {
#pragma unroll 1
    for (int n = 0, i = (int)blockIdx.x / CLUSTER; i < c.rows * c.columns; n++, i += (int)gridDim.x / CLUSTER)
        work(forward_tile(c, i), n);
}

__device__ inline void feed_stages(const forward_call &c, forward_shared &shared) {
    int rank = block_of_cluster();
    ring<STAGES> at;
    for_tiles(c, [&](const forward_tile &t, int) {
#pragma unroll 1
        for (int step = 0; step < c.steps; step++, at.advance()) {
            uint64_t &full = shared.full[at.stage];
            barrier_wait(shared.empty[at.stage], at.parity ^ 1);
            barrier_expect(full, (TILE + WIDTH) * DEPTH * 2);
            load_box(shared.x[at.stage], c.x, full, step * DEPTH, 0, t.row * TILE, 0);
            load_box_in((1 << CLUSTER) - 1, shared.weight[at.stage] + rank * (TILE * DEPTH * 2), c.weight[rank], full,
                        step * DEPTH, 0, t.column * TILE, 0);
        }
    });
}

/* The sums of 64 rows of a tile: 128 columns of gate, then those of up. */
template <class T>
__device__ void multiply_tile(const forward_call &c, forward_shared &shared, ring<STAGES> &at, int group,
                              float (&sum)[WIDTH / 2]) {
    int thread = threadIdx.x % WARPGROUP, last = 0;
    auto release = [&](int stage) {
        if (thread < CLUSTER) barrier_arrive_in(thread, shared.empty[stage]);
    };
#pragma unroll 1
    for (int step = 0; step < c.steps; step++) {
        uint32_t x = shared_address(shared.x[at.stage]) + (uint32_t)(group * ROWS * 128);
        uint32_t weight = shared_address(shared.weight[at.stage]);
        barrier_wait(shared.full[at.stage], at.parity);
        products_begin();
#pragma unroll
        for (int i = 0; i < DEPTH / 16; i++)
            product<T, false>(sum, over_columns(x, TILE, 0, i), over_columns(weight, WIDTH, 0, i), step > 0 || i > 0);
        products_commit();
        products_wait<1>();
        if (step > 0) release(last);
        last = at.stage;
        at.advance();
    }
    products_wait<0>();
    pin(sum);
    release(last);
}

template <class T> __device__ void multiply_tiles(const forward_call &c, forward_shared &shared) {
    int group = warpgroup() - 1;
    ring<STAGES> at;
    for_tiles(c, [&](const forward_tile &, int n) {
        float sum[WIDTH / 2];
        multiply_tile<T>(c, shared, at, group, sum);
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) {
            barrier_wait(shared.free[group][slice], (uint32_t)(n & 1) ^ 1);
            write_rounded<T>(shared.gate[group][slice], sum + slice * (SLICE / 2));
            write_rounded<T>(shared.up[group][slice], sum + (SLICES + slice) * (SLICE / 2));
            publish_shared();
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(shared.written[n & 1][group][slice]);
            __syncwarp(); /* the next products need whole warps */
        }
    });
}

/* Where the lane's 16 bytes of four rows from `row` on lie in a slice. */
__device__ inline int slice_offset(int row) {
    int lane = threadIdx.x % 32, own = row + lane / 8;
    return own * 128 + (lane % 8 ^ own % 8) * 16;
}

template <class T> __device__ uint4 gated_values(const uint4 &gate, const uint4 &up) {
    auto two = [](uint32_t gates, uint32_t ups) {
        float2 g = unpack_two<T>(gates), u = unpack_two<T>(ups);
        return pack_two<T>(gated_value<T>(g.x, u.x), gated_value<T>(g.y, u.y));
    };
    return {two(gate.x, up.x), two(gate.y, up.y), two(gate.z, up.z), two(gate.w, up.w)};
}

/* Writes y in the place of gate, half of the rows at a time, when the copy engine has read gate and up. */
template <class T> __device__ void write_values(char *gate, const char *up) {
    constexpr int COUNT = ROWS / 2 / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 y[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int at = slice_offset((half * COUNT + i) * 4);
            y[i] =
                gated_values<T>(*reinterpret_cast<const uint4 *>(gate + at), *reinterpret_cast<const uint4 *>(up + at));
        }
        if (half == 0 && threadIdx.x % 32 == 0) stores_read();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            *reinterpret_cast<uint4 *>(gate + slice_offset((half * COUNT + i) * 4)) = y[i];
    }
}

/* The slices of all tiles in turn, each by one warp. */
template <class T> __device__ void end_tiles(const forward_call &c, forward_shared &shared, int warp) {
    int turn = 0;
    bool leads = threadIdx.x % 32 == 0;
    for_tiles(c, [&](const forward_tile &t, int n) {
#pragma unroll 1
        for (int i = 0; i < CONSUMERS * SLICES; i++, turn = turn + 1 == ENDING_WARPS ? 0 : turn + 1) {
            if (turn != warp) continue;
            int group = i % CONSUMERS, slice = i / CONSUMERS;
            int row = t.row * TILE + group * ROWS, column = (t.column * SLICES + slice) * SLICE;
            char *gate = shared.gate[group][slice], *up = shared.up[group][slice];
            barrier_wait(shared.written[n & 1][group][slice], n >> 1 & 1);
            if (leads) {
                if (c.writes_gate) store_box(c.gate, gate, column, 0, row, 0);
                if (c.writes_up) store_box(c.up, up, column, 0, row, 0);
                commit_stores();
            }
            write_values<T>(gate, up);
            publish_shared();
            __syncwarp();
            if (leads) {
                store_box(c.y, gate, column, 0, row, 0);
                commit_stores();
                stores_read();
                barrier_arrive(shared.free[group][slice]);
            }
            __syncwarp();
        }
    });
    if (leads) stores_done();
}

#endif

template <class T>
__global__ void VJP_IN_CLUSTERS(CLUSTER) __launch_bounds__(THREADS, 1)
    multiply_with_gates(const __grid_constant__ forward_call c) {
#if VJP_HOPPER
    auto &shared = aligned_shared<forward_shared>();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.full[i], 1);
            barrier_init(shared.empty[i], CONSUMERS * CLUSTER);
        }
        for (int group = 0; group < CONSUMERS; group++)
            for (int slice = 0; slice < SLICES; slice++) {
                barrier_init(shared.written[0][group][slice], WARPGROUP / 32);
                barrier_init(shared.written[1][group][slice], WARPGROUP / 32);
                barrier_init(shared.free[group][slice], 1);
            }
        barriers_are_ready();
    }
    cluster_sync();
    begin_chained();
    if (threadIdx.x < WARPGROUP) {
        give_registers<120>();
        int warp = (int)threadIdx.x / 32;
        if (warp < ENDING_WARPS)
            end_tiles<T>(c, shared, warp);
        else if (threadIdx.x % 32 == 0)
            feed_stages(c, shared);
    } else {
        take_registers<192>();
        multiply_tiles<T>(c, shared);
    }
    __syncwarp();
    cluster_sync(); /* the other block may still write and arrive here */
#endif
}

/* Of both weights in a band of tiles: they must stay in the L2 cache. */
constexpr int64_t MAX_BAND_BYTES = 24 << 20;
constexpr int64_t MAX_SIDE = INT32_MAX / 2; /* the copy engine's coordinates have 32 bits */
constexpr double LEAST_USE = 0.85;          /* of the card by tiles */

/*
 * Of a product that gains. Medians of training steps on an H200, separate calls and this kernel in turn: 76.9 and 74.8
 * ms with 1024 terms (350M, with the pair of the backward), 52.1 and 52.3 with 768 (124M), 104.1 and 104.8 with 2048
 * (1.1B).
 */
constexpr int64_t MAX_TERMS = 1536;

int64_t clusters_of(const vjp_device *device) {
    return vjp_max(1, state_of(device)->multiprocessors / CLUSTER);
}

} // namespace
} // namespace hopper

bool gated_forward_pays(const vjp_device *device, const gated_forward &p) {
    using namespace hopper;
    if (!VJP_CUDA_HOPPER || state_of(device)->capability != 90 || p.dtype == VJP_F32 || p.columns % 8 || p.terms % 8 ||
        p.terms <= STAGES * DEPTH || p.terms > MAX_TERMS || p.rows > MAX_SIDE || p.columns > MAX_SIDE)
        return false;
    int64_t tiles = vjp_divide_up(p.rows, TILE * CLUSTER) * vjp_divide_up(p.columns, TILE);
    int64_t clusters = clusters_of(device), rounds = vjp_divide_up(tiles, clusters);
    double use = (double)p.rows * (double)p.columns / ((double)(rounds * clusters) * CLUSTER * TILE * TILE);
    return tiles <= INT32_MAX / 4 && use > LEAST_USE;
}

vjp_status multiply_gated_forward(const vjp_work *work, const gated_forward &p, bool *done) {
    using namespace hopper;
    forward_call c{};
    const std::pair<CUtensorMap *, const void *> weights[] = {{&c.weight[0], p.gate_weight},
                                                              {&c.weight[1], p.up_weight}};
    const std::pair<CUtensorMap *, const void *> results[] = {{&c.gate, p.gate}, {&c.up, p.up}, {&c.y, p.y}};
    *done = make_map(&c.x, p.x, p.terms, p.dtype, 1, p.rows, 1, p.terms, TILE);
    for (auto [map, data] : weights)
        *done = *done && make_map(map, data, p.terms, p.dtype, 1, p.columns, 1, p.terms, TILE);
    for (auto [map, data] : results)
        if (data) *done = *done && make_map(map, data, p.columns, p.dtype, 1, p.rows, 1, p.columns, ROWS);
    if (!*done) return VJP_OK;
    c.rows = (int)vjp_divide_up(p.rows, TILE * CLUSTER);
    c.columns = (int)vjp_divide_up(p.columns, TILE);
    c.band = (int)vjp_divide_up(c.columns, vjp_divide_up(4 * p.columns * p.terms, MAX_BAND_BYTES));
    c.steps = (int)vjp_divide_up(p.terms, DEPTH);
    c.writes_gate = p.gate;
    c.writes_up = p.up;
    int64_t clusters = vjp_min((int64_t)c.rows * c.columns, clusters_of(work->device));
    auto kernel = p.dtype == VJP_BF16 ? multiply_with_gates<bf16> : multiply_with_gates<f16>;
    return launch(work, true, kernel, clusters * CLUSTER, THREADS, sizeof(forward_shared), c);
}

} // namespace vjp

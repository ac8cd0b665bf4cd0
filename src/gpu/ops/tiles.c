/* SPDX-License-Identifier: MIT */
/*
 * See tiles.h.
 *
 *     matrices of simdgroups        tiles of 64 x 64: with totals beside the sums, larger ones would fill the registers
 *     many rows and columns         tiles of 128 x 128: half as many loads per product; on lavapipe a product of
 *                                   512 x 512 x 512 took 57 ms instead of 104
 *     enough tiles to fill a GPU    tiles of 64 x 64
 *     fewer tiles, or a long depth  the same, and the depth is split into parts by the sizes alone
 *     fewer than 256 threads        smaller tiles
 *
 * The order in which a result is summed does not depend on the tile.
 */
#include "gpu/ops/tiles.h"

enum {
    MAX_FOURS = 16,    /* of rows and of columns of a workgroup's tile, where a thread has four by four */
    LARGE_TILES = 64,  /* as many tiles of 128 x 128 as most GPUs have cores */
    WASTE = 4,         /* large tiles may compute a quarter more than small ones, past the end of rows and columns */
    SHORTEST = 512,    /* depth of a part: at least 32 steps of the kernel before its sums go through memory */
    MAX_GROUPS = 4096, /* with parts: they take 64 MiB */
    LONGEST = 4096,    /* depth of a part, at most, with chains of 64: 2^24 equal terms stay accurate to about 1e-6 */
    SHORT_CHAIN = 64,  /* products in one chain, unless a part would have more than GPU_CHAIN chains */
    JOINED = 16,       /* parts that one thread adds before there are more threads */
    MAX_JOINING = 64   /* threads that add the parts of one result */
};

gpu_tiles gpu_tiles_of(const vjp_work *work, int64_t batches, int64_t rows, int64_t columns, int64_t depth) {
    int64_t threads = gpu_threads(work->device), across = vjp_min(threads, MAX_FOURS);
    int64_t down = vjp_min(threads / across, MAX_FOURS);
    gpu_tiles c = {.row_tiles = vjp_divide_up(rows, 4 * down), .column_tiles = vjp_divide_up(columns, 4 * across)};
    int64_t tiles = vjp_max(1, batches * c.row_tiles * c.column_tiles);
    int64_t busy = vjp_min(GPU_BUSY / vjp_min(tiles, GPU_BUSY), depth / SHORTEST);
    int64_t exact = vjp_min(MAX_GROUPS / vjp_min(tiles, MAX_GROUPS), depth / LONGEST);
    int64_t parts = vjp_max(vjp_max(busy, exact), 1);
    parts = vjp_max(parts, vjp_divide_up(depth, GPU_CHAIN * GPU_CHAIN));
    c.span = vjp_divide_up(vjp_divide_up(depth, parts), GPU_CHAIN) * GPU_CHAIN;
    c.parts = vjp_max(1, vjp_divide_up(depth, vjp_max(c.span, 1)));
    c.chain = c.span > SHORT_CHAIN * GPU_CHAIN ? GPU_CHAIN : SHORT_CHAIN;
    c.block = 1;
    c.matrices = gpu_has_matrices(work->device);
    if (c.matrices) return c;
    int64_t large_rows = vjp_divide_up(rows, 8 * MAX_FOURS), large_columns = vjp_divide_up(columns, 8 * MAX_FOURS);
    int64_t large = large_rows * large_columns;
    if (threads == GPU_THREADS && batches * large * c.parts >= LARGE_TILES &&
        4 * large * WASTE <= c.row_tiles * c.column_tiles * (WASTE + 1)) {
        c.block = 2;
        c.row_tiles = large_rows;
        c.column_tiles = large_columns;
    }
    return c;
}

void gpu_tiles_choose(gpu_launch *l, const gpu_tiles *c) {
    gpu_constant(l, "BLOCK", c->block);
    if (c->matrices) gpu_constant(l, "MATRIX", 8);
}

int64_t gpu_joining_lanes(const vjp_work *work, int64_t parts) {
    int64_t lanes = gpu_power_of_two(vjp_divide_up(parts, JOINED), MAX_JOINING);
    return vjp_min(lanes, gpu_threads(work->device));
}

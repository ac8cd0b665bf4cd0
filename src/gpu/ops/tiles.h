/* SPDX-License-Identifier: MIT */
/* How a matrix product is split into tiles of workgroups and parts of its depth: linear and conv2d. */
#ifndef VJP_GPU_TILES_H
#define VJP_GPU_TILES_H

#include "gpu/gpu.h"

enum { GPU_BUSY = 256 /* workgroups that keep a large GPU busy */ };

typedef struct gpu_tiles {
    int64_t row_tiles, column_tiles;
    int64_t block;       /* a thread has block by block times four by four; a tile of 256 threads 64 block lines */
    int64_t parts, span; /* of the depth; with one part there is nothing to join */
    int64_t chain;       /* products in one chain of f32 */
    bool matrices;       /* simdgroups multiply matrices of 8 x 8 */
} gpu_tiles;

/* `batches` products of [rows, depth] by [depth, columns], by the kernel of tiles.wgsl and tiles.metal. */
gpu_tiles gpu_tiles_of(const vjp_work *work, int64_t batches, int64_t rows, int64_t columns, int64_t depth);

/* Gives a launch of a kernel that multiplies tiles the constants that it is compiled with. */
void gpu_tiles_choose(gpu_launch *l, const gpu_tiles *c);

/* Threads that add `parts` parts of one result. */
int64_t gpu_joining_lanes(const vjp_work *work, int64_t parts);

#endif

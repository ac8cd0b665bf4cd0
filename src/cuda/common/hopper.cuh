/* SPDX-License-Identifier: MIT */
/*
 * Tiles in shared memory, as Hopper's copy engine and products of warpgroups use them (hopper_instructions.cuh).
 *
 * A tile is [columns / 64][rows][64] elements of 16 bits (or 32 of f32): 128 bytes per row, the 16-byte chunks of row r
 * at chunk ^ (r % 8), as the copy engine writes it with CU_TENSOR_MAP_SWIZZLE_128B. A tile begins at a multiple of 1024
 * bytes. Either dimension of it can be the one that a product sums over.
 */
#ifndef VJP_CUDA_HOPPER_CUH
#define VJP_CUDA_HOPPER_CUH

#include "cuda/common/fragments.cuh"
#include "cuda/common/hopper_instructions.cuh"

namespace vjp {
namespace hopper {

constexpr int WARPGROUP = 128, TILE_ALIGNMENT = 1024;
constexpr int SLICE = 64; /* columns of a tile that lie together */

#if VJP_HOPPER

/* The tiles of a block. */
template <class S> __device__ S &aligned_shared() {
    return *dynamic_shared<S, TILE_ALIGNMENT>();
}

/* A position in a ring of stages: which one, and the parity of its current phase. */
template <int STAGES> struct ring {
    int stage = 0;
    uint32_t parity = 0;

    __device__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }

    __device__ void skip(int stages) {
        stage += stages;
        parity ^= (uint32_t)(stage / STAGES) & 1;
        stage %= STAGES;
    }
};

constexpr uint32_t SWIZZLE_128 = 1u << 30;

/*
 * Describes an operand that begins `offset` bytes behind `address`. The offset is a constant of the step and is added
 * last, to the lower half alone: all steps of a product share the rest, and one addition lies between two products.
 */
__device__ inline uint64_t describe(uint32_t address, int offset, int leading, int stride) {
    uint32_t low = ((address & 0x3ffff) >> 4 | (uint32_t)(leading >> 4) << 16) + (uint32_t)(offset >> 4);
    return (uint64_t)((uint32_t)(stride >> 4) | SWIZZLE_128) << 32 | low;
}

/* Sixteen columns from column 16 `step` on of rows from `row` on: the product sums over columns. `rows`: of the tile.
 */
__device__ inline uint64_t over_columns(uint32_t tile, int rows, int row, int step) {
    return describe(tile + (uint32_t)(row * 128), step / 4 * rows * 128 + step % 4 * 32, 16, 1024);
}

/* Sixteen rows from row 16 `step` on, all columns: the product sums over rows. */
__device__ inline uint64_t over_rows(uint32_t tile, int rows, int step) {
    return describe(tile, step * 16 * 128, rows * 128, 1024);
}

/* Of the block's warpgroups, the thread's own; the same for all threads of a warp, which the compiler can see. */
__device__ inline int warpgroup() {
    return __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
}

/* Where two adjacent elements of a tile begin: row, even column. */
__device__ inline uint32_t tile_offset(int rows, int row, int column) {
    return (uint32_t)((column / SLICE) * rows * 128 + row * 128 + ((column % SLICE * 2) ^ (row % 8 * 16)));
}

/* Writes numbers of 16 bits, in the order of accumulators, to 64 rows of a tile from `row` on. */
template <int COUNT> __device__ void write_packed(char *tile, int rows, int row, const uint32_t (&two)[COUNT]) {
    int thread = threadIdx.x % WARPGROUP, own = row + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        *reinterpret_cast<uint32_t *>(tile + tile_offset(rows, own + i % 2 * 8, i / 2 * 8 + thread % 4 * 2)) = two[i];
}

/* Writes the accumulators of a warpgroup, times their factors, to 64 rows of a tile from `row` on. */
template <class T, int COUNT>
__device__ void write_tile(char *tile, int rows, int row, const float (&d)[COUNT], float low_factor,
                           float high_factor) {
    uint32_t two[COUNT / 2];
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
        float factor = i % 2 ? high_factor : low_factor;
        two[i] = pack_two<T>(d[2 * i] * factor, d[2 * i + 1] * factor);
    }
    write_packed(tile, rows, row, two);
}

/*
 * Writes the sums of 64 x 64, rounded, to a tile.
 */
template <class T> __device__ void write_rounded(char *tile, const float *sum) {
    uint32_t lane = threadIdx.x % 32, row = threadIdx.x % WARPGROUP / 32 * 16 + lane % 16;
    uint32_t first = shared_address(tile) + row * 128 + ((lane / 16 ^ lane % 8) * 16);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++, sum += 8)
        store_matrices(first ^ (i * 32), pack_two<T>(sum[0], sum[1]), pack_two<T>(sum[2], sum[3]),
                       pack_two<T>(sum[4], sum[5]), pack_two<T>(sum[6], sum[7]));
}

#endif

/* ---- The host's side --------------------------------------------------------------------------------- */

/*
 * A map of a tensor [batch, rows, heads, columns], its rows at a distance of `row_step` elements, with boxes of 128
 * bytes of columns, one head and `box_rows` rows. False: the copy engine cannot address it (alignment, or a driver
 * without the function).
 */
bool make_map(CUtensorMap *map, const void *data, int64_t row_step, vjp_dtype dtype, int64_t batch, int64_t rows,
              int64_t heads, int64_t columns, int box_rows);

/*
 * One axis of a walk over the pixels of a picture of `source` pixels: `count` of them, `stride` apart, from `first` on,
 * which may lie outside; then the same moved by `apart`, up to `taps` - 1 times.
 */
struct walk_axis {
    int source, first, count, stride, taps, apart;
};

/* Whether the copy engine can walk so. */
bool can_walk(const walk_axis &axis);

/*
 * A map of pictures [batch, down.source, across.source, channels] with boxes of `pixels` successive pixels of a walk
 * over rows, columns and pictures, and of 128 bytes of channels.
 */
bool make_walk(CUtensorMap *map, const void *data, vjp_dtype dtype, int64_t batch, const walk_axis &down,
               const walk_axis &across, int64_t channels, int pixels);

} // namespace hopper
} // namespace vjp

#endif

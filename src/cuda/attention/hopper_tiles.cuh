/* SPDX-License-Identifier: MIT */
/* What attention's kernels on Hopper share: the order of tiles, flags, and how a warpgroup stores its rows. */
#ifndef VJP_CUDA_HOPPER_TILES_CUH
#define VJP_CUDA_HOPPER_TILES_CUH

#include "cuda/attention/attention.cuh"
#include "cuda/common/hopper.cuh"

namespace vjp {
namespace hopper {

/* A tile of work: a block of rows of one head. */
struct tile {
    int block, head, batch;
};

/* `heads` heads, of all batches, in sections of `section`; `blocks` blocks of rows each. */
struct tile_order {
    int heads, heads_per_batch, section, blocks;
    bool descending;

    __host__ __device__ int count() const {
        return heads * blocks;
    }

    __device__ tile at(int index) const {
        int first = index / (section * blocks) * section, rest = index % (section * blocks);
        int here = min(section, heads - first), block = rest / here, head = first + rest % here;
        return {descending ? blocks - 1 - block : block, head % heads_per_batch, head / heads_per_batch};
    }
};

#if VJP_HOPPER

/* Named barriers: a consumer's turn to issue products, one for each consumer alone, and one for two of them. */
constexpr int TURN = 1, OWN = 4, BOTH = 7;

/* The tile memory of a block, aligned. */
template <class S> __device__ S &aligned_shared() {
    extern __shared__ char memory[];
    return *reinterpret_cast<S *>(memory + (TILE_ALIGNMENT - shared_address(memory) % TILE_ALIGNMENT) % TILE_ALIGNMENT);
}

/* Blocks of keys that a tile needs. */
template <bool CAUSAL, int ROWS, int KEYS> __device__ int key_blocks(const attention_call &a, int block) {
    int last = min((block + 1) * ROWS, (int)a.time) - 1;
    return (keys_seen<CAUSAL>(last, (int)(a.keys - a.time), (int)a.keys) + KEYS - 1) / KEYS;
}

/* Whether any thread of the warpgroup says so. */
__device__ inline bool group_any(int id, bool mine) {
    int any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.b32 %0, 1, 0, "
                 "q;\n}\n"
                 : "=r"(any)
                 : "r"((int)mine), "r"(id)
                 : "memory");
    return any;
}

/* Whether the 64 rows from `row` on of a head, counted over all batches, are left to the exact path. */
__device__ inline void set_flag(int *flags, int64_t rows, int head, int row, bool left) {
    if (row < rows) flags[head * vjp::divide_up(rows, (int64_t)FLAG_ROWS) + row / FLAG_ROWS] = left;
}

/*
 * Adds a warpgroup's accumulators, times their factors, to 64 rows of a tensor [batch, rows, heads, dim]; or, with
 * `as_f32`, stores them in one of f32.
 */
template <class T, int D>
__device__ void write_rows(void *to, bool as_f32, const tile &t, int64_t rows, int64_t heads, int64_t dim, int first,
                           const float (&d)[D / 2], float low_factor, float high_factor) {
    int thread = threadIdx.x % WARPGROUP, own = first + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (own + 8 * r >= rows) continue;
        int64_t at = ((t.batch * rows + own + 8 * r) * heads + t.head) * dim + thread % 4 * 2;
        float factor = r ? high_factor : low_factor;
#pragma unroll
        for (int i = 0; i < D / 8; i++)
#pragma unroll
            for (int j = 0; j < 2 && 8 * i < dim; j++) {
                float value = d[4 * i + 2 * r + j] * factor;
                if (as_f32)
                    static_cast<float *>(to)[at + 8 * i + j] = value;
                else
                    write_one(static_cast<T *>(to) + at + 8 * i + j, value, true);
            }
    }
}

/*
 * Stores them as T, through `staged`, 64 x D elements of shared memory of this warpgroup alone. The copy engine reads
 * them until stores_read() by the warpgroup's first thread.
 */
template <class T, int D>
__device__ void store_rows(const CUtensorMap &map, char *staged, const tile &t, int group, int first,
                           const float (&d)[D / 2], float low_factor, float high_factor) {
    write_tile<T>(staged, 64, 0, d, low_factor, high_factor);
    publish_shared();
    group_sync(OWN + group, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) {
#pragma unroll
        for (int column = 0; column < D; column += SLICE)
            store_box(map, staged + column / SLICE * 64 * 128, column, t.head, first, t.batch);
        commit_stores();
    }
}

#endif

} // namespace hopper
} // namespace vjp

#endif

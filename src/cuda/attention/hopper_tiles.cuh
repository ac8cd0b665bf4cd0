/* SPDX-License-Identifier: MIT */
/* What attention's kernels on Hopper share: named barriers, and how a warpgroup stores its rows. */
#ifndef VJP_CUDA_HOPPER_TILES_CUH
#define VJP_CUDA_HOPPER_TILES_CUH

#include "cuda/attention/fast.cuh"
#include "cuda/common/hopper.cuh"

namespace vjp {
namespace hopper {

#if VJP_HOPPER

/* Named barriers: a consumer's turn to issue products, one for each consumer alone, and one for two of them. */
constexpr int TURN = 1, OWN = 4, BOTH = 7;

__device__ inline bool is_finite(float x) {
    return fabsf(x) < CUDART_INF_F;
}

/*
 * Stores a warpgroup's accumulators, times their factors, through `staged`, 64 x D elements of shared memory of this
 * warpgroup alone. The copy engine reads them until stores_read() by the warpgroup's first thread.
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

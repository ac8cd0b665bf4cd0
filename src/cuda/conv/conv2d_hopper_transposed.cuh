/* SPDX-License-Identifier: MIT */
/*
 * TF32 products of a warpgroup whose left operand lies in shared memory with its rows side by side, as its terms should
 * be: 128 channels of each pixel (dweight), or 128 pixels of each channel (1 x 1 kernels). For numbers of 32 bits the
 * tensor cores read shared memory only in the other order. So the left operand passes through registers, which can be
 * loaded from any order. The right operand lies in shared memory, with its terms side by side.
 *
 * A tile is four boxes of the copy engine (hopper.cuh), one for each warp: [32 terms][32 rows], 128 bytes per term. A
 * thread loads four successive rows of a term at once, and they are its own four rows of two products of 64 rows. Which
 * four is free, since each row is a result of its own: the eight threads of a phase of such a load read terms 0 to 3 of
 * the chunks c and c + 4, which the swizzle leaves in eight different places.
 */
#ifndef VJP_CUDA_CONV2D_HOPPER_TRANSPOSED_CUH
#define VJP_CUDA_CONV2D_HOPPER_TRANSPOSED_CUH

#include "cuda/common/hopper.cuh"

namespace vjp {
namespace hopper {

constexpr int BOX_TERMS = 32, BOX_ROWS = 32, BOX_BYTES = BOX_TERMS * BOX_ROWS * 4;

#if VJP_HOPPER

/*
 * The first of the thread's four rows in its warp's box. Accumulators 4 i + {0, 1} and 4 i + {2, 3} of the first
 * product are those of this row and the next, those of the second product of the two rows after.
 */
__device__ inline int own_rows() {
    int group = (int)threadIdx.x % 32 / 4;
    return (group / 2 + group % 2 * 4) * 4;
}

/*
 * Multiplies tiles of BOX_TERMS terms. Half of a tile is loaded to registers while the products of the half before it
 * run.
 */
class transposed_left {
    uint32_t even[16] = {}, odd[16] = {}; /* of half a tile: [2 steps of eight terms][2 products][4] */

    /* Loads the terms from `first` on. Those from `terms` on are zero. */
    __device__ static void load(uint32_t (&a)[16], const char *tile, int first, int terms) {
        int thread = (int)threadIdx.x % WARPGROUP, chunk = own_rows() / 4;
        const char *box = tile + thread / 32 * BOX_BYTES + first * 128;
#pragma unroll
        for (int step = 0; step < 2; step++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int term = thread % 4 + 4 * i;
                uint4 rows = *reinterpret_cast<const uint4 *>(box + step * 1024 + term * 128 + (chunk ^ term) * 16);
                bool present = first + step * 8 + term < terms;
                a[step * 8 + 2 * i] = present ? rows.x : 0;
                a[step * 8 + 2 * i + 1] = present ? rows.y : 0;
                a[step * 8 + 4 + 2 * i] = present ? rows.z : 0;
                a[step * 8 + 4 + 2 * i + 1] = present ? rows.w : 0;
            }
    }

    template <int COUNT>
    __device__ static void multiply(float (&sum)[2][COUNT], const uint32_t (&a)[16], uint32_t right, int half,
                                    bool keep) {
        products_begin();
#pragma unroll
        for (int step = 0; step < 2; step++)
#pragma unroll
            for (int m = 0; m < 2; m++)
                tf32_product(sum[m], a + step * 8 + m * 4, over_columns(right, 0, 0, half * 2 + step),
                             keep || step > 0);
        products_commit();
    }

  public:
    /*
     * sum = (keep ? sum : 0) + the product of a tile and the one at `right`. Calls previous_done() when the products of
     * the previous call are done; those of this one may still run when it returns.
     */
    template <int COUNT, class F>
    __device__ void multiply(float (&sum)[2][COUNT], const char *tile, uint32_t right, int terms, bool keep,
                             F previous_done) {
        load(even, tile, 0, terms);
        multiply(sum, even, right, 0, keep);
        products_wait<1>();
        pin(odd);
        previous_done();
        load(odd, tile, 16, terms);
        multiply(sum, odd, right, 1, true);
        products_wait<1>();
        pin(even);
    }

    __device__ void finish() {
        products_wait<0>();
        pin(odd);
    }
};

#endif

} // namespace hopper
} // namespace vjp

#endif

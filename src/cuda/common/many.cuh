/* SPDX-License-Identifier: MIT */
/*
 * Kernels over many tensors in one launch. The table of the tensors is a parameter of the kernel, so there is nothing
 * to copy and a captured graph holds it: 512 members of 48 bytes are 24 KiB, of the 32 KiB that a kernel's parameters
 * may have. A block finds its tensor by a binary search in the numbers of the tensors' first blocks.
 */
#ifndef VJP_CUDA_MANY_CUH
#define VJP_CUDA_MANY_CUH

#include "cuda/common/kernel.cuh"

namespace vjp {

constexpr int MANY_MEMBERS = 512;

template <class Member, int ROOM = MANY_MEMBERS> struct many_members {
    int count = 0;
    int first[ROOM + 1] = {0}; /* first[k]: the first block of member k; first[count]: how many blocks */
    Member member[ROOM];

    /* A member without elements has no block. */
    void add(const Member &m, int64_t blocks) {
        member[count++] = m;
        first[count] = first[count - 1] + (int)blocks;
    }

    int64_t blocks() const {
        return first[count];
    }

    /* The member of a block of the grid, and the number of the block within it. */
    __device__ int find(int block, int *within) const {
        int low = 0, high = count - 1;
        while (low < high) {
            int middle = (low + high + 1) / 2;
            if (first[middle] <= block)
                low = middle;
            else
                high = middle - 1;
        }
        *within = block - first[low];
        return low;
    }
};

/* Of each op that merges calls: runs works of that op, all on one device (vjp_backend.run_many). */
vjp_status run_many_adamw(const vjp_work *const *works, size_t count);
vjp_status run_many_sgd(const vjp_work *const *works, size_t count);
vjp_status run_many_sum_squares(const vjp_work *const *works, size_t count);
vjp_status run_many_cast(const vjp_work *const *works, size_t count);
vjp_status run_many_rope(const vjp_work *const *works, size_t count);

} // namespace vjp

#endif

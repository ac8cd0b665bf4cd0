/* SPDX-License-Identifier: MIT */
/* CUB's sort, which keeps the order of equal keys. */
#ifndef VJP_TESTS_CUDA_RADIX_SORT_CUH
#define VJP_TESTS_CUDA_RADIX_SORT_CUH

#include "cuda_runtime.h"

namespace emulated {
cudaError_t sort_pairs(const uint64_t *keys, uint64_t *sorted_keys, const int64_t *values, int64_t *sorted_values,
                       int64_t count, int first_bit, int end_bit, cudaStream_t stream);
}

namespace cub {

struct DeviceRadixSort {
    static cudaError_t SortPairs(void *space, size_t &bytes, const uint64_t *keys, uint64_t *sorted_keys,
                                 const int64_t *values, int64_t *sorted_values, int64_t count, int first_bit,
                                 int end_bit, cudaStream_t stream = nullptr) {
        bytes = 1;
        if (!space) return cudaSuccess;
        return emulated::sort_pairs(keys, sorted_keys, values, sorted_values, count, first_bit, end_bit, stream);
    }
};

} // namespace cub

#endif

/* SPDX-License-Identifier: MIT */
/*
 * Values that only the device sees and that no kernel can use, such as an index outside its table: kernels report them,
 * and the host collects them when it synchronizes. Reports are rare, so each record has a lock; calls on several
 * streams may report and be collected at the same time.
 */
#ifndef VJP_CUDA_FINDINGS_CUH
#define VJP_CUDA_FINDINGS_CUH

#include "cuda/common/cuda.h"

namespace vjp {

__device__ inline volatile finding *lock_record(finding *record) {
    while (atomicCAS(&record->lock, 0u, 1u))
        ;
    __threadfence();
    return record;
}

__device__ inline void unlock_record(finding *record) {
    __threadfence();
    atomicExch(&record->lock, 0u);
}

/* Keeps the first bad value of the pass. */
static __device__ __noinline__ void report(findings f, int64_t position, double value, int64_t limit,
                                           int64_t first = 0) {
    volatile finding *r = lock_record(f.record);
    if (r->count == 0 || position < r->position) {
        r->position = position;
        r->value = value;
        r->first = first;
        r->limit = limit;
    }
    r->count = r->count + 1;
    unlock_record(f.record);
    *(volatile int *)f.found = 1;
}

/* Element k of an index tensor, or -1 and a report if it is not an integer in [first, limit). */
static __device__ inline int64_t read_index(findings f, const void *index, vjp_dtype dtype, int64_t k, int64_t limit,
                                            int64_t first = 0) {
    int64_t i;
    if (dtype == VJP_I32) {
        i = static_cast<const int32_t *>(index)[k];
    } else if (dtype == VJP_I64) {
        i = static_cast<const int64_t *>(index)[k];
    } else {
        /* Beyond 2^24 neighbouring integers share one f32: the index may have been another one. */
        float x = static_cast<const float *>(index)[k];
        if (!(fabsf(x) <= 16777216.0f) || x != truncf(x)) {
            report(f, k, x, limit, first);
            return -1;
        }
        i = (int64_t)x;
    }
    if (i >= first && i < limit) return i;
    report(f, k, (double)i, limit, first);
    return -1;
}

} // namespace vjp

#endif

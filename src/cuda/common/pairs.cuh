/* SPDX-License-Identifier: MIT */
/*
 * Two calls of a program, a product of linear and what reads its result, as one kernel: vjp_backend's pairs() and
 * run_pair(). Where the calls' addresses turn out not to allow that, they run one by one.
 */
#ifndef VJP_CUDA_PAIRS_CUH
#define VJP_CUDA_PAIRS_CUH

#include "cuda/common/cuda.h"

namespace vjp {

int linear_pairs(const vjp_work *first, const vjp_work *second, uint32_t unread);
vjp_status run_linear_pair(const vjp_work *first, const vjp_work *second);

} // namespace vjp

#endif

/* SPDX-License-Identifier: MIT */
/*
 * Products over rows on Hopper: a^T b in f32 of 16-bit factors [k, m] and [k, n], the gradient of a weight over all
 * rows of a batch. A sum of any length is as accurate as one of 1024 terms, and is computed in one launch.
 */
#ifndef VJP_CUDA_LONG_SUMS_CUH
#define VJP_CUDA_LONG_SUMS_CUH

#include "cuda/gemm/products.cuh"

namespace vjp {

/*
 * Into how many parts, each with a result of its own, the sums are divided so that there are tiles for the whole card;
 * 0: this kernel cannot compute the product, or leaves too much of the card idle. Depends on the sizes and the card.
 */
int64_t long_sum_parts(const vjp_work *work, const product &p);

/* Enqueues it: one part is the product itself; of more, the results are p.item elements apart. */
vjp_status multiply_long_sums(const vjp_work *work, const product &p, int64_t parts);

} // namespace vjp

#endif

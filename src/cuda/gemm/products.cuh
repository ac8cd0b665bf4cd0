/* SPDX-License-Identifier: MIT */
/*
 * Matrix products by cuBLASLt: result = (add ? addend : 0) + scale * a b (+ bias), for a batch of items at once,
 * where the addend is the result's old value or another matrix.
 *
 * Matrices are row-major. Reproducible: an algorithm is chosen by cuBLASLt's heuristics from sizes and types alone,
 * among those that add in a fixed order, and kept. So data must be aligned to PRODUCT_ALIGNMENT, whichever algorithm is
 * chosen.
 */
#ifndef VJP_CUDA_PRODUCTS_CUH
#define VJP_CUDA_PRODUCTS_CUH

#include "cuda/common/cuda.h"

namespace vjp {

/* Of every matrix and of the bias; the widest access of any kernel. */
constexpr size_t PRODUCT_ALIGNMENT = 16;

/* A factor in memory; `transposed`: memory holds its transpose. Distances in elements. */
struct factor {
    const void *data;
    bool transposed;
    int64_t row, item; /* from one row in memory to the next; from one item of the batch to the next */
};

struct product {
    vjp_dtype storage; /* of a, b */
    int64_t items, m, n, k;
    factor a, b;  /* [m, k], [k, n] */
    void *result; /* [m, n], packed */
    bool f32;     /* the result is f32; else of the storage type */
    bool rounded; /* what reads an f32 result rounds it to the storage type: a longer sum is accurate enough */
    int64_t item; /* from one result to the next */
    float scale;
    const float *factors; /* on the device: what takes the place of scale, then 0, then 1; NULL: scale is used */
    bool add;
    const void *addend; /* laid out like the result, of its type; NULL: the result's old value */
    const void *bias;   /* [n], of the result's type; NULL: none */
};

/* Enqueues it. k is not 0; with no items, rows or columns there is nothing to do. */
vjp_status multiply(const vjp_work *work, const product &p);

} // namespace vjp

#endif

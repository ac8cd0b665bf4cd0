/* SPDX-License-Identifier: MIT */
/*
 * Products on Hopper that end with swiglu or its backward: what swiglu reads of a product is not read again. All
 * matrices are row-major and packed, of one 16-bit type. Results have the bits of rounded products that swiglu reads.
 */
#ifndef VJP_CUDA_GATED_CUH
#define VJP_CUDA_GATED_CUH

#include "cuda/common/cuda.h"

namespace vjp {

/* gate = x gate_weight^T, up = x up_weight^T, y = swiglu(gate, up): x [rows, terms], weights [columns, terms]. */
struct gated_forward {
    vjp_dtype dtype;
    int64_t rows, columns, terms;
    const void *x, *gate_weight, *up_weight;
    void *gate, *up, *y; /* [rows, columns]; gate and up NULL: not wanted */
};

/* dy = dz w, and swiglu's gradients by it: dz [rows, terms], w [terms, columns]. dy is neither written nor read. */
struct gated_product {
    vjp_dtype dtype;
    int64_t rows, columns, terms;
    const void *dz, *w, *gate, *up;
    void *dgate, *dup, *y; /* [rows, columns], each also in the place of gate or up; y NULL: not wanted */
};

/* Whether this device has the kernel, and it is no slower than separate calls: by the sizes alone. */
bool gated_forward_pays(const vjp_device *device, const gated_forward &p);
bool gated_product_pays(const vjp_device *device, const gated_product &p);

/* Enqueues it. *done is false, and nothing is enqueued, where the copy engine cannot address a matrix. */
vjp_status multiply_gated_forward(const vjp_work *work, const gated_forward &p, bool *done);
vjp_status multiply_gated(const vjp_work *work, const gated_product &p, bool *done);

} // namespace vjp

#endif

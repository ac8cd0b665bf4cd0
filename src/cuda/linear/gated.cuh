/* SPDX-License-Identifier: MIT */
/*
 * A product on Hopper that ends with swiglu's backward, whose dy it makes: dy is neither written nor read. All matrices
 * are row-major and packed, of one 16-bit type.
 */
#ifndef VJP_CUDA_GATED_CUH
#define VJP_CUDA_GATED_CUH

#include "cuda/common/cuda.h"

namespace vjp {

/* dy = dz w, and swiglu's gradients by it: dz [rows, terms], w [terms, columns]. */
struct gated_product {
    vjp_dtype dtype;
    int64_t rows, columns, terms;
    const void *dz, *w, *gate, *up;
    void *dgate, *dup, *y; /* [rows, columns], each also in the place of gate or up; y NULL: not wanted */
};

/* Whether this device has the kernel, and it is no slower than the two calls: by the sizes alone. */
bool gated_product_pays(const vjp_device *device, const gated_product &p);

/*
 * Enqueues it. Results have the bits of a rounded product that swiglu reads. *done is false, and nothing is enqueued,
 * where the copy engine cannot address a matrix.
 */
vjp_status multiply_gated(const vjp_work *work, const gated_product &p, bool *done);

} // namespace vjp

#endif

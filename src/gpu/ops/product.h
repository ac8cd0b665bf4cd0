/* SPDX-License-Identifier: MIT */
/* Products of matrices by the kernels of linear.wgsl and linear.metal: linear has three, linear_cross_entropy too. */
#ifndef VJP_GPU_PRODUCT_H
#define VJP_GPU_PRODUCT_H

#include "gpu/ops/matrix.h"
#include "gpu/ops/tiles.h"

/*
 * y[rows, columns] = act(left[rows, depth] right[depth, columns] + bias) + residual, `batches` of them, and pre the sum
 * that the activation is applied to. With a gate y = silu(gate) pre. With dy, y is dy times the activation's slope
 * there. y, left and right may be in the workspace.
 */
typedef struct gpu_product {
    int64_t batches, rows, columns, depth;
    bool left_along, right_along; /* the depth is contiguous */
    gpu_matrix left, right, bias, residual, gate, dy, pre, y;
    vjp_activation activation;
    bool zero_nan;   /* a NaN pre gives the slope 0 */
    size_t parts_at; /* gpu_product_parts() f32 in the workspace, from this byte on */
} gpu_product;

/* How many f32 of workspace a product needs. */
int64_t gpu_product_parts(const vjp_work *work, const gpu_product *p);

vjp_status gpu_multiply(const vjp_work *work, const gpu_product *p);

/* ---- For the other kernels of linear ----------------------------------------------------------------- */

/* A launch of a kernel of linear's shader, without operands. */
gpu_launch gpu_product_begin(const vjp_work *work, const gpu_product *p, const gpu_tiles *c, const char *kernel,
                             vjp_activation activation);

/* Adds c->parts parts in the workspace to p's results. */
vjp_status gpu_product_join(const vjp_work *work, const gpu_product *p, const gpu_tiles *c);

#endif

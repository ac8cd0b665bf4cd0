/* SPDX-License-Identifier: MIT */
/* Sums along the middle axis of [outer, length, inner]: mean, sum_squares, and db of add and mul. */
#ifndef VJP_GPU_SUMS_H
#define VJP_GPU_SUMS_H

#include "gpu/gpu.h"

/* As in sums.wgsl and sums.metal. */
typedef enum gpu_term { GPU_ELEMENTS, GPU_PRODUCTS, GPU_SQUARES } gpu_term;

typedef struct gpu_sums {
    gpu_term term;
    int out, in[2]; /* slots; in[1] for products */
    int64_t outer, length, inner;
    double factor; /* of the results */
} gpu_sums;

vjp_status gpu_run_sums(const vjp_work *work, const gpu_sums *s);

/* The bytes that gpu_run_sums() needs of the workspace, from its start. */
size_t gpu_sums_workspace(const vjp_work *work, const gpu_sums *s);

#endif

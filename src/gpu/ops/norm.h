/* What layer_norm and rms_norm share on a GPU. The kernels: norm.wgsl and its like. */
#ifndef VJP_GPU_NORM_H
#define VJP_GPU_NORM_H

#include "gpu/gpu.h"

/* A call; a slot that the op does not have is -1. */
typedef struct gpu_norm {
    const vjp_work *work;
    vjp_norm_sizes sizes;
    double eps;
    int y, x, gamma, beta, mean, rstd; /* the backward's mean and rstd are inputs */
    int dx, dgamma, dbeta, dy;
} gpu_norm;

/* A call of an op that has these slots. */
gpu_norm gpu_norm_call(const gpu_norm *slots, const vjp_work *work, vjp_norm_sizes sizes, double eps);

vjp_status gpu_norm_run(const gpu_norm *n);
size_t gpu_norm_workspace(const gpu_norm *n);

#endif

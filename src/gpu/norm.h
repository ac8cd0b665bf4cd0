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

vjp_status gpu_norm_forward(const gpu_norm *n);
vjp_status gpu_norm_backward(const gpu_norm *n);
size_t gpu_norm_workspace(const gpu_norm *n);

#endif

/* layer_norm: see norm.c. */
#include "gpu/norm.h"

static gpu_norm forward_of(const vjp_work *work) {
    const vjp_layer_norm_attributes *a = work->attributes;
    return (gpu_norm){.work = work,
                      .sizes = vjp_layer_norm_sizes(work),
                      .eps = a->eps,
                      .y = LAYER_NORM_Y,
                      .x = LAYER_NORM_X,
                      .gamma = LAYER_NORM_GAMMA,
                      .beta = LAYER_NORM_BETA,
                      .mean = LAYER_NORM_MEAN,
                      .rstd = LAYER_NORM_RSTD};
}

static gpu_norm backward_of(const vjp_work *work) {
    const vjp_layer_norm_attributes *a = work->attributes;
    return (gpu_norm){.work = work,
                      .sizes = vjp_layer_norm_sizes(work),
                      .eps = a->eps,
                      .dx = LAYER_NORM_B_DX,
                      .dgamma = LAYER_NORM_B_DGAMMA,
                      .dbeta = LAYER_NORM_B_DBETA,
                      .dy = LAYER_NORM_B_DY,
                      .x = LAYER_NORM_B_X,
                      .gamma = LAYER_NORM_B_GAMMA,
                      .mean = LAYER_NORM_B_MEAN,
                      .rstd = LAYER_NORM_B_RSTD};
}

static vjp_status forward(const vjp_work *work) {
    gpu_norm n = forward_of(work);
    return gpu_norm_forward(&n);
}

static vjp_status backward(const vjp_work *work) {
    gpu_norm n = backward_of(work);
    return gpu_norm_backward(&n);
}

static size_t workspace(const vjp_work *work) {
    gpu_norm n = backward_of(work);
    return gpu_norm_workspace(&n);
}

const vjp_kernel gpu_layer_norm[VJP_PASS_COUNT] = {{forward, NULL, VJP_BITS_CPU}, {backward, workspace, VJP_BITS_CPU}};

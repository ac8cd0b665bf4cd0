/* rms_norm: see norm.c. */
#include "gpu/norm.h"

static gpu_norm forward_of(const vjp_work *work) {
    const vjp_rms_norm_attributes *a = work->attributes;
    return (gpu_norm){.work = work,
                      .sizes = vjp_rms_norm_sizes(work),
                      .eps = a->eps,
                      .y = RMS_NORM_Y,
                      .x = RMS_NORM_X,
                      .gamma = RMS_NORM_GAMMA,
                      .beta = RMS_NORM_BETA,
                      .mean = -1,
                      .rstd = RMS_NORM_RSTD};
}

static gpu_norm backward_of(const vjp_work *work) {
    const vjp_rms_norm_attributes *a = work->attributes;
    return (gpu_norm){.work = work,
                      .sizes = vjp_rms_norm_sizes(work),
                      .eps = a->eps,
                      .dx = RMS_NORM_B_DX,
                      .dgamma = RMS_NORM_B_DGAMMA,
                      .dbeta = RMS_NORM_B_DBETA,
                      .dy = RMS_NORM_B_DY,
                      .x = RMS_NORM_B_X,
                      .gamma = RMS_NORM_B_GAMMA,
                      .mean = -1,
                      .rstd = RMS_NORM_B_RSTD};
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

const vjp_kernel gpu_rms_norm[VJP_PASS_COUNT] = {{forward, NULL, VJP_BITS_CPU}, {backward, workspace, VJP_BITS_CPU}};

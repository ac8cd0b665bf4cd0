/* rms_norm: its slots; the rest is norm.c's. */
#include "gpu/ops/norm.h"

static const gpu_norm slots[VJP_PASS_COUNT] = {
    {.y = RMS_NORM_Y,
     .x = RMS_NORM_X,
     .gamma = RMS_NORM_GAMMA,
     .beta = RMS_NORM_BETA,
     .mean = -1,
     .rstd = RMS_NORM_RSTD},
    {.dx = RMS_NORM_B_DX,
     .dgamma = RMS_NORM_B_DGAMMA,
     .dbeta = RMS_NORM_B_DBETA,
     .dy = RMS_NORM_B_DY,
     .x = RMS_NORM_B_X,
     .gamma = RMS_NORM_B_GAMMA,
     .mean = -1,
     .rstd = RMS_NORM_B_RSTD},
};

static gpu_norm call_of(const vjp_work *work) {
    const vjp_rms_norm_attributes *a = work->attributes;
    return gpu_norm_call(&slots[work->pass], work, vjp_rms_norm_sizes(work), a->eps);
}

static vjp_status run(const vjp_work *work) {
    gpu_norm n = call_of(work);
    return gpu_norm_run(&n);
}

static size_t workspace(const vjp_work *work) {
    gpu_norm n = call_of(work);
    return gpu_norm_workspace(&n);
}

const vjp_kernel gpu_rms_norm[VJP_PASS_COUNT] = {{run, NULL, VJP_BITS_CPU}, {run, workspace, VJP_BITS_CPU}};

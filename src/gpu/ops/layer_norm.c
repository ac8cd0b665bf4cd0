/* layer_norm: its slots; the rest is norm.c's. */
#include "gpu/ops/norm.h"

static const gpu_norm slots[VJP_PASS_COUNT] = {
    {.y = LAYER_NORM_Y,
     .x = LAYER_NORM_X,
     .gamma = LAYER_NORM_GAMMA,
     .beta = LAYER_NORM_BETA,
     .mean = LAYER_NORM_MEAN,
     .rstd = LAYER_NORM_RSTD},
    {.dx = LAYER_NORM_B_DX,
     .dgamma = LAYER_NORM_B_DGAMMA,
     .dbeta = LAYER_NORM_B_DBETA,
     .dy = LAYER_NORM_B_DY,
     .x = LAYER_NORM_B_X,
     .gamma = LAYER_NORM_B_GAMMA,
     .mean = LAYER_NORM_B_MEAN,
     .rstd = LAYER_NORM_B_RSTD},
};

static gpu_norm call_of(const vjp_work *work) {
    const vjp_layer_norm_attributes *a = work->attributes;
    return gpu_norm_call(&slots[work->pass], work, vjp_layer_norm_sizes(work), a->eps);
}

static vjp_status run(const vjp_work *work) {
    gpu_norm n = call_of(work);
    return gpu_norm_run(&n);
}

static size_t workspace(const vjp_work *work) {
    gpu_norm n = call_of(work);
    return gpu_norm_workspace(&n);
}

const vjp_kernel gpu_layer_norm[VJP_PASS_COUNT] = {{run, NULL, VJP_BITS_CPU}, {run, workspace, VJP_BITS_CPU}};

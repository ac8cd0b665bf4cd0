/* SPDX-License-Identifier: MIT */
/* mean: the forward is a sum, the backward gives each element dy / length, by the formula in mean.wgsl and mean.metal.
 */
#include "gpu/ops/elementwise.h"
#include "gpu/ops/sums.h"

static gpu_sums sums_of(const vjp_work *work) {
    vjp_mean_sizes s = vjp_mean_sizes_of(work);
    return (gpu_sums){.term = GPU_ELEMENTS,
                      .out = MEAN_Y,
                      .in = {MEAN_X},
                      .outer = s.outer,
                      .length = s.length,
                      .inner = s.inner,
                      .factor = 1 / (double)s.length};
}

static vjp_status forward(const vjp_work *work) {
    gpu_sums s = sums_of(work);
    return gpu_run_sums(work, &s);
}

static size_t workspace(const vjp_work *work) {
    gpu_sums s = sums_of(work);
    return gpu_sums_workspace(work, &s);
}

static void more(gpu_launch *l) {
    gpu_f32(l, 1 / (double)vjp_mean_sizes_of(l->work).length);
}

static vjp_status backward(const vjp_work *work) {
    vjp_mean_sizes s = vjp_mean_sizes_of(work);
    return gpu_run_elements(work, &(gpu_elements){.operand = {{"out0", MEAN_B_DX}},
                                                  .row = MEAN_B_DY,
                                                  .inner = s.inner,
                                                  .span = s.length * s.inner,
                                                  .more = more});
}

const vjp_kernel gpu_mean[VJP_PASS_COUNT] = {{forward, workspace, VJP_STORAGE_16_32},
                                             {backward, NULL, VJP_STORAGE_16_32}};

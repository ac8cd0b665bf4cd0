/* SPDX-License-Identifier: MIT */
/* scale: y = factor * x, by the formula in scale.wgsl and scale.metal. The backward is the forward with dy for x. */
#include "gpu/ops/elementwise.h"

static void more(gpu_launch *l) {
    gpu_f32(l, ((const vjp_scale_attributes *)l->work->attributes)->factor);
}

static vjp_status run(const vjp_work *work) {
    return gpu_run_elements(work, &(gpu_elements){.operand = {{"out0", SCALE_Y}, {"in0", SCALE_X}}, .more = more});
}

const vjp_kernel gpu_scale[VJP_PASS_COUNT] = {{run, NULL, VJP_STORAGE_16_32}, {run, NULL, VJP_STORAGE_16_32}};

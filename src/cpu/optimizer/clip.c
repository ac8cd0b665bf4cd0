/* SPDX-License-Identifier: MIT */
/* clip on the CPU: three numbers, in double. */
#include <math.h>

#include "cpu/cpu.h"
#include "op/op.h"

extern const vjp_kernel CPU_NAME(clip)[VJP_PASS_COUNT];

static vjp_status run(const vjp_work *work) {
    const vjp_clip_attributes *a = work->attributes;
    float *scale = vjp_data(work, CLIP_SCALE), *norm_out = vjp_data(work, CLIP_NORM);
    double norm = sqrt((double)*(const float *)vjp_data(work, CLIP_SQUARES));
    if (norm_out) *norm_out = (float)norm;
    /* A NaN is not within, and its quotient is NaN. */
    if (scale) *scale = a->max_norm == 0 || norm <= a->max_norm ? 1 : (float)(a->max_norm / norm);
    return VJP_OK;
}

const vjp_kernel CPU_NAME(clip)[VJP_PASS_COUNT] = {{run, NULL, VJP_STORAGE_16_32}};

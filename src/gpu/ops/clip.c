/* SPDX-License-Identifier: MIT */
/* clip: three numbers, by one thread of clip.wgsl or clip.metal. */
#include <float.h>
#include <math.h>

#include "gpu/gpu.h"

static vjp_status run(const vjp_work *work) {
    const vjp_clip_attributes *a = work->attributes;
    int power = 0;
    double fraction = frexp(fmin(a->max_norm, (double)FLT_MAX), &power);
    gpu_launch l = gpu_begin(work, "clip");
    l.threads = gpu_threads(work->device);
    gpu_tensor(&l, "scale", CLIP_SCALE, 1);
    gpu_tensor(&l, "norm", CLIP_NORM, 1);
    gpu_tensor(&l, "squares", CLIP_SQUARES, 1);
    gpu_u32(&l, a->max_norm > 0);
    gpu_f32(&l, fraction);
    gpu_u32(&l, (int64_t)(uint32_t)power);
    return vjp_data(work, CLIP_SCALE) || vjp_data(work, CLIP_NORM) ? gpu_enqueue(&l, 1) : VJP_OK;
}

const vjp_kernel gpu_clip[VJP_PASS_COUNT] = {{run, NULL, VJP_STORAGE_16_32}};

/* SPDX-License-Identifier: MIT */
/* clip, plainly. A NaN norm gives a NaN scale; an infinite one gives 0. */
#include <math.h>

#include "ref/ref.h"

static vjp_status forward(const vjp_work *work) {
    const vjp_clip_attributes *a = work->attributes;
    double norm = sqrt(ref_get(work, CLIP_SQUARES, 0, 0));
    bool within = a->max_norm == 0 || norm <= a->max_norm;
    ref_put(work, CLIP_NORM, 0, norm);
    ref_put(work, CLIP_SCALE, 0, within ? 1 : a->max_norm / norm);
    return VJP_OK;
}

const vjp_kernel vjp_ref_clip[VJP_PASS_COUNT] = {{forward, NULL, REF_STORAGE}};

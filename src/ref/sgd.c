/* SPDX-License-Identifier: MIT */
/*
 * sgd, plainly. An element's inputs are all read before it is written, so the step may run in place. A scale that is
 * not finite skips the step.
 */
#include <math.h>

#include "ref/ref.h"

static vjp_status forward(const vjp_work *work) {
    const vjp_sgd_attributes *a = work->attributes;
    double lr = ref_get(work, SGD_LR, 0, 0), scale = ref_get(work, SGD_SCALE, 0, 1);
    for (int64_t i = 0; i < vjp_elements(work, SGD_W); i++) {
        double w = ref_get(work, SGD_W, i, 0);
        double g = ref_get(work, SGD_G, i, 0) * scale + (a->weight_decay != 0 ? a->weight_decay * w : 0);
        double before = ref_get(work, SGD_MOMENTUM, i, 0), momentum = a->beta * before + g;
        double next = w - lr * (a->nesterov ? g + a->beta * momentum : momentum);
        ref_put(work, SGD_W_OUT, i, isfinite(scale) ? next : w);
        ref_put(work, SGD_MOMENTUM_OUT, i, isfinite(scale) ? momentum : before);
    }
    return VJP_OK;
}

const vjp_kernel vjp_ref_sgd[VJP_PASS_COUNT] = {{forward, NULL, REF_STORAGE}};

/* SPDX-License-Identifier: MIT */
/*
 * adamw, plainly. An element's inputs are all read before it is written, so the step may run in place. Where m and v
 * are 0 and eps is 0, the direction m / sqrt(v) is 0 / 0 and the weight stays. A scale that is not finite skips the
 * step.
 */
#include <math.h>

#include "core/half.h"
#include "ref/ref.h"

/* 1 - beta^step, without the cancellation of that difference. */
static double correction(double beta, double step) {
    return -expm1(step * log(beta));
}

/* Weights that lie in halves: all upper ones, then all lower ones. */
static double get_weight(const vjp_work *work, int64_t i) {
    const vjp_adamw_attributes *a = work->attributes;
    const uint16_t *half = vjp_data(work, ADAMW_W);
    if (!a->halves) return ref_get(work, ADAMW_W, i, 0);
    return vjp_join_halves(half[i], half[i + vjp_elements(work, ADAMW_W)]);
}

static void put_weight(const vjp_work *work, int64_t i, double w) {
    const vjp_adamw_attributes *a = work->attributes;
    uint16_t *half = vjp_data(work, ADAMW_W_OUT);
    if (!a->halves) {
        ref_put(work, ADAMW_W_OUT, i, w);
    } else if (half) {
        half[i] = vjp_upper_half((float)w);
        half[i + vjp_elements(work, ADAMW_W)] = vjp_lower_half((float)w);
    }
}

static vjp_status forward(const vjp_work *work) {
    const vjp_adamw_attributes *a = work->attributes;
    double lr = ref_get(work, ADAMW_LR, 0, 0), step = ref_get(work, ADAMW_STEP, 0, 0);
    double scale = ref_get(work, ADAMW_SCALE, 0, 1);
    bool skips = !isfinite(scale);
    double correct_m = correction(a->beta1, step), correct_v = correction(a->beta2, step);
    for (int64_t i = 0; i < vjp_elements(work, ADAMW_W); i++) {
        double w = get_weight(work, i), g = ref_get(work, ADAMW_G, i, 0) * scale;
        double m = a->beta1 * ref_get(work, ADAMW_M, i, 0) + (1 - a->beta1) * g;
        double v = a->beta2 * ref_get(work, ADAMW_V, i, 0) + (1 - a->beta2) * g * g;
        double size = sqrt(v / correct_v) + a->eps;
        double direction = size == 0 ? 0 : m / correct_m / size;
        double next = w - lr * (direction + (a->weight_decay != 0 ? a->weight_decay * w : 0));
        ref_put(work, ADAMW_V_OUT, i, skips ? ref_get(work, ADAMW_V, i, 0) : v);
        ref_put(work, ADAMW_M_OUT, i, skips ? ref_get(work, ADAMW_M, i, 0) : m);
        put_weight(work, i, skips ? w : next);
    }
    return VJP_OK;
}

const vjp_kernel vjp_ref_adamw[VJP_PASS_COUNT] = {{forward, NULL, REF_STORAGE | VJP_TAKES_HALVES}};

/* SPDX-License-Identifier: MIT */
/*
 * adamw on the CPU: seven streams beside a few dozen instructions, so memory is the limit. What is the same for all
 * elements is computed once, in double: the bias corrections would lose half their digits as 1 - beta^step in f32
 * (docs/ops/adamw.md).
 *
 * Two things keep f32 from losing what matters. w changes by one FMA of the whole update, decay included; a factor
 * 1 - lr * weight_decay, which is 1 - 1e-6 in practice, would be wrong by 3% of that when rounded. And (1 - beta2) g
 * comes before the second g, which keeps v finite for gradients up to 5e20.
 */
#include <math.h>

#include "cpu/elementwise/elementwise.h"
#include "cpu/optimizer/decay.h"

extern const vjp_kernel CPU_NAME(adamw)[VJP_PASS_COUNT];

typedef struct adamw_parameters {
    float lr, scale, decay;             /* decay: weight_decay alone */
    float keep_m, take_m;               /* beta1, 1 - beta1 */
    float keep_v, take_v;               /* beta2, 1 - beta2 */
    float correct_m, correct_root, eps; /* 1 / (1 - beta1^step), 1 / sqrt(1 - beta2^step) */
} adamw_parameters;

INLINE void step(const void *parameters, element_vectors *e) {
    const adamw_parameters *p = parameters;
    vf w = e->in[0], g = vf_mul(e->in[1], vf_set(p->scale));
    vf m = vf_fma(e->in[2], vf_set(p->keep_m), vf_mul(g, vf_set(p->take_m)));
    vf v = vf_fma(e->in[3], vf_set(p->keep_v), vf_mul(vf_mul(g, vf_set(p->take_v)), g));
    vf size = vf_fma(vf_sqrt(v), vf_set(p->correct_root), vf_set(p->eps));
    /* Nothing averaged yet and no eps: 0 / 0, and the weight stays. */
    vf direction = vf_select(vf_equal(size, vf_zero()), vf_zero(), vf_div(vf_mul(m, vf_set(p->correct_m)), size));
    vf update = decayed(w, p->decay, direction);
    e->out[0] = vf_fma(update, vf_set(-p->lr), w);
    e->out[1] = m;
    e->out[2] = v;
}

/* A step that is skipped. */
INLINE void keep(const void *unused, element_vectors *e) {
    (void)unused;
    e->out[0] = e->in[0];
    e->out[1] = e->in[2];
    e->out[2] = e->in[3];
}

static const element_op op = {.inputs = 4,
                              .in = {{ADAMW_W, STORED}, {ADAMW_G, OTHER}, {ADAMW_M, SINGLE}, {ADAMW_V, SINGLE}},
                              .outputs = 3,
                              .out = {{ADAMW_W_OUT, STORED}, {ADAMW_M_OUT, SINGLE}, {ADAMW_V_OUT, SINGLE}}};

static void task(void *call, size_t i) {
    element_task(step, &op, call, i);
}

static void keep_task(void *call, size_t i) {
    element_task(keep, &op, call, i);
}

/* 1 - beta^step, without the cancellation of that difference. */
static double correction(double beta, double count) {
    return -expm1(count * log(beta));
}

static vjp_status run(const vjp_work *work) {
    const vjp_adamw_attributes *a = work->attributes;
    int64_t count;
    double value;
    if (!vjp_index_at(vjp_data(work, ADAMW_STEP), vjp_type(work, ADAMW_STEP), 0, &count, &value)) return VJP_INVALID;
    const float *scale = vjp_data(work, ADAMW_SCALE);
    adamw_parameters p = {
        .lr = *(const float *)vjp_data(work, ADAMW_LR),
        .scale = scale ? *scale : 1,
        .decay = (float)a->weight_decay,
        .keep_m = (float)a->beta1,
        .take_m = (float)(1 - a->beta1),
        .keep_v = (float)a->beta2,
        .take_v = (float)(1 - a->beta2),
        .correct_m = (float)(1 / correction(a->beta1, (double)count)),
        .correct_root = (float)(1 / sqrt(correction(a->beta2, (double)count))),
        .eps = (float)a->eps,
    };
    return element_run(work, &op, isfinite(p.scale) ? task : keep_task, &p);
}

const vjp_kernel CPU_NAME(adamw)[VJP_PASS_COUNT] = {{run, NULL, VJP_STORAGE_16_32}};

/* SPDX-License-Identifier: MIT */
/*
 * adamw on the CPU: seven streams beside a few dozen instructions, so memory is the limit. What is the same for all
 * elements is computed once, in double: the bias corrections would lose half their digits as 1 - beta^step in f32
 * (docs/ops/adamw.md).
 *
 * Moments may be stored in bf16; the arithmetic is the same, and the weight's step is made from the moments before they
 * are rounded.
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
    e->out[1] = e->in[1];
    e->out[2] = e->in[2];
}

/* Both for moments of each type: SINGLE or NARROW. */
#define STEP_OF(moment)                                                                                                \
    {                                                                                                                  \
        .inputs = 4, .in = {{ADAMW_W, STORED}, {ADAMW_G, OTHER}, {ADAMW_M, moment}, {ADAMW_V, moment}}, .outputs = 3,  \
        .out = {{ADAMW_W_OUT, STORED}, {ADAMW_M_OUT, moment}, {ADAMW_V_OUT, moment}}, .or_bf16 = true                  \
    }
#define KEEP_OF(moment)                                                                                                \
    {                                                                                                                  \
        .inputs = 3, .in = {{ADAMW_W, STORED}, {ADAMW_M, moment}, {ADAMW_V, moment}}, .outputs = 3, .out = {           \
            {ADAMW_W_OUT, STORED},                                                                                     \
            {ADAMW_M_OUT, moment},                                                                                     \
            {ADAMW_V_OUT, moment}                                                                                      \
        }                                                                                                              \
    }

static const element_op wide_step = STEP_OF(SINGLE), narrow_step = STEP_OF(NARROW);
static const element_op wide_keep = KEEP_OF(SINGLE), narrow_keep = KEEP_OF(NARROW);

static void wide_task(void *call, size_t i) {
    element_task(step, &wide_step, call, i);
}

static void narrow_task(void *call, size_t i) {
    element_task(step, &narrow_step, call, i);
}

static void wide_keep_task(void *call, size_t i) {
    element_task(keep, &wide_keep, call, i);
}

static void narrow_keep_task(void *call, size_t i) {
    element_task(keep, &narrow_keep, call, i);
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
    bool narrow = vjp_type(work, ADAMW_M) == VJP_BF16;
    if (!isfinite(p.scale))
        return narrow ? element_run(work, &narrow_keep, narrow_keep_task, &p)
                      : element_run(work, &wide_keep, wide_keep_task, &p);
    return narrow ? element_run(work, &narrow_step, narrow_task, &p) : element_run(work, &wide_step, wide_task, &p);
}

const vjp_kernel CPU_NAME(adamw)[VJP_PASS_COUNT] = {{run, NULL, VJP_STORAGE_16_32}};

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

#include "core/half.h"
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

static vjp_status step_all(const vjp_work *work) {
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

/* ---- Weights in halves ------------------------------------------------------------------------------- */

/* They are joined in the scratch, stepped there as others are, and taken apart again. */
typedef struct joined {
    const uint16_t *from; /* [2 * count] */
    uint16_t *to;
    float *whole; /* [count] */
    int64_t count;
} joined;

enum { JOINED_PIECE = 1 << 16 };

static int64_t end_of_piece(const joined *j, size_t i) {
    return vjp_min(((int64_t)i + 1) * JOINED_PIECE, j->count);
}

static void join_piece(void *call, size_t i) {
    const joined *j = call;
    const uint16_t *upper = j->from, *lower = upper + j->count;
    for (int64_t k = (int64_t)i * JOINED_PIECE, end = end_of_piece(j, i); k < end; k++)
        j->whole[k] = vjp_join_halves(upper[k], lower[k]);
}

static void part_piece(void *call, size_t i) {
    const joined *j = call;
    uint16_t *upper = j->to, *lower = upper + j->count;
    for (int64_t k = (int64_t)i * JOINED_PIECE, end = end_of_piece(j, i); k < end; k++) {
        upper[k] = vjp_upper_half(j->whole[k]);
        lower[k] = vjp_lower_half(j->whole[k]);
    }
}

static size_t workspace(const vjp_work *work) {
    const vjp_adamw_attributes *a = work->attributes;
    return a->halves ? (size_t)vjp_elements(work, ADAMW_W) * sizeof(float) : 0;
}

static vjp_status run(const vjp_work *work) {
    const vjp_adamw_attributes *a = work->attributes;
    if (!a->halves) return step_all(work);
    joined j = {.from = vjp_data(work, ADAMW_W),
                .to = vjp_data(work, ADAMW_W_OUT),
                .whole = work->workspace,
                .count = vjp_elements(work, ADAMW_W)};
    const size_t pieces = (size_t)vjp_divide_up(j.count, JOINED_PIECE);
    vjp_parallel(work->device, pieces, join_piece, &j);
    vjp_work inner = *work;
    vjp_tensor whole = *work->tensor[ADAMW_W];
    whole.data = j.whole;
    whole.offset = 0;
    inner.tensor[ADAMW_W] = &whole;
    if (j.to) inner.tensor[ADAMW_W_OUT] = &whole;
    vjp_status status = step_all(&inner);
    if (status == VJP_OK && j.to) vjp_parallel(work->device, pieces, part_piece, &j);
    return status;
}

const vjp_kernel CPU_NAME(adamw)[VJP_PASS_COUNT] = {{run, workspace, VJP_STORAGE_16_32 | VJP_TAKES_HALVES}};

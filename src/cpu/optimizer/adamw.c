/*
 * adamw on the CPU: seven streams past a few dozen instructions, so memory is the limit. Each vector is read, computed
 * and written before the next, in place or not. What is the same for all elements is computed once, in double: the
 * bias corrections would lose half their digits as 1 - beta^step in f32 (docs/ops/adamw.md).
 *
 * Two things keep f32 from losing what matters. w changes by one FMA of the whole update, decay included; a factor
 * 1 - lr * weight_decay, which is 1 - 1e-6 in practice, would be wrong by 3% of that when rounded. And (1 - beta2) g
 * comes before the second g, which keeps v finite for gradients up to 5e20.
 */
#include <math.h>

#include "cpu/elementwise/elements.h"
#include "cpu/simd/stream.h"
#include "op/op.h"

extern const vjp_kernel CPU_NAME(adamw)[VJP_PASS_COUNT];

typedef struct step_call {
    const void *w, *g;
    const float *m, *v;
    void *w_out;
    float *m_out, *v_out;
    float lr, scale, decay;             /* decay: weight_decay alone */
    float keep_m, take_m;               /* beta1, 1 - beta1 */
    float keep_v, take_v;               /* beta2, 1 - beta2 */
    float correct_m, correct_root, eps; /* 1 / (1 - beta1^step), 1 / sqrt(1 - beta2^step) */
    write_mode mode;
    cpu_cut cut;
} step_call;

/* Elements [i, i + n), n up to 16. */
INLINE void step_vector(const step_call *c, int64_t i, int64_t n, vjp_dtype dtype, vjp_dtype g_type, write_mode mode) {
    vf w = vf_load_part(dtype, c->w, i, n), g = vf_mul(vf_load_part(g_type, c->g, i, n), vf_set(c->scale));
    vf m = vf_fma(vf_load_part(VJP_F32, c->m, i, n), vf_set(c->keep_m), vf_mul(g, vf_set(c->take_m)));
    vf v = vf_fma(vf_load_part(VJP_F32, c->v, i, n), vf_set(c->keep_v), vf_mul(vf_mul(g, vf_set(c->take_v)), g));
    vf size = vf_fma(vf_sqrt(v), vf_set(c->correct_root), vf_set(c->eps));
    /* Nothing averaged yet and no eps: 0 / 0, and the weight stays. */
    vf direction = vf_select(vf_equal(size, vf_zero()), vf_zero(), vf_div(vf_mul(m, vf_set(c->correct_m)), size));
    vf update = vf_fma(w, vf_set(c->decay), direction);
    if (c->w_out) vf_write_part(mode, dtype, c->w_out, i, n, vf_fma(update, vf_set(-c->lr), w));
    if (c->m_out) vf_write_part(mode, VJP_F32, c->m_out, i, n, m);
    if (c->v_out) vf_write_part(mode, VJP_F32, c->v_out, i, n, v);
}

#include "cpu/optimizer/steps.h"

/* 1 - beta^step, without the cancellation of that difference. */
static double correction(double beta, double step) {
    return -expm1(step * log(beta));
}

static vjp_status run(const vjp_work *work) {
    const vjp_adamw_attributes *a = work->attributes;
    int64_t count = vjp_elements(work, ADAMW_W), step;
    double value;
    if (!vjp_index_at(vjp_data(work, ADAMW_STEP), vjp_type(work, ADAMW_STEP), 0, &step, &value)) return VJP_INVALID;
    const float *scale = vjp_data(work, ADAMW_SCALE);
    step_call call = {
        .w = vjp_data(work, ADAMW_W),
        .g = vjp_data(work, ADAMW_G),
        .m = vjp_data(work, ADAMW_M),
        .v = vjp_data(work, ADAMW_V),
        .w_out = vjp_data(work, ADAMW_W_OUT),
        .m_out = vjp_data(work, ADAMW_M_OUT),
        .v_out = vjp_data(work, ADAMW_V_OUT),
        .lr = *(const float *)vjp_data(work, ADAMW_LR),
        .scale = scale ? *scale : 1,
        .decay = (float)a->weight_decay,
        .keep_m = (float)a->beta1,
        .take_m = (float)(1 - a->beta1),
        .keep_v = (float)a->beta2,
        .take_v = (float)(1 - a->beta2),
        .correct_m = (float)(1 / correction(a->beta1, (double)step)),
        .correct_root = (float)(1 / sqrt(correction(a->beta2, (double)step))),
        .eps = (float)a->eps,
    };
    vjp_dtype g_type = vjp_type(work, ADAMW_G);
    bool in_place = call.w_out == call.w || call.m_out == call.m || call.v_out == call.v;
    int64_t moved = 2 * (int64_t)dtype_bytes(work->storage) + (int64_t)dtype_bytes(g_type) + 4 * (int64_t)sizeof(float);
    bool aligned = vf_stream_aligned(work->storage, call.w_out) && vf_stream_aligned(VJP_F32, call.m_out) &&
                   vf_stream_aligned(VJP_F32, call.v_out);
    call.mode = write_mode_of(work, ADAMW_W_OUT, count * moved, aligned, in_place);
    run_steps(work, &call, g_type, count, moved);
    return VJP_OK;
}

const vjp_kernel CPU_NAME(adamw)[VJP_PASS_COUNT] = {{run, NULL, VJP_BITS_CPU}};

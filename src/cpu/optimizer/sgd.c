/*
 * sgd on the CPU: five streams (w, momentum and g read, w and momentum written), each vector read before it is written,
 * so that both may be changed in place. The weights change by one FMA of the whole update.
 */
#include "cpu/elementwise/elements.h"
#include "cpu/simd/stream.h"
#include "op/op.h"

extern const vjp_kernel CPU_NAME(sgd)[VJP_PASS_COUNT];

typedef struct step_call {
    const void *w, *g;
    const float *momentum; /* NULL: 0 */
    void *w_out;
    float *momentum_out;
    float lr, scale, decay, beta;
    bool nesterov;
    write_mode mode;
    cpu_cut cut;
} step_call;

/* Elements [i, i + n), n up to 16. */
INLINE void step_vector(const step_call *c, int64_t i, int64_t n, vjp_dtype dtype, vjp_dtype g_type, write_mode mode) {
    vf w = vf_load_part(dtype, c->w, i, n), beta = vf_set(c->beta);
    vf g = vf_fma(w, vf_set(c->decay), vf_mul(vf_load_part(g_type, c->g, i, n), vf_set(c->scale)));
    vf momentum = c->momentum ? vf_fma(vf_load_part(VJP_F32, c->momentum, i, n), beta, g) : g;
    vf direction = c->nesterov ? vf_fma(momentum, beta, g) : momentum;
    if (c->w_out) vf_write_part(mode, dtype, c->w_out, i, n, vf_fma(direction, vf_set(-c->lr), w));
    if (c->momentum_out) vf_write_part(mode, VJP_F32, c->momentum_out, i, n, momentum);
}

#include "cpu/optimizer/steps.h"

static vjp_status run(const vjp_work *work) {
    const vjp_sgd_attributes *a = work->attributes;
    int64_t count = vjp_elements(work, SGD_W);
    const float *scale = vjp_data(work, SGD_SCALE);
    step_call call = {
        .w = vjp_data(work, SGD_W),
        .g = vjp_data(work, SGD_G),
        .momentum = vjp_data(work, SGD_MOMENTUM),
        .w_out = vjp_data(work, SGD_W_OUT),
        .momentum_out = vjp_data(work, SGD_MOMENTUM_OUT),
        .lr = *(const float *)vjp_data(work, SGD_LR),
        .scale = scale ? *scale : 1,
        .decay = (float)a->weight_decay,
        .beta = (float)a->beta,
        .nesterov = a->nesterov,
    };
    vjp_dtype g_type = vjp_type(work, SGD_G);
    bool in_place = call.w_out == call.w || (call.momentum && call.momentum_out == call.momentum);
    int64_t moved = 2 * (int64_t)dtype_bytes(work->storage) + (int64_t)dtype_bytes(g_type) + 2 * (int64_t)sizeof(float);
    bool aligned = vf_stream_aligned(work->storage, call.w_out) && vf_stream_aligned(VJP_F32, call.momentum_out);
    call.mode = write_mode_of(work, SGD_W_OUT, count * moved, aligned, in_place);
    run_steps(work, &call, g_type, count, moved);
    return VJP_OK;
}

const vjp_kernel CPU_NAME(sgd)[VJP_PASS_COUNT] = {{run, NULL, VJP_BITS_CPU}};

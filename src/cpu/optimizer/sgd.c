/* SPDX-License-Identifier: MIT */
/* sgd on the CPU: five streams, at the speed of memory. The weights change by one FMA of the whole update. */
#include <math.h>

#include "cpu/elementwise/elementwise.h"
#include "cpu/optimizer/decay.h"

extern const vjp_kernel CPU_NAME(sgd)[VJP_PASS_COUNT];

typedef struct sgd_parameters {
    float lr, scale, decay, beta;
    bool nesterov, has_momentum; /* without momentum its old value is not even 0: 0 * beta + -0 is 0 */
} sgd_parameters;

INLINE void step(const void *parameters, element_vectors *e) {
    const sgd_parameters *p = parameters;
    vf w = e->in[0], beta = vf_set(p->beta);
    vf g = decayed(w, p->decay, vf_mul(e->in[1], vf_set(p->scale)));
    vf momentum = p->has_momentum ? vf_fma(e->in[2], beta, g) : g;
    vf direction = p->nesterov ? vf_fma(momentum, beta, g) : momentum;
    e->out[0] = vf_fma(direction, vf_set(-p->lr), w);
    e->out[1] = momentum;
}

/* A step that is skipped. */
INLINE void keep(const void *unused, element_vectors *e) {
    (void)unused;
    e->out[0] = e->in[0];
    e->out[1] = e->in[2];
}

static const element_op op = {.inputs = 3,
                              .in = {{SGD_W, STORED}, {SGD_G, OTHER}, {SGD_MOMENTUM, SINGLE | OPTIONAL}},
                              .or_bf16 = true,
                              .outputs = 2,
                              .out = {{SGD_W_OUT, STORED}, {SGD_MOMENTUM_OUT, SINGLE}}};

static void task(void *call, size_t i) {
    element_task(step, &op, call, i);
}

static void keep_task(void *call, size_t i) {
    element_task(keep, &op, call, i);
}

static vjp_status run(const vjp_work *work) {
    const vjp_sgd_attributes *a = work->attributes;
    const float *scale = vjp_data(work, SGD_SCALE);
    sgd_parameters p = {.lr = *(const float *)vjp_data(work, SGD_LR),
                        .scale = scale ? *scale : 1,
                        .decay = (float)a->weight_decay,
                        .beta = (float)a->beta,
                        .nesterov = a->nesterov,
                        .has_momentum = vjp_data(work, SGD_MOMENTUM) != NULL};
    return element_run(work, &op, isfinite(p.scale) ? task : keep_task, &p);
}

const vjp_kernel CPU_NAME(sgd)[VJP_PASS_COUNT] = {{run, NULL, VJP_STORAGE_16_32}};

/* SPDX-License-Identifier: MIT */
/* scale on the CPU: y = factor * x, at the speed of memory. The backward is the forward with dy for x. */
#include "cpu/elementwise/elementwise.h"

extern const vjp_kernel CPU_NAME(scale)[VJP_PASS_COUNT];

INLINE void product(const void *factor, element_vectors *e) {
    e->out[0] = vf_mul(vf_set(*(const float *)factor), e->in[0]);
}

static const element_op op = {.inputs = 1, .in = {{SCALE_X, STORED}}, .outputs = 1, .out = {{SCALE_Y, STORED}}};

static void task(void *call, size_t i) {
    element_task(product, &op, call, i);
}

static vjp_status run(const vjp_work *work) {
    const vjp_scale_attributes *attributes = work->attributes;
    float factor = (float)attributes->factor;
    return element_run(work, &op, task, &factor);
}

const vjp_kernel CPU_NAME(scale)[VJP_PASS_COUNT] = {
    {run, NULL, VJP_STORAGE_16_32},
    {run, NULL, VJP_STORAGE_16_32},
};

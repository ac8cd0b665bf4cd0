/* SPDX-License-Identifier: MIT */
/* square on the CPU: two formulas. */
#include "cpu/elementwise/elementwise.h"

extern const vjp_kernel CPU_NAME(square)[VJP_PASS_COUNT];

INLINE void square(const void *parameters, element_vectors *e) {
    (void)parameters;
    e->out[0] = vf_mul(e->in[0], e->in[0]);
}

INLINE void slope(const void *parameters, element_vectors *e) {
    (void)parameters;
    e->out[0] = vf_mul(vf_mul(vf_set(2), e->in[1]), e->in[0]);
}

static const element_op forward_op = {
    .inputs = 1, .in = {{SQUARE_X, STORED}}, .outputs = 1, .out = {{SQUARE_Y, STORED}}};
static const element_op backward_op = {
    .inputs = 2, .in = {{SQUARE_B_DY, STORED}, {SQUARE_B_X, STORED}}, .outputs = 1, .out = {{SQUARE_B_DX, STORED}}};

static void forward_task(void *call, size_t i) {
    element_task(square, &forward_op, call, i);
}

static void backward_task(void *call, size_t i) {
    element_task(slope, &backward_op, call, i);
}

static vjp_status forward(const vjp_work *work) {
    return element_run(work, &forward_op, forward_task, NULL);
}

static vjp_status backward(const vjp_work *work) {
    return element_run(work, &backward_op, backward_task, NULL);
}

const vjp_kernel CPU_NAME(square)[VJP_PASS_COUNT] = {
    {forward, NULL, VJP_STORAGE_16_32},
    {backward, NULL, VJP_STORAGE_16_32},
};

/* SPDX-License-Identifier: MIT */
/* swiglu on the CPU: y = silu(gate) up. silu and its derivative share one exp. */
#include "cpu/elementwise/activation.h"
#include "cpu/elementwise/elementwise.h"

extern const vjp_kernel CPU_NAME(swiglu)[VJP_PASS_COUNT];

INLINE void forward_formula(const void *unused, element_vectors *e) {
    (void)unused;
    e->out[0] = vf_mul(activate(VJP_ACTIVATION_SILU, e->in[0]), e->in[1]);
}

static const element_op forward_op = {
    .inputs = 2, .in = {{SWIGLU_GATE, STORED}, {SWIGLU_UP, STORED}}, .outputs = 1, .out = {{SWIGLU_Y, STORED}}};

/* The slope first, which may be 0: dy * up may overflow. */
INLINE void backward_formula(const void *unused, element_vectors *e) {
    (void)unused;
    vf dy = e->in[0], gate = e->in[1], up = e->in[2], slope, silu = silu_and_slope(gate, &slope);
    e->out[0] = vf_mul(vf_mul(slope, dy), up);
    e->out[1] = vf_mul(dy, silu);
}

static const element_op backward_op = {.inputs = 3,
                                       .in = {{SWIGLU_B_DY, STORED}, {SWIGLU_B_GATE, STORED}, {SWIGLU_B_UP, STORED}},
                                       .outputs = 2,
                                       .out = {{SWIGLU_B_DGATE, STORED}, {SWIGLU_B_DUP, STORED}}};

/* With y, by the forward's formula: the bits are the forward's. */
INLINE void repeating_formula(const void *unused, element_vectors *e) {
    backward_formula(unused, e);
    e->out[2] = vf_mul(activate(VJP_ACTIVATION_SILU, e->in[1]), e->in[2]);
}

static const element_op repeating_op = {
    .inputs = 3,
    .in = {{SWIGLU_B_DY, STORED}, {SWIGLU_B_GATE, STORED}, {SWIGLU_B_UP, STORED}},
    .outputs = 3,
    .out = {{SWIGLU_B_DGATE, STORED}, {SWIGLU_B_DUP, STORED}, {SWIGLU_B_Y, STORED}}};

static void forward_task(void *call, size_t i) {
    element_task(forward_formula, &forward_op, call, i);
}

static void backward_task(void *call, size_t i) {
    element_task(backward_formula, &backward_op, call, i);
}

static void repeating_task(void *call, size_t i) {
    element_task(repeating_formula, &repeating_op, call, i);
}

static vjp_status forward(const vjp_work *work) {
    return element_run(work, &forward_op, forward_task, NULL);
}

static vjp_status backward(const vjp_work *work) {
    if (work->tensor[SWIGLU_B_Y]) return element_run(work, &repeating_op, repeating_task, NULL);
    return element_run(work, &backward_op, backward_task, NULL);
}

const vjp_kernel CPU_NAME(swiglu)[VJP_PASS_COUNT] = {
    {forward, NULL, VJP_STORAGE_16_32},
    {backward, NULL, VJP_STORAGE_16_32},
};

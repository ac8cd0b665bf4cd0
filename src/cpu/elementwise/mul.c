/* SPDX-License-Identifier: MIT */
/* mul on the CPU; rows and sums over rows: broadcast.h. */
#include "cpu/elementwise/broadcast.h"

extern const vjp_kernel CPU_NAME(mul)[VJP_PASS_COUNT];

INLINE void product(const void *unused, element_vectors *e) {
    (void)unused;
    e->out[0] = vf_mul(e->in[0], e->in[1]);
}

static const element_op forward_op = {
    .inputs = 2, .in = {{MUL_A, STORED}, {MUL_B, OTHER | ROW}}, .outputs = 1, .out = {{MUL_Y, STORED}}};

INLINE void gradients(const void *unused, element_vectors *e) {
    (void)unused;
    vf dy = e->in[0], a = e->in[1], b = e->in[2];
    e->out[0] = vf_mul(dy, b);
    e->out[1] = vf_mul(dy, a);
}

static const element_op backward_op = {
    .inputs = 3,
    .in = {{MUL_B_DY, STORED}, {MUL_B_A, STORED | OPTIONAL}, {MUL_B_B, OTHER | ROW | OPTIONAL}},
    .outputs = 2,
    .out = {{MUL_B_DA, STORED}, {MUL_B_DB, EITHER}}};

static void forward_task(void *call, size_t i) {
    element_task(product, &forward_op, call, i);
}

static void backward_task(void *call, size_t i) {
    broadcast_backward_task(gradients, &backward_op, call, i);
}

static vjp_status forward(const vjp_work *work) {
    return broadcast_forward(work, &forward_op, forward_task);
}

static vjp_status backward(const vjp_work *work) {
    return broadcast_backward(work, &backward_op, backward_task);
}

const vjp_kernel CPU_NAME(mul)[VJP_PASS_COUNT] = {
    {forward, broadcast_forward_workspace, VJP_STORAGE_16_32},
    {backward, broadcast_backward_workspace, VJP_STORAGE_16_32},
};

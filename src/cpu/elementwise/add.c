/* SPDX-License-Identifier: MIT */
/* add on the CPU; rows and sums over rows: broadcast.h. */
#include "cpu/elementwise/broadcast.h"

extern const vjp_kernel CPU_NAME(add)[VJP_PASS_COUNT];

INLINE void sum(const void *unused, element_vectors *e) {
    (void)unused;
    e->out[0] = vf_add(e->in[0], e->in[1]);
}

static const element_op forward_op = {
    .inputs = 2, .in = {{ADD_A, STORED}, {ADD_B, OTHER | ROW}}, .outputs = 1, .out = {{ADD_Y, STORED}}};

INLINE void gradients(const void *unused, element_vectors *e) {
    (void)unused;
    e->out[0] = e->out[1] = e->in[0];
}

static const element_op backward_op = {
    .inputs = 1, .in = {{ADD_B_DY, STORED}}, .outputs = 2, .out = {{ADD_B_DA, STORED}, {ADD_B_DB, EITHER}}};

static void forward_task(void *call, size_t i) {
    element_task(sum, &forward_op, call, i);
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

const vjp_kernel CPU_NAME(add)[VJP_PASS_COUNT] = {
    {forward, broadcast_forward_workspace, VJP_STORAGE_16_32},
    {backward, broadcast_backward_workspace, VJP_STORAGE_16_32},
};

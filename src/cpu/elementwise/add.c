/* add on the CPU; how it is done: broadcast.h. */
#include "cpu/elementwise/broadcast.h"

extern const vjp_kernel CPU_NAME(add)[VJP_PASS_COUNT];

static void forward_f32(void *call, size_t task) {
    broadcast_task(call, task, VJP_F32, false);
}

static void forward_bf16(void *call, size_t task) {
    broadcast_task(call, task, VJP_BF16, false);
}

static void forward_f16(void *call, size_t task) {
    broadcast_task(call, task, VJP_F16, false);
}

static void backward_f32(void *call, size_t task) {
    broadcast_backward_task(call, task, VJP_F32, false);
}

static void backward_bf16(void *call, size_t task) {
    broadcast_backward_task(call, task, VJP_BF16, false);
}

static void backward_f16(void *call, size_t task) {
    broadcast_backward_task(call, task, VJP_F16, false);
}

static const vjp_task forward_tasks[] = {[VJP_F32] = forward_f32, [VJP_BF16] = forward_bf16, [VJP_F16] = forward_f16};

static const vjp_task backward_tasks[] = {
    [VJP_F32] = backward_f32, [VJP_BF16] = backward_bf16, [VJP_F16] = backward_f16};

static vjp_status forward(const vjp_work *work) {
    return broadcast_run(work, forward_tasks, ADD_Y, ADD_A, ADD_B);
}

static vjp_status backward(const vjp_work *work) {
    return broadcast_backward(work, backward_tasks, -1, -1);
}

const vjp_kernel CPU_NAME(add)[VJP_PASS_COUNT] = {
    {forward, broadcast_forward_workspace, VJP_BITS_CPU},
    {backward, broadcast_backward_workspace, VJP_BITS_CPU},
};

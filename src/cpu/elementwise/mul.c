/* mul on the CPU; how it is done: broadcast.h. */
#include "cpu/elementwise/broadcast.h"

extern const vjp_kernel CPU_NAME(mul)[VJP_PASS_COUNT];

static void forward_f32(void *call, size_t task) {
    broadcast_task(call, task, VJP_F32, true);
}

static void forward_bf16(void *call, size_t task) {
    broadcast_task(call, task, VJP_BF16, true);
}

static void forward_f16(void *call, size_t task) {
    broadcast_task(call, task, VJP_F16, true);
}

static void backward_f32(void *call, size_t task) {
    broadcast_backward_task(call, task, VJP_F32, true);
}

static void backward_bf16(void *call, size_t task) {
    broadcast_backward_task(call, task, VJP_BF16, true);
}

static void backward_f16(void *call, size_t task) {
    broadcast_backward_task(call, task, VJP_F16, true);
}

static const vjp_task forward_tasks[] = {[VJP_F32] = forward_f32, [VJP_BF16] = forward_bf16, [VJP_F16] = forward_f16};

static const vjp_task backward_tasks[] = {
    [VJP_F32] = backward_f32, [VJP_BF16] = backward_bf16, [VJP_F16] = backward_f16};

static vjp_status forward(const vjp_work *work) {
    return broadcast_run(work, forward_tasks, MUL_Y, MUL_A, MUL_B);
}

/* A da alone is the forward's product with dy for a. */
static vjp_status backward(const vjp_work *work) {
    if (!work->tensor[MUL_B_DB]) return broadcast_run(work, forward_tasks, MUL_B_DA, MUL_B_DY, MUL_B_B);
    return broadcast_backward(work, backward_tasks, MUL_B_A, MUL_B_B);
}

const vjp_kernel CPU_NAME(mul)[VJP_PASS_COUNT] = {
    {forward, broadcast_forward_workspace, VJP_BITS_CPU},
    {backward, broadcast_backward_workspace, VJP_BITS_CPU},
};

/* SPDX-License-Identifier: MIT */
/*
 * cast on the CPU: every storage type to every other, at the speed of memory. The loads and stores of vec.h convert,
 * and they round to nearest even; there is nothing between them. The backward is the forward with dy for x.
 */
#include "cpu/elementwise/elementwise.h"

extern const vjp_kernel CPU_NAME(cast)[VJP_PASS_COUNT];

INLINE void same(const void *unused, element_vectors *e) {
    (void)unused;
    e->out[0] = e->in[0];
}

static const element_op op = {
    .inputs = 1, .in = {{CAST_X, STORED}}, .outputs = 1, .out = {{CAST_Y, OTHER}}, .any_other = true};

static void task(void *call, size_t i) {
    element_task(same, &op, call, i);
}

static vjp_status run(const vjp_work *work) {
    return element_run(work, &op, task, NULL);
}

const vjp_kernel CPU_NAME(cast)[VJP_PASS_COUNT] = {
    {run, NULL, VJP_STORAGE_16_32},
    {run, NULL, VJP_STORAGE_16_32},
};

/* SPDX-License-Identifier: MIT */
/* swiglu: y = silu(gate) up, by the formulas in swiglu.wgsl and swiglu.metal. */
#include "gpu/ops/elementwise.h"

static vjp_status forward(const vjp_work *work) {
    return gpu_run_elements(work,
                            &(gpu_elements){.operand = {{"out0", SWIGLU_Y}, {"in0", SWIGLU_GATE}, {"in1", SWIGLU_UP}}});
}

static vjp_status backward(const vjp_work *work) {
    return gpu_run_elements(work, &(gpu_elements){.operand = {{"out0", SWIGLU_B_DGATE},
                                                              {"out1", SWIGLU_B_DUP},
                                                              {"out2", SWIGLU_B_Y},
                                                              {"in0", SWIGLU_B_DY},
                                                              {"in1", SWIGLU_B_UP},
                                                              {"in2", SWIGLU_B_GATE}}});
}

const vjp_kernel gpu_swiglu[VJP_PASS_COUNT] = {{forward, NULL, VJP_STORAGE_16_32}, {backward, NULL, VJP_STORAGE_16_32}};

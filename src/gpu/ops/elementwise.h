/* SPDX-License-Identifier: MIT */
/*
 * The elementwise ops: one loop (shaders/elementwise.wgsl, .metal), to which an op adds its formula in a shader of its
 * own. The host says which tensors the formula sees as out0 to out2 and in0 to in3.
 */
#ifndef VJP_GPU_ELEMENTWISE_H
#define VJP_GPU_ELEMENTWISE_H

#include "gpu/gpu.h"

typedef struct gpu_element_operand {
    const char *name; /* NULL ends a list */
    int slot;
} gpu_element_operand;

enum { GPU_ELEMENT_OPERANDS = 8 };

typedef struct gpu_elements {
    gpu_element_operand operand[GPU_ELEMENT_OPERANDS]; /* all of one shape; outputs may be absent */
    /* The slot that is in1, repeated: element e has element e / span * inner + e % inner. span 0: there is none. */
    int row;
    int64_t inner, span;
    /* Adds what else the formula has: operands and numbers. */
    void (*more)(gpu_launch *l);
    bool reports; /* bad values: it runs even where all outputs are absent */
} gpu_elements;

/* Runs the formula of the op on all elements of the first operand's shape; nothing where all outputs are absent. */
vjp_status gpu_run_elements(const vjp_work *work, const gpu_elements *e);

#endif

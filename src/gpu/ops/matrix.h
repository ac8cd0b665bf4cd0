/* SPDX-License-Identifier: MIT */
/* Numbers that a kernel sees under a name: a tensor of the call, some of its elements, or a range of the workspace. */
#ifndef VJP_GPU_MATRIX_H
#define VJP_GPU_MATRIX_H

#include "gpu/gpu.h"

typedef enum gpu_place { GPU_NOWHERE, GPU_TENSOR, GPU_WORKSPACE } gpu_place;

typedef struct gpu_matrix {
    gpu_place place; /* GPU_NOWHERE: absent */
    int slot;        /* of a tensor */
    int64_t first;   /* element of a tensor that the kernel sees as its element 0 */
    int64_t count;   /* of elements; of a tensor, 0: all */
    size_t offset;   /* of the workspace, in bytes; there everything is f32 */
    bool adds;       /* stores add, even where the call does not accumulate */
} gpu_matrix;

gpu_matrix gpu_matrix_of(int slot);
gpu_matrix gpu_matrix_scratch(size_t offset, int64_t count);

/* `count` of its elements, from element `first` on. */
gpu_matrix gpu_matrix_slice(const gpu_matrix *m, int64_t first, int64_t count);

/*
 * Gives it to a launch. `run` is as for gpu_tensor(); inputs are read by fours where that allows it. Every launch of a
 * kernel lists the same operands in the same order, absent ones too, because a pipeline's key is made of them.
 */
void gpu_matrix_bind(gpu_launch *l, const char *name, const gpu_matrix *m, int64_t run, bool output);

#endif

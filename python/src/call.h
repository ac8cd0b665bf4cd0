/* SPDX-License-Identifier: MIT */
/* A call of an op from Python, for the files that run it: call.c on the host, call_gpu.c on a GPU. */
#ifndef VJP_PYTHON_CALL_H
#define VJP_PYTHON_CALL_H

#include "core.h"

typedef struct call {
    const op_function *f;
    int wanted[VJP_MAX_SLOTS], wanted_count; /* the outputs to compute, in the order of the results */
    bool bare;                               /* the result is one array instead of a tuple */
    bool created[VJP_MAX_SLOTS];
    const array *like; /* the first array of the caller: results are of its kind */
    const vjp_tensor *tensors[VJP_MAX_SLOTS];
    PyObject *values[MAX_ARGUMENTS]; /* borrowed */
    array arrays[VJP_MAX_SLOTS];
    union {
        float f32;
        double f64;
        int64_t i64;
    } numbers[VJP_MAX_SLOTS]; /* Python numbers that stand for tensors of no axes */
    bool has_attributes;
    int64_t attributes[MAX_ATTRIBUTES];
} call;

/* An argument after tensors and attributes, borrowed; NULL where it is absent or None. */
PyObject *call_extra(const call *c, int argument);

/* Makes the outputs that are wanted and not given. False with an exception set on failure. */
bool call_create_outputs(call *c, vjp_device *device);

/* The array or the tuple that the function returns. */
PyObject *call_results(call *c);

/* The GPU that holds all arrays, -1 for the host. False with an exception set if they are in different places. */
bool call_find_gpu(call *c, int *gpu);
PyObject *call_run_on_gpu(call *c, int gpu);

#endif

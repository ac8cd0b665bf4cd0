/* SPDX-License-Identifier: MIT */
/* A call of an op from Python, for the files that run it: call.c on the host, call_gpu.c on a GPU, call_many.c several.
 */
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

/* A call of `f` without arguments; call_release() frees what it holds. */
void call_begin(call *c, const op_function *f);
void call_release(call *c);

/* Sets an argument by its name; then call_drop_none() makes inputs that are None absent. */
bool call_bind_name(call *c, PyObject *name, PyObject *value);
void call_drop_none(call *c);

/* Reads all arguments that are set. False with an exception set on failure, here and below. */
bool call_read(call *c);

bool call_run_on_host(call *c);

/* An argument after tensors and attributes, borrowed; NULL where it is absent or None. */
PyObject *call_extra(const call *c, int argument);

/* Makes the outputs that are wanted and not given. */
bool call_create_outputs(call *c, vjp_device *device);

/* The array or the tuple that the function returns. */
PyObject *call_results(call *c);

/* The GPU that holds all arrays, -1 for the host. False with an exception set if they are in different places. */
bool call_find_gpu(call *c, int *gpu);

/* Runs calls of one function with the same attributes there, as one where that is possible. */
bool call_run_on_gpu(call *calls, size_t count, int gpu);

#endif

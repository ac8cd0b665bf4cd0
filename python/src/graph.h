/* SPDX-License-Identifier: MIT */
/* What graph.c and program.c share. */
#ifndef VJP_PYTHON_GRAPH_H
#define VJP_PYTHON_GRAPH_H

#include "core.h"

/* The graph of a capsule, for PyArg_ParseTuple()'s "O&". */
int graph_of(PyObject *object, void *graph);

/* A sequence of values as an array that PyMem_Free() takes; NULL with an exception set on failure. */
vjp_value *graph_read_values(PyObject *sequence, size_t *count);

PyObject *graph_shape_tuple(const vjp_tensor *t);

#endif

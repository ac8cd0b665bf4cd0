/* SPDX-License-Identifier: MIT */
/*
 * Several calls of one function, which a GPU may run as one (vjp_call_many). All are read before the first
 * runs. On the host they run one by one.
 */
#include "call.h"

#include <string.h>

/* All arguments by name, in a dict. */
static bool bind_dict(call *c, PyObject *arguments) {
    PyObject *name, *value;
    Py_ssize_t at = 0;
    if (!PyDict_Check(arguments)) {
        PyErr_Format(PyExc_TypeError, "%s: each call must be a dict of its arguments, not %R", c->f->name, arguments);
        return false;
    }
    memset(c->values, 0, sizeof c->values[0] * (size_t)c->f->arguments);
    while (PyDict_Next(arguments, &at, &name, &value))
        if (!call_bind_name(c, name, value)) return false;
    call_drop_none(c);
    return true;
}

/* Whether the calls are in one place and have the same attributes, as vjp_call_many() needs them. */
static bool are_alike(call *calls, Py_ssize_t count, int *gpu) {
    const op_function *f = calls[0].f;
    for (Py_ssize_t i = 0; i < count; i++) {
        int own;
        if (!call_find_gpu(&calls[i], &own)) return false;
        if (i == 0) *gpu = own;
        bool same = calls[i].has_attributes == calls[0].has_attributes &&
                    (!calls[0].has_attributes ||
                     memcmp(calls[i].attributes, calls[0].attributes, f->info->attribute_bytes) == 0);
        if (own == *gpu && same) continue;
        PyErr_Format(PyExc_ValueError, "%s: calls 0 and %zd differ in %s", f->name, i,
                     same ? "where their arrays are" : "their attributes");
        return false;
    }
    return true;
}

static PyObject *results_of(call *calls, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *one = call_results(&calls[i]);
        if (!one || PyList_SetItem(list, i, one)) Py_CLEAR(list);
    }
    return list;
}

/* `dicts`: a list or tuple, which keeps the arrays alive. */
static PyObject *run_calls(const op_function *f, PyObject *dicts, call *calls, Py_ssize_t count) {
    bool ok = true;
    int gpu = -1;
    Py_ssize_t read = 0;
    for (; ok && read < count; read++) {
        call_begin(&calls[read], f);
        PyObject *arguments = PySequence_GetItem(dicts, read);
        ok = arguments && bind_dict(&calls[read], arguments) && call_read(&calls[read]);
        Py_XDECREF(arguments);
    }
    ok = ok && are_alike(calls, count, &gpu);
    if (ok && gpu >= 0) ok = call_run_on_gpu(calls, (size_t)count, gpu);
    for (Py_ssize_t i = 0; ok && gpu < 0 && i < count; i++)
        ok = call_run_on_host(&calls[i]);
    PyObject *result = ok ? results_of(calls, count) : NULL;
    for (Py_ssize_t i = 0; i < read; i++)
        call_release(&calls[i]);
    return result;
}

PyObject *call_many(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    (void)module;
    const char *name = given == 2 && PyUnicode_Check(arguments[0]) ? PyUnicode_AsUTF8AndSize(arguments[0], NULL) : NULL;
    if (!name || !(PyList_Check(arguments[1]) || PyTuple_Check(arguments[1]))) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "call_many() takes a function's name and a list of dicts of arguments");
        return NULL;
    }
    const op_function *f = NULL;
    for (size_t i = 0; (f = call_function_at(i)) && strcmp(f->name, name) != 0;)
        i++;
    if (!f) {
        PyErr_Format(PyExc_ValueError, "call_many: there is no function %s", name);
        return NULL;
    }
    Py_ssize_t count = PySequence_Size(arguments[1]);
    if (count == 0) return PyList_New(0);
    if ((size_t)count > PTRDIFF_MAX / sizeof(call)) return PyErr_NoMemory();
    call *calls = PyMem_Malloc((size_t)count * sizeof *calls);
    if (!calls) return PyErr_NoMemory();
    PyObject *result = run_calls(f, arguments[1], calls, count);
    PyMem_Free(calls);
    return result;
}

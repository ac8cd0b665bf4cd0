/* SPDX-License-Identifier: MIT */
/*
 * Programs as functions over capsules; python/vjp/graph.py makes a class of them. A program has a device of its own,
 * which programs that share its memory use too.
 */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

static const char program_name[] = "vjp.program";

/* A device that belongs to programs. */
typedef struct owner {
    device_entry *entry;
    int programs;
    bool busy; /* a thread uses it */
} owner;

typedef struct program {
    vjp_program *program;
    owner *device;
    PyObject *share; /* the capsule of the program whose memory this one uses */
} program;

static void free_program(program *p) {
    vjp_program_destroy(p->program);
    if (--p->device->programs == 0) {
        device_give_back(p->device->entry);
        PyMem_Free(p->device);
    }
    Py_XDECREF(p->share);
    PyMem_Free(p);
}

static void destroy_program(PyObject *capsule) {
    program *p = PyCapsule_GetPointer(capsule, program_name);
    if (p) free_program(p);
}

static int to_program(PyObject *object, void *at) {
    return (*(program **)at = PyCapsule_GetPointer(object, program_name)) != NULL;
}

/* Marks the device as used: a run releases the GIL, and a device belongs to one thread at a time. */
static bool enter(program *p) {
    if (p->device->busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread uses this program, or one that shares its memory");
        return false;
    }
    return p->device->busy = true;
}

static bool leave(program *p, vjp_status status) {
    p->device->busy = false;
    if (status != VJP_OK) error_set(status, vjp_error(p->device->entry->device));
    return status == VJP_OK;
}

#define WITHOUT_GIL(p, status, call)                                                                                   \
    do {                                                                                                               \
        if (!enter(p)) return NULL;                                                                                    \
        PyThreadState *unlocked = PyEval_SaveThread();                                                                 \
        status = (call);                                                                                               \
        PyEval_RestoreThread(unlocked);                                                                                \
        if (!leave(p, status)) return NULL;                                                                            \
    } while (0)

static owner *take_owner(PyObject *share, const char *device) {
    if (share != Py_None) {
        program *other;
        if (!to_program(share, &other)) return NULL;
        other->device->programs++;
        return other->device;
    }
    owner *o = PyMem_Calloc(1, sizeof *o);
    if (!o) {
        PyErr_NoMemory();
        return NULL;
    }
    o->entry = device_take(device, false);
    o->programs = 1;
    if (o->entry) return o;
    PyMem_Free(o);
    return NULL;
}

/* (graph, results, device, program to share with or None, whether parameters may lie in halves, bytes of the arena or
 * 0) */
static PyObject *program_compile(PyObject *module, PyObject *arguments) {
    (void)module;
    vjp_graph *graph;
    PyObject *of, *share;
    const char *device;
    int halves;
    Py_ssize_t arena_limit;
    if (!PyArg_ParseTuple(arguments, "O&OsOpn", graph_of, &graph, &of, &device, &share, &halves, &arena_limit))
        return NULL;
    if (arena_limit < 0) return PyErr_Format(PyExc_ValueError, "arena_limit is %zd; it must be 0 or more", arena_limit);
    size_t count = 0;
    vjp_value *results = graph_read_values(of, &count);
    program *p = results ? PyMem_Calloc(1, sizeof *p) : NULL;
    owner *o = p ? take_owner(share, device) : NULL;
    if (!o) {
        if (!PyErr_Occurred()) PyErr_NoMemory();
        PyMem_Free(p);
        PyMem_Free(results);
        return NULL;
    }
    p->device = o;
    program *other = NULL;
    vjp_program_options options = VJP_PROGRAM_OPTIONS_DEFAULTS;
    options.halves = halves;
    options.arena_limit = (size_t)arena_limit;
    if (share != Py_None && to_program(share, &other)) {
        options.share = other->program;
        p->share = Py_NewRef(share);
    }
    PyObject *capsule = PyCapsule_New(p, program_name, destroy_program);
    if (!capsule) free_program(p);
    bool ok = capsule && enter(p);
    if (ok) {
        PyThreadState *unlocked = PyEval_SaveThread();
        vjp_status status = vjp_compile(o->entry->device, graph, results, count, &options, &p->program);
        PyEval_RestoreThread(unlocked);
        ok = leave(p, status);
    }
    PyMem_Free(results);
    if (ok) return capsule;
    Py_XDECREF(capsule);
    return NULL;
}

static PyObject *program_run(PyObject *module, PyObject *capsule) {
    (void)module;
    program *p;
    vjp_status status;
    if (!to_program(capsule, &p)) return NULL;
    WITHOUT_GIL(p, status, vjp_program_run(p->program));
    Py_RETURN_NONE;
}

static PyObject *program_interrupt(PyObject *module, PyObject *capsule) {
    (void)module;
    program *p;
    if (!to_program(capsule, &p)) return NULL;
    vjp_program_interrupt(p->program);
    Py_RETURN_NONE;
}

/* (program, its graph, value of it): a NumPy array with a copy. */
static PyObject *program_read(PyObject *module, PyObject *arguments) {
    (void)module;
    program *p;
    vjp_graph *graph;
    int value;
    if (!PyArg_ParseTuple(arguments, "O&O&i", to_program, &p, graph_of, &graph, &value)) return NULL;
    vjp_tensor described = vjp_graph_describe(graph, value); /* the program's memory may hold it in halves */
    size_t bytes = 0;
    vjp_status status;
    static const array of_numpy = {.kind = ARRAY_BUFFER, .gpu = -1};
    array a;
    PyObject *result = NULL;
    if (array_bytes(&described, &bytes)) {
        if (array_create(&of_numpy, &described, NULL, &a) && enter(p)) {
            PyThreadState *unlocked = PyEval_SaveThread();
            status = vjp_program_read(p->program, value, a.tensor.data, bytes);
            PyEval_RestoreThread(unlocked);
            if (leave(p, status)) result = array_take(&of_numpy, &a);
        }
        array_release(&a);
    }
    if (!result && !PyErr_Occurred()) PyErr_NoMemory();
    return result;
}

/* (program, its graph, value of it, array): the array must have the value's dtype and shape. */
static PyObject *program_write(PyObject *module, PyObject *arguments) {
    (void)module;
    program *p;
    vjp_graph *graph;
    int value;
    PyObject *object;
    if (!PyArg_ParseTuple(arguments, "O&O&iO", to_program, &p, graph_of, &graph, &value, &object)) return NULL;
    vjp_tensor t = vjp_graph_describe(graph, value);
    size_t bytes = 0;
    vjp_status status;
    array a;
    bool ok = array_read(object, "write", "the array", false, &a) && array_needs_host(&a, "write", "the array");
    if (ok && (a.tensor.dtype != t.dtype || a.tensor.ndim != t.ndim ||
               memcmp(a.tensor.shape, t.shape, sizeof t.shape[0] * (size_t)t.ndim) != 0)) {
        PyObject *have = graph_shape_tuple(&a.tensor), *want = graph_shape_tuple(&t);
        PyErr_Format(PyExc_ValueError, "write: the array is %s %R; the value is %s %R",
                     vjp_dtype_name((vjp_dtype)a.tensor.dtype), have, vjp_dtype_name((vjp_dtype)t.dtype), want);
        Py_XDECREF(have);
        Py_XDECREF(want);
        ok = false;
    }
    ok = ok && array_pack(&a, "write", "the array", false, false) && array_bytes(&a.tensor, &bytes) && enter(p);
    if (ok) {
        PyThreadState *unlocked = PyEval_SaveThread();
        if (a.copy) array_copy_in(&a);
        status = vjp_program_write(p->program, value, a.tensor.data, bytes);
        PyEval_RestoreThread(unlocked);
        ok = leave(p, status);
    }
    array_release(&a);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

/* (program, loss, lr value, step value, learning rate, step): the loss */
static PyObject *program_step(PyObject *module, PyObject *arguments) {
    (void)module;
    program *p;
    int loss, lr, step;
    double rate, result = 0;
    long long number;
    vjp_status status;
    if (!PyArg_ParseTuple(arguments, "O&iiidL", to_program, &p, &loss, &lr, &step, &rate, &number)) return NULL;
    vjp_minimize_result made = {.struct_size = sizeof made, .loss = loss, .lr = lr, .step = step};
    WITHOUT_GIL(p, status, vjp_program_step(p->program, &made, rate, number, &result));
    return PyFloat_FromDouble(result);
}

/* (program, seed): Kaiming's first values for every matrix. */
static PyObject *program_init(PyObject *module, PyObject *arguments) {
    (void)module;
    program *p;
    unsigned long long seed;
    vjp_status status;
    if (!PyArg_ParseTuple(arguments, "O&K", to_program, &p, &seed)) return NULL;
    WITHOUT_GIL(p, status, vjp_program_init(p->program, seed));
    Py_RETURN_NONE;
}

/* (program, value, mean, deviation, seed) */
static PyObject *program_init_normal(PyObject *module, PyObject *arguments) {
    (void)module;
    program *p;
    int value;
    double mean, deviation;
    unsigned long long seed;
    vjp_status status;
    if (!PyArg_ParseTuple(arguments, "O&iddK", to_program, &p, &value, &mean, &deviation, &seed)) return NULL;
    WITHOUT_GIL(p, status, vjp_program_init_normal(p->program, value, mean, deviation, seed));
    Py_RETURN_NONE;
}

/* (program, path, save) */
static PyObject *program_file(PyObject *module, PyObject *arguments) {
    (void)module;
    program *p;
    PyObject *path;
    int save;
    if (!PyArg_ParseTuple(arguments, "O&O&p", to_program, &p, PyUnicode_FSConverter, &path, &save)) return NULL;
    bool ok = enter(p);
    if (ok) {
        const char *name = PyBytes_AsString(path);
        PyThreadState *unlocked = PyEval_SaveThread();
        vjp_status status = save ? vjp_program_save(p->program, name) : vjp_program_load(p->program, name);
        PyEval_RestoreThread(unlocked);
        ok = leave(p, status);
    }
    Py_DECREF(path);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static PyObject *program_report(PyObject *module, PyObject *capsule) {
    (void)module;
    program *p;
    if (!to_program(capsule, &p)) return NULL;
    vjp_program_report r = {.struct_size = sizeof r};
    vjp_status status = vjp_program_describe(p->program, &r);
    if (status != VJP_OK) {
        error_set(status, vjp_error(p->device->entry->device));
        return NULL;
    }
    return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n,s:n,s:d,s:d}", "calls", (Py_ssize_t)r.calls, "arena_bytes",
                         (Py_ssize_t)r.arena_bytes, "live_bytes", (Py_ssize_t)r.live_bytes, "intermediate_bytes",
                         (Py_ssize_t)r.intermediate_bytes, "persistent_bytes", (Py_ssize_t)r.persistent_bytes,
                         "host_bytes", (Py_ssize_t)r.host_bytes, "min_bytes", r.cost.bytes, "flops", r.cost.flops);
}

PyMethodDef program_methods[] = {
    {"program_compile", program_compile, METH_VARARGS, NULL},
    {"program_run", program_run, METH_O, NULL},
    {"program_interrupt", program_interrupt, METH_O, NULL},
    {"program_read", program_read, METH_VARARGS, NULL},
    {"program_write", program_write, METH_VARARGS, NULL},
    {"program_step", program_step, METH_VARARGS, NULL},
    {"program_init", program_init, METH_VARARGS, NULL},
    {"program_init_normal", program_init_normal, METH_VARARGS, NULL},
    {"program_file", program_file, METH_VARARGS, NULL},
    {"program_report", program_report, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

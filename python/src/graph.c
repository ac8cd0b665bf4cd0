/* SPDX-License-Identifier: MIT */
/*
 * Graphs as functions over capsules; python/vjp/graph.py makes a class of them. A mistake while building is raised by
 * the call that made it.
 */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

static const char graph_name[] = "vjp.graph";

enum { MAX_VALUES = 1 << 20 };

/* ---- Graphs ------------------------------------------------------------------------------------------ */

static void destroy_graph(PyObject *capsule) {
    vjp_graph_destroy(PyCapsule_GetPointer(capsule, graph_name));
}

int graph_of(PyObject *object, void *graph) {
    return (*(vjp_graph **)graph = PyCapsule_GetPointer(object, graph_name)) != NULL;
}

static PyObject *made_value(const vjp_graph *graph, vjp_value value) {
    vjp_status status = vjp_graph_status(graph);
    if (status == VJP_OK) return PyLong_FromLong(value);
    error_set(status, vjp_graph_error(graph));
    return NULL;
}

vjp_value *graph_read_values(PyObject *sequence, size_t *count) {
    Py_ssize_t size = PySequence_Size(sequence);
    if (size < 0) return NULL;
    if (size > MAX_VALUES) {
        PyErr_Format(PyExc_ValueError, "%zd values; at most %d are taken", size, (int)MAX_VALUES);
        return NULL;
    }
    vjp_value *values = PyMem_Malloc(sizeof *values * ((size_t)size + 1));
    if (!values) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        values[i] = item ? (vjp_value)PyLong_AsLong(item) : 0;
        Py_XDECREF(item);
    }
    if (PyErr_Occurred()) {
        PyMem_Free(values);
        return NULL;
    }
    *count = (size_t)size;
    return values;
}

static PyObject *values_tuple(const vjp_value *values, size_t count) {
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; tuple && i < count; i++) {
        PyObject *value = PyLong_FromLong(values[i]);
        if (!value || PyTuple_SetItem(tuple, (Py_ssize_t)i, value)) Py_CLEAR(tuple);
    }
    return tuple;
}

static bool read_shape(PyObject *sequence, int *ndim, int64_t shape[VJP_MAX_DIMS]) {
    Py_ssize_t size = PySequence_Size(sequence);
    if (size < 0) return false;
    if (size > VJP_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "a shape of %zd axes; there may be %d", size, VJP_MAX_DIMS);
        return false;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        shape[i] = item ? PyLong_AsLongLong(item) : 0;
        Py_XDECREF(item);
    }
    *ndim = (int)size;
    return !PyErr_Occurred();
}

PyObject *graph_shape_tuple(const vjp_tensor *t) {
    PyObject *tuple = PyTuple_New(t->ndim);
    for (int i = 0; tuple && i < t->ndim; i++) {
        PyObject *size = PyLong_FromLongLong(t->shape[i]);
        if (!size || PyTuple_SetItem(tuple, i, size)) Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *graph_create(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    vjp_graph *graph = vjp_graph_create();
    if (!graph) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(graph, graph_name, destroy_graph);
    if (!capsule) vjp_graph_destroy(graph);
    return capsule;
}

/* (graph, "input" | "parameter" | "state", name, dtype, shape) */
static PyObject *graph_leaf(PyObject *module, PyObject *arguments) {
    (void)module;
    vjp_graph *graph;
    const char *kind, *name;
    PyObject *dtype_name, *sizes;
    int ndim, dtype;
    int64_t shape[VJP_MAX_DIMS];
    if (!PyArg_ParseTuple(arguments, "O&ssOO", graph_of, &graph, &kind, &name, &dtype_name, &sizes)) return NULL;
    if ((dtype = array_dtype(dtype_name)) < 0 || !read_shape(sizes, &ndim, shape)) return NULL;
    vjp_value (*make)(vjp_graph *, const char *, vjp_dtype, int, const int64_t *) = vjp_graph_input;
    if (strcmp(kind, "parameter") == 0) make = vjp_graph_parameter;
    if (strcmp(kind, "state") == 0) make = vjp_graph_state;
    return made_value(graph, make(graph, name, (vjp_dtype)dtype, ndim, shape));
}

/* (graph, name, array) */
static PyObject *graph_constant(PyObject *module, PyObject *arguments) {
    (void)module;
    vjp_graph *graph;
    const char *name;
    PyObject *object, *result = NULL;
    array a;
    if (!PyArg_ParseTuple(arguments, "O&sO", graph_of, &graph, &name, &object)) return NULL;
    if (array_read(object, "constant", name, false, &a) && array_needs_host(&a, "constant", name) &&
        array_pack(&a, "constant", name, false, false)) {
        if (a.copy) array_copy_in(&a);
        result = made_value(graph, vjp_graph_constant(graph, name, (vjp_dtype)a.tensor.dtype, a.tensor.ndim,
                                                      a.tensor.shape, a.tensor.data));
    }
    array_release(&a);
    return result;
}

static bool read_attributes(const vjp_op *op, PyObject *options, int64_t attributes[MAX_ATTRIBUTES]) {
    const vjp_op_info *info = vjp_op_describe(op);
    vjp_op_defaults(op, attributes);
    Py_ssize_t used = 0;
    for (size_t i = 0; i < info->attribute_count; i++) {
        PyObject *value = PyDict_GetItemString(options, info->attributes[i].name);
        if (!value) continue;
        used++;
        if (!call_set_attribute(info->name, &info->attributes[i], value, attributes)) return false;
    }
    if (used == PyDict_Size(options)) return true;
    PyErr_Format(PyExc_TypeError, "%s: unknown option among %R", info->name, options);
    return false;
}

/* (graph, op, inputs, options, dtype or None): the first output. */
static PyObject *graph_call(PyObject *module, PyObject *arguments) {
    (void)module;
    vjp_graph *graph;
    const char *name;
    PyObject *inputs, *options, *dtype_name;
    if (!PyArg_ParseTuple(arguments, "O&sOO!O", graph_of, &graph, &name, &inputs, &PyDict_Type, &options, &dtype_name))
        return NULL;
    const vjp_op *op = vjp_op_find(name);
    int64_t attributes[MAX_ATTRIBUTES];
    size_t count;
    if (!op) {
        PyErr_Format(PyExc_ValueError, "there is no op \"%s\"", name);
        return NULL;
    }
    if (!read_attributes(op, options, attributes)) return NULL;
    vjp_value *values = graph_read_values(inputs, &count), made = 0;
    if (!values) return NULL;
    int dtype = dtype_name == Py_None ? VJP_F32 : array_dtype(dtype_name);
    if (dtype < 0) {
        PyMem_Free(values);
        return NULL;
    }
    /* The generic call cannot say which dtype a cast makes. */
    if (strcmp(name, "cast") == 0 && count == 1)
        made = vjp_graph_cast(graph, values[0], (vjp_dtype)dtype);
    else
        made = vjp_graph_call(graph, op, values, count, vjp_op_describe(op)->attribute_bytes ? attributes : NULL);
    PyMem_Free(values);
    return made_value(graph, made);
}

static PyObject *graph_output(PyObject *module, PyObject *arguments) {
    (void)module;
    vjp_graph *graph;
    int value;
    const char *slot;
    if (!PyArg_ParseTuple(arguments, "O&is", graph_of, &graph, &value, &slot)) return NULL;
    return made_value(graph, vjp_graph_output(graph, value, slot));
}

static PyObject *graph_reshape(PyObject *module, PyObject *arguments) {
    (void)module;
    vjp_graph *graph;
    int value, ndim;
    PyObject *sizes;
    int64_t shape[VJP_MAX_DIMS];
    if (!PyArg_ParseTuple(arguments, "O&iO", graph_of, &graph, &value, &sizes) || !read_shape(sizes, &ndim, shape))
        return NULL;
    return made_value(graph, vjp_graph_reshape(graph, value, ndim, shape));
}

/* (graph, target, output, add): writes an output to a state, or adds it to an older output. */
static PyObject *graph_assign(PyObject *module, PyObject *arguments) {
    (void)module;
    vjp_graph *graph;
    int target, output, add;
    if (!PyArg_ParseTuple(arguments, "O&iip", graph_of, &graph, &target, &output, &add)) return NULL;
    return made_value(graph,
                      add ? vjp_graph_accumulate(graph, target, output) : vjp_graph_assign(graph, target, output));
}

/* (graph, name or None): opens a scope, or closes the innermost. */
static PyObject *graph_scope(PyObject *module, PyObject *arguments) {
    (void)module;
    vjp_graph *graph;
    const char *name;
    if (!PyArg_ParseTuple(arguments, "O&z", graph_of, &graph, &name)) return NULL;
    if (name)
        vjp_graph_push(graph, name);
    else
        vjp_graph_pop(graph);
    return made_value(graph, 0);
}

static PyObject *graph_recompute(PyObject *module, PyObject *arguments) {
    (void)module;
    vjp_graph *graph;
    int begin;
    if (!PyArg_ParseTuple(arguments, "O&p", graph_of, &graph, &begin)) return NULL;
    if (begin)
        vjp_graph_recompute_begin(graph);
    else
        vjp_graph_recompute_end(graph);
    return made_value(graph, 0);
}

/* (graph, scalar, wrt, into or None, add): the gradients. */
static PyObject *graph_grad(PyObject *module, PyObject *arguments) {
    (void)module;
    vjp_graph *graph;
    int scalar, add;
    PyObject *of, *target, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "O&iOOp", graph_of, &graph, &scalar, &of, &target, &add)) return NULL;
    size_t count = 0, targets = 0;
    vjp_value *wrt = graph_read_values(of, &count);
    vjp_value *into = wrt && target != Py_None ? graph_read_values(target, &targets) : NULL;
    vjp_value *gradients = wrt && !PyErr_Occurred() ? PyMem_Calloc(count + 1, sizeof *gradients) : NULL;
    if (into && targets != count)
        PyErr_Format(PyExc_ValueError, "grad: %zu values and %zu targets", count, targets);
    else if (gradients) {
        vjp_status status = vjp_graph_grad(graph, scalar, wrt, count, into, add, gradients);
        if (status == VJP_OK)
            result = values_tuple(gradients, count);
        else
            error_set(status, vjp_graph_error(graph));
    } else if (!PyErr_Occurred())
        PyErr_NoMemory();
    PyMem_Free(gradients);
    PyMem_Free(into);
    PyMem_Free(wrt);
    return result;
}

/* ---- Optimisers -------------------------------------------------------------------------------------- */

/* One option of Muon. False with an exception set for an unknown name or a value of the wrong kind. */
static bool set_muon(vjp_muon_options *muon, const char *name, PyObject *value) {
    static const char *const scales[] = {"adamw", "shape"};
    if (strcmp(name, "momentum") == 0 || strcmp(name, "weight_decay") == 0) {
        double real = PyFloat_AsDouble(value);
        *(name[0] == 'm' ? &muon->momentum : &muon->weight_decay) = real;
        return !PyErr_Occurred();
    }
    if (strcmp(name, "nesterov") == 0) return (muon->nesterov = PyObject_IsTrue(value)) >= 0;
    if (strcmp(name, "iterations") == 0) {
        long count = PyLong_AsLong(value);
        muon->iterations = count < 0 ? -1 : count > INT32_MAX ? INT32_MAX : (int32_t)count; /* vjp refuses these */
        return !PyErr_Occurred();
    }
    if (strcmp(name, "scale") == 0) {
        const char *text = PyUnicode_Check(value) ? PyUnicode_AsUTF8AndSize(value, NULL) : NULL;
        for (int32_t i = 0; text && i < 2; i++)
            if (strcmp(text, scales[i]) == 0) {
                muon->scale = i;
                return true;
            }
        PyErr_Format(PyExc_ValueError, "minimize: scale is %R; it must be adamw or shape", value);
        return false;
    }
    PyErr_Format(PyExc_TypeError,
                 "minimize: Muon has no option '%s'; there are momentum, weight_decay, nesterov, iterations and scale",
                 name);
    return false;
}

static bool read_muon(PyObject *settings, vjp_muon_options *muon) {
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(settings, &at, &key, &value)) {
        const char *name = PyUnicode_AsUTF8AndSize(key, NULL);
        if (!name || !set_muon(muon, name, value)) return false;
    }
    return true;
}

/* The caller's uses_muon(name, shape); an exception that it raises is kept, and the answer is no. */
static int ask_uses_muon(void *context, const char *name, const vjp_tensor *parameter) {
    if (PyErr_Occurred()) return 0;
    PyObject *answer = PyObject_CallFunction(context, "sN", name, graph_shape_tuple(parameter));
    int yes = answer ? PyObject_IsTrue(answer) : 0;
    Py_XDECREF(answer);
    return yes > 0;
}

/*
 * (graph, loss, parameters or None, max_norm, "adamw" or "sgd", its options, Muon's options or None, uses_muon or
 * None): (results, lr, step, norm)
 */
static PyObject *graph_minimize(PyObject *module, PyObject *arguments) {
    (void)module;
    vjp_graph *graph;
    int loss;
    double max_norm;
    const char *name;
    PyObject *of, *settings, *muon_settings, *uses_muon;
    if (!PyArg_ParseTuple(arguments, "O&iOdsO!OO", graph_of, &graph, &loss, &of, &max_norm, &name, &PyDict_Type,
                          &settings, &muon_settings, &uses_muon))
        return NULL;
    bool sgd = strcmp(name, "sgd") == 0;
    if (!sgd && strcmp(name, "adamw") != 0) {
        PyErr_Format(PyExc_ValueError, "minimize: the optimiser is \"%s\"; it must be adamw, sgd or muon", name);
        return NULL;
    }
    union {
        int64_t words[MAX_ATTRIBUTES];
        vjp_adamw_attributes adamw;
        vjp_sgd_attributes sgd;
    } attributes;
    if (!read_attributes(vjp_op_find(name), settings, attributes.words)) return NULL;
    vjp_muon_options muon = VJP_MUON_OPTIONS_DEFAULTS;
    if (muon_settings != Py_None && !read_muon(muon_settings, &muon)) return NULL;
    vjp_minimize_options options = VJP_MINIMIZE_OPTIONS_DEFAULTS;
    vjp_minimize_result made = {.struct_size = sizeof made};
    vjp_value *parameters = NULL;
    if (of != Py_None && !(parameters = graph_read_values(of, &options.count))) return NULL;
    options.parameters = parameters;
    options.max_norm = max_norm;
    options.adamw = sgd ? NULL : &attributes.adamw;
    options.sgd = sgd ? &attributes.sgd : NULL;
    options.muon = muon_settings != Py_None ? &muon : NULL;
    options.uses_muon = uses_muon != Py_None ? ask_uses_muon : NULL;
    options.context = uses_muon;
    vjp_status status = vjp_graph_minimize(graph, loss, &options, &made);
    PyMem_Free(parameters);
    if (PyErr_Occurred()) return NULL;
    if (status != VJP_OK) {
        error_set(status, vjp_graph_error(graph));
        return NULL;
    }
    return Py_BuildValue("(Niii)", values_tuple(made.results, made.count), made.lr, made.step, made.norm);
}

static PyObject *graph_find(PyObject *module, PyObject *arguments) {
    (void)module;
    vjp_graph *graph;
    const char *name;
    if (!PyArg_ParseTuple(arguments, "O&s", graph_of, &graph, &name)) return NULL;
    return PyLong_FromLong(vjp_graph_find(graph, name));
}

/* (graph, value): (name, dtype, shape) */
static PyObject *graph_describe(PyObject *module, PyObject *arguments) {
    (void)module;
    vjp_graph *graph;
    int value;
    if (!PyArg_ParseTuple(arguments, "O&i", graph_of, &graph, &value)) return NULL;
    vjp_tensor t = vjp_graph_describe(graph, value);
    const char *name = vjp_graph_name(graph, value);
    return Py_BuildValue("(ssN)", name ? name : "", vjp_dtype_name((vjp_dtype)t.dtype), graph_shape_tuple(&t));
}

static PyObject *graph_text(PyObject *module, PyObject *arguments) {
    (void)module;
    vjp_graph *graph;
    int dot;
    if (!PyArg_ParseTuple(arguments, "O&p", graph_of, &graph, &dot)) return NULL;
    char *text = dot ? vjp_graph_dot(graph) : vjp_graph_text(graph);
    if (!text) return PyErr_NoMemory();
    PyObject *result = PyUnicode_FromString(text);
    vjp_string_free(text);
    return result;
}

PyMethodDef graph_methods[] = {
    {"graph_create", graph_create, METH_NOARGS, NULL},
    {"graph_leaf", graph_leaf, METH_VARARGS, NULL},
    {"graph_constant", graph_constant, METH_VARARGS, NULL},
    {"graph_call", graph_call, METH_VARARGS, NULL},
    {"graph_output", graph_output, METH_VARARGS, NULL},
    {"graph_reshape", graph_reshape, METH_VARARGS, NULL},
    {"graph_assign", graph_assign, METH_VARARGS, NULL},
    {"graph_scope", graph_scope, METH_VARARGS, NULL},
    {"graph_recompute", graph_recompute, METH_VARARGS, NULL},
    {"graph_grad", graph_grad, METH_VARARGS, NULL},
    {"graph_minimize", graph_minimize, METH_VARARGS, NULL},
    {"graph_find", graph_find, METH_VARARGS, NULL},
    {"graph_describe", graph_describe, METH_VARARGS, NULL},
    {"graph_text", graph_text, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

/* SPDX-License-Identifier: MIT */
/*
 * The handler that XLA calls for every op of vjp.jax, by XLA's C interface (xla.h), without the GIL. Its one attribute,
 * "call", is an array of 64-bit numbers that jax_prepare() made: which function, which inputs and outputs are present
 * (bit i: slot i of the pass), and the op's attribute struct. Shapes and dtypes are those of XLA's buffers, so the same
 * numbers serve any batch.
 */
#include "core.h"

#include <fenv.h>
#include <string.h>

#include "xla.h"

enum { WORD_FUNCTION, WORD_PRESENT, WORD_BYTES, FIRST_ATTRIBUTE };

static xla_error *fail(const xla_frame *frame, vjp_status status, const char *sentence) {
    int32_t code = status == VJP_INVALID         ? XLA_INVALID_ARGUMENT
                   : status == VJP_UNSUPPORTED   ? XLA_UNIMPLEMENTED
                   : status == VJP_OUT_OF_MEMORY ? XLA_RESOURCE_EXHAUSTED
                                                 : XLA_INTERNAL;
    xla_error_arguments arguments = {sizeof arguments, NULL, sentence, code};
    return frame->api->create_error(&arguments);
}

static int find_dtype(int32_t dtype) {
    switch (dtype) {
    case XLA_F32: return VJP_F32;
    case XLA_BF16: return VJP_BF16;
    case XLA_F16: return VJP_F16;
    case XLA_F64: return VJP_F64;
    case XLA_S32: return VJP_I32;
    case XLA_S64: return VJP_I64;
    default: return -1;
    }
}

static const int64_t *find_words(const xla_frame *frame, size_t *count) {
    static const char name[] = "call";
    for (int64_t i = 0; i < frame->attributes.count; i++) {
        const xla_text *text = frame->attributes.names[i];
        const xla_array *value = frame->attributes.values[i];
        if (text->length != sizeof name - 1 || memcmp(text->bytes, name, sizeof name - 1) != 0) continue;
        if (frame->attributes.types[i] != XLA_ARRAY || value->dtype != XLA_S64) return NULL;
        *count = value->count;
        return value->data;
    }
    return NULL;
}

/* XLA's next buffer as a tensor; false where it is none that vjp takes. */
static bool read_buffer(const xla_values *values, int64_t *next, vjp_tensor *tensor) {
    if (*next >= values->count || values->types[*next] != XLA_BUFFER) return false;
    const xla_buffer *buffer = values->values[(*next)++];
    int dtype = find_dtype(buffer->dtype);
    if (dtype < 0 || buffer->rank < 0 || buffer->rank > VJP_MAX_DIMS) return false;
    *tensor = vjp_tensor_of(buffer->data, (vjp_dtype)dtype, (int)buffer->rank,
                            buffer->rank ? buffer->shape : (const int64_t[1]){0});
    return true;
}

/* f64 is computed by `ref` where the CPU has no kernel for it. */
static device_entry *acquire(const op_function *f, bool f64, vjp_status *status, char *sentence, size_t bytes) {
    device_entry *entry = device_acquire("cpu", false, status, sentence, bytes);
    if (!entry || !f64 || vjp_supports(entry->device, f->op, f->number, VJP_F64) == VJP_OK) return entry;
    device_give_back(entry);
    return device_acquire("ref", false, status, sentence, bytes);
}

static xla_error *run(const xla_frame *frame) {
    size_t count = 0;
    const int64_t *words = find_words(frame, &count);
    const op_function *f =
        words && count >= FIRST_ATTRIBUTE && words[WORD_FUNCTION] >= 0 ? call_function_at((size_t)words[0]) : NULL;
    if (!f || words[WORD_BYTES] != (int64_t)f->info->attribute_bytes ||
        count != FIRST_ATTRIBUTE + (f->info->attribute_bytes + 7) / 8)
        return fail(frame, VJP_INVALID, "vjp: the attribute \"call\" is not one that vjp.jax made");
    vjp_tensor storage[VJP_MAX_SLOTS];
    const vjp_tensor *tensors[VJP_MAX_SLOTS] = {NULL};
    int64_t next_argument = 0, next_result = 0;
    bool f64 = false;
    for (size_t i = 0; i < f->pass->count; i++) {
        if (!(words[WORD_PRESENT] >> i & 1)) continue;
        bool output = i < f->pass->outputs;
        if (!read_buffer(output ? &frame->results : &frame->arguments, output ? &next_result : &next_argument,
                         &storage[i])) {
            char sentence[160];
            snprintf(sentence, sizeof sentence,
                     "%s: %s must be f32, bf16, f16, f64, i32 or i64 of a rank of at most %d", f->name,
                     f->pass->slots[i].name, VJP_MAX_DIMS);
            return fail(frame, VJP_INVALID, sentence);
        }
        tensors[i] = &storage[i];
        f64 = f64 || storage[i].dtype == VJP_F64;
    }
    vjp_status status = VJP_OK;
    char sentence[512];
    device_entry *entry = acquire(f, f64, &status, sentence, sizeof sentence);
    if (!entry) return fail(frame, status, sentence);
    fenv_t environment; /* XLA's threads round the smallest numbers to zero, which would change bits */
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);
    status = call_op(f, entry->device, tensors, f->attributes ? words + FIRST_ATTRIBUTE : NULL);
    fesetenv(&environment);
    xla_error *error = status == VJP_OK ? NULL : fail(frame, status, vjp_error(entry->device));
    device_give_back(entry);
    return error;
}

static xla_error *handle(xla_frame *frame) {
    for (xla_extension *e = frame->extensions; e; e = e->next)
        if (e->type == XLA_EXTENSION_METADATA) {
            xla_metadata *metadata = ((xla_metadata_extension *)(void *)e)->metadata;
            metadata->version.major = XLA_MAJOR;
            metadata->version.minor = XLA_MINOR;
            return NULL;
        }
    return frame->stage == XLA_STAGE_EXECUTE ? run(frame) : NULL;
}

/* ---- Preparing a call, with the GIL ------------------------------------------------------------------- */

static bool read_description(PyObject *item, vjp_tensor *tensor) {
    PyObject *dtype, *shape;
    if (!PyArg_ParseTuple(item, "OO!", &dtype, &PyTuple_Type, &shape)) return false;
    int found = array_dtype(dtype);
    Py_ssize_t ndim = PyTuple_Size(shape);
    int64_t sizes[VJP_MAX_DIMS] = {0};
    if (found < 0) return false;
    if (ndim > VJP_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "rank %zd; ranks go from 0 to %d", ndim, VJP_MAX_DIMS);
        return false;
    }
    for (Py_ssize_t i = 0; i < ndim; i++) {
        sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        if (sizes[i] == -1 && PyErr_Occurred()) return false;
    }
    *tensor = vjp_tensor_of(NULL, (vjp_dtype)found, (int)ndim, sizes);
    return true;
}

static bool read_keywords(const op_function *f, PyObject *keywords, void *attributes) {
    Py_ssize_t at = 0;
    PyObject *key, *value;
    while (PyDict_Next(keywords, &at, &key, &value)) {
        int i = 0;
        while (i < f->attributes && PyUnicode_CompareWithASCIIString(key, f->info->attributes[i].name) != 0)
            i++;
        if (i == f->attributes) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected argument '%U'", f->name, key);
            return false;
        }
        if (!call_set_attribute(f->name, &f->info->attributes[i], value, attributes)) return false;
    }
    return true;
}

static PyObject *describe(const vjp_tensor *tensor) {
    PyObject *shape = PyTuple_New(tensor->ndim);
    for (int i = 0; shape && i < tensor->ndim; i++) {
        PyObject *size = PyLong_FromLongLong(tensor->shape[i]);
        if (!size || PyTuple_SetItem(shape, i, size)) Py_CLEAR(shape);
    }
    PyObject *row = shape ? Py_BuildValue("(sO)", array_dtype_name(tensor->dtype), shape) : NULL;
    Py_XDECREF(shape);
    return row;
}

/* [(dtype, shape)] of the outputs. */
static PyObject *infer(const op_function *f, const vjp_tensor *const *tensors, const void *attributes) {
    vjp_tensor described[VJP_MAX_SLOTS];
    device_entry *entry = device_take("ref", false);
    if (!entry) return NULL;
    vjp_status status = vjp_infer(entry->device, f->op, f->number, tensors, f->pass->count, attributes, described);
    if (status != VJP_OK) error_set(status, vjp_error(entry->device));
    device_give_back(entry);
    PyObject *list = status == VJP_OK ? PyList_New(0) : NULL;
    for (size_t i = 0; list && i < f->pass->outputs; i++) {
        PyObject *row = describe(&described[i]);
        if (!row || PyList_Append(list, row)) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *jax_prepare(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *name, *inputs, *keywords;
    long long present;
    if (!PyArg_ParseTuple(arguments, "UO!O!L", &name, &PyTuple_Type, &inputs, &PyDict_Type, &keywords, &present))
        return NULL;
    size_t number = 0;
    const op_function *f;
    while ((f = call_function_at(number)) && PyUnicode_CompareWithASCIIString(name, f->name) != 0)
        number++;
    if (!f || PyTuple_Size(inputs) != f->inputs) {
        PyErr_Format(PyExc_ValueError, "jax_prepare: no function %U of that many tensors", name);
        return NULL;
    }
    vjp_tensor storage[VJP_MAX_SLOTS];
    const vjp_tensor *tensors[VJP_MAX_SLOTS] = {NULL};
    int64_t words[FIRST_ATTRIBUTE + MAX_ATTRIBUTES] = {(int64_t)number, present & ((1 << f->pass->outputs) - 1),
                                                       (int64_t)f->info->attribute_bytes};
    for (int i = 0; i < f->inputs; i++) {
        size_t slot = f->pass->outputs + (size_t)i;
        PyObject *item = PyTuple_GetItem(inputs, i);
        if (item == Py_None) continue;
        if (!read_description(item, &storage[slot])) return NULL;
        tensors[slot] = &storage[slot];
        words[WORD_PRESENT] |= (int64_t)1 << slot;
    }
    if (f->attributes) vjp_op_defaults(f->op, words + FIRST_ATTRIBUTE);
    if (!read_keywords(f, keywords, words + FIRST_ATTRIBUTE)) return NULL;
    PyObject *outputs = infer(f, tensors, f->attributes ? words + FIRST_ATTRIBUTE : NULL);
    PyObject *list = outputs ? PyList_New(0) : NULL;
    for (size_t i = 0; list && i < FIRST_ATTRIBUTE + (f->info->attribute_bytes + 7) / 8; i++) {
        PyObject *word = PyLong_FromLongLong(words[i]);
        if (!word || PyList_Append(list, word)) Py_CLEAR(list);
        Py_XDECREF(word);
    }
    PyObject *result = list ? Py_BuildValue("(OO)", list, outputs) : NULL;
    Py_XDECREF(list);
    Py_XDECREF(outputs);
    return result;
}

static PyObject *jax_handler(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    return PyCapsule_New((void *)(uintptr_t)handle, "xla._CUSTOM_CALL_TARGET", NULL);
}

PyMethodDef jax_methods[] = {
    {"jax_handler", jax_handler, METH_NOARGS, "A capsule with the function that XLA calls."},
    {"jax_prepare", jax_prepare, METH_VARARGS,
     "(function, inputs, attributes, outputs): the numbers for XLA and [(dtype, shape)] of all outputs. An input is "
     "(dtype, shape) or None, `outputs` has a bit for each output to compute."},
    {NULL, NULL, 0, NULL},
};

/* SPDX-License-Identifier: MIT */
/*
 * A Python function for each op and pass, all of them this one C function over the op table. A call binds its arguments
 * to the pass's tensors and attributes, reads the arrays without copying them where they are packed, lets vjp infer and
 * check, allocates the outputs that were asked for and not given, and runs the kernel without the GIL. Nothing is
 * written before all checks have passed. It runs where its arrays are: on the host, or on the GPU that holds them all.
 */
#include "call.h"

#include <string.h>

/* ---- Arguments --------------------------------------------------------------------------------------- */

static int find_argument(const op_function *f, PyObject *name) {
    for (int i = 0; i < f->arguments; i++)
        if (f->names[i] == name) return i;
    for (int i = 0; i < f->arguments; i++) /* a name that is not interned */
        if (PyUnicode_Compare(f->names[i], name) == 0) return i;
    return -1;
}

bool call_bind_name(call *c, PyObject *name, PyObject *value) {
    const op_function *f = c->f;
    int at = PyUnicode_Check(name) ? find_argument(f, name) : -1;
    if (at >= 0 && !c->values[at]) {
        c->values[at] = value;
        return true;
    }
    PyErr_Format(PyExc_TypeError,
                 at < 0 ? "%s() got an unexpected argument '%S'" : "%s() got two values for argument '%S'", f->name,
                 name);
    return false;
}

void call_drop_none(call *c) {
    for (int i = 0; i < c->f->inputs; i++)
        if (c->values[i] == Py_None) c->values[i] = NULL;
}

static bool bind(call *c, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    const op_function *f = c->f;
    if (count > f->inputs) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d positional arguments; %zd were given", f->name, f->inputs,
                     count);
        return false;
    }
    memset(c->values, 0, sizeof c->values[0] * (size_t)f->arguments);
    memcpy(c->values, arguments, sizeof c->values[0] * (size_t)count);
    Py_ssize_t keywords = names ? PyTuple_Size(names) : 0;
    for (Py_ssize_t i = 0; i < keywords; i++)
        if (!call_bind_name(c, PyTuple_GetItem(names, i), arguments[count + i])) return false;
    call_drop_none(c);
    return true;
}

PyObject *call_extra(const call *c, int argument) {
    PyObject *value = c->values[c->f->inputs + c->f->attributes + argument];
    return value == Py_None ? NULL : value;
}

static bool refuse_choice(const char *function, const vjp_attribute *a, PyObject *value) {
    char known[512] = "";
    for (size_t i = 0; a->choices[i]; i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", a->choices[i]);
    }
    PyErr_Format(PyExc_ValueError, "%s: %s is %R; it must be one of %s", function, a->name, value, known);
    return false;
}

bool call_set_attribute(const char *function, const vjp_attribute *a, PyObject *value, void *attributes) {
    char *at = (char *)attributes + a->offset;
    int64_t integer = 0;
    switch (a->type) {
    case VJP_REAL: {
        double real = PyFloat_AsDouble(value);
        if (real == -1 && PyErr_Occurred()) return false;
        memcpy(at, &real, sizeof real);
        return true;
    }
    case VJP_BOOLEAN:
        if (!PyBool_Check(value) && !PyIndex_Check(value)) {
            PyErr_Format(PyExc_TypeError, "%s: %s must be True or False, not %R", function, a->name, value);
            return false;
        }
        integer = PyObject_IsTrue(value);
        if (integer < 0) return false;
        break;
    case VJP_CHOICE: {
        const char *text = PyUnicode_Check(value) ? PyUnicode_AsUTF8AndSize(value, NULL) : NULL;
        while (text && a->choices[integer] && strcmp(a->choices[integer], text) != 0)
            integer++;
        if (!text || !a->choices[integer]) return refuse_choice(function, a, value);
        break;
    }
    case VJP_INTEGER: {
        PyObject *index = PyNumber_Index(value);
        if (!index) return false;
        integer = PyLong_AsLongLong(index);
        Py_DECREF(index);
        if (integer == -1 && PyErr_Occurred()) return false;
        break;
    }
    }
    memcpy(at, &integer, sizeof integer);
    return true;
}

static bool read_attributes(call *c) {
    const op_function *f = c->f;
    c->has_attributes = false;
    for (int i = 0; i < f->attributes; i++) {
        PyObject *value = c->values[f->inputs + i];
        if (!value) continue;
        if (!c->has_attributes) vjp_op_defaults(f->op, c->attributes);
        c->has_attributes = true;
        if (!call_set_attribute(f->name, &f->info->attributes[i], value, c->attributes)) return false;
    }
    return true;
}

/* ---- Outputs ----------------------------------------------------------------------------------------- */

static int find_output(const op_function *f, PyObject *name) {
    const char *text = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    for (size_t i = 0; text && i < f->pass->outputs; i++)
        if (strcmp(f->pass->slots[i].name, text) == 0) return (int)i;
    if (PyErr_Occurred()) return -1;
    char known[512] = "";
    for (size_t i = 0; i < f->pass->outputs; i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", f->pass->slots[i].name);
    }
    PyErr_Format(PyExc_ValueError, "%s: %R is not an output; there are %s", f->name, name, known);
    return -1;
}

bool function_repeats(const op_function *f, size_t slot) {
    const vjp_pass_info *forward = &f->info->pass[VJP_FORWARD];
    bool repeated = false;
    for (size_t i = 0; f->pass != forward && i < forward->outputs; i++)
        repeated = repeated || strcmp(forward->slots[i].name, f->pass->slots[slot].name) == 0;
    return repeated && f->pass->slots[slot].kind == VJP_KIND_STORAGE;
}

int function_gate(const op_function *f) {
    if (f->op != vjp_op_find("linear") || f->number != VJP_BACKWARD) return -1;
    for (size_t i = f->pass->outputs; i < f->pass->count; i++)
        if (strcmp(f->pass->slots[i].name, "gate") == 0) return (int)i;
    return -1;
}

bool function_leaves_out(const op_function *f, size_t slot, bool gated) {
    return function_gate(f) >= 0 && strcmp(f->pass->slots[slot].name, gated ? "dresidual" : "dgate") == 0;
}

static bool read_wanted(call *c) {
    const op_function *f = c->f;
    PyObject *outputs = call_extra(c, ARGUMENT_OUTPUTS);
    if (!outputs) {
        int gate = function_gate(f);
        PyObject *given = gate < 0 ? NULL : c->values[gate - (int)f->pass->outputs];
        c->wanted_count = 0;
        for (int i = 0; i < (int)f->pass->outputs; i++)
            if (!function_repeats(f, (size_t)i) && !function_leaves_out(f, (size_t)i, given && given != Py_None))
                c->wanted[c->wanted_count++] = i;
        c->bare = c->wanted_count == 1;
        return true;
    }
    c->bare = PyUnicode_Check(outputs);
    if (c->bare) {
        c->wanted_count = 1;
        return (c->wanted[0] = find_output(f, outputs)) >= 0;
    }
    Py_ssize_t count = PySequence_Size(outputs);
    if (count < 0) return false;
    unsigned seen = 0;
    c->wanted_count = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *name = PySequence_GetItem(outputs, i);
        int slot = name ? find_output(f, name) : -1;
        Py_XDECREF(name);
        if (slot < 0) return false;
        if (seen >> slot & 1) {
            PyErr_Format(PyExc_ValueError, "%s: outputs has %s twice", f->name, f->pass->slots[slot].name);
            return false;
        }
        seen |= 1u << slot;
        c->wanted[c->wanted_count++] = slot;
    }
    if (count > 0) return true;
    PyErr_Format(PyExc_ValueError, "%s: outputs names no output", f->name);
    return false;
}

/* The CPU's kernels take rows that lie apart; another device may not, and gets a copy. */
static bool takes_rows(const call *c, int slot) {
    return c->f->pass->slots[slot].flags & VJP_SLOT_ROWS && !call_extra(c, ARGUMENT_DEVICE);
}

static bool read_output(call *c, int slot, PyObject *object) {
    const char *name = c->f->pass->slots[slot].name;
    if (object == Py_None) return true;
    c->tensors[slot] = &c->arrays[slot].tensor;
    return array_read(object, c->f->name, name, true, &c->arrays[slot]) &&
           array_pack(&c->arrays[slot], c->f->name, name, true, takes_rows(c, slot));
}

static bool read_out(call *c) {
    PyObject *out = call_extra(c, ARGUMENT_OUT);
    if (!out) return true;
    bool sequence = PyTuple_Check(out) || PyList_Check(out);
    if (!sequence && c->wanted_count == 1) return read_output(c, c->wanted[0], out);
    Py_ssize_t count = sequence ? PySequence_Size(out) : -1;
    if (count != c->wanted_count) {
        PyErr_Format(PyExc_ValueError, "%s: out must be a tuple of %d arrays or None, one for each output", c->f->name,
                     c->wanted_count);
        return false;
    }
    for (int i = 0; i < c->wanted_count; i++) {
        PyObject *object = PySequence_GetItem(out, i); /* `out` keeps it alive */
        if (!object) return false;
        Py_DECREF(object);
        if (!read_output(c, c->wanted[i], object)) return false;
    }
    return true;
}

static bool accumulate_into(call *c, PyObject *name) {
    int slot = find_output(c->f, name);
    if (slot < 0) return false;
    if (!c->tensors[slot]) {
        PyErr_Format(PyExc_ValueError, "%s: %s cannot accumulate: out= does not give an array to add to", c->f->name,
                     c->f->pass->slots[slot].name);
        return false;
    }
    c->arrays[slot].tensor.flags = VJP_ACCUMULATE;
    return true;
}

/* True: every output that is given and can be added to. Otherwise a name or several. */
static bool read_accumulate(call *c) {
    PyObject *value = call_extra(c, ARGUMENT_ACCUMULATE);
    if (!value || value == Py_False) return true;
    if (PyUnicode_Check(value)) return accumulate_into(c, value);
    if (value != Py_True) {
        Py_ssize_t count = PySequence_Size(value);
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject *name = PySequence_GetItem(value, i);
            bool ok = name && accumulate_into(c, name);
            Py_XDECREF(name);
            if (!ok) return false;
        }
        return count >= 0;
    }
    int count = 0;
    for (size_t i = 0; i < c->f->pass->outputs; i++)
        if (c->tensors[i] && c->f->pass->slots[i].flags & VJP_SLOT_ACCUMULATES) {
            c->arrays[i].tensor.flags = VJP_ACCUMULATE;
            count++;
        }
    if (count) return true;
    PyErr_Format(PyExc_ValueError, "%s: accumulate=True, but out= gives no array to add to", c->f->name);
    return false;
}

/* ---- Inputs ------------------------------------------------------------------------------------------ */

static bool is_number(PyObject *object) {
    return !array_has_table(object) && (PyFloat_Check(object) || PyLong_Check(object));
}

vjp_dtype call_storage(const op_function *f, const vjp_tensor *const *tensors) {
    const vjp_pass_info *pass = f->pass;
    for (size_t i = pass->outputs; i < pass->count; i++)
        if (tensors[i] && pass->slots[i].kind == VJP_KIND_STORAGE) return (vjp_dtype)tensors[i]->dtype;
    for (size_t i = pass->outputs; i < pass->count; i++)
        if (tensors[i] && tensors[i]->dtype == VJP_F64) return VJP_F64;
    return VJP_F32;
}

static bool read_number(call *c, int slot, PyObject *value, vjp_dtype storage) {
    vjp_kind kind = c->f->pass->slots[slot].kind;
    array *a = &c->arrays[slot];
    memset(a, 0, sizeof *a);
    a->gpu = -1;
    vjp_dtype dtype = kind == VJP_KIND_INDEX || kind == VJP_KIND_ARGMAX ? VJP_I64
                      : storage == VJP_F64                              ? VJP_F64
                                                                        : VJP_F32;
    if (kind == VJP_KIND_STORAGE || kind == VJP_KIND_FLOAT) {
        PyErr_Format(PyExc_TypeError, "%s: %s must be an array, not a number", c->f->name,
                     c->f->pass->slots[slot].name);
        return false;
    }
    double real = dtype == VJP_I64 ? 0 : PyFloat_AsDouble(value);
    if (dtype == VJP_I64)
        c->numbers[slot].i64 = PyLong_AsLongLong(value);
    else if (dtype == VJP_F64)
        c->numbers[slot].f64 = real;
    else
        c->numbers[slot].f32 = (float)real;
    if (PyErr_Occurred()) return false;
    a->tensor = vjp_tensor_of(&c->numbers[slot], dtype, 0, (const int64_t[1]){0});
    c->tensors[slot] = &a->tensor;
    return true;
}

static bool read_inputs(call *c) {
    const op_function *f = c->f;
    int first = (int)f->pass->outputs, numbers = 0;
    for (int i = 0; i < f->inputs; i++) {
        const vjp_slot *slot = &f->pass->slots[first + i];
        PyObject *value = c->values[i];
        array *a = &c->arrays[first + i];
        if (!value && slot->flags & VJP_SLOT_OPTIONAL) continue;
        if (!value) {
            PyErr_Format(PyExc_TypeError, "%s() needs the argument '%s'", f->name, slot->name);
            return false;
        }
        if (is_number(value)) {
            numbers++;
            continue;
        }
        c->tensors[first + i] = &a->tensor;
        if (!array_read(value, f->name, slot->name, false, a) ||
            !array_pack(a, f->name, slot->name, false, takes_rows(c, first + i)))
            return false;
        if (!c->like) c->like = a;
    }
    if (!numbers) return true;
    vjp_dtype storage = call_storage(f, c->tensors);
    for (int i = 0; i < f->inputs; i++)
        if (c->values[i] && is_number(c->values[i]) && !read_number(c, first + i, c->values[i], storage)) return false;
    return true;
}

/* ---- Running ----------------------------------------------------------------------------------------- */

bool function_leaves_dtype_open(const op_function *f) {
    return f->pass->slots[0].kind == VJP_KIND_FLOAT;
}

/* The outputs that are wanted and not given. A gradient has the dtype of what it is the gradient of. */
bool call_create_outputs(call *c, vjp_device *device) {
    const op_function *f = c->f;
    static const array of_numpy = {.kind = ARRAY_BUFFER, .gpu = -1};
    vjp_tensor described[VJP_MAX_SLOTS];
    bool inferred = false;
    if (!c->like) c->like = &of_numpy;
    for (int i = 0; i < c->wanted_count; i++) {
        int slot = c->wanted[i];
        if (c->tensors[slot]) continue;
        if (!inferred) {
            vjp_status status = vjp_infer(device, f->op, f->number, c->tensors, f->pass->count,
                                          c->has_attributes ? c->attributes : NULL, described);
            if (status != VJP_OK) {
                error_set(status, vjp_error(device));
                return false;
            }
            inferred = true;
        }
        int source = f->gradient_of[slot];
        bool matches = source >= 0 && c->tensors[source] && f->pass->slots[slot].kind == VJP_KIND_PARAMETER;
        int dtype = matches ? c->tensors[source]->dtype : described[slot].dtype;
        if (f->pass->slots[slot].kind == VJP_KIND_FLOAT && call_extra(c, ARGUMENT_DTYPE)) {
            dtype = array_dtype(call_extra(c, ARGUMENT_DTYPE));
            if (dtype < 0) return false;
        }
        described[slot].dtype = dtype;
        c->created[slot] = true;
        c->tensors[slot] = &c->arrays[slot].tensor;
        if (!array_create(c->like, &described[slot], device, &c->arrays[slot])) return false;
    }
    return true;
}

vjp_status call_op(const op_function *f, vjp_device *device, const vjp_tensor *const *tensors, const void *attributes) {
    vjp_status status = vjp_call(device, f->op, f->number, tensors, f->pass->count, attributes);
    if (status != VJP_WORKSPACE) return status;
    size_t bytes;
    status = vjp_workspace_size(device, f->op, f->number, tensors, f->pass->count, attributes, &bytes);
    if (status == VJP_OK) status = vjp_reserve(device, bytes);
    if (status == VJP_OK) status = vjp_call(device, f->op, f->number, tensors, f->pass->count, attributes);
    return status;
}

/* Needs no GIL. */
static vjp_status run(call *c, vjp_device *device) {
    const op_function *f = c->f;
    for (size_t i = 0; i < f->pass->count; i++)
        if (c->tensors[i] && c->arrays[i].copy && (i >= f->pass->outputs || c->arrays[i].tensor.flags))
            array_copy_in(&c->arrays[i]);
    vjp_status status = call_op(f, device, c->tensors, c->has_attributes ? c->attributes : NULL);
    for (size_t i = 0; status == VJP_OK && i < f->pass->outputs; i++)
        if (c->tensors[i] && c->arrays[i].copy) array_copy_out(&c->arrays[i]);
    return status;
}

/*
 * Arrays that all have fewer elements than this are computed with the GIL held, in a microsecond or two: to release it
 * and to take it again is a tenth of such a call. hashlib does so up to 2047 bytes.
 */
enum { MIN_UNLOCKED = 512 };

static bool is_small(const vjp_tensor *tensor) {
    uint64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++) {
        uint64_t size = (uint64_t)tensor->shape[i];
        if (size >= MIN_UNLOCKED || (count *= size) >= MIN_UNLOCKED) return false;
    }
    return true;
}

static vjp_status run_unlocked(call *c, vjp_device *device) {
    bool small = true;
    for (size_t i = 0; small && i < c->f->pass->count; i++)
        small = !c->tensors[i] || is_small(c->tensors[i]);
    if (small) return run(c, device);
    PyThreadState *unlocked = PyEval_SaveThread();
    vjp_status status = run(c, device);
    PyEval_RestoreThread(unlocked);
    return status;
}

static PyObject *take_result(call *c, int slot) {
    return c->created[slot] ? array_take(c->like, &c->arrays[slot]) : Py_NewRef(c->arrays[slot].object);
}

PyObject *call_results(call *c) {
    if (c->bare) return take_result(c, c->wanted[0]);
    PyObject *tuple = PyTuple_New(c->wanted_count);
    for (int i = 0; tuple && i < c->wanted_count; i++) {
        PyObject *one = take_result(c, c->wanted[i]);
        if (!one || PyTuple_SetItem(tuple, i, one)) Py_CLEAR(tuple);
    }
    return tuple;
}

bool call_run_on_host(call *c) {
    bool pooled = c->like && c->like->kind == ARRAY_EXCHANGE; /* torch's tensors: on torch's threads */
    device_entry *entry = device_take_host(call_extra(c, ARGUMENT_DEVICE), pooled);
    if (!entry) return false;
    bool ok = call_create_outputs(c, entry->device);
    if (ok) {
        vjp_status status = run_unlocked(c, entry->device);
        ok = status == VJP_OK;
        if (!ok) error_set(status, vjp_error(entry->device));
    }
    device_give_back(entry);
    return ok;
}

void call_begin(call *c, const op_function *f) {
    c->f = f;
    c->like = NULL;
    memset(c->created, 0, sizeof c->created);
    memset(c->tensors, 0, sizeof c->tensors);
}

bool call_read(call *c) {
    return read_attributes(c) && read_wanted(c) && read_inputs(c) && read_out(c) && read_accumulate(c);
}

void call_release(call *c) {
    for (size_t i = 0; i < c->f->pass->count; i++)
        if (c->tensors[i]) array_release(&c->arrays[i]);
}

static PyObject *call_function(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    call c;
    int gpu;
    const op_function *f = PyCapsule_GetPointer(self, NULL);
    if (!f) return NULL;
    call_begin(&c, f);
    bool ok = bind(&c, arguments, count, names) && call_read(&c) && call_find_gpu(&c, &gpu);
    ok = ok && (gpu >= 0 ? call_run_on_gpu(&c, 1, gpu) : call_run_on_host(&c));
    PyObject *result = ok ? call_results(&c) : NULL;
    call_release(&c);
    return result;
}

/* ---- The functions ----------------------------------------------------------------------------------- */

static int find_slot(const vjp_pass_info *pass, const char *name) {
    for (size_t i = pass->outputs; i < pass->count; i++)
        if (strcmp(pass->slots[i].name, name) == 0) return (int)i;
    return -1;
}

static bool make_function(op_function *f, const vjp_op *op, vjp_pass number) {
    f->op = op;
    f->info = vjp_op_describe(op);
    f->pass = &f->info->pass[number];
    f->number = number;
    f->inputs = (int)(f->pass->count - f->pass->outputs);
    f->attributes = (int)f->info->attribute_count;
    int extras = function_leaves_dtype_open(f) ? EXTRA_ARGUMENTS : EXTRA_ARGUMENTS - 1;
    f->arguments = f->inputs + f->attributes + extras;
    if (f->attributes >= MAX_ATTRIBUTES || f->info->attribute_bytes > sizeof(int64_t) * MAX_ATTRIBUTES) {
        PyErr_Format(PyExc_ImportError, "vjp: %s has too many attributes", f->info->name);
        return false;
    }
    snprintf(f->name, sizeof f->name, "%s%s", f->info->name, number == VJP_BACKWARD ? "_backward" : "");
    for (size_t i = 0; i < f->pass->outputs; i++) {
        const char *name = f->pass->slots[i].name;
        f->gradient_of[i] = number == VJP_BACKWARD && name[0] == 'd' ? find_slot(f->pass, name + 1) : -1;
    }
    for (int i = 0; i < f->arguments; i++) {
        int attribute = i - f->inputs, after = attribute - f->attributes;
        const char *name = attribute < 0 ? f->pass->slots[f->pass->outputs + (size_t)i].name
                           : after < 0   ? f->info->attributes[attribute].name
                                         : describe_extra(after);
        f->names[i] = PyUnicode_InternFromString(name);
        if (!f->names[i]) return false;
    }
    f->method = (PyMethodDef){f->name, (PyCFunction)(void (*)(void))call_function, METH_FASTCALL | METH_KEYWORDS,
                              describe_function(f)};
    return f->method.ml_doc != NULL;
}

enum { MAX_FUNCTIONS = 128 };
static const op_function *all_functions[MAX_FUNCTIONS + 1];

const op_function *call_function_at(size_t index) {
    return index < MAX_FUNCTIONS ? all_functions[index] : NULL;
}

bool call_init(PyObject *module) {
    PyObject *ops = PyDict_New(), *module_name = PyUnicode_FromString("vjp");
    size_t count = 0;
    bool ok = ops && module_name;
    for (size_t i = 0; ok && i < vjp_op_count(); i++)
        for (int pass = 0; ok && pass < VJP_PASS_COUNT; pass++) {
            const vjp_op *op = vjp_op_at(i);
            if (!vjp_op_describe(op)->pass[pass].count) continue;
            op_function *f = PyMem_Calloc(1, sizeof *f); /* as long as the process */
            ok = f && count < MAX_FUNCTIONS && make_function(f, op, (vjp_pass)pass);
            if (ok) all_functions[count++] = f;
            PyObject *self = ok ? PyCapsule_New(f, NULL, NULL) : NULL;
            PyObject *made = self ? PyCFunction_NewEx(&f->method, self, module_name) : NULL;
            ok = made && PyDict_SetItemString(ops, f->name, made) == 0;
            Py_XDECREF(made);
            Py_XDECREF(self);
        }
    ok = ok && PyModule_AddObjectRef(module, "functions", ops) == 0;
    Py_XDECREF(ops);
    Py_XDECREF(module_name);
    if (!ok && !PyErr_Occurred()) PyErr_NoMemory();
    return ok;
}

/* SPDX-License-Identifier: MIT */
/*
 * The signature and the docstring of a function, from the op table. Python reads the first line of a built-in
 * function's docstring as its signature where "--" follows. scripts/generate writes the same signatures with types to
 * _ops.pyi.
 */
#include "core.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

typedef struct text {
    char *bytes;
    size_t used, room;
    bool failed;
} text;

static void add(text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add(text *t, const char *format, ...) {
    va_list list, again;
    va_start(list, format);
    va_copy(again, list);
    int length = vsnprintf(NULL, 0, format, list);
    va_end(list);
    if (length >= 0 && t->used + (size_t)length + 1 > t->room) {
        size_t room = 2 * (t->used + (size_t)length + 1);
        char *bytes = realloc(t->bytes, room);
        if (!bytes) t->failed = true;
        if (bytes) {
            t->bytes = bytes;
            t->room = room;
        }
    }
    if (length < 0) t->failed = true;
    if (!t->failed) {
        vsnprintf(t->bytes + t->used, t->room - t->used, format, again);
        t->used += (size_t)length;
    }
    va_end(again);
}

static const struct {
    const char *name, *value, *about;
} extras[EXTRA_ARGUMENTS] = {
    [ARGUMENT_OUTPUTS] = {"outputs", "None",
                          "which outputs to compute: a name gives one array, several names a tuple; None: all"},
    [ARGUMENT_OUT] = {"out", "None", "the array to write, or a tuple with one for each output (None: a new one)"},
    [ARGUMENT_ACCUMULATE] = {"accumulate", "False",
                             "add to `out` instead of overwriting it: True, or the names of outputs"},
    [ARGUMENT_DEVICE] = {"device", "None", "\"cpu\" (the default) or \"ref\", which computes in f64, slowly"},
    [ARGUMENT_DTYPE] = {"dtype", "'f32'", "the dtype of a new result"},
};

const char *describe_extra(int argument) {
    return extras[argument].name;
}

static void add_default(text *t, const vjp_attribute *a) {
    char *real;
    switch (a->type) {
    case VJP_REAL:
        real = PyOS_double_to_string(a->real, 'r', 0, Py_DTSF_ADD_DOT_0, NULL);
        add(t, "%s", real ? real : "0.0");
        PyMem_Free(real);
        break;
    case VJP_BOOLEAN: add(t, "%s", a->integer ? "True" : "False"); break;
    case VJP_CHOICE: add(t, "'%s'", a->choices[a->integer]); break;
    case VJP_INTEGER: add(t, "%lld", (long long)a->integer); break;
    }
}

/* The first input from which on all are optional: only those have a default. */
static size_t first_default(const vjp_pass_info *pass) {
    size_t first = pass->count;
    while (first > pass->outputs && pass->slots[first - 1].flags & VJP_SLOT_OPTIONAL)
        first--;
    return first;
}

static const char *kind_text(vjp_kind kind) {
    switch (kind) {
    case VJP_KIND_STORAGE: return "T";
    case VJP_KIND_PARAMETER: return "T or f32";
    case VJP_KIND_STATISTIC: return "f32, or f64 where T is";
    case VJP_KIND_INDEX: return "i32, i64 or f32";
    case VJP_KIND_ARGMAX: return "i32 or i64";
    case VJP_KIND_FLOAT: return "any float";
    case VJP_KIND_GRADIENT: return "T, f32 or bf16";
    case VJP_KIND_MOMENT: return "f32 or bf16, or f64 where T is";
    }
    return "?";
}

static void add_slots(text *t, const char *title, const op_function *f, size_t begin, size_t end) {
    const vjp_pass_info *pass = f->pass;
    add(t, "\n%s:\n", title);
    for (size_t i = begin; i < end; i++) {
        const vjp_slot *s = &pass->slots[i];
        add(t, "    %s: %s, %s%s%s%s. %s\n", s->name, s->shape, kind_text(s->kind),
            s->flags & VJP_SLOT_OPTIONAL ? ", may be None" : "", s->flags & VJP_SLOT_ACCUMULATES ? ", accumulates" : "",
            i < pass->outputs && function_repeats(f, i) ? ", only where `outputs` names it" : "", s->about);
    }
}

char *describe_function(const op_function *f) {
    text t = {0};
    const vjp_pass_info *pass = f->pass;
    int extra_count = f->arguments - f->inputs - f->attributes;
    size_t defaults = first_default(pass);
    add(&t, "%s(", f->name);
    for (size_t i = pass->outputs; i < pass->count; i++)
        add(&t, "%s%s, ", pass->slots[i].name, i >= defaults ? "=None" : "");
    add(&t, "*");
    for (int i = 0; i < f->attributes; i++) {
        add(&t, ", %s=", f->info->attributes[i].name);
        add_default(&t, &f->info->attributes[i]);
    }
    for (int i = 0; i < extra_count; i++)
        add(&t, ", %s=%s", extras[i].name, extras[i].value);
    add(&t, ")\n--\n\n");
    add(&t, "%s%s.\n\n%s\n", f->number == VJP_BACKWARD ? "The backward pass of: " : "", f->info->about,
        f->info->formula);
    add_slots(&t, "Returns, in this order", f, 0, pass->outputs);
    add_slots(&t, "Tensors (T is the dtype of the first that is T)", f, pass->outputs, pass->count);
    add(&t, "\nOptions:\n");
    for (int i = 0; i < f->attributes; i++) {
        const vjp_attribute *a = &f->info->attributes[i];
        add(&t, "    %s: %s", a->name, a->about);
        for (size_t k = 0; a->choices && a->choices[k]; k++)
            add(&t, "%s%s", k ? ", " : " (", a->choices[k]);
        add(&t, "%s\n", a->choices ? ")" : "");
    }
    for (int i = 0; i < extra_count; i++)
        add(&t, "    %s: %s\n", extras[i].name, extras[i].about);
    if (!t.failed) return t.bytes;
    free(t.bytes);
    return NULL;
}

/* ---- The op table as Python data ----------------------------------------------------------------------- */

static const char *kind_name(vjp_kind kind) {
    switch (kind) {
    case VJP_KIND_STORAGE: return "storage";
    case VJP_KIND_PARAMETER: return "parameter";
    case VJP_KIND_STATISTIC: return "statistic";
    case VJP_KIND_INDEX: return "index";
    case VJP_KIND_ARGMAX: return "argmax";
    case VJP_KIND_FLOAT: return "float";
    case VJP_KIND_GRADIENT: return "gradient";
    case VJP_KIND_MOMENT: return "moment";
    }
    return "?";
}

/* Appends `item`, whose reference it takes; false with an exception set on failure. */
static bool append(PyObject *list, PyObject *item) {
    bool ok = item && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return ok;
}

static PyObject *attribute_row(const vjp_attribute *a) {
    switch (a->type) {
    case VJP_REAL: return Py_BuildValue("(ssdO)", a->name, "float", a->real, Py_None);
    case VJP_BOOLEAN: return Py_BuildValue("(ssOO)", a->name, "bool", a->integer ? Py_True : Py_False, Py_None);
    case VJP_INTEGER: return Py_BuildValue("(ssLO)", a->name, "int", (long long)a->integer, Py_None);
    case VJP_CHOICE: break;
    }
    PyObject *choices = PyList_New(0);
    bool ok = choices != NULL;
    for (size_t i = 0; ok && a->choices[i]; i++)
        ok = append(choices, PyUnicode_FromString(a->choices[i]));
    PyObject *row = ok ? Py_BuildValue("(sssO)", a->name, "str", a->choices[a->integer], choices) : NULL;
    Py_XDECREF(choices);
    return row;
}

static PyObject *function_row(const op_function *f) {
    PyObject *inputs = PyList_New(0), *outputs = PyList_New(0), *attributes = PyList_New(0);
    bool ok = inputs && outputs && attributes;
    for (size_t i = 0; ok && i < f->pass->count; i++) {
        const vjp_slot *s = &f->pass->slots[i];
        PyObject *optional = s->flags & VJP_SLOT_OPTIONAL ? Py_True : Py_False;
        ok = i < f->pass->outputs ? append(outputs, Py_BuildValue("(ss)", s->name, kind_name(s->kind)))
                                  : append(inputs, Py_BuildValue("(ssO)", s->name, kind_name(s->kind), optional));
    }
    for (int i = 0; ok && i < f->attributes; i++)
        ok = append(attributes, attribute_row(&f->info->attributes[i]));
    PyObject *row = ok ? Py_BuildValue("(siOOO)", f->info->name, (int)f->number, inputs, outputs, attributes) : NULL;
    Py_XDECREF(inputs);
    Py_XDECREF(outputs);
    Py_XDECREF(attributes);
    return row;
}

PyObject *describe_table(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    PyObject *table = PyDict_New();
    const op_function *f;
    for (size_t i = 0; table && (f = call_function_at(i)); i++) {
        PyObject *row = function_row(f);
        if (!row || PyDict_SetItemString(table, f->name, row)) Py_CLEAR(table);
        Py_XDECREF(row);
    }
    return table;
}

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
    }
    return "?";
}

static void add_slots(text *t, const char *title, const vjp_pass_info *pass, size_t begin, size_t end) {
    add(t, "\n%s:\n", title);
    for (size_t i = begin; i < end; i++) {
        const vjp_slot *s = &pass->slots[i];
        add(t, "    %s: %s, %s%s%s. %s\n", s->name, s->shape, kind_text(s->kind),
            s->flags & VJP_SLOT_OPTIONAL ? ", may be None" : "", s->flags & VJP_SLOT_ACCUMULATES ? ", accumulates" : "",
            s->about);
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
    add_slots(&t, "Returns, in this order", pass, 0, pass->outputs);
    add_slots(&t, "Tensors (T is the dtype of the first that is T)", pass, pass->outputs, pass->count);
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

/* SPDX-License-Identifier: MIT */
/*
 * Devices, kept open between calls. Opening one starts its threads, which takes as long as thousands of small calls.
 * The list of idle devices is changed only with the GIL held, and a fork happens with the GIL held, so the list is
 * whole in a child; a device that another thread used at that moment is lost there, and the child opens another.
 */
#include "core.h"

#include <string.h>

static device_entry *idle;
static int threads;         /* 0: as the library chooses */
static unsigned generation; /* goes up when `threads` changes */

static void close_entry(device_entry *entry) {
    vjp_close(entry->device);
    PyMem_Free(entry);
}

static device_entry *open_entry(const char *name) {
    device_entry *entry = PyMem_Calloc(1, sizeof *entry);
    if (!entry) {
        PyErr_NoMemory();
        return NULL;
    }
    vjp_options options = VJP_OPTIONS_DEFAULTS;
    options.threads = threads;
    snprintf(entry->name, sizeof entry->name, "%s", name);
    entry->generation = generation;
    PyThreadState *unlocked = PyEval_SaveThread();
    vjp_status status = vjp_open(name, &options, &entry->device);
    PyEval_RestoreThread(unlocked);
    if (status == VJP_OK) return entry;
    error_set(status, vjp_error(entry->device));
    close_entry(entry);
    return NULL;
}

device_entry *device_take(const char *name) {
    if (!name) name = "cpu";
    for (device_entry **at = &idle; *at; at = &(*at)->next) {
        device_entry *entry = *at;
        if (strcmp(entry->name, name) != 0) continue;
        *at = entry->next;
        return entry;
    }
    return open_entry(name);
}

void device_give_back(device_entry *entry) {
    if (entry->generation != generation) {
        close_entry(entry);
        return;
    }
    entry->next = idle;
    idle = entry;
}

device_entry *device_take_host(PyObject *name) {
    if (!name || name == Py_None) return device_take(NULL);
    if (!PyUnicode_Check(name)) {
        PyErr_Format(PyExc_TypeError, "device must be a name, not %R", name);
        return NULL;
    }
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    device_entry *entry = text ? device_take(text) : NULL;
    if (entry && !vjp_device_is_host(entry->device)) {
        PyErr_Format(PyExc_ValueError,
                     "device \"%s\" has its own memory, and the arrays are in host memory; use a Graph", text);
        device_give_back(entry);
        entry = NULL;
    }
    return entry;
}

PyObject *device_set_threads(PyObject *module, PyObject *count) {
    (void)module;
    long wanted = PyLong_AsLong(count);
    if (wanted == -1 && PyErr_Occurred()) return NULL;
    if (wanted < 0 || wanted > 1024) {
        PyErr_Format(PyExc_ValueError, "set_threads: %ld threads; it must be 1 to 1024, or 0 for the default", wanted);
        return NULL;
    }
    threads = (int)wanted;
    generation++;
    while (idle) {
        device_entry *entry = idle;
        idle = entry->next;
        close_entry(entry);
    }
    Py_RETURN_NONE;
}

PyObject *device_summary(PyObject *module, PyObject *name) {
    (void)module;
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    device_entry *entry = text ? device_take(text) : NULL;
    if (!entry) return NULL;
    PyObject *summary = PyUnicode_FromString(vjp_device_summary(entry->device));
    device_give_back(entry);
    return summary;
}

/* [(kind, index, one line)] of the devices that this machine has. */
PyObject *device_list(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    PyObject *list = PyList_New(0);
    const char *kind;
    for (size_t k = 0; list && (kind = vjp_device_kind(k)); k++) {
        PyThreadState *unlocked = PyEval_SaveThread();
        size_t count = vjp_device_count(kind);
        PyEval_RestoreThread(unlocked);
        for (size_t i = 0; list && i < count; i++) {
            char text[512];
            unlocked = PyEval_SaveThread();
            vjp_status status = vjp_device_describe(kind, i, text, sizeof text);
            PyEval_RestoreThread(unlocked);
            if (status != VJP_OK) continue;
            PyObject *row = Py_BuildValue("(sns)", kind, (Py_ssize_t)i, text);
            if (!row || PyList_Append(list, row)) Py_CLEAR(list);
            Py_XDECREF(row);
        }
    }
    return list;
}

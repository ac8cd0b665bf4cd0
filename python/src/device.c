/* SPDX-License-Identifier: MIT */
/*
 * Devices, kept open between calls. Opening one starts its threads, which takes as long as thousands of small calls.
 * Idle devices are in an array that threads change by single atomic exchanges, so no lock is needed (torch and XLA call
 * without the GIL) and the array is whole in a forked child; a device that another thread used at that moment is lost
 * there, and the child opens another.
 */
#include "core.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_IDLE = 64 }; /* more than that many are closed when they are given back */

static _Atomic(device_entry *) idle[MAX_IDLE];
static atomic_int threads;     /* 0: as the library chooses */
static atomic_uint generation; /* goes up when `threads` changes */
static _Atomic(const device_pool *) other_pool;

void device_set_pool(const device_pool *pool) {
    atomic_store(&other_pool, pool);
}

static void close_entry(device_entry *entry) {
    if (entry->stream) vjp_set_stream(entry->device, NULL); /* the caller's may be gone */
    vjp_close(entry->device);
    free(entry);
}

/* Leaves a device of another name for others; closes one whose pool has another number of threads now. */
static device_entry *find_idle(const char *name, int pool_threads, const void *stream) {
    for (int i = 0; i < MAX_IDLE; i++) {
        device_entry *entry = atomic_exchange(&idle[i], NULL);
        if (!entry) continue;
        bool same = strcmp(entry->name, name) == 0 && entry->stream == stream;
        if (same && entry->pool_threads == pool_threads) return entry;
        if (same && entry->pool_threads && pool_threads)
            close_entry(entry);
        else
            device_give_back(entry);
    }
    return NULL;
}

static device_entry *open_entry(const char *name, const device_pool *pool, int pool_threads, vjp_status *status,
                                char *sentence, size_t bytes) {
    device_entry *entry = calloc(1, sizeof *entry);
    *status = VJP_OUT_OF_MEMORY;
    snprintf(sentence, bytes, "memory ran out while opening device %s", name);
    if (!entry) return NULL;
    vjp_options options = VJP_OPTIONS_DEFAULTS;
    if (strncmp(name, "cuda", 4) == 0) options.workspace_bytes = 64; /* calls bring their own, or it grows */
    options.threads = pool_threads ? pool_threads : atomic_load(&threads);
    if (pool_threads) options.parallel_for = pool->run;
    snprintf(entry->name, sizeof entry->name, "%s", name);
    entry->generation = atomic_load(&generation);
    entry->pool_threads = pool_threads;
    *status = vjp_open(name, &options, &entry->device);
    if (*status == VJP_OK) return entry;
    snprintf(sentence, bytes, "%s", vjp_error(entry->device));
    close_entry(entry);
    return NULL;
}

/* The number of threads of the other pool; 0: the call runs on the device's own. */
static int pool_size(const char *name, const device_pool *pool, bool pooled) {
    return pooled && pool && strcmp(name, "cpu") == 0 ? pool->threads() : 0;
}

device_entry *device_acquire(const char *name, bool pooled, vjp_status *status, char *sentence, size_t bytes) {
    const device_pool *pool = atomic_load(&other_pool);
    int pool_threads = pool_size(name, pool, pooled);
    device_entry *entry = find_idle(name, pool_threads, NULL);
    return entry ? entry : open_entry(name, pool, pool_threads, status, sentence, bytes);
}

device_entry *device_take(const char *name, bool pooled) {
    if (!name) name = "cpu";
    const device_pool *pool = atomic_load(&other_pool);
    int pool_threads = pool_size(name, pool, pooled);
    device_entry *entry = find_idle(name, pool_threads, NULL);
    if (entry) return entry;
    vjp_status status;
    char sentence[512];
    PyThreadState *unlocked = PyEval_SaveThread();
    entry = open_entry(name, pool, pool_threads, &status, sentence, sizeof sentence);
    PyEval_RestoreThread(unlocked);
    if (!entry) error_set(status, sentence);
    return entry;
}

device_entry *device_find_on(const char *name, void *stream) {
    return find_idle(name, 0, stream);
}

device_entry *device_take_on(const char *name, void *stream) {
    device_entry *entry = device_take(name, false);
    if (!entry) return NULL;
    vjp_status status = vjp_set_stream(entry->device, stream);
    if (status == VJP_OK) {
        entry->stream = stream;
        return entry;
    }
    error_set(status, vjp_error(entry->device));
    device_give_back(entry);
    return NULL;
}

void device_keep_spare(const char *name) {
    device_entry *entry = device_take(name, false);
    if (entry)
        device_give_back(entry);
    else
        PyErr_Clear();
}

void device_release_stream(device_entry *entry) {
    vjp_set_stream(entry->device, NULL);
    entry->stream = NULL;
}

void device_give_back(device_entry *entry) {
    bool current = entry->generation == atomic_load(&generation);
    for (int i = 0; current && i < MAX_IDLE; i++) {
        device_entry *none = NULL;
        if (atomic_compare_exchange_strong(&idle[i], &none, entry)) return;
    }
    close_entry(entry);
}

device_entry *device_take_host(PyObject *name, bool pooled) {
    if (!name || name == Py_None) return device_take(NULL, pooled);
    if (!PyUnicode_Check(name)) {
        PyErr_Format(PyExc_TypeError, "device must be a name, not %R", name);
        return NULL;
    }
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    device_entry *entry = text ? device_take(text, pooled) : NULL;
    if (entry && !vjp_device_is_host(entry->device)) {
        PyErr_Format(PyExc_ValueError,
                     "device \"%s\" has its own memory, and the arrays are in host memory; use a Graph, or arrays of "
                     "that device",
                     text);
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
    atomic_store(&threads, (int)wanted);
    atomic_fetch_add(&generation, 1);
    for (int i = 0; i < MAX_IDLE; i++) {
        device_entry *entry = atomic_exchange(&idle[i], NULL);
        if (entry) close_entry(entry);
    }
    Py_RETURN_NONE;
}

/* Devices that a call is using now are left out: that call reports for itself. */
PyObject *device_synchronize(PyObject *module, PyObject *name) {
    (void)module;
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    if (!text) return NULL;
    vjp_status status = VJP_OK;
    char sentence[512] = "";
    PyThreadState *unlocked = PyEval_SaveThread();
    for (int i = 0; i < MAX_IDLE; i++) {
        device_entry *entry = atomic_exchange(&idle[i], NULL);
        if (!entry) continue;
        vjp_status one = strcmp(entry->name, text) == 0 ? vjp_synchronize(entry->device) : VJP_OK;
        if (one != VJP_OK && status == VJP_OK) {
            status = one;
            snprintf(sentence, sizeof sentence, "%s", vjp_error(entry->device));
        }
        device_give_back(entry);
    }
    PyEval_RestoreThread(unlocked);
    if (status == VJP_OK) Py_RETURN_NONE;
    error_set(status, sentence);
    return NULL;
}

PyObject *device_summary(PyObject *module, PyObject *name) {
    (void)module;
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    device_entry *entry = text ? device_take(text, false) : NULL;
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

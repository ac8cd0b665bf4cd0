/* SPDX-License-Identifier: MIT */
/*
 * A status of vjp as a Python exception. All of them are vjp.Error; each is also what Python code would expect, so
 * that `except ValueError` works.
 */
#include "core.h"

static PyObject *error_types[VJP_FILE + 1];

bool error_init(PyObject *module) {
    static const struct {
        vjp_status status;
        const char *name, *about;
    } rows[] = {
        {VJP_INVALID, "InvalidError", "The arguments contradict each other or the op's rules."},
        {VJP_UNSUPPORTED, "UnsupportedError", "The arguments make sense, but the device has no kernel for them."},
        {VJP_OUT_OF_MEMORY, "OutOfMemoryError", "An allocation failed."},
        {VJP_NO_DEVICE, "NoDeviceError", "There is no such device here."},
        {VJP_DEVICE_FAILED, "DeviceError", "The device or its driver reported an error."},
        {VJP_INTERRUPTED, "InterruptedRunError", "A run of a program was interrupted."},
        {VJP_FILE, "FileError", "A file could not be read or written."},
    };
    PyObject *builtin[] = {PyExc_ValueError,   PyExc_NotImplementedError, PyExc_MemoryError, PyExc_RuntimeError,
                           PyExc_RuntimeError, PyExc_RuntimeError,        PyExc_OSError};
    PyObject *base = PyErr_NewExceptionWithDoc("vjp.Error", "What vjp refused or could not do, in a sentence.",
                                               PyExc_Exception, NULL);
    if (!base || PyModule_AddObjectRef(module, "Error", base)) return false;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "vjp.%s", rows[i].name);
        PyObject *bases = PyTuple_Pack(2, base, builtin[i]);
        PyObject *type = bases ? PyErr_NewExceptionWithDoc(name, rows[i].about, bases, NULL) : NULL;
        Py_XDECREF(bases);
        if (!type || PyModule_AddObjectRef(module, rows[i].name, type)) return false;
        error_types[rows[i].status] = type;
    }
    error_types[VJP_OK] = error_types[VJP_WORKSPACE] = base;
    return true;
}

void error_set(vjp_status status, const char *sentence) {
    PyObject *type = (size_t)status < sizeof error_types / sizeof error_types[0] ? error_types[status] : NULL;
    PyErr_SetString(type ? type : error_types[VJP_OK], sentence && *sentence ? sentence : vjp_status_name(status));
}

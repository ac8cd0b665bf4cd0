/* SPDX-License-Identifier: MIT */
/*
 * Arrays in the memory of an NVIDIA GPU. A call runs on the device "cuda:N" of its arrays, on the stream that their
 * library enqueues on at that moment:
 *
 *   the arrays come by                    the stream               the call returns
 *   a DLPack table of C functions: torch  the table's current one  when it is enqueued; all temporary memory is the
 *                                                                  library's own, which it reuses in stream order
 *   a capsule of cupy                     cupy's current one       when it is done
 *   any other capsule: jax                CUDA's default stream    when it is done
 *
 * A capsule's library cannot be told which stream its memory was written on, so there the host waits.
 *
 * Kernels take packed arrays. The host cannot copy this memory, so the array's library makes a packed copy: its method
 * contiguous(), or ascontiguousarray() of its module.
 */
#include "core.h"

#include <string.h>

/* cudaStreamLegacy, which is also DLPack's number for it. NULL means the device's own stream in vjp. */
static void *const default_stream = (void *)1; // NOLINT(performance-no-int-to-ptr)

void gpu_name(int gpu, char name[GPU_NAME]) {
    snprintf(name, GPU_NAME, "cuda:%d", gpu);
}

/* ---- Streams ----------------------------------------------------------------------------------------- */

/* cupy.cuda.get_current_stream().ptr */
static bool cupy_stream(void **stream) {
    PyObject *module = PyImport_ImportModule("cupy.cuda");
    PyObject *current = module ? PyObject_CallMethod(module, "get_current_stream", NULL) : NULL;
    PyObject *pointer = current ? PyObject_GetAttrString(current, "ptr") : NULL;
    if (pointer) *stream = PyLong_AsVoidPtr(pointer);
    Py_XDECREF(pointer);
    Py_XDECREF(current);
    Py_XDECREF(module);
    return !PyErr_Occurred();
}

static bool is_of_cupy(PyObject *object) {
    PyObject *module = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__module__");
    const char *name = module && PyUnicode_Check(module) ? PyUnicode_AsUTF8AndSize(module, NULL) : NULL;
    bool found = name && (strcmp(name, "cupy") == 0 || strncmp(name, "cupy.", 5) == 0);
    PyErr_Clear();
    Py_XDECREF(module);
    return found;
}

bool gpu_capsule_stream(PyObject *object, void **stream) {
    *stream = NULL;
    if (is_of_cupy(object) && !cupy_stream(stream)) return false;
    if (!*stream) *stream = default_stream;
    return true;
}

bool gpu_stream(const array *like, void **stream) {
    *stream = like->stream;
    if (like->kind == ARRAY_EXCHANGE) {
        if (!like->exchange->current_stream) {
            PyErr_Format(PyExc_TypeError, "%R does not say which stream it uses", (PyObject *)Py_TYPE(like->object));
            return false;
        }
        if (like->exchange->current_stream(DL_CUDA, like->gpu, stream)) return false;
    }
    if (!*stream) *stream = default_stream;
    return true;
}

/* The module of the library that has the functions on CUDA: torch.cuda, cupy.cuda. */
static PyObject *cuda_module(const array *like) {
    PyObject *namespace = like->object ? array_namespace(like->object) : NULL;
    PyObject *cuda = namespace ? PyObject_GetAttrString(namespace, "cuda") : NULL;
    Py_XDECREF(namespace);
    return cuda;
}

bool gpu_is_capturing(const array *like) {
    PyObject *cuda = cuda_module(like);
    PyObject *answer = cuda ? PyObject_CallMethod(cuda, "is_current_stream_capturing", NULL) : NULL;
    bool capturing = answer && PyObject_IsTrue(answer) > 0;
    PyErr_Clear();
    Py_XDECREF(answer);
    Py_XDECREF(cuda);
    return capturing;
}

/* ---- The thread's current GPU ------------------------------------------------------------------------ */

int gpu_current(const array *like) {
    static int count = -1;
    if (count < 0) count = (int)vjp_device_count("cuda");
    if (count < 2) return -1;
    PyObject *cuda = cuda_module(like);
    PyObject *answer = cuda ? PyObject_CallMethod(cuda, "current_device", NULL) : NULL;
    long number = answer ? PyLong_AsLong(answer) : -1;
    PyErr_Clear();
    Py_XDECREF(answer);
    Py_XDECREF(cuda);
    return (int)number;
}

void gpu_make_current(const array *like, int gpu) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *cuda = cuda_module(like);
    PyObject *done = cuda ? PyObject_CallMethod(cuda, "set_device", "i", gpu) : NULL;
    PyErr_Clear();
    Py_XDECREF(done);
    Py_XDECREF(cuda);
    PyErr_Restore(type, value, trace);
}

/* ---- Packing ----------------------------------------------------------------------------------------- */

static PyObject *packed_copy(PyObject *object) {
    PyObject *method = PyObject_GetAttrString(object, "contiguous");
    if (method) {
        PyObject *made = PyObject_CallNoArgs(method);
        Py_DECREF(method);
        return made;
    }
    PyErr_Clear();
    PyObject *namespace = array_namespace(object);
    PyObject *made = namespace ? PyObject_CallMethod(namespace, "ascontiguousarray", "O", object) : NULL;
    Py_XDECREF(namespace);
    return made;
}

bool gpu_pack(array *a, const char *function, const char *name, bool output) {
    if (!array_is_packed(a)) {
        if (output && array_repeats_elements(a)) {
            PyErr_Format(PyExc_ValueError, "%s: %s cannot be written: several of its elements share memory", function,
                         name);
            return false;
        }
        array copy;
        PyObject *made = packed_copy(a->object);
        if (!made) return false;
        bool ok = array_read(made, function, name, output, &copy);
        if (ok && (copy.gpu != a->gpu || !array_is_packed(&copy))) {
            PyErr_Format(PyExc_ValueError, "%s: %s is not packed, and its library made no packed copy of it", function,
                         name);
            ok = false;
        }
        if (!ok) {
            array_release(&copy);
            Py_DECREF(made);
            return false;
        }
        Py_XDECREF(a->owned);
        a->owned = copy.owned;
        a->packed = made;
        a->tensor = copy.tensor;
        a->data = copy.data;
        memcpy(a->byte_stride, copy.byte_stride, sizeof a->byte_stride);
    }
    a->tensor.data = a->data;
    return true;
}

bool gpu_unpack(const array *a) {
    return !a->packed || PyObject_SetItem(a->object, Py_Ellipsis, a->packed) == 0;
}

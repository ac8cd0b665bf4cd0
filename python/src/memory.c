/* SPDX-License-Identifier: MIT */
/*
 * Memory of our own that another library takes over: an object with `__dlpack__` and `__dlpack_device__`. Used where a
 * library can only make arrays from such objects, as jax and torch before 2.10. The memory is freed when the last array
 * over it is.
 */
#include "core.h"

#include <stdlib.h>

enum { ALIGNMENT = 64 };

typedef struct memory {
    PyObject_HEAD void *block; /* what malloc() returned; the data are inside, aligned */
    void *data;
    int gpu; /* -1: host memory */
    vjp_tensor tensor;
} memory;

/* What a capsule points to, of either version. */
typedef struct exported {
    union {
        dl_managed plain;
        dl_managed_versioned versioned;
    } as;
    PyObject *owner;
    int64_t shape[VJP_MAX_DIMS], strides[VJP_MAX_DIMS];
} exported;

static PyTypeObject *memory_type;

dl_type memory_dl_type(vjp_dtype dtype) {
    uint8_t code = dtype == VJP_BF16 ? DL_BFLOAT : dtype == VJP_I32 || dtype == VJP_I64 ? DL_INT : DL_FLOAT;
    return (dl_type){code, (uint8_t)(8 * vjp_dtype_size(dtype)), 1};
}

/* Libraries may free a tensor on a thread of their own, and after Python has ended. */
static void release(exported *e) {
    if (Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF(e->owner);
        PyGILState_Release(state);
    }
    free(e);
}

static void delete_plain(dl_managed *self) {
    release(self->context);
}

static void delete_versioned(dl_managed_versioned *self) {
    release(self->context);
}

/* A consumer renames the capsule: with its original name, the tensor was not consumed. */
static void delete_capsule(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor"))
        delete_plain(PyCapsule_GetPointer(capsule, "dltensor"));
    else if (PyCapsule_IsValid(capsule, "dltensor_versioned"))
        delete_versioned(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
}

static PyObject *memory_dlpack(PyObject *self, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    PyObject *stream = NULL, *version = NULL, *device = NULL, *copy = NULL;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|$OOOO", names, &stream, &version, &device, &copy))
        return NULL;
    if (copy && copy == Py_True) {
        PyErr_SetString(PyExc_BufferError, "this memory is not copied by __dlpack__");
        return NULL;
    }
    const memory *m = (const memory *)self;
    exported *e = calloc(1, sizeof *e);
    if (!e) return PyErr_NoMemory();
    dl_tensor tensor = {.data = m->data,
                        .device = {m->gpu < 0 ? DL_CPU : DL_CUDA, m->gpu < 0 ? 0 : m->gpu},
                        .ndim = m->tensor.ndim,
                        .dtype = memory_dl_type((vjp_dtype)m->tensor.dtype),
                        .shape = e->shape,
                        .strides = e->strides};
    for (int i = 0; i < m->tensor.ndim; i++) {
        e->shape[i] = m->tensor.shape[i];
        e->strides[i] = m->tensor.stride[i];
    }
    bool versioned = version && version != Py_None;
    if (versioned)
        e->as.versioned = (dl_managed_versioned){{DL_MAJOR, DL_MINOR}, e, delete_versioned, 0, tensor};
    else
        e->as.plain = (dl_managed){tensor, e, delete_plain};
    e->owner = Py_NewRef(self);
    PyObject *capsule = PyCapsule_New(&e->as, versioned ? "dltensor_versioned" : "dltensor", delete_capsule);
    if (!capsule) release(e);
    return capsule;
}

static PyObject *memory_device(PyObject *self, PyObject *none) {
    (void)none;
    int gpu = ((const memory *)self)->gpu;
    return Py_BuildValue("(ii)", gpu < 0 ? DL_CPU : DL_CUDA, gpu < 0 ? 0 : gpu);
}

/* Frees memory of a GPU; where the device cannot be opened any more, it is left. */
static void free_on_gpu(int gpu, void *block) {
    char name[GPU_NAME], sentence[256];
    vjp_status status;
    gpu_name(gpu, name);
    device_entry *entry = device_acquire(name, false, &status, sentence, sizeof sentence);
    if (!entry) return;
    vjp_free(entry->device, block);
    device_give_back(entry);
}

static bool allocate_on_gpu(memory *m, vjp_device *device, size_t bytes) {
    vjp_status status = vjp_alloc(device, bytes, &m->block);
    if (status != VJP_OK) error_set(status, vjp_error(device));
    m->data = m->block;
    return status == VJP_OK;
}

static void memory_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    memory *m = (memory *)self;
    if (m->gpu < 0)
        free(m->block);
    else if (m->block)
        free_on_gpu(m->gpu, m->block);
    freefunc release_object = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release_object(self);
    Py_DECREF((PyObject *)type);
}

bool memory_init(void) {
    static PyMethodDef methods[] = {
        {"__dlpack__", (PyCFunction)(void (*)(void))memory_dlpack, METH_VARARGS | METH_KEYWORDS, NULL},
        {"__dlpack_device__", memory_device, METH_NOARGS, NULL},
        {NULL, NULL, 0, NULL},
    };
    static PyType_Slot slots[] = {{Py_tp_methods, methods}, {Py_tp_dealloc, (void *)memory_dealloc}, {0, NULL}};
    static PyType_Spec spec = {"vjp._core.Memory", sizeof(memory), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    memory_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return memory_type != NULL;
}

PyObject *memory_create(const vjp_tensor *described, int gpu, vjp_device *device, void **data) {
    size_t bytes;
    if (!array_bytes(described, &bytes)) return PyErr_NoMemory();
    memory *m = PyObject_New(memory, memory_type);
    if (!m) return NULL;
    m->tensor = *described;
    m->gpu = gpu;
    m->block = NULL;
    if (gpu >= 0) {
        if (!allocate_on_gpu(m, device, bytes)) Py_CLEAR(m);
        if (m) *data = m->data;
        return (PyObject *)m;
    }
    m->block = malloc(bytes + ALIGNMENT); /* Windows has no aligned_alloc() */
    if (m->block) {
        m->data = *data = (char *)m->block + (ALIGNMENT - (uintptr_t)m->block % ALIGNMENT);
        return (PyObject *)m;
    }
    Py_DECREF((PyObject *)m);
    return PyErr_NoMemory();
}

/* SPDX-License-Identifier: MIT */
/*
 * The C module vjp._core, on CPython's limited API, so that one file serves every Python from 3.11 on.
 *
 *   module.c   what the module contains
 *   error.c    a status of vjp as a Python exception
 *   device.c   devices, kept open between calls
 *   array.c    Python's arrays as vjp_tensor values, and new arrays of the caller's kind
 *   gpu.c      arrays in a GPU's memory: their stream, packed copies of them, a call's workspace
 *   memory.c   memory of our own that other libraries take over by DLPack
 *   call.c     a function for each op and pass; call_gpu.c runs it on a GPU, call_many.c several at once
 *   describe.c their signatures and docstrings, and the op table as Python data
 *   graph.c    graphs; program.c: programs compiled from them
 *   torch.c    kernels that torch's dispatcher calls, and torch's threads as a pool
 *   jax.c      the handler that XLA calls
 *
 * Everything here runs with the GIL held, except kernels, runs of a program and opening a device, and what says that it
 * needs no GIL. No NumPy, torch or jax header is used: NumPy's arrays come by the buffer protocol, all others by
 * DLPack, and torch's functions by their addresses.
 */
#ifndef VJP_PYTHON_CORE_H
#define VJP_PYTHON_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdio.h>
#include <vjp.h>

#include "dlpack.h"

/* ---- error.c ----------------------------------------------------------------------------------------- */

bool error_init(PyObject *module);

/* Sets the exception of a status with this sentence. */
void error_set(vjp_status status, const char *sentence);

/* ---- device.c ---------------------------------------------------------------------------------------- */

/*
 * An open device. A call takes an idle one, which no other call uses, and gives it back, so threads never share a
 * device; one is opened when all are in use. They are never closed at exit: threads of the process may still be inside
 * a kernel.
 */
typedef struct device_entry {
    vjp_device *device;
    char name[64];
    unsigned generation; /* of the settings it was opened with */
    int pool_threads;    /* of the other library's pool that it runs on; 0: its own */
    void *stream;        /* of another library that it belongs to; NULL: none */
} device_entry;

/* The thread pool of another library: `threads` says how many it has now. */
typedef struct device_pool {
    vjp_parallel_for run;
    int (*threads)(void);
} device_pool;

/* The pool for calls that come from that library; NULL: none. It must live as long as the process. Needs no GIL. */
void device_set_pool(const device_pool *pool);

/*
 * An idle device or a new one; with `pooled`, on the other library's pool where one is set. Needs no GIL. NULL on
 * failure, with a status and its sentence.
 */
device_entry *device_acquire(const char *name, bool pooled, vjp_status *status, char *sentence, size_t bytes);
void device_give_back(device_entry *entry); /* needs no GIL */

/* `name` NULL: the CPU. NULL with an exception set on failure. */
device_entry *device_take(const char *name, bool pooled);

/*
 * Devices of a GPU belong to one stream: some of their memory (a product's scratch) is in use as long as that stream's
 * calls run, and longer where they were captured in a graph. device_find_on() gives an idle one of this stream or NULL
 * without an exception, device_take_on() another one that now belongs to it.
 */
device_entry *device_find_on(const char *name, void *stream);
device_entry *device_take_on(const char *name, void *stream);

/* Opens a device that belongs to no stream unless there is one: none can be opened while a graph is captured. */
void device_keep_spare(const char *name);

/* When all of its calls are done: it belongs to no stream any more. */
void device_release_stream(device_entry *entry);

/* As device_take(), by a Python string or None. The device must work on host memory. */
device_entry *device_take_host(PyObject *name, bool pooled);

/* Waits for what was enqueued on the devices of that name, and raises what they found meanwhile. */
PyObject *device_synchronize(PyObject *module, PyObject *name);

PyObject *device_list(PyObject *module, PyObject *none);
PyObject *device_set_threads(PyObject *module, PyObject *count);
PyObject *device_summary(PyObject *module, PyObject *name);

/* ---- array.c ----------------------------------------------------------------------------------------- */

/* Where the memory of a tensor comes from, and so what results should be. */
typedef enum array_kind {
    ARRAY_NONE = 0,
    ARRAY_BUFFER,   /* NumPy and other objects with the buffer protocol; results are NumPy arrays */
    ARRAY_EXCHANGE, /* a DLPack table of C functions: torch */
    ARRAY_CAPSULE   /* `__dlpack__` */
} array_kind;

/* A Python array as a tensor for the time of a call: array_read() or array_create(), then array_release(). */
typedef struct array {
    vjp_tensor tensor; /* the array's own memory, or a packed copy of it */
    array_kind kind;
    bool has_buffer;
    Py_buffer buffer;
    const dl_exchange *exchange;
    int gpu;                       /* the number of the GPU whose memory it is in; -1: host memory */
    void *stream;                  /* of a capsule on a GPU: the stream that its producer has made it ready for */
    PyObject *packed;              /* on a GPU: a packed copy, an array of the same library; NULL: there is none */
    dl_managed_versioned *managed; /* a new array that is not a Python object yet */
    PyObject *object;              /* the caller's array, borrowed */
    PyObject *owned;               /* a reference that keeps the memory alive */
    void *copy;                    /* the packed copy; NULL: there is none */
    char *data;                    /* the array's own first element, and its strides in bytes */
    int64_t byte_stride[VJP_MAX_DIMS];
} array;

bool array_init(void);

/* Whether the object's type has a DLPack table of C functions: quickly known, and then it is an array. */
bool array_has_table(PyObject *object);

/* Reads an array; `function` and `name` are for the exception. False with an exception set on failure. */
bool array_read(PyObject *object, const char *function, const char *name, bool output, array *a);

/* The shape, strides (in elements; NULL: packed) and memory of an array on the host. Needs no GIL. */
void array_view(array *a, int dtype, int ndim, const int64_t *shape, const int64_t *strides, void *data);

/*
 * Allocates a copy where the array is not packed or not aligned, which is all that the kernels take; with `rows` (of a
 * slot with VJP_SLOT_ROWS) its rows may lie apart on the host. array_place() needs no GIL; *problem is the end of a
 * sentence that begins with the array's name.
 */
vjp_status array_place(array *a, bool output, bool rows, const char **problem);
bool array_pack(array *a, const char *function, const char *name, bool output, bool rows);

/* Whether the array's own memory is as the kernels need it, and whether two of its indices name the same memory. */
bool array_is_packed(const array *a);
bool array_repeats_elements(const array *a);

/* The module of the array's library: what `__array_namespace__` returns, or the package that its type is from. */
PyObject *array_namespace(PyObject *object);

/* False with an exception set for an array in a GPU's memory. */
bool array_needs_host(const array *a, const char *function, const char *name);

/* Fills the copy, or writes it back. Need no GIL. */
void array_copy_in(const array *a);
void array_copy_out(const array *a);
void array_release(array *a);

/* A new array of the shape and dtype of `described`, of the same kind as `like` and where it is. */
bool array_create(const array *like, const vjp_tensor *described, vjp_device *device, array *a);

/* The Python object of an array that array_create() made, a new reference. */
PyObject *array_take(const array *like, array *a);

/* The dtype of that name: vjp's names, NumPy's and torch's, or a dtype of theirs. -1 with an exception set on failure.
 */
int array_dtype(PyObject *name);
const char *array_dtype_name(int dtype); /* NumPy's name */

/* Bytes of a packed tensor; false if they do not fit. */
bool array_bytes(const vjp_tensor *tensor, size_t *bytes);

/* ---- gpu.c ------------------------------------------------------------------------------------------- */

enum { GPU_NAME = 32 }; /* of "cuda:0" */
void gpu_name(int gpu, char name[GPU_NAME]);

/* The stream for the capsule of an object on a GPU: cupy's current one; for other libraries CUDA's default stream. */
bool gpu_capsule_stream(PyObject *object, void **stream);

/* The stream that the library of `like` enqueues on now. */
bool gpu_stream(const array *like, void **stream);

/* Whether the library of `like` is capturing a graph on its current stream; torch is asked. */
bool gpu_is_capturing(const array *like);

/*
 * CUDA's current GPU belongs to the thread, and a call of vjp changes it to its own. gpu_current() is the one that the
 * library of `like` has now, -1 where there is only one or the library does not say; gpu_make_current() returns to it.
 */
int gpu_current(const array *like);
void gpu_make_current(const array *like, int gpu);

/* Makes a packed copy by the array's own library where it is not packed; gpu_unpack() writes it back. */
bool gpu_pack(array *a, const char *function, const char *name, bool output);
bool gpu_unpack(const array *a);

/* ---- memory.c ---------------------------------------------------------------------------------------- */

bool memory_init(void);

/*
 * A Python object that owns memory for this tensor, on the host or a GPU (`device` is one), and exports it by
 * `__dlpack__`; *data gets the memory. What is written there must be complete before it is exported.
 */
PyObject *memory_create(const vjp_tensor *described, int gpu, vjp_device *device, void **data);

dl_type memory_dl_type(vjp_dtype dtype);

/* ---- call.c, describe.c ------------------------------------------------------------------------------ */

enum { MAX_ATTRIBUTES = 32, EXTRA_ARGUMENTS = 5, MAX_ARGUMENTS = VJP_MAX_SLOTS + MAX_ATTRIBUTES + EXTRA_ARGUMENTS };

/* The arguments that every function has after its tensors and attributes; dtype only where the op leaves it open. */
enum { ARGUMENT_OUTPUTS, ARGUMENT_OUT, ARGUMENT_ACCUMULATE, ARGUMENT_DEVICE, ARGUMENT_DTYPE };

typedef struct op_function {
    const vjp_op *op;
    const vjp_op_info *info;
    const vjp_pass_info *pass;
    vjp_pass number;
    int inputs, attributes, arguments; /* arguments: all of them */
    int gradient_of[VJP_MAX_SLOTS];    /* for an output: the input slot that it is the gradient of, or -1 */
    PyObject *names[MAX_ARGUMENTS];    /* interned: inputs, attributes, extra arguments */
    PyMethodDef method;
    char name[64];
} op_function;

/* Adds the dict `functions` to the module. */
bool call_init(PyObject *module);

/* call_many.c: several calls of a function; the docstring of vjp._core.call_many() describes it. */
PyObject *call_many(PyObject *module, PyObject *const *arguments, Py_ssize_t given);

/* The functions in the order of that dict; NULL past the last. */
const op_function *call_function_at(size_t index);

/* The storage type T as far as the tensors say. Needs no GIL. */
vjp_dtype call_storage(const op_function *f, const vjp_tensor *const *tensors);

/* Calls the op; reserves workspace where the device has too little. Needs no GIL. */
vjp_status call_op(const op_function *f, vjp_device *device, const vjp_tensor *const *tensors, const void *attributes);

/* The signature and the docstring of a function, in the form that PyMethodDef takes; never freed. NULL: no memory. */
char *describe_function(const op_function *f);

/* {function: (op, pass, inputs, outputs, attributes)}; the docstring of vjp._core.table() describes them. */
PyObject *describe_table(PyObject *module, PyObject *none);

/* The name of an argument after tensors and attributes. */
const char *describe_extra(int argument);
bool function_leaves_dtype_open(const op_function *f);

/* Whether this output is a result of the forward that a backward can give again: it does so only by request. */
bool function_repeats(const op_function *f, size_t slot);

/*
 * linear's backward has dgate with a gate, and dresidual without one: the slot of its gate, -1 for other functions; and
 * whether this output is left out where a caller wants all of them.
 */
int function_gate(const op_function *f);
bool function_leaves_out(const op_function *f, size_t slot, bool gated);

/* Attributes from keyword arguments: sets one member of the struct. False with an exception set on failure. */
bool call_set_attribute(const char *function, const vjp_attribute *attribute, PyObject *value, void *attributes);

/* ---- graph.c, program.c ------------------------------------------------------------------------------------------ */

extern PyMethodDef graph_methods[], program_methods[];

/* ---- torch.c, jax.c ---------------------------------------------------------------------------------- */

extern PyMethodDef torch_methods[], jax_methods[];

#endif

/* SPDX-License-Identifier: MIT */
/*
 * A call whose arrays are in the memory of a GPU: on the stream of the caller's library (gpu.c says which), with
 * workspace of that library, and without waiting where it knows the stream.
 */
#include "call.h"

#include <string.h>

/* Whether the tensor is an array of the caller, and not a number or absent. */
static bool is_array(const call *c, size_t slot) {
    return c->tensors[slot] && c->arrays[slot].kind != ARRAY_NONE;
}

bool call_find_gpu(call *c, int *gpu) {
    const vjp_pass_info *pass = c->f->pass;
    size_t first = 0;
    while (first < pass->count && !is_array(c, first))
        first++;
    *gpu = first < pass->count ? c->arrays[first].gpu : -1;
    if (*gpu >= 0 && !c->like) c->like = &c->arrays[first];
    for (size_t i = first; i < pass->count; i++) {
        if (!is_array(c, i) || c->arrays[i].gpu == *gpu) continue;
        char places[2][GPU_NAME];
        for (int k = 0; k < 2; k++) {
            int at = k ? c->arrays[i].gpu : *gpu;
            gpu_name(at, places[k]);
            if (at < 0) snprintf(places[k], GPU_NAME, "the host");
        }
        PyErr_Format(PyExc_ValueError, "%s: %s is in the memory of %s and %s in that of %s", c->f->name,
                     pass->slots[first].name, places[0], pass->slots[i].name, places[1]);
        return false;
    }
    return true;
}

static bool name_fits(PyObject *device, const char *name) {
    const char *text = device && PyUnicode_Check(device) ? PyUnicode_AsUTF8AndSize(device, NULL) : NULL;
    PyErr_Clear();
    return !device || (text && (strcmp(text, name) == 0 || (strcmp(text, "cuda") == 0 && strcmp(name, "cuda:0") == 0)));
}

/* Numbers become arrays of the GPU. The host waits for these copies, so numbers have no place in a captured graph. */
static vjp_status upload_numbers(call *c, vjp_device *device) {
    for (size_t i = c->f->pass->outputs; i < c->f->pass->count; i++) {
        if (!c->tensors[i] || is_array(c, i)) continue;
        vjp_tensor described = c->arrays[i].tensor;
        if (!array_create(c->like, &described, device, &c->arrays[i])) return VJP_OUT_OF_MEMORY;
        vjp_status status =
            vjp_upload(device, c->arrays[i].tensor.data, 0, &c->numbers[i], vjp_dtype_size((vjp_dtype)described.dtype));
        if (status != VJP_OK) return status;
    }
    return VJP_OK;
}

/*
 * The library's own memory as workspace: it may be used on several streams at once, and it is part of a captured graph.
 * Where the host waits for the call, the device's own workspace serves.
 */
static vjp_status borrow_workspace(const call *calls, size_t count, vjp_device *device, array *workspace) {
    const op_function *f = calls->f;
    size_t bytes = 0;
    if (calls->like->kind != ARRAY_EXCHANGE) return VJP_OK;
    for (size_t i = 0; i < count; i++) {
        size_t own = 0;
        vjp_status status = vjp_workspace_size(device, f->op, f->number, calls[i].tensors, f->pass->count,
                                               calls[i].has_attributes ? calls[i].attributes : NULL, &own);
        if (status != VJP_OK) return status;
        if (own > bytes) bytes = own;
    }
    if (!bytes) return VJP_OK;
    int64_t floats = (int64_t)((bytes + sizeof(float) - 1) / sizeof(float));
    vjp_tensor described = vjp_tensor_of(NULL, VJP_F32, 1, &floats);
    if (!array_create(calls->like, &described, device, workspace)) return VJP_OUT_OF_MEMORY;
    return vjp_set_workspace(device, workspace->tensor.data, (size_t)floats * sizeof(float));
}

/* Waits where an input was made ready for another stream than the calls'. */
static vjp_status wait_for_inputs(const call *c, vjp_device *device, void *stream) {
    vjp_status status = VJP_OK;
    for (size_t i = 0; status == VJP_OK && i < c->f->pass->count; i++) {
        void *other = is_array(c, i) ? c->arrays[i].stream : NULL;
        if (!other || other == stream) continue;
        status = vjp_set_stream(device, other);
        if (status == VJP_OK) status = vjp_synchronize(device);
    }
    return status;
}

/* `tensors`: those of all calls, or NULL where they run one by one. */
static vjp_status call_ops(const call *calls, size_t count, vjp_device *device, const vjp_tensor *const *tensors) {
    const op_function *f = calls->f;
    const void *attributes = calls->has_attributes ? calls->attributes : NULL;
    if (tensors) {
        vjp_status status = vjp_call_many(device, f->op, f->number, tensors, f->pass->count, count, attributes);
        if (status != VJP_WORKSPACE) return status;
    }
    vjp_status status = VJP_OK;
    for (size_t i = 0; status == VJP_OK && i < count; i++)
        status = call_op(f, device, calls[i].tensors, attributes);
    return status;
}

/* Enqueues the calls; with arrays that came as capsules, waits until they are done. */
static vjp_status enqueue(const call *calls, size_t count, vjp_device *device, void *stream,
                          const vjp_tensor *const *tensors) {
    vjp_status status = VJP_OK;
    for (size_t i = 0; status == VJP_OK && i < count; i++)
        status = wait_for_inputs(&calls[i], device, stream);
    if (status == VJP_OK) status = vjp_set_stream(device, stream);
    if (status == VJP_OK) status = call_ops(calls, count, device, tensors);
    if (status == VJP_OK && calls->like->kind != ARRAY_EXCHANGE) status = vjp_synchronize(device);
    return status;
}

static device_entry *take_device(const call *c, const char *name, void *stream) {
    device_entry *entry = device_find_on(name, stream);
    if (entry) return entry;
    entry = device_take_on(name, stream);
    if (entry && c->like->kind == ARRAY_EXCHANGE && !gpu_is_capturing(c->like)) device_keep_spare(name);
    return entry;
}

/* Numbers, outputs and workspace of all calls. The workspace is that of the call which needs most. */
static vjp_status prepare(call *calls, size_t count, vjp_device *device, array *workspace) {
    vjp_status status = VJP_OK;
    for (size_t i = 0; status == VJP_OK && i < count; i++) {
        status = upload_numbers(&calls[i], device);
        if (status == VJP_OK && !call_create_outputs(&calls[i], device)) status = VJP_INVALID; /* an exception is set */
    }
    return status == VJP_OK ? borrow_workspace(calls, count, device, workspace) : status;
}

/* The tensors of all calls, one after the other; NULL with an exception set: no memory. */
static const vjp_tensor **list_tensors(const call *calls, size_t count) {
    size_t slots = calls->f->pass->count;
    const vjp_tensor **tensors = PyMem_Malloc(count * slots * sizeof(const vjp_tensor *));
    if (!tensors) PyErr_NoMemory();
    for (size_t i = 0; tensors && i < count; i++)
        memcpy(tensors + i * slots, calls[i].tensors, slots * sizeof *tensors);
    return tensors;
}

static bool run_prepared(call *calls, size_t count, vjp_device *device, void *stream, vjp_status *status) {
    const vjp_tensor **tensors = count > 1 ? list_tensors(calls, count) : NULL;
    if (count > 1 && !tensors) return false;
    PyThreadState *unlocked = PyEval_SaveThread();
    *status = enqueue(calls, count, device, stream, (const vjp_tensor *const *)tensors);
    PyEval_RestoreThread(unlocked);
    PyMem_Free((void *)tensors);
    bool written = *status == VJP_OK;
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; written && k < calls->f->pass->outputs; k++)
            if (calls[i].tensors[k]) written = gpu_unpack(&calls[i].arrays[k]);
    return written;
}

static bool run_on_gpu(call *calls, size_t count, int gpu) {
    char name[GPU_NAME];
    void *stream = NULL;
    gpu_name(gpu, name);
    for (size_t i = 0; i < count; i++) {
        PyObject *device = call_extra(&calls[i], ARGUMENT_DEVICE);
        if (name_fits(device, name)) continue;
        PyErr_Format(PyExc_ValueError, "%s: the arrays are in the memory of %s, and device is %R", calls->f->name, name,
                     device);
        return false;
    }
    if (!gpu_stream(calls->like, &stream)) return false;
    device_entry *entry = take_device(calls, name, stream);
    if (!entry) return false;
    array workspace = {.kind = ARRAY_NONE};
    vjp_status status = prepare(calls, count, entry->device, &workspace);
    bool done = status == VJP_OK && run_prepared(calls, count, entry->device, stream, &status);
    if (status != VJP_OK && !PyErr_Occurred()) error_set(status, vjp_error(entry->device));
    vjp_set_workspace(entry->device, NULL, 0);
    if (calls->like->kind != ARRAY_EXCHANGE) device_release_stream(entry);
    device_give_back(entry);
    array_release(&workspace);
    return done;
}

bool call_run_on_gpu(call *calls, size_t count, int gpu) {
    int current = gpu_current(calls->like);
    bool done = run_on_gpu(calls, count, gpu);
    if (current >= 0 && current != gpu) gpu_make_current(calls->like, current);
    return done;
}

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
static vjp_status borrow_workspace(call *c, vjp_device *device, array *workspace) {
    size_t bytes = 0;
    const void *attributes = c->has_attributes ? c->attributes : NULL;
    if (c->like->kind != ARRAY_EXCHANGE) return VJP_OK;
    vjp_status status =
        vjp_workspace_size(device, c->f->op, c->f->number, c->tensors, c->f->pass->count, attributes, &bytes);
    if (status != VJP_OK || !bytes) return status;
    int64_t count = (int64_t)((bytes + sizeof(float) - 1) / sizeof(float));
    vjp_tensor described = vjp_tensor_of(NULL, VJP_F32, 1, &count);
    if (!array_create(c->like, &described, device, workspace)) return VJP_OUT_OF_MEMORY;
    return vjp_set_workspace(device, workspace->tensor.data, (size_t)count * sizeof(float));
}

/* Waits where an input was made ready for another stream than the call's. */
static vjp_status wait_for_inputs(call *c, vjp_device *device, void *stream) {
    vjp_status status = VJP_OK;
    for (size_t i = 0; status == VJP_OK && i < c->f->pass->count; i++) {
        void *other = is_array(c, i) ? c->arrays[i].stream : NULL;
        if (!other || other == stream) continue;
        status = vjp_set_stream(device, other);
        if (status == VJP_OK) status = vjp_synchronize(device);
    }
    return status;
}

/* Enqueues the call; with arrays that came as capsules, waits until it is done. */
static vjp_status enqueue(call *c, vjp_device *device, void *stream) {
    vjp_status status = wait_for_inputs(c, device, stream);
    if (status == VJP_OK) status = vjp_set_stream(device, stream);
    if (status == VJP_OK) status = call_op(c->f, device, c->tensors, c->has_attributes ? c->attributes : NULL);
    if (status == VJP_OK && c->like->kind != ARRAY_EXCHANGE) status = vjp_synchronize(device);
    return status;
}

static device_entry *take_device(const call *c, const char *name, void *stream) {
    device_entry *entry = device_find_on(name, stream);
    if (entry) return entry;
    entry = device_take_on(name, stream);
    if (entry && c->like->kind == ARRAY_EXCHANGE && !gpu_is_capturing(c->like)) device_keep_spare(name);
    return entry;
}

static PyObject *run_on_gpu(call *c, int gpu) {
    char name[GPU_NAME];
    void *stream = NULL;
    PyObject *device = call_extra(c, ARGUMENT_DEVICE), *result = NULL;
    gpu_name(gpu, name);
    if (!name_fits(device, name)) {
        PyErr_Format(PyExc_ValueError, "%s: the arrays are in the memory of %s, and device is %R", c->f->name, name,
                     device);
        return NULL;
    }
    if (!gpu_stream(c->like, &stream)) return NULL;
    device_entry *entry = take_device(c, name, stream);
    if (!entry) return NULL;
    array workspace = {.kind = ARRAY_NONE};
    vjp_status status = upload_numbers(c, entry->device);
    bool created = status == VJP_OK && call_create_outputs(c, entry->device);
    if (created) status = borrow_workspace(c, entry->device, &workspace);
    if (created && status == VJP_OK) {
        PyThreadState *unlocked = PyEval_SaveThread();
        status = enqueue(c, entry->device, stream);
        PyEval_RestoreThread(unlocked);
        bool written = status == VJP_OK;
        for (size_t i = 0; written && i < c->f->pass->outputs; i++)
            if (c->tensors[i]) written = gpu_unpack(&c->arrays[i]);
        if (written) result = call_results(c);
    }
    if (status != VJP_OK && !PyErr_Occurred()) error_set(status, vjp_error(entry->device));
    vjp_set_workspace(entry->device, NULL, 0);
    if (c->like->kind != ARRAY_EXCHANGE) device_release_stream(entry);
    device_give_back(entry);
    array_release(&workspace);
    return result;
}

PyObject *call_run_on_gpu(call *c, int gpu) {
    int current = gpu_current(c->like);
    PyObject *result = run_on_gpu(c, gpu);
    if (current >= 0 && current != gpu) gpu_make_current(c->like, current);
    return result;
}

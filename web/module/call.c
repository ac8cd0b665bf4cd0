/* SPDX-License-Identifier: MIT */
/*
 * Any op by name: vjp_web_call_begin(), the tensors, values and attributes one by one, vjp_web_call_run() (or
 * vjp_web_graph_call(), which makes a node of it), then vjp_web_call_results() and vjp_web_call_end().
 */
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "core/core.h"
#include "module.h"

web_call *vjp_web_call_begin(const char *name, int pass);
WEB_EXPORT(vjp_web_call_begin) web_call *vjp_web_call_begin(const char *name, int pass) {
    const vjp_op *op = vjp_op_find(name);
    if (!op) {
        web_fail("there is no op \"%s\"", name);
        return NULL;
    }
    const vjp_op_info *info = vjp_op_describe(op);
    if (pass < 0 || pass >= VJP_PASS_COUNT || !info->pass[pass].count) {
        web_fail("%s has no backward: nothing is differentiated through it", name);
        return NULL;
    }
    web_call *call = calloc(1, sizeof *call);
    if (!call || info->attribute_bytes > sizeof call->attributes) {
        web_fail("out of memory");
        free(call);
        return NULL;
    }
    call->op = op;
    call->number = (vjp_pass)pass;
    call->pass = &info->pass[pass];
    for (size_t i = 0; i < call->pass->outputs; i++)
        call->wanted[i] = true;
    vjp_op_defaults(op, call->attributes);
    return call;
}

void vjp_web_call_end(web_call *call);
WEB_EXPORT(vjp_web_call_end) void vjp_web_call_end(web_call *call) {
    for (int i = 0; call && i < VJP_MAX_SLOTS; i++)
        if (call->owned[i]) free(call->tensor[i].data);
    free(call);
}

const void *web_call_attributes(const web_call *call) {
    return vjp_op_describe(call->op)->attribute_bytes ? call->attributes : NULL;
}

/* The slot of that name, -1 and a sentence if there is none. */
static int slot_of(const web_call *call, const char *name) {
    for (size_t i = 0; i < call->pass->count; i++)
        if (strcmp(call->pass->slots[i].name, name) == 0) return (int)i;
    web_fail("%s has no \"%s\"", vjp_op_describe(call->op)->name, name);
    return -1;
}

/* The tensor of a slot: the data are the page's until the call ends. An output is added to, not overwritten. */
bool vjp_web_call_tensor(web_call *call, const char *name, int dtype, int ndim, const int64_t *shape, void *data);
WEB_EXPORT(vjp_web_call_tensor)
bool vjp_web_call_tensor(web_call *call, const char *name, int dtype, int ndim, const int64_t *shape, void *data) {
    int slot = slot_of(call, name);
    if (slot < 0) return false;
    call->tensor[slot] = vjp_tensor_of(data, (vjp_dtype)dtype, ndim, shape);
    if (slot < (int)call->pass->outputs) call->tensor[slot].flags = VJP_ACCUMULATE;
    call->present[slot] = true;
    return true;
}

/* For a node of a graph. */
bool vjp_web_call_value(web_call *call, const char *name, vjp_value value);
WEB_EXPORT(vjp_web_call_value) bool vjp_web_call_value(web_call *call, const char *name, vjp_value value) {
    int slot = slot_of(call, name);
    if (slot < 0) return false;
    call->value[slot] = value;
    return true;
}

/* Whether an output is computed; at first all are. */
bool vjp_web_call_want(web_call *call, const char *name, bool wanted);
WEB_EXPORT(vjp_web_call_want) bool vjp_web_call_want(web_call *call, const char *name, bool wanted) {
    int slot = slot_of(call, name);
    if (slot < 0) return false;
    call->wanted[slot] = wanted;
    call->chosen = true;
    return true;
}

/* `choice`: the name of a choice, NULL for a number. */
bool vjp_web_call_attribute(web_call *call, const char *name, double number, const char *choice);
WEB_EXPORT(vjp_web_call_attribute)
bool vjp_web_call_attribute(web_call *call, const char *name, double number, const char *choice) {
    const vjp_op_info *info = vjp_op_describe(call->op);
    for (size_t i = 0; i < info->attribute_count; i++) {
        const vjp_attribute *a = &info->attributes[i];
        if (strcmp(a->name, name) != 0) continue;
        int64_t integer = -1;
        if (choice) {
            if (a->type != VJP_CHOICE) return web_fail("%s.%s must be a number", info->name, name);
            for (int k = 0; a->choices[k]; k++)
                if (strcmp(a->choices[k], choice) == 0) integer = k;
            if (integer < 0) return web_fail("%s.%s cannot be \"%s\"", info->name, name, choice);
        } else if (a->type != VJP_REAL) {
            if (!(number >= -0x1p53 && number <= 0x1p53) || (double)(int64_t)number != number)
                return web_fail("%s.%s is %g; it must be an integer", info->name, name, number);
            integer = (int64_t)number;
        }
        memcpy((char *)call->attributes + a->offset, a->type == VJP_REAL ? (void *)&number : (void *)&integer, 8);
        return true;
    }
    return web_fail("%s has no attribute \"%s\"", info->name, name);
}

/* A gradient has the dtype of what it is the gradient of. */
static vjp_dtype dtype_of(const web_call *call, size_t slot, const vjp_tensor *described) {
    const vjp_slot *of = &call->pass->slots[slot];
    for (size_t i = call->pass->outputs; of->kind == VJP_KIND_PARAMETER && i < call->pass->count; i++)
        if (call->present[i] && of->name[0] == 'd' && strcmp(call->pass->slots[i].name, of->name + 1) == 0)
            return (vjp_dtype)call->tensor[i].dtype;
    return (vjp_dtype)described->dtype;
}

/* With copies of the tensors in the memory of a device that is not the host's. */
static vjp_status call_on_device(vjp_device *device, web_call *call, const vjp_tensor *const *tensors,
                                 const void *attributes) {
    vjp_tensor copy[VJP_MAX_SLOTS];
    const vjp_tensor *moved[VJP_MAX_SLOTS] = {NULL};
    size_t bytes[VJP_MAX_SLOTS] = {0}, count = call->pass->count;
    vjp_status status = VJP_OK;
    for (size_t i = 0; i < count && status == VJP_OK; i++) {
        if (!tensors[i]) continue;
        bytes[i] = vjp_dtype_size((vjp_dtype)tensors[i]->dtype);
        for (int k = 0; k < tensors[i]->ndim; k++)
            bytes[i] *= (size_t)tensors[i]->shape[k]; /* it is in memory */
        copy[i] = *tensors[i];
        status = vjp_alloc(device, bytes[i], &copy[i].data);
        if (status != VJP_OK) break;
        moved[i] = &copy[i];
        status = vjp_upload(device, copy[i].data, 0, tensors[i]->data, bytes[i]);
    }
    if (status == VJP_OK) status = vjp_call(device, call->op, call->number, moved, count, attributes);
    for (size_t i = 0; i < call->pass->outputs && status == VJP_OK; i++)
        if (moved[i]) status = vjp_download(device, tensors[i]->data, copy[i].data, 0, bytes[i]);
    if (status == VJP_OK) status = vjp_synchronize(device); /* which reports an index that is out of range */
    for (size_t i = 0; i < count; i++)
        if (moved[i]) vjp_free(device, copy[i].data);
    return status;
}

/* Of linear's dgate and dresidual the one that this call cannot have, since a gate excludes a residual. */
static bool is_impossible(const web_call *call, size_t output) {
    const char *name = call->pass->slots[output].name;
    bool is_gate = strcmp(name, "dgate") == 0;
    if (!is_gate && strcmp(name, "dresidual") != 0) return false;
    for (size_t i = call->pass->outputs; i < call->pass->count; i++)
        if (strcmp(call->pass->slots[i].name, "gate") == 0) return call->present[i] != is_gate;
    return false;
}

/* Infers the outputs that are wanted and not given, allocates and computes them. */
bool vjp_web_call_run(vjp_device *device, web_call *call);
WEB_EXPORT(vjp_web_call_run) bool vjp_web_call_run(vjp_device *device, web_call *call) {
    const vjp_tensor *tensors[VJP_MAX_SLOTS] = {NULL};
    vjp_tensor described[VJP_MAX_SLOTS];
    const void *attributes = web_call_attributes(call);
    size_t count = call->pass->count;
    for (size_t i = 0; i < count; i++)
        if (call->present[i]) tensors[i] = &call->tensor[i];
    vjp_status status = vjp_infer(device, call->op, call->number, tensors, count, attributes, described);
    for (size_t i = 0; status == VJP_OK && i < call->pass->outputs; i++) {
        if (call->present[i] || !call->wanted[i] || (!call->chosen && is_impossible(call, i))) continue;
        vjp_tensor *t = &call->tensor[i];
        int64_t elements = 1;
        for (int k = 0; k < described[i].ndim; k++)
            elements *= described[i].shape[k]; /* vjp_infer() has checked that the bytes fit */
        vjp_dtype dtype = dtype_of(call, i, &described[i]);
        void *data = calloc((size_t)vjp_max(elements, 1), vjp_dtype_size(dtype));
        if (!data) return web_fail("out of memory");
        *t = vjp_tensor_of(data, dtype, described[i].ndim, described[i].shape);
        call->owned[i] = call->present[i] = true;
        tensors[i] = t;
    }
    size_t bytes = 0;
    if (status == VJP_OK)
        status = vjp_workspace_size(device, call->op, call->number, tensors, count, attributes, &bytes);
    if (status == VJP_OK) status = vjp_reserve(device, bytes);
    if (status == VJP_OK)
        status = vjp_device_is_host(device) ? vjp_call(device, call->op, call->number, tensors, count, attributes)
                                            : call_on_device(device, call, tensors, attributes);
    return status == VJP_OK || web_fail("%s", vjp_error(device));
}

/* The outputs: [{name, dtype, shape, data}], data an address that is valid until the call ends. */
char *vjp_web_call_results(const web_call *call);
WEB_EXPORT(vjp_web_call_results) char *vjp_web_call_results(const web_call *call) {
    json_writer w = {.compact = true};
    json_put_array(&w, NULL);
    for (size_t i = 0; i < call->pass->outputs; i++) {
        if (!call->present[i]) continue;
        const vjp_tensor *t = &call->tensor[i];
        json_put_object(&w, NULL);
        json_put_text(&w, "name", call->pass->slots[i].name);
        json_put_text(&w, "dtype", vjp_dtype_name((vjp_dtype)t->dtype));
        json_put_array(&w, "shape");
        for (int k = 0; k < t->ndim; k++)
            json_put_integer(&w, NULL, t->shape[k]);
        json_put_array_end(&w);
        json_put_integer(&w, "data", (int64_t)(uintptr_t)t->data);
        json_put_object_end(&w);
    }
    json_put_array_end(&w);
    return web_take(&w);
}

/* ---- Graphs ------------------------------------------------------------------------------------------ */

/* A node of the call's op and values; returns its first output. The graph keeps a mistake, as all its functions do. */
vjp_value vjp_web_graph_call(vjp_graph *graph, const web_call *call);
WEB_EXPORT(vjp_web_graph_call) vjp_value vjp_web_graph_call(vjp_graph *graph, const web_call *call) {
    return vjp_graph_call(graph, call->op, call->value + call->pass->outputs, call->pass->count - call->pass->outputs,
                          web_call_attributes(call));
}

/* What a value is: {name, dtype, shape}. */
char *vjp_web_graph_describe(const vjp_graph *graph, vjp_value value);
WEB_EXPORT(vjp_web_graph_describe) char *vjp_web_graph_describe(const vjp_graph *graph, vjp_value value) {
    vjp_tensor t = vjp_graph_describe(graph, value);
    const char *name = vjp_graph_name(graph, value);
    json_writer w = {.compact = true};
    json_put_object(&w, NULL);
    json_put_text(&w, "name", name ? name : "");
    json_put_text(&w, "dtype", vjp_dtype_name((vjp_dtype)t.dtype));
    json_put_array(&w, "shape");
    for (int k = 0; k < t.ndim; k++)
        json_put_integer(&w, NULL, t.shape[k]);
    json_put_array_end(&w);
    json_put_object_end(&w);
    return web_take(&w);
}

vjp_program *vjp_web_compile(vjp_device *device, const vjp_graph *graph, const vjp_value *results, size_t count);
WEB_EXPORT(vjp_web_compile)
vjp_program *vjp_web_compile(vjp_device *device, const vjp_graph *graph, const vjp_value *results, size_t count) {
    vjp_program *program = NULL;
    if (vjp_compile(device, graph, results, count, NULL, &program) != VJP_OK) web_fail("%s", vjp_error(device));
    return program;
}

/* The sentence of a device's last failure, for functions of vjp that are called as they are. */
const char *vjp_web_device_error(const vjp_device *device);
WEB_EXPORT(vjp_web_device_error) const char *vjp_web_device_error(const vjp_device *device) {
    return vjp_error(device);
}

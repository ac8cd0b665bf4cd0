/* SPDX-License-Identifier: MIT */
/*
 * Makes a device of the host behave as a GPU does for graphs and the trainer: it merges calls of every op, and runs
 * those that it is given at once from the last to the first, unless they add to an output. It also has events and
 * copies beside its calls, so that the trainer queues steps ahead.
 */
#ifndef VJP_TESTS_MERGING_H
#define VJP_TESTS_MERGING_H

#include <stdlib.h>
#include <string.h>

#include "core/core.h"

static int merging_any(const vjp_device *device, const vjp_op *op, vjp_pass pass) {
    (void)device;
    (void)op;
    (void)pass;
    return 1;
}

static vjp_status merging_run(const vjp_work *const *works, size_t count) {
    bool adds = false;
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < works[i]->op->info.pass[works[i]->pass].outputs; k++)
            adds = adds || vjp_accumulates(works[i], (int)k);
    vjp_status status = VJP_OK;
    for (size_t i = 0; i < count && status == VJP_OK; i++) {
        const vjp_work *work = works[adds ? i : count - 1 - i];
        status = vjp_run(work, work->device->backend->kernel(work->device, work->op, work->pass));
    }
    return status;
}

static vjp_status merging_alloc_host(vjp_device *device, size_t bytes, void **data) {
    *data = malloc(bytes);
    return *data ? VJP_OK : vjp_fail(device, VJP_OUT_OF_MEMORY, "no memory for %zu bytes", bytes);
}

static vjp_status merging_event(vjp_device *device, void **event) {
    return merging_alloc_host(device, 1, event);
}

static vjp_status merging_wait(vjp_device *device, void *event) {
    return event ? VJP_OK : vjp_fail(device, VJP_INVALID, "a wait without an event");
}

static void merging_free(vjp_device *device, void *data) {
    (void)device;
    free(data);
}

/* `backend` must outlive the device. */
static inline void merge_calls(vjp_device *device, vjp_backend *backend) {
    *backend = *device->backend;
    backend->merges = merging_any;
    backend->run_many = merging_run;
    backend->alloc_host = merging_alloc_host;
    backend->free_host = merging_free;
    backend->upload_beside = vjp_host_upload;
    backend->event_create = merging_event;
    backend->event_wait = merging_wait;
    backend->event_destroy = merging_free;
    device->backend = backend;
}

#endif

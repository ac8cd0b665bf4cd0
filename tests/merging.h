/* SPDX-License-Identifier: MIT */
/*
 * Makes a device of the host behave as a GPU does for graphs and the trainer: it merges calls of every op, and runs
 * those that it is given at once from the last to the first, unless they add to an output. It also has events and
 * copies beside its calls, so that the trainer queues steps ahead.
 *
 * Its copies between the arena and host memory happen at one of the two moments between which a GPU does them, in turn:
 * when they begin or when they are waited for. What may not be read at other times is overwritten.
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

enum { MERGING_TICKETS = 4096, MERGING_NOISE = 0xee };

typedef struct merging_copy {
    void *to, *from;
    size_t bytes;
    int to_host;
    bool waits, late;
} merging_copy;

static merging_copy merging_copies[MERGING_TICKETS];
static int merging_begun, merging_waiting, merging_fails_at = -1; /* copies so far, not waited for, and one to refuse */

static void merging_do(merging_copy *copy) {
    memcpy(copy->to, copy->from, copy->bytes);
    if (!copy->to_host) memset(copy->from, MERGING_NOISE, copy->bytes); /* it is not needed any more */
}

static vjp_status merging_copy_begin(vjp_device *device, void *to, const void *from, size_t bytes, int to_host,
                                     int ticket) {
    if (ticket < 0 || ticket >= MERGING_TICKETS || merging_copies[ticket].waits)
        return vjp_fail(device, VJP_INVALID, "ticket %d is in use", ticket);
    if (merging_begun == merging_fails_at) return vjp_fail(device, VJP_DEVICE_FAILED, "a copy that fails");
    merging_copy *copy = &merging_copies[ticket];
    *copy = (merging_copy){to, (void *)(uintptr_t)from, bytes, to_host, true, merging_begun++ % 2};
    merging_waiting++;
    if (!to_host) memset(to, MERGING_NOISE, bytes);
    if (!copy->late) merging_do(copy);
    return VJP_OK;
}

static vjp_status merging_copy_wait(vjp_device *device, int ticket) {
    merging_copy *copy = &merging_copies[ticket];
    if (!copy->waits) return vjp_fail(device, VJP_INVALID, "ticket %d has no copy", ticket);
    if (copy->late) merging_do(copy);
    if (copy->to_host) memset(copy->from, MERGING_NOISE, copy->bytes); /* another range may be there now */
    copy->waits = false;
    merging_waiting--;
    return VJP_OK;
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
    backend->copy_begin = merging_copy_begin;
    backend->copy_wait = merging_copy_wait;
    backend->copy_cost = 0;
    backend->flops_per_byte = 1;
    device->backend = backend;
}

#endif

/* SPDX-License-Identifier: MIT */
/*
 * The Metal device: opening, memory, synchronising. Every object in metal_state is retained and released by us; other
 * objects that messages return belong to the autorelease pool of the call.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/metal/device.h"

/* ---- Opening ----------------------------------------------------------------------------------------- */

enum {
    SHARED_STORAGE = 0, /* MTLResourceStorageModeShared */
    ROUND = 256,        /* bytes; buffers are multiples of it */
    APPLE7 = 1007,      /* MTLGPUFamilyApple7: M1 and A14, the first whose simdgroups multiply matrices */
    MATRIX_WIDTH = 32   /* threads of a simdgroup that does */
};

static void close_state(metal_state *state) {
    const objc *o = &state->objc;
    if (state->device) {
        void *pool = metal_begin(state);
        if (state->encoder) objc_do(o, state->encoder, OBJC_END); /* releasing an open encoder is a fault */
        objc_release(o, state->encoder);
        objc_release(o, state->commands);
        for (int i = 0; i < state->committed_count; i++) {
            objc_do(o, state->committed[i], OBJC_WAIT);
            objc_release(o, state->committed[i]);
        }
        metal_release_pipelines(state);
        metal_release_libraries(state);
        for (size_t i = 0; i < state->buffers.count; i++)
            objc_release(o, state->buffers.buffer[i].handle);
        objc_release(o, state->bad_indices);
        objc_release(o, state->queue);
        objc_release(o, state->device);
        metal_end(state, pool);
    }
    objc_close(&state->objc);
    free(state->buffers.buffer);
    gpu_pipelines_close(&state->pipelines);
    gpu_merger_close(&state->merger);
    free(state);
}

static void clear_bad_indices(metal_state *state) {
    memset(state->record, 0xff, GPU_BAD_INDEX_RECORDS * sizeof *state->record);
    state->may_have_bad_index = false;
}

static vjp_status open_objects(vjp_device *device, metal_state *state) {
    const objc *o = &state->objc;
    state->queue = objc_get(o, state->device, OBJC_NEW_QUEUE);
    state->bad_indices =
        objc_new_buffer(o, state->device, GPU_BAD_INDEX_RECORDS * sizeof(gpu_bad_index), SHARED_STORAGE);
    if (state->bad_indices) state->record = objc_get(o, state->bad_indices, OBJC_CONTENTS);
    if (!state->queue || !state->record || !gpu_pipelines_open(&state->pipelines, &state->counts))
        return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for the device", device->name);
    clear_bad_indices(state);
    state->max_bytes = objc_number(o, state->device, OBJC_MAX_BYTES);
    unsigned long threads, width;
    vjp_status status = metal_probe(device, &threads, &width);
    if (status != VJP_OK) return status;
    if (!threads) return vjp_fail(device, VJP_NO_DEVICE, "%s: the device runs no threads", device->name);
    state->threads = threads < GPU_THREADS ? (int)threads : GPU_THREADS;
    state->matrices = state->threads == GPU_THREADS && width == MATRIX_WIDTH && objc_supports(o, state->device, APPLE7);
    snprintf(device->summary, sizeof device->summary, "%.120s, buffers up to %llu MiB, shared with the processor%s",
             objc_text(o, objc_get(o, state->device, OBJC_NAME)), (unsigned long long)(state->max_bytes >> 20),
             state->matrices ? ", products by matrices of simdgroups" : "");
    return VJP_OK;
}

static vjp_status open_device(vjp_device *device, metal_state *state) {
    char why[256];
    if (!objc_open(&state->objc, why, sizeof why)) return vjp_fail(device, VJP_NO_DEVICE, "%s: %s", device->name, why);
    void *pool = metal_begin(state);
    state->device = state->objc.system.create_device();
    vjp_status status = state->device
                            ? open_objects(device, state)
                            : vjp_fail(device, VJP_NO_DEVICE, "%s: this system has no GPU for Metal", device->name);
    metal_end(state, pool);
    return status;
}

static vjp_status metal_open(vjp_device *device, const vjp_options *options) {
    (void)options;
    if (strcmp(device->name, "metal") != 0)
        return vjp_fail(device, VJP_NO_DEVICE, "unknown device \"%s\"; the name is metal", device->name);
    metal_state *state = calloc(1, sizeof *state);
    if (!state) return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for the device", device->name);
    device->state = state;
    state->merger = (gpu_merger){.mode = &state->mode, .enqueue = metal_enqueue, .together = metal_together};
    vjp_status status = open_device(device, state);
    if (status == VJP_OK) return VJP_OK;
    close_state(state);
    device->state = NULL;
    return status;
}

static void metal_close(vjp_device *device) {
    close_state(metal_of(device));
}

static const vjp_kernel *metal_kernel(const vjp_device *device, const vjp_op *op, vjp_pass pass) {
    (void)device;
    return gpu_kernel(op, pass);
}

/* ---- Memory ------------------------------------------------------------------------------------------ */

static vjp_status metal_alloc(vjp_device *device, size_t bytes, void **data) {
    metal_state *state = metal_of(device);
    const objc *o = &state->objc;
    if (bytes > state->max_bytes) {
        char why[96];
        snprintf(why, sizeof why, "a buffer of this device holds at most %llu", (unsigned long long)state->max_bytes);
        return gpu_buffers_full(device, bytes, why);
    }
    uint64_t rounded = bytes ? ((uint64_t)bytes + ROUND - 1) / ROUND * ROUND : ROUND;
    void *pool = metal_begin(state);
    objc_id buffer = objc_new_buffer(o, state->device, rounded, SHARED_STORAGE);
    char *begin = buffer ? objc_get(o, buffer, OBJC_CONTENTS) : NULL;
    bool kept = begin && gpu_buffers_add(&state->buffers, (gpu_buffer){begin, rounded, buffer});
    if (!kept) objc_release(o, buffer);
    metal_end(state, pool);
    if (!kept) return gpu_buffers_full(device, bytes, begin ? "the host has none" : "the device has none");
    *data = begin;
    return VJP_OK;
}

/* A command buffer keeps the buffers that it uses until it has run. */
static void metal_free(vjp_device *device, void *data) {
    metal_state *state = metal_of(device);
    const gpu_buffer *found = gpu_buffers_find(&state->buffers, data);
    if (!found || found->begin != (char *)data) return;
    void *pool = metal_begin(state);
    objc_release(&state->objc, found->handle);
    metal_end(state, pool);
    gpu_buffers_remove(&state->buffers, found);
}

static vjp_status locate(vjp_device *device, const char *doing, const void *data, uint64_t offset, size_t bytes,
                         char **at) {
    const gpu_buffer *buffer;
    uint64_t first = 0;
    if (!bytes) return VJP_OK;
    vjp_status status =
        gpu_buffers_range(&metal_of(device)->buffers, device, doing, data, offset, bytes, &buffer, &first);
    if (status == VJP_OK) *at = buffer->begin + first;
    return status;
}

static vjp_status transfer(vjp_device *device, const char *doing, const void *data, uint64_t offset, size_t bytes,
                           char **at) {
    vjp_status status = locate(device, doing, data, offset, bytes, at);
    return status == VJP_OK ? metal_wait(device) : status;
}

static vjp_status metal_upload(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes) {
    char *at = NULL;
    vjp_status status = transfer(device, "uploading", data, offset, bytes, &at);
    if (status == VJP_OK && bytes) memcpy(at, host, bytes);
    return status;
}

static vjp_status metal_download(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes) {
    char *at = NULL;
    vjp_status status = transfer(device, "downloading", data, offset, bytes, &at);
    if (status == VJP_OK && bytes) memcpy(host, at, bytes);
    return status;
}

static vjp_status metal_copy(vjp_device *device, void *to, const void *from, size_t bytes) {
    bool words = bytes % 4 == 0 && (uintptr_t)to % 4 == 0 && (uintptr_t)from % 4 == 0;
    int64_t count = (int64_t)(words ? bytes / 4 : bytes);
    gpu_launch l = {.shader = "tools", .kernel = words ? "words" : "bytes"};
    l.threads = metal_of(device)->threads;
    gpu_words(&l, "to", to, bytes, true);
    gpu_words(&l, "from", from, bytes, false);
    gpu_u32(&l, count);
    return metal_enqueue(device, &l, vjp_divide_up(count, l.threads));
}

/*
 * Host memory that metal_alloc() gave is copied from and to by a kernel, in order with the calls. Other memory is
 * copied at once.
 */
static bool is_shared(const vjp_device *device, const void *host, size_t bytes) {
    uint64_t offset;
    return gpu_buffers_hold(&metal_of(device)->buffers, host, bytes, &offset) != NULL;
}

static vjp_status metal_upload_async(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes) {
    if (!bytes || !is_shared(device, host, bytes)) return metal_upload(device, data, offset, host, bytes);
    return metal_copy(device, (char *)data + offset, host, bytes);
}

static vjp_status metal_download_async(vjp_device *device, void *host, const void *data, uint64_t offset,
                                       size_t bytes) {
    if (!bytes || !is_shared(device, host, bytes)) return metal_download(device, host, data, offset, bytes);
    return metal_copy(device, host, (const char *)data + offset, bytes);
}

static vjp_status metal_upload_beside(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes) {
    char *at = NULL;
    vjp_status status = locate(device, "uploading", data, offset, bytes, &at);
    if (status == VJP_OK && bytes) memcpy(at, host, bytes);
    return status;
}

/* ---- Before a call ----------------------------------------------------------------------------------- */

static vjp_status metal_check(const vjp_work *work) {
    return gpu_rehearse(work, &metal_of(work->device)->mode, GPU_CHECK);
}

static vjp_status metal_warm(const vjp_work *work) {
    return gpu_rehearse(work, &metal_of(work->device)->mode, GPU_WARM);
}

static vjp_status metal_run_many(const vjp_work *const *works, size_t count) {
    return gpu_merge_calls(&metal_of(works[0]->device)->merger, works, count, GPU_RUN);
}

static vjp_status metal_warm_many(const vjp_work *const *works, size_t count) {
    return gpu_merge_calls(&metal_of(works[0]->device)->merger, works, count, GPU_WARM);
}

/* ---- Synchronising ----------------------------------------------------------------------------------- */

static vjp_status metal_synchronize(vjp_device *device) {
    metal_state *state = metal_of(device);
    vjp_status status = metal_wait(device);
    if (status != VJP_OK || !state->may_have_bad_index) return status;
    gpu_bad_index record[GPU_BAD_INDEX_RECORDS];
    memcpy(record, state->record, sizeof record);
    clear_bad_indices(state);
    return gpu_bad_index_report(&state->bad_index_context, device, record);
}

/* An event is the number of command buffers that come before it. */
static vjp_status metal_event_create(vjp_device *device, void **event) {
    uint64_t *committed = malloc(sizeof *committed);
    if (!committed) return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for an event", device->name);
    vjp_status status = metal_commit(device);
    *committed = metal_committed(device);
    *event = committed;
    if (status == VJP_OK) return VJP_OK;
    free(committed);
    return status;
}

/* Kernels that are still running may be writing to a record; once one has begun, all are waited for. */
static vjp_status metal_event_wait(vjp_device *device, void *event) {
    metal_state *state = metal_of(device);
    vjp_status status = metal_wait_for(device, *(const uint64_t *)event);
    for (int i = 0; i < GPU_BAD_INDEX_RECORDS && status == VJP_OK && state->may_have_bad_index; i++)
        if (((volatile gpu_bad_index *)state->record)[i].position != UINT32_MAX) return metal_synchronize(device);
    return status;
}

static void metal_event_destroy(vjp_device *device, void *event) {
    (void)device;
    free(event);
}

static vjp_status metal_raw_product(vjp_device *device, const vjp_tensor *y, const vjp_tensor *a, const vjp_tensor *b) {
    gpu_launch l;
    int64_t groups = 0;
    vjp_status status = gpu_raw_product(device, y, a, b, &l, &groups);
    return status == VJP_OK ? metal_enqueue(device, &l, groups) : status;
}

static const char *metal_property(const vjp_device *device, const char *name, char *text, size_t bytes) {
    return gpu_count(&metal_of(device)->counts, name, text, bytes);
}

static const vjp_backend backend = {
    .struct_size = sizeof(vjp_backend),
    .interface_version = VJP_BACKEND_INTERFACE,
    .version = VJP_VERSION,
    .name = "metal",
    .open = metal_open,
    .close = metal_close,
    .kernel = metal_kernel,
    .alloc = metal_alloc,
    .free = metal_free,
    .upload = metal_upload,
    .download = metal_download,
    .synchronize = metal_synchronize,
    .upload_async = metal_upload_async,
    .download_async = metal_download_async,
    .upload_beside = metal_upload_beside,
    .alloc_host = metal_alloc,
    .free_host = metal_free,
    .event_create = metal_event_create,
    .event_wait = metal_event_wait,
    .event_destroy = metal_event_destroy,
    .copy = metal_copy,
    .measure = gpu_measure,
    .cache_bytes = gpu_cache_bytes,
    .raw_product = metal_raw_product,
    .gates_products = 1,
    .check = metal_check,
    .warm = metal_warm,
    .merges = gpu_merges_calls,
    .run_many = metal_run_many,
    .warm_many = metal_warm_many,
    .property = metal_property,
    .note = "kernels proved by emulation, host code built and driven; not yet run on Apple hardware",
};

__attribute__((visibility("default"))) const vjp_backend *vjp_backend_entry(const vjp_backend_host *host);
const vjp_backend *vjp_backend_entry(const vjp_backend_host *host) {
    return strcmp(host->version, VJP_VERSION) == 0 ? &backend : NULL;
}

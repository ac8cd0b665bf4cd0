/*
 * The Metal device: opening, memory, waiting, and what kernels found. What is retained here is released here: every
 * object of metal_state is ours, what messages return besides belongs to the pool of the call.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/metal/device.h"

/* ---- Opening ----------------------------------------------------------------------------------------- */

enum {
    SHARED_STORAGE = 0, /* MTLResourceStorageModeShared */
    ROUND = 256         /* bytes; buffers are multiples of it */
};

static void close_state(metal_state *state) {
    const objc *o = &state->objc;
    if (state->device) {
        void *pool = metal_begin(state);
        if (state->encoder) objc_do(o, state->encoder, OBJC_END); /* one that is let go without this is a fault */
        objc_release(o, state->encoder);
        objc_release(o, state->commands);
        for (int i = 0; i < state->committed_count; i++) {
            objc_do(o, state->committed[i], OBJC_WAIT);
            objc_release(o, state->committed[i]);
        }
        metal_forget_pipelines(state);
        metal_forget_libraries(state);
        for (size_t i = 0; i < state->places.count; i++)
            objc_release(o, state->places.place[i].buffer);
        objc_release(o, state->findings);
        objc_release(o, state->queue);
        objc_release(o, state->device);
        metal_end(state, pool);
    }
    objc_close(&state->objc);
    free(state->places.place);
    gpu_pipelines_close(&state->pipelines);
    free(state);
}

static void forget_findings(metal_state *state) {
    memset(state->record, 0xff, GPU_RECORDS * sizeof *state->record);
    state->may_have_found = false;
}

static vjp_status open_objects(vjp_device *device, metal_state *state) {
    const objc *o = &state->objc;
    state->queue = objc_get(o, state->device, OBJC_NEW_QUEUE);
    state->findings = objc_new_buffer(o, state->device, GPU_RECORDS * sizeof(gpu_record), SHARED_STORAGE);
    if (state->findings) state->record = objc_get(o, state->findings, OBJC_CONTENTS);
    if (!state->queue || !state->record || !gpu_pipelines_open(&state->pipelines))
        return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for the device", device->name);
    forget_findings(state);
    state->most_bytes = objc_number(o, state->device, OBJC_MOST_BYTES);
    unsigned long threads;
    vjp_status status = metal_probe(device, &threads);
    if (status != VJP_OK) return status;
    if (!threads) return vjp_fail(device, VJP_NO_DEVICE, "%s: the device runs no threads", device->name);
    state->threads = threads < GPU_THREADS ? (int)threads : GPU_THREADS;
    snprintf(device->summary, sizeof device->summary, "%.120s, buffers up to %llu MiB, shared with the processor",
             objc_text(o, objc_get(o, state->device, OBJC_NAME)), (unsigned long long)(state->most_bytes >> 20));
    return VJP_OK;
}

static vjp_status open_device(vjp_device *device, metal_state *state) {
    char why[256];
    if (!objc_open(&state->objc, why, sizeof why)) return vjp_fail(device, VJP_NO_DEVICE, "%s: %s", device->name, why);
    void *pool = metal_begin(state);
    state->device = state->objc.system.create_device();
    vjp_status status =
        state->device ? open_objects(device, state)
                      : vjp_fail(device, VJP_NO_DEVICE, "%s: this system has no GPU that Metal knows", device->name);
    metal_end(state, pool);
    return status;
}

static vjp_status metal_open(vjp_device *device, const vjp_options *options) {
    (void)options;
    if (strcmp(device->name, "metal") != 0)
        return vjp_fail(device, VJP_NO_DEVICE, "\"%s\" is no device; the name is metal", device->name);
    metal_state *state = calloc(1, sizeof *state);
    if (!state) return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for the device", device->name);
    device->state = state;
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

static vjp_status no_room(vjp_device *device, size_t bytes, const char *why) {
    return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for %zu bytes: %s", device->name, bytes, why);
}

static vjp_status metal_alloc(vjp_device *device, size_t bytes, void **data) {
    metal_state *state = metal_of(device);
    const objc *o = &state->objc;
    if (bytes > state->most_bytes) {
        char why[96];
        snprintf(why, sizeof why, "a buffer of this device holds at most %llu", (unsigned long long)state->most_bytes);
        return no_room(device, bytes, why);
    }
    uint64_t rounded = bytes ? ((uint64_t)bytes + ROUND - 1) / ROUND * ROUND : ROUND;
    void *pool = metal_begin(state);
    objc_id buffer = objc_new_buffer(o, state->device, rounded, SHARED_STORAGE);
    char *begin = buffer ? objc_get(o, buffer, OBJC_CONTENTS) : NULL;
    bool kept = begin && gpu_places_add(&state->places, (gpu_place){begin, rounded, buffer});
    if (!kept) objc_release(o, buffer);
    metal_end(state, pool);
    if (!kept) return no_room(device, bytes, begin ? "the host has none" : "the device has none");
    *data = begin;
    return VJP_OK;
}

/* A command buffer keeps the buffers that it uses until it has run. */
static void metal_free(vjp_device *device, void *data) {
    metal_state *state = metal_of(device);
    const gpu_place *found = gpu_places_find(&state->places, data);
    if (!found || found->begin != (char *)data) return;
    void *pool = metal_begin(state);
    objc_release(&state->objc, found->buffer);
    metal_end(state, pool);
    gpu_places_remove(&state->places, found);
}

static vjp_status transfer(vjp_device *device, const char *doing, const void *data, uint64_t offset, size_t bytes,
                           char **at) {
    metal_state *state = metal_of(device);
    const gpu_place *place;
    uint64_t first = 0;
    if (bytes) {
        vjp_status status = gpu_places_span(&state->places, device, doing, data, offset, bytes, &place, &first);
        if (status != VJP_OK) return status;
        *at = place->begin + first;
    }
    return metal_wait(device);
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
    gpu_launch l = {.shader = "tools", .kernel = words ? "words" : "bytes", .operands = 2};
    l.threads = metal_of(device)->threads;
    l.operand[0] = (gpu_operand){"to", GPU_WORD, VJP_I32, true, true, false, true, true, to, bytes};
    l.operand[1] = (gpu_operand){"from", GPU_WORD, VJP_I32, true, false, false, true, true, from, bytes};
    gpu_u32(&l, count);
    return metal_enqueue(device, &l, gpu_divide_up(count, l.threads));
}

/* ---- Waiting, and what was found --------------------------------------------------------------------- */

static vjp_status metal_synchronize(vjp_device *device) {
    metal_state *state = metal_of(device);
    vjp_status status = metal_wait(device);
    if (status != VJP_OK || !state->may_have_found) return status;
    gpu_record record[GPU_RECORDS];
    memcpy(record, state->record, sizeof record);
    forget_findings(state);
    return gpu_findings_tell(&state->asked, device, record);
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
    .copy = metal_copy,
    .note = "kernels proved by emulation, host code built and driven; not yet run on Apple hardware",
};

__attribute__((visibility("default"))) const vjp_backend *vjp_backend_entry(const vjp_backend_host *host);
const vjp_backend *vjp_backend_entry(const vjp_backend_host *host) {
    return strcmp(host->version, VJP_VERSION) == 0 ? &backend : NULL;
}

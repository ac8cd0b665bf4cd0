/* SPDX-License-Identifier: MIT */
/*
 * Events, and downloads that are read when their event is waited for. What is downloaded between two events, and the
 * record of bad indices, is copied on the device into one buffer, which the next event maps: the host reads a step's
 * loss and norm while the device runs the step after it.
 */
#include <stdlib.h>
#include <string.h>

#include "gpu/webgpu/device.h"

enum {
    STAGING = 1 << 16, /* bytes of an event's buffer; what does not fit is downloaded at once */
    READS = 64         /* downloads of an event */
};

/* Bytes [at + skip, at + skip + bytes) of the buffer go to `host`. */
typedef struct late_read {
    void *host;
    size_t at, skip, bytes;
} late_read;

struct webgpu_event {
    webgpu_event *next; /* recorded later */
    webgpu_answer answer;
    bool recorded, finished;
    uint64_t submission;
    WGPUBuffer staging; /* NULL: nothing is read */
    size_t used;        /* bytes of it */
    bool has_bad_indices;
    size_t bad_indices; /* where in it */
    late_read read[READS];
    int reads;
};

static vjp_status new_event(vjp_device *device, webgpu_event **event) {
    webgpu_state *state = webgpu_of(device);
    *event = calloc(1, sizeof **event);
    if (!*event) return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for an event", device->name);
    (*event)->answer.state = state;
    return VJP_OK;
}

/* Copies `words` words into the event's buffer, which is made here if there is none. */
static vjp_status stage(vjp_device *device, webgpu_event *e, WGPUBuffer from, uint64_t first, uint64_t words) {
    webgpu_state *state = webgpu_of(device);
    const webgpu_api *api = &state->api;
    if (!e->staging) {
        e->staging = state->free_staging;
        state->free_staging = NULL;
    }
    if (!e->staging) e->staging = webgpu_make_buffer(state, STAGING, WGPUBufferUsage_MapRead | WGPUBufferUsage_CopyDst);
    vjp_status status = webgpu_result(device, "downloading");
    if (status != VJP_OK) return status;
    webgpu_end_pass(state);
    if (!state->encoder) state->encoder = api->DeviceCreateCommandEncoder(state->device, NULL);
    api->CommandEncoderCopyBufferToBuffer(state->encoder, from, first, e->staging, e->used, words * 4);
    e->used += words * 4;
    return webgpu_result(device, "downloading");
}

vjp_status webgpu_download_async(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes) {
    webgpu_state *state = webgpu_of(device);
    const gpu_buffer *buffer;
    uint64_t first;
    if (!bytes) return webgpu_result(device, "running");
    vjp_status status = gpu_buffers_range(&state->buffers, device, "downloading", data, offset, bytes, &buffer, &first);
    if (status == VJP_OK && !state->next_event) status = new_event(device, &state->next_event);
    if (status != VJP_OK) return status;
    webgpu_event *e = state->next_event;
    uint64_t begin = first / 4 * 4, words = (first + bytes + 3) / 4 - begin / 4;
    size_t room = STAGING - GPU_BAD_INDEX_RECORDS * sizeof(gpu_bad_index) - e->used;
    if (e->reads == READS || words > room / 4) return webgpu_download(device, host, data, offset, bytes);
    late_read read = {host, e->used, (size_t)(first - begin), bytes};
    status = stage(device, e, buffer->handle, begin, words);
    if (status == VJP_OK) e->read[e->reads++] = read;
    return status;
}

/* Submits what was encoded, and asks to be told when all of it has run. */
static vjp_status record(vjp_device *device, webgpu_event *e) {
    webgpu_state *state = webgpu_of(device);
    vjp_status status = VJP_OK;
    if (state->may_have_bad_index) {
        e->bad_indices = e->used;
        e->has_bad_indices = true;
        status = stage(device, e, state->bad_indices, 0, GPU_BAD_INDEX_RECORDS * sizeof(gpu_bad_index) / 4);
        state->may_have_bad_index = false;
    }
    if (status == VJP_OK) status = webgpu_submit(device);
    if (status != VJP_OK) return status;
    e->submission = state->submission;
    e->recorded = true;
    if (e->staging) {
        WGPUBufferMapCallbackInfo info = {
            .mode = WGPUCallbackMode_AllowProcessEvents, .callback = webgpu_on_mapped, .userdata1 = &e->answer};
        state->api.BufferMapAsync(e->staging, WGPUMapMode_Read, 0, e->used, info);
    } else {
        WGPUQueueWorkDoneCallbackInfo info = {
            .mode = WGPUCallbackMode_AllowProcessEvents, .callback = webgpu_on_work_done, .userdata1 = &e->answer};
        state->api.QueueOnSubmittedWorkDone(state->queue, info);
    }
    webgpu_event **last = &state->events;
    while (*last)
        last = &(*last)->next;
    *last = e;
    return webgpu_result(device, "running");
}

/* What was found stays on the device until it is cleared. */
static vjp_status report_bad_indices(vjp_device *device, const webgpu_event *e, const char *mapped) {
    webgpu_state *state = webgpu_of(device);
    gpu_bad_index record[GPU_BAD_INDEX_RECORDS];
    memcpy(record, mapped + e->bad_indices, sizeof record);
    vjp_status found = gpu_bad_index_report(&state->bad_index_context, device, record);
    if (found == VJP_OK) return VJP_OK;
    vjp_status status = webgpu_clear_bad_indices(device);
    return status == VJP_OK ? found : status;
}

static vjp_status read_mapped(vjp_device *device, webgpu_event *e) {
    webgpu_state *state = webgpu_of(device);
    if (!e->answer.object) return webgpu_result(device, "mapping");
    const char *mapped = state->api.BufferGetConstMappedRange(e->staging, 0, e->used);
    if (!mapped) return vjp_fail(device, VJP_DEVICE_FAILED, "%s: mapping: no memory came back", device->name);
    for (int i = 0; i < e->reads; i++)
        memcpy(e->read[i].host, mapped + e->read[i].at + e->read[i].skip, e->read[i].bytes);
    vjp_status status = e->has_bad_indices ? report_bad_indices(device, e, mapped) : VJP_OK;
    state->api.BufferUnmap(e->staging);
    return status;
}

static void release_staging(webgpu_state *state, webgpu_event *e) {
    if (e->staging && !state->free_staging && !state->lost)
        state->free_staging = e->staging;
    else if (e->staging)
        state->api.BufferRelease(e->staging);
    e->staging = NULL;
}

/* Waits for a recorded event and for those before it. */
static vjp_status finish(vjp_device *device, webgpu_event *e) {
    webgpu_state *state = webgpu_of(device);
    vjp_status status = VJP_OK;
    while (!e->finished) {
        webgpu_event *oldest = state->events;
        webgpu_wait(state, &oldest->answer.done, &oldest->submission);
        vjp_status own = oldest->staging ? read_mapped(device, oldest) : webgpu_result(device, "running");
        if (status == VJP_OK) status = own;
        release_staging(state, oldest);
        state->events = oldest->next;
        oldest->finished = true;
    }
    return status;
}

vjp_status webgpu_event_create(vjp_device *device, void **event) {
    webgpu_state *state = webgpu_of(device);
    webgpu_event *e = state->next_event;
    state->next_event = NULL;
    vjp_status status = e ? VJP_OK : new_event(device, &e);
    if (status == VJP_OK) status = record(device, e);
    if (status == VJP_OK)
        *event = e;
    else
        webgpu_event_destroy(device, e);
    return status;
}

vjp_status webgpu_event_wait(vjp_device *device, void *event) {
    vjp_status status = finish(device, event);
    return status == VJP_OK ? webgpu_result(device, "running") : status;
}

/* A callback may still write to a recorded event, so it is waited for; on a lost device it is kept until the end. */
void webgpu_event_destroy(vjp_device *device, void *event) {
    webgpu_state *state = webgpu_of(device);
    webgpu_event *e = event;
    if (!e) return;
    if (e->recorded) finish(device, e);
    release_staging(state, e);
    if (e->recorded && !e->answer.done) {
        e->next = state->kept_events;
        state->kept_events = e;
    } else {
        free(e);
    }
}

vjp_status webgpu_synchronize(vjp_device *device) {
    void *event;
    vjp_status status = webgpu_event_create(device, &event);
    if (status != VJP_OK) return status;
    status = webgpu_event_wait(device, event);
    webgpu_event_destroy(device, event);
    return status;
}

void webgpu_release_events(webgpu_state *state) {
    if (state->next_event && state->next_event->staging) state->api.BufferRelease(state->next_event->staging);
    if (state->free_staging) state->api.BufferRelease(state->free_staging);
}

void webgpu_free_events(webgpu_state *state) {
    free(state->next_event);
    while (state->kept_events) {
        webgpu_event *next = state->kept_events->next;
        free(state->kept_events);
        state->kept_events = next;
    }
}

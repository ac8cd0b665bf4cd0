/* SPDX-License-Identifier: MIT */
/*
 * How failures of the implementation reach us: through callbacks, also in a later call than the one that caused them.
 * The first message is kept, and every call checks webgpu_result() for it.
 */
#include <string.h>
#include <time.h>

#include "gpu/webgpu/device.h"

static void one_line(WGPUStringView message, char *text, size_t room) {
    size_t length = !message.data ? 0 : message.length == WGPU_STRLEN ? strlen(message.data) : message.length;
    gpu_one_line(message.data, length, text, room);
}

void webgpu_keep_message(webgpu_state *state, WGPUStringView message) {
    if (!state->lost && !state->failed) one_line(message, state->message, sizeof state->message);
}

vjp_status webgpu_result(vjp_device *device, const char *doing) {
    webgpu_state *state = webgpu_of(device);
    if (!state->lost && !state->failed) return VJP_OK;
    state->failed = false; /* reported once; a device that is lost stays lost */
    return vjp_fail(device, VJP_DEVICE_FAILED, "%s: %s: %s%s", device->name, doing,
                    state->lost ? "the device was lost: " : "", state->message);
}

void webgpu_on_error(const WGPUDevice *device, WGPUErrorType type, WGPUStringView message, void *first, void *second) {
    webgpu_state *state = first;
    (void)device;
    (void)type;
    (void)second;
    webgpu_keep_message(state, message);
    state->failed = true;
    if (strstr(state->message, "device is lost")) state->lost = true; /* its own event may come later */
}

void webgpu_on_lost(const WGPUDevice *device, WGPUDeviceLostReason reason, WGPUStringView message, void *first,
                    void *second) {
    webgpu_state *state = first;
    (void)device;
    (void)reason;
    (void)second;
    webgpu_keep_message(state, message);
    state->lost = true;
}

static void answer(webgpu_answer *a, bool right, WGPUStringView message) {
    if (!right) {
        webgpu_keep_message(a->state, message);
        a->state->failed = true;
    }
    a->object = right ? a : NULL;
    a->done = true;
}

void webgpu_on_mapped(WGPUMapAsyncStatus status, WGPUStringView message, void *first, void *second) {
    (void)second;
    answer(first, status == WGPUMapAsyncStatus_Success, message);
}

void webgpu_on_work_done(WGPUQueueWorkDoneStatus status, WGPUStringView message, void *first, void *second) {
    (void)second;
    answer(first, status == WGPUQueueWorkDoneStatus_Success, message);
}

bool webgpu_wait(webgpu_state *state, const bool *done, const uint64_t *submission) {
    if (!state->api.QueueSubmitForIndex) submission = NULL;
    state->counts.waits += !*done;
    for (int tries = 0; !*done && !state->lost; tries++) {
        if (state->api.DevicePoll && state->device) state->api.DevicePoll(state->device, true, submission);
        state->api.InstanceProcessEvents(state->instance);
        if (!*done && state->api.SleepUntilEvent)
            state->api.SleepUntilEvent();
        else if (!*done && tries > 10)
            nanosleep(&(struct timespec){0, 20000}, NULL);
    }
    return *done;
}

typedef struct scope_answer {
    bool done;
    char *message;
    size_t room;
} scope_answer;

static void on_scope(WGPUPopErrorScopeStatus status, WGPUErrorType type, WGPUStringView message, void *first,
                     void *second) {
    scope_answer *answer = first;
    (void)second;
    (void)status;
    answer->done = true;
    if (type != WGPUErrorType_NoError) one_line(message, answer->message, answer->room);
}

void webgpu_pop_scope(webgpu_state *state, char *message, size_t room) {
    scope_answer answer = {false, message, room};
    message[0] = 0;
    WGPUPopErrorScopeCallbackInfo info = {
        .mode = WGPUCallbackMode_AllowProcessEvents, .callback = on_scope, .userdata1 = &answer};
    state->api.DevicePopErrorScope(state->device, info);
    while (!answer.done && !state->lost) {
        if (state->api.SleepUntilEvent) state->api.SleepUntilEvent();
        state->api.InstanceProcessEvents(state->instance);
    }
}

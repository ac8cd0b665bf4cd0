/* SPDX-License-Identifier: MIT */
/* See browser.h. */
#ifdef __wasi__
#include "gpu/webgpu/browser.h"

#include <stdatomic.h>
#include <stdlib.h>

enum {
    WORDS = 4096, /* of commands that are kept until they are sent */
    EVENTS = 64,
    PENDING = 32 /* callbacks: fewer than events, so that each has room in the ring */
};

/* ---- Commands ---------------------------------------------------------------------------------------- */

/* The page's: passes on commands and the data of the last of them. */
__attribute__((import_module("vjp"), import_name("gpu"))) bool vjp_web_gpu(const uint32_t *words, size_t count,
                                                                           const void *data, size_t bytes);

static uint32_t words[WORDS];
static size_t word_count;

bool browser_send(const void *data, size_t bytes) {
    bool sent = vjp_web_gpu(words, word_count, data, bytes);
    word_count = 0;
    return sent;
}

void browser_put(const uint32_t *command, size_t count) {
    if (word_count + count > WORDS) browser_send(NULL, 0);
    memcpy(words + word_count, command, count * sizeof *command);
    word_count += count;
}

void *browser_new_object(void) {
    static uint32_t last;
    return (void *)(uintptr_t)++last;
}

/* ---- Events ------------------------------------------------------------------------------------------ */

enum { ON_ERROR = 1, ON_LOST = 2, FIRST_CALLBACK = 3 };

/* As web/gpu.js writes it: an event, then `written`. */
static struct {
    atomic_uint written, read;
    struct {
        uint32_t token, device, failed;
        char text[BROWSER_TEXT];
    } event[EVENTS];
} ring;

static browser_device *devices; /* that are open */

static browser_pending table[PENDING];

static void call(const browser_pending *p, bool failed, const char *text) {
    browser_device *d = p->device;
    switch (p->kind) {
    case ON_ADAPTER:
        ((WGPURequestAdapterCallback)p->callback)(
            failed ? WGPURequestAdapterStatus_Unavailable : WGPURequestAdapterStatus_Success,
            failed ? NULL : (WGPUAdapter)d, browser_text(text), p->first, p->second);
        break;
    case ON_DEVICE:
        ((WGPURequestDeviceCallback)p->callback)(
            failed ? WGPURequestDeviceStatus_Error : WGPURequestDeviceStatus_Success, failed ? NULL : (WGPUDevice)d,
            browser_text(text), p->first, p->second);
        break;
    case ON_SCOPE:
        ((WGPUPopErrorScopeCallback)p->callback)(WGPUPopErrorScopeStatus_Success,
                                                 failed ? WGPUErrorType_Validation : WGPUErrorType_NoError,
                                                 browser_text(text), p->first, p->second);
        break;
    case ON_MAP:
        ((WGPUBufferMapCallback)p->callback)(failed ? WGPUMapAsyncStatus_Error : WGPUMapAsyncStatus_Success,
                                             browser_text(text), p->first, p->second);
        break;
    case ON_WORK:
        ((WGPUQueueWorkDoneCallback)p->callback)(failed ? WGPUQueueWorkDoneStatus_Error
                                                        : WGPUQueueWorkDoneStatus_Success,
                                                 browser_text(text), p->first, p->second);
        break;
    default: break;
    }
}

uint32_t browser_expect(const browser_pending *p) {
    for (uint32_t i = 0; i < PENDING; i++)
        if (table[i].kind == UNUSED) {
            table[i] = *p;
            return i + FIRST_CALLBACK;
        }
    call(p, true, "too many callbacks of the GPU are awaited");
    return 0;
}

static void report(uint32_t token, uint32_t device, const char *text) {
    for (browser_device *d = devices; d; d = d->next) {
        WGPUDevice handle = (WGPUDevice)d;
        if (browser_number(d) != device) continue;
        if (token == ON_ERROR && d->on_error.callback)
            d->on_error.callback(&handle, WGPUErrorType_Validation, browser_text(text), d->on_error.userdata1,
                                 d->on_error.userdata2);
        if (token == ON_LOST && d->on_lost.callback)
            d->on_lost.callback(&handle, WGPUDeviceLostReason_Unknown, browser_text(text), d->on_lost.userdata1,
                                d->on_lost.userdata2);
        return;
    }
}

browser_device *browser_device_open(void) {
    browser_device *d = calloc(1, sizeof *d);
    if (!d) return NULL;
    d->next = devices;
    return devices = d;
}

void browser_device_close(browser_device *d) {
    browser_device **place = &devices;
    for (int i = 0; i < PENDING; i++)
        if (table[i].device == d) table[i].device = NULL;
    while (*place && *place != d)
        place = &(*place)->next;
    if (*place) *place = d->next;
    free(d);
}

void browser_process_events(WGPUInstance instance) {
    (void)instance;
    for (unsigned at; (at = atomic_load(&ring.read)) != atomic_load(&ring.written);) {
        uint32_t token = ring.event[at % EVENTS].token, device = ring.event[at % EVENTS].device;
        bool failed = ring.event[at % EVENTS].failed;
        char text[BROWSER_TEXT];
        memcpy(text, ring.event[at % EVENTS].text, sizeof text);
        text[BROWSER_TEXT - 1] = 0;
        atomic_store(&ring.read, at + 1);
        if (token < FIRST_CALLBACK) {
            report(token, device, text);
        } else if (token - FIRST_CALLBACK < PENDING) {
            browser_pending p = table[token - FIRST_CALLBACK];
            table[token - FIRST_CALLBACK].kind = UNUSED;
            if (p.device) call(&p, failed, text);
            if (p.device && failed && p.kind == ON_ADAPTER) browser_device_close(p.device);
        }
    }
}

void browser_sleep_until_event(void) {
    browser_send(NULL, 0);
    unsigned seen = atomic_load(&ring.read);
    while (atomic_load(&ring.written) == seen)
        __builtin_wasm_memory_atomic_wait32((int *)&ring.written, (int)seen, -1);
}

const void *browser_ring(void) {
    return &ring;
}
#endif

/* SPDX-License-Identifier: MIT */
/*
 * Between api_browser.c and the worker of the page that owns the GPU (web/gpu.js): commands to it, events from it.
 *
 * What has no result (creating, encoding, submitting) becomes 32-bit words: the number of a command and its arguments,
 * where objects have numbers that are chosen here. The words are sent to the worker with each submission, with each
 * piece of data (a shader, what is written to a buffer), and before this thread sleeps. The worker answers in the
 * memory that both share: results where the command said, then an event, which wakes this thread.
 */
#ifndef VJP_WEBGPU_BROWSER_H
#define VJP_WEBGPU_BROWSER_H

#include <string.h>
#include <webgpu.h>

#include "core/core.h"

/* ---- Commands: their arguments are in web/gpu.js, which has the same list ---------------------------- */

enum {
    ADAPTER = 1,
    DEVICE,
    DESTROY,
    BUFFER,
    WRITE,
    MAP,
    SHADER,
    LAYOUT,
    PIPELINE,
    BIND,
    ENCODER,
    PASS,
    SET_PIPELINE,
    SET_BIND,
    DISPATCH,
    END,
    COPY,
    FINISH,
    SUBMIT,
    RELEASE,
    PUSH_SCOPE,
    POP_SCOPE,
    WORK_DONE
};

enum {
    BROWSER_LONGEST = 80, /* words of a command, with its number */
    BROWSER_TEXT = 384
};

/* Keeps a command until the next browser_send(). */
void browser_put(const uint32_t *command, size_t count);
#define PUT(...)                                                                                                       \
    browser_put((const uint32_t[]){__VA_ARGS__}, sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t))

/* Sends the commands, and the data of the last of them. False: there is no worker that owns a GPU. */
bool browser_send(const void *data, size_t bytes);

/* Of an object, or an address. */
static inline uint32_t browser_number(const void *object) {
    return (uint32_t)(uintptr_t)object;
}

/* An object of the worker that nothing more is known about here. */
void *browser_new_object(void);

/* ---- Events ------------------------------------------------------------------------------------------ */

/* An adapter, its device and the device's queue. */
typedef struct browser_device {
    struct browser_device *next;
    struct {
        uint32_t binding, buffer, groups, storage; /* limits, at most 2 GiB */
        char name[BROWSER_TEXT];
    } has; /* the worker writes it */
    WGPUUncapturedErrorCallbackInfo on_error;
    WGPUDeviceLostCallbackInfo on_lost;
} browser_device;

/* NULL: no memory. */
browser_device *browser_device_open(void);
void browser_device_close(browser_device *device);

/* A callback, and what it is called with. */
typedef struct browser_pending {
    enum { UNUSED, ON_ADAPTER, ON_DEVICE, ON_SCOPE, ON_MAP, ON_WORK } kind;
    browser_device *device; /* NULL: closed, so nothing is called */
    void (*callback)(void);
    void *first, *second;
} browser_pending;

/* The token of a callback, for a command; 0: there are too many, so it has been called with a failure. */
uint32_t browser_expect(const browser_pending *pending);

/* Where the worker writes events. */
const void *browser_ring(void);

/* Calls back for every event that has come. */
void browser_process_events(WGPUInstance instance);
void browser_sleep_until_event(void);

static inline WGPUStringView browser_text(const char *text) {
    return (WGPUStringView){text, strlen(text)};
}

#endif

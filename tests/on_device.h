/* SPDX-License-Identifier: MIT */
/*
 * The device of a backend under test, `device`: opening it, its library, its memory. NULL: there is no such device
 * here, and tests that need one are skipped. Include it after cmocka.h, and after headers with parameters of that name.
 */
#ifndef VJP_TESTS_ON_DEVICE_H
#define VJP_TESTS_ON_DEVICE_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"

static vjp_device *device; /* NULL: none here */
static char why_none[VJP_ERROR_BYTES];

/* Opens it, or says why not. Not called where a test opens its own. */
static inline void device_start(const char *name) {
    if (vjp_open(name, NULL, &device) == VJP_OK) return;
    snprintf(why_none, sizeof why_none, "%s", vjp_error(device));
    printf("the tests that need a device are skipped: %s\n", why_none);
    vjp_close(device);
    device = NULL;
}

/* Whether the first device of this backend has these words in its description. */
static inline bool device_is(const char *backend, const char *words) {
    char text[VJP_SUMMARY_BYTES] = "";
    return device && vjp_device_describe(backend, 0, text, sizeof text) == VJP_OK && strstr(text, words);
}

static inline void need_device(void) {
    if (!device) skip();
}

typedef const vjp_backend *(*entry_function)(const vjp_backend_host *host);

/* One entry point, which checks the version. */
static inline void check_library(const char *path, const char *name) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) fail_msg("%s", dlerror());
    entry_function entry;
    *(void **)&entry = dlsym(library, "vjp_backend_entry");
    assert_non_null(entry);
    vjp_backend_host host = {.struct_size = sizeof host, .interface_version = VJP_BACKEND_INTERFACE};
    host.version = vjp_version();
    assert_non_null(entry(&host));
    assert_string_equal(entry(&host)->name, name);
    host.version = "0.0.0-other";
    assert_null(entry(&host));
    assert_null(dlsym(library, "vjp_call")); /* its copies of core and op are not exported */
    dlclose(library);
}

static inline vjp_tensor on_device(vjp_dtype dtype, int ndim, const int64_t *shape, const void *content, size_t bytes) {
    void *data;
    assert_int_equal(vjp_alloc(device, bytes, &data), VJP_OK);
    assert_int_equal(vjp_upload(device, data, 0, content, bytes), VJP_OK);
    return vjp_tensor_of(data, dtype, ndim, shape);
}

/* Launches since the device was opened; 0: it does not count them. */
static inline long dispatches_so_far(void) {
    char text[32];
    const vjp_backend *b = device->backend;
    const char *count = b->property ? b->property(device, "dispatches", text, sizeof text) : NULL;
    return count ? strtol(count, NULL, 10) : 0;
}

#endif

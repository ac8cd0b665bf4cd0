/* SPDX-License-Identifier: MIT */
/*
 * Devices: a backend, its state, its workspace and its last error sentence. A device that failed to open keeps backend
 * NULL and the sentence, so that vjp_error() works in every case.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "core/system.h"

enum { DEFAULT_WORKSPACE = 128 << 20 }; /* untouched pages cost nothing; enough for every shape of `vjp bench` */

vjp_status vjp_device_create(const char *name, vjp_device **device) {
    *device = calloc(1, sizeof **device);
    if (!*device) return VJP_OUT_OF_MEMORY;
    snprintf((*device)->name, sizeof(*device)->name, "%s", name);
    return VJP_OK;
}

/* The caller's options; a struct of another size comes from another version. */
static vjp_status read_options(vjp_device *device, const vjp_options *given, vjp_options *options) {
    *options = (vjp_options)VJP_OPTIONS_DEFAULTS;
    if (!given) return VJP_OK;
    if (given->struct_size != sizeof *options)
        return vjp_fail(device, VJP_INVALID,
                        "%s: options.struct_size is %llu; it must be %zu: start from VJP_OPTIONS_DEFAULTS",
                        device->name, (unsigned long long)given->struct_size, sizeof *options);
    *options = *given;
    if (!options->allocate != !options->release)
        return vjp_fail(device, VJP_INVALID, "%s: options.allocate and options.release go together", device->name);
    return VJP_OK;
}

/* A choice that the device does not have is refused: silence would leave the caller with other arithmetic. */
static vjp_status check_choice(vjp_device *device, const vjp_backend *backend, const char *name, const char *choice) {
    char text[64];
    if (!choice || (backend->property && backend->property(device, name, text, sizeof text))) return VJP_OK;
    return vjp_fail(device, VJP_UNSUPPORTED, "%s: %s is \"%s\", but this device has no choice of it", device->name,
                    name, choice);
}

static vjp_status open_device(vjp_device *device, const vjp_backend *backend, const vjp_options *options) {
    vjp_status status = backend->open(device, options);
    if (status != VJP_OK) return status;
    device->backend = backend;
    status = check_choice(device, backend, "matrix_products", options->matrix_products);
    if (status == VJP_OK) status = check_choice(device, backend, "instruction_set", options->instruction_set);
    if (status == VJP_OK)
        status = vjp_reserve(device, options->workspace_bytes ? options->workspace_bytes : DEFAULT_WORKSPACE);
    if (status == VJP_OK) return VJP_OK;
    backend->close(device);
    device->backend = NULL;
    return status;
}

vjp_status vjp_device_start(vjp_device *device, const vjp_backend *backend, const vjp_options *given) {
    vjp_options options;
    device->found = backend;
    vjp_status status = read_options(device, given, &options);
    if (status != VJP_OK) return status;
    if (options.allocate && !backend->takes_allocator)
        return vjp_fail(device, VJP_UNSUPPORTED, "%s: its memory cannot come from options.allocate", device->name);
    device->allocate = options.allocate;
    device->release = options.release;
    device->allocate_context = options.allocate_context;
    device->log = options.log;
    device->log_context = options.log_context;
    status = open_device(device, backend, &options);
    if (status != VJP_OK) return status;
    vjp_log_line(device, "%s: opened: %s", device->name, device->summary);
    return VJP_OK;
}

void vjp_close(vjp_device *device) {
    if (!device) return;
    if (device->backend) {
        vjp_free(device, device->own_workspace);
        device->backend->close(device);
    }
    if (device->library) system_library_close(device->library);
    free(device);
}

const char *vjp_device_name(const vjp_device *device) {
    return device ? device->name : "";
}

const char *vjp_device_summary(const vjp_device *device) {
    return device ? device->summary : "";
}

int vjp_device_is_host(const vjp_device *device) {
    return device && device->backend && device->backend->host_memory;
}

/* A device that failed to open keeps its own sentence. */
static bool is_open(const vjp_device *device) {
    return device && device->backend;
}

static vjp_status null_argument(vjp_device *device, const char *function, const char *name) {
    return vjp_fail(device, VJP_INVALID, "%s: %s is NULL", function, name);
}

vjp_status vjp_device_property(vjp_device *device, const char *name, char *text, size_t bytes) {
    if (!is_open(device)) return VJP_NO_DEVICE;
    if (!name || !text || !bytes) return null_argument(device, "vjp_device_property", name ? "text" : "name");
    const vjp_backend *backend = device->backend;
    if (backend->property && backend->property(device, name, text, bytes)) return VJP_OK;
    text[0] = 0;
    return vjp_fail(device, VJP_UNSUPPORTED, "%s: it has no property \"%s\"", device->name, name);
}

vjp_status vjp_set_stream(vjp_device *device, void *stream) {
    if (!is_open(device)) return VJP_NO_DEVICE;
    if (device->backend->set_stream) return device->backend->set_stream(device, stream);
    return vjp_fail(device, VJP_UNSUPPORTED, "%s: it has no streams", device->name);
}

void vjp_parallel(const vjp_device *device, size_t count, vjp_task task, void *argument) {
    if (device->backend->parallel)
        device->backend->parallel(device, count, task, argument);
    else
        for (size_t i = 0; i < count; i++)
            task(argument, i);
}

/* ---- Memory ------------------------------------------------------------------------------------------ */

enum { ALLOCATOR_ALIGNMENT = 256 }; /* what CUDA's own memory has */

vjp_status vjp_alloc(vjp_device *device, size_t bytes, void **data) {
    if (data) *data = NULL;
    if (!is_open(device)) return VJP_NO_DEVICE;
    if (!data) return null_argument(device, "vjp_alloc", "data");
    if (!device->allocate) return device->backend->alloc(device, bytes, data);
    *data = device->allocate(device->allocate_context, bytes ? bytes : 1, ALLOCATOR_ALIGNMENT);
    if (*data) return VJP_OK;
    return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: options.allocate returned NULL for %zu bytes", device->name, bytes);
}

void vjp_free(vjp_device *device, void *data) {
    if (!is_open(device) || !data) return;
    if (device->release)
        device->release(device->allocate_context, data);
    else
        device->backend->free(device, data);
}

typedef vjp_status upload_function(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes);
typedef vjp_status download_function(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes);

static vjp_status upload(vjp_device *device, upload_function *by, void *data, uint64_t offset, const void *host,
                         size_t bytes) {
    if (!bytes) return VJP_OK;
    if (!data || !host) return null_argument(device, "vjp_upload", data ? "host" : "data");
    return by(device, data, offset, host, bytes);
}

static vjp_status download(vjp_device *device, download_function *by, void *host, const void *data, uint64_t offset,
                           size_t bytes) {
    if (!bytes) return VJP_OK;
    if (!data || !host) return null_argument(device, "vjp_download", data ? "host" : "data");
    return by(device, host, data, offset, bytes);
}

vjp_status vjp_upload(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes) {
    if (!is_open(device)) return VJP_NO_DEVICE;
    return upload(device, device->backend->upload, data, offset, host, bytes);
}

vjp_status vjp_download(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes) {
    if (!is_open(device)) return VJP_NO_DEVICE;
    return download(device, device->backend->download, host, data, offset, bytes);
}

vjp_status vjp_upload_async(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes) {
    if (!is_open(device)) return VJP_NO_DEVICE;
    const vjp_backend *backend = device->backend;
    return upload(device, backend->upload_async ? backend->upload_async : backend->upload, data, offset, host, bytes);
}

vjp_status vjp_download_async(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes) {
    if (!is_open(device)) return VJP_NO_DEVICE;
    const vjp_backend *backend = device->backend;
    return download(device, backend->download_async ? backend->download_async : backend->download, host, data, offset,
                    bytes);
}

/* Through the host, where a device cannot copy within its memory. */
static vjp_status copy_by_host(vjp_device *device, void *to, uint64_t to_offset, const void *from, uint64_t from_offset,
                               size_t bytes) {
    void *host = malloc(bytes);
    if (!host) return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory to copy %zu bytes", device->name, bytes);
    vjp_status status = device->backend->download(device, host, from, from_offset, bytes);
    if (status == VJP_OK) status = device->backend->upload(device, to, to_offset, host, bytes);
    free(host);
    return status;
}

vjp_status vjp_copy(vjp_device *device, void *to, uint64_t to_offset, const void *from, uint64_t from_offset,
                    size_t bytes) {
    if (!is_open(device)) return VJP_NO_DEVICE;
    if (!bytes) return VJP_OK;
    if (!to || !from) return null_argument(device, "vjp_copy", to ? "from" : "to");
    uintptr_t begin = (uintptr_t)to + (uintptr_t)to_offset, source = (uintptr_t)from + (uintptr_t)from_offset;
    if (begin < source + bytes && source < begin + bytes)
        return vjp_fail(device, VJP_INVALID, "vjp_copy: the two ranges of %zu bytes overlap", bytes);
    if (device->backend->copy)
        return device->backend->copy(device, (char *)to + to_offset, (const char *)from + from_offset, bytes);
    return copy_by_host(device, to, to_offset, from, from_offset, bytes);
}

vjp_status vjp_synchronize(vjp_device *device) {
    if (!is_open(device)) return VJP_NO_DEVICE;
    return device->backend->synchronize(device);
}

/* The event of a device without events: waiting for it is vjp_synchronize(). */
static char everything;

vjp_status vjp_event_record(vjp_device *device, vjp_event **event) {
    if (event) *event = NULL;
    if (!is_open(device)) return VJP_NO_DEVICE;
    if (!event) return null_argument(device, "vjp_event_record", "event");
    if (device->backend->event_create) return device->backend->event_create(device, (void **)event);
    *event = (vjp_event *)&everything;
    return VJP_OK;
}

vjp_status vjp_event_wait(vjp_device *device, vjp_event *event) {
    if (!is_open(device)) return VJP_NO_DEVICE;
    if (!event) return null_argument(device, "vjp_event_wait", "event");
    if (device->backend->event_wait) return device->backend->event_wait(device, event);
    return device->backend->synchronize(device);
}

void vjp_event_destroy(vjp_device *device, vjp_event *event) {
    if (is_open(device) && event && device->backend->event_destroy) device->backend->event_destroy(device, event);
}

vjp_status vjp_reserve(vjp_device *device, size_t bytes) {
    if (!is_open(device)) return VJP_NO_DEVICE;
    if (bytes <= device->own_workspace_bytes) return VJP_OK;
    bool in_use = device->workspace == device->own_workspace;
    void *data;
    vjp_status status = vjp_alloc(device, bytes, &data);
    if (status != VJP_OK) return status;
    vjp_free(device, device->own_workspace);
    device->own_workspace = data;
    device->own_workspace_bytes = bytes;
    if (in_use) {
        device->workspace = data;
        device->workspace_bytes = bytes;
    }
    return VJP_OK;
}

vjp_status vjp_set_workspace(vjp_device *device, void *data, size_t bytes) {
    if (!is_open(device)) return VJP_NO_DEVICE;
    if (!data && bytes) return vjp_fail(device, VJP_INVALID, "vjp_set_workspace: %zu bytes at NULL", bytes);
    if ((uintptr_t)data % 64)
        return vjp_fail(device, VJP_INVALID, "vjp_set_workspace: %p is not 64-byte aligned", data);
    device->workspace = data ? data : device->own_workspace;
    device->workspace_bytes = data ? bytes : device->own_workspace_bytes;
    return VJP_OK;
}

/* ---- Memory of host backends ------------------------------------------------------------------------------------- */

/* Large blocks use large pages where the system has them: reading rows in random order then causes fewer TLB misses. */
enum { LARGE_PAGE = 2 << 20, LARGE_BLOCK = 4 * LARGE_PAGE };

vjp_status vjp_host_alloc(vjp_device *device, size_t bytes, void **data) {
    size_t unit = bytes >= LARGE_BLOCK ? LARGE_PAGE : 64, rounded = (bytes + unit - 1) / unit * unit;
    *data = rounded >= bytes ? system_alloc(unit, rounded ? rounded : unit) : NULL;
    if (*data && unit == LARGE_PAGE) system_prefer_large_pages(*data, rounded);
    if (*data) return VJP_OK;
    return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for %zu bytes", device->name, bytes);
}

void vjp_host_free(vjp_device *device, void *data) {
    (void)device;
    system_free(data);
}

vjp_status vjp_host_upload(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes) {
    (void)device;
    if (bytes) memcpy((char *)data + offset, host, bytes);
    return VJP_OK;
}

vjp_status vjp_host_download(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes) {
    (void)device;
    if (bytes) memcpy(host, (const char *)data + offset, bytes);
    return VJP_OK;
}

vjp_status vjp_host_synchronize(vjp_device *device) {
    (void)device;
    return VJP_OK;
}

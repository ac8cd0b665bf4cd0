/*
 * Devices: a backend, its state, its workspace and its last sentence. A device whose opening failed keeps backend
 * NULL and the sentence, so that vjp_error() answers the same way always.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "core/core.h"

enum { DEFAULT_WORKSPACE = 128 << 20 }; /* untouched pages cost nothing; covers every shape of `vjp bench` */

vjp_status vjp_device_create(const char *name, vjp_device **device) {
    *device = calloc(1, sizeof **device);
    if (!*device) return VJP_OUT_OF_MEMORY;
    snprintf((*device)->name, sizeof(*device)->name, "%s", name);
    return VJP_OK;
}

vjp_status vjp_device_start(vjp_device *device, const vjp_backend *backend, const vjp_options *options) {
    const vjp_options defaults = {0};
    if (!options) options = &defaults;
    device->found = backend;
    vjp_status status = backend->open(device, options);
    if (status != VJP_OK) return status;
    device->backend = backend;
    status = vjp_reserve(device, options->workspace_bytes ? options->workspace_bytes : DEFAULT_WORKSPACE);
    if (status != VJP_OK) {
        backend->close(device);
        device->backend = NULL;
    }
    return status;
}

void vjp_close(vjp_device *device) {
    if (!device) return;
    if (device->backend) {
        if (device->own_workspace) device->backend->free(device, device->own_workspace);
        device->backend->close(device);
    }
    if (device->unload) device->unload(device->library);
    free(device);
}

const char *vjp_device_name(const vjp_device *device) {
    return device ? device->name : "";
}

const char *vjp_device_summary(const vjp_device *device) {
    return device ? device->summary : "";
}

/* A device that failed to open keeps its own sentence. */
static vjp_status usable(const vjp_device *device) {
    return device && device->backend ? VJP_OK : VJP_NO_DEVICE;
}

vjp_status vjp_alloc(vjp_device *device, size_t bytes, void **data) {
    *data = NULL;
    if (usable(device) != VJP_OK) return VJP_NO_DEVICE;
    return device->backend->alloc(device, bytes, data);
}

void vjp_free(vjp_device *device, void *data) {
    if (usable(device) == VJP_OK && data) device->backend->free(device, data);
}

vjp_status vjp_upload(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes) {
    if (usable(device) != VJP_OK) return VJP_NO_DEVICE;
    return device->backend->upload(device, data, offset, host, bytes);
}

vjp_status vjp_download(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes) {
    if (usable(device) != VJP_OK) return VJP_NO_DEVICE;
    return device->backend->download(device, host, data, offset, bytes);
}

vjp_status vjp_synchronize(vjp_device *device) {
    if (usable(device) != VJP_OK) return VJP_NO_DEVICE;
    return device->backend->synchronize(device);
}

vjp_status vjp_reserve(vjp_device *device, size_t bytes) {
    if (usable(device) != VJP_OK) return VJP_NO_DEVICE;
    if (bytes <= device->own_workspace_bytes) return VJP_OK;
    bool in_use = device->workspace == device->own_workspace;
    void *data;
    vjp_status status = device->backend->alloc(device, bytes, &data);
    if (status != VJP_OK) return status;
    if (device->own_workspace) device->backend->free(device, device->own_workspace);
    device->own_workspace = data;
    device->own_workspace_bytes = bytes;
    if (in_use) {
        device->workspace = data;
        device->workspace_bytes = bytes;
    }
    return VJP_OK;
}

vjp_status vjp_set_workspace(vjp_device *device, void *data, size_t bytes) {
    if (usable(device) != VJP_OK) return VJP_NO_DEVICE;
    if (!data && bytes) return vjp_fail(device, VJP_INVALID, "vjp_set_workspace: %zu bytes at NULL", bytes);
    if ((uintptr_t)data % 64)
        return vjp_fail(device, VJP_INVALID, "vjp_set_workspace: %p is not 64-byte aligned", data);
    device->workspace = data ? data : device->own_workspace;
    device->workspace_bytes = data ? bytes : device->own_workspace_bytes;
    return VJP_OK;
}

/* ---- Host memory ------------------------------------------------------------------------------------- */

/* Large blocks lie on large pages where the system has them: rows read here and there cost fewer page walks. */
enum { LARGE_PAGE = 2 << 20, LARGE_BLOCK = 4 * LARGE_PAGE };

vjp_status vjp_host_alloc(vjp_device *device, size_t bytes, void **data) {
    size_t unit = bytes >= LARGE_BLOCK ? LARGE_PAGE : 64, rounded = (bytes + unit - 1) / unit * unit;
    *data = rounded >= bytes ? aligned_alloc(unit, rounded ? rounded : unit) : NULL;
#ifdef MADV_HUGEPAGE
    if (*data && unit == LARGE_PAGE) madvise(*data, rounded, MADV_HUGEPAGE); /* a wish: refused, nothing is lost */
#endif
    if (*data) return VJP_OK;
    return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for %zu bytes", device->name, bytes);
}

void vjp_host_free(vjp_device *device, void *data) {
    (void)device;
    free(data);
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

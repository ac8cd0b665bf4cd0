/* SPDX-License-Identifier: MIT */
/*
 * Finds the backend of a device: the two that are part of the library, and those in separate libraries (libvjp-cuda.so,
 * libvjp-webgpu.so, libvjp-metal, or a third party's), which are loaded when such a device is opened.
 */
#include <stdio.h>
#include <string.h>

#include "core/core.h"
#include "core/system.h"

extern const vjp_backend vjp_backend_ref, vjp_backend_cpu;
#ifdef VJP_BUILT_IN_WEBGPU /* in a browser, which loads no libraries */
const vjp_backend *vjp_backend_entry(const vjp_backend_host *host);
#endif

static const vjp_backend *const built_in[] = {&vjp_backend_ref, &vjp_backend_cpu};
static const char *const kinds[] = {"ref", "cpu", "cuda", "webgpu", "metal"};

enum { COUNT_BUILT_IN = sizeof built_in / sizeof built_in[0], COUNT_KINDS = sizeof kinds / sizeof kinds[0] };

/* What a third-party backend may call. */
static void *host_state(const vjp_device *device) {
    return device->state;
}

static void host_set_state(vjp_device *device, void *state) {
    device->state = state;
}

static void host_set_summary(vjp_device *device, const char *text) {
    snprintf(device->summary, sizeof device->summary, "%s", text ? text : "");
}

static const vjp_backend_host host = {
    .struct_size = sizeof(vjp_backend_host),
    .interface_version = VJP_BACKEND_INTERFACE,
    .version = VJP_VERSION,
    .fail = vjp_fail,
    .refuse = vjp_refuse,
    .describe = vjp_op_describe,
    .name = vjp_device_name,
    .state = host_state,
    .set_state = host_set_state,
    .set_summary = host_set_summary,
    .log = vjp_log_line,
};

static bool is_known(const char *kind) {
    for (int i = 0; i < COUNT_KINDS; i++)
        if (strcmp(kind, kinds[i]) == 0) return true;
    return false;
}

static vjp_status load(vjp_device *device, const char *kind, const vjp_backend **backend) {
    char file[VJP_LIBRARY_FILE];
    device->library = vjp_library_open(kind, file);
    if (!device->library && is_known(kind))
        return vjp_fail(device, VJP_NO_DEVICE, "%s: its backend is not installed (%s)", device->name,
                        system_library_error());
    if (!device->library)
        return vjp_fail(device, VJP_NO_DEVICE,
                        "unknown device \"%s\"; there are ref, cpu, cuda:N, webgpu and metal, and no backend of that "
                        "name is installed (%s)",
                        device->name, system_library_error());
    const vjp_backend *(*entry)(const vjp_backend_host *);
    *(void **)&entry = system_library_find(device->library, "vjp_backend_entry");
    if (!entry) return vjp_fail(device, VJP_NO_DEVICE, "%s: %s has no vjp_backend_entry()", device->name, file);
    *backend = entry(&host);
    if (!*backend || (*backend)->interface_version != VJP_BACKEND_INTERFACE ||
        (*backend)->struct_size != sizeof(vjp_backend))
        return vjp_fail(device, VJP_NO_DEVICE, "%s: %s was made for another version of the backend interface than %d",
                        device->name, file, VJP_BACKEND_INTERFACE);
    if (!(*backend)->version || strcmp((*backend)->version, VJP_VERSION) == 0) return VJP_OK;
    return vjp_fail(device, VJP_NO_DEVICE, "%s: %s is of version %s, this library of version %s", device->name, file,
                    (*backend)->version, VJP_VERSION);
}

/* The backend of a device that vjp_device_create() made. */
static vjp_status find_backend(vjp_device *device, const char *name, const vjp_backend **backend) {
    char kind[VJP_KIND_BYTES];
    *backend = NULL;
    for (int i = 0; name && i < COUNT_BUILT_IN; i++)
        if (strcmp(name, built_in[i]->name) == 0) {
            *backend = built_in[i];
            return VJP_OK;
        }
#ifdef VJP_BUILT_IN_WEBGPU
    if (name && strcmp(name, "webgpu") == 0) {
        *backend = vjp_backend_entry(&host);
        return VJP_OK;
    }
#endif
    if (!vjp_library_kind(name, kind) || strcmp(kind, "ref") == 0 || strcmp(kind, "cpu") == 0)
        return vjp_fail(device, VJP_NO_DEVICE, "unknown device \"%s\"; there are ref, cpu, cuda:N, webgpu and metal",
                        name ? name : "(null)");
    return load(device, kind, backend);
}

vjp_status vjp_open(const char *name, const vjp_options *options, vjp_device **device) {
    if (!device) return VJP_INVALID;
    vjp_status status = vjp_device_create(name ? name : "", device);
    if (status != VJP_OK) return status;
    const vjp_backend *backend;
    status = find_backend(*device, name, &backend);
    return status == VJP_OK ? vjp_device_start(*device, backend, options) : status;
}

/* ---- Which devices there are ------------------------------------------------------------------------- */

const char *vjp_device_kind(size_t index) {
    return index < COUNT_KINDS ? kinds[index] : NULL;
}

size_t vjp_device_count(const char *kind) {
    vjp_device *device;
    const vjp_backend *backend;
    if (vjp_device_create(kind ? kind : "", &device) != VJP_OK) return 0;
    int count = 0;
    if (find_backend(device, kind, &backend) == VJP_OK) count = backend->count ? backend->count() : 1;
    vjp_close(device);
    return count > 0 ? (size_t)count : 0;
}

vjp_status vjp_device_describe(const char *kind, size_t index, char *text, size_t bytes) {
    vjp_device *device;
    const vjp_backend *backend;
    if (!text || !bytes) return VJP_INVALID;
    text[0] = 0;
    vjp_status status = vjp_device_create(kind ? kind : "", &device);
    if (status != VJP_OK) return status;
    status = find_backend(device, kind, &backend);
    if (status == VJP_OK && backend->describe) {
        status = index <= INT32_MAX ? backend->describe((int)index, text, bytes) : VJP_NO_DEVICE;
    } else if (status == VJP_OK && index > 0) {
        status = VJP_NO_DEVICE;
    } else if (status == VJP_OK) {
        status = vjp_device_start(device, backend, NULL);
        snprintf(text, bytes, "%s", device->summary);
    }
    if (status != VJP_OK && !text[0]) snprintf(text, bytes, "%s", device->error);
    vjp_close(device);
    return status;
}

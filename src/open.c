/*
 * Where the backends are put together: the two that are part of the library, and the ones in libraries of their own
 * (libvjp-cuda.so, libvjp-webgpu.so, libvjp-metal), which are loaded when a device of theirs is opened.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "core/core.h"

extern const vjp_backend vjp_backend_ref, vjp_backend_cpu;

static const vjp_backend *const built_in[] = {&vjp_backend_ref, &vjp_backend_cpu};
static const char *const loadable[] = {"cuda", "webgpu", "metal"};

enum { COUNT_BUILT_IN = sizeof built_in / sizeof built_in[0], COUNT_LOADABLE = sizeof loadable / sizeof loadable[0] };

/* macOS looks along the program's own paths only where it is asked to. */
#ifdef __APPLE__
static const char library_name[] = "@rpath/libvjp-%s.dylib";
#else
static const char library_name[] = "libvjp-%s.so";
#endif

/* "cuda:0" is of the kind "cuda". */
static bool is_kind(const char *name, const char *kind) {
    size_t length = strlen(kind);
    return strncmp(name, kind, length) == 0 && (name[length] == 0 || name[length] == ':');
}

static void unload(void *library) {
    dlclose(library);
}

/* A backend's library has one entry, vjp_backend_entry(version), which returns its table, or NULL for another version.
 */
static vjp_status load(vjp_device *device, const char *kind, const vjp_backend **backend) {
    char file[64];
    snprintf(file, sizeof file, library_name, kind);
    device->library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!device->library)
        return vjp_fail(device, VJP_NO_DEVICE, "%s: its backend is not installed (%s)", device->name, dlerror());
    device->unload = unload;
    const vjp_backend *(*entry)(const char *version);
    *(void **)&entry = dlsym(device->library, "vjp_backend_entry");
    if (!entry) return vjp_fail(device, VJP_NO_DEVICE, "%s: %s has no vjp_backend_entry()", device->name, file);
    *backend = entry(vjp_version());
    if (*backend) return VJP_OK;
    return vjp_fail(device, VJP_NO_DEVICE, "%s: %s is not of version %s, as this library is", device->name, file,
                    vjp_version());
}

vjp_status vjp_open(const char *name, const vjp_options *options, vjp_device **device) {
    if (!device) return VJP_INVALID;
    vjp_status status = vjp_device_create(name ? name : "", device);
    if (status != VJP_OK) return status;
    const vjp_backend *backend = NULL;
    for (int i = 0; name && i < COUNT_BUILT_IN && !backend; i++)
        if (strcmp(name, built_in[i]->name) == 0) backend = built_in[i];
    for (int i = 0; name && i < COUNT_LOADABLE && !backend; i++)
        if (is_kind(name, loadable[i])) {
            status = load(*device, loadable[i], &backend);
            if (status != VJP_OK) return status;
        }
    if (!backend)
        return vjp_fail(*device, VJP_NO_DEVICE, "\"%s\" is no device; there are ref, cpu, cuda:N, webgpu and metal",
                        name ? name : "(null)");
    return vjp_device_start(*device, backend, options);
}

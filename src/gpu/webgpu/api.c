/* SPDX-License-Identifier: MIT */
/*
 * Finds an implementation of webgpu.h: VJP_WEBGPU_LIB if it is set, then the libraries' own names, then Python wheels
 * that carry one (wgpu, dawn-python) in the usual places and in the virtual environment that is active.
 */
#ifndef __wasi__ /* api_browser.c */
#include "gpu/webgpu/api.h"

#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifdef __APPLE__
#define ENDING "dylib"
#else
#define ENDING "so"
#endif

static const char *const names[] = {"libwgpu_native." ENDING, "libwebgpu_dawn." ENDING, "libwebgpu." ENDING};

/* Where wheels keep the library, below a prefix. */
static const char *const wheels[] = {
    "lib*/python3*/site-packages/wgpu/resources/libwgpu_native-release." ENDING,
    "lib*/python3*/dist-packages/wgpu/resources/libwgpu_native-release." ENDING,
};

enum { COUNT_NAMES = sizeof names / sizeof names[0], COUNT_WHEELS = sizeof wheels / sizeof wheels[0], PATH = 512 };

static bool open_library(webgpu_api *api, const char *path) {
    api->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (api->library) snprintf(api->path, sizeof api->path, "%s", path);
    return api->library;
}

/* The last match, which is the newest Python's. */
static bool open_wheel(webgpu_api *api, const char *prefix) {
    for (int i = 0; prefix && prefix[0] && i < COUNT_WHEELS; i++) {
        char pattern[PATH];
        glob_t found = {0};
        snprintf(pattern, sizeof pattern, "%s/%s", prefix, wheels[i]);
        bool opened = glob(pattern, 0, NULL, &found) == 0 && open_library(api, found.gl_pathv[found.gl_pathc - 1]);
        globfree(&found);
        if (opened) return true;
    }
    return false;
}

static bool open_any(webgpu_api *api) {
    char home[PATH] = "";
    for (int i = 0; i < COUNT_NAMES; i++)
        if (open_library(api, names[i])) return true;
    if (getenv("HOME")) snprintf(home, sizeof home, "%s/.local", getenv("HOME"));
    const char *const prefixes[] = {getenv("VIRTUAL_ENV"), VJP_WEBGPU_PREFIX, home, "/usr/local", "/usr"};
    for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++)
        if (open_wheel(api, prefixes[i])) return true;
    return false;
}

static vjp_status find_functions(vjp_device *device, webgpu_api *api) {
    const char *missing = NULL;
#define X(name)                                                                                                        \
    *(void **)&api->name = dlsym(api->library, "wgpu" #name);                                                          \
    if (!api->name && !missing) missing = "wgpu" #name;
    WEBGPU_FUNCTIONS(X)
#undef X
    *(void **)&api->DevicePoll = dlsym(api->library, "wgpuDevicePoll");
    *(void **)&api->QueueSubmitForIndex = dlsym(api->library, "wgpuQueueSubmitForIndex");
    if (!missing) return VJP_OK;
    return vjp_fail(device, VJP_NO_DEVICE, "%s: %s has no %s(): a webgpu.h of 2025 or later is needed", device->name,
                    api->path, missing);
}

/*
 * Before webgpu.h became a standard its functions had other arguments under the same names, and calling them would
 * crash. wgpu-native has a version; a Dawn of that time has functions that end in 2.
 */
static vjp_status check_version(vjp_device *device, const webgpu_api *api) {
    enum { OLDEST = 24 };
    if (dlsym(api->library, "wgpuInstanceRequestAdapter2"))
        return vjp_fail(device, VJP_NO_DEVICE,
                        "%s: %s is a Dawn from before webgpu.h was a standard; a newer one is needed", device->name,
                        api->path);
    uint32_t (*version)(void);
    *(void **)&version = dlsym(api->library, "wgpuGetVersion");
    uint32_t major = version ? version() >> 24 : OLDEST;
    if (major >= OLDEST || major == 0) return VJP_OK;
    return vjp_fail(device, VJP_NO_DEVICE, "%s: %s is wgpu-native %u; %d or later is needed", device->name, api->path,
                    (unsigned)major, OLDEST);
}

vjp_status webgpu_load(vjp_device *device, webgpu_api *api) {
    const char *chosen = getenv("VJP_WEBGPU_LIB");
    if (chosen && chosen[0]) {
        if (!open_library(api, chosen))
            return vjp_fail(device, VJP_NO_DEVICE, "%s: VJP_WEBGPU_LIB is \"%s\": %s", device->name, chosen, dlerror());
    } else if (!open_any(api)) {
        return vjp_fail(device, VJP_NO_DEVICE,
                        "%s: no WebGPU implementation was found; install wgpu-native or Dawn, or `pip install wgpu`, "
                        "or set VJP_WEBGPU_LIB to the library",
                        device->name);
    }
    vjp_status status = find_functions(device, api);
    if (status == VJP_OK) status = check_version(device, api);
    if (status != VJP_OK) webgpu_unload(api);
    return status;
}

void webgpu_unload(webgpu_api *api) {
    if (api->library) dlclose(api->library);
    api->library = NULL;
}

/* ---- Addresses --------------------------------------------------------------------------------------- */

char *webgpu_reserve(const gpu_buffers *buffers, size_t bytes) {
    (void)buffers;
    char *begin = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return begin == MAP_FAILED ? NULL : begin;
}

void webgpu_unreserve(char *begin, size_t bytes) {
    munmap(begin, bytes);
}
#endif

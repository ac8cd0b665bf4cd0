/* SPDX-License-Identifier: MIT */
/*
 * The WebGPU device: opening and closing. Where an implementation, a GPU or memory is missing,
 * opening fails with the implementation's own message.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/webgpu/device.h"

/* ---- Opening ----------------------------------------------------------------------------------------- */

static void on_adapter(WGPURequestAdapterStatus status, WGPUAdapter adapter, WGPUStringView message, void *first,
                       void *second) {
    webgpu_answer *a = first;
    (void)second;
    if (status != WGPURequestAdapterStatus_Success) webgpu_keep_message(a->state, message);
    a->object = adapter;
    a->done = true;
}

static void on_device(WGPURequestDeviceStatus status, WGPUDevice device, WGPUStringView message, void *first,
                      void *second) {
    webgpu_answer *a = first;
    (void)second;
    if (status != WGPURequestDeviceStatus_Success) webgpu_keep_message(a->state, message);
    a->object = device;
    a->done = true;
}

static vjp_status open_adapter(vjp_device *device, webgpu_state *state) {
    webgpu_answer a = {.state = state};
    WGPURequestAdapterOptions options = {.featureLevel = WGPUFeatureLevel_Core,
                                         .powerPreference = WGPUPowerPreference_HighPerformance};
    WGPURequestAdapterCallbackInfo info = {
        .mode = WGPUCallbackMode_AllowProcessEvents, .callback = on_adapter, .userdata1 = &a};
    state->instance = state->api.CreateInstance(NULL);
    if (!state->instance)
        return vjp_fail(device, VJP_NO_DEVICE, "%s: %s made no instance", device->name, state->api.path);
    state->api.InstanceRequestAdapter(state->instance, &options, info);
    webgpu_wait(state, &a.done, NULL);
    state->adapter = a.object;
    if (state->adapter) return VJP_OK;
    return vjp_fail(device, VJP_NO_DEVICE,
                    "%s: no adapter (a GPU with its Vulkan, Metal or D3D12 driver) was found: %s", device->name,
                    state->message[0] ? state->message : "no reason was given");
}

/*
 * Mesa's software GPU compiles for the model of the processor, whatever the system lets it run. On a Neoverse core
 * whose SVE is switched off, as virtual machines do, a shader would end the process with an illegal instruction.
 */
static bool has_sve_switched_off(void) {
    static const char *const models[] = {"0xd40", "0xd49", "0xd4f"}; /* Neoverse V1, N2, V2 */
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[1024];
    bool model = false, sve = false;
    while (file && fgets(line, sizeof line, file)) {
        if (strncmp(line, "Features", 8) == 0 && strstr(line, " sve")) sve = true;
        for (size_t i = 0; strncmp(line, "CPU part", 8) == 0 && i < sizeof models / sizeof models[0]; i++)
            if (strstr(line, models[i])) model = true;
    }
    if (file) fclose(file);
    return model && !sve;
}

static vjp_status check_adapter(vjp_device *device, webgpu_state *state) {
    WGPUAdapterInfo info = WGPU_ADAPTER_INFO_INIT;
    state->api.AdapterGetInfo(state->adapter, &info);
    bool software = info.adapterType == WGPUAdapterType_CPU;
    state->api.AdapterInfoFreeMembers(info);
    if (!software || !has_sve_switched_off()) return VJP_OK;
    return vjp_fail(device, VJP_NO_DEVICE,
                    "%s: the only adapter is Mesa's software GPU, whose code would use SVE instructions, which are "
                    "switched off on this machine",
                    device->name);
}

/* With as much of what matters here as the adapter has. */
static vjp_status open_device(vjp_device *device, webgpu_state *state) {
    webgpu_answer a = {.state = state};
    WGPULimits has = WGPU_LIMITS_INIT, want = WGPU_LIMITS_INIT;
    state->api.AdapterGetLimits(state->adapter, &has);
    want.maxStorageBufferBindingSize = has.maxStorageBufferBindingSize;
    want.maxBufferSize = has.maxBufferSize;
    want.maxStorageBuffersPerShaderStage = GPU_MAX_WINDOWS;
    WGPUDeviceDescriptor descriptor = {
        .requiredLimits = &want,
        .deviceLostCallbackInfo = {.mode = WGPUCallbackMode_AllowSpontaneous,
                                   .callback = webgpu_on_lost,
                                   .userdata1 = state},
        .uncapturedErrorCallbackInfo = {.callback = webgpu_on_error, .userdata1 = state}};
    WGPURequestDeviceCallbackInfo info = {
        .mode = WGPUCallbackMode_AllowProcessEvents, .callback = on_device, .userdata1 = &a};
    state->api.AdapterRequestDevice(state->adapter, &descriptor, info);
    webgpu_wait(state, &a.done, NULL);
    state->device = a.object;
    if (!state->device)
        return vjp_fail(device, VJP_NO_DEVICE, "%s: the adapter gives no device: %s", device->name, state->message);
    state->queue = state->api.DeviceGetQueue(state->device);
    state->limits = (WGPULimits)WGPU_LIMITS_INIT;
    state->api.DeviceGetLimits(state->device, &state->limits);
    return webgpu_result(device, "opening");
}

vjp_status webgpu_clear_bad_indices(vjp_device *device) {
    webgpu_state *state = webgpu_of(device);
    gpu_bad_index none[GPU_BAD_INDEX_RECORDS];
    memset(none, 0xff, sizeof none);
    state->api.QueueWriteBuffer(state->queue, state->bad_indices, 0, none, sizeof none);
    state->may_have_bad_index = false;
    return webgpu_result(device, "writing");
}

static vjp_status open_tables(vjp_device *device, webgpu_state *state) {
    state->param_bytes = calloc(WEBGPU_LAUNCHES, WEBGPU_PARAMS);
    if (!gpu_pipelines_open(&state->pipelines, &state->counts) || !state->param_bytes)
        return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for the device", device->name);
    state->params = webgpu_make_buffer(state, WEBGPU_LAUNCHES * WEBGPU_PARAMS,
                                       WGPUBufferUsage_Uniform | WGPUBufferUsage_Storage | WGPUBufferUsage_CopyDst);
    state->bad_indices =
        webgpu_make_buffer(state, GPU_BAD_INDEX_RECORDS * sizeof(gpu_bad_index),
                           WGPUBufferUsage_Storage | WGPUBufferUsage_CopyDst | WGPUBufferUsage_CopySrc);
    vjp_status status = webgpu_result(device, "opening");
    return status == VJP_OK ? webgpu_clear_bad_indices(device) : status;
}

/* Mesa's software GPU ends a thread's loops after this many iterations, without an error. */
enum { LLVMPIPE_ITERATIONS = 65535 };

static void summarise(vjp_device *device, webgpu_state *state) {
    static const char *const kinds[] = {[WGPUBackendType_Null] = "null",     [WGPUBackendType_WebGPU] = "WebGPU",
                                        [WGPUBackendType_D3D11] = "D3D11",   [WGPUBackendType_D3D12] = "D3D12",
                                        [WGPUBackendType_Metal] = "Metal",   [WGPUBackendType_Vulkan] = "Vulkan",
                                        [WGPUBackendType_OpenGL] = "OpenGL", [WGPUBackendType_OpenGLES] = "OpenGL ES"};
    WGPUAdapterInfo info = WGPU_ADAPTER_INFO_INIT;
    state->api.AdapterGetInfo(state->adapter, &info);
    unsigned kind = (unsigned)info.backendType;
    const char *slash = strrchr(state->api.path, '/');
    snprintf(device->summary, sizeof device->summary, "%.*s by %s (%.80s), bindings up to %llu MiB",
             (int)(info.device.length == WGPU_STRLEN ? 80
                   : info.device.length < 80         ? info.device.length
                                                     : 80),
             info.device.data ? info.device.data : "?",
             kind < sizeof kinds / sizeof kinds[0] && kinds[kind] ? kinds[kind] : "?",
             slash ? slash + 1 : state->api.path,
             (unsigned long long)(state->limits.maxStorageBufferBindingSize >> 20));
    state->api.AdapterInfoFreeMembers(info);
    if (strstr(device->summary, "llvmpipe")) state->max_iterations = LLVMPIPE_ITERATIONS;
}

static void close_state(webgpu_state *state) {
    const webgpu_api *api = &state->api;
    if (state->pass) api->ComputePassEncoderRelease(state->pass);
    if (state->encoder) api->CommandEncoderRelease(state->encoder);
    webgpu_release_pipelines(state);
    for (size_t i = 0; i < state->buffers.count; i++) {
        api->BufferRelease(state->buffers.buffer[i].handle);
        webgpu_unreserve(state->buffers.buffer[i].begin, (size_t)state->buffers.buffer[i].bytes);
    }
    webgpu_release_events(state);
    if (state->params) api->BufferRelease(state->params);
    if (state->bad_indices) api->BufferRelease(state->bad_indices);
    if (state->read_back) api->BufferRelease(state->read_back);
    if (state->queue) api->QueueRelease(state->queue);
    if (state->device) {
        state->lost = true; /* on purpose: messages from here on are not kept */
        api->DeviceDestroy(state->device);
        api->DeviceRelease(state->device);
    }
    if (state->adapter) api->AdapterRelease(state->adapter);
    if (state->instance) api->InstanceRelease(state->instance);
    webgpu_free_events(state);
    webgpu_unload(&state->api);
    gpu_pipelines_close(&state->pipelines);
    free(state->param_bytes);
    free(state->buffers.buffer);
    gpu_merger_close(&state->merger);
    free(state);
}

static vjp_status webgpu_open(vjp_device *device, const vjp_options *options) {
    (void)options;
    if (strcmp(device->name, "webgpu") != 0)
        return vjp_fail(device, VJP_NO_DEVICE, "unknown device \"%s\"; the name is webgpu", device->name);
    webgpu_state *state = calloc(1, sizeof *state);
    if (!state) return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for the device", device->name);
    device->state = state;
    state->merger = (gpu_merger){.mode = &state->mode, .enqueue = webgpu_enqueue, .together = webgpu_together};
    vjp_status status = webgpu_load(device, &state->api);
    if (status == VJP_OK) status = open_adapter(device, state);
    if (status == VJP_OK) status = check_adapter(device, state);
    if (status == VJP_OK) status = open_device(device, state);
    if (status == VJP_OK) status = open_tables(device, state);
    if (status == VJP_OK) {
        summarise(device, state);
        return VJP_OK;
    }
    close_state(state);
    device->state = NULL;
    return status;
}

static void webgpu_close(vjp_device *device) {
    close_state(webgpu_of(device));
}

static const vjp_kernel *webgpu_kernel(const vjp_device *device, const vjp_op *op, vjp_pass pass) {
    (void)device;
    return gpu_kernel(op, pass);
}

/* ---- Before a call ----------------------------------------------------------------------------------- */

static vjp_status webgpu_check(const vjp_work *work) {
    return gpu_rehearse(work, &webgpu_of(work->device)->mode, GPU_CHECK);
}

static vjp_status webgpu_warm(const vjp_work *work) {
    return gpu_rehearse(work, &webgpu_of(work->device)->mode, GPU_WARM);
}

/* ---- Timing ------------------------------------------------------------------------------------------ */

static vjp_status webgpu_raw_product(vjp_device *device, const vjp_tensor *y, const vjp_tensor *a,
                                     const vjp_tensor *b) {
    gpu_launch l;
    int64_t groups = 0;
    vjp_status status = gpu_raw_product(device, y, a, b, &l, &groups);
    return status == VJP_OK ? webgpu_enqueue(device, &l, groups) : status;
}

static const char *webgpu_property(const vjp_device *device, const char *name, char *text, size_t bytes) {
    return gpu_count(&webgpu_of(device)->counts, name, text, bytes);
}

static const vjp_backend backend = {
    .struct_size = sizeof(vjp_backend),
    .interface_version = VJP_BACKEND_INTERFACE,
    .version = VJP_VERSION,
    .name = "webgpu",
    .open = webgpu_open,
    .close = webgpu_close,
    .kernel = webgpu_kernel,
    .alloc = webgpu_alloc,
    .free = webgpu_free,
    .upload = webgpu_upload,
    .download = webgpu_download,
    .synchronize = webgpu_synchronize,
    .download_async = webgpu_download_async,
    .event_create = webgpu_event_create,
    .event_wait = webgpu_event_wait,
    .event_destroy = webgpu_event_destroy,
    .copy = webgpu_copy,
    .measure = gpu_measure,
    .cache_bytes = gpu_cache_bytes,
    .raw_product = webgpu_raw_product,
    .gates_products = 1,
    .check = webgpu_check,
    .warm = webgpu_warm,
    .property = webgpu_property,
    .merges = gpu_merges_calls,
    .run_many = webgpu_run_many,
    .warm_many = webgpu_warm_many,
    .note = "proved on a software GPU (Mesa's lavapipe, by wgpu-native); not yet run on a hardware GPU",
};

__attribute__((visibility("default"))) const vjp_backend *vjp_backend_entry(const vjp_backend_host *host);
const vjp_backend *vjp_backend_entry(const vjp_backend_host *host) {
    return strcmp(host->version, VJP_VERSION) == 0 ? &backend : NULL;
}

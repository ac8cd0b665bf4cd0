/*
 * The WebGPU device: opening, memory, waiting, and what kernels found.
 *
 * Everything that can fail for the lack of an implementation, a GPU or memory fails here with the implementation's own
 * words. Errors reach us through callbacks, at any later call too: the first is kept, and every call asks.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "gpu/webgpu/device.h"

vjp_status webgpu_result(vjp_device *device, const char *doing) {
    webgpu_state *state = webgpu_of(device);
    if (!state->lost && !state->failed) return VJP_OK;
    state->failed = false; /* told once; a device that is lost stays lost */
    return vjp_fail(device, VJP_DEVICE_FAILED, "%s: %s: %s%s", device->name, doing,
                    state->lost ? "the device was lost: " : "", state->message);
}

void webgpu_words(WGPUStringView said, char *text, size_t room) {
    size_t length = !said.data ? 0 : said.length == WGPU_STRLEN ? strlen(said.data) : said.length;
    gpu_one_line(said.data, length, text, room);
}

static void keep(webgpu_state *state, WGPUStringView message) {
    if (!state->lost && !state->failed) webgpu_words(message, state->message, sizeof state->message);
}

static void on_error(const WGPUDevice *device, WGPUErrorType type, WGPUStringView message, void *first, void *second) {
    webgpu_state *state = first;
    (void)device;
    (void)type;
    (void)second;
    keep(state, message);
    state->failed = true;
    if (strstr(state->message, "device is lost")) state->lost = true; /* before its own event came */
}

static void on_lost(const WGPUDevice *device, WGPUDeviceLostReason reason, WGPUStringView message, void *first,
                    void *second) {
    webgpu_state *state = first;
    (void)device;
    (void)reason;
    (void)second;
    keep(state, message);
    state->lost = true;
}

/* Lets callbacks come until `done`. False: the device was lost instead. */
static bool wait(webgpu_state *state, const bool *done) {
    for (int tries = 0; !*done && !state->lost; tries++) {
        if (state->api.DevicePoll && state->device) state->api.DevicePoll(state->device, true, NULL);
        state->api.InstanceProcessEvents(state->instance);
        if (!*done && tries > 10) nanosleep(&(struct timespec){0, 20000}, NULL);
    }
    return *done;
}

/* ---- Opening ----------------------------------------------------------------------------------------- */

typedef struct answer {
    bool done;
    void *object;
    webgpu_state *state;
} answer;

static void on_adapter(WGPURequestAdapterStatus status, WGPUAdapter adapter, WGPUStringView message, void *first,
                       void *second) {
    answer *a = first;
    (void)second;
    if (status != WGPURequestAdapterStatus_Success) keep(a->state, message);
    a->object = adapter;
    a->done = true;
}

static void on_device(WGPURequestDeviceStatus status, WGPUDevice device, WGPUStringView message, void *first,
                      void *second) {
    answer *a = first;
    (void)second;
    if (status != WGPURequestDeviceStatus_Success) keep(a->state, message);
    a->object = device;
    a->done = true;
}

static vjp_status open_adapter(vjp_device *device, webgpu_state *state) {
    answer a = {.state = state};
    WGPURequestAdapterOptions options = {.featureLevel = WGPUFeatureLevel_Core,
                                         .powerPreference = WGPUPowerPreference_HighPerformance};
    WGPURequestAdapterCallbackInfo info = {
        .mode = WGPUCallbackMode_AllowProcessEvents, .callback = on_adapter, .userdata1 = &a};
    state->instance = state->api.CreateInstance(NULL);
    if (!state->instance)
        return vjp_fail(device, VJP_NO_DEVICE, "%s: %s made no instance", device->name, state->api.path);
    state->api.InstanceRequestAdapter(state->instance, &options, info);
    wait(state, &a.done);
    state->adapter = a.object;
    if (state->adapter) return VJP_OK;
    return vjp_fail(device, VJP_NO_DEVICE,
                    "%s: no adapter (a GPU with its Vulkan, Metal or D3D12 driver) was found: %s", device->name,
                    state->message[0] ? state->message : "no reason was given");
}

/* All that the adapter has of what matters here. */
static vjp_status open_device(vjp_device *device, webgpu_state *state) {
    answer a = {.state = state};
    WGPULimits has = WGPU_LIMITS_INIT, want = WGPU_LIMITS_INIT;
    state->api.AdapterGetLimits(state->adapter, &has);
    want.maxStorageBufferBindingSize = has.maxStorageBufferBindingSize;
    want.maxBufferSize = has.maxBufferSize;
    want.maxStorageBuffersPerShaderStage = GPU_MOST_WINDOWS;
    WGPUDeviceDescriptor descriptor = {
        .requiredLimits = &want,
        .deviceLostCallbackInfo = {.mode = WGPUCallbackMode_AllowSpontaneous, .callback = on_lost, .userdata1 = state},
        .uncapturedErrorCallbackInfo = {.callback = on_error, .userdata1 = state}};
    WGPURequestDeviceCallbackInfo info = {
        .mode = WGPUCallbackMode_AllowProcessEvents, .callback = on_device, .userdata1 = &a};
    state->api.AdapterRequestDevice(state->adapter, &descriptor, info);
    wait(state, &a.done);
    state->device = a.object;
    if (!state->device)
        return vjp_fail(device, VJP_NO_DEVICE, "%s: the adapter gives no device: %s", device->name, state->message);
    state->queue = state->api.DeviceGetQueue(state->device);
    state->limits = (WGPULimits)WGPU_LIMITS_INIT;
    state->api.DeviceGetLimits(state->device, &state->limits);
    return webgpu_result(device, "opening");
}

static WGPUBuffer make_buffer(webgpu_state *state, uint64_t bytes, WGPUBufferUsage usage) {
    WGPUBufferDescriptor descriptor = {.usage = usage, .size = bytes};
    return state->api.DeviceCreateBuffer(state->device, &descriptor);
}

static vjp_status forget_findings(vjp_device *device) {
    webgpu_state *state = webgpu_of(device);
    gpu_record none[GPU_RECORDS];
    memset(none, 0xff, sizeof none);
    state->api.QueueWriteBuffer(state->queue, state->findings, 0, none, sizeof none);
    state->may_have_found = false;
    return webgpu_result(device, "writing");
}

static vjp_status open_tables(vjp_device *device, webgpu_state *state) {
    state->param_bytes = calloc(WEBGPU_LAUNCHES, WEBGPU_PARAMS);
    if (!gpu_pipelines_open(&state->pipelines) || !state->param_bytes)
        return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for the device", device->name);
    state->params =
        make_buffer(state, WEBGPU_LAUNCHES * WEBGPU_PARAMS, WGPUBufferUsage_Uniform | WGPUBufferUsage_CopyDst);
    state->findings = make_buffer(state, GPU_RECORDS * sizeof(gpu_record),
                                  WGPUBufferUsage_Storage | WGPUBufferUsage_CopyDst | WGPUBufferUsage_CopySrc);
    vjp_status status = webgpu_result(device, "opening");
    return status == VJP_OK ? forget_findings(device) : status;
}

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
}

static void close_state(webgpu_state *state) {
    const webgpu_api *api = &state->api;
    if (state->pass) api->ComputePassEncoderRelease(state->pass);
    if (state->encoder) api->CommandEncoderRelease(state->encoder);
    webgpu_forget_pipelines(state);
    for (size_t i = 0; i < state->places.count; i++) {
        api->BufferRelease(state->places.place[i].buffer);
        munmap(state->places.place[i].begin, state->places.place[i].bytes);
    }
    if (state->params) api->BufferRelease(state->params);
    if (state->findings) api->BufferRelease(state->findings);
    if (state->read_back) api->BufferRelease(state->read_back);
    if (state->queue) api->QueueRelease(state->queue);
    if (state->device) {
        state->lost = true; /* as we wish: what is said of it from here on is not kept */
        api->DeviceDestroy(state->device);
        api->DeviceRelease(state->device);
    }
    if (state->adapter) api->AdapterRelease(state->adapter);
    if (state->instance) api->InstanceRelease(state->instance);
    webgpu_unload(&state->api);
    gpu_pipelines_close(&state->pipelines);
    free(state->param_bytes);
    free(state->places.place);
    free(state);
}

static vjp_status webgpu_open(vjp_device *device, const vjp_options *options) {
    (void)options;
    if (strcmp(device->name, "webgpu") != 0)
        return vjp_fail(device, VJP_NO_DEVICE, "\"%s\" is no device; the name is webgpu", device->name);
    webgpu_state *state = calloc(1, sizeof *state);
    if (!state) return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for the device", device->name);
    device->state = state;
    vjp_status status = webgpu_load(device, &state->api);
    if (status == VJP_OK) status = open_adapter(device, state);
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

/* ---- Memory ------------------------------------------------------------------------------------------ */

static vjp_status no_room(vjp_device *device, size_t bytes, const char *why) {
    return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for %zu bytes: %s", device->name, bytes, why);
}

static vjp_status webgpu_alloc(vjp_device *device, size_t bytes, void **data) {
    webgpu_state *state = webgpu_of(device);
    vjp_status status = webgpu_result(device, "running");
    if (status != VJP_OK) return status;
    uint64_t rounded = bytes > UINT64_MAX - 256 ? UINT64_MAX : ((uint64_t)bytes + 255) / 256 * 256;
    if (!rounded) rounded = 256;
    if (rounded > state->limits.maxBufferSize) {
        char why[96];
        snprintf(why, sizeof why, "a buffer of this device holds at most %llu",
                 (unsigned long long)state->limits.maxBufferSize);
        return no_room(device, bytes, why);
    }
    char *place = mmap(NULL, rounded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return no_room(device, bytes, "no addresses are left");
    char message[WEBGPU_MESSAGE] = "";
    state->api.DevicePushErrorScope(state->device, WGPUErrorFilter_OutOfMemory);
    WGPUBuffer buffer =
        make_buffer(state, rounded, WGPUBufferUsage_Storage | WGPUBufferUsage_CopySrc | WGPUBufferUsage_CopyDst);
    webgpu_pop_scope(state, message, sizeof message);
    if (message[0] || state->failed || state->lost || !buffer) {
        munmap(place, rounded);
        if (buffer) state->api.BufferRelease(buffer);
        status = webgpu_result(device, "allocating");
        return status != VJP_OK ? status : no_room(device, bytes, message);
    }
    if (!gpu_places_add(&state->places, (gpu_place){place, rounded, buffer})) {
        munmap(place, rounded);
        state->api.BufferRelease(buffer);
        return no_room(device, bytes, "the host has none");
    }
    *data = place;
    return VJP_OK;
}

/* What was encoded keeps its buffers alive until it has run. */
static void webgpu_free(vjp_device *device, void *data) {
    webgpu_state *state = webgpu_of(device);
    const gpu_place *found = gpu_places_find(&state->places, data);
    if (!found || found->begin != (char *)data) return;
    state->api.BufferRelease(found->buffer);
    munmap(found->begin, found->bytes);
    gpu_places_remove(&state->places, found);
}

/* The buffer of a transfer, and the first byte in it. */
static vjp_status find_place(vjp_device *device, const void *data, uint64_t offset, size_t bytes, const char *doing,
                             WGPUBuffer *buffer, uint64_t *first) {
    const gpu_place *place;
    vjp_status status = gpu_places_span(&webgpu_of(device)->places, device, doing, data, offset, bytes, &place, first);
    if (status == VJP_OK) *buffer = place->buffer;
    return status;
}

/* WebGPU writes whole words: bytes that are part of one are put in by a kernel. They must not cross into the next. */
static vjp_status upload_part(vjp_device *device, const char *to, const unsigned char *host, size_t bytes) {
    uintptr_t from = (uintptr_t)to % 4;
    uint32_t mask = 0, value = 0;
    for (size_t i = 0; i < bytes; i++) {
        mask |= 0xffu << 8 * (from + i);
        value |= (uint32_t)host[i] << 8 * (from + i);
    }
    gpu_launch l = {.shader = "tools", .kernel = "part", .operands = 1};
    l.operand[0] = (gpu_operand){"to", GPU_WORD, VJP_I32, true, true, false, true, true, to - from, 4};
    gpu_u32(&l, mask);
    gpu_u32(&l, value);
    return webgpu_enqueue(device, &l, 1);
}

static vjp_status webgpu_upload(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes) {
    webgpu_state *state = webgpu_of(device);
    WGPUBuffer buffer;
    uint64_t first;
    if (!bytes) return webgpu_result(device, "running");
    vjp_status status = find_place(device, data, offset, bytes, "uploading", &buffer, &first);
    if (status != VJP_OK) return status;
    size_t head = (size_t)(-first & 3);
    if (head > bytes) head = bytes;
    size_t tail = (bytes - head) % 4, middle = bytes - head - tail;
    const unsigned char *from = host;
    const char *to = (const char *)data + offset;
    if (head) status = upload_part(device, to, from, head);
    if (tail && status == VJP_OK) status = upload_part(device, to + bytes - tail, from + bytes - tail, tail);
    if (status == VJP_OK) status = webgpu_submit(device);
    /* In pieces, because the implementation stages each. */
    enum { PIECE = 64 << 20 };
    for (size_t at = 0; at < middle && status == VJP_OK; at += PIECE) {
        state->api.QueueWriteBuffer(state->queue, buffer, first + head + at, from + head + at,
                                    middle - at < PIECE ? middle - at : PIECE);
        status = webgpu_result(device, "uploading");
    }
    return status;
}

static void on_mapped(WGPUMapAsyncStatus status, WGPUStringView message, void *first, void *second) {
    answer *a = first;
    (void)second;
    if (status == WGPUMapAsyncStatus_Success) {
        a->object = a;
    } else {
        keep(a->state, message);
        a->state->failed = true;
    }
    a->done = true;
}

/* Copies words of a buffer to where the host can map them, waits, and takes bytes [skip, skip + bytes) of them. */
static vjp_status read_words(vjp_device *device, WGPUBuffer buffer, uint64_t first, uint64_t words, void *host,
                             size_t skip, size_t bytes) {
    webgpu_state *state = webgpu_of(device);
    const webgpu_api *api = &state->api;
    if (state->read_back_bytes < words * 4) {
        if (state->read_back) api->BufferRelease(state->read_back);
        state->read_back_bytes = (words * 4 + 65535) / 65536 * 65536;
        state->read_back =
            make_buffer(state, state->read_back_bytes, WGPUBufferUsage_MapRead | WGPUBufferUsage_CopyDst);
        vjp_status status = webgpu_result(device, "downloading");
        if (status != VJP_OK) {
            state->read_back_bytes = 0;
            return status;
        }
    }
    webgpu_end_pass(state);
    if (!state->encoder) state->encoder = api->DeviceCreateCommandEncoder(state->device, NULL);
    api->CommandEncoderCopyBufferToBuffer(state->encoder, buffer, first, state->read_back, 0, words * 4);
    vjp_status status = webgpu_submit(device);
    if (status != VJP_OK) return status;
    answer a = {.state = state};
    WGPUBufferMapCallbackInfo info = {
        .mode = WGPUCallbackMode_AllowProcessEvents, .callback = on_mapped, .userdata1 = &a};
    api->BufferMapAsync(state->read_back, WGPUMapMode_Read, 0, words * 4, info);
    wait(state, &a.done);
    if (!a.object) return webgpu_result(device, "mapping");
    const char *mapped = api->BufferGetConstMappedRange(state->read_back, 0, words * 4);
    if (mapped) memcpy(host, mapped + skip, bytes);
    api->BufferUnmap(state->read_back);
    if (!mapped) return vjp_fail(device, VJP_DEVICE_FAILED, "%s: mapping: no memory came back", device->name);
    return webgpu_result(device, "downloading");
}

static vjp_status webgpu_download(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes) {
    WGPUBuffer buffer;
    uint64_t first;
    if (!bytes) return webgpu_result(device, "running");
    vjp_status status = find_place(device, data, offset, bytes, "downloading", &buffer, &first);
    enum { PIECE = 64 << 20 };
    for (size_t at = 0; at < bytes && status == VJP_OK; at += PIECE) {
        size_t length = bytes - at < PIECE ? bytes - at : PIECE;
        uint64_t begin = (first + at) / 4 * 4, end = (first + at + length + 3) / 4 * 4;
        status = read_words(device, buffer, begin, (end - begin) / 4, (char *)host + at, (size_t)(first + at - begin),
                            length);
    }
    return status;
}

/* By a kernel, because WebGPU's own copy refuses two places of one buffer; in pieces that any device can bind. */
static vjp_status webgpu_copy(vjp_device *device, void *to, const void *from, size_t bytes) {
    enum { PIECE = 32 << 20 };
    vjp_status status = VJP_OK;
    if (bytes % 4 || (uintptr_t)to % 4 || (uintptr_t)from % 4)
        return vjp_fail(device, VJP_UNSUPPORTED, "%s: a copy of %zu bytes; it must be of whole words", device->name,
                        bytes);
    for (size_t at = 0; at < bytes && status == VJP_OK; at += PIECE) {
        size_t length = bytes - at < PIECE ? bytes - at : PIECE;
        gpu_launch l = {.shader = "tools", .kernel = "copy", .operands = 2};
        l.operand[0] = (gpu_operand){"to", GPU_WORD, VJP_I32, true, true, false, true, false, (char *)to + at, length};
        l.operand[1] =
            (gpu_operand){"from", GPU_WORD, VJP_I32, true, false, false, true, false, (const char *)from + at, length};
        gpu_u32(&l, (int64_t)(length / 4));
        status = webgpu_enqueue(device, &l, gpu_divide_up((int64_t)(length / 4), GPU_THREADS));
    }
    return status;
}

/* ---- Waiting, and what was found --------------------------------------------------------------------- */

static void on_work_done(WGPUQueueWorkDoneStatus status, WGPUStringView message, void *first, void *second) {
    answer *a = first;
    (void)second;
    if (status != WGPUQueueWorkDoneStatus_Success) {
        keep(a->state, message);
        a->state->failed = true;
    }
    a->done = true;
}

static vjp_status report_findings(vjp_device *device) {
    webgpu_state *state = webgpu_of(device);
    gpu_record record[GPU_RECORDS];
    vjp_status status = read_words(device, state->findings, 0, sizeof record / 4, record, 0, sizeof record);
    if (status == VJP_OK) status = forget_findings(device);
    return status == VJP_OK ? gpu_findings_tell(&state->asked, device, record) : status;
}

static vjp_status webgpu_synchronize(vjp_device *device) {
    webgpu_state *state = webgpu_of(device);
    vjp_status status = webgpu_submit(device);
    if (status != VJP_OK) return status;
    if (state->may_have_found) return report_findings(device);
    answer a = {.state = state};
    WGPUQueueWorkDoneCallbackInfo info = {
        .mode = WGPUCallbackMode_AllowProcessEvents, .callback = on_work_done, .userdata1 = &a};
    state->api.QueueOnSubmittedWorkDone(state->queue, info);
    wait(state, &a.done);
    return webgpu_result(device, "running");
}

/* ---- Timing ------------------------------------------------------------------------------------------ */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Once to make pipelines; then all replays in as few submissions as hold them, from the first encoding to the end. */
static vjp_status webgpu_measure(vjp_device *device, vjp_status (*enqueue)(void *argument), void *argument, int replays,
                                 double *seconds) {
    vjp_status status = enqueue(argument);
    if (status == VJP_OK) status = webgpu_synchronize(device);
    double begin = now();
    for (int i = 0; i < replays && status == VJP_OK; i++)
        status = enqueue(argument);
    if (status == VJP_OK) status = webgpu_synchronize(device);
    *seconds = (now() - begin) / replays;
    return status;
}

/* WebGPU does not tell: what the largest of today's cards that it reaches have. */
static size_t webgpu_cache_bytes(const vjp_device *device) {
    (void)device;
    return (size_t)64 << 20;
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
    .copy = webgpu_copy,
    .measure = webgpu_measure,
    .cache_bytes = webgpu_cache_bytes,
    .note = "proved on a software GPU (Mesa's lavapipe, by wgpu-native); not yet run on a hardware GPU",
};

__attribute__((visibility("default"))) const vjp_backend *vjp_backend_entry(const vjp_backend_host *host);
const vjp_backend *vjp_backend_entry(const vjp_backend_host *host) {
    return strcmp(host->version, VJP_VERSION) == 0 ? &backend : NULL;
}

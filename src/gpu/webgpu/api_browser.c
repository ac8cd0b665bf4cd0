/* SPDX-License-Identifier: MIT */
/*
 * webgpu.h over the browser's navigator.gpu, in place of api.c. A second worker of the page (web/gpu.js) owns the GPU,
 * and this thread may sleep until it has answered, so all of vjp stays what it is: functions that return when they are
 * done.
 *
 * What has no result (creating, encoding, submitting) becomes 32-bit words: the number of a command and its arguments,
 * where objects have numbers that are chosen here. The words are sent to the worker with each submission, with each
 * piece of data (a shader, what is written to a buffer), and before this thread sleeps. The worker answers in the
 * memory that both share: results where the command said, then an event in the ring below, which wakes this thread.
 */
#ifdef __wasi__
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/webgpu/api.h"

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
    WORDS = 4096, /* of commands that are kept until they are sent */
    LONGEST = 80, /* words of a command, with its number */
    EVENTS = 64,
    TEXT = 384,
    PENDING = 32 /* callbacks: fewer than events, so that each has room in the ring */
};

/* The page's: passes on commands and the data of the last of them. False: there is no worker that owns a GPU. */
__attribute__((import_module("vjp"), import_name("gpu"))) bool vjp_web_gpu(const uint32_t *words, size_t count,
                                                                           const void *data, size_t bytes);

static uint32_t words[WORDS];
static size_t word_count;

static bool send(const void *data, size_t bytes) {
    bool sent = vjp_web_gpu(words, word_count, data, bytes);
    word_count = 0;
    return sent;
}

static void put(const uint32_t *command, size_t count) {
    if (word_count + count > WORDS) send(NULL, 0);
    memcpy(words + word_count, command, count * sizeof *command);
    word_count += count;
}

#define PUT(...) put((const uint32_t[]){__VA_ARGS__}, sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t))

static uint32_t number(const void *object) {
    return (uint32_t)(uintptr_t)object;
}

/* An object of the worker that nothing more is known about here. */
static void *new_object(void) {
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
        char text[TEXT];
    } event[EVENTS];
} ring;

typedef struct browser_device {
    struct browser_device *next;
    struct {
        uint32_t binding, buffer, groups, storage; /* limits, at most 2 GiB */
        char name[TEXT];
    } has;
    WGPUUncapturedErrorCallbackInfo on_error;
    WGPUDeviceLostCallbackInfo on_lost;
} browser_device;

static browser_device *devices; /* that are open */

typedef struct pending {
    enum { UNUSED, ON_ADAPTER, ON_DEVICE, ON_SCOPE, ON_MAP, ON_WORK } kind;
    browser_device *device; /* NULL: closed, so nothing is called */
    void (*callback)(void);
    void *first, *second;
} pending;

static pending table[PENDING];

static WGPUStringView view(const char *text) {
    return (WGPUStringView){text, strlen(text)};
}

static void call(const pending *p, bool failed, const char *text) {
    browser_device *d = p->device;
    switch (p->kind) {
    case ON_ADAPTER:
        ((WGPURequestAdapterCallback)p->callback)(failed ? WGPURequestAdapterStatus_Unavailable
                                                         : WGPURequestAdapterStatus_Success,
                                                  failed ? NULL : (WGPUAdapter)d, view(text), p->first, p->second);
        break;
    case ON_DEVICE:
        ((WGPURequestDeviceCallback)p->callback)(failed ? WGPURequestDeviceStatus_Error
                                                        : WGPURequestDeviceStatus_Success,
                                                 failed ? NULL : (WGPUDevice)d, view(text), p->first, p->second);
        break;
    case ON_SCOPE:
        ((WGPUPopErrorScopeCallback)p->callback)(WGPUPopErrorScopeStatus_Success,
                                                 failed ? WGPUErrorType_Validation : WGPUErrorType_NoError, view(text),
                                                 p->first, p->second);
        break;
    case ON_MAP:
        ((WGPUBufferMapCallback)p->callback)(failed ? WGPUMapAsyncStatus_Error : WGPUMapAsyncStatus_Success, view(text),
                                             p->first, p->second);
        break;
    case ON_WORK:
        ((WGPUQueueWorkDoneCallback)p->callback)(
            failed ? WGPUQueueWorkDoneStatus_Error : WGPUQueueWorkDoneStatus_Success, view(text), p->first, p->second);
        break;
    default: break;
    }
}

/* The token of a callback; 0: there are too many, so it has been called with a failure. */
static uint32_t expect(const pending *p) {
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
        if (number(d) != device) continue;
        if (token == ON_ERROR && d->on_error.callback)
            d->on_error.callback(&handle, WGPUErrorType_Validation, view(text), d->on_error.userdata1,
                                 d->on_error.userdata2);
        if (token == ON_LOST && d->on_lost.callback)
            d->on_lost.callback(&handle, WGPUDeviceLostReason_Unknown, view(text), d->on_lost.userdata1,
                                d->on_lost.userdata2);
        return;
    }
}

static void forget_device(browser_device *d) {
    browser_device **place = &devices;
    for (int i = 0; i < PENDING; i++)
        if (table[i].device == d) table[i].device = NULL;
    while (*place && *place != d)
        place = &(*place)->next;
    if (*place) *place = d->next;
    free(d);
}

/* Calls back for every event that has come. */
static void process_events(WGPUInstance instance) {
    (void)instance;
    for (unsigned at; (at = atomic_load(&ring.read)) != atomic_load(&ring.written);) {
        uint32_t token = ring.event[at % EVENTS].token, device = ring.event[at % EVENTS].device;
        bool failed = ring.event[at % EVENTS].failed;
        char text[TEXT];
        memcpy(text, ring.event[at % EVENTS].text, sizeof text);
        text[TEXT - 1] = 0;
        atomic_store(&ring.read, at + 1);
        if (token < FIRST_CALLBACK) {
            report(token, device, text);
        } else if (token - FIRST_CALLBACK < PENDING) {
            pending p = table[token - FIRST_CALLBACK];
            table[token - FIRST_CALLBACK].kind = UNUSED;
            if (p.device) call(&p, failed, text);
            if (p.device && failed && p.kind == ON_ADAPTER) forget_device(p.device);
        }
    }
}

static void sleep_until_event(void) {
    send(NULL, 0);
#ifdef __wasm_atomics__
    unsigned seen = atomic_load(&ring.read);
    while (atomic_load(&ring.written) == seen)
        __builtin_wasm_memory_atomic_wait32((int *)&ring.written, (int)seen, -1);
#endif
}

/* ---- Opening and closing ----------------------------------------------------------------------------- */

static WGPUInstance create_instance(const WGPUInstanceDescriptor *descriptor) {
    (void)descriptor;
    return (WGPUInstance)&ring;
}

static WGPUFuture request_adapter(WGPUInstance instance, const WGPURequestAdapterOptions *options,
                                  WGPURequestAdapterCallbackInfo info) {
    (void)instance, (void)options;
    browser_device *d = calloc(1, sizeof *d);
    if (!d) {
        info.callback(WGPURequestAdapterStatus_Error, NULL, view("out of memory"), info.userdata1, info.userdata2);
        return (WGPUFuture){0};
    }
    d->next = devices;
    devices = d;
    pending p = {ON_ADAPTER, d, (void (*)(void))info.callback, info.userdata1, info.userdata2};
    uint32_t token = expect(&p);
    if (token) PUT(ADAPTER, token, number(d), number(&d->has), number(&ring));
    return (WGPUFuture){0};
}

static WGPUStatus get_limits(const browser_device *d, WGPULimits *limits) {
    limits->maxStorageBufferBindingSize = d->has.binding;
    limits->maxBufferSize = d->has.buffer;
    limits->maxComputeWorkgroupsPerDimension = d->has.groups;
    limits->maxStorageBuffersPerShaderStage = d->has.storage;
    return WGPUStatus_Success;
}

static WGPUStatus adapter_get_limits(WGPUAdapter adapter, WGPULimits *limits) {
    return get_limits((const browser_device *)adapter, limits);
}

static WGPUStatus device_get_limits(WGPUDevice device, WGPULimits *limits) {
    return get_limits((const browser_device *)device, limits);
}

static WGPUStatus adapter_get_info(WGPUAdapter adapter, WGPUAdapterInfo *info) {
    info->device = view(((const browser_device *)adapter)->has.name);
    info->backendType = WGPUBackendType_WebGPU;
    return WGPUStatus_Success;
}

static void adapter_info_free_members(WGPUAdapterInfo info) {
    (void)info;
}

static WGPUFuture request_device(WGPUAdapter adapter, const WGPUDeviceDescriptor *descriptor,
                                 WGPURequestDeviceCallbackInfo info) {
    browser_device *d = (browser_device *)adapter;
    const WGPULimits *want = descriptor->requiredLimits;
    pending p = {ON_DEVICE, d, (void (*)(void))info.callback, info.userdata1, info.userdata2};
    d->on_error = descriptor->uncapturedErrorCallbackInfo;
    d->on_lost = descriptor->deviceLostCallbackInfo;
    uint32_t token = expect(&p);
    if (token)
        PUT(DEVICE, token, number(d), (uint32_t)want->maxStorageBufferBindingSize, (uint32_t)want->maxBufferSize,
            want->maxStorageBuffersPerShaderStage);
    return (WGPUFuture){0};
}

static WGPUQueue get_queue(WGPUDevice device) {
    return (WGPUQueue)device;
}

static void destroy_device(WGPUDevice device) {
    PUT(DESTROY, number(device));
    send(NULL, 0);
}

/* The adapter, the device and its queue are one here; the adapter is released last. */
static void release_adapter(WGPUAdapter adapter) {
    forget_device((browser_device *)adapter);
}

static void release_device(WGPUDevice device) {
    (void)device;
}

static void release_queue(WGPUQueue queue) {
    (void)queue;
}

static void release_instance(WGPUInstance instance) {
    (void)instance;
}

/* ---- Buffers ----------------------------------------------------------------------------------------- */

/* `mapped`: where the worker puts what is read, for a buffer that can be mapped. */
typedef struct browser_buffer {
    browser_device *device;
    void *object, *mapped;
} browser_buffer;

static WGPUBuffer create_buffer(WGPUDevice device, const WGPUBufferDescriptor *descriptor) {
    browser_device *d = (browser_device *)device;
    bool maps = descriptor->usage & WGPUBufferUsage_MapRead;
    browser_buffer *b = calloc(1, sizeof *b);
    if (b && maps) b->mapped = malloc((size_t)descriptor->size);
    if (!b || (maps && !b->mapped)) {
        free(b);
        if (d->on_error.callback)
            d->on_error.callback(&device, WGPUErrorType_OutOfMemory, view("the module has no memory for a buffer"),
                                 d->on_error.userdata1, d->on_error.userdata2);
        return NULL;
    }
    b->device = d;
    b->object = new_object();
    PUT(BUFFER, number(d), number(b->object), (uint32_t)descriptor->size, (uint32_t)descriptor->usage);
    return (WGPUBuffer)b;
}

static uint32_t buffer_number(WGPUBuffer buffer) {
    return number(((browser_buffer *)buffer)->object);
}

static void release(void *object) {
    PUT(RELEASE, number(object));
}

static void release_buffer(WGPUBuffer buffer) {
    browser_buffer *b = (browser_buffer *)buffer;
    release(b->object);
    free(b->mapped);
    free(b);
}

static void write_buffer(WGPUQueue queue, WGPUBuffer buffer, uint64_t offset, const void *data, size_t bytes) {
    PUT(WRITE, number(queue), buffer_number(buffer), (uint32_t)offset);
    send(data, bytes);
}

static WGPUFuture map_buffer(WGPUBuffer buffer, WGPUMapMode mode, size_t offset, size_t bytes,
                             WGPUBufferMapCallbackInfo info) {
    browser_buffer *b = (browser_buffer *)buffer;
    (void)mode;
    pending p = {ON_MAP, b->device, (void (*)(void))info.callback, info.userdata1, info.userdata2};
    uint32_t token = expect(&p);
    if (token)
        PUT(MAP, token, number(b->device), number(b->object), (uint32_t)offset, (uint32_t)bytes,
            number((char *)b->mapped + offset));
    return (WGPUFuture){0};
}

static const void *mapped_range(WGPUBuffer buffer, size_t offset, size_t bytes) {
    (void)bytes;
    return (const char *)((browser_buffer *)buffer)->mapped + offset;
}

/* The worker has done so. */
static void unmap_buffer(WGPUBuffer buffer) {
    (void)buffer;
}

/* ---- Pipelines --------------------------------------------------------------------------------------- */

static WGPUShaderModule create_shader(WGPUDevice device, const WGPUShaderModuleDescriptor *descriptor) {
    const WGPUShaderSourceWGSL *source = (const void *)descriptor->nextInChain;
    void *object = new_object();
    PUT(SHADER, number(device), number(object));
    send(source->code.data, source->code.length == WGPU_STRLEN ? strlen(source->code.data) : source->code.length);
    return object;
}

static WGPUBindGroupLayout create_layout(WGPUDevice device, const WGPUBindGroupLayoutDescriptor *descriptor) {
    void *object = new_object();
    uint32_t command[LONGEST] = {LAYOUT, number(device), number(object), (uint32_t)descriptor->entryCount};
    size_t count = 4;
    for (size_t i = 0; i < descriptor->entryCount && count + 3 <= LONGEST; i++) {
        const WGPUBindGroupLayoutEntry *entry = &descriptor->entries[i];
        command[count++] = (uint32_t)entry->buffer.type;
        command[count++] = entry->buffer.hasDynamicOffset;
        command[count++] = (uint32_t)entry->buffer.minBindingSize;
    }
    put(command, count);
    return object;
}

/* A layout of pipelines has one layout of bindings here, and is no object of its own. */
static WGPUPipelineLayout create_pipeline_layout(WGPUDevice device, const WGPUPipelineLayoutDescriptor *descriptor) {
    (void)device;
    return (WGPUPipelineLayout)descriptor->bindGroupLayouts[0];
}

static void release_pipeline_layout(WGPUPipelineLayout layout) {
    (void)layout;
}

static WGPUComputePipeline create_pipeline(WGPUDevice device, const WGPUComputePipelineDescriptor *descriptor) {
    void *object = new_object();
    PUT(PIPELINE, number(device), number(object), number(descriptor->layout), number(descriptor->compute.module));
    return object;
}

static WGPUBindGroup create_bindings(WGPUDevice device, const WGPUBindGroupDescriptor *descriptor) {
    void *object = new_object();
    uint32_t command[LONGEST] = {BIND, number(device), number(object), number(descriptor->layout),
                                 (uint32_t)descriptor->entryCount};
    size_t count = 5;
    for (size_t i = 0; i < descriptor->entryCount && count + 4 <= LONGEST; i++) {
        const WGPUBindGroupEntry *entry = &descriptor->entries[i];
        command[count++] = entry->binding;
        command[count++] = buffer_number(entry->buffer);
        command[count++] = (uint32_t)entry->offset;
        command[count++] = (uint32_t)entry->size;
    }
    put(command, count);
    return object;
}

/* ---- Encoding ---------------------------------------------------------------------------------------- */

static WGPUCommandEncoder create_encoder(WGPUDevice device, const WGPUCommandEncoderDescriptor *descriptor) {
    (void)descriptor;
    void *object = new_object();
    PUT(ENCODER, number(device), number(object));
    return object;
}

static WGPUComputePassEncoder begin_pass(WGPUCommandEncoder encoder, const WGPUComputePassDescriptor *descriptor) {
    (void)descriptor;
    void *object = new_object();
    PUT(PASS, number(encoder), number(object));
    return object;
}

static void set_pipeline(WGPUComputePassEncoder pass, WGPUComputePipeline pipeline) {
    PUT(SET_PIPELINE, number(pass), number(pipeline));
}

/* With one offset, that of the parameters. */
static void set_bindings(WGPUComputePassEncoder pass, uint32_t group, WGPUBindGroup bindings, size_t count,
                         const uint32_t *offsets) {
    (void)group, (void)count;
    PUT(SET_BIND, number(pass), number(bindings), offsets[0]);
}

static void dispatch(WGPUComputePassEncoder pass, uint32_t x, uint32_t y, uint32_t z) {
    PUT(DISPATCH, number(pass), x, y, z);
}

static void end_pass(WGPUComputePassEncoder pass) {
    PUT(END, number(pass));
}

static void copy(WGPUCommandEncoder encoder, WGPUBuffer from, uint64_t first, WGPUBuffer to, uint64_t at,
                 uint64_t bytes) {
    PUT(COPY, number(encoder), buffer_number(from), (uint32_t)first, buffer_number(to), (uint32_t)at, (uint32_t)bytes);
}

static WGPUCommandBuffer finish(WGPUCommandEncoder encoder, const WGPUCommandBufferDescriptor *descriptor) {
    (void)descriptor;
    void *object = new_object();
    PUT(FINISH, number(encoder), number(object));
    return object;
}

static void submit(WGPUQueue queue, size_t count, const WGPUCommandBuffer *commands) {
    for (size_t i = 0; i < count; i++)
        PUT(SUBMIT, number(queue), number(commands[i]));
    send(NULL, 0);
}

static WGPUFuture work_done(WGPUQueue queue, WGPUQueueWorkDoneCallbackInfo info) {
    pending p = {ON_WORK, (browser_device *)queue, (void (*)(void))info.callback, info.userdata1, info.userdata2};
    uint32_t token = expect(&p);
    if (token) PUT(WORK_DONE, token, number(queue));
    return (WGPUFuture){0};
}

static void push_scope(WGPUDevice device, WGPUErrorFilter filter) {
    PUT(PUSH_SCOPE, number(device), (uint32_t)filter);
}

/* Without a callback the scope is popped all the same. */
static WGPUFuture pop_scope(WGPUDevice device, WGPUPopErrorScopeCallbackInfo info) {
    pending p = {ON_SCOPE, (browser_device *)device, (void (*)(void))info.callback, info.userdata1, info.userdata2};
    uint32_t token = expect(&p);
    PUT(POP_SCOPE, token, number(device));
    return (WGPUFuture){0};
}

#define RELEASE_OF(Type)                                                                                               \
    static void release_##Type(WGPU##Type object) {                                                                    \
        release(object);                                                                                               \
    }
RELEASE_OF(BindGroupLayout)
RELEASE_OF(BindGroup)
RELEASE_OF(CommandBuffer)
RELEASE_OF(CommandEncoder)
RELEASE_OF(ComputePassEncoder)
RELEASE_OF(ComputePipeline)
RELEASE_OF(ShaderModule)

/* ---- Addresses --------------------------------------------------------------------------------------- */

/* The module's memory ends at 2 GiB (cmake/web.cmake), so a load or store above traps. */
static const uint32_t FIRST_ADDRESS = 0x80000000, LAST_ADDRESS = 0xffffff00;

char *webgpu_reserve(const gpu_buffers *buffers, size_t bytes) {
    uint32_t at = FIRST_ADDRESS;
    for (size_t i = 0; i < buffers->count; i++) {
        uint32_t begin = number(buffers->buffer[i].begin);
        if (begin - at >= bytes) break;
        at = begin + (uint32_t)buffers->buffer[i].bytes;
    }
    /* Before the next buffer, or after the last: LAST_ADDRESS leaves room for at + bytes. */
    return bytes <= LAST_ADDRESS - at ? (char *)(uintptr_t)at : NULL;
}

void webgpu_unreserve(char *begin, size_t bytes) {
    (void)begin, (void)bytes;
}

/* ---- The table --------------------------------------------------------------------------------------- */

vjp_status webgpu_load(vjp_device *device, webgpu_api *api) {
    *api = (webgpu_api){
        .path = "navigator.gpu",
        .AdapterGetInfo = adapter_get_info,
        .AdapterGetLimits = adapter_get_limits,
        .AdapterInfoFreeMembers = adapter_info_free_members,
        .AdapterRelease = release_adapter,
        .AdapterRequestDevice = request_device,
        .BindGroupLayoutRelease = release_BindGroupLayout,
        .BindGroupRelease = release_BindGroup,
        .BufferGetConstMappedRange = mapped_range,
        .BufferMapAsync = map_buffer,
        .BufferRelease = release_buffer,
        .BufferUnmap = unmap_buffer,
        .CommandBufferRelease = release_CommandBuffer,
        .CommandEncoderBeginComputePass = begin_pass,
        .CommandEncoderCopyBufferToBuffer = copy,
        .CommandEncoderFinish = finish,
        .CommandEncoderRelease = release_CommandEncoder,
        .ComputePassEncoderDispatchWorkgroups = dispatch,
        .ComputePassEncoderEnd = end_pass,
        .ComputePassEncoderRelease = release_ComputePassEncoder,
        .ComputePassEncoderSetBindGroup = set_bindings,
        .ComputePassEncoderSetPipeline = set_pipeline,
        .ComputePipelineRelease = release_ComputePipeline,
        .CreateInstance = create_instance,
        .DeviceCreateBindGroup = create_bindings,
        .DeviceCreateBindGroupLayout = create_layout,
        .DeviceCreateBuffer = create_buffer,
        .DeviceCreateCommandEncoder = create_encoder,
        .DeviceCreateComputePipeline = create_pipeline,
        .DeviceCreatePipelineLayout = create_pipeline_layout,
        .DeviceCreateShaderModule = create_shader,
        .DeviceDestroy = destroy_device,
        .DeviceGetLimits = device_get_limits,
        .DeviceGetQueue = get_queue,
        .DevicePopErrorScope = pop_scope,
        .DevicePushErrorScope = push_scope,
        .DeviceRelease = release_device,
        .InstanceProcessEvents = process_events,
        .InstanceRelease = release_instance,
        .InstanceRequestAdapter = request_adapter,
        .PipelineLayoutRelease = release_pipeline_layout,
        .QueueOnSubmittedWorkDone = work_done,
        .QueueRelease = release_queue,
        .QueueSubmit = submit,
        .QueueWriteBuffer = write_buffer,
        .ShaderModuleRelease = release_ShaderModule,
        .SleepUntilEvent = sleep_until_event,
    };
    if (send(NULL, 0)) return VJP_OK;
    return vjp_fail(device, VJP_NO_DEVICE, "%s: the page has not asked for the GPU when it loaded the module",
                    device->name);
}

void webgpu_unload(webgpu_api *api) {
    (void)api;
}
#endif

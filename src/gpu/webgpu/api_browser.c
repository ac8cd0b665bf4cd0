/* SPDX-License-Identifier: MIT */
/*
 * webgpu.h over the browser's navigator.gpu, in place of api.c. A second worker of the page (web/gpu.js) owns the GPU,
 * and this thread may sleep until it has answered, so all of vjp stays what it is: functions that return when they are
 * done. Each function here is a command to that worker (browser.h).
 */
#ifdef __wasi__
#include <stdlib.h>
#include <string.h>

#include "gpu/webgpu/api.h"
#include "gpu/webgpu/browser.h"

/* ---- Opening and closing ----------------------------------------------------------------------------- */

static WGPUInstance create_instance(const WGPUInstanceDescriptor *descriptor) {
    (void)descriptor;
    return (WGPUInstance)browser_ring(); /* any object: there is one instance */
}

static WGPUFuture request_adapter(WGPUInstance instance, const WGPURequestAdapterOptions *options,
                                  WGPURequestAdapterCallbackInfo info) {
    (void)instance, (void)options;
    browser_device *d = browser_device_open();
    if (!d) {
        info.callback(WGPURequestAdapterStatus_Error, NULL, browser_text("out of memory"), info.userdata1,
                      info.userdata2);
        return (WGPUFuture){0};
    }
    browser_pending p = {ON_ADAPTER, d, (void (*)(void))info.callback, info.userdata1, info.userdata2};
    uint32_t token = browser_expect(&p);
    if (token)
        PUT(ADAPTER, token, browser_number(d), browser_number(&d->has), browser_number(browser_ring()));
    else
        browser_device_close(d);
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
    info->device = browser_text(((const browser_device *)adapter)->has.name);
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
    browser_pending p = {ON_DEVICE, d, (void (*)(void))info.callback, info.userdata1, info.userdata2};
    d->on_error = descriptor->uncapturedErrorCallbackInfo;
    d->on_lost = descriptor->deviceLostCallbackInfo;
    uint32_t token = browser_expect(&p);
    if (token)
        PUT(DEVICE, token, browser_number(d), (uint32_t)want->maxStorageBufferBindingSize,
            (uint32_t)want->maxBufferSize, want->maxStorageBuffersPerShaderStage);
    return (WGPUFuture){0};
}

static WGPUQueue get_queue(WGPUDevice device) {
    return (WGPUQueue)device;
}

static void destroy_device(WGPUDevice device) {
    PUT(DESTROY, browser_number(device));
    browser_send(NULL, 0);
}

/* The adapter, the device and its queue are one here; the adapter is released last. */
static void release_adapter(WGPUAdapter adapter) {
    browser_device_close((browser_device *)adapter);
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
            d->on_error.callback(&device, WGPUErrorType_OutOfMemory,
                                 browser_text("the module has no memory for a buffer"), d->on_error.userdata1,
                                 d->on_error.userdata2);
        return NULL;
    }
    b->device = d;
    b->object = browser_new_object();
    PUT(BUFFER, browser_number(d), browser_number(b->object), (uint32_t)descriptor->size, (uint32_t)descriptor->usage);
    return (WGPUBuffer)b;
}

static uint32_t buffer_number(WGPUBuffer buffer) {
    return browser_number(((browser_buffer *)buffer)->object);
}

static void release(void *object) {
    PUT(RELEASE, browser_number(object));
}

static void release_buffer(WGPUBuffer buffer) {
    browser_buffer *b = (browser_buffer *)buffer;
    release(b->object);
    free(b->mapped);
    free(b);
}

static void write_buffer(WGPUQueue queue, WGPUBuffer buffer, uint64_t offset, const void *data, size_t bytes) {
    PUT(WRITE, browser_number(queue), buffer_number(buffer), (uint32_t)offset);
    browser_send(data, bytes);
}

static WGPUFuture map_buffer(WGPUBuffer buffer, WGPUMapMode mode, size_t offset, size_t bytes,
                             WGPUBufferMapCallbackInfo info) {
    browser_buffer *b = (browser_buffer *)buffer;
    (void)mode;
    browser_pending p = {ON_MAP, b->device, (void (*)(void))info.callback, info.userdata1, info.userdata2};
    uint32_t token = browser_expect(&p);
    if (token)
        PUT(MAP, token, browser_number(b->device), browser_number(b->object), (uint32_t)offset, (uint32_t)bytes,
            browser_number((char *)b->mapped + offset));
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
    void *object = browser_new_object();
    PUT(SHADER, browser_number(device), browser_number(object));
    browser_send(source->code.data,
                 source->code.length == WGPU_STRLEN ? strlen(source->code.data) : source->code.length);
    return object;
}

static WGPUBindGroupLayout create_layout(WGPUDevice device, const WGPUBindGroupLayoutDescriptor *descriptor) {
    void *object = browser_new_object();
    uint32_t command[BROWSER_LONGEST] = {LAYOUT, browser_number(device), browser_number(object),
                                         (uint32_t)descriptor->entryCount};
    size_t count = 4;
    for (size_t i = 0; i < descriptor->entryCount && count + 3 <= BROWSER_LONGEST; i++) {
        const WGPUBindGroupLayoutEntry *entry = &descriptor->entries[i];
        command[count++] = (uint32_t)entry->buffer.type;
        command[count++] = entry->buffer.hasDynamicOffset;
        command[count++] = (uint32_t)entry->buffer.minBindingSize;
    }
    browser_put(command, count);
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
    void *object = browser_new_object();
    PUT(PIPELINE, browser_number(device), browser_number(object), browser_number(descriptor->layout),
        browser_number(descriptor->compute.module));
    return object;
}

static WGPUBindGroup create_bindings(WGPUDevice device, const WGPUBindGroupDescriptor *descriptor) {
    void *object = browser_new_object();
    uint32_t command[BROWSER_LONGEST] = {BIND, browser_number(device), browser_number(object),
                                         browser_number(descriptor->layout), (uint32_t)descriptor->entryCount};
    size_t count = 5;
    for (size_t i = 0; i < descriptor->entryCount && count + 4 <= BROWSER_LONGEST; i++) {
        const WGPUBindGroupEntry *entry = &descriptor->entries[i];
        command[count++] = entry->binding;
        command[count++] = buffer_number(entry->buffer);
        command[count++] = (uint32_t)entry->offset;
        command[count++] = (uint32_t)entry->size;
    }
    browser_put(command, count);
    return object;
}

/* ---- Encoding ---------------------------------------------------------------------------------------- */

static WGPUCommandEncoder create_encoder(WGPUDevice device, const WGPUCommandEncoderDescriptor *descriptor) {
    (void)descriptor;
    void *object = browser_new_object();
    PUT(ENCODER, browser_number(device), browser_number(object));
    return object;
}

static WGPUComputePassEncoder begin_pass(WGPUCommandEncoder encoder, const WGPUComputePassDescriptor *descriptor) {
    (void)descriptor;
    void *object = browser_new_object();
    PUT(PASS, browser_number(encoder), browser_number(object));
    return object;
}

static void set_pipeline(WGPUComputePassEncoder pass, WGPUComputePipeline pipeline) {
    PUT(SET_PIPELINE, browser_number(pass), browser_number(pipeline));
}

/* With one offset, that of the parameters. */
static void set_bindings(WGPUComputePassEncoder pass, uint32_t group, WGPUBindGroup bindings, size_t count,
                         const uint32_t *offsets) {
    (void)group, (void)count;
    PUT(SET_BIND, browser_number(pass), browser_number(bindings), offsets[0]);
}

static void dispatch(WGPUComputePassEncoder pass, uint32_t x, uint32_t y, uint32_t z) {
    PUT(DISPATCH, browser_number(pass), x, y, z);
}

static void end_pass(WGPUComputePassEncoder pass) {
    PUT(END, browser_number(pass));
}

static void copy(WGPUCommandEncoder encoder, WGPUBuffer from, uint64_t first, WGPUBuffer to, uint64_t at,
                 uint64_t bytes) {
    PUT(COPY, browser_number(encoder), buffer_number(from), (uint32_t)first, buffer_number(to), (uint32_t)at,
        (uint32_t)bytes);
}

static WGPUCommandBuffer finish(WGPUCommandEncoder encoder, const WGPUCommandBufferDescriptor *descriptor) {
    (void)descriptor;
    void *object = browser_new_object();
    PUT(FINISH, browser_number(encoder), browser_number(object));
    return object;
}

static void submit(WGPUQueue queue, size_t count, const WGPUCommandBuffer *commands) {
    for (size_t i = 0; i < count; i++)
        PUT(SUBMIT, browser_number(queue), browser_number(commands[i]));
    browser_send(NULL, 0);
}

static WGPUFuture work_done(WGPUQueue queue, WGPUQueueWorkDoneCallbackInfo info) {
    browser_pending p = {ON_WORK, (browser_device *)queue, (void (*)(void))info.callback, info.userdata1,
                         info.userdata2};
    uint32_t token = browser_expect(&p);
    if (token) PUT(WORK_DONE, token, browser_number(queue));
    return (WGPUFuture){0};
}

static void push_scope(WGPUDevice device, WGPUErrorFilter filter) {
    PUT(PUSH_SCOPE, browser_number(device), (uint32_t)filter);
}

/* Without a callback the scope is popped all the same. */
static WGPUFuture pop_scope(WGPUDevice device, WGPUPopErrorScopeCallbackInfo info) {
    browser_pending p = {ON_SCOPE, (browser_device *)device, (void (*)(void))info.callback, info.userdata1,
                         info.userdata2};
    uint32_t token = browser_expect(&p);
    PUT(POP_SCOPE, token, browser_number(device));
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
        uint32_t begin = browser_number(buffers->buffer[i].begin);
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
        .InstanceProcessEvents = browser_process_events,
        .InstanceRelease = release_instance,
        .InstanceRequestAdapter = request_adapter,
        .PipelineLayoutRelease = release_pipeline_layout,
        .QueueOnSubmittedWorkDone = work_done,
        .QueueRelease = release_queue,
        .QueueSubmit = submit,
        .QueueWriteBuffer = write_buffer,
        .ShaderModuleRelease = release_ShaderModule,
        .SleepUntilEvent = browser_sleep_until_event,
    };
    if (browser_send(NULL, 0)) return VJP_OK;
    return vjp_fail(device, VJP_NO_DEVICE, "%s: the page has not asked for the GPU when it loaded the module",
                    device->name);
}

void webgpu_unload(webgpu_api *api) {
    (void)api;
}
#endif

/* SPDX-License-Identifier: MIT */
/*
 * The implementation of webgpu.h: wgpu-native or Dawn, found when a device is opened as a shared library or in an
 * installed Python wheel (api.c; nothing of it is linked), or the browser's (api_browser.c).
 */
#ifndef VJP_WEBGPU_API_H
#define VJP_WEBGPU_API_H

#include <webgpu.h>

#include "core/core.h"
#include "gpu/buffers.h"

/* The functions that are called: wgpu<Name>, of the type WGPUProc<Name>. */
#define WEBGPU_FUNCTIONS(X)                                                                                            \
    X(AdapterGetInfo)                                                                                                  \
    X(AdapterGetLimits)                                                                                                \
    X(AdapterInfoFreeMembers)                                                                                          \
    X(AdapterRelease)                                                                                                  \
    X(AdapterRequestDevice)                                                                                            \
    X(BindGroupLayoutRelease)                                                                                          \
    X(BindGroupRelease)                                                                                                \
    X(BufferGetConstMappedRange)                                                                                       \
    X(BufferMapAsync)                                                                                                  \
    X(BufferRelease)                                                                                                   \
    X(BufferUnmap)                                                                                                     \
    X(CommandBufferRelease)                                                                                            \
    X(CommandEncoderBeginComputePass)                                                                                  \
    X(CommandEncoderCopyBufferToBuffer)                                                                                \
    X(CommandEncoderFinish)                                                                                            \
    X(CommandEncoderRelease)                                                                                           \
    X(ComputePassEncoderDispatchWorkgroups)                                                                            \
    X(ComputePassEncoderEnd)                                                                                           \
    X(ComputePassEncoderRelease)                                                                                       \
    X(ComputePassEncoderSetBindGroup)                                                                                  \
    X(ComputePassEncoderSetPipeline)                                                                                   \
    X(ComputePipelineRelease)                                                                                          \
    X(CreateInstance)                                                                                                  \
    X(DeviceCreateBindGroup)                                                                                           \
    X(DeviceCreateBindGroupLayout)                                                                                     \
    X(DeviceCreateBuffer)                                                                                              \
    X(DeviceCreateCommandEncoder)                                                                                      \
    X(DeviceCreateComputePipeline)                                                                                     \
    X(DeviceCreatePipelineLayout)                                                                                      \
    X(DeviceCreateShaderModule)                                                                                        \
    X(DeviceDestroy)                                                                                                   \
    X(DeviceGetLimits)                                                                                                 \
    X(DeviceGetQueue)                                                                                                  \
    X(DevicePopErrorScope)                                                                                             \
    X(DevicePushErrorScope)                                                                                            \
    X(DeviceRelease)                                                                                                   \
    X(InstanceProcessEvents)                                                                                           \
    X(InstanceRelease)                                                                                                 \
    X(InstanceRequestAdapter)                                                                                          \
    X(PipelineLayoutRelease)                                                                                           \
    X(QueueOnSubmittedWorkDone)                                                                                        \
    X(QueueRelease)                                                                                                    \
    X(QueueSubmit)                                                                                                     \
    X(QueueWriteBuffer)                                                                                                \
    X(ShaderModuleRelease)

typedef struct webgpu_api {
    void *library;
    char path[256]; /* as it was found */
#define X(name) WGPUProc##name name;
    WEBGPU_FUNCTIONS(X)
#undef X
    /* wgpu-native's own: waits for a submission or for all, where others must be polled. NULL elsewhere. */
    WGPUBool (*DevicePoll)(WGPUDevice device, WGPUBool wait, const uint64_t *submission);
    uint64_t (*QueueSubmitForIndex)(WGPUQueue queue, size_t count, const WGPUCommandBuffer *commands);
    /* The browser's own: sleeps until InstanceProcessEvents has something to call. NULL elsewhere. */
    void (*SleepUntilEvent)(void);
} webgpu_api;

vjp_status webgpu_load(vjp_device *device, webgpu_api *api);
void webgpu_unload(webgpu_api *api);

/*
 * Addresses for a new buffer beside the others, a multiple of 256 bytes, which nothing is mapped to: a host that
 * follows such a pointer faults at once. NULL: none are left.
 */
char *webgpu_reserve(const gpu_buffers *buffers, size_t bytes);
void webgpu_unreserve(char *begin, size_t bytes);

/* A string as the API takes it. */
static inline WGPUStringView webgpu_text(const char *text) {
    return (WGPUStringView){text, WGPU_STRLEN};
}

#endif

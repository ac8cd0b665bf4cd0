/* SPDX-License-Identifier: MIT */
/*
 * Memory of a WebGPU device: buffers, and copies to, from and within them. WebGPU moves whole words and maps no buffer
 * that kernels use; any byte can be moved all the same.
 */
#include <stdio.h>
#include <string.h>

#include "gpu/webgpu/device.h"

enum {
    STAGED = 64 << 20, /* bytes of a transfer at once: the implementation keeps a copy of them */
    COPIED = 32 << 20  /* bytes that a kernel copies at once: every device can bind two such ranges */
};

WGPUBuffer webgpu_make_buffer(webgpu_state *state, uint64_t bytes, WGPUBufferUsage usage) {
    WGPUBufferDescriptor descriptor = {.usage = usage, .size = bytes};
    return state->api.DeviceCreateBuffer(state->device, &descriptor);
}

vjp_status webgpu_alloc(vjp_device *device, size_t bytes, void **data) {
    webgpu_state *state = webgpu_of(device);
    vjp_status status = webgpu_result(device, "running");
    if (status != VJP_OK) return status;
    uint64_t rounded = bytes > SIZE_MAX - 256 ? UINT64_MAX : ((uint64_t)bytes + 255) / 256 * 256;
    if (!rounded) rounded = 256;
    if (rounded > state->limits.maxBufferSize) {
        char why[96];
        snprintf(why, sizeof why, "a buffer of this device holds at most %llu",
                 (unsigned long long)state->limits.maxBufferSize);
        return gpu_buffers_full(device, bytes, why);
    }
    char *begin = webgpu_reserve(&state->buffers, (size_t)rounded);
    if (!begin) return gpu_buffers_full(device, bytes, "no addresses are left");
    char message[WEBGPU_MESSAGE] = "";
    state->api.DevicePushErrorScope(state->device, WGPUErrorFilter_OutOfMemory);
    WGPUBuffer buffer =
        webgpu_make_buffer(state, rounded, WGPUBufferUsage_Storage | WGPUBufferUsage_CopySrc | WGPUBufferUsage_CopyDst);
    webgpu_pop_scope(state, message, sizeof message);
    if (message[0] || state->failed || state->lost || !buffer) {
        webgpu_unreserve(begin, (size_t)rounded);
        if (buffer) state->api.BufferRelease(buffer);
        status = webgpu_result(device, "allocating");
        return status != VJP_OK ? status : gpu_buffers_full(device, bytes, message);
    }
    if (!gpu_buffers_add(&state->buffers, (gpu_buffer){begin, rounded, buffer})) {
        webgpu_unreserve(begin, (size_t)rounded);
        state->api.BufferRelease(buffer);
        return gpu_buffers_full(device, bytes, "the host has none");
    }
    *data = begin;
    return VJP_OK;
}

/* What was encoded keeps its buffers alive until it has run. */
void webgpu_free(vjp_device *device, void *data) {
    webgpu_state *state = webgpu_of(device);
    const gpu_buffer *found = gpu_buffers_find(&state->buffers, data);
    if (!found || found->begin != (char *)data) return;
    state->api.BufferRelease(found->handle);
    webgpu_unreserve(found->begin, (size_t)found->bytes);
    gpu_buffers_remove(&state->buffers, found);
}

/* WebGPU writes whole words, so a kernel writes the bytes of an incomplete one. They must all be of one word. */
static vjp_status upload_part(vjp_device *device, const char *to, const unsigned char *host, size_t bytes) {
    uintptr_t from = (uintptr_t)to % 4;
    uint32_t mask = 0, value = 0;
    for (size_t i = 0; i < bytes; i++) {
        mask |= 0xffu << 8 * (from + i);
        value |= (uint32_t)host[i] << 8 * (from + i);
    }
    gpu_launch l = {.shader = "tools", .kernel = "part"};
    gpu_words(&l, "to", to - from, 4, true);
    gpu_u32(&l, mask);
    gpu_u32(&l, value);
    return webgpu_enqueue(device, &l, 1);
}

vjp_status webgpu_upload(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes) {
    webgpu_state *state = webgpu_of(device);
    const gpu_buffer *buffer;
    uint64_t first;
    if (!bytes) return webgpu_result(device, "running");
    vjp_status status = gpu_buffers_range(&state->buffers, device, "uploading", data, offset, bytes, &buffer, &first);
    if (status != VJP_OK) return status;
    size_t head = (size_t)(-first & 3);
    if (head > bytes) head = bytes;
    size_t tail = (bytes - head) % 4, middle = bytes - head - tail;
    const unsigned char *from = host;
    const char *to = (const char *)data + offset;
    if (head) status = upload_part(device, to, from, head);
    if (tail && status == VJP_OK) status = upload_part(device, to + bytes - tail, from + bytes - tail, tail);
    if (status == VJP_OK) status = webgpu_submit(device);
    for (size_t at = 0; at < middle && status == VJP_OK; at += STAGED) {
        state->api.QueueWriteBuffer(state->queue, buffer->handle, first + head + at, from + head + at,
                                    middle - at < STAGED ? middle - at : STAGED);
        status = webgpu_result(device, "uploading");
    }
    return status;
}

/* Through a buffer that the host can map. */
vjp_status webgpu_read_words(vjp_device *device, WGPUBuffer buffer, uint64_t first, uint64_t words, void *host,
                             size_t skip, size_t bytes) {
    webgpu_state *state = webgpu_of(device);
    const webgpu_api *api = &state->api;
    if (state->read_back_bytes < words * 4) {
        if (state->read_back) api->BufferRelease(state->read_back);
        state->read_back_bytes = (words * 4 + 65535) / 65536 * 65536;
        state->read_back =
            webgpu_make_buffer(state, state->read_back_bytes, WGPUBufferUsage_MapRead | WGPUBufferUsage_CopyDst);
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
    webgpu_answer a = {.state = state};
    WGPUBufferMapCallbackInfo info = {
        .mode = WGPUCallbackMode_AllowProcessEvents, .callback = webgpu_on_mapped, .userdata1 = &a};
    api->BufferMapAsync(state->read_back, WGPUMapMode_Read, 0, (size_t)words * 4, info);
    webgpu_wait(state, &a.done, NULL);
    if (!a.object) return webgpu_result(device, "mapping");
    const char *mapped = api->BufferGetConstMappedRange(state->read_back, 0, (size_t)words * 4);
    if (mapped) memcpy(host, mapped + skip, bytes);
    api->BufferUnmap(state->read_back);
    if (!mapped) return vjp_fail(device, VJP_DEVICE_FAILED, "%s: mapping: no memory came back", device->name);
    return webgpu_result(device, "downloading");
}

vjp_status webgpu_download(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes) {
    const gpu_buffer *buffer;
    uint64_t first;
    if (!bytes) return webgpu_result(device, "running");
    vjp_status status =
        gpu_buffers_range(&webgpu_of(device)->buffers, device, "downloading", data, offset, bytes, &buffer, &first);
    for (size_t at = 0; at < bytes && status == VJP_OK; at += STAGED) {
        size_t length = bytes - at < STAGED ? bytes - at : STAGED;
        uint64_t begin = (first + at) / 4 * 4, end = (first + at + length + 3) / 4 * 4;
        status = webgpu_read_words(device, buffer->handle, begin, (end - begin) / 4, (char *)host + at,
                                   (size_t)(first + at - begin), length);
    }
    return status;
}

/* By a kernel, because WebGPU's own copy refuses two ranges of one buffer; in parts that every device can bind. */
vjp_status webgpu_copy(vjp_device *device, void *to, const void *from, size_t bytes) {
    vjp_status status = VJP_OK;
    if (bytes % 4 || (uintptr_t)to % 4 || (uintptr_t)from % 4)
        return vjp_fail(device, VJP_UNSUPPORTED, "%s: a copy of %zu bytes; it must be of whole words", device->name,
                        bytes);
    for (size_t at = 0; at < bytes && status == VJP_OK; at += COPIED) {
        size_t length = bytes - at < COPIED ? bytes - at : COPIED;
        gpu_launch l = {.shader = "tools", .kernel = "copy"};
        gpu_words(&l, "to", (char *)to + at, length, true);
        gpu_words(&l, "from", (const char *)from + at, length, false);
        gpu_u32(&l, (int64_t)(length / 4));
        status = webgpu_enqueue(device, &l, vjp_divide_up((int64_t)(length / 4), GPU_THREADS));
    }
    return status;
}

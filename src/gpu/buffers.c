/* SPDX-License-Identifier: MIT */
/* See buffers.h. */
#include "gpu/buffers.h"

#include <stdlib.h>
#include <string.h>

bool gpu_buffers_add(gpu_buffers *buffers, gpu_buffer buffer) {
    if (buffers->count == buffers->room) {
        size_t room = buffers->room ? buffers->room * 2 : 64;
        gpu_buffer *grown = realloc(buffers->buffer, room * sizeof *grown);
        if (!grown) return false;
        buffers->buffer = grown;
        buffers->room = room;
    }
    size_t at = buffers->count++;
    for (; at > 0 && buffers->buffer[at - 1].begin > buffer.begin; at--)
        buffers->buffer[at] = buffers->buffer[at - 1];
    buffers->buffer[at] = buffer;
    return true;
}

const gpu_buffer *gpu_buffers_find(const gpu_buffers *buffers, const void *address) {
    size_t low = 0, high = buffers->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const gpu_buffer *p = &buffers->buffer[middle];
        if ((const char *)address < p->begin)
            high = middle;
        else if ((const char *)address >= p->begin + p->bytes)
            low = middle + 1;
        else
            return p;
    }
    return NULL;
}

const gpu_buffer *gpu_buffers_hold(const gpu_buffers *buffers, const char *address, uint64_t bytes, uint64_t *first) {
    const gpu_buffer *b = gpu_buffers_find(buffers, address);
    *first = b ? (uint64_t)(address - b->begin) : 0;
    return b && bytes <= b->bytes - *first ? b : NULL;
}

void gpu_buffers_remove(gpu_buffers *buffers, const gpu_buffer *buffer) {
    size_t at = (size_t)(buffer - buffers->buffer);
    memmove(&buffers->buffer[at], &buffers->buffer[at + 1], (--buffers->count - at) * sizeof buffers->buffer[0]);
}

vjp_status gpu_buffers_range(const gpu_buffers *buffers, vjp_device *device, const char *doing, const void *data,
                             uint64_t offset, size_t bytes, const gpu_buffer **buffer, uint64_t *first) {
    const gpu_buffer *p = *buffer = gpu_buffers_find(buffers, data);
    if (!p) return vjp_fail(device, VJP_INVALID, "%s: %s: %p is not memory of this device", device->name, doing, data);
    *first = (uint64_t)((const char *)data - p->begin) + offset;
    if (offset <= p->bytes && *first <= p->bytes && bytes <= p->bytes - *first) return VJP_OK;
    return vjp_fail(device, VJP_INVALID, "%s: %s: %zu bytes at %llu run past a buffer of %llu", device->name, doing,
                    bytes, (unsigned long long)*first, (unsigned long long)p->bytes);
}

vjp_status gpu_buffers_full(vjp_device *device, size_t bytes, const char *why) {
    return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for %zu bytes: %s", device->name, bytes, why);
}

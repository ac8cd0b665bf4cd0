/* SPDX-License-Identifier: MIT */
/*
 * The buffers of a device, by address: a tensor's pointer says which buffer it lies in, and where. For backends whose
 * API names buffers by handles.
 */
#ifndef VJP_GPU_BUFFERS_H
#define VJP_GPU_BUFFERS_H

#include "core/core.h"

typedef struct gpu_buffer {
    char *begin;
    uint64_t bytes;
    void *handle;
} gpu_buffer;

typedef struct gpu_buffers {
    gpu_buffer *buffer; /* by rising address */
    size_t count, room;
} gpu_buffers;

/* False: no memory. */
bool gpu_buffers_add(gpu_buffers *buffers, gpu_buffer buffer);

/* The buffer that an address lies in; NULL: none. */
const gpu_buffer *gpu_buffers_find(const gpu_buffers *buffers, const void *address);

/* The buffer that holds all of `bytes` bytes from `address`, and the first one's offset in it; NULL: none. */
const gpu_buffer *gpu_buffers_hold(const gpu_buffers *buffers, const char *address, uint64_t bytes, uint64_t *first);

/* Removes one that gpu_buffers_find() returned. */
void gpu_buffers_remove(gpu_buffers *buffers, const gpu_buffer *buffer);

/* The buffer of a transfer and its first byte in it, or a refusal with the numbers. */
vjp_status gpu_buffers_range(const gpu_buffers *buffers, vjp_device *device, const char *doing, const void *data,
                             uint64_t offset, size_t bytes, const gpu_buffer **buffer, uint64_t *first);

/* Refuses an allocation. */
vjp_status gpu_buffers_full(vjp_device *device, size_t bytes, const char *why);

#endif

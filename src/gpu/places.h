/*
 * The buffers of a device by their addresses: a tensor's pointer says which buffer it lies in, and where. For backends
 * whose API knows buffers by handles.
 */
#ifndef VJP_GPU_PLACES_H
#define VJP_GPU_PLACES_H

#include "core/core.h"

typedef struct gpu_place {
    char *begin;
    uint64_t bytes;
    void *buffer; /* the handle */
} gpu_place;

typedef struct gpu_places {
    gpu_place *place; /* by rising address */
    size_t count, room;
} gpu_places;

/* False: no memory. */
bool gpu_places_add(gpu_places *places, gpu_place place);

/* Where an address lies; NULL: in none of them. */
const gpu_place *gpu_places_find(const gpu_places *places, const void *address);

/* Takes one out that find() returned. */
void gpu_places_remove(gpu_places *places, const gpu_place *place);

/* The buffer of a transfer and its first byte in it, or a refusal that names the numbers. */
vjp_status gpu_places_span(const gpu_places *places, vjp_device *device, const char *doing, const void *data,
                           uint64_t offset, size_t bytes, const gpu_place **place, uint64_t *first);

/*
 * Whether every tensor of a call lies in memory of the device, and has no more than `most` bytes; else a refusal. A
 * call may be several launches, and what is refused must be so before the first. `parts`: the call's launches see
 * parts.
 */
vjp_status gpu_places_hold(const gpu_places *places, const vjp_work *work, uint64_t most, bool parts);

#endif

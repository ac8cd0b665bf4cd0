/* See places.h. */
#include "gpu/places.h"

#include <stdlib.h>
#include <string.h>

#include "op/op.h"

bool gpu_places_add(gpu_places *places, gpu_place place) {
    if (places->count == places->room) {
        size_t room = places->room ? places->room * 2 : 64;
        gpu_place *grown = realloc(places->place, room * sizeof *grown);
        if (!grown) return false;
        places->place = grown;
        places->room = room;
    }
    size_t at = places->count++;
    for (; at > 0 && places->place[at - 1].begin > place.begin; at--)
        places->place[at] = places->place[at - 1];
    places->place[at] = place;
    return true;
}

const gpu_place *gpu_places_find(const gpu_places *places, const void *address) {
    size_t low = 0, high = places->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const gpu_place *p = &places->place[middle];
        if ((const char *)address < p->begin)
            high = middle;
        else if ((const char *)address >= p->begin + p->bytes)
            low = middle + 1;
        else
            return p;
    }
    return NULL;
}

void gpu_places_remove(gpu_places *places, const gpu_place *place) {
    size_t at = (size_t)(place - places->place);
    memmove(&places->place[at], &places->place[at + 1], (--places->count - at) * sizeof places->place[0]);
}

vjp_status gpu_places_span(const gpu_places *places, vjp_device *device, const char *doing, const void *data,
                           uint64_t offset, size_t bytes, const gpu_place **place, uint64_t *first) {
    const gpu_place *p = *place = gpu_places_find(places, data);
    if (!p) return vjp_fail(device, VJP_INVALID, "%s: %s: %p is no memory of this device", device->name, doing, data);
    *first = (uint64_t)((const char *)data - p->begin) + offset;
    if (offset <= p->bytes && *first <= p->bytes && bytes <= p->bytes - *first) return VJP_OK;
    return vjp_fail(device, VJP_INVALID, "%s: %s: %zu bytes at %llu run past a buffer of %llu", device->name, doing,
                    bytes, (unsigned long long)*first, (unsigned long long)p->bytes);
}

vjp_status gpu_places_hold(const gpu_places *places, const vjp_work *work, uint64_t most, bool parts) {
    for (size_t i = 0; i < work->op->info.pass[work->pass].count; i++) {
        const char *address = vjp_data(work, (int)i);
        uint64_t bytes = (uint64_t)vjp_elements(work, (int)i) * vjp_dtype_size(vjp_type(work, (int)i));
        if (!address || !bytes) continue;
        const char *name = vjp_slot_at(work, (int)i)->name;
        const gpu_place *p = gpu_places_find(places, address);
        if (!p || bytes > p->bytes - (uint64_t)(address - p->begin))
            return vjp_refuse(work, VJP_INVALID, "%s does not lie in memory of this device: vjp_alloc() it there",
                              name);
        if (bytes > most && !parts)
            return vjp_refuse(work, VJP_UNSUPPORTED, "%s has %llu bytes; this device binds at most %llu", name,
                              (unsigned long long)bytes, (unsigned long long)most);
    }
    return VJP_OK;
}

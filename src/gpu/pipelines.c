/* SPDX-License-Identifier: MIT */
/* See pipelines.h. */
#include "gpu/pipelines.h"

#include <stdlib.h>
#include <string.h>

#include "core/system.h"

enum { SLOTS = 4096 };

uint64_t gpu_hash(const char *bytes, size_t count) {
    uint64_t hash = UINT64_C(14695981039346656037);
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ (unsigned char)bytes[i]) * UINT64_C(1099511628211);
    return hash;
}

void gpu_one_line(const char *message, size_t length, char *text, size_t room) {
    size_t to = 0;
    bool space = true;
    for (size_t i = 0; i < length && to + 1 < room; i++) {
        bool blank = message[i] == ' ' || message[i] == '\n' || message[i] == '\t';
        if (!blank || !space) text[to++] = blank ? ' ' : message[i];
        space = blank;
    }
    text[to] = 0;
}

bool gpu_pipelines_open(gpu_pipelines *p, gpu_counts *counts) {
    *p = (gpu_pipelines){.slot = calloc(SLOTS, sizeof *p->slot), .counts = counts};
    return p->slot;
}

bool gpu_pipelines_are_many(const gpu_pipelines *p) {
    return p->count > SLOTS / 2;
}

/* The slot that has the key, or a free one. */
static gpu_pipeline *slot_of(const gpu_pipelines *p, const char *key, size_t bytes) {
    size_t at = gpu_hash(key, bytes) % SLOTS;
    while (p->slot[at].key && (p->slot[at].key_bytes != bytes || memcmp(p->slot[at].key, key, bytes) != 0))
        at = (at + 1) % SLOTS;
    return &p->slot[at];
}

vjp_status gpu_pipelines_find(vjp_device *device, gpu_pipelines *p, const char *key, size_t bytes,
                              gpu_make_pipeline make, const void *what, const gpu_pipeline **found) {
    gpu_pipeline *slot = slot_of(p, key, bytes);
    *found = slot;
    if (slot->key) return VJP_OK;
    char *kept = malloc(bytes);
    if (!kept) return vjp_fail(device, VJP_OUT_OF_MEMORY, "%s: no memory for a pipeline", device->name);
    gpu_pipeline made = {0};
    double begin = system_seconds();
    vjp_status status = make(device, what, &made);
    p->counts->pipeline_seconds += system_seconds() - begin;
    if (status != VJP_OK) {
        free(kept);
        return status;
    }
    made.key = memcpy(kept, key, bytes);
    made.key_bytes = bytes;
    *slot = made;
    p->count++;
    p->counts->pipelines++;
    return VJP_OK;
}

void gpu_pipelines_forget(gpu_pipelines *p, void (*release)(const void *state, const gpu_pipeline *),
                          const void *state) {
    for (size_t i = 0; i < SLOTS && p->slot; i++) {
        if (!p->slot[i].key) continue;
        release(state, &p->slot[i]);
        free(p->slot[i].key);
        p->slot[i] = (gpu_pipeline){0};
    }
    p->count = 0;
}

void gpu_pipelines_close(gpu_pipelines *p) {
    free(p->slot);
}

/*
 * The pipelines that a device has made, by what tells one from another. A table of fixed size: keys come from the ops'
 * own choices, so there are some hundreds; a device that meets more than half of what it holds lets all go and begins
 * anew.
 */
#ifndef VJP_GPU_PIPELINES_H
#define VJP_GPU_PIPELINES_H

#include "core/core.h"

typedef struct gpu_pipeline {
    char *key; /* NULL: free */
    size_t key_bytes;
    void *pipeline;
    void *layout;               /* of its bindings; WebGPU's */
    unsigned long most_threads; /* of a group; Metal's */
} gpu_pipeline;

typedef struct gpu_pipelines {
    gpu_pipeline *slot;
    size_t count;
} gpu_pipelines;

/* False: there is no memory for it. */
bool gpu_pipelines_open(gpu_pipelines *p);

bool gpu_pipelines_are_many(const gpu_pipelines *p);

/* Fills in all but the key. */
typedef vjp_status (*gpu_make_pipeline)(vjp_device *device, const void *what, gpu_pipeline *made);

/* The pipeline with this key, made from `what` where there is none. */
vjp_status gpu_pipelines_find(vjp_device *device, gpu_pipelines *p, const char *key, size_t bytes,
                              gpu_make_pipeline make, const void *what, const gpu_pipeline **found);

void gpu_pipelines_forget(gpu_pipelines *p, void (*release)(const void *state, const gpu_pipeline *),
                          const void *state);

/* After they are forgotten. */
void gpu_pipelines_close(gpu_pipelines *p);

uint64_t gpu_hash(const char *bytes, size_t count);

/* What a compiler or a driver said, on one line: runs of white space become one blank. */
void gpu_one_line(const char *said, size_t length, char *text, size_t room);

#endif

/* SPDX-License-Identifier: MIT */
/*
 * The pipelines that a device has made, found by a key: all that one pipeline differs from another by. A hash table of
 * fixed size: keys come from the ops' own choices, so there are a few hundred. A device that reaches 2048 releases them
 * all and starts again.
 */
#ifndef VJP_GPU_PIPELINES_H
#define VJP_GPU_PIPELINES_H

#include "gpu/gpu.h"

typedef struct gpu_pipeline {
    char *key; /* NULL: free */
    size_t key_bytes;
    void *pipeline;
    void *layout;              /* of its bindings; WebGPU's */
    unsigned long max_threads; /* of a group; Metal's */
} gpu_pipeline;

typedef struct gpu_pipelines {
    gpu_pipeline *slot;
    size_t count;
    gpu_counts *counts; /* the device's */
} gpu_pipelines;

/* False: there is no memory for it. */
bool gpu_pipelines_open(gpu_pipelines *p, gpu_counts *counts);

/* Whether the table is so full that it should be released before the next one. */
bool gpu_pipelines_are_many(const gpu_pipelines *p);

/* Fills in all but the key. */
typedef vjp_status (*gpu_make_pipeline)(vjp_device *device, const void *what, gpu_pipeline *made);

/* The pipeline with this key, made from `what` where there is none. */
vjp_status gpu_pipelines_find(vjp_device *device, gpu_pipelines *p, const char *key, size_t bytes,
                              gpu_make_pipeline make, const void *what, const gpu_pipeline **found);

/* Empties the table; `release` releases one pipeline. */
void gpu_pipelines_forget(gpu_pipelines *p, void (*release)(const void *state, const gpu_pipeline *),
                          const void *state);

/* Frees the table, which must be empty. */
void gpu_pipelines_close(gpu_pipelines *p);

uint64_t gpu_hash(const char *bytes, size_t count);

/* The message of a compiler or a driver on one line: runs of white space become one blank. */
void gpu_one_line(const char *message, size_t length, char *text, size_t room);

#endif

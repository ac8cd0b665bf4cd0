/* SPDX-License-Identifier: MIT */
/* One launch for those of many calls of an op: which launches are one, and in which order they run. See merge.c. */
#ifndef VJP_GPU_MERGE_H
#define VJP_GPU_MERGE_H

#include "gpu/gpu.h"

/* A row of a merged launch; a launch that is alone has one, too. */
typedef struct gpu_row {
    const gpu_launch *launch;
    uint32_t base[GPU_MAX_OPERANDS]; /* where its operands begin, in the backend's own unit */
    uint32_t groups, first;          /* workgroups, and those of the rows before */
} gpu_row;

typedef struct gpu_gathered gpu_gathered;

/* What a device has for it: the backend sets the first three, and frees the lists by gpu_merger_close(). */
typedef struct gpu_merger {
    gpu_mode *mode; /* the device's */
    vjp_status (*enqueue)(vjp_device *device, const gpu_launch *l, int64_t groups);
    /*
     * Encodes rows as one dispatch of `groups` workgroups, in GPU_WARM only makes its pipeline. The operands of `all`
     * reach from the first row's place in memory to the last one's. False, and nothing done: the device cannot.
     */
    bool (*together)(vjp_device *device, const gpu_launch *all, gpu_row *row, int rows, uint32_t groups,
                     vjp_status *status);
    gpu_gathered *gathered; /* [room] */
    gpu_row *rows;          /* [room] */
    int count, room, call, stage;
} gpu_merger;

/* Whether calls of this pass are worth merging: vjp_backend.merges. */
int gpu_merges_calls(const vjp_device *device, const vjp_op *op, vjp_pass pass);

/* Keeps a launch for the merging that is under way: what a backend does in GPU_GATHER. */
vjp_status gpu_gather_launch(vjp_device *device, gpu_merger *merger, const gpu_launch *l, int64_t groups);

/* Merges the launches of calls, in mode GPU_RUN or GPU_WARM. */
vjp_status gpu_merge_calls(gpu_merger *merger, const vjp_work *const *works, size_t count, gpu_mode mode);

void gpu_merger_close(gpu_merger *merger);

#endif

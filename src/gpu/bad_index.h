/* SPDX-License-Identifier: MIT */
/*
 * Bad values among indices (an index outside the table, a position past rope's tables, a saved argmax outside its
 * plane, a first key of attention that decreases, a step of adamw below 1), which only the device sees: the record that
 * kernels write, one for each op and pass, and the sentence that vjp_synchronize() returns for it.
 */
#ifndef VJP_GPU_BAD_INDEX_H
#define VJP_GPU_BAD_INDEX_H

#include "gpu/gpu.h"

enum { GPU_BAD_INDEX_RECORDS = VJP_OP_COUNT * VJP_PASS_COUNT };

/* The first bad index of a pass, as the device writes it. All ones: none. */
typedef struct gpu_bad_index {
    uint32_t position;
    uint32_t explained; /* the position whose value `low` and `high` are */
    uint32_t low, high;
} gpu_bad_index;

/* What the host must remember of a pass for its sentence. */
typedef struct gpu_bad_index_context {
    int64_t first[GPU_BAD_INDEX_RECORDS], limit[GPU_BAD_INDEX_RECORDS];
    int32_t index_dtype[GPU_BAD_INDEX_RECORDS];
} gpu_bad_index_context;

/* The record that a launch reports to; -1: it reports nothing. */
int gpu_bad_index_record(const gpu_launch *l);

/* Remembers the valid range and the dtype of the indices of a launch that is encoded. */
void gpu_bad_index_remember(gpu_bad_index_context *context, const gpu_launch *l);

/* VJP_OK, or VJP_INVALID with a sentence for the first record that has a bad index. */
vjp_status gpu_bad_index_report(const gpu_bad_index_context *context, vjp_device *device, const gpu_bad_index *record);

#endif

/* SPDX-License-Identifier: MIT */
/*
 * What a Metal device holds, and what its files provide. Each file uses only those above it:
 *
 *     objc.c     sends Objective-C messages
 *     launch.c   makes pipelines, encodes launches, commits and waits
 *     device.c   opens, moves memory, synchronises; the table that the library loads
 *
 * Calls are encoded into one command buffer, which is committed when it is full and by whatever waits. CPU and GPU
 * share the memory of buffers: the pointer that vjp_alloc() gives is the buffer's own, and the host may read and write
 * there once the device has been waited for.
 */
#ifndef VJP_METAL_DEVICE_H
#define VJP_METAL_DEVICE_H

#include "gpu/bad_index.h"
#include "gpu/buffers.h"
#include "gpu/gpu.h"
#include "gpu/merge.h"
#include "gpu/metal/objc.h"
#include "gpu/pipelines.h"

enum {
    METAL_LAUNCHES = 256,               /* of a command buffer */
    METAL_COMMITTED = 16,               /* command buffers that run at once */
    METAL_KEY = 256,                    /* bytes of a pipeline's key */
    METAL_LIBRARIES = VJP_OP_COUNT + 3, /* one per shader: those of the ops, sums, tools and raw_product */
    METAL_OPERANDS = 28,                /* that a shader may list; also their buffer numbers */
    METAL_UNIFORMS = 30,                /* the number of the buffer with the uniforms */
    METAL_FIRST_NUMBER = 32,            /* function constants: operands from 0, numbers from here */
    METAL_NUMBERS = 16,                 /* that a shader may list */
    METAL_MERGED = 48,                  /* the function constant that says how launches are merged */
    METAL_BASES = 12,                   /* operands of a merged launch, the shader's first ones */
    METAL_ROW_BYTES = 128,              /* of a merged launch's uniforms: those, and 16 parameters */
    METAL_ROWS = 32,                    /* of a merged launch: an encoder copies up to 4 KiB of uniforms */
    METAL_NAME = 32,                    /* of an operand or number, at most */
    METAL_GRID_WIDTH = 1 << 16,         /* groups in a row of the grid: the GPU counts a row's threads in 32 bits */
};

/* A compiled shader, and the names that its text lists. */
typedef struct metal_library {
    const char *shader; /* NULL: free */
    objc_id library;
    char operand[METAL_OPERANDS][METAL_NAME];
    int operands;
    char number[METAL_NUMBERS][METAL_NAME];
    int numbers;
} metal_library;

typedef struct metal_state {
    objc objc;
    objc_id device, queue;
    uint64_t max_bytes;
    int threads;   /* of a threadgroup, where an op may choose */
    bool matrices; /* simdgroups multiply them, see gpu_has_matrices() */
    gpu_buffers buffers;

    metal_library library[METAL_LIBRARIES];
    gpu_pipelines pipelines;
    gpu_mode mode;
    gpu_merger merger;
    gpu_counts counts;

    objc_id commands, encoder; /* being encoded */
    int launches;
    objc_id committed[METAL_COMMITTED]; /* oldest first */
    int committed_count;
    uint64_t finished; /* how many were finished before these */

    objc_id bad_indices; /* gpu_bad_index[GPU_BAD_INDEX_RECORDS]; also bound where an operand is absent */
    gpu_bad_index *record;
    bool may_have_bad_index;
    gpu_bad_index_context bad_index_context;
} metal_state;

static inline metal_state *metal_of(const vjp_device *device) {
    return device->state;
}

/* An autorelease pool around messages that return objects of others. */
static inline void *metal_begin(const metal_state *state) {
    return state->objc.system.push_pool();
}

static inline void metal_end(const metal_state *state, void *pool) {
    state->objc.system.pop_pool(pool);
}

/* ---- launch.c ---------------------------------------------------------------------------------------- */

/* Encodes a launch, or does what the device's mode says. gpu_enqueue() for launches of ops. */
vjp_status metal_enqueue(vjp_device *device, const gpu_launch *l, int64_t groups);

/* gpu_merger.together: where each operand of all rows lies in one buffer. */
bool metal_together(vjp_device *device, const gpu_launch *all, gpu_row *row, int rows, uint32_t groups,
                    vjp_status *status);

/* Commits what was encoded. */
vjp_status metal_commit(vjp_device *device);

/* How many command buffers were committed so far. */
uint64_t metal_committed(const vjp_device *device);

/* Waits for the first `committed` of them. What failed is a status. */
vjp_status metal_wait_for(vjp_device *device, uint64_t committed);

/* Commits, and waits for everything. */
vjp_status metal_wait(vjp_device *device);

/* How many threads a threadgroup of the simplest kernel may have, and a simdgroup has. */
vjp_status metal_probe(vjp_device *device, unsigned long *threads, unsigned long *width);

void metal_release_pipelines(metal_state *state);
void metal_release_libraries(metal_state *state);

/* The text of src/gpu/shaders/<name>.metal with what it includes; NULL: there is none. */
const char *metal_shader(const char *name);

#endif

/*
 * What a Metal device holds, and how its files work together: objc.c sends messages, device.c opens the device and
 * moves memory, launch.c makes pipelines and encodes. Calls are encoded into one command buffer, which is committed
 * when it is full and by whatever waits. Buffers are memory that CPU and GPU share: the pointer that vjp_alloc() gives
 * is the buffer's own, the host may read and write there whenever the device has been waited for.
 */
#ifndef VJP_METAL_DEVICE_H
#define VJP_METAL_DEVICE_H

#include "gpu/findings.h"
#include "gpu/gpu.h"
#include "gpu/metal/objc.h"
#include "gpu/pipelines.h"
#include "gpu/places.h"

enum {
    METAL_LAUNCHES = 128,       /* of a command buffer */
    METAL_COMMITTED = 16,       /* command buffers that are under way at once */
    METAL_KEY = 256,            /* bytes that tell one pipeline from another */
    METAL_LIBRARIES = 16,       /* a shader each */
    METAL_OPERANDS = 28,        /* that a shader may list: their numbers are those of Metal's buffers */
    METAL_UNIFORMS = 30,        /* the number of the last buffer, which has them */
    METAL_FIRST_NUMBER = 32,    /* function constants: operands from 0, numbers from here */
    METAL_NUMBERS = 16,         /* that a shader may list */
    METAL_NAME = 32,            /* of an operand or number, at most */
    METAL_GRID_WIDTH = 1 << 16, /* groups a row of the grid: the GPU counts a row's threads in 32 bits */
};

/* A shader's lists, as its text has them, and its library. */
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
    uint64_t most_bytes;
    int threads; /* of a threadgroup, where the cut may choose */
    gpu_places places;

    metal_library library[METAL_LIBRARIES];
    gpu_pipelines pipelines;

    objc_id commands, encoder; /* under way */
    int launches;
    objc_id committed[METAL_COMMITTED]; /* oldest first */
    int committed_count;

    objc_id findings; /* gpu_record[GPU_RECORDS]; bound too where an operand is absent */
    gpu_record *record;
    bool may_have_found;
    gpu_findings_asked asked;
} metal_state;

static inline metal_state *metal_of(const vjp_device *device) {
    return device->state;
}

/* An autorelease pool round what sends messages that return what is not ours. */
static inline void *metal_begin(const metal_state *state) {
    return state->objc.system.push_pool();
}

static inline void metal_end(const metal_state *state, void *pool) {
    state->objc.system.pop_pool(pool);
}

/* Encodes a launch. */
vjp_status metal_enqueue(vjp_device *device, const gpu_launch *l, int64_t groups);

/* Commits what was encoded. */
vjp_status metal_commit(vjp_device *device);

/* Commits, waits for all, and says what failed. */
vjp_status metal_wait(vjp_device *device);

/* How many threads a pipeline of a shader that does little may have. */
vjp_status metal_probe(vjp_device *device, unsigned long *threads);

/* Lets go of pipelines and libraries. */
void metal_forget_pipelines(metal_state *state);
void metal_forget_libraries(metal_state *state);

/* The text of src/gpu/shaders/<name>.metal with what it includes; NULL: there is none. */
const char *metal_shader(const char *name);

#endif

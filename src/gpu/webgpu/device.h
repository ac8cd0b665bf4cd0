/*
 * What a WebGPU device holds, and how its files work together: api.c finds the implementation, device.c opens it and
 * moves memory, source.c writes a launch's WGSL, launch.c makes pipelines and encodes. Calls are encoded into one
 * command buffer that is submitted when it is full, and by every upload, download and synchronise.
 */
#ifndef VJP_WEBGPU_DEVICE_H
#define VJP_WEBGPU_DEVICE_H

#include "gpu/findings.h"
#include "gpu/gpu.h"
#include "gpu/pipelines.h"
#include "gpu/places.h"
#include "gpu/webgpu/api.h"

enum {
    WEBGPU_MESSAGE = 400,
    WEBGPU_PARAMS = 256,   /* bytes of a launch's uniforms: what every device can bind at an offset */
    WEBGPU_LAUNCHES = 256, /* of a submission */
    WEBGPU_KEY = 640
};

typedef struct webgpu_state {
    webgpu_api api;
    WGPUInstance instance;
    WGPUAdapter adapter;
    WGPUDevice device;
    WGPUQueue queue;
    WGPULimits limits;
    bool lost, failed;            /* and why: */
    char message[WEBGPU_MESSAGE]; /* the implementation's own words */

    /*
     * Buffers. A place is a range of addresses that nothing is mapped to: pointer arithmetic, overlaps and offsets work
     * as on every device, and a host that follows such a pointer faults at once. Multiples of 256 bytes.
     */
    gpu_places places;

    gpu_pipelines pipelines;

    /* The submission under way. */
    WGPUCommandEncoder encoder;
    WGPUComputePassEncoder pass;
    WGPUBuffer params;
    unsigned char *param_bytes; /* [WEBGPU_LAUNCHES][WEBGPU_PARAMS] */
    int launches;

    WGPUBuffer read_back;
    uint64_t read_back_bytes;

    WGPUBuffer findings; /* gpu_record[GPU_RECORDS] */
    bool may_have_found;
    gpu_findings_asked asked;
} webgpu_state;

static inline webgpu_state *webgpu_of(const vjp_device *device) {
    return device->state;
}

/* The status of the implementation's last words: VJP_OK, or DEVICE_FAILED with them. */
vjp_status webgpu_result(vjp_device *device, const char *doing);

/* What the implementation said, on one line. */
void webgpu_words(WGPUStringView said, char *text, size_t room);

/* Ends the innermost error scope; "" in `message` if all went well within it, else the implementation's words. */
void webgpu_pop_scope(webgpu_state *state, char *message, size_t room);

/* Submits what was encoded. */
vjp_status webgpu_submit(vjp_device *device);

/* Ends the compute pass under way, if there is one, so that something else can be encoded. */
void webgpu_end_pass(webgpu_state *state);

/* Lets go of every pipeline. */
void webgpu_forget_pipelines(webgpu_state *state);

/* Encodes a launch that is no op's: tools.wgsl. */
vjp_status webgpu_enqueue(vjp_device *device, const gpu_launch *l, int64_t groups);

/* ---- A launch's source ------------------------------------------------------------------------------- */

/* A piece of memory that a launch sees: one binding. */
typedef struct webgpu_window {
    WGPUBuffer buffer;
    const gpu_place *of;   /* NULL: the findings */
    uint64_t begin, bytes; /* in the buffer */
    bool written, atomic;
} webgpu_window;

typedef struct webgpu_view {
    const gpu_launch *launch;
    webgpu_window window[GPU_MOST_WINDOWS + 1];
    int windows;
    int window_of[GPU_MOST_OPERANDS]; /* -1: absent */
    uint32_t base[GPU_MOST_OPERANDS]; /* first element, in elements from the window's begin */
} webgpu_view;

/* The whole WGSL of a launch, to be freed; NULL: no memory. Depends on nothing but what webgpu_key() writes. */
char *webgpu_source(const webgpu_view *view);

/* What tells one pipeline from another. Returns its length; 0: it does not fit. */
size_t webgpu_key(const webgpu_view *view, char key[WEBGPU_KEY]);

/* The text of src/gpu/shaders/<name>.wgsl; NULL: there is none. */
const char *webgpu_shader(const char *name);

#endif

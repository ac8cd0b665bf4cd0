/* SPDX-License-Identifier: MIT */
/*
 * What a WebGPU device holds, and what its files provide. Each file uses only those above it:
 *
 *     api.c      finds the implementation of webgpu.h; api_browser.c is that of a browser, by
 *                browser.c
 *     errors.c   keeps what the implementation reports, waits for its callbacks
 *     source.c   writes the WGSL of a launch
 *     launch.c   makes pipelines, encodes launches, submits
 *     merge.c    makes one launch of those of many calls, which gpu/merge.c chooses
 *     memory.c   allocates, uploads, downloads, copies
 *     events.c   marks points of the queue, downloads late, synchronises
 *     device.c   opens and closes; the table that the library loads
 *
 * Calls are encoded into one command buffer, which is submitted when it is full and by every upload, download and
 * synchronise.
 */
#ifndef VJP_WEBGPU_DEVICE_H
#define VJP_WEBGPU_DEVICE_H

#include "gpu/bad_index.h"
#include "gpu/buffers.h"
#include "gpu/gpu.h"
#include "gpu/merge.h"
#include "gpu/pipelines.h"
#include "gpu/webgpu/api.h"

enum {
    WEBGPU_MESSAGE = 400,
    WEBGPU_PARAMS = 256,   /* bytes of a launch's uniforms: what every device can bind at an offset */
    WEBGPU_LAUNCHES = 256, /* of a submission */
    WEBGPU_KEY = 640
};

typedef struct webgpu_event webgpu_event;

typedef struct webgpu_state {
    webgpu_api api;
    WGPUInstance instance;
    WGPUAdapter adapter;
    WGPUDevice device;
    WGPUQueue queue;
    WGPULimits limits;
    int64_t max_iterations; /* of a thread's loops, all together; 0: as many as there are */
    bool lost, failed;
    char message[WEBGPU_MESSAGE]; /* why, as the implementation says it */

    /*
     * A buffer has a range of addresses that nothing is mapped to, of a multiple of 256 bytes: pointer arithmetic,
     * overlaps and offsets work as on every device, and a host that follows such a pointer faults at once.
     */
    gpu_buffers buffers;

    gpu_pipelines pipelines;
    gpu_mode mode;
    gpu_counts counts;
    gpu_merger merger;

    /* The submission that is being encoded. */
    WGPUCommandEncoder encoder;
    WGPUComputePassEncoder pass;
    WGPUBuffer params;
    unsigned char *param_bytes; /* [WEBGPU_LAUNCHES][WEBGPU_PARAMS] */
    int launches;

    uint64_t submission;       /* the last one; 0 where the implementation does not number them */
    webgpu_event *next_event;  /* what is downloaded before it is recorded */
    webgpu_event *events;      /* recorded and not finished, oldest first */
    webgpu_event *kept_events; /* whose callbacks never came: the device was lost */
    WGPUBuffer free_staging;

    WGPUBuffer read_back;
    uint64_t read_back_bytes;

    WGPUBuffer bad_indices; /* gpu_bad_index[GPU_BAD_INDEX_RECORDS] */
    bool may_have_bad_index;
    gpu_bad_index_context bad_index_context;
} webgpu_state;

static inline webgpu_state *webgpu_of(const vjp_device *device) {
    return device->state;
}

/* ---- errors.c ---------------------------------------------------------------------------------------- */

/* Keeps a message of the implementation, if it is the first. */
void webgpu_keep_message(webgpu_state *state, WGPUStringView message);

/* VJP_OK, or VJP_DEVICE_FAILED with the message that was kept. */
vjp_status webgpu_result(vjp_device *device, const char *doing);

/* Callbacks of a device; `first` is its webgpu_state. */
void webgpu_on_error(const WGPUDevice *device, WGPUErrorType type, WGPUStringView message, void *first, void *second);
void webgpu_on_lost(const WGPUDevice *device, WGPUDeviceLostReason reason, WGPUStringView message, void *first,
                    void *second);

/* What a callback sets that something waits for. */
typedef struct webgpu_answer {
    bool done;
    void *object; /* NULL: it failed */
    webgpu_state *state;
} webgpu_answer;

/* Callbacks that set a webgpu_answer. */
void webgpu_on_mapped(WGPUMapAsyncStatus status, WGPUStringView message, void *first, void *second);
void webgpu_on_work_done(WGPUQueueWorkDoneStatus status, WGPUStringView message, void *first, void *second);

/*
 * Lets callbacks run until `done`, which comes when `submission` has run, or everything where that is NULL or not
 * numbered. False: the device was lost instead.
 */
bool webgpu_wait(webgpu_state *state, const bool *done, const uint64_t *submission);

/* Ends the innermost error scope; "" in `message` if there was no error in it, else the implementation's message. */
void webgpu_pop_scope(webgpu_state *state, char *message, size_t room);

/* ---- source.c ---------------------------------------------------------------------------------------- */

/* A range of a buffer that a launch sees: one binding. */
typedef struct webgpu_window {
    WGPUBuffer buffer;
    const gpu_buffer *of;  /* NULL: bad_indices */
    uint64_t begin, bytes; /* in the buffer */
    bool written, atomic;
} webgpu_window;

/* A launch and where its operands are. */
typedef struct webgpu_view {
    const gpu_launch *launch;
    webgpu_window window[GPU_MAX_WINDOWS];
    int windows;
    int window_of[GPU_MAX_OPERANDS]; /* -1: absent */
    uint32_t base[GPU_MAX_OPERANDS]; /* first element, in elements from the window's begin */
    bool merged;                     /* parameters come from rows of a table; the launch says how they are merged */
} webgpu_view;

/* The whole WGSL of a launch, to be freed; NULL: no memory. Depends on nothing but what webgpu_key() writes. */
char *webgpu_source(const webgpu_view *view);

/* The key of the launch's pipeline. Returns its length; 0: it does not fit. */
size_t webgpu_key(const webgpu_view *view, char key[WEBGPU_KEY]);

/* The text of src/gpu/shaders/<name>.wgsl; NULL: there is none. */
const char *webgpu_shader(const char *name);

/* ---- launch.c ---------------------------------------------------------------------------------------- */

/* Encodes a launch, or does what the device's mode says. gpu_enqueue() for launches of ops. */
vjp_status webgpu_enqueue(vjp_device *device, const gpu_launch *l, int64_t groups);

/* Finds the windows of a launch, or refuses it. */
vjp_status webgpu_find_windows(vjp_device *device, const gpu_launch *l, webgpu_view *view);

/* Encodes `rows` rows of a view as one dispatch of `groups` workgroups; in GPU_WARM only its pipeline is made. */
vjp_status webgpu_encode(vjp_device *device, const webgpu_view *view, const gpu_row *row, int rows, uint32_t groups);

/* Ends the compute pass, if one is open, so that something else can be encoded. */
void webgpu_end_pass(webgpu_state *state);

/* Submits what was encoded. */
vjp_status webgpu_submit(vjp_device *device);

void webgpu_release_pipelines(webgpu_state *state);

/* ---- merge.c ----------------------------------------------------------------------------------------- */

/* gpu_merger.together */
bool webgpu_together(vjp_device *device, const gpu_launch *all, gpu_row *row, int rows, uint32_t groups,
                     vjp_status *status);

vjp_status webgpu_run_many(const vjp_work *const *works, size_t count);
vjp_status webgpu_warm_many(const vjp_work *const *works, size_t count);

/* ---- memory.c ---------------------------------------------------------------------------------------- */

WGPUBuffer webgpu_make_buffer(webgpu_state *state, uint64_t bytes, WGPUBufferUsage usage);

vjp_status webgpu_alloc(vjp_device *device, size_t bytes, void **data);
void webgpu_free(vjp_device *device, void *data);
vjp_status webgpu_upload(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes);
vjp_status webgpu_download(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes);
vjp_status webgpu_copy(vjp_device *device, void *to, const void *from, size_t bytes);

/* Submits, waits, and reads `words` words of a buffer; bytes [skip, skip + bytes) of them go to `host`. */
vjp_status webgpu_read_words(vjp_device *device, WGPUBuffer buffer, uint64_t first, uint64_t words, void *host,
                             size_t skip, size_t bytes);

/* ---- events.c ---------------------------------------------------------------------------------------- */

vjp_status webgpu_download_async(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes);
vjp_status webgpu_event_create(vjp_device *device, void **event);
vjp_status webgpu_event_wait(vjp_device *device, void *event);
void webgpu_event_destroy(vjp_device *device, void *event);
vjp_status webgpu_synchronize(vjp_device *device);

/* Before the device is closed, and after no callback can come. */
void webgpu_release_events(webgpu_state *state);
void webgpu_free_events(webgpu_state *state);

/* ---- device.c ---------------------------------------------------------------------------------------- */

vjp_status webgpu_clear_bad_indices(vjp_device *device);

#endif

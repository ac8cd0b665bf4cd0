/* SPDX-License-Identifier: MIT */
/*
 * A backend that stands for CUDA where there is no GPU: test_gpu_arrays.py builds it as libvjp-cuda. Its memory is the
 * host's, `scale` needs workspace, `mul` takes a number and merges calls, and everything that happens is written to a
 * log that the test reads with fake_log().
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vjp_backend.h"

static const vjp_backend_host *vjp;
static char lines[1 << 16];
static int devices;

static void say(const char *format, ...) {
    size_t used = strlen(lines);
    va_list list;
    va_start(list, format);
    vsnprintf(lines + used, sizeof lines - used, format, list);
    va_end(list);
}

const char *fake_log(void);
void fake_clear(void);

const char *fake_log(void) {
    return lines;
}

void fake_clear(void) {
    lines[0] = 0;
}

typedef struct state {
    int number;
    void *stream;
} state;

static vjp_status fake_open(vjp_device *device, const vjp_options *options) {
    (void)options;
    state *s = calloc(1, sizeof *s);
    if (!s) return vjp->fail(device, VJP_OUT_OF_MEMORY, "no memory");
    s->number = devices++;
    vjp->set_state(device, s);
    say("open %s\n", vjp->name(device));
    return VJP_OK;
}

static void fake_close(vjp_device *device) {
    free(vjp->state(device));
}

static int64_t count_of(const vjp_shape *shape) {
    int64_t count = 1;
    for (int i = 0; i < shape->ndim; i++)
        count *= shape->size[i];
    return count;
}

static void *data_of(const vjp_tensor *tensor) {
    return (char *)tensor->data + tensor->offset;
}

static size_t scale_workspace(const vjp_work *work) {
    return (size_t)count_of(&work->shape[1]) * sizeof(float);
}

/* By way of the workspace, so that a wrong one gives wrong results. */
static vjp_status scale(const vjp_work *work) {
    const vjp_scale_attributes *attributes = work->attributes;
    int64_t count = count_of(&work->shape[1]);
    const state *s = vjp->state(work->device);
    float *between = work->workspace, *y = data_of(work->tensor[0]);
    const float *x = data_of(work->tensor[1]);
    say("scale device %d stream %p workspace %p\n", s->number, s->stream, work->workspace);
    if (attributes->factor == 7) return vjp->refuse(work, VJP_DEVICE_FAILED, "seven is refused");
    for (int64_t i = 0; i < count; i++)
        between[i] = (float)attributes->factor * x[i];
    for (int64_t i = 0; i < count; i++)
        y[i] = between[i] + (work->tensor[0]->flags & VJP_ACCUMULATE ? y[i] : 0);
    return VJP_OK;
}

static vjp_status mul(const vjp_work *work) {
    float *y = data_of(work->tensor[0]);
    const float *a = data_of(work->tensor[1]), *b = data_of(work->tensor[2]);
    int64_t count = count_of(&work->shape[1]), count_b = count_of(&work->shape[2]);
    for (int64_t i = 0; i < count; i++)
        y[i] = a[i] * b[i % count_b];
    return VJP_OK;
}

static const vjp_kernel scale_kernels[] = {{scale, scale_workspace, VJP_BIT_F32},
                                           {scale, scale_workspace, VJP_BIT_F32}};
static const vjp_kernel mul_kernel = {mul, NULL, VJP_BIT_F32};

static const vjp_kernel *fake_kernel(const vjp_device *device, const vjp_op *op, vjp_pass pass) {
    (void)device;
    const char *name = vjp->describe(op)->name;
    if (strcmp(name, "scale") == 0) return &scale_kernels[pass];
    return strcmp(name, "mul") == 0 && pass == VJP_FORWARD ? &mul_kernel : NULL;
}

static int fake_merges(const vjp_device *device, const vjp_op *op, vjp_pass pass) {
    (void)device, (void)pass;
    const char *name = vjp->describe(op)->name;
    return strcmp(name, "mul") == 0 || strcmp(name, "scale") == 0;
}

static vjp_status fake_run_many(const vjp_work *const *works, size_t count) {
    say("%s of %zu\n", vjp->describe(works[0]->op)->name, count);
    for (size_t i = count; i-- > 0;)
        mul(works[i]);
    return VJP_OK;
}

static vjp_status fake_alloc(vjp_device *device, size_t bytes, void **data) {
    *data = NULL;
    void *made = bytes <= (size_t)1 << 30 ? aligned_alloc(64, (bytes + 64) / 64 * 64) : NULL;
    if (!made) return vjp->fail(device, VJP_OUT_OF_MEMORY, "no memory");
    *data = made;
    say("alloc\n");
    return VJP_OK;
}

static void fake_free(vjp_device *device, void *data) {
    (void)device;
    if (data) say("free\n");
    free(data);
}

static vjp_status fake_upload(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes) {
    (void)device;
    say("upload %zu\n", bytes);
    memcpy((char *)data + offset, host, bytes);
    return VJP_OK;
}

static vjp_status fake_download(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes) {
    (void)device;
    memcpy(host, (const char *)data + offset, bytes);
    return VJP_OK;
}

static vjp_status fake_synchronize(vjp_device *device) {
    const state *s = vjp->state(device);
    say("wait stream %p\n", s->stream);
    return VJP_OK;
}

static vjp_status fake_set_stream(vjp_device *device, void *stream) {
    ((state *)vjp->state(device))->stream = stream;
    return VJP_OK;
}

static int fake_count(void) {
    return 2;
}

static vjp_status fake_describe(int index, char *text, size_t bytes) {
    snprintf(text, bytes, "not a GPU, number %d", index);
    return VJP_OK;
}

static const vjp_backend backend = {
    .struct_size = sizeof(vjp_backend),
    .interface_version = VJP_BACKEND_INTERFACE,
    .name = "cuda",
    .open = fake_open,
    .close = fake_close,
    .kernel = fake_kernel,
    .alloc = fake_alloc,
    .free = fake_free,
    .upload = fake_upload,
    .download = fake_download,
    .synchronize = fake_synchronize,
    .set_stream = fake_set_stream,
    .count = fake_count,
    .describe = fake_describe,
    .merges = fake_merges,
    .run_many = fake_run_many,
};

const vjp_backend *vjp_backend_entry(const vjp_backend_host *host);

const vjp_backend *vjp_backend_entry(const vjp_backend_host *host) {
    vjp = host;
    return host->interface_version == VJP_BACKEND_INTERFACE ? &backend : NULL;
}

/* SPDX-License-Identifier: MIT */
/*
 * A backend as a third party would write it, with vjp_backend.h alone: two kernels (scale in both passes and rope's
 * forward, f32) on plain host memory. rope's does not take rows that lie apart. It is built as libvjp-outside and
 * opened by test_backend.c as "outside".
 */
#include <stdlib.h>
#include <string.h>

#include "vjp_backend.h"

static const vjp_backend_host *vjp;

typedef struct state {
    int calls;
} state;

static vjp_status outside_open(vjp_device *device, const vjp_options *options) {
    (void)options;
    if (strcmp(vjp->name(device), "outside:broken") == 0)
        return vjp->fail(device, VJP_NO_DEVICE, "%s: it is broken", vjp->name(device));
    state *s = calloc(1, sizeof *s);
    if (!s) return vjp->fail(device, VJP_OUT_OF_MEMORY, "%s: no memory", vjp->name(device));
    vjp->set_state(device, s);
    vjp->set_summary(device, "two kernels, for tests");
    vjp->log(device, "outside: opening with %d kernels", 2);
    return VJP_OK;
}

static void outside_close(vjp_device *device) {
    free(vjp->state(device));
}

static vjp_status scale(const vjp_work *work) {
    const vjp_scale_attributes *attributes = work->attributes;
    state *s = vjp->state(work->device);
    int64_t count = 1;
    for (int i = 0; i < work->shape[1].ndim; i++)
        count *= work->shape[1].size[i];
    if (count > 1000) return vjp->refuse(work, VJP_UNSUPPORTED, "x has %lld elements", (long long)count);
    s->calls++;
    if (!work->tensor[0]) return VJP_OK;
    float *y = (float *)(void *)((char *)work->tensor[0]->data + work->tensor[0]->offset);
    const float *x = (const float *)(const void *)((const char *)work->tensor[1]->data + work->tensor[1]->offset);
    for (int64_t i = 0; i < count; i++)
        y[i] = (float)attributes->factor * x[i] + (work->tensor[0]->flags & VJP_ACCUMULATE ? y[i] : 0);
    return VJP_OK;
}

/* Whole heads of a packed x, in pairs of halves, at the positions 0, 1, 2, ... */
static vjp_status rope(const vjp_work *work) {
    const vjp_rope_attributes *attributes = work->attributes;
    const int64_t *size = work->shape[1].size;
    if (work->shape[1].ndim != 3 || attributes->n_rot || attributes->pairing != VJP_PAIRING_HALF || work->tensor[4])
        return vjp->refuse(work, VJP_UNSUPPORTED, "only the plain case is here");
    float *data[4];
    for (int i = 0; i < 4; i++)
        data[i] = work->tensor[i] ? (float *)(void *)((char *)work->tensor[i]->data + work->tensor[i]->offset) : NULL;
    int64_t half = size[2] / 2;
    for (int64_t i = 0; data[0] && i < size[0] * size[1] * half; i++) {
        int64_t head = i / half, at = head * size[2] + i % half, angle = head / size[1] * half + i % half;
        float u = data[1][at], v = data[1][at + half], cosine = data[2][angle], sine = data[3][angle];
        float add = work->tensor[0]->flags & VJP_ACCUMULATE ? 1 : 0;
        data[0][at] = u * cosine - v * sine + (add ? data[0][at] : 0);
        data[0][at + half] = u * sine + v * cosine + (add ? data[0][at + half] : 0);
    }
    return VJP_OK;
}

static const vjp_kernel kernels[] = {{scale, NULL, VJP_BIT_F32}, {scale, NULL, VJP_BIT_F32}};
static const vjp_kernel rope_kernel = {rope, NULL, VJP_BIT_F32};

static const vjp_kernel *outside_kernel(const vjp_device *device, const vjp_op *op, vjp_pass pass) {
    (void)device;
    if (strcmp(vjp->describe(op)->name, "rope") == 0 && pass == VJP_FORWARD) return &rope_kernel;
    return strcmp(vjp->describe(op)->name, "scale") == 0 ? &kernels[pass] : NULL;
}

static vjp_status outside_alloc(vjp_device *device, size_t bytes, void **data) {
    *data = bytes <= (size_t)1 << 40 ? calloc(1, bytes ? bytes : 1) : NULL;
    return *data ? VJP_OK : vjp->fail(device, VJP_OUT_OF_MEMORY, "%s: no memory", vjp->name(device));
}

static void outside_free(vjp_device *device, void *data) {
    (void)device;
    free(data);
}

static vjp_status outside_upload(vjp_device *device, void *data, uint64_t offset, const void *host, size_t bytes) {
    (void)device;
    memcpy((char *)data + offset, host, bytes);
    return VJP_OK;
}

static vjp_status outside_download(vjp_device *device, void *host, const void *data, uint64_t offset, size_t bytes) {
    (void)device;
    memcpy(host, (const char *)data + offset, bytes);
    return VJP_OK;
}

static vjp_status outside_synchronize(vjp_device *device) {
    (void)device;
    return VJP_OK;
}

static const vjp_backend backend = {
    .struct_size = sizeof(vjp_backend),
    .interface_version = VJP_BACKEND_INTERFACE,
    .name = "outside",
    .host_memory = 1,
    .open = outside_open,
    .close = outside_close,
    .kernel = outside_kernel,
    .alloc = outside_alloc,
    .free = outside_free,
    .upload = outside_upload,
    .download = outside_download,
    .synchronize = outside_synchronize,
};

const vjp_backend *vjp_backend_entry(const vjp_backend_host *host);

const vjp_backend *vjp_backend_entry(const vjp_backend_host *host) {
    vjp = host;
    return host->interface_version == VJP_BACKEND_INTERFACE ? &backend : NULL;
}

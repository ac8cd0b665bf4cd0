/* SPDX-License-Identifier: MIT */
/* The reference device: no threads, no state, a table of kernels. */
#include <stdio.h>

#include "ref/ref.h"

static const vjp_kernel *const kernels[VJP_OP_COUNT] = {
#define OP(name, family, cuda, gpu) vjp_ref_##name,
#include "op/ops.def"
};

static vjp_status ref_open(vjp_device *device, const vjp_options *options) {
    (void)options;
    snprintf(device->summary, sizeof device->summary, "plain loops in double, 1 thread");
    return VJP_OK;
}

static void ref_close(vjp_device *device) {
    (void)device;
}

static const vjp_kernel *ref_kernel(const vjp_device *device, const vjp_op *op, vjp_pass pass) {
    (void)device;
    return &kernels[op->id][pass];
}

const vjp_backend vjp_backend_ref = {
    .struct_size = sizeof(vjp_backend),
    .interface_version = VJP_BACKEND_INTERFACE,
    .version = VJP_VERSION,
    .name = "ref",
    .takes_allocator = 1,
    .host_memory = 1,
    .open = ref_open,
    .close = ref_close,
    .kernel = ref_kernel,
    .alloc = vjp_host_alloc,
    .free = vjp_host_free,
    .upload = vjp_host_upload,
    .download = vjp_host_download,
    .synchronize = vjp_host_synchronize,
};

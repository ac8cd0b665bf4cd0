/* The reference device: no threads, no state, a table of kernels. */
#include <stdio.h>

#include "ref/ref.h"

static const vjp_kernel *const kernels[VJP_OP_COUNT] = {
    /* clang-format off */
    [VJP_OP_LAYER_NORM] = vjp_ref_layer_norm,
    [VJP_OP_RMS_NORM] = vjp_ref_rms_norm,
    [VJP_OP_GROUP_NORM] = vjp_ref_group_norm,
    [VJP_OP_ROPE] = vjp_ref_rope,
    [VJP_OP_CUMSUM] = vjp_ref_cumsum,
    [VJP_OP_GATHER] = vjp_ref_gather,
    [VJP_OP_MAXPOOL2D] = vjp_ref_maxpool2d,
    [VJP_OP_LINEAR] = vjp_ref_linear,
    [VJP_OP_ADD] = vjp_ref_add,
    [VJP_OP_MUL] = vjp_ref_mul,
    [VJP_OP_SCALE] = vjp_ref_scale,
    [VJP_OP_MEAN] = vjp_ref_mean,
    [VJP_OP_DROPOUT] = vjp_ref_dropout,
    [VJP_OP_CAST] = vjp_ref_cast,
    [VJP_OP_SUM_SQUARES] = vjp_ref_sum_squares,
    [VJP_OP_CLIP] = vjp_ref_clip,
    [VJP_OP_ADAMW] = vjp_ref_adamw,
    [VJP_OP_SGD] = vjp_ref_sgd,
    [VJP_OP_CROSS_ENTROPY] = vjp_ref_cross_entropy,
    [VJP_OP_SWIGLU] = vjp_ref_swiglu,
    [VJP_OP_ATTENTION] = vjp_ref_attention,
    [VJP_OP_CONV2D] = vjp_ref_conv2d,
    /* clang-format on */
};

static vjp_status ref_open(vjp_device *device, const vjp_options *options) {
    (void)options;
    snprintf(device->summary, sizeof device->summary, "plain loops in double, 1 thread");
    return VJP_OK;
}

static void ref_close(vjp_device *device) {
    (void)device;
}

static const vjp_kernel *ref_kernel(const vjp_device *device, vjp_op_id op, vjp_pass pass) {
    (void)device;
    return kernels[op] ? &kernels[op][pass] : NULL;
}

const vjp_backend vjp_backend_ref = {
    .name = "ref",
    .host_memory = true,
    .open = ref_open,
    .close = ref_close,
    .kernel = ref_kernel,
    .alloc = vjp_host_alloc,
    .free = vjp_host_free,
    .upload = vjp_host_upload,
    .download = vjp_host_download,
    .synchronize = vjp_host_synchronize,
};

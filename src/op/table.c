/* The list of all ops, and how to find one. */
#include <string.h>

#include "op/op.h"

static const vjp_op *const table[VJP_OP_COUNT] = {
    /* clang-format off */
    [VJP_OP_LAYER_NORM] = &vjp_op_layer_norm,
    [VJP_OP_RMS_NORM] = &vjp_op_rms_norm,
    [VJP_OP_GROUP_NORM] = &vjp_op_group_norm,
    [VJP_OP_ROPE] = &vjp_op_rope,
    [VJP_OP_CUMSUM] = &vjp_op_cumsum,
    [VJP_OP_GATHER] = &vjp_op_gather,
    [VJP_OP_MAXPOOL2D] = &vjp_op_maxpool2d,
    [VJP_OP_LINEAR] = &vjp_op_linear,
    [VJP_OP_ADD] = &vjp_op_add,
    [VJP_OP_MUL] = &vjp_op_mul,
    [VJP_OP_SCALE] = &vjp_op_scale,
    [VJP_OP_MEAN] = &vjp_op_mean,
    [VJP_OP_DROPOUT] = &vjp_op_dropout,
    [VJP_OP_CAST] = &vjp_op_cast,
    [VJP_OP_SUM_SQUARES] = &vjp_op_sum_squares,
    [VJP_OP_CLIP] = &vjp_op_clip,
    [VJP_OP_ADAMW] = &vjp_op_adamw,
    [VJP_OP_SGD] = &vjp_op_sgd,
    [VJP_OP_CROSS_ENTROPY] = &vjp_op_cross_entropy,
    [VJP_OP_SWIGLU] = &vjp_op_swiglu,
    [VJP_OP_ATTENTION] = &vjp_op_attention,
    [VJP_OP_CONV2D] = &vjp_op_conv2d,
    /* clang-format on */
};

size_t vjp_op_count(void) {
    return VJP_OP_COUNT;
}

const vjp_op *vjp_op_at(size_t index) {
    return index < VJP_OP_COUNT ? table[index] : NULL;
}

const vjp_op *vjp_op_find(const char *name) {
    for (size_t i = 0; name && i < VJP_OP_COUNT; i++)
        if (strcmp(table[i]->info.name, name) == 0) return table[i];
    return NULL;
}

const vjp_op_info *vjp_op_describe(const vjp_op *op) {
    return op ? &op->info : NULL;
}

/* The kernels of one instruction set, by op. Compiled once for each set. */
#include "cpu/cpu.h"

/* clang-format off */
extern const vjp_kernel CPU_NAME(layer_norm)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(rms_norm)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(group_norm)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(rope)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(cumsum)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(gather)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(maxpool2d)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(linear)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(add)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(mul)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(scale)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(mean)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(dropout)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(cast)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(sum_squares)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(clip)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(adamw)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(sgd)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(cross_entropy)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(swiglu)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(attention)[VJP_PASS_COUNT];
extern const vjp_kernel CPU_NAME(conv2d)[VJP_PASS_COUNT];

extern const vjp_kernel *const CPU_NAME(kernels)[VJP_OP_COUNT];

const vjp_kernel *const CPU_NAME(kernels)[VJP_OP_COUNT] = {
    [VJP_OP_LAYER_NORM] = CPU_NAME(layer_norm),
    [VJP_OP_RMS_NORM] = CPU_NAME(rms_norm),
    [VJP_OP_GROUP_NORM] = CPU_NAME(group_norm),
    [VJP_OP_ROPE] = CPU_NAME(rope),
    [VJP_OP_CUMSUM] = CPU_NAME(cumsum),
    [VJP_OP_GATHER] = CPU_NAME(gather),
    [VJP_OP_MAXPOOL2D] = CPU_NAME(maxpool2d),
    [VJP_OP_LINEAR] = CPU_NAME(linear),
    [VJP_OP_ADD] = CPU_NAME(add),
    [VJP_OP_MUL] = CPU_NAME(mul),
    [VJP_OP_SCALE] = CPU_NAME(scale),
    [VJP_OP_MEAN] = CPU_NAME(mean),
    [VJP_OP_DROPOUT] = CPU_NAME(dropout),
    [VJP_OP_CAST] = CPU_NAME(cast),
    [VJP_OP_SUM_SQUARES] = CPU_NAME(sum_squares),
    [VJP_OP_CLIP] = CPU_NAME(clip),
    [VJP_OP_ADAMW] = CPU_NAME(adamw),
    [VJP_OP_SGD] = CPU_NAME(sgd),
    [VJP_OP_CROSS_ENTROPY] = CPU_NAME(cross_entropy),
    [VJP_OP_SWIGLU] = CPU_NAME(swiglu),
    [VJP_OP_ATTENTION] = CPU_NAME(attention),
    [VJP_OP_CONV2D] = CPU_NAME(conv2d),
};
/* clang-format on */

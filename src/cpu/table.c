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
    [VJP_OP_CONV2D] = CPU_NAME(conv2d),
};
/* clang-format on */

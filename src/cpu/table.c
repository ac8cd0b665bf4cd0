/* SPDX-License-Identifier: MIT */
/* The kernels of one instruction set, by op. Compiled once for each set. */
#include "cpu/cpu.h"
#include "op/op.h"

#define OP(name, family, cuda, gpu) extern const vjp_kernel CPU_NAME(name)[VJP_PASS_COUNT];
#include "op/ops.def"

extern const vjp_kernel *const CPU_NAME(kernels)[VJP_OP_COUNT];

const vjp_kernel *const CPU_NAME(kernels)[VJP_OP_COUNT] = {
#define OP(name, family, cuda, gpu) CPU_NAME(name),
#include "op/ops.def"
};

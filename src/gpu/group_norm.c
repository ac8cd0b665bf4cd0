#include "gpu/gpu.h"
const vjp_kernel gpu_group_norm[VJP_PASS_COUNT] = {{0}};

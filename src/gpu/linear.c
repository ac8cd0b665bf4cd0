#include "gpu/gpu.h"
const vjp_kernel gpu_linear[VJP_PASS_COUNT] = {{0}};

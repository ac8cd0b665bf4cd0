#include "gpu/gpu.h"
const vjp_kernel gpu_maxpool2d[VJP_PASS_COUNT] = {{0}};

#include "gpu/gpu.h"
const vjp_kernel gpu_gather[VJP_PASS_COUNT] = {{0}};

#include "gpu/gpu.h"
const vjp_kernel gpu_rope[VJP_PASS_COUNT] = {{0}};

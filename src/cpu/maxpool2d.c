#include "cpu/cpu.h"
extern const vjp_kernel CPU_NAME(maxpool2d)[VJP_PASS_COUNT];
const vjp_kernel CPU_NAME(maxpool2d)[VJP_PASS_COUNT] = {{0}};

#include "cpu/cpu.h"
extern const vjp_kernel CPU_NAME(linear)[VJP_PASS_COUNT];
const vjp_kernel CPU_NAME(linear)[VJP_PASS_COUNT] = {{0}};

#include "cpu/cpu.h"
extern const vjp_kernel CPU_NAME(gather)[VJP_PASS_COUNT];
const vjp_kernel CPU_NAME(gather)[VJP_PASS_COUNT] = {{0}};

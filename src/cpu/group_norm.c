#include "cpu/cpu.h"
extern const vjp_kernel CPU_NAME(group_norm)[VJP_PASS_COUNT];
const vjp_kernel CPU_NAME(group_norm)[VJP_PASS_COUNT] = {{0}};

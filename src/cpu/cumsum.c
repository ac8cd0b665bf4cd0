#include "cpu/cpu.h"
extern const vjp_kernel CPU_NAME(cumsum)[VJP_PASS_COUNT];
const vjp_kernel CPU_NAME(cumsum)[VJP_PASS_COUNT] = {{0}};

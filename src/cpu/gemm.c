#include "cpu/cpu.h"
extern const int CPU_NAME(gemm_placeholder); const int CPU_NAME(gemm_placeholder)=0;

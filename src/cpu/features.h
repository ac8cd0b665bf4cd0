/* SPDX-License-Identifier: MIT */
/*
 * Which instructions this processor has and the system supports. The compilers' own __builtin_cpu_supports() needs a
 * runtime library that not every one of them brings.
 */
#ifndef VJP_CPU_FEATURES_H
#define VJP_CPU_FEATURES_H

#include <stdbool.h>

bool vjp_cpu_has_avx2(void);   /* all of x86-64-v3, which the set avx2 is compiled for */
bool vjp_cpu_has_avx512(void); /* all of x86-64-v4 */
bool vjp_cpu_has_amx(void);    /* tiles and their bf16 products; the process must also ask for leave */
bool vjp_cpu_has_bf16(void);   /* of aarch64: FMA of bf16 operands, as the set neon uses for products of few rows */

#endif

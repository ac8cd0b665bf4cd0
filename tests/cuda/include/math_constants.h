/* SPDX-License-Identifier: MIT */
#ifndef VJP_TESTS_CUDA_MATH_CONSTANTS_H
#define VJP_TESTS_CUDA_MATH_CONSTANTS_H

#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")
#define CUDART_L2E_F 1.442695041f
#define CUDART_LN2_F 0.693147181f
#define CUDART_INF   __builtin_inf()

#endif

/* SPDX-License-Identifier: MIT */
/*
 * Dispatch by storage type and by store: a kernel is an always-inline function whose first argument is the dtype (and
 * whose second is the write mode), and is compiled once for each value that these macros pass as a constant.
 */
#ifndef VJP_CPU_DISPATCH_H
#define VJP_CPU_DISPATCH_H

#include "cpu/simd/stream.h"

/* kernel(dtype, ...) */
#define BY_DTYPE(dtype, kernel, ...)                                                                                   \
    ((dtype) == VJP_BF16  ? kernel(VJP_BF16, __VA_ARGS__)                                                              \
     : (dtype) == VJP_F16 ? kernel(VJP_F16, __VA_ARGS__)                                                               \
                          : kernel(VJP_F32, __VA_ARGS__))

/* kernel(dtype, mode, ...), where dtype is a constant already */
#define BY_MODE(dtype, mode, kernel, ...)                                                                              \
    (ONE_VARIANT              ? kernel(dtype, mode, __VA_ARGS__)                                                       \
     : (mode) == WRITE_STREAM ? kernel(dtype, WRITE_STREAM, __VA_ARGS__)                                               \
     : (mode) == WRITE_ADD    ? kernel(dtype, WRITE_ADD, __VA_ARGS__)                                                  \
                              : kernel(dtype, WRITE_PLAIN, __VA_ARGS__))

/* kernel(dtype, mode, ...) */
#define BY_DTYPE_AND_MODE(dtype, mode, kernel, ...)                                                                    \
    ((dtype) == VJP_BF16  ? BY_MODE(VJP_BF16, mode, kernel, __VA_ARGS__)                                               \
     : (dtype) == VJP_F16 ? BY_MODE(VJP_F16, mode, kernel, __VA_ARGS__)                                                \
                          : BY_MODE(VJP_F32, mode, kernel, __VA_ARGS__))

#endif

/* SPDX-License-Identifier: MIT */
/* Descriptions of tensors for Hopper's copy engine, which nothing here makes or reads. */
#ifndef VJP_TESTS_CUDA_CUDA_H
#define VJP_TESTS_CUDA_CUDA_H

struct alignas(64) CUtensorMap {
    unsigned long long opaque[16];
};

#endif

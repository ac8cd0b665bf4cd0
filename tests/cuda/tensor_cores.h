/* SPDX-License-Identifier: MIT */
/*
 * The arithmetic of tensor cores. An instruction adds so many products and the sum so far at once: each is truncated to
 * so many binary places behind the leading place of the largest, these numbers are added exactly, and the result is
 * truncated to f32. So long sums drift towards 0, in f16 more than in bf16, whose products have fewer digits.
 *
 * Others found this out by testing single instructions (Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores";
 * Microsoft's MMA-Sim). With Hopper's numbers it gives what an H200 showed: sums of 4096 products of bf16 are 4e-6 off
 * where the factors are around 0, and 1.13e-5 where they are between 0 and 2.
 */
#ifndef VJP_TESTS_CUDA_TENSOR_CORES_H
#define VJP_TESTS_CUDA_TENSOR_CORES_H

#include <cstddef>

namespace emulated {

struct tensor_cores {
    int products; // of 16-bit numbers, which are added at once; of TF32 half as many
    int places;   // that are kept
};
constexpr tensor_cores AMPERE = {8, 24}, HOPPER = {16, 25};

// sums[n] += the sum over k of left[k] right[k * step + n], by one instruction after another.
void add_products(tensor_cores cores, bool tf32, float *sums, int columns, const float *left, const float *right,
                  size_t step, int terms);

} // namespace emulated

#endif

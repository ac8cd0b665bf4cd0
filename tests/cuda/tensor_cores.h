/* SPDX-License-Identifier: MIT */
/*
 * How the tensor cores of a card add. They take so many products and the sum so far at once: each is cut off behind so
 * many binary places of the largest, which are counted from its leading one; what is left is added exactly, and the
 * result is cut off to f32. So long sums drift towards 0, and more so in f16, whose products have more digits than
 * bf16's.
 *
 * Others found these numbers by tests of single instructions (Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor
 * Cores"; Microsoft's MMA-Sim). Those of Hopper give what an H200 showed: sums of 4096 products of bf16 are 4e-6 off
 * where the numbers are around 0, and 1.13e-5 where they are between 0 and 2.
 */
#ifndef VJP_TESTS_CUDA_TENSOR_CORES_H
#define VJP_TESTS_CUDA_TENSOR_CORES_H

#include <cstddef>

namespace emulated {

struct tensor_cores {
    int products; // of 16 bits, which are added at once; of TF32 half as many
    int places;
};
constexpr tensor_cores AMPERE = {8, 24}, HOPPER = {16, 25};

// sums[n] += the sum over k of left[k] right[k * step + n], as one instruction after the other computes it.
void add_products(tensor_cores cores, bool tf32, float *sums, int columns, const float *left, const float *right,
                  size_t step, int terms);

} // namespace emulated

#endif

/* SPDX-License-Identifier: MIT */
/*
 * cast on CUDA: every storage type to every other, at the speed of a copy. The accesses convert, and round to nearest
 * even. The backward is the forward with dy for x.
 */
#include "cuda/elementwise/elementwise.cuh"

namespace vjp {
namespace {

struct same : formula {
    template <int W> __device__ void operator()(int64_t, const float (&in)[1][W], float (&out)[1][W]) const {
#pragma unroll
        for (int k = 0; k < W; k++)
            out[0][k] = in[0][k];
    }
};

vjp_status run(const vjp_work *work) {
    element_call c{.in = {vjp_data(work, CAST_X)},
                   .out = {vjp_data(work, CAST_Y)},
                   .add = {vjp_accumulates(work, CAST_Y)},
                   .count = vjp_elements(work, CAST_Y)};
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        return with_type(vjp_type(work, CAST_Y), [&](auto result) {
            return run_elements(work, same{}, types<T>{}, types<decltype(result)>{}, c);
        });
    });
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_cast[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_cast[VJP_PASS_COUNT] = {
    {vjp::run, nullptr, VJP_STORAGE_16_32},
    {vjp::run, nullptr, VJP_STORAGE_16_32},
};
}

/* SPDX-License-Identifier: MIT */
/* scale on CUDA: y = factor * x, at the speed of a copy. The backward is the forward with dy for x. */
#include "cuda/elementwise/elementwise.cuh"

namespace vjp {
namespace {

struct scaled : formula {
    float factor;

    template <int W> __device__ void operator()(int64_t, const float (&in)[1][W], float (&out)[1][W]) const {
#pragma unroll
        for (int k = 0; k < W; k++)
            out[0][k] = factor * in[0][k];
    }
};

vjp_status run(const vjp_work *work) {
    scaled f{};
    f.factor = (float)static_cast<const vjp_scale_attributes *>(work->attributes)->factor;
    element_call c{.in = {vjp_data(work, SCALE_X)},
                   .out = {vjp_data(work, SCALE_Y)},
                   .add = {vjp_accumulates(work, SCALE_Y)},
                   .count = vjp_elements(work, SCALE_Y)};
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        return run_elements(work, f, types<T>{}, types<T>{}, c);
    });
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_scale[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_scale[VJP_PASS_COUNT] = {
    {vjp::run, nullptr, VJP_STORAGE_16_32},
    {vjp::run, nullptr, VJP_STORAGE_16_32},
};
}

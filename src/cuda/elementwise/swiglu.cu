/* SPDX-License-Identifier: MIT */
/*
 * swiglu on CUDA: y = silu(gate) up; dgate = silu'(gate) dy up, dup = dy silu(gate). One pass, each tensor read or
 * written once; silu and its derivative share one exponential (silu.cuh). The backward gives y again where it is
 * wanted.
 */
#include "cuda/elementwise/elementwise.cuh"
#include "cuda/elementwise/silu.cuh"

namespace vjp {
namespace {

template <class T> struct gated : formula {
    template <int W> __device__ void operator()(int64_t, const float (&in)[2][W], float (&out)[1][W]) const {
#pragma unroll
        for (int k = 0; k < W; k++)
            out[0][k] = gated_value<T>(in[0][k], in[1][k]);
    }
};

/* The third output is y, if there are three. */
template <class T, int OUTPUTS> struct gated_gradients : formula {
    static constexpr int RESIDENT = 6;
    static constexpr bool HAS_OVERWRITE = OUTPUTS == 3;

    template <int W> __device__ void operator()(int64_t, const float (&in)[3][W], float (&out)[OUTPUTS][W]) const {
#pragma unroll
        for (int k = 0; k < W; k++) {
            gated_slopes all = gated_gradient<T>(in[0][k], in[1][k], in[2][k]);
            out[0][k] = all.dgate;
            out[1][k] = all.dup;
            if constexpr (OUTPUTS == 3) out[2][k] = all.y;
        }
    }
};

vjp_status forward(const vjp_work *work) {
    element_call c{.in = {vjp_data(work, SWIGLU_GATE), vjp_data(work, SWIGLU_UP)},
                   .out = {vjp_data(work, SWIGLU_Y)},
                   .add = {vjp_accumulates(work, SWIGLU_Y)},
                   .count = vjp_elements(work, SWIGLU_Y)};
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        return run_elements(work, gated<T>{}, types<T, T>{}, types<T>{}, c);
    });
}

vjp_status backward(const vjp_work *work) {
    element_call c{.in = {vjp_data(work, SWIGLU_B_DY), vjp_data(work, SWIGLU_B_GATE), vjp_data(work, SWIGLU_B_UP)},
                   .out = {vjp_data(work, SWIGLU_B_DGATE), vjp_data(work, SWIGLU_B_DUP), vjp_data(work, SWIGLU_B_Y)},
                   .add = {vjp_accumulates(work, SWIGLU_B_DGATE), vjp_accumulates(work, SWIGLU_B_DUP),
                           vjp_accumulates(work, SWIGLU_B_Y)},
                   .count = vjp_elements(work, SWIGLU_B_DY)};
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        if (c.out[2]) return run_elements(work, gated_gradients<T, 3>{}, types<T, T, T>{}, types<T, T, T>{}, c);
        return run_elements(work, gated_gradients<T, 2>{}, types<T, T, T>{}, types<T, T>{}, c);
    });
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_swiglu[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_swiglu[VJP_PASS_COUNT] = {
    {vjp::forward, nullptr, VJP_STORAGE_16_32},
    {vjp::backward, nullptr, VJP_STORAGE_16_32},
};
}

/* SPDX-License-Identifier: MIT */
/*
 * swiglu on CUDA: y = silu(gate) up; dgate = silu'(gate) dy up, dup = dy silu(gate). One pass, each tensor read or
 * written once; silu and its derivative share one exponential. The backward gives y again where it is wanted.
 */
#include "cuda/elementwise/elementwise.cuh"
#include "cuda/linear/activation.cuh"

namespace vjp {
namespace {

/*
 * Below SILU_TAIL 1 + exp(x) is 1 and exp(x) may be denormal. silu and its slope are then x exp(x) and (1 + x) exp(x),
 * which have more digits than exp(x): the factor is multiplied with exp(x + SHIFT), whose argument is exact, before
 * exp(-SHIFT) makes the result small.
 */
constexpr float SILU_TAIL = -87, SHIFT = 40, EXP_MINUS_SHIFT = 4.248354255291589e-18f;

struct silu_values {
    float value, slope;
};

__device__ inline silu_values silu_of(float x) {
    float near = clamped(x, LOGISTIC_END);
    if (x < SILU_TAIL) {
        float e = expf(near + SHIFT);
        return {near * e * EXP_MINUS_SHIFT, fmaf(near, e, e) * EXP_MINUS_SHIFT};
    }
    logistic s = logistic_of(expf(-fabsf(near)));
    float sigmoid = x < 0 ? s.small : s.large, complement = x < 0 ? s.large : s.small;
    return {damped(x, sigmoid), fmaf(near * complement, sigmoid, sigmoid)};
}

struct gated : formula {
    template <int W> __device__ void operator()(int64_t, const float (&in)[2][W], float (&out)[1][W]) const {
#pragma unroll
        for (int k = 0; k < W; k++)
            out[0][k] = silu_of(in[0][k]).value * in[1][k];
    }
};

/* The slope first, which may be 0: dy * up may overflow. The third output is y, if there are three. */
template <int OUTPUTS> struct gated_gradients : formula {
    static constexpr int RESIDENT = 6;
    static constexpr bool HAS_OVERWRITE = OUTPUTS == 3;

    template <int W> __device__ void operator()(int64_t, const float (&in)[3][W], float (&out)[OUTPUTS][W]) const {
#pragma unroll
        for (int k = 0; k < W; k++) {
            float dy = in[0][k], up = in[2][k];
            silu_values silu = silu_of(in[1][k]);
            out[0][k] = silu.slope * dy * up;
            out[1][k] = dy * silu.value;
            if constexpr (OUTPUTS == 3) out[2][k] = silu.value * up;
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
        return run_elements(work, gated{}, types<T, T>{}, types<T>{}, c);
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
        if (c.out[2]) return run_elements(work, gated_gradients<3>{}, types<T, T, T>{}, types<T, T, T>{}, c);
        return run_elements(work, gated_gradients<2>{}, types<T, T, T>{}, types<T, T>{}, c);
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

/* SPDX-License-Identifier: MIT */
/* add on CUDA: y = a + b; da = dy, and db is dy or its sum over rows. Rows and sums: broadcast.cuh. */
#include "cuda/elementwise/broadcast.cuh"

namespace vjp {
namespace {

struct sum : formula {
    static constexpr int ROW = 1;

    template <int W> __device__ void operator()(int64_t, const float (&in)[2][W], float (&out)[1][W]) const {
#pragma unroll
        for (int k = 0; k < W; k++)
            out[0][k] = in[0][k] + in[1][k];
    }
};

struct sum_gradients : formula {
    template <int W> __device__ void operator()(int64_t, const float (&in)[1][W], float (&out)[2][W]) const {
#pragma unroll
        for (int k = 0; k < W; k++)
            out[0][k] = out[1][k] = in[0][k];
    }
};

vjp_status backward(const vjp_work *work) {
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    element_call c{.in = {vjp_data(work, ADD_B_DY)},
                   .out = {vjp_data(work, ADD_B_DA), vjp_data(work, ADD_B_DB)},
                   .add = {vjp_accumulates(work, ADD_B_DA), vjp_accumulates(work, ADD_B_DB)},
                   .count = s.rows * s.dim};
    if (c.out[0] == c.in[0]) c.out[0] = nullptr; /* da is there already */
    if (broadcast_sums(work, s)) return broadcast_sum<sum_gradients, 1>(work, s, c, {});
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        return with_parameter_type<T>(vjp_type(work, ADD_B_DB) == VJP_F32, [&](auto db) {
            return run_elements(work, sum_gradients{}, types<T>{}, types<T, decltype(db)>{}, c);
        });
    });
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_add[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_add[VJP_PASS_COUNT] = {
    {vjp::broadcast_forward<vjp::sum>, nullptr, VJP_STORAGE_16_32},
    {vjp::backward, vjp::broadcast_workspace, VJP_STORAGE_16_32},
};
}

/* SPDX-License-Identifier: MIT */
/* mul on CUDA: y = a b; da = dy b, and db is dy a or its sum over rows. Rows and sums: broadcast.cuh. */
#include "cuda/elementwise/broadcast.cuh"

namespace vjp {
namespace {

struct product : formula {
    static constexpr int ROW = 1;

    template <int W> __device__ void operator()(int64_t, const float (&in)[2][W], float (&out)[1][W]) const {
#pragma unroll
        for (int k = 0; k < W; k++)
            out[0][k] = in[0][k] * in[1][k];
    }
};

/* From dy, a and b. */
struct product_gradients : formula {
    static constexpr int RESIDENT = 6;
    static constexpr int ROW = 2;

    template <int W> __device__ void operator()(int64_t, const float (&in)[3][W], float (&out)[2][W]) const {
#pragma unroll
        for (int k = 0; k < W; k++) {
            out[0][k] = in[0][k] * in[2][k];
            out[1][k] = in[0][k] * in[1][k];
        }
    }
};

vjp_status backward(const vjp_work *work) {
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    element_call c{.in = {vjp_data(work, MUL_B_DY), vjp_data(work, MUL_B_A), vjp_data(work, MUL_B_B)},
                   .out = {vjp_data(work, MUL_B_DA), vjp_data(work, MUL_B_DB)},
                   .add = {vjp_accumulates(work, MUL_B_DA), vjp_accumulates(work, MUL_B_DB)},
                   .count = s.rows * s.dim};
    if (!c.out[1]) c.in[1] = nullptr; /* a is needed for db alone, b for da alone */
    if (!c.out[0]) c.in[2] = nullptr;
    if (broadcast_sums(work, s)) {
        parameter b = c.out[0] ? parameter_of(work, MUL_B_B) : parameter{};
        return broadcast_sum<product_gradients, 3>(work, s, c, b);
    }
    /* Without db, da = dy b is the forward with dy for a. */
    if (!c.out[1]) return broadcast_elements<product>(work, s, c.in[0], c.in[2], MUL_B_B, c.out[0], c.add[0]);
    return with_type(work->storage, [&](auto zero) {
        using T = decltype(zero);
        return with_parameter_type<T>(vjp_type(work, MUL_B_B) == VJP_F32, [&](auto b) {
            using B = decltype(b);
            return with_parameter_type<T>(vjp_type(work, MUL_B_DB) == VJP_F32, [&](auto db) {
                return run_elements(work, product_gradients{}, types<T, T, B>{}, types<T, decltype(db)>{}, c);
            });
        });
    });
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_mul[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_mul[VJP_PASS_COUNT] = {
    {vjp::broadcast_forward<vjp::product>, nullptr, VJP_STORAGE_16_32},
    {vjp::backward, vjp::broadcast_workspace, VJP_STORAGE_16_32},
};
}

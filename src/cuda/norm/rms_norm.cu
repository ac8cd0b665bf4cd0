/* SPDX-License-Identifier: MIT */
/*
 * rms_norm on CUDA: rows scaled to a mean square of 1, without subtracting the mean. The kernels are those of norm.cuh
 * and the headers that it names, compiled here without LAYER; this file reads the call's slots.
 */
#include "cuda/norm/norm_run.cuh"

namespace vjp {
namespace {

norm_call forward_call(const vjp_work *work) {
    vjp_norm_sizes size = vjp_rms_norm_sizes(work);
    norm_call c{};
    c.x = vjp_data(work, RMS_NORM_X);
    c.out = vjp_data(work, RMS_NORM_Y);
    c.add = vjp_accumulates(work, RMS_NORM_Y);
    c.gamma = parameter_of(work, RMS_NORM_GAMMA);
    c.beta = parameter_of(work, RMS_NORM_BETA);
    c.rstd_out = static_cast<float *>(vjp_data(work, RMS_NORM_RSTD));
    c.rows = size.rows;
    c.dim = size.dim;
    c.eps = static_cast<const vjp_rms_norm_attributes *>(work->attributes)->eps;
    return c;
}

norm_call backward_call(const vjp_work *work) {
    vjp_norm_sizes size = vjp_rms_norm_sizes(work);
    norm_call c{};
    c.x = vjp_data(work, RMS_NORM_B_X);
    c.dy = vjp_data(work, RMS_NORM_B_DY);
    c.out = vjp_data(work, RMS_NORM_B_DX);
    c.add = vjp_accumulates(work, RMS_NORM_B_DX);
    c.gamma = parameter_of(work, RMS_NORM_B_GAMMA);
    c.dgamma = parameter_output_of(work, RMS_NORM_B_DGAMMA);
    c.dbeta = parameter_output_of(work, RMS_NORM_B_DBETA);
    c.sums = work->tensor[RMS_NORM_B_DGAMMA] || work->tensor[RMS_NORM_B_DBETA];
    c.rstd_in = static_cast<const float *>(vjp_data(work, RMS_NORM_B_RSTD));
    c.y = vjp_data(work, RMS_NORM_B_Y);
    c.add_y = vjp_accumulates(work, RMS_NORM_B_Y);
    if (c.y) c.beta = parameter_of(work, RMS_NORM_B_BETA);
    c.rows = size.rows;
    c.dim = size.dim;
    c.eps = static_cast<const vjp_rms_norm_attributes *>(work->attributes)->eps;
    return c;
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_rms_norm[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_rms_norm[VJP_PASS_COUNT] = {
    {vjp::norm_pass<false, vjp::forward_call>, vjp::norm_workspace<vjp::forward_call>, VJP_STORAGE_16_32},
    {vjp::norm_pass<false, vjp::backward_call>, vjp::norm_workspace<vjp::backward_call>, VJP_STORAGE_16_32},
};
}

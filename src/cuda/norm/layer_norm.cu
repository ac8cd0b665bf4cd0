/* SPDX-License-Identifier: MIT */
/*
 * layer_norm on CUDA: rows normalised after their mean is subtracted. The kernels are those of norm.cuh and the headers
 * that it names, compiled here with LAYER; this file reads the call's slots.
 */
#include "cuda/norm/norm_run.cuh"

namespace vjp {
namespace {

norm_call forward_call(const vjp_work *work) {
    vjp_norm_sizes size = vjp_layer_norm_sizes(work);
    norm_call c{};
    c.layer = true;
    c.x = vjp_data(work, LAYER_NORM_X);
    c.out = vjp_data(work, LAYER_NORM_Y);
    c.add = vjp_accumulates(work, LAYER_NORM_Y);
    c.gamma = parameter_of(work, LAYER_NORM_GAMMA);
    c.beta = parameter_of(work, LAYER_NORM_BETA);
    c.mean_out = static_cast<float *>(vjp_data(work, LAYER_NORM_MEAN));
    c.rstd_out = static_cast<float *>(vjp_data(work, LAYER_NORM_RSTD));
    c.rows = size.rows;
    c.dim = size.dim;
    c.eps = static_cast<const vjp_layer_norm_attributes *>(work->attributes)->eps;
    return c;
}

norm_call backward_call(const vjp_work *work) {
    vjp_norm_sizes size = vjp_layer_norm_sizes(work);
    bool saved = work->tensor[LAYER_NORM_B_MEAN] && work->tensor[LAYER_NORM_B_RSTD];
    norm_call c{};
    c.layer = true;
    c.x = vjp_data(work, LAYER_NORM_B_X);
    c.dy = vjp_data(work, LAYER_NORM_B_DY);
    c.out = vjp_data(work, LAYER_NORM_B_DX);
    c.add = vjp_accumulates(work, LAYER_NORM_B_DX);
    c.gamma = parameter_of(work, LAYER_NORM_B_GAMMA);
    c.dgamma = parameter_output_of(work, LAYER_NORM_B_DGAMMA);
    c.dbeta = parameter_output_of(work, LAYER_NORM_B_DBETA);
    c.sums = work->tensor[LAYER_NORM_B_DGAMMA] || work->tensor[LAYER_NORM_B_DBETA];
    c.mean_in = saved ? static_cast<const float *>(vjp_data(work, LAYER_NORM_B_MEAN)) : nullptr;
    c.rstd_in = saved ? static_cast<const float *>(vjp_data(work, LAYER_NORM_B_RSTD)) : nullptr;
    c.rows = size.rows;
    c.dim = size.dim;
    c.eps = static_cast<const vjp_layer_norm_attributes *>(work->attributes)->eps;
    return c;
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_layer_norm[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_layer_norm[VJP_PASS_COUNT] = {
    {vjp::norm_pass<true, vjp::forward_call>, vjp::norm_workspace<vjp::forward_call>, VJP_STORAGE_16_32},
    {vjp::norm_pass<true, vjp::backward_call>, vjp::norm_workspace<vjp::backward_call>, VJP_STORAGE_16_32},
};
}

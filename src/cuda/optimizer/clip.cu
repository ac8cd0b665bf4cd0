/* SPDX-License-Identifier: MIT */
/* clip on CUDA: three numbers, in double, by one thread. */
#include "cuda/common/kernel.cuh"

namespace vjp {
namespace {

__global__ void clip(float *scale, float *norm_out, const float *squares, double max_norm) {
    begin_chained();
    double norm = sqrt((double)*squares);
    if (norm_out) *norm_out = (float)norm;
    /* A NaN is not within, and its quotient is NaN. */
    if (scale) *scale = max_norm == 0 || norm <= max_norm ? 1 : (float)(max_norm / norm);
}

vjp_status run(const vjp_work *work) {
    const vjp_clip_attributes *a = static_cast<const vjp_clip_attributes *>(work->attributes);
    return launch(work, true, clip, 1, 1, 0, static_cast<float *>(vjp_data(work, CLIP_SCALE)),
                  static_cast<float *>(vjp_data(work, CLIP_NORM)),
                  static_cast<const float *>(vjp_data(work, CLIP_SQUARES)), a->max_norm);
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_clip[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_clip[VJP_PASS_COUNT] = {{vjp::run, nullptr, VJP_STORAGE_16_32}};
}

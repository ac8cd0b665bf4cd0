/* SPDX-License-Identifier: MIT */
/*
 * Runs a norm's call, from its plan to its launches: layer_norm.cu and rms_norm.cu fill in a norm_call and pass it on.
 */
#ifndef VJP_CUDA_NORM_RUN_CUH
#define VJP_CUDA_NORM_RUN_CUH

#include "cuda/norm/norm_long.cuh"
#include "cuda/norm/norm_rows.cuh"
#include "cuda/norm/norm_short.cuh"

namespace vjp {
namespace {

template <bool LAYER> vjp_status norm_run(const vjp_work *work, norm_call c) {
    if (!c.out && !c.y && !c.mean_out && !c.rstd_out && !c.sums) return VJP_OK;
    norm_plan(work, &c);
    vjp_status status = c.path == NORM_PATH_SHORT  ? norm_short_run<LAYER>(work, c)
                        : c.path == NORM_PATH_ROWS ? norm_rows_run<LAYER>(work, c)
                                                   : norm_long_run<LAYER>(work, c);
    if (status != VJP_OK || !c.sums) return status;
    return norm_finish_run(work, c);
}

/* Both ops' entries in the kernel table: CALL reads the pass's slots. */
template <bool LAYER, norm_call (*CALL)(const vjp_work *)> vjp_status norm_pass(const vjp_work *work) {
    return norm_run<LAYER>(work, CALL(work));
}

template <norm_call (*CALL)(const vjp_work *)> size_t norm_workspace(const vjp_work *work) {
    norm_call c = CALL(work);
    return norm_plan(work, &c);
}

} // namespace
} // namespace vjp

#endif

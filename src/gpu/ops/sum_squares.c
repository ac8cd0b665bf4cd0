/* SPDX-License-Identifier: MIT */
/* sum_squares: one sum, of the squares of all elements. */
#include "gpu/ops/sums.h"

static gpu_sums sums_of(const vjp_work *work) {
    return (gpu_sums){.term = GPU_SQUARES,
                      .out = SUM_SQUARES_Y,
                      .in = {SUM_SQUARES_X},
                      .outer = 1,
                      .length = vjp_elements(work, SUM_SQUARES_X),
                      .inner = 1,
                      .factor = 1};
}

static vjp_status run(const vjp_work *work) {
    gpu_sums s = sums_of(work);
    return gpu_run_sums(work, &s);
}

static size_t workspace(const vjp_work *work) {
    gpu_sums s = sums_of(work);
    return gpu_sums_workspace(work, &s);
}

const vjp_kernel gpu_sum_squares[VJP_PASS_COUNT] = {{run, workspace, VJP_STORAGE_16_32}};

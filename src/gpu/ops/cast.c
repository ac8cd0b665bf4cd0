/* SPDX-License-Identifier: MIT */
/* cast: every storage type to every other; the accesses convert. The backward is the forward with dy for x. */
#include "gpu/ops/elementwise.h"

static vjp_status run(const vjp_work *work) {
    return gpu_run_elements(work, &(gpu_elements){.operand = {{"out0", CAST_Y}, {"in0", CAST_X}}});
}

const vjp_kernel gpu_cast[VJP_PASS_COUNT] = {{run, NULL, VJP_STORAGE_16_32}, {run, NULL, VJP_STORAGE_16_32}};

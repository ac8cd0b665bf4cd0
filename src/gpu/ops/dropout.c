/* SPDX-License-Identifier: MIT */
/* dropout: the masks of core/philox.h, made in dropout.wgsl and dropout.metal from a counter in the device's memory. */
#include "gpu/ops/elementwise.h"

static void more(gpu_launch *l) {
    const vjp_dropout_attributes *a = l->work->attributes;
    gpu_tensor(l, "counter", DROPOUT_COUNTER, 1);
    gpu_report_bad_integer(l, INT64_MIN);
    gpu_u32(l, (int64_t)((uint64_t)a->stream & UINT32_MAX));
    gpu_u32(l, (int64_t)((uint64_t)a->stream >> 32));
    gpu_u32(l, vjp_dropout_threshold(a->p));
    gpu_f32(l, 1 / (1 - a->p));
}

static vjp_status run(const vjp_work *work) {
    return gpu_run_elements(work, &(gpu_elements){.operand = {{"out0", DROPOUT_Y}, {"in0", DROPOUT_X}}, .more = more});
}

const vjp_kernel gpu_dropout[VJP_PASS_COUNT] = {{run, NULL, VJP_STORAGE_16_32}, {run, NULL, VJP_STORAGE_16_32}};

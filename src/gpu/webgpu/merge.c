/* SPDX-License-Identifier: MIT */
/* Merged launches (gpu/merge.c): their parameters are rows of a table, their windows hold the operands of all. */
#include "gpu/webgpu/device.h"

bool webgpu_together(vjp_device *device, const gpu_launch *all, gpu_row *row, int rows, uint32_t groups,
                     vjp_status *status) {
    webgpu_view view;
    bool fits =
        rows <= WEBGPU_LAUNCHES && webgpu_find_windows(device, all, &view) == VJP_OK && view.windows < GPU_MAX_WINDOWS;
    device->error[0] = 0;
    if (!fits) return false;
    view.merged = true;
    for (int k = 0; k < rows; k++)
        for (int i = 0; i < all->operands; i++) {
            const gpu_operand *o = &row[k].launch->operand[i];
            const webgpu_window *w = view.window_of[i] < 0 ? NULL : &view.window[view.window_of[i]];
            row[k].base[i] = view.base[i];
            if (w && w->of)
                row[k].base[i] =
                    (uint32_t)((uint64_t)(o->address - (w->of->begin + w->begin)) / vjp_dtype_size(o->dtype));
        }
    *status = webgpu_encode(device, &view, row, rows, groups);
    return true;
}

vjp_status webgpu_run_many(const vjp_work *const *works, size_t count) {
    return gpu_merge_calls(&webgpu_of(works[0]->device)->merger, works, count, GPU_RUN);
}

vjp_status webgpu_warm_many(const vjp_work *const *works, size_t count) {
    return gpu_merge_calls(&webgpu_of(works[0]->device)->merger, works, count, GPU_WARM);
}

/* SPDX-License-Identifier: MIT */
/*
 * maxpool2d: a thread has two neighbours of the output. A backward without a saved argmax first recomputes it into the
 * workspace. The kernels are in maxpool2d.wgsl and maxpool2d.metal.
 */
#include "gpu/gpu.h"

static gpu_launch begin(const vjp_work *work, const char *kernel, int output) {
    vjp_maxpool2d_sizes s = vjp_maxpool2d_sizes_of(work);
    gpu_launch l = gpu_begin(work, kernel);
    l.threads = gpu_threads(work->device);
    gpu_constant(&l, "PAIRED", s.channels_last && s.channels % 2 == 0);
    const int64_t values[] = {
        s.channels_last ? s.channels : 1,
        vjp_elements(work, output),
        s.height,
        s.width,
        s.out_height,
        s.out_width,
        s.kernel_h,
        s.kernel_w,
        s.stride_h,
        s.stride_w,
        s.padding_h,
        s.padding_w,
        s.dilation_h,
        s.dilation_w,
        (s.kernel_h - 1) * s.dilation_h,
        (s.kernel_w - 1) * s.dilation_w,
    };
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        gpu_u32(&l, values[i]);
    return l;
}

/* Its elements are one run, whatever rows and planes they belong to. */
static void bind(gpu_launch *l, const char *name, int slot) {
    gpu_tensor(l, name, slot, vjp_elements(l->work, slot));
}

static int64_t groups_for(const gpu_launch *l, int64_t elements) {
    return vjp_divide_up(elements, 2 * (int64_t)l->threads);
}

static vjp_status forward(const vjp_work *work) {
    int64_t windows = vjp_elements(work, MAXPOOL2D_Y);
    if ((!vjp_data(work, MAXPOOL2D_Y) && !vjp_data(work, MAXPOOL2D_ARGMAX)) || windows == 0) return VJP_OK;
    gpu_launch l = begin(work, "forward", MAXPOOL2D_Y);
    bind(&l, "y", MAXPOOL2D_Y);
    bind(&l, "argmax", MAXPOOL2D_ARGMAX);
    bind(&l, "x", MAXPOOL2D_X);
    return gpu_enqueue(&l, groups_for(&l, windows));
}

static vjp_status backward(const vjp_work *work) {
    int64_t windows = vjp_elements(work, MAXPOOL2D_B_DY);
    bool saved = vjp_data(work, MAXPOOL2D_B_ARGMAX);
    vjp_maxpool2d_sizes s = vjp_maxpool2d_sizes_of(work);
    if (!vjp_data(work, MAXPOOL2D_B_DX) || windows == 0) return VJP_OK;
    vjp_status status = VJP_OK;
    if (!saved) {
        gpu_launch search = begin(work, "forward", MAXPOOL2D_B_DY);
        bind(&search, "x", MAXPOOL2D_B_X);
        gpu_scratch(&search, "recomputed_out", VJP_I32, 0, windows, true);
        status = gpu_enqueue(&search, groups_for(&search, windows));
        if (status != VJP_OK) return status;
    }
    gpu_launch l = begin(work, "backward", MAXPOOL2D_B_DX);
    bind(&l, "dx", MAXPOOL2D_B_DX);
    bind(&l, "dy", MAXPOOL2D_B_DY);
    if (saved) {
        bind(&l, "saved", MAXPOOL2D_B_ARGMAX);
        gpu_report_bad_index(&l, s.height * s.width);
    } else {
        gpu_scratch(&l, "recomputed", VJP_I32, 0, windows, false);
    }
    status = gpu_enqueue(&l, groups_for(&l, vjp_elements(work, MAXPOOL2D_B_DX)));
    return status == VJP_OK && saved ? gpu_explain(work, MAXPOOL2D_B_ARGMAX) : status;
}

/* For a recomputed argmax. */
static size_t workspace(const vjp_work *work) {
    if (!work->tensor[MAXPOOL2D_B_DX] || work->tensor[MAXPOOL2D_B_ARGMAX]) return 0;
    return gpu_scratch_bytes(vjp_elements(work, MAXPOOL2D_B_DY), 4);
}

const vjp_kernel gpu_maxpool2d[VJP_PASS_COUNT] = {{forward, NULL, VJP_STORAGE_16_32},
                                                  {backward, workspace, VJP_STORAGE_16_32}};

/* SPDX-License-Identifier: MIT */
/*
 * What `vjp bench` needs of a device: a clock, and the raw product that linear and the other ops with products are
 * measured against (shaders/raw_product.wgsl and raw_product.metal), which belongs to no op.
 */
#include "core/system.h"
#include "gpu/gpu.h"

/* What a workgroup multiplies, as the shaders have it. Matrices of simdgroups have half as many columns. */
enum { ROWS = 128, COLUMNS = 128, MATRIX_COLUMNS = 64, DEPTH = 16 };

vjp_status gpu_raw_product(vjp_device *device, const vjp_tensor *y, const vjp_tensor *a, const vjp_tensor *b,
                           gpu_launch *l, int64_t *groups) {
    bool matrices = gpu_has_matrices(device);
    int64_t rows = y->shape[0], columns = y->shape[1], depth = a->shape[1], wide = matrices ? MATRIX_COLUMNS : COLUMNS;
    if (rows % ROWS || columns % wide || depth % DEPTH || !depth)
        return vjp_fail(device, VJP_UNSUPPORTED,
                        "%s: a raw product has multiples of %d rows, %lld columns and a depth of %d", device->name,
                        ROWS, (long long)wide, DEPTH);
    if (gpu_threads(device) < GPU_THREADS)
        return vjp_fail(device, VJP_UNSUPPORTED, "%s: a raw product needs %d threads", device->name, GPU_THREADS);
    *l = (gpu_launch){.shader = "raw_product", .kernel = matrices ? "matrices" : "product", .threads = GPU_THREADS};
    gpu_floats(l, "left", a, false);
    gpu_floats(l, "right", b, false);
    gpu_floats(l, "y", y, true);
    gpu_u32(l, columns);
    gpu_u32(l, depth);
    gpu_u32(l, columns / wide);
    *groups = rows / ROWS * (columns / wide);
    return VJP_OK;
}

vjp_status gpu_measure(vjp_device *device, vjp_status (*enqueue)(void *argument), void *argument, int replays,
                       double *seconds) {
    vjp_status status = enqueue(argument);
    if (status == VJP_OK) status = vjp_synchronize(device);
    double begin = system_seconds();
    for (int i = 0; i < replays && status == VJP_OK; i++)
        status = enqueue(argument);
    if (status == VJP_OK) status = vjp_synchronize(device);
    *seconds = (system_seconds() - begin) / replays;
    return status;
}

size_t gpu_cache_bytes(const vjp_device *device) {
    (void)device;
    return (size_t)64 << 20;
}

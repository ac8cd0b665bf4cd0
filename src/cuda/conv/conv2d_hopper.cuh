/* SPDX-License-Identifier: MIT */
/*
 * conv2d on Hopper: the same matrix products as conv2d_tiles.cuh, by warpgroups, with windows that the copy engine
 * gathers (a walk over pixels, hopper.cuh). No groups; 16 bits, and f32 truncated to TF32.
 *
 * A picture is stored channels last, its channels whole runs of 16 bytes, or `along`: channels first, for 1 x 1 kernels
 * of stride 1 without padding, where a channel's pixels are a row of the product.
 */
#ifndef VJP_CUDA_CONV2D_HOPPER_CUH
#define VJP_CUDA_CONV2D_HOPPER_CUH

#include "cuda/common/hopper.cuh"

namespace vjp {
namespace hopper {

/* Where the results of one phase lie along an axis of `size`: first, first + apart, ... */
struct result_axis {
    int size, first, apart;
};

/* Tap k of an axis of the walk is tap first + k * next of weight. */
struct tap_axis {
    int first, next;
};

struct windows {
    const void *source; /* [batch, pixels, channels], or `along` [batch, channels, pixels] */
    const void *weight; /* [columns, kernel_h, kernel_w, channels] */
    void *result;       /* [batch, pixels, columns], or [batch, columns, pixels] */
    bool along, channels_last, add;
    parameter bias;
    int64_t batch, channels, columns, kernel_h, kernel_w;
    walk_axis down, across;
    tap_axis tap_down, tap_across;
    result_axis result_down, result_across;
};

/* y, or one phase of dx. */
vjp_status multiply_windows(const vjp_work *work, windows w);

/* How dweight goes through the pixels in stages, and how they are stored. */
enum pixel_order {
    WALK,      /* through all images; x: [batch, pixels, channels], dy: [pixels of all, columns], or in f32
                * [columns, dy_step], the pixels of all and then zeros up to a multiple of 4 */
    DY_PLANES, /* f32: each image by itself; x as before, dy: [batch, columns, pixels] */
    PLANES,    /* each image by itself; x and dy: [batch, .., pixels] */
};

struct weight_sums {
    const void *x, *dy;
    vjp_dtype type;
    pixel_order order;
    int chain_pixels; /* that are summed in registers */
    int64_t dy_step;
    int64_t batch, channels, columns; /* columns: whole runs of 16 bytes */
    walk_axis down, across;
    float *partial; /* [parts, taps, channels, columns] */
    int64_t parts;
    double *bias; /* [columns, bias_chunks()]: sums of dy; NULL: not wanted */
};

/* Into how many parts the pixels are split; depends on the sizes alone. */
int64_t weight_parts(const weight_sums &w);
int64_t bias_chunks(const weight_sums &w);
vjp_status multiply_weight_sums(const vjp_work *work, const weight_sums &w);

} // namespace hopper
} // namespace vjp

#endif

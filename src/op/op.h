/*
 * What backends need to know of the ops: the number of each slot, and the sizes that a kernel loops over, read off a
 * checked call. Slot numbers are the order of the op's table; <OP>_ are the forward's, <OP>_B_ the backward's.
 */
#ifndef VJP_OP_H
#define VJP_OP_H

#include "core/core.h"

extern const vjp_op vjp_op_layer_norm;
extern const vjp_op vjp_op_rms_norm;
extern const vjp_op vjp_op_group_norm;
extern const vjp_op vjp_op_rope;
extern const vjp_op vjp_op_cumsum;
extern const vjp_op vjp_op_gather;
extern const vjp_op vjp_op_maxpool2d;
extern const vjp_op vjp_op_linear;
extern const vjp_op vjp_op_conv2d;

/* ---- layer_norm, rms_norm ---- */
enum { LAYER_NORM_Y, LAYER_NORM_MEAN, LAYER_NORM_RSTD, LAYER_NORM_X, LAYER_NORM_GAMMA, LAYER_NORM_BETA };
enum {
    LAYER_NORM_B_DX,
    LAYER_NORM_B_DGAMMA,
    LAYER_NORM_B_DBETA,
    LAYER_NORM_B_DY,
    LAYER_NORM_B_X,
    LAYER_NORM_B_GAMMA,
    LAYER_NORM_B_MEAN,
    LAYER_NORM_B_RSTD
};
enum { RMS_NORM_Y, RMS_NORM_RSTD, RMS_NORM_X, RMS_NORM_GAMMA, RMS_NORM_BETA };
enum {
    RMS_NORM_B_DX,
    RMS_NORM_B_DGAMMA,
    RMS_NORM_B_DBETA,
    RMS_NORM_B_DY,
    RMS_NORM_B_X,
    RMS_NORM_B_GAMMA,
    RMS_NORM_B_RSTD
};

/* x as a matrix: each of `rows` rows of `dim` elements is normalised by itself. */
typedef struct vjp_norm_sizes {
    int64_t rows, dim;
} vjp_norm_sizes;

vjp_norm_sizes vjp_layer_norm_sizes(const vjp_work *work);
vjp_norm_sizes vjp_rms_norm_sizes(const vjp_work *work);

/* ---- group_norm ---- */
enum { GROUP_NORM_Y, GROUP_NORM_MEAN, GROUP_NORM_RSTD, GROUP_NORM_X, GROUP_NORM_GAMMA, GROUP_NORM_BETA };
enum {
    GROUP_NORM_B_DX,
    GROUP_NORM_B_DGAMMA,
    GROUP_NORM_B_DBETA,
    GROUP_NORM_B_DY,
    GROUP_NORM_B_X,
    GROUP_NORM_B_GAMMA,
    GROUP_NORM_B_MEAN,
    GROUP_NORM_B_RSTD
};

/* Element (n, c, s) of x is at n*channels*plane + c*channel_stride + s*plane_stride. */
typedef struct vjp_group_norm_sizes {
    int64_t batch, channels, groups, group_channels, plane;
    int64_t channel_stride, plane_stride;
} vjp_group_norm_sizes;

vjp_group_norm_sizes vjp_group_norm_sizes_of(const vjp_work *work);

/* ---- rope ---- */
enum { ROPE_Y, ROPE_X, ROPE_COSINE, ROPE_SINE, ROPE_POSITIONS };
/* The backward has the same slots: dx, dy, cosine, sine, positions. */

/* x as [batch, time, heads, head_dim]; position of (b, t) is positions[b * position_stride + t], or t. */
typedef struct vjp_rope_sizes {
    int64_t batch, time, heads, head_dim, n_rot;
    int64_t table_rows;
    int64_t position_stride; /* 0: all batches share the positions */
} vjp_rope_sizes;

vjp_rope_sizes vjp_rope_sizes_of(const vjp_work *work);

/* ---- cumsum ---- */
enum { CUMSUM_Y, CUMSUM_X };
/* The backward has the same slots: dx, dy. */

/* x as [outer, length, inner], summed along length; `reverse` already turned round for the backward. */
typedef struct vjp_cumsum_sizes {
    int64_t outer, length, inner;
    bool exclusive, reverse;
} vjp_cumsum_sizes;

vjp_cumsum_sizes vjp_cumsum_sizes_of(const vjp_work *work);

/* ---- gather ---- */
enum { GATHER_Y, GATHER_TABLE, GATHER_INDEX };
enum { GATHER_B_DTABLE, GATHER_B_DY, GATHER_B_INDEX };

/* table as [outer, rows, inner], y as [outer, count, inner]. */
typedef struct vjp_gather_sizes {
    int64_t outer, rows, inner, count;
} vjp_gather_sizes;

vjp_gather_sizes vjp_gather_sizes_of(const vjp_work *work);

/* ---- maxpool2d ---- */
enum { MAXPOOL2D_Y, MAXPOOL2D_ARGMAX, MAXPOOL2D_X };
enum { MAXPOOL2D_B_DX, MAXPOOL2D_B_DY, MAXPOOL2D_B_X, MAXPOOL2D_B_ARGMAX };

/* Element (n, c, h, w) of x is at n*channels*height*width + c*channel_stride + (h*width + w)*plane_stride; y likewise.
 */
typedef struct vjp_maxpool2d_sizes {
    int64_t batch, channels, height, width, out_height, out_width;
    int64_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
    bool channels_last;
} vjp_maxpool2d_sizes;

vjp_maxpool2d_sizes vjp_maxpool2d_sizes_of(const vjp_work *work);

/* ---- linear ---- */
enum { LINEAR_Y, LINEAR_PRE, LINEAR_A, LINEAR_B, LINEAR_BIAS };
enum { LINEAR_B_DA, LINEAR_B_DB, LINEAR_B_DBIAS, LINEAR_B_DY, LINEAR_B_A, LINEAR_B_B, LINEAR_B_BIAS, LINEAR_B_PRE };

/* `batch` products of [m, k] by [k, n]. A shared b makes one product of all rows: batch is then 1. */
typedef struct vjp_linear_sizes {
    int64_t batch, m, n, k;
    vjp_activation activation;
    bool transpose_b; /* b is [n, k] */
    bool zero_nan;
} vjp_linear_sizes;

vjp_linear_sizes vjp_linear_sizes_of(const vjp_work *work);

/* ---- conv2d ---- */
enum { CONV2D_Y, CONV2D_X, CONV2D_WEIGHT, CONV2D_BIAS };
enum { CONV2D_B_DX, CONV2D_B_DWEIGHT, CONV2D_B_DBIAS, CONV2D_B_DY, CONV2D_B_X, CONV2D_B_WEIGHT };

/* `channels` and `out_channels` are those of all groups; a group has channels / groups and out_channels / groups. */
typedef struct vjp_conv2d_sizes {
    int64_t batch, channels, height, width, out_channels, out_height, out_width, groups;
    int64_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
    bool channels_last;
} vjp_conv2d_sizes;

vjp_conv2d_sizes vjp_conv2d_sizes_of(const vjp_work *work);

#endif

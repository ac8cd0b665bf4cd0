/*
 * What backends need to know of the ops: the number of each slot, and the sizes that a kernel loops over, read off a
 * checked call. Slot numbers are the order of the op's table; <OP>_ are the forward's, <OP>_B_ the backward's.
 */
#ifndef VJP_OP_H
#define VJP_OP_H

#include "core/core.h"
#include "core/philox.h"

/* Every op has a number, its row in all tables, and a description. */
#define OP_ID(name) vjp_op_id_##name
enum {
#define OP(name, family, cuda, gpu) OP_ID(name),
#include "op/ops.def"
    VJP_OP_COUNT
};

#define OP(name, family, cuda, gpu) extern const vjp_op vjp_op_##name;
#include "op/ops.def"

/* An entry of a backend's table: the kernels of an op that has them there, NULL for another. */
#define OP_KERNELS_yes(kernels) kernels
#define OP_KERNELS_no(kernels)  NULL

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

/* ---- add, mul ---- */
enum { ADD_Y, ADD_A, ADD_B };
enum { ADD_B_DA, ADD_B_DB, ADD_B_DY };
enum { MUL_Y, MUL_A, MUL_B };
enum { MUL_B_DA, MUL_B_DB, MUL_B_DY, MUL_B_A, MUL_B_B };

/* a as [rows, dim], b as [dim]; rows is 1 where they have the same shape. */
typedef struct vjp_broadcast_sizes {
    int64_t rows, dim;
} vjp_broadcast_sizes;

vjp_broadcast_sizes vjp_broadcast_sizes_of(const vjp_work *work);

/* ---- scale ---- */
enum { SCALE_Y, SCALE_X };
/* The backward has the same slots: dx, dy. */

/* ---- mean ---- */
enum { MEAN_Y, MEAN_X };
enum { MEAN_B_DX, MEAN_B_DY, MEAN_B_X };

/* x as [outer, length, inner], y as [outer, inner]; length is 1 or more. */
typedef struct vjp_mean_sizes {
    int64_t outer, length, inner;
} vjp_mean_sizes;

vjp_mean_sizes vjp_mean_sizes_of(const vjp_work *work);

/* ---- dropout ---- */
enum { DROPOUT_Y, DROPOUT_X, DROPOUT_COUNTER };
/* The backward has the same slots: dx, dy, counter. */

/* From the attributes and a counter that the host can read. */
vjp_dropout_key vjp_dropout_key_read(const vjp_work *work);

/* ---- cast ---- */
enum { CAST_Y, CAST_X };
/* The backward has the same slots: dx, dy. */
/* ---- steps of training: sum_squares, clip, adamw, sgd; forward alone ---- */
enum { SUM_SQUARES_Y, SUM_SQUARES_X };
enum { CLIP_SCALE, CLIP_NORM, CLIP_SQUARES };
enum { ADAMW_W_OUT, ADAMW_M_OUT, ADAMW_V_OUT, ADAMW_W, ADAMW_M, ADAMW_V, ADAMW_G, ADAMW_LR, ADAMW_STEP, ADAMW_SCALE };
enum { SGD_W_OUT, SGD_MOMENTUM_OUT, SGD_W, SGD_MOMENTUM, SGD_G, SGD_LR, SGD_SCALE };

/* The elements of a slot. */
static inline int64_t vjp_elements(const vjp_work *work, int slot) {
    return vjp_shape_product(&work->shape[slot], 0, work->shape[slot].ndim);
}
/* ---- cross_entropy ---- */
enum { CROSS_ENTROPY_LOSS, CROSS_ENTROPY_LSE, CROSS_ENTROPY_LOGITS, CROSS_ENTROPY_TARGET };
enum {
    CROSS_ENTROPY_B_DLOGITS,
    CROSS_ENTROPY_B_DLOSS,
    CROSS_ENTROPY_B_LOGITS,
    CROSS_ENTROPY_B_TARGET,
    CROSS_ENTROPY_B_LSE
};

/* logits as [rows, classes]; the share of a row's target that is at the target, and at each other class. */
typedef struct vjp_cross_entropy_sizes {
    int64_t rows, classes, ignore_index;
    double smoothing, at_target, elsewhere;
    bool mean;
} vjp_cross_entropy_sizes;

vjp_cross_entropy_sizes vjp_cross_entropy_sizes_of(const vjp_work *work);

/* ---- swiglu ---- */
enum { SWIGLU_Y, SWIGLU_GATE, SWIGLU_UP };
enum { SWIGLU_B_DGATE, SWIGLU_B_DUP, SWIGLU_B_DY, SWIGLU_B_GATE, SWIGLU_B_UP };
/* ---- attention ---- */
enum { ATTENTION_Y, ATTENTION_LSE, ATTENTION_Q, ATTENTION_K, ATTENTION_V };
enum {
    ATTENTION_B_DQ,
    ATTENTION_B_DK,
    ATTENTION_B_DV,
    ATTENTION_B_DY,
    ATTENTION_B_Q,
    ATTENTION_B_K,
    ATTENTION_B_V,
    ATTENTION_B_Y,
    ATTENTION_B_LSE
};

/* Heads [i * group, (i + 1) * group) of q share head i of k and v. Causal: time t sees keys [0, t + keys - time]. */
typedef struct vjp_attention_sizes {
    int64_t batch, time, keys, heads, kv_heads, group, dim;
    bool causal;
    double scale;
} vjp_attention_sizes;

vjp_attention_sizes vjp_attention_sizes_of(const vjp_work *work);
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

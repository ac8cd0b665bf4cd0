/* SPDX-License-Identifier: MIT */
/*
 * What backends need to know of the ops: the number of each op and slot (slots.h, generated), and the sizes that a
 * kernel loops over, from a checked call.
 */
#ifndef VJP_OP_H
#define VJP_OP_H

#include "core/core.h"
#include "core/philox.h"
#include "op/slots.h"

/* Every op has a number, its row in all tables, and a description. */
#define OP_ID(name) vjp_op_id_##name
enum {
#define OP(name, family, cuda, gpu) OP_ID(name),
#include "op/ops.def"
    VJP_OP_COUNT
};

#define OP(name, family, cuda, gpu) extern const vjp_op vjp_op_##name;
#include "op/ops.def"

/* An entry of a backend's table: the op's kernels, or NULL where the backend has none. */
#define OP_KERNELS_yes(kernels) kernels
#define OP_KERNELS_no(kernels)  NULL

/* ---- layer_norm, rms_norm ---- */

/* x as a matrix: each of `rows` rows of `dim` elements is normalised separately. */
typedef struct vjp_norm_sizes {
    int64_t rows, dim;
} vjp_norm_sizes;

vjp_norm_sizes vjp_layer_norm_sizes(const vjp_work *work);
vjp_norm_sizes vjp_rms_norm_sizes(const vjp_work *work);

/* ---- group_norm ---- */

/* Element (n, c, s) of x is at n*channels*plane + c*channel_stride + s*plane_stride. */
typedef struct vjp_group_norm_sizes {
    int64_t batch, channels, groups, group_channels, plane;
    int64_t channel_stride, plane_stride;
} vjp_group_norm_sizes;

vjp_group_norm_sizes vjp_group_norm_sizes_of(const vjp_work *work);

/* ---- rope ---- */

/* x as [batch, time, heads, head_dim]; position of (b, t) is positions[b * position_stride + t], or t. */
typedef struct vjp_rope_sizes {
    int64_t batch, time, heads, head_dim, n_rot;
    int64_t table_rows;
    int64_t position_stride; /* 0: all batches share the positions */
} vjp_rope_sizes;

vjp_rope_sizes vjp_rope_sizes_of(const vjp_work *work);

/* ---- cumsum ---- */

/* x as [outer, length, inner], summed along length; `reverse` is already inverted for the backward. */
typedef struct vjp_cumsum_sizes {
    int64_t outer, length, inner;
    bool exclusive, reverse;
} vjp_cumsum_sizes;

vjp_cumsum_sizes vjp_cumsum_sizes_of(const vjp_work *work);

/* ---- gather ---- */

/* table as [outer, rows, inner], y as [outer, count, inner]. */
typedef struct vjp_gather_sizes {
    int64_t outer, rows, inner, count;
} vjp_gather_sizes;

vjp_gather_sizes vjp_gather_sizes_of(const vjp_work *work);

/* ---- maxpool2d ---- */

/* Element (n, c, h, w) of x is at n*channels*height*width + c*channel_stride + (h*width + w)*plane_stride; y likewise.
 */
typedef struct vjp_maxpool2d_sizes {
    int64_t batch, channels, height, width, out_height, out_width;
    int64_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
    bool channels_last;
} vjp_maxpool2d_sizes;

vjp_maxpool2d_sizes vjp_maxpool2d_sizes_of(const vjp_work *work);

/* ---- linear ---- */

/* `batch` products of [m, k] by [k, n]. A shared b makes one product of all rows: batch is then 1. */
typedef struct vjp_linear_sizes {
    int64_t batch, m, n, k;
    vjp_activation activation;
    bool transpose_b; /* b is [n, k] */
    bool zero_nan;
} vjp_linear_sizes;

vjp_linear_sizes vjp_linear_sizes_of(const vjp_work *work);

/*
 * A call with a gate by the backend's kernels of linear, without one, and of swiglu; both passes. The bits are those of
 * the two ops. SIZE_MAX is not returned: infer() has refused such sizes.
 */
vjp_status vjp_linear_gated(const vjp_work *work, const vjp_kernel *linear, const vjp_kernel *swiglu);
size_t vjp_linear_gated_workspace(const vjp_work *work, const vjp_kernel *linear);

/* ---- add, mul ---- */

/* a as [rows, dim], b as [dim]; rows is 1 where they have the same shape. */
typedef struct vjp_broadcast_sizes {
    int64_t rows, dim;
} vjp_broadcast_sizes;

vjp_broadcast_sizes vjp_broadcast_sizes_of(const vjp_work *work);

/* ---- scale ---- */

/* ---- mean ---- */

/* x as [outer, length, inner], y as [outer, inner]; length is 1 or more. */
typedef struct vjp_mean_sizes {
    int64_t outer, length, inner;
} vjp_mean_sizes;

vjp_mean_sizes vjp_mean_sizes_of(const vjp_work *work);

/* ---- dropout ---- */

/* From the attributes and the counter, which the host must be able to read. */
vjp_dropout_key vjp_dropout_key_read(const vjp_work *work);

/* ---- cast ---- */
/* ---- steps of training: sum_squares, clip, adamw, sgd; forward only ---- */

/* The elements of a slot. */
static inline int64_t vjp_elements(const vjp_work *work, int slot) {
    return vjp_shape_product(&work->shape[slot], 0, work->shape[slot].ndim);
}
/* ---- cross_entropy ---- */

/* logits as [rows, classes]; the weight of the target class, and of each other class. */
typedef struct vjp_cross_entropy_sizes {
    int64_t rows, classes, ignore_index;
    double smoothing, at_target, elsewhere;
    bool mean;
} vjp_cross_entropy_sizes;

vjp_cross_entropy_sizes vjp_cross_entropy_sizes_of(const vjp_work *work);

/* For ops whose logits are not a tensor. */
vjp_cross_entropy_sizes vjp_cross_entropy_sizes_from(int64_t rows, int64_t classes, int64_t ignore_index,
                                                     int64_t reduction, double label_smoothing);
vjp_status vjp_check_smoothing(const vjp_work *work, double smoothing);

/* ---- linear_cross_entropy ---- */

/* x as [rows, dim], weight as [classes, dim]; rows and classes are in `loss`. */
typedef struct vjp_linear_cross_entropy_sizes {
    int64_t dim;
    vjp_cross_entropy_sizes loss;
} vjp_linear_cross_entropy_sizes;

vjp_linear_cross_entropy_sizes vjp_linear_cross_entropy_sizes_of(const vjp_work *work);

/* The slots of a pass. Those that the forward does not have are a number past its slots, whose tensor is absent. */
typedef struct vjp_linear_cross_entropy_slots {
    int loss, lse, x, weight, target, dx, dweight, dloss;
} vjp_linear_cross_entropy_slots;

vjp_linear_cross_entropy_slots vjp_linear_cross_entropy_slots_of(const vjp_work *work);

/*
 * The lines of `length` elements in a chunk, when `items` lines are split into chunks that fit a buffer of `bytes`: as
 * few chunks as possible, of nearly equal size. A multiple of 128, or of 16 where fewer than 128 fit (16 even where
 * they do not fit); all `items` where they are one chunk.
 */
int64_t vjp_linear_cross_entropy_chunk(int64_t items, int64_t length, size_t element_bytes, size_t bytes);

/* ---- swiglu ---- */
/* ---- attention ---- */

/* Heads [i * group, (i + 1) * group) of q share head i of k and v. Causal: time t sees keys [0, t + keys - time],
 * with a window the last `window` of them, with `first` those from its own first key on. */
typedef struct vjp_attention_sizes {
    int64_t batch, time, keys, heads, kv_heads, group, dim;
    bool causal;
    int64_t window;    /* 0: none, also where it is no shorter than the keys */
    const void *first; /* [batch, time]; NULL: none */
    vjp_dtype first_dtype;
    double scale;
} vjp_attention_sizes;

vjp_attention_sizes vjp_attention_sizes_of(const vjp_work *work);

/* The first key that a query sees: by the window and by `first`, which must have been checked. */
int64_t vjp_attention_first(const vjp_attention_sizes *s, int64_t batch, int64_t time);

/* ---- conv2d ---- */

/* `channels` and `out_channels` are those of all groups; a group has channels / groups and out_channels / groups. */
typedef struct vjp_conv2d_sizes {
    int64_t batch, channels, height, width, out_channels, out_height, out_width, groups;
    int64_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
    bool channels_last;
} vjp_conv2d_sizes;

vjp_conv2d_sizes vjp_conv2d_sizes_of(const vjp_work *work);

#endif

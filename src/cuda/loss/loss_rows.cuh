/* SPDX-License-Identifier: MIT */
/*
 * Rows of logits with target classes: the losses of a range of rows, and the gradients of their logits. cross_entropy
 * has all rows in a tensor; linear_cross_entropy has a chunk of them, or some classes of all rows, in a buffer.
 *
 * A loss_call is filled by the caller, then by plan_rows(); the enqueue_ functions launch kernels and never wait.
 */
#ifndef VJP_CUDA_LOSS_ROWS_CUH
#define VJP_CUDA_LOSS_ROWS_CUH

#include "cuda/common/cuda.h"

namespace vjp {

/* The sum of the losses of some rows, and how many of them took part (a whole number). */
struct alignas(16) partial_loss {
    double loss, count;
};

/* The arguments of the kernels. Row r of the call is row first_row + r of target, lse and lse_out. */
struct loss_call {
    const void *logits; /* [rows, width] */
    int64_t rows, first_row;
    int64_t width, first_class; /* the logits of a row: all classes, or with lse some of them */
    const void *target;
    vjp_dtype target_type;
    findings found;
    int64_t classes, ignore_index;
    double smoothing;
    float at_target, elsewhere;
    bool mean;

    float *loss, *lse_out;  /* NULL: not wanted */
    bool add_loss;          /* loss += */
    partial_loss *partials; /* [chunks]; needed for loss */

    void *dlogits;            /* may be logits */
    bool add;                 /* dlogits += */
    const float *dloss, *lse; /* lse NULL: measured, and then loss and lse_out may be wanted too */
    int64_t count_blocks;
    double *counts; /* [count_blocks] of rows that take part, from enqueue_count(); NULL: the loss is a sum */

    /* Set by plan_rows(): */
    bool aligned;                              /* logits and dlogits begin at multiples of 16 bytes */
    int threads;                               /* per row; a block's where they are more than a warp's */
    int team_bits;                             /* threads is 1 << team_bits in a team */
    int64_t chunks, chunk_rows, longer_chunks; /* of rows; the first `longer_chunks` have one more than `chunk_rows` */
};

/* What follows from the op's sizes: all rows and classes. */
loss_call loss_call_of(const vjp_cross_entropy_sizes &s);

/* Decides how rows are split, by sizes and the storage type alone. */
void plan_rows(vjp_dtype storage, loss_call *c);

/* Partial losses of the rows, and lse_out. */
vjp_status enqueue_losses(const vjp_work *work, const loss_call &c);

/* The gradients of the logits; without lse also partial losses and lse_out, with the bits of enqueue_losses(). */
vjp_status enqueue_gradients(const vjp_work *work, const loss_call &c);

/* Counts the rows that take part. */
int64_t count_blocks_of(int64_t rows);
vjp_status enqueue_count(const vjp_work *work, const loss_call &c);

/*
 * What products of dlogits are multiplied by where those are computed with a dloss of `unit` and as a sum over rows
 * (dloss = factors + UNIT_FACTOR, counts NULL): writes dloss / unit, over the rows that take part for a mean, then 0, 1
 * and unit.
 */
constexpr int FACTORS = 4, UNIT_FACTOR = 3;
vjp_status enqueue_factors(const vjp_work *work, const loss_call &c, float unit, float *factors);

/* Writes the loss from all `chunks` partial losses. */
vjp_status enqueue_loss(const vjp_work *work, const loss_call &c);

} // namespace vjp

#endif

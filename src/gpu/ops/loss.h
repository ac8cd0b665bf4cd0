/* SPDX-License-Identifier: MIT */
/*
 * Rows of logits with target classes: the losses of a range of rows, and the gradients of their logits, by the kernels
 * of loss.wgsl and loss.metal. cross_entropy has all rows in a tensor; linear_cross_entropy has a chunk of them, or
 * some classes of all rows, in the workspace.
 */
#ifndef VJP_GPU_LOSS_H
#define VJP_GPU_LOSS_H

#include "gpu/ops/matrix.h"

/* A call: all rows. */
typedef struct gpu_loss {
    const vjp_work *work;
    vjp_cross_entropy_sizes s;
    int target;
    gpu_matrix loss, dloss; /* nowhere: not wanted, not there */
    int64_t partials;       /* of the ranges that give the loss, together: the sum of gpu_loss_partials() */
    size_t partials_at;     /* gpu_loss_partials_bytes() in the workspace */
    int64_t counts;         /* set by gpu_loss_plan_counts(); 0: gradients need no count */
    size_t counts_at;
} gpu_loss;

/* A range of rows. Its matrices start at its first row. */
typedef struct gpu_loss_rows {
    int64_t first_row, rows;
    int64_t first_class, width; /* a row has the logits of `width` classes; fewer than all need lse_in */
    int64_t first_partial;
    gpu_matrix logits;
    gpu_matrix lse;     /* output */
    gpu_matrix dlogits; /* output, which may be logits */
    gpu_matrix lse_in;  /* nowhere: rows are measured, and give their losses if the call has one */
} gpu_loss_rows;

/* How many partial sums of losses a range of rows leaves. */
int64_t gpu_loss_partials(const vjp_work *work, int64_t rows, int64_t width);
size_t gpu_loss_partials_bytes(int64_t partials);

/* How many counts of rows the gradients of a mean need; returns their bytes of workspace. */
size_t gpu_loss_plan_counts(gpu_loss *c);

/* Before gradients: counts the rows that take part, where counts are planned. */
vjp_status gpu_loss_count(const gpu_loss *c);

vjp_status gpu_loss_run(const gpu_loss *c, const gpu_loss_rows *r);

/* After all ranges: the loss, if it is wanted, and the value of a bad target for the sentence. */
vjp_status gpu_loss_finish(const gpu_loss *c);

#endif

/* SPDX-License-Identifier: MIT */
/*
 * Rows of logits with target classes: the losses of a range of rows, and the gradients of their logits. cross_entropy
 * has all rows in a tensor; linear_cross_entropy has a chunk of them, or some classes of all rows, in a buffer.
 */
#ifndef VJP_CPU_LOSS_ROWS_H
#define VJP_CPU_LOSS_ROWS_H

#include "cpu/simd/stream.h"
#include "op/op.h"

/* The result of a task: the sum of its rows' losses, and how many rows took part. */
typedef struct loss_partial {
    double loss;
    int64_t count;
} loss_partial;

/* Pointers are to the first row of the range; s.rows is its number of rows. */
typedef struct loss_rows {
    vjp_cross_entropy_sizes s;
    vjp_dtype dtype, target_type;
    const void *logits, *target;
    float *lse; /* NULL: not wanted */
    bool wants_loss;
    loss_partial *partials; /* [loss_split().count] */
    cpu_split split;        /* set by loss_rows() */
} loss_rows;

/* How rows are split into tasks, by sizes alone. */
cpu_split CPU_NAME(loss_split)(int64_t rows, int64_t classes);

void CPU_NAME(loss_rows)(const vjp_work *work, loss_rows *call);

/* Adds `count` partials in order and writes the loss. */
void CPU_NAME(loss_store)(const vjp_cross_entropy_sizes *s, const loss_partial *partials, int64_t count, float *loss,
                          bool adds);

/* A row has `width` logits, those of the classes from first_class on. With fewer than all classes lse is needed. */
typedef struct gradient_rows {
    vjp_cross_entropy_sizes s;
    int64_t first_class, width;
    write_mode mode;
    vjp_dtype dtype, target_type;
    void *dlogits; /* may be logits */
    const void *logits, *target;
    const float *lse; /* NULL: measured */
    float scale;      /* dloss, divided by the rows that take part if the loss is their mean */
    cpu_split split;  /* set by gradient_rows() */
} gradient_rows;

void CPU_NAME(gradient_rows)(const vjp_work *work, gradient_rows *call);

/* gradient_rows.scale: dloss, divided by the rows that take part if the loss is their mean. */
size_t CPU_NAME(loss_scale_workspace)(const vjp_cross_entropy_sizes *s);
float CPU_NAME(loss_scale)(const vjp_work *work, const vjp_cross_entropy_sizes *s, int target_slot, int dloss_slot,
                           void *workspace);

#endif

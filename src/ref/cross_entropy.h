/* SPDX-License-Identifier: MIT */
/*
 * A row of logits, plainly: its largest logit, the sum of exp(z - max), and with those the loss in a form that neither
 * overflows nor subtracts one large number from another:
 *     loss = log(sum) + (1 - s) (max - z[target]) + s mean(max - z).
 * A term whose weight is 0 is left out, which avoids 0 * Inf.
 */
#ifndef VJP_REF_CROSS_ENTROPY_H
#define VJP_REF_CROSS_ENTROPY_H

#include <math.h>

#include "ref/ref.h"

typedef struct ref_row {
    double max, sum, below; /* below: the mean of max - z */
} ref_row;

static inline ref_row ref_measure(const double *z, int64_t classes) {
    ref_row m = {.max = -INFINITY};
    for (int64_t i = 0; i < classes; i++)
        if (z[i] > m.max) m.max = z[i];
    for (int64_t i = 0; i < classes; i++) {
        m.sum += exp(z[i] - (m.max == -INFINITY ? 0 : m.max)); /* if all are -Inf the sum is 0, not NaN */
        m.below += (m.max - z[i]) / (double)classes;
    }
    return m;
}

static inline double ref_row_loss(const vjp_cross_entropy_sizes *s, const ref_row *m, double z_target) {
    double loss = log(m->sum);
    if (s->smoothing != 1) loss += (1 - s->smoothing) * (m->max - z_target);
    if (s->smoothing != 0) loss += s->smoothing * m->below;
    return loss;
}

static inline int64_t ref_target(const vjp_work *work, int slot, int64_t row) {
    return (int64_t)ref_get(work, slot, row, 0);
}

static inline int64_t ref_rows_taking_part(const vjp_work *work, int target, const vjp_cross_entropy_sizes *s) {
    int64_t count = 0;
    for (int64_t row = 0; row < s->rows; row++)
        count += ref_target(work, target, row) != s->ignore_index;
    return count;
}

/* The loss of all rows, from the sum of theirs. */
static inline double ref_reduced(const vjp_work *work, int target, const vjp_cross_entropy_sizes *s, double sum) {
    int64_t count = ref_rows_taking_part(work, target, s);
    return s->mean && count ? sum / (double)count : sum;
}

/* (p - q) of class i, p = exp(z - shift) / sum. */
static inline double ref_slope(const vjp_cross_entropy_sizes *s, double z, double shift, double sum, bool is_target) {
    return exp(z - shift) / sum - (is_target ? s->at_target : s->elsewhere);
}

#endif

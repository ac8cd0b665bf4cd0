/* SPDX-License-Identifier: MIT */
/* The size of the terms of sums that nearly cancel; error.h says what it is for. */
#include "proof/terms.h"

#include <math.h>
#include <stdlib.h>

#include "op/op.h"

/* More multiplications than this take longer than the check itself, and sums of so many elements do not cancel. */
static const double MAX_PRODUCTS = 1 << 22;

typedef struct head {
    vjp_cross_entropy_sizes s;
    int64_t dim;
    const double *x, *weight, *target;
    double dloss;
} head;

static head head_of(const proof_problem *p) {
    const vjp_linear_cross_entropy_attributes *a = (const void *)p->setup.attributes.bytes;
    const proof_values *v = p->slot[VJP_BACKWARD];
    const vjp_tensor *weight = &v[LINEAR_CROSS_ENTROPY_B_WEIGHT].tensor;
    return (head){
        .s = vjp_cross_entropy_sizes_from(v[LINEAR_CROSS_ENTROPY_B_TARGET].count, weight->shape[0], a->ignore_index,
                                          a->reduction, a->label_smoothing),
        .dim = weight->shape[1],
        .x = v[LINEAR_CROSS_ENTROPY_B_X].exact,
        .weight = v[LINEAR_CROSS_ENTROPY_B_WEIGHT].exact,
        .target = v[LINEAR_CROSS_ENTROPY_B_TARGET].exact,
        .dloss = v[LINEAR_CROSS_ENTROPY_B_DLOSS].exact[0],
    };
}

/* The gradients of a row's logits, for a dloss of 1 and a sum over rows. */
static void fill_slopes(const head *h, int64_t row, double *dz) {
    double max = -INFINITY, sum = 0;
    for (int64_t i = 0; i < h->s.classes; i++) {
        dz[i] = 0;
        for (int64_t k = 0; k < h->dim; k++)
            dz[i] += h->x[row * h->dim + k] * h->weight[i * h->dim + k];
        max = fmax(max, dz[i]);
    }
    for (int64_t i = 0; i < h->s.classes; i++)
        sum += exp(dz[i] - max);
    for (int64_t i = 0; i < h->s.classes; i++)
        dz[i] = exp(dz[i] - max) / sum - ((double)i == h->target[row] ? h->s.at_target : h->s.elsewhere);
}

double proof_cancellation(const proof_problem *p, vjp_pass pass, int slot) {
    if (p->setup.op->id != OP_ID(linear_cross_entropy) || pass != VJP_BACKWARD || !p->narrow_operands) return 1;
    bool dx = slot == LINEAR_CROSS_ENTROPY_B_DX;
    if (!dx && slot != LINEAR_CROSS_ENTROPY_B_DWEIGHT) return 1;
    const head h = head_of(p);
    double *dz = NULL, squares = 0;
    int64_t taking_part = 0;
    if ((double)h.s.rows * (double)h.s.classes * (double)h.dim <= MAX_PRODUCTS)
        dz = malloc(sizeof *dz * (size_t)h.s.classes);
    for (int64_t row = 0; dz && row < h.s.rows; row++) {
        if (h.target[row] == (double)h.s.ignore_index) continue;
        taking_part++;
        fill_slopes(&h, row, dz);
        for (int64_t i = 0; i < h.s.classes; i++)
            for (int64_t k = 0; k < h.dim; k++) {
                double term = dz[i] * (dx ? h.weight[i * h.dim + k] : h.x[row * h.dim + k]);
                squares += term * term;
            }
    }
    free(dz);
    double scale = h.s.mean && taking_part ? h.dloss / (double)taking_part : h.dloss;
    const proof_values *v = &p->slot[pass][slot];
    double sum = 0;
    for (int64_t i = 0; i < v->count; i++)
        sum += v->exact[i] * v->exact[i];
    double times = fabs(scale) * sqrt(squares) / sqrt(sum);
    return isfinite(times) ? fmax(times, 1) : 1;
}

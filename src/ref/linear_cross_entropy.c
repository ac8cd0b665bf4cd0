/* SPDX-License-Identifier: MIT */
/*
 * linear_cross_entropy, plainly, a row at a time: z = x weight^T, its loss as in cross_entropy.h, and with dz = p - q,
 * or 0 for an ignored row, dx = dz weight and dweight = the sum over rows of dz^T x, both times dloss (over the number
 * of rows that take part, for a mean). The workspace holds z, then dz, of a row; and that sum.
 */
#include "ref/cross_entropy.h"

typedef vjp_linear_cross_entropy_slots slots;

static void fill_logits(const vjp_work *work, const slots *at, int64_t classes, int64_t dim, int64_t row, double *z) {
    for (int64_t i = 0; i < classes; i++) {
        z[i] = 0;
        for (int64_t k = 0; k < dim; k++)
            z[i] += ref_get(work, at->x, row * dim + k, 0) * ref_get(work, at->weight, i * dim + k, 0);
    }
}

/* Writes lse of a row, replaces its logits by dz, and returns its loss. */
static double finish_row(const vjp_work *work, const slots *at, const vjp_cross_entropy_sizes *s, int64_t row,
                         double *z) {
    ref_row m = ref_measure(z, s->classes);
    ref_put(work, at->lse, row, m.max + log(m.sum));
    int64_t target = ref_target(work, at->target, row);
    bool ignored = target == s->ignore_index;
    double loss = ignored ? 0 : ref_row_loss(s, &m, z[target]);
    for (int64_t i = 0; i < s->classes; i++)
        z[i] = ignored ? 0 : ref_slope(s, z[i], m.max, m.sum, i == target);
    return loss;
}

static void put_dx(const vjp_work *work, const slots *at, int64_t classes, int64_t dim, int64_t row, const double *dz,
                   double scale) {
    for (int64_t k = 0; k < dim; k++) {
        double sum = 0;
        for (int64_t i = 0; i < classes; i++)
            sum += dz[i] * ref_get(work, at->weight, i * dim + k, 0);
        ref_put(work, at->dx, row * dim + k, scale * sum);
    }
}

static void add_dweight(const vjp_work *work, const slots *at, int64_t classes, int64_t dim, int64_t row,
                        const double *dz, double *dweight) {
    for (int64_t i = 0; i < classes; i++)
        for (int64_t k = 0; k < dim; k++)
            dweight[i * dim + k] += dz[i] * ref_get(work, at->x, row * dim + k, 0);
}

/* What dz is multiplied by. Where no row takes part all dz are 0. */
static double scale_of(const vjp_work *work, const slots *at, const vjp_cross_entropy_sizes *s) {
    double dloss = ref_get(work, at->dloss, 0, 0);
    int64_t count = ref_rows_taking_part(work, at->target, s);
    return s->mean && count ? dloss / (double)count : dloss;
}

static vjp_status compute(const vjp_work *work) {
    vjp_linear_cross_entropy_sizes s = vjp_linear_cross_entropy_sizes_of(work);
    const slots at = vjp_linear_cross_entropy_slots_of(work);
    int64_t classes = s.loss.classes, weights = work->tensor[at.dweight] ? classes * s.dim : 0;
    double *z = work->workspace, *dweight = z + classes, loss = 0, scale = scale_of(work, &at, &s.loss);
    for (int64_t i = 0; i < weights; i++)
        dweight[i] = 0;
    for (int64_t row = 0; row < s.loss.rows; row++) {
        fill_logits(work, &at, classes, s.dim, row, z);
        loss += finish_row(work, &at, &s.loss, row, z);
        if (work->tensor[at.dx]) put_dx(work, &at, classes, s.dim, row, z, scale);
        if (weights) add_dweight(work, &at, classes, s.dim, row, z, dweight);
    }
    for (int64_t i = 0; i < weights; i++)
        ref_put(work, at.dweight, i, scale * dweight[i]);
    ref_put(work, at.loss, 0, ref_reduced(work, at.target, &s.loss, loss));
    return VJP_OK;
}

static size_t forward_workspace(const vjp_work *work) {
    return sizeof(double) * (size_t)vjp_linear_cross_entropy_sizes_of(work).loss.classes;
}

/* The weight itself, of any dtype, fits; a row more does too. */
static size_t backward_workspace(const vjp_work *work) {
    vjp_linear_cross_entropy_sizes s = vjp_linear_cross_entropy_sizes_of(work);
    return sizeof(double) * ((size_t)s.loss.classes * ((size_t)s.dim + 1));
}

const vjp_kernel vjp_ref_linear_cross_entropy[VJP_PASS_COUNT] = {
    {compute, forward_workspace, REF_STORAGE},
    {compute, backward_workspace, REF_STORAGE},
};

/* layer_norm, plainly: two passes for the statistics, one for the result. */
#include <math.h>

#include "ref/ref.h"

typedef struct row_statistics {
    double mean, rstd;
} row_statistics;

static row_statistics measure(const vjp_work *work, int x, int64_t row, int64_t dim, double eps) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < dim; i++)
        sum += ref_get(work, x, row * dim + i, 0);
    double mean = sum / (double)dim;
    for (int64_t i = 0; i < dim; i++) {
        double d = ref_get(work, x, row * dim + i, 0) - mean;
        squares += d * d;
    }
    return (row_statistics){mean, 1 / sqrt(squares / (double)dim + eps)};
}

static vjp_status forward(const vjp_work *work) {
    const vjp_layer_norm_attributes *a = work->attributes;
    vjp_norm_sizes s = vjp_layer_norm_sizes(work);
    for (int64_t row = 0; row < s.rows; row++) {
        row_statistics r = measure(work, LAYER_NORM_X, row, s.dim, a->eps);
        ref_put(work, LAYER_NORM_MEAN, row, r.mean);
        ref_put(work, LAYER_NORM_RSTD, row, r.rstd);
        for (int64_t i = 0; i < s.dim; i++) {
            double xh = (ref_get(work, LAYER_NORM_X, row * s.dim + i, 0) - r.mean) * r.rstd;
            double y = xh * ref_get(work, LAYER_NORM_GAMMA, i, 1) + ref_get(work, LAYER_NORM_BETA, i, 0);
            ref_put(work, LAYER_NORM_Y, row * s.dim + i, y);
        }
    }
    return VJP_OK;
}

/* The saved statistics if both are there, else measured again. */
static row_statistics row_of(const vjp_work *work, int64_t row, int64_t dim, double eps) {
    if (work->tensor[LAYER_NORM_B_MEAN] && work->tensor[LAYER_NORM_B_RSTD])
        return (row_statistics){ref_get(work, LAYER_NORM_B_MEAN, row, 0), ref_get(work, LAYER_NORM_B_RSTD, row, 0)};
    return measure(work, LAYER_NORM_B_X, row, dim, eps);
}

static vjp_status backward(const vjp_work *work) {
    const vjp_layer_norm_attributes *a = work->attributes;
    vjp_norm_sizes s = vjp_layer_norm_sizes(work);
    double *dgamma = work->workspace, *dbeta = dgamma + s.dim;
    for (int64_t i = 0; i < 2 * s.dim; i++)
        dgamma[i] = 0;
    for (int64_t row = 0; row < s.rows; row++) {
        row_statistics r = row_of(work, row, s.dim, a->eps);
        double mean_g = 0, mean_gxh = 0;
        for (int64_t i = 0; i < s.dim; i++) {
            double dy = ref_get(work, LAYER_NORM_B_DY, row * s.dim + i, 0);
            double xh = (ref_get(work, LAYER_NORM_B_X, row * s.dim + i, 0) - r.mean) * r.rstd;
            double g = dy * ref_get(work, LAYER_NORM_B_GAMMA, i, 1);
            mean_g += g / (double)s.dim;
            mean_gxh += g * xh / (double)s.dim;
            dgamma[i] += dy * xh;
            dbeta[i] += dy;
        }
        for (int64_t i = 0; i < s.dim; i++) {
            double xh = (ref_get(work, LAYER_NORM_B_X, row * s.dim + i, 0) - r.mean) * r.rstd;
            double g = ref_get(work, LAYER_NORM_B_DY, row * s.dim + i, 0) * ref_get(work, LAYER_NORM_B_GAMMA, i, 1);
            ref_put(work, LAYER_NORM_B_DX, row * s.dim + i, r.rstd * (g - mean_g - xh * mean_gxh));
        }
    }
    for (int64_t i = 0; i < s.dim; i++) {
        ref_put(work, LAYER_NORM_B_DGAMMA, i, dgamma[i]);
        ref_put(work, LAYER_NORM_B_DBETA, i, dbeta[i]);
    }
    return VJP_OK;
}

static size_t backward_workspace(const vjp_work *work) {
    return 2 * sizeof(double) * (size_t)vjp_layer_norm_sizes(work).dim;
}

const vjp_kernel vjp_ref_layer_norm[VJP_PASS_COUNT] = {
    {forward, NULL, REF_STORAGE},
    {backward, backward_workspace, REF_STORAGE},
};

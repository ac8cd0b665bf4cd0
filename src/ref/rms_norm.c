/*
 * rms_norm, plainly: one pass for the mean square, one for the result. A square in double holds anything that f32
 * can (1e38 squared is 1e76), so x needs no scaling here. With xh = x * rstd the backward is layer_norm's less the
 * mean: dx = rstd * (g - xh * mean(g * xh)).
 */
#include <math.h>

#include "ref/ref.h"

static double measure(const vjp_work *work, int x, int64_t row, int64_t dim, double eps) {
    double squares = 0;
    for (int64_t i = 0; i < dim; i++) {
        double value = ref_get(work, x, row * dim + i, 0);
        squares += value * value;
    }
    return 1 / sqrt(squares / (double)dim + eps);
}

static vjp_status forward(const vjp_work *work) {
    const vjp_rms_norm_attributes *a = work->attributes;
    vjp_norm_sizes s = vjp_rms_norm_sizes(work);
    for (int64_t row = 0; row < s.rows; row++) {
        double rstd = measure(work, RMS_NORM_X, row, s.dim, a->eps);
        ref_put(work, RMS_NORM_RSTD, row, rstd);
        for (int64_t i = 0; i < s.dim; i++) {
            double xh = ref_get(work, RMS_NORM_X, row * s.dim + i, 0) * rstd;
            double y = xh * ref_get(work, RMS_NORM_GAMMA, i, 1) + ref_get(work, RMS_NORM_BETA, i, 0);
            ref_put(work, RMS_NORM_Y, row * s.dim + i, y);
        }
    }
    return VJP_OK;
}

/* The saved statistic if it is there, else measured again. */
static double rstd_of(const vjp_work *work, int64_t row, int64_t dim, double eps) {
    if (work->tensor[RMS_NORM_B_RSTD]) return ref_get(work, RMS_NORM_B_RSTD, row, 0);
    return measure(work, RMS_NORM_B_X, row, dim, eps);
}

static vjp_status backward(const vjp_work *work) {
    const vjp_rms_norm_attributes *a = work->attributes;
    vjp_norm_sizes s = vjp_rms_norm_sizes(work);
    double *dgamma = work->workspace, *dbeta = dgamma + s.dim;
    for (int64_t i = 0; i < 2 * s.dim; i++)
        dgamma[i] = 0;
    for (int64_t row = 0; row < s.rows; row++) {
        double rstd = rstd_of(work, row, s.dim, a->eps);
        double mean_gxh = 0;
        for (int64_t i = 0; i < s.dim; i++) {
            double dy = ref_get(work, RMS_NORM_B_DY, row * s.dim + i, 0);
            double xh = ref_get(work, RMS_NORM_B_X, row * s.dim + i, 0) * rstd;
            double g = dy * ref_get(work, RMS_NORM_B_GAMMA, i, 1);
            mean_gxh += g * xh / (double)s.dim;
            dgamma[i] += dy * xh;
            dbeta[i] += dy;
        }
        for (int64_t i = 0; i < s.dim; i++) {
            double xh = ref_get(work, RMS_NORM_B_X, row * s.dim + i, 0) * rstd;
            double g = ref_get(work, RMS_NORM_B_DY, row * s.dim + i, 0) * ref_get(work, RMS_NORM_B_GAMMA, i, 1);
            ref_put(work, RMS_NORM_B_DX, row * s.dim + i, rstd * (g - xh * mean_gxh));
        }
    }
    for (int64_t i = 0; i < s.dim; i++) {
        ref_put(work, RMS_NORM_B_DGAMMA, i, dgamma[i]);
        ref_put(work, RMS_NORM_B_DBETA, i, dbeta[i]);
    }
    return VJP_OK;
}

static size_t backward_workspace(const vjp_work *work) {
    return 2 * sizeof(double) * (size_t)vjp_rms_norm_sizes(work).dim;
}

const vjp_kernel vjp_ref_rms_norm[VJP_PASS_COUNT] = {
    {forward, NULL, REF_STORAGE},
    {backward, backward_workspace, REF_STORAGE},
};

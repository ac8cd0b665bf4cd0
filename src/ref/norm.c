/* SPDX-License-Identifier: MIT */
/*
 * layer_norm and rms_norm: two passes for the statistics, one for the result. rms_norm is layer_norm without the mean:
 * mean = 0 in xh = (x - mean) * rstd, and mean(g) = 0 in dx = rstd * (g - mean(g) - xh * mean(g * xh)). A square in
 * double holds anything that f32 can (1e38 squared is 1e76), so x needs no scaling here. rms_norm's backward gives y
 * once more.
 */
#include <math.h>

#include "ref/ref.h"

typedef struct row_statistics {
    double mean, rstd;
} row_statistics;

/* One call, and its slots in either op. */
typedef struct norm_call {
    const vjp_work *work;
    bool centered;
    vjp_norm_sizes size;
    double eps;
    int x, gamma, mean, rstd; /* the statistics to save, or saved; rms_norm has no mean */
    int beta;                 /* layer_norm's backward has none */
    int dy, dgamma, dbeta;    /* backward */
} norm_call;

static norm_call call_of(const vjp_work *work) {
    bool backward = work->pass == VJP_BACKWARD;
    norm_call call = {.work = work, .centered = work->op->id == OP_ID(layer_norm)};
    if (call.centered) {
        call.size = vjp_layer_norm_sizes(work);
        call.eps = ((const vjp_layer_norm_attributes *)work->attributes)->eps;
        call.x = backward ? LAYER_NORM_B_X : LAYER_NORM_X;
        call.gamma = backward ? LAYER_NORM_B_GAMMA : LAYER_NORM_GAMMA;
        call.mean = backward ? LAYER_NORM_B_MEAN : LAYER_NORM_MEAN;
        call.rstd = backward ? LAYER_NORM_B_RSTD : LAYER_NORM_RSTD;
        call.beta = LAYER_NORM_BETA;
        call.dy = LAYER_NORM_B_DY;
        call.dgamma = LAYER_NORM_B_DGAMMA;
        call.dbeta = LAYER_NORM_B_DBETA;
    } else {
        call.size = vjp_rms_norm_sizes(work);
        call.eps = ((const vjp_rms_norm_attributes *)work->attributes)->eps;
        call.x = backward ? RMS_NORM_B_X : RMS_NORM_X;
        call.gamma = backward ? RMS_NORM_B_GAMMA : RMS_NORM_GAMMA;
        call.rstd = backward ? RMS_NORM_B_RSTD : RMS_NORM_RSTD;
        call.beta = backward ? RMS_NORM_B_BETA : RMS_NORM_BETA;
        call.dy = RMS_NORM_B_DY;
        call.dgamma = RMS_NORM_B_DGAMMA;
        call.dbeta = RMS_NORM_B_DBETA;
    }
    return call;
}

static row_statistics measure(const norm_call *call, int64_t row) {
    int64_t dim = call->size.dim;
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < dim; i++)
        sum += ref_get(call->work, call->x, row * dim + i, 0);
    double mean = call->centered ? sum / (double)dim : 0;
    for (int64_t i = 0; i < dim; i++) {
        double d = ref_get(call->work, call->x, row * dim + i, 0) - mean;
        squares += d * d;
    }
    return (row_statistics){mean, 1 / sqrt(squares / (double)dim + call->eps)};
}

static vjp_status forward(const vjp_work *work) {
    norm_call call = call_of(work);
    int64_t dim = call.size.dim;
    for (int64_t row = 0; row < call.size.rows; row++) {
        row_statistics r = measure(&call, row);
        if (call.centered) ref_put(work, call.mean, row, r.mean);
        ref_put(work, call.rstd, row, r.rstd);
        for (int64_t i = 0; i < dim; i++) {
            double xh = (ref_get(work, call.x, row * dim + i, 0) - r.mean) * r.rstd;
            ref_put(work, 0, row * dim + i, xh * ref_get(work, call.gamma, i, 1) + ref_get(work, call.beta, i, 0));
        }
    }
    return VJP_OK;
}

/* The saved statistics if all are present, otherwise computed again. */
static row_statistics row_of(const norm_call *call, int64_t row) {
    const vjp_work *work = call->work;
    if (!work->tensor[call->rstd] || (call->centered && !work->tensor[call->mean])) return measure(call, row);
    return (row_statistics){call->centered ? ref_get(work, call->mean, row, 0) : 0, ref_get(work, call->rstd, row, 0)};
}

/* Of an rstd that was saved as f32, the double that the forward used, if it is that of the row: y then has its bits. */
static double rstd_of_y(const norm_call *call, int64_t row, double saved) {
    if (!vjp_data(call->work, RMS_NORM_B_Y)) return saved;
    double own = measure(call, row).rstd;
    return (float)own == (float)saved ? own : saved;
}

static vjp_status backward(const vjp_work *work) {
    norm_call call = call_of(work);
    int64_t dim = call.size.dim;
    double *dgamma = work->workspace, *dbeta = dgamma + dim;
    for (int64_t i = 0; i < 2 * dim; i++)
        dgamma[i] = 0;
    for (int64_t row = 0; row < call.size.rows; row++) {
        row_statistics r = row_of(&call, row);
        double y_rstd = call.centered ? 0 : rstd_of_y(&call, row, r.rstd);
        double mean_g = 0, mean_gxh = 0;
        for (int64_t i = 0; i < dim; i++) {
            double dy = ref_get(work, call.dy, row * dim + i, 0);
            double xh = (ref_get(work, call.x, row * dim + i, 0) - r.mean) * r.rstd;
            double g = dy * ref_get(work, call.gamma, i, 1);
            if (call.centered) mean_g += g / (double)dim;
            mean_gxh += g * xh / (double)dim;
            dgamma[i] += dy * xh;
            dbeta[i] += dy;
        }
        for (int64_t i = 0; i < dim; i++) {
            double x = ref_get(work, call.x, row * dim + i, 0) - r.mean, xh = x * r.rstd;
            double gamma = ref_get(work, call.gamma, i, 1), g = ref_get(work, call.dy, row * dim + i, 0) * gamma;
            ref_put(work, 0, row * dim + i, r.rstd * (g - mean_g - xh * mean_gxh));
            if (!call.centered)
                ref_put(work, RMS_NORM_B_Y, row * dim + i, x * y_rstd * gamma + ref_get(work, call.beta, i, 0));
        }
    }
    for (int64_t i = 0; i < dim; i++) {
        ref_put(work, call.dgamma, i, dgamma[i]);
        ref_put(work, call.dbeta, i, dbeta[i]);
    }
    return VJP_OK;
}

static size_t backward_workspace(const vjp_work *work) {
    return 2 * sizeof(double) * (size_t)call_of(work).size.dim;
}

const vjp_kernel vjp_ref_layer_norm[VJP_PASS_COUNT] = {
    {forward, NULL, REF_STORAGE},
    {backward, backward_workspace, REF_STORAGE},
};

const vjp_kernel vjp_ref_rms_norm[VJP_PASS_COUNT] = {
    {forward, NULL, REF_STORAGE},
    {backward, backward_workspace, REF_STORAGE},
};

/* SPDX-License-Identifier: MIT */
/*
 * linear, plainly: pre = a b + bias, y = act(pre) + residual; dpre = dy * act'(pre), then da = dpre b^T, db = a^T dpre
 * and dbias = the sum of dpre. With a gate y = silu(gate) pre, dpre = dy silu(gate) and dgate = dy pre silu'(gate). A
 * shared b comes as one product of all rows (vjp_linear_sizes_of() folds the batch), so db is then summed over the
 * batch. Without an activation act' is 1, whatever pre is: no pre is needed.
 */
#include "ref/activation.h"
#include "ref/ref.h"

/* The index of element (k, n) of a batch's b. */
static int64_t b_at(const vjp_linear_sizes *s, int64_t batch, int64_t k, int64_t n) {
    return batch * s->k * s->n + (s->transpose_b ? n * s->k + k : k * s->n + n);
}

/* One element of a b + bias. `row` counts the rows of all batches. */
static double product(const vjp_work *work, int a, int b, int bias, const vjp_linear_sizes *s, int64_t batch,
                      int64_t row, int64_t n) {
    double sum = 0;
    for (int64_t k = 0; k < s->k; k++)
        sum += ref_get(work, a, row * s->k + k, 0) * ref_get(work, b, b_at(s, batch, k, n), 0);
    return sum + ref_get(work, bias, n, 0);
}

static vjp_status forward(const vjp_work *work) {
    vjp_linear_sizes s = vjp_linear_sizes_of(work);
    if (s.m == 0 || s.n == 0) return VJP_OK; /* rather than loop over empty rows; likewise below */
    for (int64_t batch = 0; batch < s.batch; batch++)
        for (int64_t row = batch * s.m; row < (batch + 1) * s.m; row++)
            for (int64_t n = 0; n < s.n; n++) {
                double pre = product(work, LINEAR_A, LINEAR_B, LINEAR_BIAS, &s, batch, row, n);
                ref_put(work, LINEAR_PRE, row * s.n + n, pre);
                double y = ref_activate(s.activation, pre) + ref_get(work, LINEAR_RESIDUAL, row * s.n + n, 0);
                if (work->tensor[LINEAR_GATE])
                    y = ref_activate(VJP_ACTIVATION_SILU, ref_get(work, LINEAR_GATE, row * s.n + n, 0)) * pre;
                ref_put(work, LINEAR_Y, row * s.n + n, y);
            }
    return VJP_OK;
}

/* As saved, or computed again. */
static double pre_at(const vjp_work *work, const vjp_linear_sizes *s, int64_t batch, int64_t row, int64_t n) {
    return work->tensor[LINEAR_B_PRE] ? ref_get(work, LINEAR_B_PRE, row * s->n + n, 0)
                                      : product(work, LINEAR_B_A, LINEAR_B_B, LINEAR_B_BIAS, s, batch, row, n);
}

/* dy * act'(pre), or dy * silu(gate). */
static double dpre_at(const vjp_work *work, const vjp_linear_sizes *s, int64_t batch, int64_t row, int64_t n) {
    double dy = ref_get(work, LINEAR_B_DY, row * s->n + n, 0);
    if (work->tensor[LINEAR_B_GATE])
        return dy * ref_activate(VJP_ACTIVATION_SILU, ref_get(work, LINEAR_B_GATE, row * s->n + n, 0));
    if (s->activation == VJP_ACTIVATION_NONE) return dy;
    double pre = pre_at(work, s, batch, row, n);
    double slope = isnan(pre) && s->zero_nan ? 0 : ref_activate_slope(s->activation, pre);
    return dy * slope;
}

static void fill_dpre(const vjp_work *work, const vjp_linear_sizes *s, double *dpre) {
    if (s->m == 0 || s->n == 0) return;
    for (int64_t batch = 0; batch < s->batch; batch++)
        for (int64_t row = batch * s->m; row < (batch + 1) * s->m; row++)
            for (int64_t n = 0; n < s->n; n++)
                dpre[row * s->n + n] = dpre_at(work, s, batch, row, n);
}

static void put_da(const vjp_work *work, const vjp_linear_sizes *s, const double *dpre) {
    if (s->m == 0 || s->k == 0) return;
    for (int64_t batch = 0; batch < s->batch; batch++)
        for (int64_t row = batch * s->m; row < (batch + 1) * s->m; row++)
            for (int64_t k = 0; k < s->k; k++) {
                double sum = 0;
                for (int64_t n = 0; n < s->n; n++)
                    sum += dpre[row * s->n + n] * ref_get(work, LINEAR_B_B, b_at(s, batch, k, n), 0);
                ref_put(work, LINEAR_B_DA, row * s->k + k, sum);
            }
}

static void put_db(const vjp_work *work, const vjp_linear_sizes *s, const double *dpre) {
    if (s->k == 0 || s->n == 0) return;
    for (int64_t batch = 0; batch < s->batch; batch++)
        for (int64_t k = 0; k < s->k; k++)
            for (int64_t n = 0; n < s->n; n++) {
                double sum = 0;
                for (int64_t row = batch * s->m; row < (batch + 1) * s->m; row++)
                    sum += ref_get(work, LINEAR_B_A, row * s->k + k, 0) * dpre[row * s->n + n];
                ref_put(work, LINEAR_B_DB, b_at(s, batch, k, n), sum);
            }
}

static void put_dbias(const vjp_work *work, const vjp_linear_sizes *s, const double *dpre) {
    for (int64_t n = 0; n < s->n; n++) {
        double sum = 0;
        for (int64_t row = 0; row < s->batch * s->m; row++)
            sum += dpre[row * s->n + n];
        ref_put(work, LINEAR_B_DBIAS, n, sum);
    }
}

static void put_dresidual(const vjp_work *work, const vjp_linear_sizes *s) {
    for (int64_t i = 0; i < s->batch * s->m * s->n; i++)
        ref_put(work, LINEAR_B_DRESIDUAL, i, ref_get(work, LINEAR_B_DY, i, 0));
}

static void put_dgate(const vjp_work *work, const vjp_linear_sizes *s) {
    if (s->m == 0 || s->n == 0) return;
    for (int64_t batch = 0; batch < s->batch; batch++)
        for (int64_t row = batch * s->m; row < (batch + 1) * s->m; row++)
            for (int64_t n = 0; n < s->n; n++) {
                double gate = ref_get(work, LINEAR_B_GATE, row * s->n + n, 0);
                double dy = ref_get(work, LINEAR_B_DY, row * s->n + n, 0);
                ref_put(work, LINEAR_B_DGATE, row * s->n + n,
                        dy * pre_at(work, s, batch, row, n) * ref_activate_slope(VJP_ACTIVATION_SILU, gate));
            }
}

static vjp_status backward(const vjp_work *work) {
    vjp_linear_sizes s = vjp_linear_sizes_of(work);
    double *dpre = work->workspace;
    fill_dpre(work, &s, dpre);
    if (work->tensor[LINEAR_B_DA]) put_da(work, &s, dpre);
    if (work->tensor[LINEAR_B_DB]) put_db(work, &s, dpre);
    if (work->tensor[LINEAR_B_DBIAS]) put_dbias(work, &s, dpre);
    if (work->tensor[LINEAR_B_DRESIDUAL]) put_dresidual(work, &s);
    if (work->tensor[LINEAR_B_DGATE]) put_dgate(work, &s);
    return VJP_OK;
}

/* dpre in double; infer() has refused a y so large that this overflows. */
static size_t backward_workspace(const vjp_work *work) {
    vjp_linear_sizes s = vjp_linear_sizes_of(work);
    return sizeof(double) * (size_t)(s.batch * s.m * s.n);
}

const vjp_kernel vjp_ref_linear[VJP_PASS_COUNT] = {
    {forward, NULL, REF_STORAGE},
    {backward, backward_workspace, REF_STORAGE},
};

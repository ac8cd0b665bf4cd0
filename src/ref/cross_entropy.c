/* SPDX-License-Identifier: MIT */
/* cross_entropy, plainly, a row at a time (cross_entropy.h). The workspace holds the row in double. */
#include "ref/cross_entropy.h"

static const double *load_row(const vjp_work *work, int logits, int64_t row, int64_t classes) {
    double *z = work->workspace;
    for (int64_t i = 0; i < classes; i++)
        z[i] = ref_get(work, logits, row * classes + i, 0);
    return z;
}

static vjp_status forward(const vjp_work *work) {
    vjp_cross_entropy_sizes s = vjp_cross_entropy_sizes_of(work);
    double loss = 0;
    for (int64_t row = 0; row < s.rows; row++) {
        const double *z = load_row(work, CROSS_ENTROPY_LOGITS, row, s.classes);
        ref_row m = ref_measure(z, s.classes);
        ref_put(work, CROSS_ENTROPY_LSE, row, m.max + log(m.sum));
        int64_t target = ref_target(work, CROSS_ENTROPY_TARGET, row);
        if (target != s.ignore_index) loss += ref_row_loss(&s, &m, z[target]);
    }
    ref_put(work, CROSS_ENTROPY_LOSS, 0, ref_reduced(work, CROSS_ENTROPY_TARGET, &s, loss));
    return VJP_OK;
}

static vjp_status backward(const vjp_work *work) {
    vjp_cross_entropy_sizes s = vjp_cross_entropy_sizes_of(work);
    int64_t count = ref_rows_taking_part(work, CROSS_ENTROPY_B_TARGET, &s);
    double scale = ref_get(work, CROSS_ENTROPY_B_DLOSS, 0, 0) / (s.mean ? (double)count : 1);
    for (int64_t row = 0; row < s.rows; row++) {
        const double *z = load_row(work, CROSS_ENTROPY_B_LOGITS, row, s.classes);
        int64_t target = ref_target(work, CROSS_ENTROPY_B_TARGET, row);
        bool saved = work->tensor[CROSS_ENTROPY_B_LSE], ignored = target == s.ignore_index;
        ref_row m = {.max = ref_get(work, CROSS_ENTROPY_B_LSE, row, 0), .sum = 1}; /* exp(z - lse) is p itself */
        if (!saved) m = ref_measure(z, s.classes);
        for (int64_t i = 0; i < s.classes; i++)
            ref_put(work, CROSS_ENTROPY_B_DLOGITS, row * s.classes + i,
                    ignored ? 0 : scale * ref_slope(&s, z[i], m.max, m.sum, i == target));
    }
    return VJP_OK;
}

static size_t workspace(const vjp_work *work) {
    return sizeof(double) * (size_t)vjp_cross_entropy_sizes_of(work).classes;
}

const vjp_kernel vjp_ref_cross_entropy[VJP_PASS_COUNT] = {
    {forward, workspace, REF_STORAGE},
    {backward, workspace, REF_STORAGE},
};

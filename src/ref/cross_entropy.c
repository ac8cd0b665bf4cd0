/* SPDX-License-Identifier: MIT */
/*
 * cross_entropy, plainly: the largest logit of a row, the sum of exp(z - max), and with those the loss in a form that
 * neither overflows nor subtracts one large number from another:
 *     loss = log(sum) + (1 - s) (max - z[target]) + s mean(max - z).
 * A term whose weight is 0 is left out, which avoids 0 * Inf.
 */
#include <math.h>

#include "ref/ref.h"

typedef struct measured {
    double max, sum, below; /* below: the mean of max - z */
} measured;

static measured measure(const vjp_work *work, int logits, int64_t row, int64_t classes) {
    measured m = {.max = -INFINITY};
    for (int64_t i = 0; i < classes; i++) {
        double z = ref_get(work, logits, row * classes + i, 0);
        if (z > m.max) m.max = z;
    }
    for (int64_t i = 0; i < classes; i++) {
        double z = ref_get(work, logits, row * classes + i, 0);
        m.sum += exp(z - (m.max == -INFINITY ? 0 : m.max)); /* if all are -Inf the sum is 0, not NaN */
        m.below += (m.max - z) / (double)classes;
    }
    return m;
}

static int64_t target_of(const vjp_work *work, int slot, int64_t row) {
    return (int64_t)ref_get(work, slot, row, 0);
}

static int64_t rows_taking_part(const vjp_work *work, int target, vjp_cross_entropy_sizes s) {
    int64_t count = 0;
    for (int64_t row = 0; row < s.rows; row++)
        count += target_of(work, target, row) != s.ignore_index;
    return count;
}

static vjp_status forward(const vjp_work *work) {
    vjp_cross_entropy_sizes s = vjp_cross_entropy_sizes_of(work);
    double loss = 0;
    for (int64_t row = 0; row < s.rows; row++) {
        measured m = measure(work, CROSS_ENTROPY_LOGITS, row, s.classes);
        ref_put(work, CROSS_ENTROPY_LSE, row, m.max + log(m.sum));
        int64_t target = target_of(work, CROSS_ENTROPY_TARGET, row);
        if (target == s.ignore_index) continue;
        double z = ref_get(work, CROSS_ENTROPY_LOGITS, row * s.classes + target, 0);
        loss += log(m.sum);
        if (s.smoothing != 1) loss += (1 - s.smoothing) * (m.max - z);
        if (s.smoothing != 0) loss += s.smoothing * m.below;
    }
    int64_t count = rows_taking_part(work, CROSS_ENTROPY_TARGET, s);
    ref_put(work, CROSS_ENTROPY_LOSS, 0, s.mean && count ? loss / (double)count : loss);
    return VJP_OK;
}

static vjp_status backward(const vjp_work *work) {
    vjp_cross_entropy_sizes s = vjp_cross_entropy_sizes_of(work);
    int64_t count = rows_taking_part(work, CROSS_ENTROPY_B_TARGET, s);
    double scale = ref_get(work, CROSS_ENTROPY_B_DLOSS, 0, 0) / (s.mean ? (double)count : 1);
    for (int64_t row = 0; row < s.rows; row++) {
        int64_t target = target_of(work, CROSS_ENTROPY_B_TARGET, row);
        bool saved = work->tensor[CROSS_ENTROPY_B_LSE], ignored = target == s.ignore_index;
        measured m = {.max = ref_get(work, CROSS_ENTROPY_B_LSE, row, 0), .sum = 1}; /* exp(z - lse) is p itself */
        if (!saved) m = measure(work, CROSS_ENTROPY_B_LOGITS, row, s.classes);
        for (int64_t i = 0; i < s.classes; i++) {
            double z = ref_get(work, CROSS_ENTROPY_B_LOGITS, row * s.classes + i, 0);
            double p = exp(z - m.max) / m.sum, q = i == target ? s.at_target : s.elsewhere;
            ref_put(work, CROSS_ENTROPY_B_DLOGITS, row * s.classes + i, ignored ? 0 : scale * (p - q));
        }
    }
    return VJP_OK;
}

const vjp_kernel vjp_ref_cross_entropy[VJP_PASS_COUNT] = {
    {forward, NULL, REF_STORAGE},
    {backward, NULL, REF_STORAGE},
};

/* SPDX-License-Identifier: MIT */
/* mean, plainly: one sum in double for each element of y; the backward gives each element its share of dy. */
#include "ref/ref.h"

static vjp_status forward(const vjp_work *work) {
    vjp_mean_sizes s = vjp_mean_sizes_of(work);
    for (int64_t outer = 0; outer < (s.inner ? s.outer : 0); outer++)
        for (int64_t inner = 0; inner < s.inner; inner++) {
            double sum = 0;
            for (int64_t k = 0; k < s.length; k++)
                sum += ref_get(work, MEAN_X, (outer * s.length + k) * s.inner + inner, 0);
            ref_put(work, MEAN_Y, outer * s.inner + inner, sum / (double)s.length);
        }
    return VJP_OK;
}

static vjp_status backward(const vjp_work *work) {
    vjp_mean_sizes s = vjp_mean_sizes_of(work);
    for (int64_t outer = 0; outer < (s.inner ? s.outer : 0); outer++)
        for (int64_t k = 0; k < s.length; k++)
            for (int64_t inner = 0; inner < s.inner; inner++) {
                double dy = ref_get(work, MEAN_B_DY, outer * s.inner + inner, 0);
                ref_put(work, MEAN_B_DX, (outer * s.length + k) * s.inner + inner, dy / (double)s.length);
            }
    return VJP_OK;
}

const vjp_kernel vjp_ref_mean[VJP_PASS_COUNT] = {
    {forward, NULL, REF_STORAGE},
    {backward, NULL, REF_STORAGE},
};

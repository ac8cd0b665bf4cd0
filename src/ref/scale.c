/* SPDX-License-Identifier: MIT */
/* scale, plainly. The backward multiplies by the same factor: one function for both passes. */
#include "ref/ref.h"

static vjp_status run(const vjp_work *work) {
    const vjp_scale_attributes *a = work->attributes;
    int64_t count = vjp_shape_product(&work->shape[SCALE_X], 0, work->shape[SCALE_X].ndim);
    for (int64_t i = 0; i < count; i++)
        ref_put(work, SCALE_Y, i, a->factor * ref_get(work, SCALE_X, i, 0));
    return VJP_OK;
}

const vjp_kernel vjp_ref_scale[VJP_PASS_COUNT] = {
    {run, NULL, REF_STORAGE},
    {run, NULL, REF_STORAGE},
};

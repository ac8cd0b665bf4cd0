/* SPDX-License-Identifier: MIT */
/* cast, plainly: read in one type, written in the other. The backward is the same with dy and dx. */
#include "ref/ref.h"

static vjp_status run(const vjp_work *work) {
    int64_t count = vjp_shape_product(&work->shape[CAST_X], 0, work->shape[CAST_X].ndim);
    for (int64_t i = 0; i < count; i++)
        ref_put(work, CAST_Y, i, ref_get(work, CAST_X, i, 0));
    return VJP_OK;
}

const vjp_kernel vjp_ref_cast[VJP_PASS_COUNT] = {
    {run, NULL, REF_STORAGE},
    {run, NULL, REF_STORAGE},
};

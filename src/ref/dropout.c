/* SPDX-License-Identifier: MIT */
/* dropout, plainly: each element gets its own word from the generator. The backward drops the same elements. */
#include "ref/ref.h"

static vjp_status run(const vjp_work *work) {
    const vjp_dropout_attributes *a = work->attributes;
    int64_t count = vjp_shape_product(&work->shape[DROPOUT_X], 0, work->shape[DROPOUT_X].ndim);
    vjp_dropout_key key = vjp_dropout_key_read(work);
    uint32_t threshold = vjp_dropout_threshold(a->p);
    for (int64_t i = 0; i < count; i++) {
        uint32_t word = vjp_dropout_words(&key, (uint64_t)i / 4).word[i % 4];
        ref_put(work, DROPOUT_Y, i, word < threshold ? 0 : ref_get(work, DROPOUT_X, i, 0) / (1 - a->p));
    }
    return VJP_OK;
}

const vjp_kernel vjp_ref_dropout[VJP_PASS_COUNT] = {
    {run, NULL, REF_STORAGE},
    {run, NULL, REF_STORAGE},
};

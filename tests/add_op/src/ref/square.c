/* SPDX-License-Identifier: MIT */
/* square in double. */
#include "ref/ref.h"

static vjp_status forward(const vjp_work *work) {
    for (int64_t i = 0; i < vjp_elements(work, SQUARE_X); i++) {
        double x = ref_get(work, SQUARE_X, i, 0);
        ref_put(work, SQUARE_Y, i, x * x);
    }
    return VJP_OK;
}

static vjp_status backward(const vjp_work *work) {
    for (int64_t i = 0; i < vjp_elements(work, SQUARE_B_X); i++) {
        double x = ref_get(work, SQUARE_B_X, i, 0), dy = ref_get(work, SQUARE_B_DY, i, 0);
        ref_put(work, SQUARE_B_DX, i, 2 * x * dy);
    }
    return VJP_OK;
}

const vjp_kernel vjp_ref_square[VJP_PASS_COUNT] = {{forward, NULL, REF_STORAGE}, {backward, NULL, REF_STORAGE}};

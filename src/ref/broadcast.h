/* SPDX-License-Identifier: MIT */
/*
 * add and mul, plainly. Element (row, j) of a is combined with element j of b. da and db come from the op's two partial
 * derivatives; db is summed over the rows. a is read before da is written, which may be the same memory as a or dy.
 */
#ifndef VJP_REF_BROADCAST_H
#define VJP_REF_BROADCAST_H

#include "ref/ref.h"

static inline vjp_status ref_broadcast_forward(const vjp_work *work, double (*combine)(double a, double b)) {
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    for (int64_t row = 0; row < (s.dim ? s.rows : 0); row++)
        for (int64_t j = 0; j < s.dim; j++) {
            int64_t i = row * s.dim + j;
            ref_put(work, ADD_Y, i, combine(ref_get(work, ADD_A, i, 0), ref_get(work, ADD_B, j, 0)));
        }
    return VJP_OK;
}

/* `a` and `b`: the slots that the two derivatives need; an absent one counts as 1, which is what add needs. */
static inline vjp_status ref_broadcast_backward(const vjp_work *work, int a, int b) {
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    for (int64_t j = 0; j < s.dim; j++) {
        double sum = 0, factor = b < 0 ? 1 : ref_get(work, b, j, 1);
        for (int64_t row = 0; row < s.rows; row++) {
            int64_t i = row * s.dim + j;
            double dy = ref_get(work, ADD_B_DY, i, 0);
            sum += dy * (a < 0 ? 1 : ref_get(work, a, i, 1));
            ref_put(work, ADD_B_DA, i, dy * factor);
        }
        ref_put(work, ADD_B_DB, j, sum);
    }
    return VJP_OK;
}

#endif

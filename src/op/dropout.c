/* SPDX-License-Identifier: MIT */
/* dropout: elements set to zero by a counter-based generator, the others scaled up. Maths: docs/ops/dropout.md. */
#include "op/op.h"

static vjp_status infer(vjp_work *work) {
    const vjp_dropout_attributes *a = work->attributes;
    if (!(a->p >= 0 && a->p < 1))
        return vjp_refuse(work, VJP_INVALID, "p is %g; it must be 0 or more and less than 1", a->p);
    vjp_shape_own(work, DROPOUT_X);
    const vjp_shape shape = work->shape[DROPOUT_X];
    vjp_shape_set(work, "[...]", shape.ndim, shape.size);
    vjp_shape_set(work, "[2]", 1, (int64_t[]){2});
    return VJP_OK;
}

/* Any integer is a valid seed, unless it is stored as f32 and may have been rounded. */
static vjp_status check_values(const vjp_work *work) {
    for (int64_t k = 0; k < 2; k++) {
        int64_t index;
        double value;
        if (!vjp_index_at(vjp_data(work, DROPOUT_COUNTER), vjp_type(work, DROPOUT_COUNTER), k, &index, &value))
            return vjp_refuse(work, VJP_INVALID,
                              "counter[%lld] is %.9g, which is not an integer that f32 holds exactly", (long long)k,
                              value);
    }
    return VJP_OK;
}

vjp_dropout_key vjp_dropout_key_read(const vjp_work *work) {
    const vjp_dropout_attributes *a = work->attributes;
    int64_t counter[2] = {0, 0};
    double value;
    for (int64_t k = 0; k < 2; k++)
        vjp_index_at(vjp_data(work, DROPOUT_COUNTER), vjp_type(work, DROPOUT_COUNTER), k, &counter[k], &value);
    return vjp_dropout_key_of(counter[0], counter[1], a->stream);
}

const vjp_op_rules vjp_dropout_rules = {.infer = infer, .check_values = check_values};

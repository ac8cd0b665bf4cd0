/* SPDX-License-Identifier: MIT */
/* adamw: one step of Adam with decoupled weight decay. Maths: docs/ops/adamw.md. */
#include <math.h>

#include "op/op.h"

static vjp_status infer(vjp_work *work) {
    const vjp_adamw_attributes *a = work->attributes;
    const double betas[] = {a->beta1, a->beta2};
    for (int i = 0; i < 2; i++)
        if (!(betas[i] >= 0 && betas[i] < 1))
            return vjp_refuse(work, VJP_INVALID, "beta%d is %g; it must be at least 0 and less than 1", i + 1,
                              betas[i]);
    if (!(a->eps >= 0) || isinf(a->eps))
        return vjp_refuse(work, VJP_INVALID, "eps is %g; it must be 0 or a positive number", a->eps);
    if (!(a->weight_decay >= 0) || isinf(a->weight_decay))
        return vjp_refuse(work, VJP_INVALID, "weight_decay is %g; it must be 0 or a positive number", a->weight_decay);
    if (a->halves && work->storage != VJP_F32)
        return vjp_refuse(work, VJP_INVALID, "halves is true and w is %s; only f32 lies in halves",
                          vjp_dtype_name(work->storage));
    static const int moments[] = {ADAMW_V, ADAMW_M_OUT, ADAMW_V_OUT};
    for (int i = 0; i < 3; i++)
        if (work->tensor[moments[i]] && vjp_type(work, moments[i]) != vjp_type(work, ADAMW_M))
            return vjp_refuse(work, VJP_INVALID, "%s is %s and m is %s; all moments must have the same dtype",
                              vjp_slot_at(work, moments[i])->name, vjp_dtype_name(vjp_type(work, moments[i])),
                              vjp_dtype_name(vjp_type(work, ADAMW_M)));
    vjp_shape_own(work, ADAMW_W);
    const vjp_shape shape = work->shape[ADAMW_W];
    vjp_shape_set(work, "[...]", shape.ndim, shape.size);
    vjp_shape_set(work, "[]", 0, NULL);
    return VJP_OK;
}

static vjp_status check_values(const vjp_work *work) {
    int64_t step;
    double value;
    if (!vjp_index_at(vjp_data(work, ADAMW_STEP), vjp_type(work, ADAMW_STEP), 0, &step, &value))
        return vjp_refuse(work, VJP_INVALID, "step is %.9g, which is not an integer that f32 holds exactly", value);
    if (step >= 1) return VJP_OK;
    return vjp_refuse(work, VJP_INVALID, "step is %lld; the first step is 1", (long long)step);
}

static bool in_halves(const vjp_work *work) {
    const vjp_adamw_attributes *a = work->attributes;
    return a->halves != 0;
}

const vjp_op_rules vjp_adamw_rules = {.infer = infer, .check_values = check_values, .in_halves = in_halves};

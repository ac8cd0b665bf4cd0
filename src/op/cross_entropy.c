/* SPDX-License-Identifier: MIT */
/* cross_entropy: softmax and negative log-likelihood of targets in one. Maths: docs/ops/cross_entropy.md. */
#include "op/op.h"

static int slot_logits(const vjp_work *work) {
    return work->pass == VJP_FORWARD ? CROSS_ENTROPY_LOGITS : CROSS_ENTROPY_B_LOGITS;
}

static int slot_target(const vjp_work *work) {
    return work->pass == VJP_FORWARD ? CROSS_ENTROPY_TARGET : CROSS_ENTROPY_B_TARGET;
}

static vjp_status infer(vjp_work *work) {
    const vjp_cross_entropy_attributes *a = work->attributes;
    int slot = slot_logits(work);
    vjp_shape_own(work, slot);
    const vjp_shape logits = work->shape[slot];
    char text[VJP_SHAPE_TEXT];
    if (logits.ndim < 1) return vjp_refuse(work, VJP_INVALID, "logits has rank 0; its last axis must be the classes");
    if (logits.size[logits.ndim - 1] == 0)
        return vjp_refuse(work, VJP_INVALID, "logits has shape %s: no classes", vjp_shape_text(&logits, text));
    if (!(a->label_smoothing >= 0 && a->label_smoothing <= 1))
        return vjp_refuse(work, VJP_INVALID, "label_smoothing is %g; it must be from 0 to 1", a->label_smoothing);
    vjp_shape_set(work, "[]", 0, NULL);
    vjp_shape_set(work, "[...]", logits.ndim - 1, logits.size);
    vjp_shape_set(work, "[..., classes]", logits.ndim, logits.size);
    return VJP_OK;
}

static vjp_status check_values(const vjp_work *work) {
    if (work->pass == VJP_BACKWARD && !work->tensor[CROSS_ENTROPY_B_DLOGITS]) return VJP_OK;
    vjp_cross_entropy_sizes s = vjp_cross_entropy_sizes_of(work);
    return vjp_check_indices_except(work, slot_target(work), s.classes, "classes", s.ignore_index, "ignore_index");
}

vjp_cross_entropy_sizes vjp_cross_entropy_sizes_of(const vjp_work *work) {
    const vjp_cross_entropy_attributes *a = work->attributes;
    const vjp_shape *logits = &work->shape[slot_logits(work)];
    int64_t classes = logits->size[logits->ndim - 1];
    return (vjp_cross_entropy_sizes){
        .rows = vjp_shape_product(logits, 0, logits->ndim - 1),
        .classes = classes,
        .ignore_index = a->ignore_index,
        .smoothing = a->label_smoothing,
        /* Not 1 - s + s / classes: of a single class this is 1 exactly, and the gradient 0. */
        .at_target = 1 - a->label_smoothing * ((double)(classes - 1) / (double)classes),
        .elsewhere = a->label_smoothing / (double)classes,
        .mean = a->reduction == VJP_REDUCTION_MEAN,
    };
}

const vjp_op_rules vjp_cross_entropy_rules = {.infer = infer, .check_values = check_values};

/* SPDX-License-Identifier: MIT */
/* cross_entropy: softmax and negative log-likelihood of targets in one. Maths: docs/ops/cross_entropy.md. */
#include "op/op.h"

static int slot_logits(const vjp_work *work) {
    return work->pass == VJP_FORWARD ? CROSS_ENTROPY_LOGITS : CROSS_ENTROPY_B_LOGITS;
}

static int slot_target(const vjp_work *work) {
    return work->pass == VJP_FORWARD ? CROSS_ENTROPY_TARGET : CROSS_ENTROPY_B_TARGET;
}

vjp_status vjp_check_smoothing(const vjp_work *work, double smoothing) {
    if (smoothing >= 0 && smoothing <= 1) return VJP_OK;
    return vjp_refuse(work, VJP_INVALID, "label_smoothing is %g; it must be from 0 to 1", smoothing);
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
    vjp_status status = vjp_check_smoothing(work, a->label_smoothing);
    if (status != VJP_OK) return status;
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

vjp_cross_entropy_sizes vjp_cross_entropy_sizes_from(int64_t rows, int64_t classes, int64_t ignore_index,
                                                     int64_t reduction, double label_smoothing) {
    return (vjp_cross_entropy_sizes){
        .rows = rows,
        .classes = classes,
        .ignore_index = ignore_index,
        .smoothing = label_smoothing,
        /* Not 1 - s + s / classes: of a single class this is 1 exactly, and the gradient 0. */
        .at_target = 1 - label_smoothing * ((double)(classes - 1) / (double)classes),
        .elsewhere = label_smoothing / (double)classes,
        .mean = reduction == VJP_REDUCTION_MEAN,
    };
}

vjp_cross_entropy_sizes vjp_cross_entropy_sizes_of(const vjp_work *work) {
    const vjp_cross_entropy_attributes *a = work->attributes;
    const vjp_shape *logits = &work->shape[slot_logits(work)];
    return vjp_cross_entropy_sizes_from(vjp_shape_product(logits, 0, logits->ndim - 1), logits->size[logits->ndim - 1],
                                        a->ignore_index, a->reduction, a->label_smoothing);
}

const vjp_op_rules vjp_cross_entropy_rules = {.infer = infer, .check_values = check_values};

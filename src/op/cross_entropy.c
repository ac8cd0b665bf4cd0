/* cross_entropy: softmax and negative log-likelihood of targets in one. Maths: docs/ops/cross_entropy.md. */
#include "op/op.h"

static const vjp_slot forward[] = {
    {"loss", "[]", "mean or sum of the rows' losses; 0 where no row takes part", VJP_KIND_STATISTIC,
     VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 0},
    {"lse", "[...]", "each row's log(sum(exp(logits))), to save for the backward", VJP_KIND_STATISTIC, VJP_SLOT_OUTPUT,
     0},
    {"logits", "[..., classes]", "a row an example", VJP_KIND_STORAGE, 0, 0},
    {"target", "[...]", "each row's class, or ignore_index", VJP_KIND_INDEX, 0, 0},
};

static const vjp_slot backward[] = {
    {"dlogits", "[..., classes]", "gradient of the logits", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES,
     1u << CROSS_ENTROPY_B_LOGITS},
    {"dloss", "[]", "gradient of the loss", VJP_KIND_STATISTIC, 0, 0},
    {"logits", "[..., classes]", "the forward's logits", VJP_KIND_STORAGE, 0, 0},
    {"target", "[...]", "the forward's target", VJP_KIND_INDEX, 0, 0},
    {"lse", "[...]", "as saved; absent: computed again", VJP_KIND_STATISTIC, VJP_SLOT_OPTIONAL, 0},
};

static const char *const reductions[] = {"mean", "sum", NULL};

static const vjp_attribute attribute_rows[] = {
    {"ignore_index", "a row with this target takes no part", VJP_INTEGER,
     offsetof(vjp_cross_entropy_attributes, ignore_index), -100, 0, NULL},
    {"reduction", "of the rows that take part", VJP_CHOICE, offsetof(vjp_cross_entropy_attributes, reduction),
     VJP_REDUCE_MEAN, 0, reductions},
    {"label_smoothing", "share of a target that is spread over all classes evenly", VJP_REAL,
     offsetof(vjp_cross_entropy_attributes, label_smoothing), 0, 0, NULL},
};

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
        .mean = a->reduction == VJP_REDUCE_MEAN,
    };
}

const vjp_op vjp_op_cross_entropy = {
    .info = {.name = "cross_entropy",
             .about = "softmax cross-entropy of rows of logits with target classes",
             .pass = {{forward, 4, 2}, {backward, 5, 1}},
             .attributes = attribute_rows,
             .attribute_count = 3,
             .attribute_bytes = sizeof(vjp_cross_entropy_attributes)},
    .id = OP_ID(cross_entropy),
    .infer = infer,
    .check_values = check_values,
};

vjp_status vjp_cross_entropy_forward(vjp_device *device, const vjp_tensor *loss, const vjp_tensor *lse,
                                     const vjp_tensor *logits, const vjp_tensor *target, int64_t ignore_index,
                                     vjp_reduction reduction, double label_smoothing) {
    vjp_cross_entropy_attributes values = {ignore_index, reduction, label_smoothing};
    const vjp_tensor *tensors[] = {loss, lse, logits, target};
    return vjp_call(device, &vjp_op_cross_entropy, VJP_FORWARD, tensors, 4, &values);
}

vjp_status vjp_cross_entropy_backward(vjp_device *device, const vjp_tensor *dlogits, const vjp_tensor *dloss,
                                      const vjp_tensor *logits, const vjp_tensor *target, const vjp_tensor *lse,
                                      int64_t ignore_index, vjp_reduction reduction, double label_smoothing) {
    vjp_cross_entropy_attributes values = {ignore_index, reduction, label_smoothing};
    const vjp_tensor *tensors[] = {dlogits, dloss, logits, target, lse};
    return vjp_call(device, &vjp_op_cross_entropy, VJP_BACKWARD, tensors, 5, &values);
}

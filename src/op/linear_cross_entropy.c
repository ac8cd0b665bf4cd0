/* SPDX-License-Identifier: MIT */
/* linear_cross_entropy: cross_entropy of x weight^T. Maths: docs/ops/linear_cross_entropy.md. */
#include "core/arithmetic.h"
#include "op/op.h"

enum { ABSENT = VJP_MAX_SLOTS - 1 };

vjp_linear_cross_entropy_slots vjp_linear_cross_entropy_slots_of(const vjp_work *work) {
    static const vjp_linear_cross_entropy_slots forward = {.loss = LINEAR_CROSS_ENTROPY_LOSS,
                                                           .lse = LINEAR_CROSS_ENTROPY_LSE,
                                                           .x = LINEAR_CROSS_ENTROPY_X,
                                                           .weight = LINEAR_CROSS_ENTROPY_WEIGHT,
                                                           .target = LINEAR_CROSS_ENTROPY_TARGET,
                                                           .dx = ABSENT,
                                                           .dweight = ABSENT,
                                                           .dloss = ABSENT};
    static const vjp_linear_cross_entropy_slots backward = {.loss = LINEAR_CROSS_ENTROPY_B_LOSS,
                                                            .lse = LINEAR_CROSS_ENTROPY_B_LSE,
                                                            .x = LINEAR_CROSS_ENTROPY_B_X,
                                                            .weight = LINEAR_CROSS_ENTROPY_B_WEIGHT,
                                                            .target = LINEAR_CROSS_ENTROPY_B_TARGET,
                                                            .dx = LINEAR_CROSS_ENTROPY_B_DX,
                                                            .dweight = LINEAR_CROSS_ENTROPY_B_DWEIGHT,
                                                            .dloss = LINEAR_CROSS_ENTROPY_B_DLOSS};
    return work->pass == VJP_FORWARD ? forward : backward;
}

static vjp_status infer(vjp_work *work) {
    const vjp_linear_cross_entropy_attributes *a = work->attributes;
    const vjp_linear_cross_entropy_slots slot = vjp_linear_cross_entropy_slots_of(work);
    vjp_shape_own(work, slot.x);
    vjp_shape_own(work, slot.weight);
    const vjp_shape x = work->shape[slot.x], weight = work->shape[slot.weight];
    char x_text[VJP_SHAPE_TEXT], weight_text[VJP_SHAPE_TEXT];
    if (x.ndim < 1) return vjp_refuse(work, VJP_INVALID, "x has rank 0; it must be [..., dim]");
    if (weight.ndim != 2)
        return vjp_refuse(work, VJP_INVALID, "weight has rank %d; it must be 2: [classes, dim]", weight.ndim);
    if (x.size[x.ndim - 1] != weight.size[1])
        return vjp_refuse(work, VJP_INVALID, "x is %s and weight is %s: dim is %lld in one and %lld in the other",
                          vjp_shape_text(&x, x_text), vjp_shape_text(&weight, weight_text),
                          (long long)x.size[x.ndim - 1], (long long)weight.size[1]);
    if (weight.size[0] == 0 || weight.size[1] == 0)
        return vjp_refuse(work, VJP_INVALID, "weight has shape %s: no %s", vjp_shape_text(&weight, weight_text),
                          weight.size[0] == 0 ? "classes" : "dim");
    /* Kernels count the logits, though no tensor holds them. */
    if (!vjp_sizes_fit(2, (const int64_t[]){vjp_shape_product(&x, 0, x.ndim - 1), weight.size[0]}))
        return vjp_refuse(work, VJP_INVALID, "x is %s and weight is %s: the number of logits overflows",
                          vjp_shape_text(&x, x_text), vjp_shape_text(&weight, weight_text));
    vjp_status status = vjp_check_smoothing(work, a->label_smoothing);
    if (status != VJP_OK) return status;
    vjp_shape_set(work, "[]", 0, NULL);
    vjp_shape_set(work, "[...]", x.ndim - 1, x.size);
    vjp_shape_set(work, "[..., dim]", x.ndim, x.size);
    vjp_shape_set(work, "[classes, dim]", 2, weight.size);
    return VJP_OK;
}

vjp_linear_cross_entropy_sizes vjp_linear_cross_entropy_sizes_of(const vjp_work *work) {
    const vjp_linear_cross_entropy_attributes *a = work->attributes;
    const vjp_linear_cross_entropy_slots slot = vjp_linear_cross_entropy_slots_of(work);
    const vjp_shape *x = &work->shape[slot.x], *weight = &work->shape[slot.weight];
    int64_t rows = vjp_shape_product(x, 0, x->ndim - 1);
    return (vjp_linear_cross_entropy_sizes){
        .dim = weight->size[1],
        .loss = vjp_cross_entropy_sizes_from(rows, weight->size[0], a->ignore_index, a->reduction, a->label_smoothing),
    };
}

int64_t vjp_linear_cross_entropy_chunk(int64_t items, int64_t length, size_t element_bytes, size_t bytes) {
    enum { FULL = 128, MIN = 16 };
    int64_t fit = (int64_t)(bytes / element_bytes) / length;
    int64_t multiple = fit >= FULL ? FULL : MIN;
    fit = vjp_max(MIN, fit / multiple * multiple);
    int64_t chunks = vjp_divide_up(vjp_max(1, items), fit);
    return vjp_max(1, vjp_min(items, vjp_round_up(vjp_divide_up(items, chunks), multiple)));
}

static vjp_status check_values(const vjp_work *work) {
    vjp_cross_entropy_sizes s = vjp_linear_cross_entropy_sizes_of(work).loss;
    return vjp_check_indices_except(work, vjp_linear_cross_entropy_slots_of(work).target, s.classes, "classes",
                                    s.ignore_index, "ignore_index");
}

/* The logits are a product of 2 rows classes dim flops, and so is each gradient. */
static void cost(const vjp_work *work, vjp_cost *cost) {
    vjp_linear_cross_entropy_sizes s = vjp_linear_cross_entropy_sizes_of(work);
    double product = 2.0 * (double)s.loss.rows * (double)s.loss.classes * (double)s.dim;
    const vjp_linear_cross_entropy_slots slot = vjp_linear_cross_entropy_slots_of(work);
    int products = 1 + !!work->tensor[slot.dx] + !!work->tensor[slot.dweight];
    cost->flops = product * products;
}

const vjp_op_rules vjp_linear_cross_entropy_rules = {.infer = infer, .check_values = check_values, .cost = cost};

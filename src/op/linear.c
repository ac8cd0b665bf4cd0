/* SPDX-License-Identifier: MIT */
/* linear: y = act(a b + bias) + residual. Maths: docs/ops/linear.md. */
#include "op/op.h"

/* The backward without a: only da and dbias, and of an activation only with a saved pre. */
static vjp_status check_needed(const vjp_work *work) {
    const vjp_linear_attributes *attributes = work->attributes;
    if (work->pass == VJP_FORWARD || work->tensor[LINEAR_B_A]) return VJP_OK;
    if (work->tensor[LINEAR_B_DB]) return vjp_refuse(work, VJP_INVALID, "a is missing: db needs it");
    if (attributes->activation != VJP_ACTIVATION_NONE && !work->tensor[LINEAR_B_PRE])
        return vjp_refuse(work, VJP_INVALID, "a and pre are both missing: the activation's derivative needs one");
    return VJP_OK;
}

static vjp_status infer(vjp_work *work) {
    const vjp_linear_attributes *attributes = work->attributes;
    int slot_a = work->pass == VJP_FORWARD ? LINEAR_A : LINEAR_B_A;
    int slot_b = work->pass == VJP_FORWARD ? LINEAR_B : LINEAR_B_B;
    vjp_status status = check_needed(work);
    if (status != VJP_OK) return status;
    bool has_a = work->tensor[slot_a];
    int rows = has_a ? slot_a : LINEAR_B_DY; /* a's shape, or one that differs in its last size */
    vjp_shape_own(work, rows);
    vjp_shape_own(work, slot_b);
    vjp_shape a = work->shape[rows];
    const vjp_shape b = work->shape[slot_b];
    char a_text[VJP_SHAPE_TEXT], b_text[VJP_SHAPE_TEXT];
    if (a.ndim < 2)
        return vjp_refuse(work, VJP_INVALID, "%s has rank %d; it must be 2 or more: [..., M, %s]", has_a ? "a" : "dy",
                          a.ndim, has_a ? "K" : "N");
    if (b.ndim != 2 && b.ndim != a.ndim)
        return vjp_refuse(work, VJP_INVALID, "b has rank %d; it must be 2 (shared) or %d (batched, as a is)", b.ndim,
                          a.ndim);
    if (!has_a) a.size[a.ndim - 1] = b.size[b.ndim - (attributes->transpose_b ? 1 : 2)];
    for (int i = 0; i < b.ndim - 2; i++)
        if (b.size[i] != a.size[i])
            return vjp_refuse(work, VJP_INVALID, "a is %s and b is %s: their batches differ on axis %d",
                              vjp_shape_text(&a, a_text), vjp_shape_text(&b, b_text), i);
    int64_t k = a.size[a.ndim - 1];
    int64_t b_k = b.size[b.ndim - (attributes->transpose_b ? 1 : 2)];
    int64_t n = b.size[b.ndim - (attributes->transpose_b ? 2 : 1)];
    if (k != b_k)
        return vjp_refuse(work, VJP_INVALID, "a is %s and b is %s%s: K is %lld in one and %lld in the other",
                          vjp_shape_text(&a, a_text), vjp_shape_text(&b, b_text),
                          attributes->transpose_b ? " (transposed)" : "", (long long)k, (long long)b_k);
    int64_t y[VJP_MAX_DIMS];
    for (int i = 0; i < a.ndim; i++)
        y[i] = i < a.ndim - 1 ? a.size[i] : n;
    /* The caller will allocate an absent y: its size must fit too. */
    if (!vjp_sizes_fit(a.ndim, y))
        return vjp_refuse(work, VJP_INVALID, "y is too large: the product of its sizes overflows");
    if (!vjp_sizes_fit(a.ndim, a.size))
        return vjp_refuse(work, VJP_INVALID, "a is too large: the product of its sizes overflows");
    vjp_shape_set(work, "[..., M, K]", a.ndim, a.size);
    vjp_shape_set(work, "[K, N] or [..., K, N]", b.ndim, b.size);
    vjp_shape_set(work, "[..., M, N]", a.ndim, y);
    vjp_shape_set(work, "[N]", 1, &n);
    return VJP_OK;
}

vjp_linear_sizes vjp_linear_sizes_of(const vjp_work *work) {
    const vjp_linear_attributes *attributes = work->attributes;
    const vjp_shape *a = &work->shape[work->pass == VJP_FORWARD ? LINEAR_A : LINEAR_B_A];
    const vjp_shape *b = &work->shape[work->pass == VJP_FORWARD ? LINEAR_B : LINEAR_B_B];
    vjp_linear_sizes s = {.batch = vjp_shape_product(a, 0, a->ndim - 2),
                          .m = a->size[a->ndim - 2],
                          .k = a->size[a->ndim - 1],
                          .n = b->size[b->ndim - (attributes->transpose_b ? 2 : 1)],
                          .activation = (vjp_activation)attributes->activation,
                          .transpose_b = attributes->transpose_b,
                          .zero_nan = attributes->zero_nan};
    if (b->ndim == 2) {
        s.m *= s.batch;
        s.batch = 1;
    }
    return s;
}

/* Each product is 2mnk flops. A backward with an activation and no saved pre needs a third product. */
static void cost(const vjp_work *work, vjp_cost *cost) {
    vjp_linear_sizes s = vjp_linear_sizes_of(work);
    double product = 2.0 * (double)s.batch * (double)s.m * (double)s.n * (double)s.k;
    if (work->pass == VJP_FORWARD) {
        cost->flops = product;
        return;
    }
    bool again = s.activation != VJP_ACTIVATION_NONE && !work->tensor[LINEAR_B_PRE];
    cost->flops =
        product * ((work->tensor[LINEAR_B_DA] ? 1 : 0) + (work->tensor[LINEAR_B_DB] ? 1 : 0) + (again ? 1 : 0));
}

/* The derivative of an activation is computed from pre; bias would only be needed to compute pre again. */
static uint32_t keeps(const void *attributes, uint32_t wanted) {
    const vjp_linear_attributes *a = attributes;
    uint32_t for_db = wanted >> LINEAR_B_DB & 1 ? 1u << LINEAR_B_A : 0;
    return for_db | (a->activation == VJP_ACTIVATION_NONE ? 0 : 1u << LINEAR_B_PRE);
}

const vjp_op_rules vjp_linear_rules = {
    .infer = infer, .keeps = keeps, .cost = cost, .passes_gradient = 1u << LINEAR_B_DRESIDUAL};

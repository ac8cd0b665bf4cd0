/* linear: y = act(a b + bias). Maths: docs/ops/linear.md. */
#include "op/op.h"

static const vjp_slot forward[] = {
    {"y", "[..., M, N]", "the result", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 0},
    {"pre", "[..., M, N]", "a b + bias, to save for the backward", VJP_KIND_PARAMETER, VJP_SLOT_OUTPUT, 0},
    {"a", "[..., M, K]", "rows", VJP_KIND_STORAGE, 0, 0},
    {"b", "[K, N] or [..., K, N]", "shared by the batch, or one for each of it; [N, K] with transpose_b",
     VJP_KIND_STORAGE, 0, 0},
    {"bias", "[N]", "absent: 0", VJP_KIND_PARAMETER, VJP_SLOT_OPTIONAL, 0},
};

static const vjp_slot backward[] = {
    {"da", "[..., M, K]", "gradient of a", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 0},
    {"db", "[K, N] or [..., K, N]", "gradient of b; summed over the batch when b is shared", VJP_KIND_PARAMETER,
     VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 0},
    {"dbias", "[N]", "gradient of bias", VJP_KIND_PARAMETER, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 0},
    {"dy", "[..., M, N]", "gradient of y", VJP_KIND_STORAGE, 0, 0},
    {"a", "[..., M, K]", "the forward's a", VJP_KIND_STORAGE, 0, 0},
    {"b", "[K, N] or [..., K, N]", "the forward's b", VJP_KIND_STORAGE, 0, 0},
    {"bias", "[N]", "the forward's bias; needed only to compute pre again", VJP_KIND_PARAMETER, VJP_SLOT_OPTIONAL, 0},
    {"pre", "[..., M, N]", "as saved; absent: computed again", VJP_KIND_PARAMETER, VJP_SLOT_OPTIONAL, 0},
};

static const char *const activation_names[] = {"none", "relu",    "gelu_tanh", "gelu_erf",
                                               "silu", "sigmoid", "tanh",      NULL};

static const vjp_attribute attribute_rows[] = {
    {"activation", "act", VJP_CHOICE, offsetof(vjp_linear_attributes, activation), 0, 0, activation_names},
    {"transpose_b", "b is [N, K], as most frameworks store a weight", VJP_BOOLEAN,
     offsetof(vjp_linear_attributes, transpose_b), 0, 0, NULL},
    {"zero_nan", "backward: a NaN pre-activation gives a zero derivative instead of NaN", VJP_BOOLEAN,
     offsetof(vjp_linear_attributes, zero_nan), 0, 0, NULL},
};

static vjp_status infer(vjp_work *work) {
    const vjp_linear_attributes *attributes = work->attributes;
    int slot_a = work->pass == VJP_FORWARD ? LINEAR_A : LINEAR_B_A;
    int slot_b = work->pass == VJP_FORWARD ? LINEAR_B : LINEAR_B_B;
    vjp_shape_own(work, slot_a);
    vjp_shape_own(work, slot_b);
    const vjp_shape a = work->shape[slot_a], b = work->shape[slot_b];
    char a_text[VJP_SHAPE_TEXT], b_text[VJP_SHAPE_TEXT];
    if (a.ndim < 2) return vjp_refuse(work, VJP_INVALID, "a has rank %d; it must be 2 or more: [..., M, K]", a.ndim);
    if (b.ndim != 2 && b.ndim != a.ndim)
        return vjp_refuse(work, VJP_INVALID, "b has rank %d; it must be 2 (shared) or %d (batched, as a is)", b.ndim,
                          a.ndim);
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
    /* An absent y is about to be allocated by someone: its size must fit too. */
    if (!vjp_sizes_fit(a.ndim, y))
        return vjp_refuse(work, VJP_INVALID, "y is too large: the product of its sizes overflows");
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

/* Each product is 2mnk flops. A backward with an activation and no saved pre makes a third product. */
static void cost(const vjp_work *work, vjp_cost *cost) {
    vjp_linear_sizes s = vjp_linear_sizes_of(work);
    double product = 2.0 * (double)s.batch * (double)s.m * (double)s.n * (double)s.k;
    if (work->pass == VJP_FORWARD) {
        cost->flops = product;
        return;
    }
    bool again = s.activation != VJP_ACT_NONE && !work->tensor[LINEAR_B_PRE];
    cost->flops =
        product * ((work->tensor[LINEAR_B_DA] ? 1 : 0) + (work->tensor[LINEAR_B_DB] ? 1 : 0) + (again ? 1 : 0));
}

/* The derivative of an activation is found from pre; bias would only be needed to compute pre again. */
static uint32_t keeps(const void *attributes, uint32_t wanted) {
    const vjp_linear_attributes *a = attributes;
    (void)wanted;
    return a->activation == VJP_ACT_NONE ? 0 : 1u << LINEAR_B_PRE;
}

const vjp_op vjp_op_linear = {
    .info = {.name = "linear",
             .about = "a matrix product with bias and activation",
             .pass = {{forward, 5, 2}, {backward, 8, 3}},
             .attributes = attribute_rows,
             .attribute_count = 3,
             .attribute_bytes = sizeof(vjp_linear_attributes)},
    .id = OP_ID(linear),
    .infer = infer,
    .keeps = keeps,
    .cost = cost,
};

vjp_status vjp_linear_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *pre, const vjp_tensor *a,
                              const vjp_tensor *b, const vjp_tensor *bias, vjp_activation activation, int transpose_b) {
    vjp_linear_attributes values = {.activation = activation, .transpose_b = transpose_b != 0};
    const vjp_tensor *tensors[] = {y, pre, a, b, bias};
    return vjp_call(device, &vjp_op_linear, VJP_FORWARD, tensors, 5, &values);
}

vjp_status vjp_linear_backward(vjp_device *device, const vjp_tensor *da, const vjp_tensor *db, const vjp_tensor *dbias,
                               const vjp_tensor *dy, const vjp_tensor *a, const vjp_tensor *b, const vjp_tensor *bias,
                               const vjp_tensor *pre, vjp_activation activation, int transpose_b, int zero_nan) {
    vjp_linear_attributes values = {
        .activation = activation, .transpose_b = transpose_b != 0, .zero_nan = zero_nan != 0};
    const vjp_tensor *tensors[] = {da, db, dbias, dy, a, b, bias, pre};
    return vjp_call(device, &vjp_op_linear, VJP_BACKWARD, tensors, 8, &values);
}

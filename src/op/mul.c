/* mul: y = a * b, b used again for each of a's leading axes. Maths: docs/ops/mul.md. */
#include "op/broadcast.h"

static const vjp_slot forward[] = {
    {"y", "[...]", "the product", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 1u << MUL_A},
    {"a", "[...]", "one factor", VJP_KIND_STORAGE, 0, 0},
    {"b", "[trailing]", "the other: a's shape or its last axes, none too; used again for each of the rest",
     VJP_KIND_PARAMETER, 0, 0},
};

static const vjp_slot backward[] = {
    {"da", "[...]", "gradient of a", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES,
     1u << MUL_B_DY | 1u << MUL_B_A},
    {"db", "[trailing]", "gradient of b", VJP_KIND_PARAMETER, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 0},
    {"dy", "[...]", "gradient of y", VJP_KIND_STORAGE, 0, 0},
    {"a", "[...]", "the forward's a; only db needs it", VJP_KIND_STORAGE, VJP_SLOT_OPTIONAL, 0},
    {"b", "[trailing]", "the forward's b; only da needs it", VJP_KIND_PARAMETER, VJP_SLOT_OPTIONAL, 0},
};

static const vjp_attribute attribute_rows[] = {
    {"b_axes", "how many axes b has; -1: read off b or db, else all of a's", VJP_INTEGER,
     offsetof(vjp_mul_attributes, b_axes), -1, 0, NULL},
};

static vjp_status infer(vjp_work *work) {
    const vjp_mul_attributes *a = work->attributes;
    if (work->pass == VJP_FORWARD) return vjp_broadcast_infer(work, a->b_axes, -1);
    if (work->tensor[MUL_B_DA] && !work->tensor[MUL_B_B])
        return vjp_refuse(work, VJP_INVALID, "b is missing: da = dy * b needs it");
    if (work->tensor[MUL_B_DB] && !work->tensor[MUL_B_A])
        return vjp_refuse(work, VJP_INVALID, "a is missing: db = dy * a needs it");
    return vjp_broadcast_infer(work, a->b_axes, MUL_B_B);
}

/* What only an absent output needs is not read. */
static void cost(const vjp_work *work, vjp_cost *cost) {
    if (work->pass == VJP_FORWARD) return;
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    if (work->tensor[MUL_B_A] && !work->tensor[MUL_B_DB])
        cost->bytes -= (double)(s.rows * s.dim) * (double)vjp_dtype_size(work->storage);
    if (work->tensor[MUL_B_B] && !work->tensor[MUL_B_DA])
        cost->bytes -= (double)s.dim * (double)vjp_dtype_size(vjp_type(work, MUL_B_B));
}

/* Each gradient needs the other factor. */
static uint32_t keeps(const void *attributes, uint32_t wanted) {
    (void)attributes;
    return (wanted >> MUL_B_DB & 1) << MUL_B_A | (wanted >> MUL_B_DA & 1) << MUL_B_B;
}

const vjp_op vjp_op_mul = {
    .info = {.name = "mul",
             .about = "the product of two tensors, element by element",
             .pass = {{forward, 3, 1}, {backward, 5, 2}},
             .attributes = attribute_rows,
             .attribute_count = 1,
             .attribute_bytes = sizeof(vjp_mul_attributes)},
    .id = OP_ID(mul),
    .infer = infer,
    .keeps = keeps,
    .cost = cost,
};

vjp_status vjp_mul_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *a, const vjp_tensor *b) {
    const vjp_tensor *tensors[] = {y, a, b};
    return vjp_call(device, &vjp_op_mul, VJP_FORWARD, tensors, 3, NULL);
}

vjp_status vjp_mul_backward(vjp_device *device, const vjp_tensor *da, const vjp_tensor *db, const vjp_tensor *dy,
                            const vjp_tensor *a, const vjp_tensor *b) {
    const vjp_tensor *tensors[] = {da, db, dy, a, b};
    return vjp_call(device, &vjp_op_mul, VJP_BACKWARD, tensors, 5, NULL);
}

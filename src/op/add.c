/* add: y = a + b, b used again for each of a's leading axes. Maths: docs/ops/add.md. */
#include "op/broadcast.h"

static const vjp_slot forward[] = {
    {"y", "[...]", "the sum", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 1u << ADD_A},
    {"a", "[...]", "one addend", VJP_KIND_STORAGE, 0, 0},
    {"b", "[trailing]", "the other: a's shape or its last axes, none too; used again for each of the rest",
     VJP_KIND_PARAMETER, 0, 0},
};

static const vjp_slot backward[] = {
    {"da", "[...]", "gradient of a", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 1u << ADD_B_DY},
    {"db", "[trailing]", "gradient of b", VJP_KIND_PARAMETER, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 0},
    {"dy", "[...]", "gradient of y", VJP_KIND_STORAGE, 0, 0},
};

static const vjp_attribute attribute_rows[] = {
    {"b_axes", "how many axes b has; -1: read off b or db, else all of a's", VJP_INTEGER,
     offsetof(vjp_add_attributes, b_axes), -1, 0, NULL},
};

static vjp_status infer(vjp_work *work) {
    const vjp_add_attributes *a = work->attributes;
    return vjp_broadcast_infer(work, a->b_axes, -1);
}

const vjp_op vjp_op_add = {
    .info = {.name = "add",
             .about = "the sum of two tensors",
             .pass = {{forward, 3, 1}, {backward, 3, 2}},
             .attributes = attribute_rows,
             .attribute_count = 1,
             .attribute_bytes = sizeof(vjp_add_attributes)},
    .id = OP_ID(add),
    .infer = infer,
    .passes_gradient = true,
};

vjp_status vjp_add_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *a, const vjp_tensor *b) {
    const vjp_tensor *tensors[] = {y, a, b};
    return vjp_call(device, &vjp_op_add, VJP_FORWARD, tensors, 3, NULL);
}

vjp_status vjp_add_backward(vjp_device *device, const vjp_tensor *da, const vjp_tensor *db, const vjp_tensor *dy) {
    const vjp_tensor *tensors[] = {da, db, dy};
    return vjp_call(device, &vjp_op_add, VJP_BACKWARD, tensors, 3, NULL);
}

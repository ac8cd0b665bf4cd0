/* dropout: elements set to zero by a counter-based generator, the others scaled up. Maths: docs/ops/dropout.md. */
#include "op/op.h"

static const vjp_slot forward[] = {
    {"y", "[...]", "x / (1 - p), or 0 where the element is dropped", VJP_KIND_STORAGE,
     VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 1u << DROPOUT_X},
    {"x", "[...]", "what is thinned out", VJP_KIND_STORAGE, 0, 0},
    {"counter", "[2]", "seed and step, any integers", VJP_KIND_INDEX, 0, 0},
};

static const vjp_slot backward[] = {
    {"dx", "[...]", "gradient of x", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 1u << DROPOUT_X},
    {"dy", "[...]", "gradient of y", VJP_KIND_STORAGE, 0, 0},
    {"counter", "[2]", "the forward's counter", VJP_KIND_INDEX, 0, 0},
};

static const vjp_attribute attribute_rows[] = {
    {"p", "how many are dropped, as a share of 1", VJP_REAL, offsetof(vjp_dropout_attributes, p), 0, 0.1, NULL},
    {"stream", "tells the dropouts of one step apart", VJP_INTEGER, offsetof(vjp_dropout_attributes, stream), 0, 0,
     NULL},
};

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

/* Any integer is a seed; what f32 may have rounded is none. */
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

const vjp_op vjp_op_dropout = {
    .info = {.name = "dropout",
             .about = "elements set to zero at random, the others scaled up",
             .pass = {{forward, 3, 1}, {backward, 3, 1}},
             .attributes = attribute_rows,
             .attribute_count = 2,
             .attribute_bytes = sizeof(vjp_dropout_attributes)},
    .id = OP_ID(dropout),
    .infer = infer,
    .check_values = check_values,
};

vjp_status vjp_dropout_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *x, const vjp_tensor *counter,
                               double p, int64_t stream) {
    vjp_dropout_attributes values = {.p = p, .stream = stream};
    const vjp_tensor *tensors[] = {y, x, counter};
    return vjp_call(device, &vjp_op_dropout, VJP_FORWARD, tensors, 3, &values);
}

vjp_status vjp_dropout_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dy,
                                const vjp_tensor *counter, double p, int64_t stream) {
    vjp_dropout_attributes values = {.p = p, .stream = stream};
    const vjp_tensor *tensors[] = {dx, dy, counter};
    return vjp_call(device, &vjp_op_dropout, VJP_BACKWARD, tensors, 3, &values);
}

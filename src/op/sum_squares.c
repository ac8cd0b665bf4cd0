/* sum_squares: the sum of x^2 over all of x. Maths: docs/ops/sum_squares.md. */
#include "op/op.h"

static const vjp_slot forward[] = {
    {"y", "[]", "the sum of squares", VJP_KIND_STATISTIC, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 0},
    {"x", "[...]", "what is squared and summed, all of it", VJP_KIND_STORAGE, 0, 0},
};

static vjp_status infer(vjp_work *work) {
    vjp_shape_own(work, SUM_SQUARES_X);
    vjp_shape_set(work, "[]", 0, NULL);
    return VJP_OK;
}

const vjp_op vjp_op_sum_squares = {
    .info = {.name = "sum_squares", .about = "the sum of the squares of all elements", .pass = {{forward, 2, 1}}},
    .id = OP_ID(sum_squares),
    .infer = infer,
};

vjp_status vjp_sum_squares_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *x) {
    const vjp_tensor *tensors[] = {y, x};
    return vjp_call(device, &vjp_op_sum_squares, VJP_FORWARD, tensors, 2, NULL);
}

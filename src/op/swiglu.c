/* swiglu: y = silu(gate) * up, element by element. Maths: docs/ops/swiglu.md. */
#include "op/op.h"

/* Every element is read before anything is written in its place, so an output may be the memory of any input. */
static const vjp_slot forward[] = {
    {"y", "[...]", "silu(gate) * up", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES,
     1u << SWIGLU_GATE | 1u << SWIGLU_UP},
    {"gate", "[...]", "what silu is taken of", VJP_KIND_STORAGE, 0, 0},
    {"up", "[...]", "what is gated", VJP_KIND_STORAGE, 0, 0},
};

enum { ANY_INPUT = 1u << SWIGLU_B_DY | 1u << SWIGLU_B_GATE | 1u << SWIGLU_B_UP };

static const vjp_slot backward[] = {
    {"dgate", "[...]", "gradient of gate", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, ANY_INPUT},
    {"dup", "[...]", "gradient of up", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, ANY_INPUT},
    {"dy", "[...]", "gradient of y", VJP_KIND_STORAGE, 0, 0},
    {"gate", "[...]", "the forward's gate", VJP_KIND_STORAGE, 0, 0},
    {"up", "[...]", "the forward's up", VJP_KIND_STORAGE, 0, 0},
};

static vjp_status infer(vjp_work *work) {
    int gate = work->pass == VJP_FORWARD ? SWIGLU_GATE : SWIGLU_B_GATE;
    vjp_shape_own(work, gate);
    const vjp_shape shape = work->shape[gate];
    vjp_shape_set(work, "[...]", shape.ndim, shape.size);
    return VJP_OK;
}

const vjp_op vjp_op_swiglu = {
    .info = {.name = "swiglu",
             .about = "silu(gate) * up, the gate of a feed-forward block",
             .pass = {{forward, 3, 1}, {backward, 5, 2}}},
    .id = OP_ID(swiglu),
    .infer = infer,
};

vjp_status vjp_swiglu_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *gate, const vjp_tensor *up) {
    const vjp_tensor *tensors[] = {y, gate, up};
    return vjp_call(device, &vjp_op_swiglu, VJP_FORWARD, tensors, 3, NULL);
}

vjp_status vjp_swiglu_backward(vjp_device *device, const vjp_tensor *dgate, const vjp_tensor *dup, const vjp_tensor *dy,
                               const vjp_tensor *gate, const vjp_tensor *up) {
    const vjp_tensor *tensors[] = {dgate, dup, dy, gate, up};
    return vjp_call(device, &vjp_op_swiglu, VJP_BACKWARD, tensors, 5, NULL);
}

/* clip: from the sum of squares of all gradients, their norm and what to scale them by. Maths: docs/ops/clip.md. */
#include <math.h>

#include "op/op.h"

static const vjp_slot forward[] = {
    {"scale", "[]", "what gradients are multiplied by: min(1, max_norm / norm)", VJP_KIND_STATISTIC, VJP_SLOT_OUTPUT,
     0},
    {"norm", "[]", "the gradients' common norm: sqrt(squares)", VJP_KIND_STATISTIC, VJP_SLOT_OUTPUT, 0},
    {"squares", "[]", "the sum of squares of all gradients", VJP_KIND_STATISTIC, 0, 0},
};

static const vjp_attribute attribute_rows[] = {
    {"max_norm", "the longest that gradients may be; 0: any length, scale is 1", VJP_REAL,
     offsetof(vjp_clip_attributes, max_norm), 0, 1, NULL},
};

static vjp_status infer(vjp_work *work) {
    const vjp_clip_attributes *a = work->attributes;
    if (!(a->max_norm >= 0) || isinf(a->max_norm))
        return vjp_refuse(work, VJP_INVALID, "max_norm is %g; it must be 0 or a positive number", a->max_norm);
    vjp_shape_set(work, "[]", 0, NULL);
    return VJP_OK;
}

const vjp_op vjp_op_clip = {
    .info = {.name = "clip",
             .about = "the scale that keeps gradients from being longer than max_norm",
             .pass = {{forward, 3, 2}},
             .attributes = attribute_rows,
             .attribute_count = 1,
             .attribute_bytes = sizeof(vjp_clip_attributes)},
    .id = OP_ID(clip),
    .infer = infer,
};

vjp_status vjp_clip_forward(vjp_device *device, const vjp_tensor *scale, const vjp_tensor *norm,
                            const vjp_tensor *squares, double max_norm) {
    vjp_clip_attributes values = {.max_norm = max_norm};
    const vjp_tensor *tensors[] = {scale, norm, squares};
    return vjp_call(device, &vjp_op_clip, VJP_FORWARD, tensors, 3, &values);
}

/* adamw: one step of Adam with decoupled weight decay. Maths: docs/ops/adamw.md. */
#include <math.h>

#include "op/op.h"

static const vjp_slot forward[] = {
    {"w_out", "[...]", "the weights after the step", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT, 1u << ADAMW_W},
    {"m_out", "[...]", "the average of g after the step", VJP_KIND_STATISTIC, VJP_SLOT_OUTPUT, 1u << ADAMW_M},
    {"v_out", "[...]", "the average of g^2 after the step", VJP_KIND_STATISTIC, VJP_SLOT_OUTPUT, 1u << ADAMW_V},
    {"w", "[...]", "the weights", VJP_KIND_STORAGE, 0, 0},
    {"m", "[...]", "the average of g, 0 before the first step", VJP_KIND_STATISTIC, 0, 0},
    {"v", "[...]", "the average of g^2, 0 before the first step", VJP_KIND_STATISTIC, 0, 0},
    {"g", "[...]", "the gradient of w", VJP_KIND_PARAMETER, 0, 0},
    {"lr", "[]", "the learning rate", VJP_KIND_STATISTIC, 0, 0},
    {"step", "[]", "which step this is; the first is 1", VJP_KIND_INDEX, 0, 0},
    {"scale", "[]", "multiplies g, as clip gives it; absent: 1", VJP_KIND_STATISTIC, VJP_SLOT_OPTIONAL, 0},
};

static const vjp_attribute attribute_rows[] = {
    {"beta1", "how much of m stays", VJP_REAL, offsetof(vjp_adamw_attributes, beta1), 0, 0.9, NULL},
    {"beta2", "how much of v stays", VJP_REAL, offsetof(vjp_adamw_attributes, beta2), 0, 0.999, NULL},
    {"eps", "added to the root of v", VJP_REAL, offsetof(vjp_adamw_attributes, eps), 0, 1e-8, NULL},
    {"weight_decay", "the share of w, times lr, that a step takes away", VJP_REAL,
     offsetof(vjp_adamw_attributes, weight_decay), 0, 0.01, NULL},
};

static vjp_status infer(vjp_work *work) {
    const vjp_adamw_attributes *a = work->attributes;
    const double betas[] = {a->beta1, a->beta2};
    for (int i = 0; i < 2; i++)
        if (!(betas[i] >= 0 && betas[i] < 1))
            return vjp_refuse(work, VJP_INVALID, "beta%d is %g; it must be at least 0 and less than 1", i + 1,
                              betas[i]);
    if (!(a->eps >= 0) || isinf(a->eps))
        return vjp_refuse(work, VJP_INVALID, "eps is %g; it must be 0 or a positive number", a->eps);
    if (!(a->weight_decay >= 0) || isinf(a->weight_decay))
        return vjp_refuse(work, VJP_INVALID, "weight_decay is %g; it must be 0 or a positive number", a->weight_decay);
    vjp_shape_own(work, ADAMW_W);
    const vjp_shape shape = work->shape[ADAMW_W];
    vjp_shape_set(work, "[...]", shape.ndim, shape.size);
    vjp_shape_set(work, "[]", 0, NULL);
    return VJP_OK;
}

static vjp_status check_values(const vjp_work *work) {
    int64_t step;
    double value;
    if (!vjp_index_at(vjp_data(work, ADAMW_STEP), vjp_type(work, ADAMW_STEP), 0, &step, &value))
        return vjp_refuse(work, VJP_INVALID, "step is %.9g, which is not an integer that f32 holds exactly", value);
    if (step >= 1) return VJP_OK;
    return vjp_refuse(work, VJP_INVALID, "step is %lld; the first step is 1", (long long)step);
}

const vjp_op vjp_op_adamw = {
    .info = {.name = "adamw",
             .about = "a step of Adam with decoupled weight decay",
             .pass = {{forward, 10, 3}},
             .attributes = attribute_rows,
             .attribute_count = 4,
             .attribute_bytes = sizeof(vjp_adamw_attributes)},
    .id = OP_ID(adamw),
    .infer = infer,
    .check_values = check_values,
};

vjp_status vjp_adamw_forward(vjp_device *device, const vjp_tensor *w_out, const vjp_tensor *m_out,
                             const vjp_tensor *v_out, const vjp_tensor *w, const vjp_tensor *m, const vjp_tensor *v,
                             const vjp_tensor *g, const vjp_tensor *lr, const vjp_tensor *step, const vjp_tensor *scale,
                             double beta1, double beta2, double eps, double weight_decay) {
    vjp_adamw_attributes values = {.beta1 = beta1, .beta2 = beta2, .eps = eps, .weight_decay = weight_decay};
    const vjp_tensor *tensors[] = {w_out, m_out, v_out, w, m, v, g, lr, step, scale};
    return vjp_call(device, &vjp_op_adamw, VJP_FORWARD, tensors, 10, &values);
}

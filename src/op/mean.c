/* mean: over a run of axes, which y no longer has. Maths: docs/ops/mean.md. */
#include "op/op.h"

static const vjp_slot forward[] = {
    {"y", "[outer, inner]", "the means; over all axes it has rank 0", VJP_KIND_STORAGE,
     VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 0},
    {"x", "[outer, length, inner]", "what is averaged; length stands for the axes that go", VJP_KIND_STORAGE, 0, 0},
};

static const vjp_slot backward[] = {
    {"dx", "[outer, length, inner]", "gradient of x", VJP_KIND_STORAGE, VJP_SLOT_OUTPUT | VJP_SLOT_ACCUMULATES, 0},
    {"dy", "[outer, inner]", "gradient of y", VJP_KIND_STORAGE, 0, 0},
    {"x", "[outer, length, inner]", "the forward's x, for its shape alone; may be absent when dx is there",
     VJP_KIND_STORAGE, VJP_SLOT_OPTIONAL, 0},
};

static const vjp_attribute attribute_rows[] = {
    {"axis", "the first axis of the run; negative: from the end", VJP_INTEGER, offsetof(vjp_mean_attributes, axis), 0,
     0, NULL},
    {"axes", "how many axes the run has; 0: all from `axis` on", VJP_INTEGER, offsetof(vjp_mean_attributes, axes), 1, 0,
     NULL},
};

/* The slot that x's shape is read off; -1: there is none. */
static int shape_source(const vjp_work *work) {
    if (work->pass == VJP_FORWARD) return MEAN_X;
    return work->tensor[MEAN_B_X] ? MEAN_B_X : work->tensor[MEAN_B_DX] ? MEAN_B_DX : -1;
}

/* The run's first axis, and the one behind it. */
static void run_of(const vjp_mean_attributes *a, int rank, int *first, int *end) {
    *first = (int)(a->axis < 0 ? a->axis + rank : a->axis);
    *end = a->axes ? *first + (int)a->axes : rank;
}

static vjp_status infer(vjp_work *work) {
    const vjp_mean_attributes *a = work->attributes;
    int source = shape_source(work), first, end;
    if (source < 0)
        return vjp_refuse(work, VJP_INVALID, "x and dx are both missing: one of them must say how long the axes are");
    vjp_shape_own(work, source);
    const vjp_shape x = work->shape[source];
    const char *name = vjp_slot_at(work, source)->name;
    if (a->axis < -x.ndim || a->axis >= x.ndim)
        return vjp_refuse(work, VJP_INVALID, "axis is %lld; %s has rank %d", (long long)a->axis, name, x.ndim);
    if (a->axes < 0 || a->axes > x.ndim)
        return vjp_refuse(work, VJP_INVALID, "axes is %lld; %s has rank %d", (long long)a->axes, name, x.ndim);
    run_of(a, x.ndim, &first, &end);
    if (end > x.ndim)
        return vjp_refuse(work, VJP_INVALID, "%lld axes from axis %d on; %s has rank %d", (long long)a->axes, first,
                          name, x.ndim);
    char text[VJP_SHAPE_TEXT];
    if (vjp_shape_product(&x, first, end) == 0)
        return vjp_refuse(work, VJP_INVALID, "%s has shape %s: there is no element to take the mean of", name,
                          vjp_shape_text(&x, text));
    int64_t y[VJP_MAX_DIMS];
    int rank = 0;
    for (int i = 0; i < x.ndim; i++)
        if (i < first || i >= end) y[rank++] = x.size[i];
    vjp_shape_set(work, "[outer, length, inner]", x.ndim, x.size);
    vjp_shape_set(work, "[outer, inner]", rank, y);
    return VJP_OK;
}

vjp_mean_sizes vjp_mean_sizes_of(const vjp_work *work) {
    const vjp_shape *x = &work->shape[work->pass == VJP_FORWARD ? MEAN_X : MEAN_B_DX];
    int first, end;
    run_of(work->attributes, x->ndim, &first, &end);
    return (vjp_mean_sizes){
        .outer = vjp_shape_product(x, 0, first),
        .length = vjp_shape_product(x, first, end),
        .inner = vjp_shape_product(x, end, x->ndim),
    };
}

/* The backward looks at x's shape alone. */
static void cost(const vjp_work *work, vjp_cost *cost) {
    if (work->pass == VJP_FORWARD || !work->tensor[MEAN_B_X]) return;
    vjp_mean_sizes s = vjp_mean_sizes_of(work);
    cost->bytes -= (double)(s.outer * s.length * s.inner) * (double)vjp_dtype_size(work->storage);
}

/* dx tells x's shape. */
static uint32_t keeps(const void *attributes, uint32_t wanted) {
    (void)attributes;
    (void)wanted;
    return 0;
}

const vjp_op vjp_op_mean = {
    .info = {.name = "mean",
             .about = "the mean over a run of axes",
             .pass = {{forward, 2, 1}, {backward, 3, 1}},
             .attributes = attribute_rows,
             .attribute_count = 2,
             .attribute_bytes = sizeof(vjp_mean_attributes)},
    .id = OP_ID(mean),
    .infer = infer,
    .keeps = keeps,
    .cost = cost,
};

vjp_status vjp_mean_forward(vjp_device *device, const vjp_tensor *y, const vjp_tensor *x, int64_t axis, int64_t axes) {
    vjp_mean_attributes values = {.axis = axis, .axes = axes};
    const vjp_tensor *tensors[] = {y, x};
    return vjp_call(device, &vjp_op_mean, VJP_FORWARD, tensors, 2, &values);
}

vjp_status vjp_mean_backward(vjp_device *device, const vjp_tensor *dx, const vjp_tensor *dy, const vjp_tensor *x,
                             int64_t axis, int64_t axes) {
    vjp_mean_attributes values = {.axis = axis, .axes = axes};
    const vjp_tensor *tensors[] = {dx, dy, x};
    return vjp_call(device, &vjp_op_mean, VJP_BACKWARD, tensors, 3, &values);
}

/* SPDX-License-Identifier: MIT */
/* mean: over consecutive axes, which y no longer has. Maths: docs/ops/mean.md. */
#include "op/op.h"

/* The slot that x's shape comes from; -1: there is none. */
static int shape_source(const vjp_work *work) {
    if (work->pass == VJP_FORWARD) return MEAN_X;
    return work->tensor[MEAN_B_X] ? MEAN_B_X : work->tensor[MEAN_B_DX] ? MEAN_B_DX : -1;
}

/* The first of the averaged axes, and the one after the last. */
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
        return vjp_refuse(work, VJP_INVALID, "%s has shape %s: it has no elements to average", name,
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

/* The backward uses only x's shape. */
static void cost(const vjp_work *work, vjp_cost *cost) {
    if (work->pass == VJP_FORWARD || !work->tensor[MEAN_B_X]) return;
    vjp_mean_sizes s = vjp_mean_sizes_of(work);
    cost->bytes -= (double)(s.outer * s.length * s.inner) * (double)vjp_dtype_size(work->storage);
}

/* dx already has x's shape. */
static uint32_t keeps(const void *attributes, uint32_t wanted) {
    (void)attributes;
    (void)wanted;
    return 0;
}

const vjp_op_rules vjp_mean_rules = {.infer = infer, .keeps = keeps, .cost = cost};

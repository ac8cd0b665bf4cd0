/* SPDX-License-Identifier: MIT */
/*
 * add and mul: b has a's last axes (all of them, some, or none) and is repeated over the others. A kernel sees a as a
 * matrix [rows, dim] and b as [dim].
 */
#include "op/op.h"

_Static_assert((int)ADD_A == (int)MUL_A && (int)ADD_B == (int)MUL_B, "both ops have these slots");
_Static_assert((int)ADD_B_DY == (int)MUL_B_DY && (int)ADD_B_DB == (int)MUL_B_DB, "both ops have these slots");

/* Sets every shape of either pass. `source` is the backward's slot that has b's axes when db is absent; -1: none. */
static vjp_status infer(vjp_work *work, int64_t b_axes, int source) {
    bool is_forward = work->pass == VJP_FORWARD;
    int whole = is_forward ? ADD_A : ADD_B_DY, part = is_forward ? ADD_B : ADD_B_DB;
    if (source >= 0 && work->tensor[source]) part = source;
    vjp_shape_own(work, whole);
    const vjp_shape shape = work->shape[whole];
    const char *whole_name = vjp_slot_at(work, whole)->name, *part_name = vjp_slot_at(work, part)->name;
    if (b_axes < -1 || b_axes > shape.ndim)
        return vjp_refuse(work, VJP_INVALID, "b_axes is %lld; it must be -1 to %d, the rank of %s", (long long)b_axes,
                          shape.ndim, whole_name);
    const vjp_tensor *b = work->tensor[part];
    int axes = b ? b->ndim : b_axes < 0 ? shape.ndim : (int)b_axes;
    if (b_axes >= 0 && b_axes != axes)
        return vjp_refuse(work, VJP_INVALID, "b_axes is %lld, but %s has rank %d", (long long)b_axes, part_name, axes);
    if (axes > shape.ndim)
        return vjp_refuse(work, VJP_INVALID, "%s has rank %d; it has the last axes of %s, which are %d", part_name,
                          axes, whole_name, shape.ndim);
    vjp_shape_set(work, "[...]", shape.ndim, shape.size);
    vjp_shape_set(work, "[trailing]", axes, shape.size + (shape.ndim - axes));
    return VJP_OK;
}

vjp_broadcast_sizes vjp_broadcast_sizes_of(const vjp_work *work) {
    bool is_forward = work->pass == VJP_FORWARD;
    const vjp_shape *whole = &work->shape[is_forward ? ADD_A : ADD_B_DY];
    const vjp_shape *part = &work->shape[is_forward ? ADD_B : ADD_B_DB];
    return (vjp_broadcast_sizes){
        .rows = vjp_shape_product(whole, 0, whole->ndim - part->ndim),
        .dim = vjp_shape_product(part, 0, part->ndim),
    };
}

static vjp_status add_infer(vjp_work *work) {
    const vjp_add_attributes *a = work->attributes;
    return infer(work, a->b_axes, -1);
}

const vjp_op_rules vjp_add_rules = {.infer = add_infer, .passes_gradient = 1u << ADD_B_DA | 1u << ADD_B_DB};

static vjp_status mul_infer(vjp_work *work) {
    const vjp_mul_attributes *a = work->attributes;
    if (work->pass == VJP_FORWARD) return infer(work, a->b_axes, -1);
    if (work->tensor[MUL_B_DA] && !work->tensor[MUL_B_B])
        return vjp_refuse(work, VJP_INVALID, "b is missing: da = dy * b needs it");
    if (work->tensor[MUL_B_DB] && !work->tensor[MUL_B_A])
        return vjp_refuse(work, VJP_INVALID, "a is missing: db = dy * a needs it");
    return infer(work, a->b_axes, MUL_B_B);
}

/* An input that only an absent output needs is not read. */
static void mul_cost(const vjp_work *work, vjp_cost *cost) {
    if (work->pass == VJP_FORWARD) return;
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    if (work->tensor[MUL_B_A] && !work->tensor[MUL_B_DB])
        cost->bytes -= (double)(s.rows * s.dim) * (double)vjp_dtype_size(work->storage);
    if (work->tensor[MUL_B_B] && !work->tensor[MUL_B_DA])
        cost->bytes -= (double)s.dim * (double)vjp_dtype_size(vjp_type(work, MUL_B_B));
}

/* Each gradient needs the other factor. */
static uint32_t mul_keeps(const void *attributes, uint32_t wanted) {
    (void)attributes;
    return (wanted >> MUL_B_DB & 1) << MUL_B_A | (wanted >> MUL_B_DA & 1) << MUL_B_B;
}

const vjp_op_rules vjp_mul_rules = {.infer = mul_infer, .keeps = mul_keeps, .cost = mul_cost};

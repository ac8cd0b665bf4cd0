/* What add and mul share: the shapes, and the matrix that a kernel sees. */
#include "op/broadcast.h"

_Static_assert((int)ADD_A == (int)MUL_A && (int)ADD_B == (int)MUL_B, "both ops have these slots");
_Static_assert((int)ADD_B_DY == (int)MUL_B_DY && (int)ADD_B_DB == (int)MUL_B_DB, "both ops have these slots");

vjp_status vjp_broadcast_infer(vjp_work *work, int64_t b_axes, int source) {
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

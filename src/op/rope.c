/* SPDX-License-Identifier: MIT */
/* rope: rotates pairs of elements by a table's angles; the backward rotates back. Maths: docs/ops/rope.md. */
#include "op/op.h"

static vjp_status infer(vjp_work *work) {
    const vjp_rope_attributes *a = work->attributes;
    const char *name = vjp_slot_at(work, ROPE_X)->name;
    vjp_shape_own(work, ROPE_X);
    const vjp_shape shape = work->shape[ROPE_X];
    if (shape.ndim < 3)
        return vjp_refuse(work, VJP_INVALID, "%s has rank %d; it must be 3 or more: [..., T, heads, head_dim]", name,
                          shape.ndim);
    int64_t time = shape.size[shape.ndim - 3], head_dim = shape.size[shape.ndim - 1];
    int64_t n_rot = a->n_rot ? a->n_rot : head_dim;
    if (n_rot < 0 || n_rot > head_dim)
        return vjp_refuse(work, VJP_INVALID, "n_rot is %lld; head_dim is %lld, so it must be 0 to %lld",
                          (long long)n_rot, (long long)head_dim, (long long)head_dim);
    if (n_rot % 2)
        return vjp_refuse(work, VJP_INVALID, "n_rot is %lld; elements rotate in pairs, so it must be even",
                          (long long)n_rot);
    const vjp_tensor *cosine = work->tensor[ROPE_COSINE];
    if (cosine->ndim != 2)
        return vjp_refuse(work, VJP_INVALID, "cosine has rank %d; it must be 2: [positions, n_rot/2]", cosine->ndim);
    if (!work->tensor[ROPE_POSITIONS] && cosine->shape[0] < time)
        return vjp_refuse(work, VJP_INVALID, "%s has %lld times, but the tables hold %lld positions", name,
                          (long long)time, (long long)cosine->shape[0]);
    vjp_shape_set(work, "[..., T, heads, head_dim]", shape.ndim, shape.size);
    vjp_shape_set(work, "[positions, n_rot/2]", 2, (int64_t[]){cosine->shape[0], n_rot / 2});
    const vjp_tensor *positions = work->tensor[ROPE_POSITIONS];
    bool each = positions && positions->ndim > 1;
    vjp_shape_set(work, "[T] or [..., T]", each ? shape.ndim - 2 : 1, each ? shape.size : &time);
    return VJP_OK;
}

static vjp_status check_values(const vjp_work *work) {
    if (!work->tensor[ROPE_POSITIONS]) return VJP_OK;
    return vjp_check_indices(work, ROPE_POSITIONS, work->shape[ROPE_COSINE].size[0], "positions of the tables");
}

vjp_rope_sizes vjp_rope_sizes_of(const vjp_work *work) {
    const vjp_rope_attributes *a = work->attributes;
    const vjp_shape *shape = &work->shape[ROPE_X];
    int last = shape->ndim - 1;
    return (vjp_rope_sizes){
        .batch = vjp_shape_product(shape, 0, last - 2),
        .time = shape->size[last - 2],
        .heads = shape->size[last - 1],
        .head_dim = shape->size[last],
        .n_rot = a->n_rot ? a->n_rot : shape->size[last],
        .table_rows = work->shape[ROPE_COSINE].size[0],
        .position_stride = work->shape[ROPE_POSITIONS].ndim > 1 ? shape->size[last - 2] : 0,
    };
}

const vjp_op_rules vjp_rope_rules = {.infer = infer, .check_values = check_values};

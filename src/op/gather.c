/* SPDX-License-Identifier: MIT */
/* gather: rows of a table by index; the backward adds rows back, repeats in order. Maths: docs/ops/gather.md. */
#include "op/op.h"

_Static_assert((int)GATHER_INDEX == (int)GATHER_B_INDEX, "both passes have the index in the same slot");

/* The table's rank from dy's: the index's axes replace one axis of the table. */
static int table_rank(const vjp_work *work) {
    if (work->pass == VJP_FORWARD) return work->tensor[GATHER_TABLE]->ndim;
    return work->tensor[GATHER_B_DY]->ndim - work->tensor[GATHER_B_INDEX]->ndim + 1;
}

static vjp_status infer(vjp_work *work) {
    const vjp_gather_attributes *a = work->attributes;
    bool is_forward = work->pass == VJP_FORWARD;
    int index = is_forward ? GATHER_INDEX : GATHER_B_INDEX;
    vjp_shape_own(work, index);
    const vjp_shape index_shape = work->shape[index];
    int rank = table_rank(work);
    if (rank < 1)
        return vjp_refuse(work, VJP_INVALID, "%s has rank %d and index rank %d: no table has such rows",
                          is_forward ? "table" : "dy", work->tensor[GATHER_TABLE]->ndim, index_shape.ndim);
    if (rank > VJP_MAX_DIMS)
        return vjp_refuse(work, VJP_INVALID,
                          "dy has rank %d and index rank %d: dtable would have rank %d; ranks go to %d",
                          work->tensor[GATHER_B_DY]->ndim, index_shape.ndim, rank, VJP_MAX_DIMS);
    if (a->axis < -rank || a->axis >= rank)
        return vjp_refuse(work, VJP_INVALID, "axis is %lld; the table has rank %d", (long long)a->axis, rank);
    int axis = (int)(a->axis < 0 ? a->axis + rank : a->axis);
    if (rank - 1 + index_shape.ndim > VJP_MAX_DIMS)
        return vjp_refuse(work, VJP_INVALID, "y would have rank %d; ranks go to %d", rank - 1 + index_shape.ndim,
                          VJP_MAX_DIMS);

    int64_t table[VJP_MAX_DIMS], y[VJP_MAX_DIMS];
    if (is_forward) {
        vjp_shape_own(work, GATHER_TABLE);
        for (int i = 0; i < rank; i++)
            table[i] = work->shape[GATHER_TABLE].size[i];
    } else {
        const vjp_tensor *dy = work->tensor[GATHER_B_DY], *dtable = work->tensor[GATHER_B_DTABLE];
        int64_t rows = a->rows ? a->rows : dtable && dtable->ndim == rank ? dtable->shape[axis] : 0;
        if (rows < 0) return vjp_refuse(work, VJP_INVALID, "rows is %lld", (long long)rows);
        bool adds = vjp_shape_product(&index_shape, 0, index_shape.ndim) > 0;
        if (rows == 0 && !dtable && adds)
            return vjp_refuse(work, VJP_INVALID,
                              "dtable is missing: the table's number of rows comes from it; give it, or set the "
                              "attribute rows to the length of the table's axis %d",
                              axis);
        if (rows == 0 && dtable && dtable->ndim == rank && adds)
            return vjp_refuse(work, VJP_INVALID,
                              "dtable has no rows, and index has some to add: set the attribute rows to the length of "
                              "the table's axis %d, or give a dtable of that length",
                              axis);
        for (int i = 0; i < rank; i++)
            table[i] = i < axis ? dy->shape[i] : i == axis ? rows : dy->shape[i - 1 + index_shape.ndim];
    }
    for (int i = 0; i < axis; i++)
        y[i] = table[i];
    for (int i = 0; i < index_shape.ndim; i++)
        y[axis + i] = index_shape.size[i];
    for (int i = axis + 1; i < rank; i++)
        y[i - 1 + index_shape.ndim] = table[i];
    int y_rank = rank - 1 + index_shape.ndim;
    /* The caller will allocate an absent output: its size must fit too. */
    if (!vjp_sizes_fit(y_rank, y))
        return vjp_refuse(work, VJP_INVALID, "y is too large: the product of its sizes overflows");
    if (!vjp_sizes_fit(rank, table))
        return vjp_refuse(work, VJP_INVALID, "the table is too large: the product of its sizes overflows");
    vjp_shape_set(work, "[outer, rows, inner]", rank, table);
    vjp_shape_set(work, "[outer, count, inner]", y_rank, y);
    return VJP_OK;
}

static vjp_status check_values(const vjp_work *work) {
    if (work->pass == VJP_BACKWARD && !work->tensor[GATHER_B_DTABLE]) return VJP_OK;
    return vjp_check_indices(work, GATHER_INDEX, vjp_gather_sizes_of(work).rows, "rows of the table");
}

/* The forward reads only the selected rows, not the whole table; the backward writes the whole dtable. */
static void cost(const vjp_work *work, vjp_cost *cost) {
    if (work->pass == VJP_BACKWARD) return;
    vjp_gather_sizes s = vjp_gather_sizes_of(work);
    double size = (double)vjp_dtype_size(work->storage);
    double table = (double)s.outer * (double)s.rows * (double)s.inner * size;
    double read = (double)s.outer * (double)s.count * (double)s.inner * size;
    cost->bytes += (read < table ? read : table) - table;
}

vjp_gather_sizes vjp_gather_sizes_of(const vjp_work *work) {
    const vjp_gather_attributes *a = work->attributes;
    int slot = work->pass == VJP_FORWARD ? GATHER_TABLE : GATHER_B_DTABLE;
    const vjp_shape *table = &work->shape[slot], *index = &work->shape[GATHER_INDEX];
    int axis = (int)(a->axis < 0 ? a->axis + table->ndim : a->axis);
    return (vjp_gather_sizes){
        .outer = vjp_shape_product(table, 0, axis),
        .rows = table->size[axis],
        .inner = vjp_shape_product(table, axis + 1, table->ndim),
        .count = vjp_shape_product(index, 0, index->ndim),
    };
}

const vjp_op_rules vjp_gather_rules = {.infer = infer, .check_values = check_values, .cost = cost};

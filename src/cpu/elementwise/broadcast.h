/* SPDX-License-Identifier: MIT */
/*
 * add and mul on the CPU. a is [rows, dim], b is [dim]; y = a + b or a * b. In the backward da is dy or dy * b, and db
 * is dy or dy * a, summed over the rows unless there is only one (sums.h). One pass makes both, so dy is read once.
 *
 * Narrow rows are joined as sums.h does it: b is then first repeated, in f32, over the width of the joined rows.
 */
#ifndef VJP_CPU_BROADCAST_H
#define VJP_CPU_BROADCAST_H

#include "cpu/reduce/sums.h"

/* Bytes of the repeated b, rounded up so that partial sums after it are aligned; 0 where rows are not joined. */
static inline size_t broadcast_tile_bytes(const vjp_broadcast_sizes *s) {
    if (!column_is_narrow(s->rows, s->dim)) return 0;
    return (size_t)vjp_round_up(column_width(s->rows, s->dim) * (int64_t)sizeof(float), 64);
}

/* Makes input k, of type OTHER, the row of the call. */
static inline void broadcast_set_row(element_call *c, int k, const vjp_work *work, const vjp_broadcast_sizes *s) {
    if (s->rows == 1) c->bytes += dtype_bytes(c->other);
    c->width = column_width(s->rows, s->dim);
    if (!column_is_narrow(s->rows, s->dim) || !c->in[k]) return;
    float *tile = work->workspace;
    for (int64_t j = 0; j < c->width; j++)
        tile[j] = j < s->dim ? f32_load(c->other, c->in[k], j) : tile[j - s->dim];
    c->in[k] = tile;
    c->other = VJP_F32;
}

/* `op` has the inputs a and b. */
static inline vjp_status broadcast_forward(const vjp_work *work, const element_op *op, vjp_task task) {
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    element_call c = element_call_of(work, op, NULL);
    if (!c.out[0] || s.rows * s.dim == 0) return VJP_OK;
    broadcast_set_row(&c, 1, work, &s);
    element_start(work, op, &c, s.rows * s.dim, task);
    return VJP_OK;
}

static inline size_t broadcast_forward_workspace(const vjp_work *work) {
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    return broadcast_tile_bytes(&s);
}

/* The task of a backward. */
INLINE void broadcast_backward_task(element_formula formula, const element_op *op, const void *call, size_t task) {
    if (((const element_call *)call)->columns)
        element_dispatch(column_body, formula, op, call, task);
    else
        element_task(formula, op, call, task);
}

/* Bytes moved for each element. The order of the sums depends on it: every tensor is counted, absent ones too. */
static inline size_t broadcast_backward_bytes(const vjp_work *work) {
    return 3 * dtype_bytes(work->storage);
}

static inline column_sums broadcast_column_sums(const vjp_work *work, const vjp_broadcast_sizes *s) {
    return (column_sums){.matrices = 1,
                         .rows = s->rows,
                         .dim = s->dim,
                         .to = vjp_data(work, ADD_B_DB),
                         .to_dtype = vjp_type(work, ADD_B_DB),
                         .accumulate = vjp_accumulates(work, ADD_B_DB),
                         .factor = 1};
}

static inline size_t broadcast_backward_workspace(const vjp_work *work) {
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    column_sums c = broadcast_column_sums(work, &s);
    size_t sums = work->tensor[ADD_B_DB] && s.rows != 1 ? column_plan(&c, broadcast_backward_bytes(work)) : 0;
    return broadcast_tile_bytes(&s) + sums;
}

/* `op` has the input dy and for mul also a and b, and the outputs da and db. */
static inline vjp_status broadcast_backward(const vjp_work *work, const element_op *op, vjp_task task) {
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    element_call c = element_call_of(work, op, NULL);
    bool product = op->inputs > 1;
    if (!product && c.out[0] == c.in[0]) c.out[0] = NULL; /* da is there already */
    if (s.dim == 0 || (!c.out[0] && !c.out[1])) return VJP_OK;
    if (!c.out[0]) c.in[2] = NULL; /* b is needed for da alone, a for db alone */
    if (!c.out[1]) c.in[1] = NULL;
    if (product) broadcast_set_row(&c, 2, work, &s);
    if (!c.out[1] || s.rows == 1) {
        element_start(work, op, &c, s.rows * s.dim, task);
        return VJP_OK;
    }
    column_sums columns = broadcast_column_sums(work, &s);
    size_t bytes = broadcast_backward_bytes(work);
    column_plan(&columns, bytes);
    if (work->workspace) columns.partial = (double *)((char *)work->workspace + broadcast_tile_bytes(&s));
    c.out[1] = NULL;
    c.columns = &columns;
    c.width = columns.width;
    element_set_stores(&c, work, op, s.rows * s.dim);
    column_run(work, &c, &columns, bytes, task);
    return VJP_OK;
}

#endif

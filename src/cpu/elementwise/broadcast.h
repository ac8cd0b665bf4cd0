/*
 * add and mul on the CPU. a is [rows, dim], b is [dim]; y = a + b or a * b. In the backward da is dy or dy * b, and db
 * is dy or dy * a summed over the rows (sums.h). One pass makes both, so dy is read from memory once; everything of an
 * element is read before any of it is written, so da may lie in the place of dy or of a.
 *
 * Narrow rows are laid side by side as sums.h does it: b is then first written out in f32 as often as the row is wide.
 */
#ifndef VJP_CPU_BROADCAST_H
#define VJP_CPU_BROADCAST_H

#include "cpu/reduce/sums.h"
#include "op/op.h"

typedef struct broadcast_call {
    void *out; /* y or da; NULL: not wanted */
    void *db;  /* where it is no sum */
    const void *a, *b, *dy;
    vjp_dtype b_dtype, db_dtype;
    write_mode mode, db_mode;
    int64_t width; /* of the rows as they are walked */
    element_cut cut;
    column_sums columns;
    cpu_cut column_cut;
} broadcast_call;

/* ---- Forward, and a da that comes alone: one operand and b ------------------------------------------- */

INLINE vf broadcast_value(const void *call, element_variant v, int64_t i, int64_t j, int64_t n) {
    const broadcast_call *c = call;
    vf a = vf_load_part(v.dtype, c->a, i, n), b = vf_load_part(v.other, c->b, j, n);
    return v.product ? vf_mul(a, b) : vf_add(a, b);
}

INLINE void broadcast_rows(const broadcast_call *c, size_t task, element_variant v) {
    int64_t begin = element_begin(&c->cut, task), end = element_end(&c->cut, task);
    for (int64_t row = begin / c->width * c->width; row < end; row += c->width) {
        int64_t from = row < begin ? begin : row, to = row + c->width < end ? row + c->width : end;
        element_walk(c->mode, v.dtype, broadcast_value, c, v, c->out, from, to, row);
    }
    if (c->mode == WRITE_STREAM) vf_stream_done();
}

INLINE void broadcast_task(const void *call, size_t task, vjp_dtype dtype, bool product) {
    const broadcast_call c = *(const broadcast_call *)call;
    if (c.b_dtype == dtype)
        broadcast_rows(&c, task, (element_variant){dtype, dtype, product});
    else
        broadcast_rows(&c, task, (element_variant){dtype, VJP_F32, product});
}

/* ---- Backward: da and what goes into db -------------------------------------------------------------- */

/* Writes da; returns what these elements give to db. */
INLINE vf broadcast_gradient(const void *call, element_variant v, int64_t i, int64_t j, int64_t n) {
    const broadcast_call *c = call;
    vf dy = vf_load_part(v.dtype, c->dy, i, n), share = dy;
    if (v.product && c->a) share = vf_mul(dy, vf_load_part(v.dtype, c->a, i, n));
    if (!c->out) return share;
    vf da = v.product ? vf_mul(dy, vf_load_part(v.other, c->b, j, n)) : dy;
    vf_write_part(c->mode, v.dtype, c->out, i, n, da);
    return share;
}

/* Both of one shape. */
INLINE void broadcast_pairs(const broadcast_call *c, size_t task, element_variant v) {
    int64_t end = element_end(&c->cut, task);
    for (int64_t i = element_begin(&c->cut, task); i < end; i += LANES) {
        int64_t n = end - i < LANES ? end - i : LANES;
        vf share = n == LANES ? broadcast_gradient(c, v, i, i, LANES) : broadcast_gradient(c, v, i, i, n);
        if (!c->db) continue;
        if (c->db_dtype == v.dtype)
            vf_write_part(c->db_mode, v.dtype, c->db, i, n, share);
        else
            vf_write_part(c->db_mode, VJP_F32, c->db, i, n, share);
    }
}

INLINE void broadcast_columns(const broadcast_call *c, size_t task, element_variant v) {
    for (int64_t item = cpu_cut_begin(&c->column_cut, task); item < cpu_cut_end(&c->column_cut, task); item++)
        column_item(broadcast_gradient, c, v, &c->columns, item);
}

INLINE void broadcast_backward_as(const broadcast_call *c, size_t task, element_variant v) {
    if (c->columns.to)
        broadcast_columns(c, task, v);
    else
        broadcast_pairs(c, task, v);
    if (c->mode == WRITE_STREAM || c->db_mode == WRITE_STREAM) vf_stream_done();
}

INLINE void broadcast_backward_task(const void *call, size_t task, vjp_dtype dtype, bool product) {
    const broadcast_call c = *(const broadcast_call *)call;
    if (!product || c.b_dtype == dtype)
        broadcast_backward_as(&c, task, (element_variant){dtype, dtype, product});
    else
        broadcast_backward_as(&c, task, (element_variant){dtype, VJP_F32, product});
}

/* ---- Calls ------------------------------------------------------------------------------------------- */

/* Bytes of b written out, where rows are laid side by side. */
static inline size_t broadcast_tile_bytes(const vjp_broadcast_sizes *s) {
    return column_is_narrow(s->rows, s->dim) ? (size_t)column_width(s->rows, s->dim) * sizeof(float) : 0;
}

/* Sets b: as it is, or written out into `tile`. */
static inline void broadcast_set_b(broadcast_call *c, const vjp_work *work, int slot, const vjp_broadcast_sizes *s,
                                   float *tile) {
    c->width = column_width(s->rows, s->dim);
    c->b = vjp_data(work, slot);
    c->b_dtype = vjp_type(work, slot);
    if (!column_is_narrow(s->rows, s->dim) || !c->b) return;
    for (int64_t j = 0; j < s->dim; j++)
        tile[j] = f32_load(c->b_dtype, c->b, j);
    for (int64_t j = s->dim; j < c->width; j++)
        tile[j] = tile[j - s->dim];
    c->b = tile;
    c->b_dtype = VJP_F32;
}

/* out = a + b or a * b, `out` and `a` slots of the storage type. */
static inline vjp_status broadcast_run(const vjp_work *work, const vjp_task *tasks, int out, int a, int b) {
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    int64_t count = s.rows * s.dim;
    broadcast_call c = {.out = vjp_data(work, out), .a = vjp_data(work, a)};
    if (!c.out || count == 0) return VJP_OK;
    broadcast_set_b(&c, work, b, &s, work->workspace);
    c.mode = element_mode(work, out, count, c.out == c.a);
    c.cut = element_cut_of(count, 2 * dtype_bytes(work->storage) + (s.rows == 1 ? dtype_bytes(c.b_dtype) : 0));
    vjp_cpu_for(work, c.cut.units.count, tasks[work->storage], &c);
    return VJP_OK;
}

static inline size_t broadcast_forward_workspace(const vjp_work *work) {
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    return broadcast_tile_bytes(&s);
}

/* Bytes that an element of the backward moves; it decides the cut, so all that could be there is counted. */
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

/* b written out, rounded up so that the partial sums behind it are aligned. */
static inline size_t broadcast_tile_room(const vjp_broadcast_sizes *s) {
    return (broadcast_tile_bytes(s) + 63) / 64 * 64;
}

static inline size_t broadcast_backward_workspace(const vjp_work *work) {
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    column_sums c = broadcast_column_sums(work, &s);
    size_t sums = work->tensor[ADD_B_DB] && s.rows != 1 ? column_plan(&c, broadcast_backward_bytes(work)) : 0;
    return broadcast_tile_room(&s) + sums;
}

/* `a` and `b`: the slots that mul needs; -1 for add. */
static inline vjp_status broadcast_backward(const vjp_work *work, const vjp_task *tasks, int a, int b) {
    vjp_broadcast_sizes s = vjp_broadcast_sizes_of(work);
    int64_t count = s.rows * s.dim;
    size_t bytes = broadcast_backward_bytes(work);
    broadcast_call c = {.dy = vjp_data(work, ADD_B_DY), .out = vjp_data(work, ADD_B_DA), .width = s.dim};
    void *db = vjp_data(work, ADD_B_DB);
    if (b < 0 && c.out == c.dy) c.out = NULL; /* it is there already */
    if (s.dim == 0 || (!c.out && !db)) return VJP_OK;
    if (a >= 0 && db) c.a = vjp_data(work, a);
    if (b >= 0) broadcast_set_b(&c, work, b, &s, work->workspace);
    bool sums = db && s.rows != 1, aligned = vf_stream_aligned(work->storage, c.out);
    bool in_place = c.out == c.dy || (c.out && a >= 0 && c.out == vjp_data(work, a));
    if (sums) aligned = aligned && column_width(s.rows, s.dim) % LANES == 0;
    c.mode = WRITE_PLAIN;
    if (c.out) c.mode = write_mode_of(work, ADD_B_DA, count * (int64_t)dtype_bytes(work->storage), aligned, in_place);
    if (sums) {
        c.columns = broadcast_column_sums(work, &s);
        column_plan(&c.columns, bytes);
        c.columns.partial = (double *)((char *)work->workspace + broadcast_tile_room(&s));
        c.column_cut = column_cut(&c.columns, bytes);
        vjp_cpu_for(work, c.column_cut.count, tasks[work->storage], &c);
        column_total(work, &c.columns);
        return VJP_OK;
    }
    if (db) {
        c.db = db;
        c.db_dtype = vjp_type(work, ADD_B_DB);
        c.db_mode = write_mode_of(work, ADD_B_DB, count * (int64_t)dtype_bytes(c.db_dtype),
                                  vf_stream_aligned(c.db_dtype, db), false);
    }
    c.cut = element_cut_of(count, bytes);
    vjp_cpu_for(work, c.cut.units.count, tasks[work->storage], &c);
    return VJP_OK;
}

#endif

/*
 * Rows of numbers in any storage type: into f32 and back, and packed matrices of them as the operands and results of a
 * matrix product (gemm.h).
 */
#ifndef VJP_CPU_ROWS_H
#define VJP_CPU_ROWS_H

#include "cpu/gemm/gemm.h"
#include "cpu/simd/vec.h"

/* Bytes of a part of the workspace, so that the next begins on a cache line. */
static inline size_t round_up(int64_t bytes) {
    return ((size_t)bytes + 63) / 64 * 64;
}

INLINE void load_as(vjp_dtype dtype, const void *from, int64_t at, int64_t count, float *to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        vf_store(VJP_F32, to, i, vf_load(dtype, from, at + i));
    if (i < count) vf_store_part(VJP_F32, to, i, count - i, vf_load_part(dtype, from, at + i, count - i));
}

INLINE void store_as(vjp_dtype dtype, void *to, int64_t at, int64_t count, const float *from, bool accumulate) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vf v = vf_load(VJP_F32, from, i);
        if (accumulate) v = vf_add(vf_load(dtype, to, at + i), v);
        vf_store(dtype, to, at + i, v);
    }
    if (i == count) return;
    vf v = vf_load_part(VJP_F32, from, i, count - i);
    if (accumulate) v = vf_add(vf_load_part(dtype, to, at + i, count - i), v);
    vf_store_part(dtype, to, at + i, count - i, v);
}

OUTLINE void load_row(vjp_dtype dtype, const void *from, int64_t at, int64_t count, float *to) {
    switch (dtype) {
    case VJP_BF16: load_as(VJP_BF16, from, at, count, to); break;
    case VJP_F16: load_as(VJP_F16, from, at, count, to); break;
    default: load_as(VJP_F32, from, at, count, to); break;
    }
}

OUTLINE void store_row(vjp_dtype dtype, void *to, int64_t at, int64_t count, const float *from, bool accumulate) {
    switch (dtype) {
    case VJP_BF16: store_as(VJP_BF16, to, at, count, from, accumulate); break;
    case VJP_F16: store_as(VJP_F16, to, at, count, from, accumulate); break;
    default: store_as(VJP_F32, to, at, count, from, accumulate); break;
    }
}

static inline char *element(const void *data, vjp_dtype dtype, int64_t at) {
    return data ? (char *)data + at * (int64_t)dtype_bytes(dtype) : NULL;
}

/* A matrix in slabs from (row, column) on, item_row and item_column of the batch's item further. */
static inline const float *slab_at(const gemm_operand *o, int64_t item, int64_t row, int64_t column) {
    row += item * o->item_row;
    column += item * o->item_column;
    return (const float *)o->data + slab_place(o->slab_rows, row, column);
}

/* Some numbers of a row of a matrix in slabs: where they are, or over a slab's edge gathered in `buffer`. */
OUTLINE const float *slab_row(const gemm_operand *o, int64_t row, int64_t column, int64_t count, float *buffer) {
    const float *data = o->data;
    if (column % SLAB_COLUMNS + count <= SLAB_COLUMNS) return data + slab_place(o->slab_rows, row, column);
    for (int64_t done = 0; done < count;) {
        int64_t n = least(count - done, SLAB_COLUMNS - (column + done) % SLAB_COLUMNS);
        memcpy(buffer + done, data + slab_place(o->slab_rows, row, column + done), (size_t)n * sizeof *buffer);
        done += n;
    }
    return buffer;
}

/* Some numbers of a row of an operand as stored, in f32. */
static inline void make_row(const gemm_operand *o, int64_t row, int64_t column, int64_t count, float *to) {
    if (o->read)
        o->read(o->source, row, column, count, to);
    else
        load_row(o->dtype, o->data, row * o->stride + column, count, to);
}

/* Rows as stored, from (row, column) on: where they are, or made in `buffer`. */
INLINE const float *stored_row(const gemm_operand *o, int64_t item, int64_t row, int64_t column, int64_t count,
                               float *buffer) {
    row += item * o->item_row;
    column += item * o->item_column;
    if (o->slab_rows) return slab_row(o, row, column, count, buffer);
    if (!is_made(o)) return (const float *)o->data + row * o->stride + column;
    make_row(o, row, column, count, buffer);
    return buffer;
}

/* A packed matrix in memory, to read operands from or to put results in. */
typedef struct matrix {
    void *data;
    vjp_dtype dtype;
    int64_t columns;
    bool accumulate;
} matrix;

static inline matrix matrix_of(const vjp_work *work, int slot, int64_t columns, int64_t first_row) {
    vjp_dtype dtype = vjp_type(work, slot);
    return (matrix){element(vjp_data(work, slot), dtype, first_row * columns), dtype, columns,
                    vjp_accumulates(work, slot)};
}

static inline void finish_matrix(const void *target, int64_t row, int64_t column, int64_t count, const float *sums) {
    const matrix *m = target;
    store_row(m->dtype, m->data, row * m->columns + column, count, sums, m->accumulate);
}

/* Item i of a batch begins at row i * item_row. */
static inline gemm_operand operand_of(const matrix *m, bool transposed, int64_t item_row) {
    return (gemm_operand){
        .transposed = transposed, .dtype = m->dtype, .data = m->data, .stride = m->columns, .item_row = item_row};
}

static inline gemm_result result_in(const matrix *m, int64_t item_row) {
    return (gemm_result){.finish = m->dtype == VJP_F32 ? NULL : finish_matrix,
                         .target = m,
                         .plain = m->data,
                         .stride = m->columns,
                         .dtype = m->dtype,
                         .accumulate = m->accumulate,
                         .item_row = item_row};
}

#endif

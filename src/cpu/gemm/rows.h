/* SPDX-License-Identifier: MIT */
/*
 * Rows of numbers in any storage type: conversion to f32 and back, and dense matrices of them as operands and results
 * of a matrix product (gemm.h).
 */
#ifndef VJP_CPU_ROWS_H
#define VJP_CPU_ROWS_H

#include "cpu/gemm/gemm.h"
#include "cpu/simd/stream.h"

/* Bytes of a section of the workspace, padded so that the next starts on a cache line. */
static inline size_t whole_lines(int64_t bytes) {
    return (size_t)vjp_round_up(bytes, CACHE_LINE);
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

static inline size_t max_bytes(size_t a, size_t b) {
    return a > b ? a : b;
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

/* Index of (row, column) of an item of the batch, in a matrix whose rows are `stride` apart. */
static inline int64_t operand_index(const gemm_operand *o, int64_t item, int64_t row, int64_t column) {
    return (row + item * o->item_row) * o->stride + column + item * o->item_column;
}

/* Address of (row, column) of an item of the batch, in a matrix stored in slabs. */
static inline const float *slab_at(const gemm_operand *o, int64_t item, int64_t row, int64_t column) {
    row += item * o->item_row;
    column += item * o->item_column;
    return (const float *)o->data + slab_index(o->slab_rows, row, column);
}

/* Part of a row of a matrix in slabs: in place, or copied to `buffer` where it crosses the edge of a slab. */
OUTLINE const float *slab_row(const gemm_operand *o, int64_t row, int64_t column, int64_t count, float *buffer) {
    const float *data = o->data;
    if (column % SLAB_COLUMNS + count <= SLAB_COLUMNS) return data + slab_index(o->slab_rows, row, column);
    for (int64_t done = 0; done < count;) {
        int64_t n = vjp_min(count - done, SLAB_COLUMNS - (column + done) % SLAB_COLUMNS);
        memcpy(buffer + done, data + slab_index(o->slab_rows, row, column + done), (size_t)n * sizeof *buffer);
        done += n;
    }
    return buffer;
}

/* Part of a stored row of an operand, converted to f32. */
static inline void convert_row(const gemm_operand *o, int64_t row, int64_t column, int64_t count, float *to) {
    if (o->read)
        o->read(o->source, row, column, count, to);
    else
        load_row(o->dtype, o->data, row * o->stride + column, count, to);
}

/* Part of a stored row, from (row, column): in place, or converted in `buffer`. */
INLINE const float *stored_row(const gemm_operand *o, int64_t item, int64_t row, int64_t column, int64_t count,
                               float *buffer) {
    row += item * o->item_row;
    column += item * o->item_column;
    if (o->slab_rows) return slab_row(o, row, column, count, buffer);
    if (is_plain_f32(o)) return (const float *)o->data + row * o->stride + column;
    convert_row(o, row, column, count, buffer);
    return buffer;
}

/* A dense matrix in memory, as an operand or a result. */
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

static inline void store_epilogue(const void *target, int64_t row, int64_t column, int64_t count, const float *sums) {
    const matrix *m = target;
    store_row(m->dtype, m->data, row * m->columns + column, count, sums, m->accumulate);
}

/* A batch of products with the engines and threads of the device; the caller sets its operands and result. */
static inline gemm_call product_of(const vjp_work *work, int64_t items, int64_t m, int64_t n, int64_t k) {
    const cpu_state *state = cpu_state_of(work);
    return (gemm_call){.blas = state->blas,
                       .amx = state->tiles,
                       .bf16 = state->bf16,
                       .fixed_rows = state->fixed_rows,
                       .threads = state->threads,
                       .items = items,
                       .m = m,
                       .n = n,
                       .k = k};
}

/* Item i of a batch starts at row i * item_row. */
static inline gemm_operand operand_of(const matrix *m, bool transposed, int64_t item_row) {
    return (gemm_operand){
        .transposed = transposed, .dtype = m->dtype, .data = m->data, .stride = m->columns, .item_row = item_row};
}

static inline gemm_result result_in(const matrix *m, int64_t item_row) {
    return (gemm_result){.epilogue = m->dtype == VJP_F32 ? NULL : store_epilogue,
                         .target = m,
                         .plain = m->data,
                         .stride = m->columns,
                         .dtype = m->dtype,
                         .accumulate = m->accumulate,
                         .item_row = item_row};
}

#endif

/*
 * A batch of matrix products c = a b on the device's threads, in f32, through BLAS or the built-in kernel.
 *
 * An operand is rows in memory, or rows that a function makes when they are packed: so 16-bit storage is converted, and
 * dy * act'(pre) computed, a cache-sized piece at a time, with no copy of a whole tensor. In the same
 * way a result is f32 in memory, or rows of finished sums handed to a function while they are still in cache.
 *
 * The bits of a result depend on the sizes and on which engine makes it: BLAS, FMA (gemm_fma.h) or, for 16-bit
 * operands, AMX (gemm_amx.h). They never depend on the threads; with FMA not on the instruction set either.
 */
#ifndef VJP_CPU_GEMM_H
#define VJP_CPU_GEMM_H

#include "cpu/cpu.h"

/* For cutting sizes into blocks; none is negative. */
static inline int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static inline int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/*
 * A matrix of f32 that is made for products may lie in slabs: SLAB_COLUMNS columns of all its rows, then the next, rows
 * SLAB_STRIDE apart (17 cache lines, so that neighbours fall into different sets of the cache). That is how the
 * built-in kernel wants either operand, so that nothing is packed. Behind the last column a slab holds zeros.
 */
enum { SLAB_COLUMNS = 256, SLAB_STRIDE = SLAB_COLUMNS + 16 };

static inline int64_t slab_place(int64_t rows, int64_t row, int64_t column) {
    return (column / SLAB_COLUMNS * rows + row) * SLAB_STRIDE + column % SLAB_COLUMNS;
}

static inline int64_t slab_floats(int64_t rows, int64_t columns) {
    return divide_up(columns, SLAB_COLUMNS) * rows * SLAB_STRIDE;
}

/* Writes elements [column, column + count) of a row of the matrix as stored. */
typedef void (*gemm_read)(const void *source, int64_t row, int64_t column, int64_t count, float *to);

/* Takes the finished sums of elements [column, column + count) of a row. */
typedef void (*gemm_finish)(const void *target, int64_t row, int64_t column, int64_t count, const float *sums);

typedef struct gemm_operand {
    bool transposed; /* a is stored as [k, m], b as [n, k] */
    vjp_dtype dtype; /* of `data`; of what `read` makes: a type that holds each of its numbers */
    const void *data;
    int64_t stride;    /* numbers from row to row */
    int64_t slab_rows; /* `data` is f32 in slabs of so many rows; 0: it is not */
    gemm_read read;    /* makes rows from `source`, and there is no `data`; or NULL */
    const void *source;
    int64_t item_row, item_column; /* how far on the matrix of the next item of the batch begins */
} gemm_operand;

/* Its rows are not f32 side by side in memory: they are made when they are read. */
static inline bool is_made(const gemm_operand *o) {
    return o->read || o->dtype != VJP_F32 || o->slab_rows;
}

typedef struct gemm_result {
    gemm_finish finish; /* takes rows to `target`; NULL: they are written to `plain` */
    const void *target;
    float *plain; /* `stride` floats from row to row */
    int64_t stride;
    vjp_dtype dtype; /* that the numbers are rounded to in the end */
    bool accumulate; /* add to what `plain` holds */
    int64_t item_row;
} gemm_result;

typedef struct gemm_call {
    bool blas, tiles; /* of the device */
    int threads;      /* of the device; they choose the tiles and with them the workspace, never bits */
    int64_t items, m, n, k;
    gemm_operand a, b;
    gemm_result c;
} gemm_call;

/* How much workspace a call needs, told without looking at any data; at most some 100 MiB. */
size_t CPU_NAME(gemm_workspace)(const gemm_call *call);

void CPU_NAME(gemm)(const vjp_work *work, const gemm_call *call, void *workspace);

#endif

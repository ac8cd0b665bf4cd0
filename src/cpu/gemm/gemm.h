/* SPDX-License-Identifier: MIT */
/*
 * A batch of f32 matrix products c = a b on the device's threads.
 *
 *     engine             used when                                         why
 *     AMX  gemm_amx.h    the device allows it, an operand has 16 bits,     16 times the rate of FMA
 *                        and m, n and k are all at least 32
 *     BLAS blas.h        the caller chose it (matrix_products=blas)        the caller's own library
 *     FMA  gemm_fma.h    otherwise                                         same bits on every set with FMA
 *
 * gemm.c drives all three and holds the table of how it blocks and packs.
 *
 * An operand is rows in memory, or rows that a callback computes while they are packed: 16-bit storage is converted,
 * and dy * act'(pre) computed, one cache-sized block at a time, with no copy of the whole tensor. The result is f32 in
 * memory, or goes through an epilogue, a callback that receives rows of finished sums while they are still in cache.
 *
 * The bits of a result depend on the sizes and on the engine. They never depend on the threads; with FMA not on the
 * instruction set either.
 */
#ifndef VJP_CPU_GEMM_H
#define VJP_CPU_GEMM_H

#include "core/arithmetic.h"
#include "cpu/cpu.h"

/*
 * A temporary f32 operand may be stored in slabs: SLAB_COLUMNS columns of all its rows, then the next SLAB_COLUMNS,
 * with rows SLAB_STRIDE apart (17 cache lines, so that neighbouring rows map to different cache sets). The FMA engine
 * reads slabs in place as either operand, without packing. A slab is padded with zeros behind the last column.
 */
enum { SLAB_COLUMNS = 256, SLAB_STRIDE = SLAB_COLUMNS + 16 };

static inline int64_t slab_index(int64_t rows, int64_t row, int64_t column) {
    return (column / SLAB_COLUMNS * rows + row) * SLAB_STRIDE + column % SLAB_COLUMNS;
}

static inline int64_t slab_floats(int64_t rows, int64_t columns) {
    return vjp_divide_up(columns, SLAB_COLUMNS) * rows * SLAB_STRIDE;
}

/* Writes elements [column, column + count) of a row of the stored matrix. */
typedef void (*gemm_read)(const void *source, int64_t row, int64_t column, int64_t count, float *to);

/* Receives the finished sums of elements [column, column + count) of a row. */
typedef void (*gemm_epilogue)(const void *target, int64_t row, int64_t column, int64_t count, const float *sums);

typedef struct gemm_operand {
    bool transposed; /* a is stored as [k, m], b as [n, k] */
    vjp_dtype dtype; /* of `data`; with `read`, a type that holds each number exactly */
    const void *data;
    int64_t stride;    /* elements from row to row */
    int64_t slab_rows; /* rows of a slab, where `data` is f32 in slabs; else 0 */
    gemm_read read;    /* computes rows from `source` in place of `data`; or NULL */
    const void *source;
    int64_t item_row, item_column; /* offset of the next matrix of the batch */
} gemm_operand;

/* Rows of f32 in memory that can be read in place. */
static inline bool is_plain_f32(const gemm_operand *o) {
    return !o->read && o->dtype == VJP_F32 && !o->slab_rows;
}

typedef struct gemm_result {
    gemm_epilogue epilogue; /* receives rows, with `target`; NULL: rows are written to `plain` */
    const void *target;
    float *plain; /* rows are `stride` floats apart */
    int64_t stride;
    vjp_dtype dtype; /* that the caller finally rounds to */
    bool accumulate; /* add to the contents of `plain` */
    int64_t item_row;
} gemm_result;

typedef struct gemm_call {
    bool blas, amx;  /* engines that the device allows */
    bool bf16;       /* the processor multiplies and adds bf16 operands in one instruction; it never decides bits */
    bool fixed_rows; /* no choice that decides bits may depend on m */
    int threads;     /* of the device; they decide the tiles and the workspace, never bits */
    int64_t items, m, n, k;
    gemm_operand a, b;
    gemm_result c;
} gemm_call;

/* The workspace that a call needs, from its sizes alone; at most about 100 MiB. */
size_t CPU_NAME(gemm_workspace)(const gemm_call *call);

void CPU_NAME(gemm)(const vjp_work *work, const gemm_call *call, void *workspace);

#endif

/*
 * The engine of the built-in matrix products on any processor: FMA chains in registers (gemm_kernel.h). What the driver
 * (gemm.c) asks of an engine: how it cuts, how its operands are packed, and the product of two packed panels.
 */
#ifndef VJP_CPU_GEMM_FMA_H
#define VJP_CPU_GEMM_FMA_H

#include "cpu/gemm/gemm.h"
#include "cpu/gemm/gemm_kernel.h"
#include "cpu/gemm/rows.h"

/* A number is packed as it is. */
static inline gemm_pieces pieces_of(const gemm_call *call) {
    (void)call;
    return (gemm_pieces){1, 1, 1};
}

/*
 * Rows of a tile are a multiple of this and not of a panel, each tile's panels beginning anew: 1024 rows on 16 threads
 * are four times 256 that way, and with whole panels of 14 up to 266. A last panel of four rows runs at full speed.
 */
enum { TILE_STEP_M = 4 };

/* Bringing in a row or a column from another core's cache is reckoned as so many multiply-adds a term. */
enum { TILE_EDGE = 28 };

/* The least multiply-adds that a task is worth: about 5 us. */
enum { TASK_MACS = 1 << 18 };

/* A product of few rows or columns packs a panel where it is used; it writes no copy of what it reads once. */
enum { PACKS_ALL = false };

/* A slab is read where it lies: a row of it is a packed panel's, and as b it has whole panels side by side. */
enum { READS_SLABS_AS_A = true, READS_SLABS_AS_B = SLAB_COLUMNS % GEMM_COLUMNS == 0 };
_Static_assert((int)SLAB_COLUMNS == GEMM_DEPTH && (int)SLAB_STRIDE == GEMM_ROW_STRIDE, "a slab is rows as packed");

/* A tile's columns of a run of terms that are multiplied before the next run's: all, while its panels of a change. */
static inline int64_t columns_at_once(int64_t columns) {
    return columns;
}

/* The most terms of a block: as many as its memory allows. */
enum { MOST_TERMS = INT32_MAX };

/*
 * What a tile wants in the second-level cache, in bytes: the operands of the run of terms at work, those of the next,
 * which are being called in, and the sums.
 */
static inline int64_t tile_bytes(int64_t rows, int64_t columns, int64_t terms) {
    (void)terms;
    return (2 * (rows + columns) * GEMM_DEPTH + rows * columns) * (int64_t)sizeof(float);
}

/* Nothing to do before and after a thread's share of a product. */
static inline void engine_begin(void) {
}

static inline void engine_end(void) {
}

/* ---- Packing ----------------------------------------------------------------------------------------- */

/*
 * Rows that are packed soon are called into the cache: they are short pieces far apart, where the processor's own
 * prefetching hardly begins before it must stop. Pieces of less than LEAST_CALLED_IN numbers are not worth it.
 */
enum { ROWS_AHEAD = 4, LEAST_CALLED_IN = 64 };

INLINE bool calls_in(const gemm_operand *o, int64_t count) {
    return !is_made(o) && count >= LEAST_CALLED_IN;
}

OUTLINE void call_in(const gemm_operand *o, int64_t item, int64_t row, int64_t column, int64_t count) {
    const float *from =
        (const float *)o->data + (row + item * o->item_row) * o->stride + column + item * o->item_column;
    for (const float *end = from + count; from < end; from += GEMM_LINE / sizeof *from)
        __builtin_prefetch(from, 0, 3);
}

/* Panels of a from row i on, `rows` of them, GEMM_A_PANEL apart; those of b likewise, from column j on. */
static void pack_a_panels(const gemm_operand *o, int64_t pieces, int64_t item, int64_t i, int64_t rows, int64_t k,
                          int64_t depth, float *to) {
    (void)pieces;
    if (o->transposed) {
        float buffer[GEMM_STRIP * GEMM_ROWS];
        int64_t called = calls_in(o, rows) ? depth - ROWS_AHEAD : 0;
        for (int64_t t = 0; t < depth; t++) {
            if (t < called) call_in(o, item, k + t + ROWS_AHEAD, i, rows);
            gemm_pack_term(stored_row(o, item, k + t, i, rows, buffer), rows, GEMM_ROWS, GEMM_A_PANEL,
                           to + t * GEMM_ROWS);
        }
        return;
    }
    int64_t called = calls_in(o, depth) ? rows - ROWS_AHEAD : 0;
    for (int64_t r = 0; r < rows; r++) {
        float *row = to + r / GEMM_ROWS * GEMM_A_PANEL + r % GEMM_ROWS * GEMM_ROW_STRIDE;
        if (r < called) call_in(o, item, i + r + ROWS_AHEAD, k, depth);
        const float *from = stored_row(o, item, i + r, k, depth, row);
        if (from != row) memcpy(row, from, (size_t)depth * sizeof *row);
    }
}

static void pack_b_panels(const gemm_operand *o, int64_t pieces, int64_t item, int64_t j, int64_t columns, int64_t k,
                          int64_t depth, float *to) {
    (void)pieces;
    if (!o->transposed) {
        float buffer[GEMM_STRIP * GEMM_COLUMNS];
        int64_t called = calls_in(o, columns) ? depth - ROWS_AHEAD : 0;
        for (int64_t t = 0; t < depth; t++) {
            if (t < called) call_in(o, item, k + t + ROWS_AHEAD, j, columns);
            gemm_pack_term(stored_row(o, item, k + t, j, columns, buffer), columns, GEMM_COLUMNS, GEMM_B_PANEL,
                           to + t * GEMM_COLUMNS);
        }
        return;
    }
    static const float zeros[GEMM_DEPTH];
    float made[NATIVE_LANES * GEMM_DEPTH];
    int64_t called = calls_in(o, depth) ? columns : 0;
    for (int64_t c = 0; c < divide_up(columns, GEMM_COLUMNS) * GEMM_COLUMNS; c += NATIVE_LANES) {
        for (int64_t q = c + NATIVE_LANES; q < least(called, c + 2 * NATIVE_LANES); q++)
            call_in(o, item, j + q, k, depth);
        const float *rows[NATIVE_LANES];
        for (int l = 0; l < NATIVE_LANES; l++)
            rows[l] = c + l < columns ? stored_row(o, item, j + c + l, k, depth, made + l * GEMM_DEPTH) : zeros;
        gemm_pack_turned(rows, depth, to + c / GEMM_COLUMNS * GEMM_B_PANEL + c % GEMM_COLUMNS);
    }
}

/* ---- Multiplying ------------------------------------------------------------------------------------- */

/*
 * to = from + a b: `rows` rows of one panel of a by one panel of b, packed or in a slab. Columns past the edge of c are
 * not written; there the sums go through a small block.
 */
INLINE void multiply_panels(gemm_pieces pieces, bool by_terms, bool slab, int64_t rows, int64_t columns, int64_t depth,
                            const float *a, const float *b, const gemm_target *to, const gemm_ahead *ahead) {
    (void)pieces;
    gemm_left left = {.numbers = a};
    gemm_right right = {.numbers = b, .step = slab ? SLAB_STRIDE : GEMM_COLUMNS};
    if (columns >= GEMM_COLUMNS) {
        gemm_rows_of(by_terms ? GEMM_ROWS : 1, rows, depth, left, right, *to, ahead);
        return;
    }
    float edge[GEMM_ROWS * GEMM_COLUMNS];
    gemm_target small = {.to = edge, .to_stride = GEMM_COLUMNS};
    gemm_rows_of(by_terms ? GEMM_ROWS : 1, rows, depth, left, right, small, ahead);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t q = 0; q < columns; q++) {
            float sum = edge[r * GEMM_COLUMNS + q];
            to->to[r * to->to_stride + q] = to->from ? to->from[r * to->from_stride + q] + sum : sum;
        }
}

#endif

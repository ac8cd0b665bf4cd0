/* SPDX-License-Identifier: MIT */
/*
 * The built-in engine for any processor: FMA chains in registers (gemm_kernel.h). It gives the driver (gemm.c) its tile
 * costs, its packing, and the product of two packed panels.
 */
#ifndef VJP_CPU_GEMM_FMA_H
#define VJP_CPU_GEMM_FMA_H

#include "cpu/gemm/gemm.h"
#include "cpu/gemm/gemm_kernel.h"
#include "cpu/gemm/rows.h"

/* A number is packed as it is. */
static inline gemm_limbs limbs_of(const gemm_call *call) {
    (void)call;
    return (gemm_limbs){1, 1, 1};
}

/*
 * The rows of a tile are a multiple of this rather than of a panel, and each tile starts a new panel: 1024 rows on 16
 * threads are then four tiles of 256, where whole panels of 14 give up to 266. A last panel of four rows runs at full
 * speed.
 */
enum { TILE_STEP_M = 4 };

/* Estimated cost of fetching a row or column from another core's cache, in multiply-adds per term. */
enum { TILE_EDGE = 28 };

/* The fewest multiply-adds that are worth a task: about 5 us. */
enum { TASK_MACS = 1 << 18 };

/* With few rows or columns, panels are packed where they are used: what is read once is not copied. */
enum { PACKS_ALL = false };

/* Slabs are read in place: their rows are a packed panel's rows, and as b they hold whole panels side by side. */
enum { READS_SLABS_AS_A = true, READS_SLABS_AS_B = SLAB_COLUMNS % GEMM_COLUMNS == 0 };
_Static_assert((int)SLAB_COLUMNS == GEMM_DEPTH && (int)SLAB_STRIDE == GEMM_ROW_STRIDE, "a slab is rows as packed");

/* Columns of a tile that are multiplied per slice of K before the next slice: all of them. */
static inline int64_t columns_at_once(int64_t columns) {
    return columns;
}

/* The most terms of a block: limited by memory alone. */
enum { MAX_TERMS = INT32_MAX };

/*
 * Second-level cache that a tile needs, in bytes: the operands of the current slice of K, those of the next, which are
 * being prefetched, and the sums.
 */
static inline int64_t tile_bytes(int64_t rows, int64_t columns, int64_t terms) {
    (void)terms;
    return (2 * (rows + columns) * GEMM_DEPTH + rows * columns) * (int64_t)sizeof(float);
}

/* Setup of a thread for its share of a product: none. */
static inline void engine_begin(void) {
}

static inline void engine_end(void) {
}

/* ---- Packing ----------------------------------------------------------------------------------------- */

/*
 * Source rows are prefetched before they are packed: they are short and far apart, so the hardware prefetcher hardly
 * starts before it has to stop. Rows of fewer than MIN_PREFETCHED numbers are not worth it.
 */
enum { PREFETCH_ROWS = 4, MIN_PREFETCHED = 64 };

INLINE bool is_prefetched(const gemm_operand *o, int64_t count) {
    return is_plain_f32(o) && count >= MIN_PREFETCHED;
}

OUTLINE void prefetch_row(const gemm_operand *o, int64_t item, int64_t row, int64_t column, int64_t count) {
    prefetch_first_level((const float *)o->data + operand_index(o, item, row, column), count * (int64_t)sizeof(float));
}

/*
 * Packs an operand that is stored by terms: `count` numbers from `column` of each stored row. One panel of f32, as
 * small products pack it, is a plain copy.
 */
INLINE void pack_terms(const gemm_operand *o, int64_t item, int64_t row, int64_t column, int64_t count, int64_t depth,
                       int width, int64_t panel, float *to) {
    float buffer[GEMM_STRIP * ((int)GEMM_ROWS > (int)GEMM_COLUMNS ? (int)GEMM_ROWS : (int)GEMM_COLUMNS)];
    if (count == width && is_plain_f32(o)) {
        const float *from = (const float *)o->data + operand_index(o, item, row, column);
        for (int64_t t = 0; t < depth; t++, from += o->stride, to += width)
            memcpy(to, from, (size_t)width * sizeof *to);
        return;
    }
    int64_t prefetched = is_prefetched(o, count) ? depth - PREFETCH_ROWS : 0;
    for (int64_t t = 0; t < depth; t++) {
        if (t < prefetched) prefetch_row(o, item, row + t + PREFETCH_ROWS, column, count);
        gemm_pack_term(stored_row(o, item, row + t, column, count, buffer), count, width, panel, to + t * width);
    }
}

/* Packs panels of a from row i, `rows` rows of it, GEMM_A_PANEL apart; of b likewise from column j. */
static void pack_a_panels(const gemm_operand *o, int64_t limbs, int64_t item, int64_t i, int64_t rows, int64_t k,
                          int64_t depth, float *to) {
    (void)limbs;
    if (o->transposed) {
        pack_terms(o, item, k, i, rows, depth, GEMM_ROWS, GEMM_A_PANEL, to);
        return;
    }
    int64_t prefetched = is_prefetched(o, depth) ? rows - PREFETCH_ROWS : 0;
    for (int64_t r = 0; r < rows; r++) {
        float *row = to + r / GEMM_ROWS * GEMM_A_PANEL + r % GEMM_ROWS * GEMM_ROW_STRIDE;
        if (r < prefetched) prefetch_row(o, item, i + r + PREFETCH_ROWS, k, depth);
        const float *from = stored_row(o, item, i + r, k, depth, row);
        if (from != row) memcpy(row, from, (size_t)depth * sizeof *row);
    }
}

static void pack_b_panels(const gemm_operand *o, int64_t limbs, int64_t item, int64_t j, int64_t columns, int64_t k,
                          int64_t depth, float *to) {
    (void)limbs;
    if (!o->transposed) {
        pack_terms(o, item, k, j, columns, depth, GEMM_COLUMNS, GEMM_B_PANEL, to);
        return;
    }
    static const float zeros[GEMM_DEPTH];
    float converted[NATIVE_LANES * GEMM_DEPTH];
    int64_t prefetched = is_prefetched(o, depth) ? columns : 0;
    for (int64_t c = 0; c < vjp_round_up(columns, GEMM_COLUMNS); c += NATIVE_LANES) {
        for (int64_t q = c + NATIVE_LANES; q < vjp_min(prefetched, c + 2 * NATIVE_LANES); q++)
            prefetch_row(o, item, j + q, k, depth);
        const float *rows[NATIVE_LANES];
        for (int l = 0; l < NATIVE_LANES; l++)
            rows[l] = c + l < columns ? stored_row(o, item, j + c + l, k, depth, converted + l * GEMM_DEPTH) : zeros;
        gemm_pack_transposed(rows, depth, to + c / GEMM_COLUMNS * GEMM_B_PANEL + c % GEMM_COLUMNS);
    }
}

/* ---- Multiplying ------------------------------------------------------------------------------------- */

/*
 * to = from + a b: `rows` rows of one panel of a by one panel of b, packed or in a slab. Columns past the edge of c are
 * not written: their sums go through a small buffer.
 */
INLINE void multiply_panels(gemm_limbs limbs, bool by_terms, bool slab, int64_t rows, int64_t columns, int64_t depth,
                            const float *a, const float *b, const gemm_target *to, const gemm_prefetch *prefetch) {
    (void)limbs;
    gemm_left left = {.numbers = a};
    gemm_right right = {.numbers = b, .step = slab ? SLAB_STRIDE : GEMM_COLUMNS};
    if (columns >= GEMM_COLUMNS) {
        gemm_rows_of(by_terms ? GEMM_ROWS : 1, rows, depth, left, right, *to, prefetch);
        return;
    }
    float edge[GEMM_ROWS * GEMM_COLUMNS];
    gemm_target small = {.to = edge, .to_stride = GEMM_COLUMNS};
    gemm_rows_of(by_terms ? GEMM_ROWS : 1, rows, depth, left, right, small, prefetch);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t q = 0; q < columns; q++) {
            float sum = edge[r * GEMM_COLUMNS + q];
            to->to[r * to->to_stride + q] = to->from ? to->from[r * to->from_stride + q] + sum : sum;
        }
}

#endif

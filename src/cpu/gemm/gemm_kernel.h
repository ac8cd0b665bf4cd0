/*
 * The inner part of the built-in matrix product: a small block of c in registers, and the packing that lays its two
 * operands out in the order it reads them.
 *
 * Each number of the product is one FMA chain over at most GEMM_DEPTH terms; longer sums are chains of such
 * blocks, added in order. The shape of the register block is free to differ between instruction sets, since it
 * only says which chains run side by side; GEMM_DEPTH is not, since it says where a chain ends.
 */
#ifndef VJP_CPU_GEMM_KERNEL_H
#define VJP_CPU_GEMM_KERNEL_H

#include "cpu/gemm/gemm_engine.h"

/*
 * 256 terms: long enough that reading and writing c costs 3 % of the FMAs, short enough that a panel of b (32 KiB with
 * AVX-512) stays in the first-level cache and that equal terms, whose roundings all point one way, stay right to 2e-6.
 */
enum { GEMM_DEPTH = 256 };

/* Rows and native vectors of the register block: what fills the registers less one row of b and a number of a. */
#if defined(CPU_ISA_AVX512)
enum { GEMM_ROWS = 14, GEMM_VECTORS = 2 };
#elif defined(CPU_ISA_AVX2)
enum { GEMM_ROWS = 6, GEMM_VECTORS = 2 };
#elif defined(CPU_ISA_NEON)
enum { GEMM_ROWS = 8, GEMM_VECTORS = 3 };
#else
enum { GEMM_ROWS = 4, GEMM_VECTORS = 2 };
#endif

enum { GEMM_COLUMNS = GEMM_VECTORS * NATIVE_LANES };

/*
 * A packed panel of a has GEMM_ROWS rows and GEMM_DEPTH terms, in the order of its source, so that packing never
 * transposes it: by rows (a row is GEMM_ROW_STRIDE apart: 17 cache lines, so that rows fall into different sets) or by
 * terms (each term's GEMM_ROWS numbers side by side). A panel of b has GEMM_COLUMNS numbers for each term.
 */
enum {
    GEMM_ROW_STRIDE = GEMM_DEPTH + 16,
    GEMM_A_PANEL = GEMM_ROWS * GEMM_ROW_STRIDE,
    GEMM_B_PANEL = GEMM_COLUMNS * GEMM_DEPTH
};

/* While two panels are multiplied, a line for every four terms is called in of each of the next. */
enum { GEMM_AHEAD_TERMS = 4, GEMM_AHEAD = GEMM_DEPTH / GEMM_AHEAD_TERMS * GEMM_LINE };

/*
 * One term of every sum. term_step, a constant where this is inlined, is how far apart the terms of a are: 1 by rows;
 * by terms the distance from one term's numbers, which lie side by side, to the next's.
 */
INLINE void gemm_term(int rows, int term_step, const float *a, const float *b, native_f sum[GEMM_ROWS][GEMM_VECTORS]) {
    native_f row[GEMM_VECTORS];
    UNROLL for (int j = 0; j < GEMM_VECTORS; j++) memcpy(&row[j], b + j * NATIVE_LANES, sizeof row[j]);
    UNROLL for (int i = 0; i < rows; i++) {
        native_f one = a[i * (term_step > 1 ? 1 : GEMM_ROW_STRIDE)] - (native_f){0};
        UNROLL for (int j = 0; j < GEMM_VECTORS; j++) sum[i][j] = native_fma(one, row[j], sum[i][j]);
    }
}

/*
 * The panel of b: term k begins `step` numbers, a constant where this is inlined, after the one before (GEMM_COLUMNS
 * where it is packed), or where `places` says (convolutions read their planes in place).
 */
typedef struct gemm_right {
    const float *numbers;
    int step;
    const int32_t *places;
} gemm_right;

INLINE const float *gemm_row_of_b(const gemm_right *b, int64_t k) {
    return b->numbers + (b->places ? b->places[k] : k * b->step);
}

/* The sums of a block go where they belong. */
INLINE void gemm_put(int rows, native_f sum[GEMM_ROWS][GEMM_VECTORS], const gemm_target *c) {
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int j = 0; j < GEMM_VECTORS; j++) {
            if (c->from) {
                native_f old;
                memcpy(&old, c->from + i * c->from_stride + j * NATIVE_LANES, sizeof old);
                sum[i][j] = old + sum[i][j];
            }
            memcpy(c->to + i * c->to_stride + j * NATIVE_LANES, &sum[i][j], sizeof sum[i][j]);
        }
    }
}

/* GEMM_AHEAD_TERMS terms from k on; meanwhile a line of what comes after is called in for each operand. */
INLINE void gemm_few_terms(int rows, int term_step, int64_t k, const float *a, const gemm_right *b,
                           native_f sum[GEMM_ROWS][GEMM_VECTORS], const char **ahead_a, const char **ahead_b,
                           int64_t skip) {
    __builtin_prefetch(*ahead_a, 0, 2);
    __builtin_prefetch(*ahead_b, 0, 2);
    *ahead_a += GEMM_LINE + skip;
    *ahead_b += GEMM_LINE + skip;
    UNROLL for (int u = 0; u < GEMM_AHEAD_TERMS; u++)
        gemm_term(rows, term_step, a + (k + u) * term_step, gemm_row_of_b(b, k + u), sum);
}

/* Native vectors of a cache line. */
enum { VECTORS_A_LINE = GEMM_LINE / (NATIVE_LANES * (int)sizeof(float)) };

/*
 * to = from + a b for `rows` rows, a constant where this is inlined. The rows of c are called in with the first terms,
 * to be there when the last are done.
 */
INLINE void gemm_block(int rows, int term_step, int64_t depth, const float *a, const gemm_right *b,
                       const gemm_target *c, const gemm_ahead *ahead) {
    const char *ahead_a = ahead->a, *ahead_b = ahead->b;
    native_f sum[GEMM_ROWS][GEMM_VECTORS];
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int j = 0; j < GEMM_VECTORS; j++) sum[i][j] = (native_f){0};
    }
    int64_t k = 0;
    const float *coming = c->to;
    for (int i = 0; i < rows && k + GEMM_AHEAD_TERMS <= depth; i++, k += GEMM_AHEAD_TERMS) {
        UNROLL for (int j = 0; j < GEMM_VECTORS; j += VECTORS_A_LINE)
            __builtin_prefetch(coming + j * NATIVE_LANES, 1, 3);
        coming += c->to_stride;
        gemm_few_terms(rows, term_step, k, a, b, sum, &ahead_a, &ahead_b, ahead->skip);
    }
    for (; k + GEMM_AHEAD_TERMS <= depth; k += GEMM_AHEAD_TERMS)
        gemm_few_terms(rows, term_step, k, a, b, sum, &ahead_a, &ahead_b, ahead->skip);
    for (; k < depth; k++)
        gemm_term(rows, term_step, a + k * term_step, gemm_row_of_b(b, k), sum);
    gemm_put(rows, sum, c);
}

/*
 * Where the numbers of a are. Packed, or anywhere: those of row i from numbers + rows[i] on, term k of each another
 * terms[k] further. So convolutions read their windows in place.
 */
typedef struct gemm_left {
    const float *numbers;
    const int32_t *rows, *terms; /* used where a is not packed */
} gemm_left;

/* What takes the place of term_step where a is not packed. */
enum { GEMM_IN_PLACE = 0 };

/* gemm_block() with a in place. They are two functions: as one, GCC 12 made packed products 5 % slower. */
INLINE void gemm_block_in_place(int rows, int64_t depth, const gemm_left *a, const float *b, const gemm_target *c) {
    const float *row[GEMM_ROWS];
    native_f sum[GEMM_ROWS][GEMM_VECTORS];
    UNROLL for (int i = 0; i < rows; i++) {
        row[i] = a->numbers + a->rows[i];
        UNROLL for (int j = 0; j < GEMM_VECTORS; j++) sum[i][j] = (native_f){0};
    }
    for (int64_t k = 0; k < depth; k++, b += GEMM_COLUMNS) {
        int64_t at = a->terms[k];
        native_f column[GEMM_VECTORS];
        UNROLL for (int j = 0; j < GEMM_VECTORS; j++) memcpy(&column[j], b + j * NATIVE_LANES, sizeof column[j]);
        UNROLL for (int i = 0; i < rows; i++) {
            native_f one = row[i][at] - (native_f){0};
            UNROLL for (int j = 0; j < GEMM_VECTORS; j++) sum[i][j] = native_fma(one, column[j], sum[i][j]);
        }
    }
    gemm_put(rows, sum, c);
}

INLINE void gemm_block_of(int rows, int term_step, int64_t depth, const gemm_left *a, const gemm_right *b,
                          const gemm_target *c, const gemm_ahead *ahead) {
    if (term_step == GEMM_IN_PLACE)
        gemm_block_in_place(rows, depth, a, b->numbers, c);
    else
        gemm_block(rows, term_step, depth, a->numbers, b, c, ahead);
}

/* Any number of rows up to GEMM_ROWS, in blocks of a few sizes: an edge costs its own rows and not a full block's. */
INLINE void gemm_rows_of(int term_step, int64_t rows, int64_t depth, gemm_left a, gemm_right b, gemm_target c,
                         const gemm_ahead *ahead) {
    enum { EIGHT = GEMM_ROWS > 8 ? 8 : 2, FOUR = GEMM_ROWS > 4 ? 4 : 2 };
    const int64_t row_step = term_step > 1 ? 1 : GEMM_ROW_STRIDE;
    if (rows == GEMM_ROWS) {
        gemm_block_of(GEMM_ROWS, term_step, depth, &a, &b, &c, ahead);
        return;
    }
    while (rows > 0) {
        int64_t done;
        if (rows >= EIGHT && EIGHT == 8) {
            gemm_block_of(EIGHT, term_step, depth, &a, &b, &c, ahead);
            done = EIGHT;
        } else if (rows >= FOUR && FOUR == 4) {
            gemm_block_of(FOUR, term_step, depth, &a, &b, &c, ahead);
            done = FOUR;
        } else if (rows >= 2) {
            gemm_block_of(2, term_step, depth, &a, &b, &c, ahead);
            done = 2;
        } else {
            gemm_block_of(1, term_step, depth, &a, &b, &c, ahead);
            done = 1;
        }
        rows -= done;
        if (term_step == GEMM_IN_PLACE)
            a.rows += done;
        else
            a.numbers += done * row_step;
        c.to += done * c.to_stride;
        if (c.from) c.from += done * c.from_stride;
    }
}

/* With a packed by rows or by terms, and b packed. */
INLINE void gemm_rows(int term_step, int64_t rows, int64_t depth, const float *a, const float *b, gemm_target c,
                      const gemm_ahead *ahead) {
    gemm_right right = {.numbers = b, .step = GEMM_COLUMNS};
    gemm_rows_of(term_step, rows, depth, (gemm_left){.numbers = a}, right, c, ahead);
}

/* ---- Packing ----------------------------------------------------------------------------------------- */

/* How many panels are packed at a time: a row of the source is then read some hundred numbers at once. */
enum { GEMM_STRIP = 8 };

/* One native vector's width of a panel of b, from rows that each hold `depth` terms of one column. */
INLINE void gemm_pack_turned(const float *const rows[NATIVE_LANES], int64_t depth, float *to) {
    int64_t k = 0;
    for (; k + NATIVE_LANES <= depth; k += NATIVE_LANES) {
        native_f square[NATIVE_LANES];
        UNROLL for (int i = 0; i < NATIVE_LANES; i++) memcpy(&square[i], rows[i] + k, sizeof square[i]);
        native_transpose(square);
        UNROLL for (int i = 0; i < NATIVE_LANES; i++) memcpy(to + (k + i) * GEMM_COLUMNS, &square[i], sizeof square[i]);
    }
    for (; k < depth; k++)
        for (int i = 0; i < NATIVE_LANES; i++)
            to[k * GEMM_COLUMNS + i] = rows[i][k];
}

/*
 * One term of `count` side-by-side numbers, dealt out to panels of `width` that are `panel` floats apart. Whole vectors
 * are copied as long as there are numbers for them: what one writes past the width is the beginning of the term after,
 * which is packed later, or room behind the panel's last term.
 */
INLINE void gemm_pack_term(const float *row, int64_t count, int width, int64_t panel, float *to) {
    const int whole = (width + NATIVE_LANES - 1) / NATIVE_LANES * NATIVE_LANES;
    for (; count >= width; count -= width) {
        if (count >= whole)
            memcpy(to, row, (size_t)whole * sizeof *to);
        else
            memcpy(to, row, (size_t)width * sizeof *to);
        row += width;
        to += panel;
    }
    for (int i = 0; count > 0 && i < width; i++)
        to[i] = i < count ? row[i] : 0;
}

#endif

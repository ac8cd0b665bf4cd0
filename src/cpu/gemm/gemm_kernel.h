/* SPDX-License-Identifier: MIT */
/*
 * The micro-kernel of the FMA engine: a block of c in registers, and the packing that lays out both operands in the
 * order in which it reads them. Attention and conv2d use it directly.
 *
 * Each element is one FMA chain over at most GEMM_DEPTH terms; longer sums add such chains in order. The shape of the
 * register block may differ between instruction sets, since it only decides which chains run side by side; GEMM_DEPTH
 * may not, since it decides where a chain ends.
 */
#ifndef VJP_CPU_GEMM_KERNEL_H
#define VJP_CPU_GEMM_KERNEL_H

#include "cpu/gemm/gemm_engine.h"

/*
 * 256 terms: long enough that reading and writing c costs 3 % of the FMAs, short enough that a panel of b (32 KiB with
 * AVX-512) stays in the first-level cache, and that equal terms, whose roundings all have the same sign, stay accurate
 * to 2e-6.
 */
enum { GEMM_DEPTH = 256 };

/*
 * Rows and native vectors of the register block: all registers except a row of b and a broadcast number of a. wasm:
 * those of x86-64, of which browsers keep one for themselves.
 */
#if defined(CPU_ISA_AVX512)
enum { GEMM_ROWS = 14, GEMM_VECTORS = 2 };
#elif defined(CPU_ISA_AVX2)
enum { GEMM_ROWS = 6, GEMM_VECTORS = 2 };
#elif defined(CPU_ISA_NEON)
enum { GEMM_ROWS = 8, GEMM_VECTORS = 3 };
#elif defined(CPU_ISA_WASM)
enum { GEMM_ROWS = 6, GEMM_VECTORS = 2 };
#else
enum { GEMM_ROWS = 4, GEMM_VECTORS = 2 };
#endif

enum { GEMM_COLUMNS = GEMM_VECTORS * NATIVE_LANES };

/*
 * A packed panel of a has GEMM_ROWS rows and GEMM_DEPTH terms in the order of its source, so that packing never
 * transposes it: by rows (GEMM_ROW_STRIDE, 17 cache lines, apart, so that rows map to different cache sets) or by terms
 * (the GEMM_ROWS numbers of a term are adjacent). A panel of b has GEMM_COLUMNS numbers per term.
 */
enum {
    GEMM_ROW_STRIDE = GEMM_DEPTH + 16,
    GEMM_A_PANEL = GEMM_ROWS * GEMM_ROW_STRIDE,
    GEMM_B_PANEL = GEMM_COLUMNS * GEMM_DEPTH
};

/* While two panels are multiplied, one line of each of the next panels is prefetched per four terms. */
enum { GEMM_PREFETCH_TERMS = 4, GEMM_PREFETCH = GEMM_DEPTH / GEMM_PREFETCH_TERMS * CACHE_LINE };

/*
 * For wasm: the multiply-adds stay in the order in which they are written, which needs 15 registers. clang would finish
 * the terms of one sum before the next sum, and browsers do not reorder: half of the vectors were in memory.
 */
INLINE void keep_order(native_f *sum) {
#if defined(CPU_ISA_WASM)
    __asm__ volatile("" : "+r"(*sum));
#else
    (void)sum;
#endif
}

/*
 * sum + one * row. aarch64 multiplies by a number of a register, which needs no copy of it in all lanes: GCC makes that
 * copy for two of three products, and copies of sums.
 */
INLINE native_f multiply_add(float one, native_f row, native_f sum) {
#if defined(CPU_ISA_NEON)
    __asm__("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(sum) : "w"(row), "w"(one));
    return sum;
#else
    return native_fma(one - (native_f){0}, row, sum);
#endif
}

/*
 * For wasm: constants that are added to this address become part of the loads. In a loop clang would add each one in an
 * instruction of its own; without those, products are 3 % faster in Firefox.
 */
INLINE void keep_address(const float **address) {
#if defined(CPU_ISA_WASM)
    __asm__ volatile("" : "+r"(*address));
#else
    (void)address;
#endif
}

/*
 * One term of every sum. term_step, a constant after inlining, is the distance between terms of a: 1 by rows; by terms,
 * where the numbers of a term are adjacent, the distance to the next term.
 */
INLINE void gemm_term(int rows, int term_step, const float *a, const float *b, native_f sum[GEMM_ROWS][GEMM_VECTORS]) {
    native_f row[GEMM_VECTORS];
    UNROLL for (int j = 0; j < GEMM_VECTORS; j++) memcpy(&row[j], b + j * NATIVE_LANES, sizeof row[j]);
    UNROLL for (int i = 0; i < rows; i++) {
        float one = a[i * (term_step > 1 ? 1 : GEMM_ROW_STRIDE)];
        UNROLL for (int j = 0; j < GEMM_VECTORS; j++) {
            sum[i][j] = multiply_add(one, row[j], sum[i][j]);
            keep_order(&sum[i][j]);
        }
    }
}

/*
 * The panel of b: consecutive terms are `step` numbers apart, a constant after inlining (GEMM_COLUMNS where packed), or
 * at `offsets` (conv2d reads its planes in place).
 */
typedef struct gemm_right {
    const float *numbers;
    int step;
    const int32_t *offsets;
} gemm_right;

INLINE const float *gemm_row_of_b(const gemm_right *b, int64_t k) {
    return b->numbers + (b->offsets ? b->offsets[k] : k * b->step);
}

/* Stores the sums of a register block. */
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

/* GEMM_PREFETCH_TERMS terms from k, with the prefetch of one line per operand. */
INLINE void gemm_few_terms(int rows, int term_step, int64_t k, const float *a, const gemm_right *b,
                           native_f sum[GEMM_ROWS][GEMM_VECTORS], const char **prefetch_a, const char **prefetch_b,
                           int64_t skip) {
    __builtin_prefetch(*prefetch_a, 0, 2);
    __builtin_prefetch(*prefetch_b, 0, 2);
    *prefetch_a += CACHE_LINE + skip;
    *prefetch_b += CACHE_LINE + skip;
    const float *left = a + k * term_step, *right = b->numbers + k * b->step;
    keep_address(&left);
    keep_address(&right);
    UNROLL for (int u = 0; u < GEMM_PREFETCH_TERMS; u++) gemm_term(
        rows, term_step, left + u * term_step, b->offsets ? gemm_row_of_b(b, k + u) : right + u * b->step, sum);
}

/* Native vectors per cache line. */
enum { LINE_VECTORS = CACHE_LINE / (NATIVE_LANES * (int)sizeof(float)) };

/*
 * to = from + a b for `rows` rows, a constant after inlining. The rows of c are prefetched during the first terms, in
 * time for the last.
 */
INLINE void gemm_block(int rows, int term_step, int64_t depth, const float *a, const gemm_right *b,
                       const gemm_target *c, const gemm_prefetch *prefetch) {
    const char *prefetch_a = prefetch->a, *prefetch_b = prefetch->b;
    native_f sum[GEMM_ROWS][GEMM_VECTORS];
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int j = 0; j < GEMM_VECTORS; j++) sum[i][j] = (native_f){0};
    }
    int64_t k = 0;
    const float *coming = c->to;
    for (int i = 0; i < rows && k + GEMM_PREFETCH_TERMS <= depth; i++, k += GEMM_PREFETCH_TERMS) {
        UNROLL for (int j = 0; j < GEMM_VECTORS; j += LINE_VECTORS) __builtin_prefetch(coming + j * NATIVE_LANES, 1, 3);
        coming += c->to_stride;
        gemm_few_terms(rows, term_step, k, a, b, sum, &prefetch_a, &prefetch_b, prefetch->skip);
    }
    for (; k + GEMM_PREFETCH_TERMS <= depth; k += GEMM_PREFETCH_TERMS)
        gemm_few_terms(rows, term_step, k, a, b, sum, &prefetch_a, &prefetch_b, prefetch->skip);
    for (; k < depth; k++)
        gemm_term(rows, term_step, a + k * term_step, gemm_row_of_b(b, k), sum);
    gemm_put(rows, sum, c);
}

/*
 * The left operand: packed, or in place with row i at numbers + rows[i] and term k of each row at another terms[k].
 * conv2d reads its windows this way.
 */
typedef struct gemm_left {
    const float *numbers;
    const int32_t *rows, *terms; /* where a is not packed */
} gemm_left;

/* The term_step of an a that is not packed. */
enum { GEMM_IN_PLACE = 0 };

/* gemm_block() with a in place. A separate function: merged into one, GCC 12 made packed products 5 % slower. */
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
            float one = row[i][at];
            UNROLL for (int j = 0; j < GEMM_VECTORS; j++) {
                sum[i][j] = multiply_add(one, column[j], sum[i][j]);
                keep_order(&sum[i][j]);
            }
        }
    }
    gemm_put(rows, sum, c);
}

INLINE void gemm_block_of(int rows, int term_step, int64_t depth, const gemm_left *a, const gemm_right *b,
                          const gemm_target *c, const gemm_prefetch *prefetch) {
    if (term_step == GEMM_IN_PLACE)
        gemm_block_in_place(rows, depth, a, b->numbers, c);
    else
        gemm_block(rows, term_step, depth, a->numbers, b, c, prefetch);
}

/* Up to GEMM_ROWS rows, in blocks of a few sizes: an edge costs its own rows, not a full block's. */
INLINE void gemm_rows_of(int term_step, int64_t rows, int64_t depth, gemm_left a, gemm_right b, gemm_target c,
                         const gemm_prefetch *prefetch) {
    enum { EIGHT = GEMM_ROWS > 8 ? 8 : 2, FOUR = GEMM_ROWS > 4 ? 4 : 2 };
    const int64_t row_step = term_step > 1 ? 1 : GEMM_ROW_STRIDE;
    if (rows == GEMM_ROWS) {
        gemm_block_of(GEMM_ROWS, term_step, depth, &a, &b, &c, prefetch);
        return;
    }
    while (rows > 0) {
        int64_t done;
        if (rows >= EIGHT && EIGHT == 8) {
            gemm_block_of(EIGHT, term_step, depth, &a, &b, &c, prefetch);
            done = EIGHT;
        } else if (rows >= FOUR && FOUR == 4) {
            gemm_block_of(FOUR, term_step, depth, &a, &b, &c, prefetch);
            done = FOUR;
        } else if (rows >= 2) {
            gemm_block_of(2, term_step, depth, &a, &b, &c, prefetch);
            done = 2;
        } else {
            gemm_block_of(1, term_step, depth, &a, &b, &c, prefetch);
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

/* With both operands packed, a by rows or by terms. */
INLINE void gemm_rows(int term_step, int64_t rows, int64_t depth, const float *a, const float *b, gemm_target c,
                      const gemm_prefetch *prefetch) {
    gemm_right right = {.numbers = b, .step = GEMM_COLUMNS};
    gemm_rows_of(term_step, rows, depth, (gemm_left){.numbers = a}, right, c, prefetch);
}

/* ---- Packing ----------------------------------------------------------------------------------------- */

/* Panels packed at a time, so that a few hundred adjacent numbers of a source row are read at once. */
enum { GEMM_STRIP = 8 };

/* Packs one native vector's width of a panel of b, from rows that each hold `depth` terms of one column. */
INLINE void gemm_pack_transposed(const float *const rows[NATIVE_LANES], int64_t depth, float *to) {
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
 * Packs one term: `count` adjacent numbers, distributed over panels of `width` that are `panel` floats apart. Copies
 * whole vectors while the source has enough numbers: what one writes past the width is the start of the next term,
 * packed later, or padding behind the panel's last term.
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

/* SPDX-License-Identifier: MIT */
/*
 * Long sums: along a line, and down the columns of a matrix. No f32 chain is longer than 16 numbers: the sum of a few
 * vectors is added up in double. The order follows from the problem's size alone.
 */
#ifndef VJP_CPU_SUMS_H
#define VJP_CPU_SUMS_H

#include "cpu/elementwise/elementwise.h"
#include "cpu/simd/shuffle.h"

/* All in double, for numbers whose sum is past f32's range. */
INLINE double sum_block_exact(vjp_dtype dtype, const void *x, int64_t n) {
    double total = 0;
    for (int64_t i = 0; i < n; i++)
        total += (double)f32_load(dtype, x, i);
    return total;
}

/* Sixteen f32 sums of at most 16 numbers each, then double: as good as double throughout, at the speed of f32. */
INLINE double sum_line(vjp_dtype dtype, const void *x, int64_t n) {
    double total = 0;
    for (int64_t i = 0; i < n;) {
        vf sums = vf_zero();
        int64_t begin = i;
        for (int j = 0; j < LANES && i < n; j++, i += LANES)
            sums = vf_add(sums, vf_load_part(dtype, x, i, n - i));
        float sum = vf_sum(sums);
        bool fits = sum - sum == 0; /* neither Inf nor NaN */
        total += fits ? (double)sum : sum_block_exact(dtype, at(dtype, x, begin), vjp_min(i, n) - begin);
    }
    return total;
}

/* ---- Columns ----------------------------------------------------------------------------------------- */

/*
 * `matrices` matrices of [rows, dim], one after another; result (m, j) is `factor` times the sum of column j of the
 * last output of an elementwise op, whose other output is stored in passing.
 *
 * Narrow rows are joined first: [rows, 3] is read as [rows / 96, 288], and columns that are 3 apart are added at the
 * end, so that every vector is full. A matrix is split into blocks of columns, and where it is long into chunks of
 * rows, each with its partial sums in double in the workspace; they are added in order.
 */
typedef struct column_sums {
    int64_t matrices, rows, dim;
    void *to;
    vjp_dtype to_dtype;
    bool accumulate;
    double factor;

    int64_t width, whole, rest; /* as it is read: `whole` rows of `width`, and `rest` elements more */
    int64_t chunk, chunks, blocks;
    double *partial; /* [matrices, chunks, width] where there are several chunks */
} column_sums;

enum {
    COLUMN_NARROW = 128, /* rows shorter than this are joined: a part of a vector is then an eighth of a row */
    COLUMN_WIDTH = 256,  /* to at least this width, and to a multiple of a vector */
    COLUMN_BLOCK = 2048, /* columns of a task: 16 KiB of sums, and wider than any joined rows */
    COLUMN_ROWS = 4,     /* rows whose sum is f32: more would be more streams than the processor prefetches */
    COLUMN_CHUNK = 32    /* min rows of a chunk: its partial sums are then a sixteenth of what it reads */
};

_Static_assert(LANES *COLUMN_NARROW <= COLUMN_BLOCK && 2 * COLUMN_WIDTH <= COLUMN_BLOCK, "joined rows are one block");

static inline bool column_is_narrow(int64_t rows, int64_t dim) {
    return rows > 1 && dim > 0 && dim < COLUMN_NARROW;
}

/* The width of the rows as they are read: of one, or of several joined. */
static inline int64_t column_width(int64_t rows, int64_t dim) {
    if (!column_is_narrow(rows, dim)) return dim;
    return vjp_round_up(COLUMN_WIDTH, LANES * dim);
}

/* Splits the problem, which moves `bytes_each` for each element, and returns the bytes of workspace it needs. */
static inline size_t column_plan(column_sums *c, size_t bytes_each) {
    int64_t total = c->rows * c->dim;
    c->width = column_width(c->rows, c->dim);
    c->whole = c->width ? total / c->width : 0;
    c->rest = total - c->whole * c->width;
    cpu_split split = vjp_cpu_split_items(c->whole, c->width * (int64_t)bytes_each, CPU_MAX_PARTIALS);
    c->chunk = vjp_max(split.size, COLUMN_CHUNK);
    c->chunks = vjp_max(vjp_divide_up(c->whole, c->chunk), 1);
    c->blocks = vjp_divide_up(c->width, COLUMN_BLOCK);
    return c->chunks > 1 ? (size_t)(c->matrices * c->chunks * c->width) * sizeof(double) : 0;
}

static inline cpu_split column_split(const column_sums *c, size_t bytes_each) {
    int64_t items = c->matrices * c->chunks * c->blocks, elements = c->matrices * c->rows * c->dim;
    return vjp_cpu_split_items(items, items ? elements / items * (int64_t)bytes_each : 0, CPU_MAX_TASKS);
}

/* Results [i, i + n): `factor` times their sums, or that added to what is there. */
INLINE void column_put_as(vjp_dtype dtype, const column_sums *c, int64_t i, int64_t n, const double *sums) {
    vd result = vd_scale(vd_load(sums), c->factor);
    if (c->accumulate) result = vd_add(result, vd_of(vf_load_part(dtype, c->to, i, n)));
    vf_store_part(dtype, c->to, i, n, vd_round(result));
}

OUTLINE void column_put(const column_sums *c, int64_t i, int64_t n, const double *sums) {
    BY_DTYPE(c->to_dtype, column_put_as, c, i, n, sums);
}

/* The sum of column j over `chunks` rows of sums; joined rows have it every dim columns. */
static inline double column_folded(const column_sums *c, int64_t j, const double *sums, int64_t chunks) {
    int64_t used = c->whole ? c->width : c->rest; /* columns that have any element */
    double sum = 0;
    for (int64_t k = 0; k < chunks; k++)
        for (int64_t column = j; column < used; column += c->dim)
            sum += sums[k * c->width + column];
    return sum;
}

/* Writes the results of columns [first, end) from `chunks` rows of sums, which begin with column `first`. */
static inline void column_finish(const column_sums *c, int64_t matrix, int64_t first, int64_t end, const double *sums,
                                 int64_t chunks) {
    bool narrow = column_is_narrow(c->rows, c->dim);
    if (narrow) end = c->dim;
    for (int64_t j = first; j < end; j += LANES) {
        int64_t n = vjp_min(end - j, LANES);
        double total[LANES] = {0};
        if (narrow)
            for (int64_t k = 0; k < n; k++)
                total[k] = column_folded(c, j + k, sums, chunks);
        else
            for (int64_t k = 0; k < chunks; k++)
                for (int64_t lane = 0; lane < n; lane++)
                    total[lane] += sums[k * c->width + j - first + lane];
        column_put(c, matrix * c->dim + j, n, total);
    }
}

/* Adds `rows` rows, n columns at element i and column j, to their sum. */
INLINE void column_add(element_formula formula, const element_op *op, element_types t, const element_call *call,
                       const column_sums *c, double *sum, int64_t i, int64_t j, int rows, int64_t n) {
    vf s = element_summand(formula, op, t, call, i, i - j, n);
    for (int r = 1; r < rows; r++) {
        int64_t below = i + r * c->width;
        s = vf_add(s, element_summand(formula, op, t, call, below, below - j, n));
    }
    vd_store(sum, vd_add(vd_load(sum), vd_of(s)));
}

INLINE void column_rows(element_formula formula, const element_op *op, element_types t, const element_call *call,
                        const column_sums *c, double *sums, int64_t i, int64_t first, int64_t end, int rows) {
    int64_t j = first;
    for (; j + LANES <= end; j += LANES)
        column_add(formula, op, t, call, c, sums + j - first, i + j, j, rows, LANES);
    if (j < end) column_add(formula, op, t, call, c, sums + j - first, i + j, j, rows, end - j);
}

INLINE bool column_sums_finite(const double *sums, int64_t n) {
    double difference = 0; /* NaN as soon as one sum is Inf or NaN */
    for (int64_t j = 0; j < n; j++)
        difference += sums[j] - sums[j];
    return difference == 0;
}

/*
 * One item: a block of columns of a chunk of a matrix. Where nothing is stored in passing, sums that are not finite are
 * made again in double alone: four rows together may have left f32's range.
 */
INLINE void column_item(element_formula formula, const element_op *op, element_types t, const element_call *call,
                        const column_sums *c, int64_t item) {
    int64_t block = item % c->blocks, chunk = item / c->blocks % c->chunks, matrix = item / c->blocks / c->chunks;
    int64_t first = block * COLUMN_BLOCK, end = vjp_min(first + COLUMN_BLOCK, c->width);
    int64_t last = vjp_min((chunk + 1) * c->chunk, c->whole), start = matrix * c->rows * c->dim;
    int64_t rest = vjp_min(end, chunk == c->chunks - 1 ? c->rest : 0); /* columns of what is no whole row */
    double sums[COLUMN_BLOCK + LANES];
    for (bool exact = false;; exact = true) {
        int64_t row = chunk * c->chunk;
        memset(sums, 0, (size_t)(end - first + LANES) * sizeof sums[0]);
        for (; !exact && row + COLUMN_ROWS <= last; row += COLUMN_ROWS)
            column_rows(formula, op, t, call, c, sums, start + row * c->width, first, end, COLUMN_ROWS);
        for (; row < last || (row == last && first < rest); row++)
            column_rows(formula, op, t, call, c, sums, start + row * c->width, first, row < last ? end : rest, 1);
        if (exact || op->outputs > 1 || column_sums_finite(sums, end - first)) break;
    }
    if (c->chunks == 1)
        column_finish(c, matrix, first, end, sums, 1);
    else
        memcpy(c->partial + (matrix * c->chunks + chunk) * c->width + first, sums,
               (size_t)(end - first) * sizeof sums[0]);
}

/* Writes all results from their partial sums, where there are several chunks. */
static void column_total_task(void *argument, size_t task) {
    const column_sums *c = argument;
    int64_t block = (int64_t)task % c->blocks, matrix = (int64_t)task / c->blocks, first = block * COLUMN_BLOCK;
    int64_t end = vjp_min(first + COLUMN_BLOCK, c->width);
    column_finish(c, matrix, first, end, c->partial + matrix * c->chunks * c->width + first, c->chunks);
}

/* What a task does: its items of call->columns. */
INLINE void column_body(element_formula formula, const element_op *op, element_types t, const element_call *c,
                        size_t task) {
    for (int64_t item = cpu_split_begin(&c->split, task); item < cpu_split_end(&c->split, task); item++)
        column_item(formula, op, t, c, c->columns, item);
    if (c->streams) vf_stream_done();
}

/* Runs a call whose columns are planned. `task` calls element_dispatch() with column_body(). */
static inline void column_run(const vjp_work *work, element_call *call, column_sums *c, size_t bytes_each,
                              vjp_task task) {
    call->columns = c;
    call->split = column_split(c, bytes_each);
    vjp_cpu_for(work, call->split.count, task, call);
    if (c->chunks > 1) vjp_cpu_for(work, c->matrices * c->blocks, column_total_task, c);
}

#endif

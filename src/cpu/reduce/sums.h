/*
 * Long sums: along a line, and down the columns of a matrix. No f32 chain is longer than 16 numbers: what a few vectors
 * add up to moves into double. The order follows from the problem's size alone.
 */
#ifndef VJP_CPU_SUMS_H
#define VJP_CPU_SUMS_H

#include "cpu/elementwise/elementwise.h"
#include "cpu/simd/shuffle.h"

/* Sixteen f32 sums of at most 16 numbers each, then double: as good as double throughout, at the speed of f32. */
INLINE double sum_line(vjp_dtype dtype, const void *x, int64_t n) {
    double total = 0;
    for (int64_t i = 0; i < n;) {
        vf sums = vf_zero();
        for (int j = 0; j < LANES && i < n; j++, i += LANES)
            sums = vf_add(sums, vf_load_part(dtype, x, i, n - i));
        total += (double)vf_sum(sums);
    }
    return total;
}

/* ---- Columns ----------------------------------------------------------------------------------------- */

/*
 * `matrices` matrices of [rows, dim], one behind the other; result (m, j) is `factor` times the sum of column j.
 *
 * Narrow rows are laid side by side first: [rows, 3] is walked as [rows / 96, 288], and columns that are 3 apart are
 * added at the end, so that every vector is full. A matrix is cut into pieces of columns, and where it is long into
 * chunks of rows, each with its partial sums in double in the workspace; they are added in order.
 */
typedef struct column_sums {
    int64_t matrices, rows, dim;
    void *to;
    vjp_dtype to_dtype;
    bool accumulate;
    double factor;

    int64_t width, whole, rest; /* as it is walked: `whole` rows of `width`, and `rest` elements more */
    int64_t chunk, chunks, pieces;
    double *partial; /* [matrices, chunks, width] where there are several chunks */
} column_sums;

enum {
    COLUMN_NARROW = 128, /* rows shorter than this are laid side by side: a vector's tail is an eighth of the rest */
    COLUMN_WIDTH = 256,  /* to at least this width, and to a multiple of a vector */
    COLUMN_PIECE = 2048, /* columns of a task: 16 KiB of sums, and wider than any row laid side by side */
    COLUMN_ROWS = 4,     /* rows whose sum is f32: more would be more streams of memory than are fetched ahead */
    COLUMN_CHUNK = 32    /* least rows of a chunk: its partial sums are then a sixteenth of what it reads */
};

_Static_assert(LANES *COLUMN_NARROW <= COLUMN_PIECE && 2 * COLUMN_WIDTH <= COLUMN_PIECE, "one piece when widened");

static inline bool column_is_narrow(int64_t rows, int64_t dim) {
    return rows > 1 && dim > 0 && dim < COLUMN_NARROW;
}

/* The width that rows of `dim` are walked in. */
static inline int64_t column_width(int64_t rows, int64_t dim) {
    if (!column_is_narrow(rows, dim)) return dim;
    int64_t unit = LANES * dim;
    return (COLUMN_WIDTH + unit - 1) / unit * unit;
}

/* Cuts the problem, whose elements take `bytes_each` to move, and returns the bytes of workspace it wants. */
static inline size_t column_plan(column_sums *c, size_t bytes_each) {
    int64_t total = c->rows * c->dim;
    c->width = column_width(c->rows, c->dim);
    c->whole = c->width ? total / c->width : 0;
    c->rest = total - c->whole * c->width;
    cpu_cut cut = vjp_cpu_cut_items(c->whole, c->width * (int64_t)bytes_each, CPU_MOST_PARTIALS);
    c->chunk = cut.size > COLUMN_CHUNK ? cut.size : COLUMN_CHUNK;
    c->chunks = (c->whole + c->chunk - 1) / c->chunk;
    if (c->chunks < 1) c->chunks = 1;
    c->pieces = (c->width + COLUMN_PIECE - 1) / COLUMN_PIECE;
    return c->chunks > 1 ? (size_t)(c->matrices * c->chunks * c->width) * sizeof(double) : 0;
}

static inline int64_t column_items(const column_sums *c) {
    return c->matrices * c->chunks * c->pieces;
}

static inline cpu_cut column_cut(const column_sums *c, size_t bytes_each) {
    int64_t items = column_items(c), elements = c->matrices * c->rows * c->dim;
    return vjp_cpu_cut_items(items, items ? elements / items * (int64_t)bytes_each : 0, CPU_MOST_TASKS);
}

/* Results [i, i + n): `factor` times their sums, or that added to what is there. */
INLINE void column_put_as(const column_sums *c, vjp_dtype dtype, int64_t i, int64_t n, vd sums) {
    vd result = vd_scale(sums, c->factor);
    if (c->accumulate) result = vd_add(result, vd_of(vf_load_part(dtype, c->to, i, n)));
    vf_store_part(dtype, c->to, i, n, vd_round(result));
}

OUTLINE void column_put(const column_sums *c, int64_t i, int64_t n, const double *sums) {
    switch (c->to_dtype) {
    case VJP_BF16: column_put_as(c, VJP_BF16, i, n, vd_load(sums)); break;
    case VJP_F16: column_put_as(c, VJP_F16, i, n, vd_load(sums)); break;
    default: column_put_as(c, VJP_F32, i, n, vd_load(sums)); break;
    }
}

/* The sum of column j over `chunks` rows of sums; rows laid side by side have it every dim columns. */
static inline double column_folded(const column_sums *c, int64_t j, const double *sums, int64_t chunks) {
    int64_t used = c->whole ? c->width : c->rest; /* columns that have any element */
    double sum = 0;
    for (int64_t k = 0; k < chunks; k++)
        for (int64_t column = j; column < used; column += c->dim)
            sum += sums[k * c->width + column];
    return sum;
}

/* Puts columns [first, end) of the walk from `chunks` rows of sums, which begin with column `first`. */
static inline void column_finish(const column_sums *c, int64_t matrix, int64_t first, int64_t end, const double *sums,
                                 int64_t chunks) {
    bool narrow = column_is_narrow(c->rows, c->dim);
    if (narrow) end = c->dim;
    for (int64_t j = first; j < end; j += LANES) {
        int64_t n = end - j < LANES ? end - j : LANES;
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

/* Adds `rows` rows, n columns at element i and column j of the walk, to their sum. */
INLINE void column_add(element_value value, const void *call, element_variant v, const column_sums *c, double *sum,
                       int64_t i, int64_t j, int rows, int64_t n) {
    vf s = value(call, v, i, j, n);
    for (int r = 1; r < rows; r++)
        s = vf_add(s, value(call, v, i + r * c->width, j, n));
    vd_store(sum, vd_add(vd_load(sum), vd_of(s)));
}

INLINE void column_rows(element_value value, const void *call, element_variant v, const column_sums *c, double *sums,
                        int64_t i, int64_t first, int64_t end, int rows) {
    int64_t j = first;
    for (; j + LANES <= end; j += LANES)
        column_add(value, call, v, c, sums + j - first, i + j, j, rows, LANES);
    if (j < end) column_add(value, call, v, c, sums + j - first, i + j, j, rows, end - j);
}

/* One item: a piece of a chunk of a matrix. */
INLINE void column_item(element_value value, const void *call, element_variant v, const column_sums *c, int64_t item) {
    int64_t piece = item % c->pieces, chunk = item / c->pieces % c->chunks, matrix = item / c->pieces / c->chunks;
    int64_t first = piece * COLUMN_PIECE, end = first + COLUMN_PIECE < c->width ? first + COLUMN_PIECE : c->width;
    int64_t row = chunk * c->chunk, last = row + c->chunk < c->whole ? row + c->chunk : c->whole;
    int64_t start = matrix * c->rows * c->dim;
    double sums[COLUMN_PIECE + LANES];
    memset(sums, 0, (size_t)(end - first + LANES) * sizeof sums[0]);
    for (; row + COLUMN_ROWS <= last; row += COLUMN_ROWS)
        column_rows(value, call, v, c, sums, start + row * c->width, first, end, COLUMN_ROWS);
    for (; row < last; row++)
        column_rows(value, call, v, c, sums, start + row * c->width, first, end, 1);
    if (chunk == c->chunks - 1 && first < c->rest)
        column_rows(value, call, v, c, sums, start + c->whole * c->width, first, end < c->rest ? end : c->rest, 1);
    if (c->chunks == 1)
        column_finish(c, matrix, first, end, sums, 1);
    else
        memcpy(c->partial + (matrix * c->chunks + chunk) * c->width + first, sums,
               (size_t)(end - first) * sizeof sums[0]);
}

/* Puts all columns from their partial sums, where there are several chunks. */
static void column_total_task(void *argument, size_t task) {
    const column_sums *c = argument;
    int64_t piece = (int64_t)task % c->pieces, matrix = (int64_t)task / c->pieces, first = piece * COLUMN_PIECE;
    int64_t end = first + COLUMN_PIECE < c->width ? first + COLUMN_PIECE : c->width;
    column_finish(c, matrix, first, end, c->partial + matrix * c->chunks * c->width + first, c->chunks);
}

static inline void column_total(const vjp_work *work, column_sums *c) {
    if (c->chunks > 1) vjp_cpu_for(work, c->matrices * c->pieces, column_total_task, c);
}

#endif

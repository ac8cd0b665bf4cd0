/*
 * Attention's way from the tensors to packed tiles and back: where the rows of a unit are, how they are laid out for
 * the register block of gemm_kernel.h, how sums go to their place, and how rows that are needed soon are called into
 * cache.
 */
#ifndef VJP_CPU_ATTENTION_ROWS_H
#define VJP_CPU_ATTENTION_ROWS_H

#include "cpu/gemm/gemm.h"
#include "cpu/gemm/gemm_kernel.h"
#include "cpu/gemm/rows.h"

/*
 * The sides of a tile. They say where chains of FMAs end, so they are the same for every instruction set. With 128 the
 * operands of each of a tile's products, two panels of the right one among them, are in the first-level cache; 256 was
 * a twentieth slower backward, and 112 leaves lengths that are powers of two with a rest.
 */
enum { KEYS = 128, QUERIES = 128 };

/* The queries whose scores are made and then weighed while they are in the first-level cache. */
enum { STRIP = GEMM_COLUMNS % LANES ? 3 * LANES : GEMM_COLUMNS };
enum { QUERIES_PADDED = (QUERIES + STRIP - 1) / STRIP * STRIP };

/* Rows of one head (k, v) or of the heads of a unit (q, y and their gradients): row r is time r / group. */
typedef struct row_source {
    void *data;
    vjp_dtype dtype;
    int64_t first, time_step, head_step, group;
    int64_t dim;
    bool accumulate;
} row_source;

/* Row after row: a division for each would cost as much as copying it. */
typedef struct row_walk {
    int64_t place, head;
} row_walk;

static row_walk walk_from(const row_source *s, int64_t row) {
    int64_t head = row % s->group;
    return (row_walk){s->first + row / s->group * s->time_step + head * s->head_step, head};
}

/* Where the row is; the walk goes on to the next. */
INLINE int64_t walk(const row_source *s, row_walk *w) {
    int64_t place = w->place;
    w->place += s->head_step;
    if (++w->head == s->group) {
        w->head = 0;
        w->place += s->time_step - s->group * s->head_step;
    }
    return place;
}

/* Elements [at, at + count) of the tensor: where they are, or made in `buffer`. */
INLINE const float *row_at(vjp_dtype dtype, const void *data, int64_t at, int64_t count, float *buffer) {
    if (dtype == VJP_F32) return (const float *)data + at;
    load_as(dtype, data, at, count, buffer);
    return buffer;
}

/* ---- Rows that are needed soon ------------------------------------------------------------------------ */

/*
 * They lie far apart, often in the last-level cache or beyond it, where the processor's own prefetching is slow:
 * packing rows that are not in the second-level cache takes twice as long, writing them three times. So they are called
 * into it by the products of the tile before, which ask for two lines with every four terms (gemm_ahead).
 */
enum { AHEAD_RANGES = 8 };

/*
 * The times of rows: at each a stretch, since the heads of a group lie side by side. Walked AHEAD_TIMES at a time, so
 * that few pages are open at once: first the first two lines of each, then the next two.
 */
enum { AHEAD_TIMES = 32 };

typedef struct ahead_range {
    const char *first;
    int64_t bytes, step, times; /* of a stretch, from one to the next, how many */
    int64_t block, pair, time;  /* where the walk is */
} ahead_range;

typedef struct row_ahead {
    ahead_range range[AHEAD_RANGES];
    int now, count;
} row_ahead;

/* Rows [first, first + count), after those that are already asked for. */
static void ask_ahead(row_ahead *a, const row_source *s, int64_t first, int64_t count) {
    if (a->now == a->count) a->now = a->count = 0;
    if (!s->data || count <= 0 || a->count == AHEAD_RANGES) return;
    int64_t size = (int64_t)dtype_bytes(s->dtype), time = first / s->group;
    a->range[a->count++] = (ahead_range){.first = element(s->data, s->dtype, s->first + time * s->time_step),
                                         .bytes = s->group * s->dim * size,
                                         .step = s->time_step * size,
                                         .times = (first + count - 1) / s->group - time + 1};
}

/* What a product of `depth` terms calls in; `idle` where nothing is asked for. */
INLINE gemm_ahead next_ahead(row_ahead *a, int64_t depth, const float *idle) {
    if (a->now == a->count) return (gemm_ahead){.a = (const char *)idle, .b = (const char *)idle};
    ahead_range *r = &a->range[a->now];
    const char *at = r->first + (r->block + r->time) * r->step + r->pair * 2 * GEMM_LINE;
    gemm_ahead next = {.a = at, .b = at + GEMM_LINE, .skip = r->step - GEMM_LINE};
    r->time += depth / GEMM_AHEAD_TERMS;
    if (r->time >= AHEAD_TIMES || r->block + r->time >= r->times) {
        r->time = 0;
        if (++r->pair * 2 * GEMM_LINE >= r->bytes) {
            r->pair = 0;
            r->block += AHEAD_TIMES;
            if (r->block >= r->times) a->now++;
        }
    }
    return next;
}

/* ---- Layouts ----------------------------------------------------------------------------------------- */

/* dim as the columns of a right operand, in whole panels. */
static int64_t padded_dim(int64_t dim) {
    return divide_up(dim, GEMM_COLUMNS) * GEMM_COLUMNS;
}

/* A tile of keys as a left operand by rows: dim in runs of GEMM_DEPTH, each run a block of KEYS rows. */
static int64_t left_floats(int64_t keys, int64_t dim) {
    return ((dim - 1) / GEMM_DEPTH * KEYS + least(KEYS, keys)) * GEMM_ROW_STRIDE;
}

INLINE void pack_left_as(vjp_dtype dtype, row_source s, int64_t first, int64_t count, float factor, float *to) {
    for (int64_t d = 0; d < s.dim; d += GEMM_DEPTH, to += KEYS * GEMM_ROW_STRIDE) {
        int64_t depth = least(GEMM_DEPTH, s.dim - d);
        row_walk w = walk_from(&s, first);
        for (int64_t r = 0; r < count; r++) {
            int64_t at = walk(&s, &w) + d;
            for (int64_t i = 0; i < depth; i += LANES) {
                vf x = vf_load_part(dtype, s.data, at + i, depth - i);
                vf_store(VJP_F32, to, r * GEMM_ROW_STRIDE + i, vf_mul(x, vf_set(factor)));
            }
        }
    }
}

/* Times a factor. */
static void pack_left(const row_source *s, int64_t first, int64_t count, float factor, float *to) {
    switch (s->dtype) {
    case VJP_BF16: pack_left_as(VJP_BF16, *s, first, count, factor, to); break;
    case VJP_F16: pack_left_as(VJP_F16, *s, first, count, factor, to); break;
    default: pack_left_as(VJP_F32, *s, first, count, factor, to); break;
    }
}

/* A right operand, and whether all that was packed into it is finite. */
typedef struct right_operand {
    float *terms;
    bool finite;
} right_operand;

INLINE bool pack_right_as(vjp_dtype dtype, row_source s, int64_t first, int64_t count, int64_t rows, float *to) {
    float buffer[GEMM_DEPTH / GEMM_COLUMNS * GEMM_COLUMNS];
    int64_t piece = sizeof buffer / sizeof *buffer;
    row_walk w = walk_from(&s, first);
    vf zero = vf_zero(); /* what is not finite makes it a NaN */
    for (int64_t r = 0; r < count; r++) {
        int64_t at = walk(&s, &w);
        for (int64_t d = 0; d < s.dim; d += piece) {
            int64_t width = least(piece, s.dim - d);
            const float *row = row_at(dtype, s.data, at + d, width, buffer);
            for (int64_t i = 0; i < width; i += LANES)
                zero = vf_fma(vf_load_part(VJP_F32, row, i, width - i), vf_zero(), zero);
            gemm_pack_term(row, width, GEMM_COLUMNS, GEMM_COLUMNS * rows, to + d * rows + r * GEMM_COLUMNS);
        }
    }
    return !vi_any(vf_is_nan(zero));
}

/*
 * As a right operand whose terms are rows: panels of GEMM_COLUMNS elements of dim, `rows` terms each, these ones from
 * term `at` on.
 */
static void pack_right(const row_source *s, int64_t first, int64_t count, int64_t rows, int64_t at, right_operand *to) {
    float *terms = to->terms + at * GEMM_COLUMNS;
    switch (s->dtype) {
    case VJP_BF16: to->finite &= pack_right_as(VJP_BF16, *s, first, count, rows, terms); break;
    case VJP_F16: to->finite &= pack_right_as(VJP_F16, *s, first, count, rows, terms); break;
    default: to->finite &= pack_right_as(VJP_F32, *s, first, count, rows, terms); break;
    }
}

INLINE void pack_turned_as(vjp_dtype dtype, row_source s, int64_t first, int64_t count, float *to) {
    static const float zeros[GEMM_DEPTH];
    float made[NATIVE_LANES * GEMM_DEPTH];
    row_walk w = walk_from(&s, first);
    for (int64_t c = 0; c < divide_up(count, STRIP) * STRIP; c += NATIVE_LANES) {
        int64_t place[NATIVE_LANES], here = most(0, least(NATIVE_LANES, count - c));
        for (int64_t i = 0; i < here; i++)
            place[i] = walk(&s, &w);
        for (int64_t d = 0; d < s.dim; d += GEMM_DEPTH) {
            int64_t depth = least(GEMM_DEPTH, s.dim - d);
            const float *rows[NATIVE_LANES];
            for (int i = 0; i < NATIVE_LANES; i++)
                rows[i] = i < here ? row_at(dtype, s.data, place[i] + d, depth, made + i * GEMM_DEPTH) : zeros;
            gemm_pack_turned(rows, depth,
                             to + c / GEMM_COLUMNS * GEMM_COLUMNS * s.dim + d * GEMM_COLUMNS + c % GEMM_COLUMNS);
        }
    }
}

/* As a right operand whose columns are rows: panels of GEMM_COLUMNS rows, dim terms each; whole strips. */
static void pack_turned(const row_source *s, int64_t first, int64_t count, float *to) {
    switch (s->dtype) {
    case VJP_BF16: pack_turned_as(VJP_BF16, *s, first, count, to); break;
    case VJP_F16: pack_turned_as(VJP_F16, *s, first, count, to); break;
    default: pack_turned_as(VJP_F32, *s, first, count, to); break;
    }
}

INLINE void put_rows_as(vjp_dtype dtype, row_source s, int64_t first, int64_t count, const float *sums,
                        const float *factors, float factor) {
    int64_t stride = padded_dim(s.dim);
    row_walk w = walk_from(&s, first);
    for (int64_t r = 0; r < count; r++, sums += stride) {
        int64_t at = walk(&s, &w);
        vf by = vf_set(factors ? factors[r] : factor);
        for (int64_t d = 0; d < s.dim; d += LANES) {
            vf value = vf_mul(vf_load_part(VJP_F32, sums, d, s.dim - d), by);
            if (s.accumulate) value = vf_add(vf_load_part(dtype, s.data, at + d, s.dim - d), value);
            vf_store_part(dtype, s.data, at + d, s.dim - d, value);
        }
    }
}

/* Sums of rows to their places, each times a factor of its own or all times one. */
static void put_rows(const row_source *s, int64_t first, int64_t count, const float *sums, const float *factors,
                     float factor) {
    switch (s->dtype) {
    case VJP_BF16: put_rows_as(VJP_BF16, *s, first, count, sums, factors, factor); break;
    case VJP_F16: put_rows_as(VJP_F16, *s, first, count, sums, factors, factor); break;
    default: put_rows_as(VJP_F32, *s, first, count, sums, factors, factor); break;
    }
}

#endif

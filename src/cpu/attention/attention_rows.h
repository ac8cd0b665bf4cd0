/* SPDX-License-Identifier: MIT */
/*
 * Attention's loads and stores: addresses of a unit's rows, their packing for the micro-kernel (gemm_kernel.h), the
 * storing of sums, and the prefetch of rows that are needed soon.
 */
#ifndef VJP_CPU_ATTENTION_ROWS_H
#define VJP_CPU_ATTENTION_ROWS_H

#include "cpu/gemm/gemm.h"
#include "cpu/gemm/gemm_kernel.h"
#include "cpu/gemm/rows.h"

/*
 * The sides of a tile. They decide where FMA chains end, so they are the same for every instruction set. With 128, the
 * operands of each of a tile's products, including two panels of the right one, fit the first-level cache; 256 made the
 * backward 5 % slower, and 112 does not divide lengths that are powers of two.
 */
enum { KEYS = 128, QUERIES = 128 };

/* Queries whose scores are computed and turned into weights while they are in the first-level cache. */
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

/* Steps from row to row: a division per row would cost as much as copying it. */
typedef struct row_cursor {
    int64_t place, head;
} row_cursor;

static row_cursor cursor_at(const row_source *s, int64_t row) {
    int64_t head = row % s->group;
    return (row_cursor){s->first + row / s->group * s->time_step + head * s->head_step, head};
}

/* Index of the row; moves on to the next. */
INLINE int64_t next_row(const row_source *s, row_cursor *w) {
    int64_t place = w->place;
    w->place += s->head_step;
    if (++w->head == s->group) {
        w->head = 0;
        w->place += s->time_step - s->group * s->head_step;
    }
    return place;
}

/* Elements [at, at + count) of the tensor: in place, or converted in `buffer`. */
INLINE const float *row_as_f32(vjp_dtype dtype, const void *data, int64_t at, int64_t count, float *buffer) {
    if (dtype == VJP_F32) return (const float *)data + at;
    load_as(dtype, data, at, count, buffer);
    return buffer;
}

/* ---- Prefetch ----------------------------------------------------------------------------------------  */

/*
 * Rows are far apart, often in the last-level cache or beyond, where the hardware prefetcher is slow: packing rows that
 * are not in the second-level cache takes twice as long, storing them three times. So the products of earlier tiles
 * prefetch them, two lines per four terms (gemm_prefetch).
 */
enum { QUEUE_RANGES = 8 };

/*
 * Rows form one contiguous range per time, since the heads of a group are adjacent. QUEUE_TIMES ranges are prefetched
 * together, so that few pages are in use at once: first two lines of each, then the next two.
 */
enum { QUEUE_TIMES = 32 };

typedef struct prefetch_range {
    const char *first;
    int64_t bytes, step, times; /* of a range, from one to the next, how many */
    int64_t block, pair, time;  /* position in the ranges */
} prefetch_range;

typedef struct prefetch_queue {
    prefetch_range range[QUEUE_RANGES];
    int now, count;
} prefetch_queue;

/* Appends rows [first, first + count) to the queue. */
static void queue_rows(prefetch_queue *a, const row_source *s, int64_t first, int64_t count) {
    if (a->now == a->count) a->now = a->count = 0;
    if (!s->data || count <= 0 || a->count == QUEUE_RANGES) return;
    int64_t size = (int64_t)dtype_bytes(s->dtype), time = first / s->group;
    a->range[a->count++] = (prefetch_range){.first = element(s->data, s->dtype, s->first + time * s->time_step),
                                            .bytes = s->group * s->dim * size,
                                            .step = s->time_step * size,
                                            .times = (first + count - 1) / s->group - time + 1};
}

/* What a product of `depth` terms prefetches; `idle` where the queue is empty. */
INLINE gemm_prefetch next_prefetch(prefetch_queue *a, int64_t depth, const float *idle) {
    if (a->now == a->count) return (gemm_prefetch){.a = (const char *)idle, .b = (const char *)idle};
    prefetch_range *r = &a->range[a->now];
    const char *at = r->first + (r->block + r->time) * r->step + r->pair * 2 * CACHE_LINE;
    gemm_prefetch next = {.a = at, .b = at + CACHE_LINE, .skip = r->step - CACHE_LINE};
    r->time += depth / GEMM_PREFETCH_TERMS;
    if (r->time >= QUEUE_TIMES || r->block + r->time >= r->times) {
        r->time = 0;
        if (++r->pair * 2 * CACHE_LINE >= r->bytes) {
            r->pair = 0;
            r->block += QUEUE_TIMES;
            if (r->block >= r->times) a->now++;
        }
    }
    return next;
}

/* ---- Layouts ----------------------------------------------------------------------------------------- */

/* dim as the columns of a right operand, in whole panels. */
static int64_t padded_dim(int64_t dim) {
    return vjp_round_up(dim, GEMM_COLUMNS);
}

/* A tile of keys as a left operand by rows: dim in slices of GEMM_DEPTH, each a block of KEYS rows. */
static int64_t left_floats(int64_t keys, int64_t dim) {
    return ((dim - 1) / GEMM_DEPTH * KEYS + vjp_min(KEYS, keys)) * GEMM_ROW_STRIDE;
}

INLINE void pack_left_as(vjp_dtype dtype, row_source s, int64_t first, int64_t count, float factor, float *to) {
    for (int64_t d = 0; d < s.dim; d += GEMM_DEPTH, to += KEYS * GEMM_ROW_STRIDE) {
        int64_t depth = vjp_min(GEMM_DEPTH, s.dim - d);
        row_cursor w = cursor_at(&s, first);
        for (int64_t r = 0; r < count; r++) {
            int64_t at = next_row(&s, &w) + d;
            for (int64_t i = 0; i < depth; i += LANES) {
                vf x = vf_load_part(dtype, s.data, at + i, depth - i);
                vf_store(VJP_F32, to, r * GEMM_ROW_STRIDE + i, vf_mul(x, vf_set(factor)));
            }
        }
    }
}

/* Multiplied by a factor. */
static void pack_left(const row_source *s, int64_t first, int64_t count, float factor, float *to) {
    switch (s->dtype) {
    case VJP_BF16: pack_left_as(VJP_BF16, *s, first, count, factor, to); break;
    case VJP_F16: pack_left_as(VJP_F16, *s, first, count, factor, to); break;
    default: pack_left_as(VJP_F32, *s, first, count, factor, to); break;
    }
}

/*
 * A right operand. `finite` becomes false if a number packed into it, times `reach`, is at least twice the largest f32,
 * or may if the sum of such products is: one FMA per vector. FINITE_REACH keeps any finite numbers below that.
 */
typedef struct right_operand {
    float *terms;
    float reach;
    bool finite;
} right_operand;

#define FINITE_REACH 0x1p-32f

INLINE bool pack_right_as(vjp_dtype dtype, row_source s, int64_t first, int64_t count, int64_t rows, float reach,
                          float *to) {
    float buffer[GEMM_DEPTH / GEMM_COLUMNS * GEMM_COLUMNS];
    int64_t width_limit = sizeof buffer / sizeof *buffer;
    row_cursor w = cursor_at(&s, first);
    vf sum = vf_zero();
    for (int64_t r = 0; r < count; r++) {
        int64_t at = next_row(&s, &w);
        for (int64_t d = 0; d < s.dim; d += width_limit) {
            int64_t width = vjp_min(width_limit, s.dim - d);
            const float *row = row_as_f32(dtype, s.data, at + d, width, buffer);
            for (int64_t i = 0; i < width; i += LANES)
                sum = vf_fma(vf_load_part(VJP_F32, row, i, width - i), vf_set(reach), sum);
            gemm_pack_term(row, width, GEMM_COLUMNS, GEMM_COLUMNS * rows, to + d * rows + r * GEMM_COLUMNS);
        }
    }
    return !vi_any(vf_is_nan(vf_mul(sum, vf_zero())));
}

/*
 * As a right operand whose terms are rows: panels of GEMM_COLUMNS elements of dim with `rows` terms each, starting at
 * term `at`.
 */
static void pack_right(const row_source *s, int64_t first, int64_t count, int64_t rows, int64_t at, right_operand *to) {
    float *terms = to->terms + at * GEMM_COLUMNS;
    switch (s->dtype) {
    case VJP_BF16: to->finite &= pack_right_as(VJP_BF16, *s, first, count, rows, to->reach, terms); break;
    case VJP_F16: to->finite &= pack_right_as(VJP_F16, *s, first, count, rows, to->reach, terms); break;
    default: to->finite &= pack_right_as(VJP_F32, *s, first, count, rows, to->reach, terms); break;
    }
}

INLINE void pack_transposed_as(vjp_dtype dtype, row_source s, int64_t first, int64_t count, float *to) {
    static const float zeros[GEMM_DEPTH];
    float converted[NATIVE_LANES * GEMM_DEPTH];
    row_cursor w = cursor_at(&s, first);
    for (int64_t c = 0; c < vjp_round_up(count, STRIP); c += NATIVE_LANES) {
        int64_t place[NATIVE_LANES], here = vjp_max(0, vjp_min(NATIVE_LANES, count - c));
        for (int64_t i = 0; i < here; i++)
            place[i] = next_row(&s, &w);
        for (int64_t d = 0; d < s.dim; d += GEMM_DEPTH) {
            int64_t depth = vjp_min(GEMM_DEPTH, s.dim - d);
            const float *rows[NATIVE_LANES];
            for (int i = 0; i < NATIVE_LANES; i++)
                rows[i] = i < here ? row_as_f32(dtype, s.data, place[i] + d, depth, converted + i * GEMM_DEPTH) : zeros;
            gemm_pack_transposed(rows, depth,
                                 to + c / GEMM_COLUMNS * GEMM_COLUMNS * s.dim + d * GEMM_COLUMNS + c % GEMM_COLUMNS);
        }
    }
}

/* As a right operand whose columns are rows: panels of GEMM_COLUMNS rows with dim terms each, in whole strips. */
static void pack_transposed(const row_source *s, int64_t first, int64_t count, float *to) {
    switch (s->dtype) {
    case VJP_BF16: pack_transposed_as(VJP_BF16, *s, first, count, to); break;
    case VJP_F16: pack_transposed_as(VJP_F16, *s, first, count, to); break;
    default: pack_transposed_as(VJP_F32, *s, first, count, to); break;
    }
}

INLINE void store_rows_as(vjp_dtype dtype, row_source s, int64_t first, int64_t count, const float *sums,
                          const float *factors, float factor) {
    int64_t stride = padded_dim(s.dim);
    row_cursor w = cursor_at(&s, first);
    for (int64_t r = 0; r < count; r++, sums += stride) {
        int64_t at = next_row(&s, &w);
        vf by = vf_set(factors ? factors[r] : factor);
        for (int64_t d = 0; d < s.dim; d += LANES) {
            vf value = vf_mul(vf_load_part(VJP_F32, sums, d, s.dim - d), by);
            if (s.accumulate) value = vf_add(vf_load_part(dtype, s.data, at + d, s.dim - d), value);
            vf_store_part(dtype, s.data, at + d, s.dim - d, value);
        }
    }
}

/* Stores rows of sums, multiplied by a factor per row or one for all. */
static void store_rows(const row_source *s, int64_t first, int64_t count, const float *sums, const float *factors,
                       float factor) {
    switch (s->dtype) {
    case VJP_BF16: store_rows_as(VJP_BF16, *s, first, count, sums, factors, factor); break;
    case VJP_F16: store_rows_as(VJP_F16, *s, first, count, sums, factors, factor); break;
    default: store_rows_as(VJP_F32, *s, first, count, sums, factors, factor); break;
    }
}

#endif

/*
 * The inner part of attention: a tile of KEYS keys by QUERIES queries, its operands laid out for the register block of
 * gemm_kernel.h, and its products.
 *
 * Scores stand with a key a row and a query a lane. So the running maximum, the sum and the correction of softmax are
 * plain vector arithmetic with no sum across lanes, the weights serve without being moved as the left operand of
 * every product that follows (by terms where a row of the result is a query, by rows where it is a key), and only q and
 * dy are ever transposed, once each.
 *
 * The sides of a tile say where chains of FMAs end, so they are the same for every instruction set. What is masked is
 * left out panel by panel, in every product; inside a panel the weight is 0, which changes no bit of a sum.
 */
#ifndef VJP_CPU_ATTENTION_TILE_H
#define VJP_CPU_ATTENTION_TILE_H

#include "cpu/gemm.h"
#include "cpu/gemm_kernel.h"
#include "cpu/rows.h"
#include "cpu/vec_math.h"

/* Whole panels with AVX-512: 8 x 14 keys; 7 x 32 and 16 x 14 queries. */
enum { KEYS = 112, QUERIES = 224 };

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

static int64_t place_of(const row_source *s, int64_t row) {
    return s->first + row / s->group * s->time_step + row % s->group * s->head_step;
}

/* Elements [from, from + count) of a row: where they are, or made in `buffer`. */
INLINE const float *row_at(const row_source *s, int64_t row, int64_t from, int64_t count, float *buffer) {
    int64_t at = place_of(s, row) + from;
    if (s->dtype == VJP_F32) return (const float *)s->data + at;
    load_row(s->dtype, s->data, at, count, buffer);
    return buffer;
}

/* Calls a row into the cache that is packed soon: rows lie far apart, where the processor's own prefetching is slow. */
INLINE void call_in(const row_source *s, int64_t row, int64_t from, int64_t count) {
    const char *at = element(s->data, s->dtype, place_of(s, row) + from),
               *end = at + count * (int64_t)dtype_bytes(s->dtype);
    for (; at < end; at += GEMM_LINE)
        __builtin_prefetch(at, 0, 3);
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

/* Scores, weights and their gradients: rows as far apart as those of a packed left operand, which they become. */
static int64_t score_floats(int64_t keys) {
    return least(KEYS, keys) * GEMM_ROW_STRIDE;
}

static void pack_left(const row_source *s, int64_t first, int64_t count, float *to) {
    for (int64_t d = 0; d < s->dim; d += GEMM_DEPTH, to += KEYS * GEMM_ROW_STRIDE)
        for (int64_t r = 0; r < count; r++) {
            float *row = to + r * GEMM_ROW_STRIDE;
            int64_t depth = least(GEMM_DEPTH, s->dim - d);
            load_row(s->dtype, s->data, place_of(s, first + r) + d, depth, row);
        }
}

/* As a right operand whose terms are rows: panels of GEMM_COLUMNS elements of dim, `rows` terms each. */
static void pack_right(const row_source *s, int64_t first, int64_t count, int64_t rows, float *to) {
    float buffer[GEMM_DEPTH / GEMM_COLUMNS * GEMM_COLUMNS];
    int64_t piece = sizeof buffer / sizeof *buffer;
    for (int64_t r = 0; r < count; r++)
        for (int64_t d = 0; d < s->dim; d += piece) {
            int64_t width = least(piece, s->dim - d);
            gemm_pack_term(row_at(s, first + r, d, width, buffer), width, GEMM_COLUMNS, GEMM_COLUMNS * rows,
                           to + d * rows + r * GEMM_COLUMNS);
        }
}

/* As a right operand whose columns are rows, times a factor: panels of GEMM_COLUMNS rows, dim terms each; whole strips.
 */
static void pack_turned(const row_source *s, int64_t first, int64_t count, float factor, float *to) {
    static const float zeros[GEMM_DEPTH];
    float made[NATIVE_LANES * GEMM_DEPTH];
    for (int64_t c = 0; c < divide_up(count, STRIP) * STRIP; c += NATIVE_LANES)
        for (int64_t d = 0; d < s->dim; d += GEMM_DEPTH) {
            int64_t depth = least(GEMM_DEPTH, s->dim - d);
            const float *rows[NATIVE_LANES];
            for (int64_t i = c + NATIVE_LANES; i < least(count, c + 2 * NATIVE_LANES); i++)
                call_in(s, first + i, d, depth);
            for (int i = 0; i < NATIVE_LANES; i++)
                rows[i] = c + i < count ? row_at(s, first + c + i, d, depth, made + i * GEMM_DEPTH) : zeros;
            gemm_pack_turned(rows, depth,
                             to + c / GEMM_COLUMNS * GEMM_COLUMNS * s->dim + d * GEMM_COLUMNS + c % GEMM_COLUMNS);
        }
    for (int64_t i = 0; factor != 1 && i < divide_up(count, STRIP) * STRIP * s->dim; i += LANES)
        vf_store(VJP_F32, to, i, vf_mul(vf_load(VJP_F32, to, i), vf_set(factor)));
}

/* Sums of a row, times a factor, to their place. */
INLINE void put_row_as(vjp_dtype dtype, const row_source *s, int64_t row, const float *sums, float factor) {
    int64_t at = place_of(s, row);
    for (int64_t d = 0; d < s->dim; d += LANES) {
        vf value = vf_mul(vf_load_part(VJP_F32, sums, d, s->dim - d), vf_set(factor));
        if (s->accumulate) value = vf_add(vf_load_part(dtype, s->data, at + d, s->dim - d), value);
        vf_store_part(dtype, s->data, at + d, s->dim - d, value);
    }
}

static void put_row(const row_source *s, int64_t row, const float *sums, float factor) {
    switch (s->dtype) {
    case VJP_BF16: put_row_as(VJP_BF16, s, row, sums, factor); break;
    case VJP_F16: put_row_as(VJP_F16, s, row, sums, factor); break;
    default: put_row_as(VJP_F32, s, row, sums, factor); break;
    }
}

/* ---- What is seen ------------------------------------------------------------------------------------ */

/* Keys [key, key + keys) by rows [row, row + rows) of a unit. */
typedef struct attention_tile {
    int64_t key, keys, row, rows;
    bool whole;                 /* every query sees every key */
    float seen[QUERIES_PADDED]; /* how many of the tile's keys each query sees; it never falls. Unless `whole` */
} attention_tile;

static int64_t seen_of(const attention_tile *t, int64_t query) {
    return t->whole ? t->keys : (int64_t)t->seen[least(query, t->rows - 1)];
}

/* The first query that sees key `key` of the tile; `rows` if none does. */
static int64_t first_to_see(const attention_tile *t, int64_t key) {
    if (t->whole) return 0;
    int64_t low = 0, high = t->rows;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if ((int64_t)t->seen[middle] > key)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* ---- Products ---------------------------------------------------------------------------------------- */

/* c = a b, or c += a b, for up to GEMM_ROWS rows and one panel of b. */
OUTLINE void multiply_by_rows(int64_t rows, int64_t depth, const float *a, const float *b, float *c, int64_t stride,
                              bool add) {
    gemm_ahead none = {.a = (const char *)a, .b = (const char *)b};
    gemm_rows(1, rows, depth, a, b, NULL, (gemm_target){add ? c : NULL, c, stride, stride}, &none);
}

OUTLINE void multiply_by_terms(int64_t rows, int64_t depth, const float *a, const float *b, float *c, int64_t stride,
                               bool add) {
    gemm_ahead none = {.a = (const char *)a, .b = (const char *)b};
    gemm_rows(GEMM_ROW_STRIDE, rows, depth, a, b, NULL, (gemm_target){add ? c : NULL, c, stride, stride}, &none);
}

/* A strip of scores: the products of keys (left) and queries (turned). What no query of a panel sees is not written. */
static void multiply_strip(const attention_tile *t, int64_t dim, const float *keys, const float *queries, int64_t strip,
                           float *to) {
    for (int64_t c = strip; c < strip + STRIP; c += GEMM_COLUMNS) {
        int64_t count = seen_of(t, c + GEMM_COLUMNS - 1);
        for (int64_t i = 0; i < count; i += GEMM_ROWS) {
            const float *a = keys + i * GEMM_ROW_STRIDE, *b = queries + c * dim;
            for (int64_t d = 0; d < dim; d += GEMM_DEPTH, a += KEYS * GEMM_ROW_STRIDE, b += GEMM_DEPTH * GEMM_COLUMNS)
                multiply_by_rows(least(GEMM_ROWS, count - i), least(GEMM_DEPTH, dim - d), a, b,
                                 to + i * GEMM_ROW_STRIDE + c, GEMM_ROW_STRIDE, d > 0);
        }
    }
}

/*
 * Rows of a product at a time. A weight that is masked is 0, but 0 times NaN is not: where a right operand of a tile
 * that is not seen whole has a number that is not finite, each row takes exactly the terms that are its own.
 */
static int64_t row_step(const attention_tile *t, int64_t dim, const float *right, int64_t rows, int64_t count) {
    vi bad = vi_set(0);
    for (int64_t d = 0; !t->whole && d < dim; d += GEMM_COLUMNS)
        for (int64_t i = 0; i < count * GEMM_COLUMNS; i += LANES) {
            vf x = vf_load_part(VJP_F32, right + d * rows, i, count * GEMM_COLUMNS - i);
            bad = vi_or(bad, vf_is_nan(vf_sub(x, x)));
        }
    return vi_any(bad) ? 1 : GEMM_ROWS;
}

/* to[query] (+)= the sum over keys of weight[key][query] right[key]. */
static void sum_over_keys(const attention_tile *t, int64_t dim, const float *weights, const float *right, float *to,
                          bool add) {
    int64_t stride = padded_dim(dim), step = row_step(t, dim, right, KEYS, t->keys);
    for (int64_t d = 0; d < dim; d += GEMM_COLUMNS)
        for (int64_t i = 0; i < t->rows; i += step) {
            int64_t count = least(step, t->rows - i);
            multiply_by_terms(count, seen_of(t, i + count - 1), weights + i, right + d * KEYS, to + i * stride + d,
                              stride, add);
        }
}

/* to[key] += the sum over queries of weight[key][query] right[query]. */
static void sum_over_queries(const attention_tile *t, int64_t dim, const float *weights, const float *right,
                             float *to) {
    int64_t stride = padded_dim(dim), step = row_step(t, dim, right, QUERIES, t->rows);
    for (int64_t d = 0; d < dim; d += GEMM_COLUMNS)
        for (int64_t i = 0; i < t->keys; i += step) {
            int64_t first = first_to_see(t, i);
            if (first == t->rows) break;
            multiply_by_rows(least(step, t->keys - i), t->rows - first, weights + i * GEMM_ROW_STRIDE + first,
                             right + d * QUERIES + first * GEMM_COLUMNS, to + i * stride + d, stride, true);
        }
}

/* ---- Scores to weights ------------------------------------------------------------------------------- */

/* The running maximum of each query's scores, and the sum of exp of them less that. */
typedef struct softmax_state {
    float *maximum, *sum;
    float *correction; /* of what was summed before the last tile: exp(old maximum - new) */
} softmax_state;

INLINE vf masked(vf value, vf limit, int64_t key, vf otherwise) {
    return vf_select(vf_greater(limit, vf_set((float)key)), value, otherwise);
}

static void zero_rows(float *column, int64_t from, int64_t to) {
    for (int64_t j = from; j < to; j++)
        vf_store(VJP_F32, column, j * GEMM_ROW_STRIDE, vf_zero());
}

/* Of `count` rows, in four chains: one alone would wait for each of its results. */
INLINE vf largest_of(const float *column, int64_t count) {
    enum { CHAINS = 4 };
    vf largest[CHAINS];
    for (int i = 0; i < CHAINS; i++)
        largest[i] = vf_set(-INFINITY);
    int64_t j = 0;
    for (; j + CHAINS <= count; j += CHAINS)
        UNROLL for (int i = 0; i < CHAINS; i++) largest[i] =
            vf_max(vf_load(VJP_F32, column, (j + i) * GEMM_ROW_STRIDE), largest[i]);
    for (; j < count; j++)
        largest[0] = vf_max(vf_load(VJP_F32, column, j * GEMM_ROW_STRIDE), largest[0]);
    return vf_max(vf_max(largest[0], largest[1]), vf_max(largest[2], largest[3]));
}

/* LANES queries from `at` on: their scores become weights exp(score - maximum), and the state moves on. */
static void weigh_running(const attention_tile *t, int64_t at, float *scores, const softmax_state *s) {
    float *column = scores + at;
    int64_t all = seen_of(t, at), some = seen_of(t, at + LANES - 1);
    vf largest = largest_of(column, all), limit = t->whole ? vf_zero() : vf_load(VJP_F32, t->seen, at);
    for (int64_t j = all; j < some; j++)
        largest = vf_max(masked(vf_load(VJP_F32, column, j * GEMM_ROW_STRIDE), limit, j, largest), largest);
    vf old = vf_load(VJP_F32, s->maximum, at), now = vf_max(largest, old);
    /* Nothing but -inf so far: the weights are 0, not NaN. */
    vf minus = vf_sub(vf_zero(), vf_select(vf_equal(now, vf_set(-INFINITY)), vf_zero(), now));
    vf correction = vf_exp_below(vf_add(old, minus)), sum = vf_zero();
    for (int64_t j = 0; j < all; j++) {
        vf p = vf_exp_below(vf_add(vf_load(VJP_F32, column, j * GEMM_ROW_STRIDE), minus));
        vf_store(VJP_F32, column, j * GEMM_ROW_STRIDE, p);
        sum = vf_add(sum, p);
    }
    for (int64_t j = all; j < some; j++) {
        vf p = vf_exp_below(vf_add(vf_load(VJP_F32, column, j * GEMM_ROW_STRIDE), minus));
        p = masked(p, limit, j, vf_zero());
        vf_store(VJP_F32, column, j * GEMM_ROW_STRIDE, p);
        sum = vf_add(sum, p);
    }
    zero_rows(column, some, t->keys);
    vf_store(VJP_F32, s->maximum, at, now);
    vf_store(VJP_F32, s->correction, at, correction);
    vf_store(VJP_F32, s->sum, at, vf_fma(vf_load(VJP_F32, s->sum, at), correction, sum));
}

/*
 * The log of the sum of exp of each query's scores as two numbers, the second small: of the maximum and the sum's own
 * where they were just computed. And mean, <dy, y>.
 */
typedef struct known_state {
    float *maximum, *rest, *mean;
} known_state;

/* The same with that known: scores become weights p, and `slopes`, dp, become ds = p (dp - mean). */
static void weigh_known(const attention_tile *t, int64_t at, float *scores, float *slopes, const known_state *s) {
    float *column = scores + at, *slope = slopes ? slopes + at : column;
    int64_t all = seen_of(t, at), some = seen_of(t, at + LANES - 1);
    vf limit = t->whole ? vf_zero() : vf_load(VJP_F32, t->seen, at), mean = vf_load(VJP_F32, s->mean, at);
    vf maximum = vf_load(VJP_F32, s->maximum, at), rest = vf_load(VJP_F32, s->rest, at);
    for (int64_t j = 0; j < some; j++) {
        int64_t place = j * GEMM_ROW_STRIDE;
        vf p = vf_exp_below(vf_sub(vf_sub(vf_load(VJP_F32, column, place), maximum), rest));
        vf ds = slopes ? vf_mul(p, vf_sub(vf_load(VJP_F32, slope, place), mean)) : vf_zero();
        if (j >= all) {
            p = masked(p, limit, j, vf_zero());
            ds = masked(ds, limit, j, vf_zero());
        }
        vf_store(VJP_F32, column, place, p);
        if (slopes) vf_store(VJP_F32, slope, place, ds);
    }
    zero_rows(column, some, t->keys);
    if (slopes) zero_rows(slope, some, t->keys);
}

/* What was summed so far, brought to the new maximum. Where that has not changed there is nothing to do. */
static void correct_sums(const attention_tile *t, int64_t dim, const float *correction, float *sums) {
    int64_t stride = padded_dim(dim);
    for (int64_t i = 0; i < t->rows; i++) {
        if (correction[i] == 1) continue;
        vf factor = vf_set(correction[i]);
        float *row = sums + i * stride;
        for (int64_t d = 0; d < dim; d += LANES)
            vf_store_part(VJP_F32, row, d, dim - d, vf_mul(vf_load_part(VJP_F32, row, d, dim - d), factor));
    }
}

#endif

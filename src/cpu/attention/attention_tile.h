/*
 * The inner part of attention: a tile of KEYS keys by QUERIES queries, its operands packed by attention_rows.h, and its
 * products.
 *
 * Scores stand with a key a row and a query a lane. So the running maximum, the sum and the correction of softmax are
 * plain vector arithmetic with no sum across lanes, the weights serve without being moved as the left operand of
 * every product that follows (by terms where a row of the result is a query, by rows where it is a key), and only q and
 * dy are ever transposed, once each.
 *
 * What is masked is left out panel by panel, in every product; inside a panel the weight is 0, which changes no bit of
 * a sum.
 */
#ifndef VJP_CPU_ATTENTION_TILE_H
#define VJP_CPU_ATTENTION_TILE_H

#include "cpu/attention/attention_rows.h"
#include "cpu/simd/vec_math.h"

/* ---- What is seen ------------------------------------------------------------------------------------ */

/* Keys [key, key + keys) by rows [row, row + rows) of a unit. */
typedef struct attention_tile {
    int64_t key, keys, row, rows;
    bool whole;                 /* every query sees every key */
    float seen[QUERIES_PADDED]; /* how many of the tile's keys each query sees; it never falls. Unless `whole` */
    row_ahead *ahead;           /* what to call into cache meanwhile */
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
                              bool add, row_ahead *ahead) {
    gemm_ahead next = next_ahead(ahead, depth, b);
    gemm_rows(1, rows, depth, a, b, (gemm_target){add ? c : NULL, c, stride, stride}, &next);
}

OUTLINE void multiply_by_terms(int64_t rows, int64_t depth, const float *a, const float *b, float *c, int64_t stride,
                               bool add, row_ahead *ahead) {
    gemm_ahead next = next_ahead(ahead, depth, b);
    gemm_rows(GEMM_ROW_STRIDE, rows, depth, a, b, (gemm_target){add ? c : NULL, c, stride, stride}, &next);
}

/* Scores, weights and their gradients: rows as far apart as those of a packed left operand, which they become. */
static int64_t score_floats(int64_t keys) {
    return least(KEYS, keys) * GEMM_ROW_STRIDE;
}

/* Queries of a strip, in whole vectors: the last strip of a tile may have fewer. */
static int64_t strip_end(const attention_tile *t, int64_t strip) {
    return least(strip + STRIP, divide_up(t->rows, LANES) * LANES);
}

/* A strip of scores: the products of keys (left) and queries (turned). What no query of a panel sees is not written. */
static void multiply_strip(const attention_tile *t, int64_t dim, const float *keys, const float *queries, int64_t strip,
                           float *to) {
    for (int64_t c = strip; c < strip_end(t, strip); c += GEMM_COLUMNS) {
        int64_t count = seen_of(t, c + GEMM_COLUMNS - 1);
        for (int64_t i = 0; i < count; i += GEMM_ROWS) {
            const float *a = keys + i * GEMM_ROW_STRIDE, *b = queries + c * dim;
            for (int64_t d = 0; d < dim; d += GEMM_DEPTH, a += KEYS * GEMM_ROW_STRIDE, b += GEMM_DEPTH * GEMM_COLUMNS)
                multiply_by_rows(least(GEMM_ROWS, count - i), least(GEMM_DEPTH, dim - d), a, b,
                                 to + i * GEMM_ROW_STRIDE + c, GEMM_ROW_STRIDE, d > 0, t->ahead);
        }
    }
}

/*
 * Rows of a product at a time. A weight that is masked is 0, but 0 times NaN is not: where a right operand of a tile
 * that is not seen whole has a number that is not finite, each row takes exactly the terms that are its own.
 */
static int64_t row_step(const attention_tile *t, const right_operand *right) {
    return t->whole || right->finite ? GEMM_ROWS : 1;
}

/* Where rows go that are summed to the end, while they are in the first-level cache. */
typedef struct row_target {
    row_source to;
    const float *factors; /* of each row; NULL: all have `factor` */
    float factor;
} row_target;

/* to[query] (+)= the sum over keys of weight[key][query] right[key]. */
static void sum_over_keys(const attention_tile *t, int64_t dim, const float *weights, const right_operand *right,
                          float *to, bool add, const row_target *target) {
    int64_t stride = padded_dim(dim), step = row_step(t, right);
    for (int64_t i = 0; i < t->rows; i += step) {
        int64_t count = least(step, t->rows - i), seen = seen_of(t, i + count - 1);
        for (int64_t d = 0; d < dim; d += GEMM_COLUMNS)
            multiply_by_terms(count, seen, weights + i, right->terms + d * KEYS, to + i * stride + d, stride, add,
                              t->ahead);
        if (target)
            put_rows(&target->to, t->row + i, count, to + i * stride, target->factors ? target->factors + i : NULL,
                     target->factor);
    }
}

/*
 * to[key] += the sum over queries of weight[key][query] right[query]. Keys from `begun` on have no sums yet; it moves
 * on behind the last that gets one.
 */
static void sum_over_queries(const attention_tile *t, int64_t dim, const float *weights, const right_operand *right,
                             float *to, int64_t *begun, const row_target *target) {
    int64_t stride = padded_dim(dim), step = row_step(t, right), count;
    for (int64_t i = 0; i < t->keys; i += count) {
        int64_t first = first_to_see(t, i);
        if (first == t->rows) break;
        bool add = t->key + i < *begun;
        count = least(step, (add ? least(*begun - t->key, t->keys) : t->keys) - i);
        for (int64_t d = 0; d < dim; d += GEMM_COLUMNS)
            multiply_by_rows(count, t->rows - first, weights + i * GEMM_ROW_STRIDE + first,
                             right->terms + d * QUERIES + first * GEMM_COLUMNS, to + i * stride + d, stride, add,
                             t->ahead);
        *begun = most(*begun, t->key + i + count);
        if (target) put_rows(&target->to, t->key + i, count, to + i * stride, NULL, target->factor);
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

/*
 * What LANES queries do not see is 0 as far as a product may take it: up to the last key that a query in the same row
 * block sees, and to the end of a row block of keys.
 */
static void zero_rows(const attention_tile *t, float *column, int64_t at, int64_t some) {
    int64_t end = least(t->keys, most(some + GEMM_ROWS - 1, seen_of(t, at + LANES + GEMM_ROWS - 2)));
    for (int64_t j = some; j < end; j++)
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
    for (int64_t j = all; j < some; j++) {
        vf score = masked(vf_load(VJP_F32, column, j * GEMM_ROW_STRIDE), limit, j, vf_set(-INFINITY));
        vf_store(VJP_F32, column, j * GEMM_ROW_STRIDE, score);
        largest = vf_max(score, largest);
    }
    vf old = vf_load(VJP_F32, s->maximum, at), now = vf_max(largest, old);
    /* Nothing but -inf so far: the weights are 0, not NaN. */
    vf minus = vf_sub(vf_zero(), vf_select(vf_equal(now, vf_set(-INFINITY)), vf_zero(), now));
    vf correction = vf_exp_below(vf_add(old, minus)), sum = vf_zero();
    for (int64_t j = 0; j < some; j++) {
        vf p = vf_exp_below(vf_add(vf_load(VJP_F32, column, j * GEMM_ROW_STRIDE), minus));
        vf_store(VJP_F32, column, j * GEMM_ROW_STRIDE, p);
        sum = vf_add(sum, p);
    }
    zero_rows(t, column, at, some);
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
    zero_rows(t, column, at, some);
    if (slopes) zero_rows(t, slope, at, some);
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

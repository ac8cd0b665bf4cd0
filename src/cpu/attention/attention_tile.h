/* SPDX-License-Identifier: MIT */
/*
 * One tile of attention: KEYS keys by QUERIES queries, packed by attention_rows.h, and its products.
 *
 * Scores have one key per row and one query per lane. So the maximum, sum and correction of softmax need no sum across
 * lanes; the weights are already the left operand of every following product (by terms where a row of the result is a
 * query, by rows where it is a key); and only q and dy are transposed, once each.
 *
 * Every product skips masked panels; within a panel a masked weight is 0, which changes no bit of a sum. Of keys before
 * the first that a query sees (by a window or `first`) whole tiles are skipped, not panels: a tile of rows has at most
 * two tiles where a window begins, and one per tile of keys where documents do.
 */
#ifndef VJP_CPU_ATTENTION_TILE_H
#define VJP_CPU_ATTENTION_TILE_H

#include "cpu/attention/attention_rows.h"
#include "cpu/simd/vec_math.h"

/* ---- Mask --------------------------------------------------------------------------------------------  */

/* Keys [key, key + keys) by rows [row, row + rows) of a unit. */
typedef struct attention_tile {
    int64_t key, keys, row, rows;
    bool whole;    /* every query sees every key */
    bool windowed; /* some query's first key is after the tile's */
    float
        seen[QUERIES_PADDED]; /* each query sees the tile's keys [from, seen), both non-decreasing; unset if `whole` */
    float from[QUERIES_PADDED]; /* unset unless `windowed` */
    prefetch_queue *prefetch;   /* to prefetch meanwhile */
} attention_tile;

static int64_t seen_of(const attention_tile *t, int64_t query) {
    return t->whole ? t->keys : (int64_t)t->seen[vjp_min(query, t->rows - 1)];
}

static int64_t from_of(const attention_tile *t, int64_t query) {
    return t->windowed ? (int64_t)t->from[vjp_min(query, t->rows - 1)] : 0;
}

/* The first query whose bound, non-decreasing, is above `key`; `rows` if none is. */
static int64_t first_above(const attention_tile *t, const float *bound, int64_t key) {
    int64_t low = 0, high = t->rows;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if ((int64_t)bound[middle] > key)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The queries that see key `key` of the tile, [first, end); first is `rows` if it comes after all of them. */
static int64_t first_to_see(const attention_tile *t, int64_t key) {
    return t->whole ? 0 : first_above(t, t->seen, key);
}

static int64_t end_to_see(const attention_tile *t, int64_t key) {
    return t->windowed ? first_above(t, t->from, key) : t->rows;
}

/* ---- Products ---------------------------------------------------------------------------------------- */

/* c = a b, or c += a b, for up to GEMM_ROWS rows and one panel of b. */
OUTLINE void multiply_by_rows(int64_t rows, int64_t depth, const float *a, const float *b, float *c, int64_t stride,
                              bool add, prefetch_queue *prefetch) {
    gemm_prefetch next = next_prefetch(prefetch, depth, b);
    gemm_rows(1, rows, depth, a, b, (gemm_target){add ? c : NULL, c, stride, stride}, &next);
}

OUTLINE void multiply_by_terms(int64_t rows, int64_t depth, const float *a, const float *b, float *c, int64_t stride,
                               bool add, prefetch_queue *prefetch) {
    gemm_prefetch next = next_prefetch(prefetch, depth, b);
    gemm_rows(GEMM_ROW_STRIDE, rows, depth, a, b, (gemm_target){add ? c : NULL, c, stride, stride}, &next);
}

/* Scores, weights and their gradients have the row stride of a packed left operand, which they become. */
static int64_t score_floats(int64_t keys) {
    return vjp_min(KEYS, keys) * GEMM_ROW_STRIDE;
}

/* Queries of a strip, in whole vectors: the last strip of a tile may have fewer. */
static int64_t strip_end(const attention_tile *t, int64_t strip) {
    return vjp_min(strip + STRIP, vjp_round_up(t->rows, LANES));
}

/* A strip of scores: keys (left) times queries (transposed). What no query of a panel sees is not written. */
static void multiply_strip(const attention_tile *t, int64_t dim, const float *keys, const float *queries, int64_t strip,
                           float *to) {
    for (int64_t c = strip; c < strip_end(t, strip); c += GEMM_COLUMNS) {
        int64_t count = seen_of(t, c + GEMM_COLUMNS - 1);
        for (int64_t i = 0; i < count; i += GEMM_ROWS) {
            const float *a = keys + i * GEMM_ROW_STRIDE, *b = queries + c * dim;
            for (int64_t d = 0; d < dim; d += GEMM_DEPTH, a += KEYS * GEMM_ROW_STRIDE, b += GEMM_DEPTH * GEMM_COLUMNS)
                multiply_by_rows(vjp_min(GEMM_ROWS, count - i), vjp_min(GEMM_DEPTH, dim - d), a, b,
                                 to + i * GEMM_ROW_STRIDE + c, GEMM_ROW_STRIDE, d > 0, t->prefetch);
        }
    }
}

/*
 * Rows of a product at a time. A masked weight is 0, but 0 times NaN is NaN: where the right operand of a partly masked
 * tile is not finite, each row takes exactly its own terms.
 */
static int64_t row_step(const attention_tile *t, const right_operand *right) {
    return t->whole || right->finite ? GEMM_ROWS : 1;
}

/* Destination of finished rows, stored while they are in the first-level cache. */
typedef struct row_target {
    row_source to;
    const float *factors; /* per row; NULL: `factor` for all */
    float factor;
} row_target;

/* to[query] (+)= the sum over keys of weight[key][query] right[key] */
static void sum_over_keys(const attention_tile *t, int64_t dim, const float *weights, const right_operand *right,
                          float *to, bool add, const row_target *target) {
    int64_t stride = padded_dim(dim), step = row_step(t, right);
    for (int64_t i = 0; i < t->rows; i += step) {
        int64_t count = vjp_min(step, t->rows - i), seen = seen_of(t, i + count - 1);
        int64_t from = vjp_min(from_of(t, i), seen);
        for (int64_t d = 0; d < dim; d += GEMM_COLUMNS)
            multiply_by_terms(count, seen - from, weights + i + from * GEMM_ROW_STRIDE,
                              right->terms + d * KEYS + from * GEMM_COLUMNS, to + i * stride + d, stride, add,
                              t->prefetch);
        if (target)
            store_rows(&target->to, t->row + i, count, to + i * stride, target->factors ? target->factors + i : NULL,
                       target->factor);
    }
}

/*
 * to[key] += the sum over queries of weight[key][query] right[query]. Keys from `begun` have no sums yet; it moves past
 * the last key that gets one.
 */
static void sum_over_queries(const attention_tile *t, int64_t dim, const float *weights, const right_operand *right,
                             float *to, int64_t *begun, const row_target *target) {
    int64_t stride = padded_dim(dim), step = row_step(t, right), count;
    for (int64_t i = 0; i < t->keys; i += count) {
        int64_t first = first_to_see(t, i);
        if (first == t->rows) break;
        bool add = t->key + i < *begun;
        count = vjp_min(step, (add ? vjp_min(*begun - t->key, t->keys) : t->keys) - i);
        int64_t end = vjp_max(first, end_to_see(t, i + count - 1));
        for (int64_t d = 0; d < dim; d += GEMM_COLUMNS)
            multiply_by_rows(count, end - first, weights + i * GEMM_ROW_STRIDE + first,
                             right->terms + d * QUERIES + first * GEMM_COLUMNS, to + i * stride + d, stride, add,
                             t->prefetch);
        *begun = vjp_max(*begun, t->key + i + count);
        if (target) store_rows(&target->to, t->key + i, count, to + i * stride, NULL, target->factor);
    }
}

/* ---- Softmax -----------------------------------------------------------------------------------------  */

/* Per query, the running maximum of the scores and the sum of exp(score - maximum). */
typedef struct softmax_state {
    float *maximum, *sum;
    float *correction; /* of earlier sums, after the last tile: exp(old maximum - new) */
    float *total;      /* of earlier sums, where they have two levels */
} softmax_state;

INLINE vf masked(vf value, vf limit, int64_t key, vf otherwise) {
    return vf_select(vf_greater(limit, vf_set((float)key)), value, otherwise);
}

/* Replaces what LANES queries have for the first keys of a tile, where these are before their windows. */
static void mask_window(const attention_tile *t, float *column, int64_t at, vf otherwise) {
    vf from = vf_load(VJP_F32, t->from, at);
    for (int64_t j = 0, end = vjp_min(t->keys, from_of(t, at + LANES - 1)); j < end; j++) {
        vf value = vf_load(VJP_F32, column, j * GEMM_ROW_STRIDE);
        vf_store(VJP_F32, column, j * GEMM_ROW_STRIDE, masked(otherwise, from, j, value));
    }
}

/*
 * Zeroes the scores that LANES queries do not see, as far as a product may read: to the last key that a query in the
 * same register block sees, and to the end of a register block of keys.
 */
static void zero_masked(const attention_tile *t, float *column, int64_t at, int64_t some) {
    int64_t end = vjp_min(t->keys, vjp_max(some + GEMM_ROWS - 1, seen_of(t, at + LANES + GEMM_ROWS - 2)));
    for (int64_t j = some; j < end; j++)
        vf_store(VJP_F32, column, j * GEMM_ROW_STRIDE, vf_zero());
}

/* The maximum of `count` rows, in four chains to hide latency. */
INLINE vf max_of(const float *column, int64_t count) {
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

/* For LANES queries from `at`: scores become weights exp(score - maximum), and the state is updated. */
static void softmax_running(const attention_tile *t, int64_t at, float *scores, const softmax_state *s) {
    float *column = scores + at;
    int64_t all = seen_of(t, at), some = seen_of(t, at + LANES - 1);
    if (t->windowed) mask_window(t, column, at, vf_set(-INFINITY));
    vf largest = max_of(column, all), limit = t->whole ? vf_zero() : vf_load(VJP_F32, t->seen, at);
    for (int64_t j = all; j < some; j++) {
        vf score = masked(vf_load(VJP_F32, column, j * GEMM_ROW_STRIDE), limit, j, vf_set(-INFINITY));
        vf_store(VJP_F32, column, j * GEMM_ROW_STRIDE, score);
        largest = vf_max(score, largest);
    }
    vf old = vf_load(VJP_F32, s->maximum, at), now = vf_max(largest, old);
    /* all scores -inf so far: weights are 0, not NaN */
    vf minus = vf_sub(vf_zero(), vf_select(vf_equal(now, vf_set(-INFINITY)), vf_zero(), now));
    vf correction = vf_exp_below(vf_add(old, minus)), sum = vf_zero();
    for (int64_t j = 0; j < some; j++) {
        vf p = vf_exp_below(vf_add(vf_load(VJP_F32, column, j * GEMM_ROW_STRIDE), minus));
        vf_store(VJP_F32, column, j * GEMM_ROW_STRIDE, p);
        sum = vf_add(sum, p);
    }
    zero_masked(t, column, at, some);
    vf_store(VJP_F32, s->maximum, at, now);
    vf_store(VJP_F32, s->correction, at, correction);
    vf_store(VJP_F32, s->sum, at, vf_fma(vf_load(VJP_F32, s->sum, at), correction, sum));
}

/*
 * The log-sum-exp of each query's scores as two numbers, the second small: the maximum and the log of the sum, where
 * they were just recomputed. And mean, <dy, y>.
 */
typedef struct known_softmax {
    float *maximum, *rest, *mean;
} known_softmax;

/* The same with these known: scores become weights p, and `slopes`, dp, become ds = p (dp - mean). */
static void softmax_known(const attention_tile *t, int64_t at, float *scores, float *slopes, const known_softmax *s) {
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
    if (t->windowed) mask_window(t, column, at, vf_zero());
    if (t->windowed && slopes) mask_window(t, slope, at, vf_zero());
    zero_masked(t, column, at, some);
    if (slopes) zero_masked(t, slope, at, some);
}

/* Rescales earlier sums to the new maximum. Rows whose maximum has not changed are skipped. */
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

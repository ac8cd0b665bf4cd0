/* SPDX-License-Identifier: MIT */
/*
 * attention's forward, an online softmax: a task is a chunk of a unit's rows. Going through the keys it keeps, for each
 * row, the maximum score so far, the sum of exp(score - maximum), and the weighted sum of values, rescaled whenever the
 * maximum grows. A row's result does not depend on its chunk.
 */
#ifndef VJP_CPU_ATTENTION_FORWARD_H
#define VJP_CPU_ATTENTION_FORWARD_H

#include "cpu/attention/attention_units.h"

/* Limit on the rows of a chunk: what is packed and summed for them is 0.5 MiB at a dim of 64. */
enum { CHUNK_TILES = 8 };

/*
 * Sums over the keys have two levels, so that errors do not grow with the number of tiles: every FOLD_KEYS keys, sums
 * are added to totals and restarted. With one level, 262144 equal keys gave an error of 1.6e-5.
 */
enum { FOLD_KEYS = 32 * KEYS };

/* Destinations: the call's y and lse, or the workspace of a backward without them. */
typedef struct forward_call {
    int q, k, v; /* slots */
    void *y;
    vjp_dtype y_dtype;
    bool accumulate;
    float *lse;
    float *rest; /* NULL: lse is complete; else lse is the maximum alone and this the log of the sum */
} forward_call;

typedef struct forward_memory {
    float *scores, *keys;
    right_operand values;
    float *queries, *sums; /* per tile of the chunk, QUERIES_PADDED x dim and QUERIES x padded dim */
    float *totals;         /* of earlier folds, as sums; NULL where all keys are in one */
    float reach, unscale;  /* a power of two for large values (pack_values()); what values are divided by: 1 or reach */
    softmax_state state;   /* of all rows, QUERIES_PADDED per tile */
} forward_memory;

static forward_memory forward_memory_of(const unit_plan *p, arena *memory) {
    int64_t dim = p->sizes.dim, tiles = vjp_divide_up(p->chunk, QUERIES), lanes = tiles * QUERIES_PADDED;
    forward_memory m = {.scores = take(memory, score_floats(p->sizes.keys))};
    m.keys = take(memory, left_floats(p->sizes.keys, dim));
    m.values.terms = take(memory, KEYS * padded_dim(dim));
    m.queries = take(memory, lanes * dim);
    m.sums = take(memory, tiles * QUERIES * padded_dim(dim));
    if (p->sizes.keys > FOLD_KEYS) m.totals = take(memory, tiles * QUERIES * padded_dim(dim));
    m.state.maximum = take(memory, lanes);
    m.state.sum = take(memory, lanes);
    m.state.correction = take(memory, lanes);
    m.state.total = take(memory, lanes);
    return m;
}

static unit_plan plan_forward(const vjp_work *work) {
    unit_plan p = plan_units(work, vjp_attention_sizes_of(work).group);
    int64_t tiles = vjp_divide_up(p.rows, QUERIES), enough = vjp_divide_up(ENOUGH_TASKS, vjp_max(1, p.units));
    p.chunk = vjp_max(1, vjp_min(CHUNK_TILES, vjp_divide_up(tiles, enough))) * QUERIES;
    p.chunk = vjp_min(p.chunk, vjp_max(1, p.rows));
    p.tasks = p.units * vjp_divide_up(p.rows, p.chunk);
    p.workers = workers_for(work, &p);
    arena count = {0};
    forward_memory_of(&p, &count);
    p.worker_floats = count.used;
    return p;
}

/* Stores a tile's lse, and replaces the corrections by the inverse of the sums. */
static void finish_state(const unit_plan *p, const forward_call *call, int64_t unit, int64_t first, int64_t rows,
                         float unscale, const softmax_state *state) {
    int64_t time = first / p->group, head = first % p->group;
    for (int64_t i = 0; i < rows; i += LANES) {
        vf sum = vf_load(VJP_F32, state->sum, i);
        vf_store(VJP_F32, state->correction, i, p->sizes.keys ? vf_div(vf_set(unscale), sum) : vf_zero());
    }
    for (int64_t i = 0; call->lse && i < rows; i += LANES) {
        double logs[LANES];
        for (int l = 0; l < LANES; l++)
            logs[l] = (double)state->sum[i + l];
        f64_logs(logs);
        for (int64_t l = 0; l < vjp_min(LANES, rows - i); l++) {
            int64_t place = (unit * p->group + head) * p->sizes.time + time;
            float maximum = state->maximum[i + l];
            call->lse[place] = call->rest ? maximum : (float)((double)maximum + logs[l]);
            if (call->rest) call->rest[place] = (float)logs[l];
            if (++head == p->group) {
                head = 0;
                time++;
            }
        }
    }
}

/* to (+)= from */
static void fold(int64_t count, const float *from, float *to, bool add) {
    for (int64_t i = 0; i < count; i++)
        to[i] = add ? to[i] + from[i] : from[i];
}

/* Before its first key a row sums nothing, so that no tile is the first of all rows: the sums begin with zeros. */
static void clear_sums(const unit_plan *p, int64_t rows, float *sums) {
    if (sums) memset(sums, 0, (size_t)(rows * padded_dim(p->sizes.dim)) * sizeof *sums);
}

/* Adds the sums of the FOLD_KEYS keys before `key` to the totals, for all rows of a chunk. */
static void fold_sums(const unit_plan *p, int64_t rows, int64_t key, const forward_memory *m) {
    int64_t lanes = vjp_divide_up(rows, QUERIES) * QUERIES_PADDED;
    bool add = p->late || key > FOLD_KEYS;
    fold(rows * padded_dim(p->sizes.dim), m->sums, m->totals, add);
    fold(lanes, m->state.sum, m->state.total, add);
    memset(m->state.sum, 0, (size_t)lanes * sizeof *m->state.sum);
    if (p->late) clear_sums(p, rows, m->sums);
}

/*
 * One tile: computes its weights and adds the weighted values to the sums. After the last keys that it sees, stores y
 * and lse.
 */
static void forward_tile(const unit_plan *p, const forward_call *call, const attention_tile *t, const forward_memory *m,
                         int64_t unit, int64_t index) {
    int64_t dim = p->sizes.dim, lanes = index * QUERIES_PADDED;
    softmax_state state = {m->state.maximum + lanes, m->state.sum + lanes, m->state.correction + lanes,
                           m->state.total + lanes};
    float *sums = m->sums + index * QUERIES * padded_dim(dim);
    bool last = keys_seen(p, t->row + t->rows - 1) <= t->key + KEYS;
    for (int64_t strip = 0; strip < t->rows; strip += STRIP) {
        multiply_strip(t, dim, m->keys, m->queries + lanes * dim, strip, m->scores);
        for (int64_t at = strip; at < strip_end(t, strip); at += LANES)
            softmax_running(t, at, m->scores, &state);
    }
    bool begun = p->late || t->key % FOLD_KEYS > 0, folded = t->key >= FOLD_KEYS;
    if (call->y && begun) correct_sums(t, dim, state.correction, sums);
    if (folded) {
        float *totals = m->totals + index * QUERIES * padded_dim(dim);
        if (call->y) correct_sums(t, dim, state.correction, totals);
        for (int64_t i = 0; i < t->rows; i++)
            state.total[i] *= state.correction[i];
        if (last && call->y) fold(t->rows * padded_dim(dim), totals, sums, begun);
        if (last) fold(t->rows, state.total, state.sum, true);
    }
    if (last) finish_state(p, call, unit, t->row, t->rows, m->unscale, &state);
    row_target y = {query_rows(p, unit, call->y, call->y_dtype, call->accumulate), state.correction, 1};
    if (call->y) sum_over_keys(t, dim, m->scores, &m->values, sums, begun || (folded && last), last ? &y : NULL);
}

/* Without keys y is 0 and lse -Inf. */
static void forward_empty(const unit_plan *p, const forward_call *call, int64_t unit, int64_t first, int64_t rows,
                          const forward_memory *m) {
    row_source y = query_rows(p, unit, call->y, call->y_dtype, call->accumulate);
    memset(m->sums, 0, (size_t)(rows * padded_dim(p->sizes.dim)) * sizeof *m->sums);
    for (int64_t i = 0; i < rows; i += QUERIES)
        finish_state(p, call, unit, first + i, vjp_min(QUERIES, rows - i), 1, &m->state);
    if (call->y) store_rows(&y, first, rows, m->sums, NULL, 0);
}

/* The rows of a task. The last rows see the most keys, so they go first: the threads then finish together. */
typedef struct chunk_of_rows {
    int64_t unit, first, rows;
} chunk_of_rows;

static chunk_of_rows chunk_of(const unit_plan *p, int64_t task) {
    int64_t chunks = p->tasks / p->units, first = (chunks - 1 - task / p->units) * p->chunk;
    return (chunk_of_rows){task % p->units, first, vjp_min(p->chunk, p->rows - first)};
}

static void scale(int64_t count, float factor, float *x) {
    for (int64_t i = 0; i < count; i++)
        x[i] *= factor;
}

/*
 * A tile of values. Weights are at most 1, but a sum of many large values can overflow before it is divided by the sum
 * of weights. Where a value is too large for that, the chunk's sums, and its values from here on, are scaled by a power
 * of two not less than four times the number of keys; else no bit changes.
 */
static void pack_values(const row_source *v, int64_t key, int64_t keys, int64_t rows, forward_memory *m) {
    int64_t padded = padded_dim(v->dim);
    m->values.finite = true;
    m->values.reach = m->reach;
    pack_right(v, key, keys, KEYS, 0, &m->values);
    if (m->values.finite && m->unscale == 1) return;
    if (!m->values.finite) {
        m->values.finite = true;
        m->values.reach = FINITE_REACH;
        pack_right(v, key, keys, KEYS, 0, &m->values);
    }
    if (m->unscale == 1) {
        m->unscale = m->reach;
        if (key % FOLD_KEYS > 0) scale(rows * padded, 1 / m->reach, m->sums);
        if (key >= FOLD_KEYS) scale(rows * padded, 1 / m->reach, m->totals);
    }
    for (int64_t d = 0; d < padded; d += GEMM_COLUMNS)
        scale(keys * GEMM_COLUMNS, 1 / m->reach, m->values.terms + d * KEYS);
}

/* Queues the prefetch of what follows a chunk's last tiles: the next task's rows and first keys. */
static void queue_forward(worker *self) {
    const unit_plan *p = self->all->plan;
    const forward_call *call = self->all->call;
    if (next_task(self) >= p->tasks) return;
    chunk_of_rows next = chunk_of(p, next_task(self));
    row_source q = query_slot(self->all->work, p, next.unit, call->q);
    queue_rows(&self->prefetch, &q, next.first, next.rows);
    queue_keys(self, next.unit, first_tile(p, next.unit, next.first), call->k, call->v);
}

static void forward_task(worker *self, int64_t task) {
    const vjp_work *work = self->all->work;
    const unit_plan *p = self->all->plan;
    const forward_call *call = self->all->call;
    arena memory = {.base = self->memory};
    forward_memory m = forward_memory_of(p, &memory);
    m.unscale = 1;
    m.reach = 4;
    for (int64_t n = 1; n < p->sizes.keys; n *= 2)
        m.reach *= 2;
    chunk_of_rows c = chunk_of(p, task);
    int64_t tiles = vjp_divide_up(c.rows, QUERIES);
    row_source q = query_slot(work, p, c.unit, call->q), k = key_slot(work, p, c.unit, call->k);
    row_source v = key_slot(work, p, c.unit, call->v);
    for (int64_t i = 0; i < tiles; i++)
        pack_transposed(&q, c.first + i * QUERIES, vjp_min(QUERIES, c.rows - i * QUERIES),
                        m.queries + i * QUERIES_PADDED * p->sizes.dim);
    for (int64_t i = 0; i < tiles * QUERIES_PADDED; i++) {
        m.state.maximum[i] = -INFINITY;
        m.state.sum[i] = m.state.total[i] = 0;
    }
    if (p->late) clear_sums(p, c.rows, m.sums);
    if (p->late) clear_sums(p, c.rows, m.totals);
    if (p->sizes.keys == 0) forward_empty(p, call, c.unit, c.first, c.rows, &m);
    int64_t begin = first_tile(p, c.unit, c.first), seen = keys_seen(p, c.first + c.rows - 1);
    int64_t left = vjp_divide_up(seen - begin, KEYS) * tiles;
    row_source y = query_rows(p, c.unit, call->y, call->y_dtype, call->accumulate);
    queue_rows(&self->prefetch, &y, c.first, c.rows);
    if (left < PREFETCH_TILES) queue_forward(self);
    for (int64_t key = begin; key < seen; key += KEYS) {
        int64_t keys = vjp_min(KEYS, p->sizes.keys - key);
        pack_left(&k, key, keys, (float)p->sizes.scale, m.keys);
        if (key > begin && key % FOLD_KEYS == 0) fold_sums(p, c.rows, key, &m);
        if (call->y) pack_values(&v, key, keys, c.rows, &m);
        if (key + KEYS < seen) queue_keys(self, c.unit, key + KEYS, call->k, call->v);
        for (int64_t i = 0; i < tiles; i++) {
            attention_tile t;
            if (left-- == PREFETCH_TILES) queue_forward(self);
            if (set_tile(&t, p, c.unit, key, c.first + i * QUERIES, vjp_min(QUERIES, c.rows - i * QUERIES),
                         &self->prefetch))
                forward_tile(p, call, &t, &m, c.unit, i);
        }
    }
}

static void run_forward(const vjp_work *work, const unit_plan *p, const forward_call *call, float *memory) {
    if (p->tasks == 0 || (!call->y && !call->lse)) return;
    workers w = {.work = work, .plan = p, .run = forward_task, .memory = memory, .call = call};
    run_workers(&w);
}

#endif

/*
 * attention's forward: a task is a chunk of a unit's rows; it walks along the keys and keeps for each row the maximum
 * of the scores so far, the sum of exp of them, and the sum of weighted values, corrected whenever the maximum grows. A
 * row's result does not depend on the chunk it is in.
 */
#ifndef VJP_CPU_ATTENTION_FORWARD_H
#define VJP_CPU_ATTENTION_FORWARD_H

#include "cpu/attention/attention_units.h"

/* Rows of the forward's chunks at most: what is packed and summed for them is 0.5 MiB at a dim of 64. */
enum { CHUNK_TILES = 8 };

/* Where the results go: the call's y and lse, or the workspace of a backward that has none. */
typedef struct forward_call {
    int q, k, v; /* slots */
    void *y;
    vjp_dtype y_dtype;
    bool accumulate;
    float *lse;
    float *rest; /* NULL: lse is the whole of it; else lse is the maximum alone and this the log of the sum */
} forward_call;

typedef struct forward_memory {
    float *scores, *keys;
    right_operand values;
    float *queries, *sums; /* of each tile of the chunk, QUERIES_PADDED x dim and QUERIES x padded dim */
    softmax_state state;   /* of all rows, QUERIES_PADDED a tile */
} forward_memory;

static forward_memory forward_memory_of(const unit_plan *p, arena *memory) {
    int64_t dim = p->sizes.dim, tiles = divide_up(p->chunk, QUERIES), lanes = tiles * QUERIES_PADDED;
    forward_memory m = {.scores = take(memory, score_floats(p->sizes.keys))};
    m.keys = take(memory, left_floats(p->sizes.keys, dim));
    m.values.terms = take(memory, KEYS * padded_dim(dim));
    m.queries = take(memory, lanes * dim);
    m.sums = take(memory, tiles * QUERIES * padded_dim(dim));
    m.state.maximum = take(memory, lanes);
    m.state.sum = take(memory, lanes);
    m.state.correction = take(memory, lanes);
    return m;
}

static unit_plan plan_forward(const vjp_work *work) {
    unit_plan p = plan_units(work, vjp_attention_sizes_of(work).group);
    int64_t tiles = divide_up(p.rows, QUERIES), enough = divide_up(ENOUGH_TASKS, most(1, p.units));
    p.chunk = most(1, least(CHUNK_TILES, divide_up(tiles, enough))) * QUERIES;
    p.chunk = least(p.chunk, most(1, p.rows));
    p.tasks = p.units * divide_up(p.rows, p.chunk);
    p.workers = workers_for(work, &p);
    arena count = {0};
    forward_memory_of(&p, &count);
    p.worker_floats = count.used;
    return p;
}

/* A tile's lse; and the inverse of its sums, in the place of the corrections. */
static void finish_state(const unit_plan *p, const forward_call *call, int64_t unit, int64_t first, int64_t rows,
                         const softmax_state *state) {
    int64_t time = first / p->group, head = first % p->group;
    for (int64_t i = 0; i < rows; i += LANES) {
        vf sum = vf_load(VJP_F32, state->sum, i);
        vf_store(VJP_F32, state->correction, i, p->sizes.keys ? vf_div(vf_set(1), sum) : vf_zero());
    }
    for (int64_t i = 0; call->lse && i < rows; i += LANES) {
        double logs[LANES];
        for (int l = 0; l < LANES; l++)
            logs[l] = (double)state->sum[i + l];
        f64_logs(logs);
        for (int64_t l = 0; l < least(LANES, rows - i); l++) {
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

/* One tile: its weights, and their values added to the sums. Behind the last keys that it sees, y and lse. */
static void forward_tile(const unit_plan *p, const forward_call *call, const attention_tile *t, const forward_memory *m,
                         int64_t unit, int64_t index) {
    int64_t dim = p->sizes.dim, lanes = index * QUERIES_PADDED;
    softmax_state state = {m->state.maximum + lanes, m->state.sum + lanes, m->state.correction + lanes};
    float *sums = m->sums + index * QUERIES * padded_dim(dim);
    bool last = keys_seen(p, t->row + t->rows - 1) <= t->key + KEYS;
    for (int64_t strip = 0; strip < t->rows; strip += STRIP) {
        multiply_strip(t, dim, m->keys, m->queries + lanes * dim, strip, m->scores);
        for (int64_t at = strip; at < strip_end(t, strip); at += LANES)
            weigh_running(t, at, m->scores, &state);
    }
    if (call->y && t->key > 0) correct_sums(t, dim, state.correction, sums);
    if (last) finish_state(p, call, unit, t->row, t->rows, &state);
    row_target y = {query_rows(p, unit, call->y, call->y_dtype, call->accumulate), state.correction, 1};
    if (call->y) sum_over_keys(t, dim, m->scores, &m->values, sums, t->key > 0, last ? &y : NULL);
}

/* Without keys y is 0 and lse -Inf. */
static void forward_nothing(const unit_plan *p, const forward_call *call, int64_t unit, int64_t first, int64_t rows,
                            const forward_memory *m) {
    row_source y = query_rows(p, unit, call->y, call->y_dtype, call->accumulate);
    memset(m->sums, 0, (size_t)(rows * padded_dim(p->sizes.dim)) * sizeof *m->sums);
    for (int64_t i = 0; i < rows; i += QUERIES)
        finish_state(p, call, unit, first + i, least(QUERIES, rows - i), &m->state);
    if (call->y) put_rows(&y, first, rows, m->sums, NULL, 0);
}

/* The chunk of rows that is a task. The last ones see the most keys: they go first, so that the threads finish
 * together. */
typedef struct chunk_of_rows {
    int64_t unit, first, rows;
} chunk_of_rows;

static chunk_of_rows chunk_of(const unit_plan *p, int64_t task) {
    int64_t chunks = p->tasks / p->units, first = (chunks - 1 - task / p->units) * p->chunk;
    return (chunk_of_rows){task % p->units, first, least(p->chunk, p->rows - first)};
}

/* What comes when a chunk's last tiles are done: the next task's rows and first keys. */
static void ask_forward(worker *one) {
    const unit_plan *p = one->all->plan;
    const forward_call *call = one->all->own;
    if (next_task(one) >= p->tasks) return;
    chunk_of_rows next = chunk_of(p, next_task(one));
    row_source q = query_slot(one->all->work, p, next.unit, call->q);
    ask_ahead(&one->ahead, &q, next.first, next.rows);
    ask_keys(one, next.unit, 0, call->k, call->v);
}

static void forward_task(worker *one, int64_t task) {
    const vjp_work *work = one->all->work;
    const unit_plan *p = one->all->plan;
    const forward_call *call = one->all->own;
    arena own = {.base = one->memory};
    forward_memory m = forward_memory_of(p, &own);
    chunk_of_rows c = chunk_of(p, task);
    int64_t tiles = divide_up(c.rows, QUERIES);
    row_source q = query_slot(work, p, c.unit, call->q), k = key_slot(work, p, c.unit, call->k);
    row_source v = key_slot(work, p, c.unit, call->v);
    for (int64_t i = 0; i < tiles; i++)
        pack_turned(&q, c.first + i * QUERIES, least(QUERIES, c.rows - i * QUERIES),
                    m.queries + i * QUERIES_PADDED * p->sizes.dim);
    for (int64_t i = 0; i < tiles * QUERIES_PADDED; i++) {
        m.state.maximum[i] = -INFINITY;
        m.state.sum[i] = 0;
    }
    if (p->sizes.keys == 0) forward_nothing(p, call, c.unit, c.first, c.rows, &m);
    int64_t seen = keys_seen(p, c.first + c.rows - 1), left = divide_up(seen, KEYS) * tiles;
    row_source y = query_rows(p, c.unit, call->y, call->y_dtype, call->accumulate);
    ask_ahead(&one->ahead, &y, c.first, c.rows);
    if (left < ASK_TILES) ask_forward(one);
    for (int64_t key = 0; key < seen; key += KEYS) {
        int64_t keys = least(KEYS, p->sizes.keys - key);
        pack_left(&k, key, keys, (float)p->sizes.scale, m.keys);
        m.values.finite = true;
        if (call->y) pack_right(&v, key, keys, KEYS, 0, &m.values);
        if (key + KEYS < seen) ask_keys(one, c.unit, key + KEYS, call->k, call->v);
        for (int64_t i = 0; i < tiles; i++) {
            attention_tile t;
            if (left-- == ASK_TILES) ask_forward(one);
            if (set_tile(&t, p, key, c.first + i * QUERIES, least(QUERIES, c.rows - i * QUERIES), &one->ahead))
                forward_tile(p, call, &t, &m, c.unit, i);
        }
    }
}

static void run_forward(const vjp_work *work, const unit_plan *p, const forward_call *call, float *memory) {
    if (p->tasks == 0 || (!call->y && !call->lse)) return;
    workers w = {.work = work, .plan = p, .run = forward_task, .memory = memory, .own = call};
    run_workers(&w);
}

#endif

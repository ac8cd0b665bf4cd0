/* SPDX-License-Identifier: MIT */
/*
 * attention, one tile of scores at a time (attention_tile.h): the matrix of all scores is never stored, and memory
 * grows with time, not with its square.
 *
 *     pass                   task                          how
 *     forward                a chunk of rows of a unit     online softmax along the keys (attention_forward.h)
 *     backward               a unit                        scores recomputed, weights from the saved log-sum-exp
 *     without y and lse      as above                      a forward into the workspace runs first
 *     fewer than 32 units    part of a unit's heads        a group's heads are divided; each part has its own sums of
 *                                                          dk and dv, which are added in order
 *
 * The heads of q that share a head of k and v form a unit (attention_units.h). In the backward all five products of a
 * tile run while it is in cache. Rows are packed a block at a time; dq is summed over the keys of a block, dk and dv
 * over all blocks.
 */
#include "cpu/attention/attention_forward.h"

/* ---- Forward ----------------------------------------------------------------------------------------- */

static vjp_status forward(const vjp_work *work) {
    unit_plan p = plan_forward(work);
    forward_call call = {.q = ATTENTION_Q,
                         .k = ATTENTION_K,
                         .v = ATTENTION_V,
                         .y = vjp_data(work, ATTENTION_Y),
                         .y_dtype = vjp_type(work, ATTENTION_Y),
                         .accumulate = vjp_accumulates(work, ATTENTION_Y),
                         .lse = vjp_data(work, ATTENTION_LSE)};
    run_forward(work, &p, &call, work->workspace);
    return VJP_OK;
}

/* Sizes that fit no memory; below them nothing here overflows. */
static bool is_too_large(const vjp_work *work) {
    vjp_attention_sizes s = vjp_attention_sizes_of(work);
    double rows = (double)s.batch * ((double)s.time * (double)s.heads + (double)s.keys * (double)s.kv_heads);
    return rows * (double)s.dim > 0x1p50;
}

static size_t forward_workspace(const vjp_work *work) {
    if (is_too_large(work)) return SIZE_MAX;
    unit_plan p = plan_forward(work);
    return (size_t)(p.workers * p.worker_floats) * sizeof(float);
}

/* ---- Backward ---------------------------------------------------------------------------------------- */

/*
 * Limit on the rows of a block of the backward: q and dy, each packed in two layouts, and dq are 1.3 MiB at a dim of 64
 * and stay in cache. A short unit has two blocks, so that rows of the second are prefetched during the products of the
 * first.
 */
enum { BLOCK_TILES = 8, BLOCKS = 2, MIN_BLOCK_TILES = 2 };

typedef struct backward_call {
    row_source y;            /* data and dtype only: see query_rows() */
    const float *lse, *rest; /* as in known_softmax; rest NULL: 0 */
    float *sums;             /* dk and dv per unit, or per worker */
} backward_call;

typedef struct backward_memory {
    float *scores, *slopes;
    float *keys, *values;
    right_operand keys_right;
    /* Per tile of a block of rows; right operands have QUERIES rows of padded dim, transposed ones QUERIES_PADDED. */
    float *queries, *dy, *dq;
    right_operand queries_right[BLOCK_TILES], dy_right[BLOCK_TILES];
    known_softmax state; /* of all rows, QUERIES_PADDED per tile */
    float *transposed;   /* y of one strip */
} backward_memory;

static backward_memory backward_memory_of(const unit_plan *p, arena *memory) {
    int64_t dim = p->sizes.dim, padded = padded_dim(dim), tiles = vjp_divide_up(p->block, QUERIES);
    int64_t lanes = tiles * QUERIES_PADDED;
    backward_memory m = {.scores = take(memory, score_floats(p->sizes.keys))};
    m.slopes = take(memory, score_floats(p->sizes.keys));
    m.keys = take(memory, left_floats(p->sizes.keys, dim));
    m.values = take(memory, left_floats(p->sizes.keys, dim));
    m.keys_right.terms = take(memory, KEYS * padded);
    m.queries = take(memory, lanes * dim);
    m.dy = take(memory, lanes * dim);
    for (int64_t i = 0; i < tiles; i++) {
        m.queries_right[i].terms = take(memory, QUERIES * padded);
        m.dy_right[i].terms = take(memory, QUERIES * padded);
    }
    m.dq = take(memory, tiles * QUERIES * padded);
    m.state.maximum = take(memory, lanes);
    m.state.rest = take(memory, lanes);
    m.state.mean = take(memory, lanes);
    m.transposed = take(memory, STRIP * dim);
    return m;
}

/* Sums of dk, then of dv. */
static int64_t unit_sums(const unit_plan *p) {
    return whole_vectors(2 * p->sizes.keys * padded_dim(p->sizes.dim));
}

/* As many heads per unit as leave enough units: with more heads, keys are packed and sums added less often. */
static unit_plan plan_backward(const vjp_work *work) {
    vjp_attention_sizes s = vjp_attention_sizes_of(work);
    int64_t group = s.group;
    while (group > 1 && (s.group % group || s.batch * s.kv_heads * (s.group / group) < ENOUGH_TASKS))
        group--;
    unit_plan p = plan_units(work, group);
    p.block = vjp_max(MIN_BLOCK_TILES, vjp_min(BLOCK_TILES, vjp_divide_up(p.rows, BLOCKS * QUERIES))) * QUERIES;
    p.block = vjp_min(p.block, p.rows);
    p.tasks = p.units;
    p.workers = workers_for(work, &p);
    arena count = {0};
    backward_memory_of(&p, &count);
    p.worker_floats = count.used;
    return p;
}

/* mean = <dy, y> of a strip, from both transposed, in the order of terms in which dp is summed. */
static void mean_of_strip(int64_t dim, const float *y, const float *dy, float *mean) {
    for (int64_t c = 0; c < STRIP; c += GEMM_COLUMNS, y += GEMM_COLUMNS * dim, dy += GEMM_COLUMNS * dim) {
        float total[GEMM_COLUMNS] = {0};
        for (int64_t d = 0; d < dim; d += GEMM_DEPTH) {
            float sum[GEMM_COLUMNS] = {0};
            for (int64_t k = d; k < vjp_min(dim, d + GEMM_DEPTH); k++)
                for (int i = 0; i < GEMM_COLUMNS; i++)
                    sum[i] = f32_fma(y[k * GEMM_COLUMNS + i], dy[k * GEMM_COLUMNS + i], sum[i]);
            for (int i = 0; i < GEMM_COLUMNS; i++)
                total[i] += sum[i];
        }
        memcpy(mean + c, total, sizeof total);
    }
}

/* Packs a tile of rows: q and dy in both layouts, lse, and mean. One strip at a time, to read memory once. */
static void pack_rows(const workers *w, int64_t unit, int64_t first, int64_t count, int64_t index, backward_memory *m) {
    const unit_plan *p = w->plan;
    const backward_call *call = w->call;
    int64_t dim = p->sizes.dim, lanes = index * QUERIES_PADDED;
    row_source q = query_slot(w->work, p, unit, ATTENTION_B_Q), dy = query_slot(w->work, p, unit, ATTENTION_B_DY);
    row_source y = query_rows(p, unit, call->y.data, call->y.dtype, false);
    right_operand *q_right = &m->queries_right[index], *dy_right = &m->dy_right[index];
    q_right->finite = dy_right->finite = true;
    q_right->reach = dy_right->reach = FINITE_REACH;
    for (int64_t at = 0; at < count; at += STRIP) {
        int64_t rows = vjp_min(STRIP, count - at);
        pack_transposed(&q, first + at, rows, m->queries + (lanes + at) * dim);
        pack_right(&q, first + at, rows, QUERIES, at, q_right);
        pack_transposed(&dy, first + at, rows, m->dy + (lanes + at) * dim);
        pack_right(&dy, first + at, rows, QUERIES, at, dy_right);
        pack_transposed(&y, first + at, rows, m->transposed);
        mean_of_strip(dim, m->transposed, m->dy + (lanes + at) * dim, m->state.mean + lanes + at);
    }
    int64_t time = first / p->group, head = first % p->group, place = 0;
    for (int64_t i = 0; i < vjp_round_up(count, STRIP); i++) {
        if (i < count) place = (unit * p->group + head) * p->sizes.time + time;
        m->state.maximum[lanes + i] = call->lse[place];
        m->state.rest[lanes + i] = call->rest ? call->rest[place] : 0;
        if (++head == p->group) {
            head = 0;
            time++;
        }
    }
}

/* The sums of dk and dv of a unit, and how many keys have any. */
typedef struct key_sums {
    float *dk, *dv;
    int64_t dk_begun, dv_begun;
} key_sums;

/*
 * One tile: weights and their gradients, and their contributions to dq, dk and dv. Finished sums are stored at once: dq
 * after the last keys that the rows see, dk and dv after the last rows (with a window or `first` when the unit ends:
 * the last rows do not see all keys).
 */
static void backward_tile(const workers *w, int64_t unit, const attention_tile *t, const backward_memory *m,
                          int64_t index, key_sums *sums) {
    const unit_plan *p = w->plan;
    int64_t dim = p->sizes.dim, lanes = index * QUERIES_PADDED, padded = padded_dim(dim);
    row_target dq = {query_slot(w->work, p, unit, ATTENTION_B_DQ), NULL, (float)p->sizes.scale};
    row_target dk = {key_slot(w->work, p, unit, ATTENTION_B_DK), NULL, (float)p->sizes.scale};
    row_target dv = {key_slot(w->work, p, unit, ATTENTION_B_DV), NULL, 1};
    bool slopes = dq.to.data || dk.to.data;
    bool last_rows = p->parts == 1 && !p->late && t->row + t->rows == p->rows;
    bool last_keys = keys_seen(p, t->row + t->rows - 1) <= t->key + KEYS;
    known_softmax state = {m->state.maximum + lanes, m->state.rest + lanes, m->state.mean + lanes};
    for (int64_t strip = 0; strip < t->rows; strip += STRIP) {
        multiply_strip(t, dim, m->keys, m->queries + lanes * dim, strip, m->scores);
        if (slopes) multiply_strip(t, dim, m->values, m->dy + lanes * dim, strip, m->slopes);
        for (int64_t at = strip; at < strip_end(t, strip); at += LANES)
            softmax_known(t, at, m->scores, slopes ? m->slopes : NULL, &state);
    }
    if (dv.to.data)
        sum_over_queries(t, dim, m->scores, &m->dy_right[index], sums->dv + t->key * padded, &sums->dv_begun,
                         last_rows ? &dv : NULL);
    if (dk.to.data)
        sum_over_queries(t, dim, m->slopes, &m->queries_right[index], sums->dk + t->key * padded, &sums->dk_begun,
                         last_rows ? &dk : NULL);
    if (dq.to.data)
        sum_over_keys(t, dim, m->slopes, &m->keys_right, m->dq + index * QUERIES * padded, p->late || t->key > 0,
                      last_keys ? &dq : NULL);
}

/*
 * Queues the prefetch of what follows a block's last tiles: destinations of dq and the rows of the next block; after
 * the last block, destinations of dk and dv and the next task's rows and first keys.
 */
static void queue_backward(worker *self, int64_t unit, int64_t first, int64_t rows) {
    const vjp_work *work = self->all->work;
    const unit_plan *p = self->all->plan;
    const backward_call *call = self->all->call;
    prefetch_queue *prefetch = &self->prefetch;
    row_source dq = query_slot(work, p, unit, ATTENTION_B_DQ);
    queue_rows(prefetch, &dq, first, rows);
    bool last = first + rows == p->rows;
    if (last) {
        row_source dk = key_slot(work, p, unit, ATTENTION_B_DK), dv = key_slot(work, p, unit, ATTENTION_B_DV);
        if (p->parts == 1) queue_rows(prefetch, &dk, 0, p->sizes.keys);
        if (p->parts == 1) queue_rows(prefetch, &dv, 0, p->sizes.keys);
        unit = next_task(self);
        if (unit >= p->tasks) return;
    }
    first = last ? 0 : first + rows;
    rows = vjp_min(p->block, p->rows - first);
    row_source q = query_slot(work, p, unit, ATTENTION_B_Q), dy = query_slot(work, p, unit, ATTENTION_B_DY);
    row_source y = query_rows(p, unit, call->y.data, call->y.dtype, false);
    queue_rows(prefetch, &q, first, rows);
    queue_rows(prefetch, &dy, first, rows);
    queue_rows(prefetch, &y, first, rows);
    queue_keys(self, unit, first_tile(p, unit, first), ATTENTION_B_K, ATTENTION_B_V);
}

/* A block of rows with all keys that they see. */
static void backward_block(worker *self, int64_t unit, int64_t first, int64_t rows, backward_memory *m,
                           key_sums *sums) {
    const workers *w = self->all;
    const unit_plan *p = w->plan;
    int64_t tiles = vjp_divide_up(rows, QUERIES);
    row_source k = key_slot(w->work, p, unit, ATTENTION_B_K), v = key_slot(w->work, p, unit, ATTENTION_B_V);
    for (int64_t i = 0; i < tiles; i++)
        pack_rows(w, unit, first + i * QUERIES, vjp_min(QUERIES, rows - i * QUERIES), i, m);
    int64_t begin = first_tile(p, unit, first), seen = keys_seen(p, first + rows - 1);
    int64_t left = vjp_divide_up(seen - begin, KEYS) * tiles;
    if (p->late) memset(m->dq, 0, (size_t)(tiles * QUERIES * padded_dim(p->sizes.dim)) * sizeof *m->dq);
    if (left < PREFETCH_TILES) queue_backward(self, unit, first, rows);
    for (int64_t key = begin; key < seen; key += KEYS) {
        int64_t keys = vjp_min(KEYS, p->sizes.keys - key);
        m->keys_right.finite = true;
        m->keys_right.reach = FINITE_REACH;
        for (int64_t at = 0; at < keys; at += STRIP) {
            pack_left(&k, key + at, vjp_min(STRIP, keys - at), (float)p->sizes.scale, m->keys + at * GEMM_ROW_STRIDE);
            pack_right(&k, key + at, vjp_min(STRIP, keys - at), KEYS, at, &m->keys_right);
        }
        pack_left(&v, key, keys, 1, m->values);
        if (key + KEYS < seen) queue_keys(self, unit, key + KEYS, ATTENTION_B_K, ATTENTION_B_V);
        for (int64_t i = 0; i < tiles; i++) {
            attention_tile t;
            if (left-- == PREFETCH_TILES) queue_backward(self, unit, first, rows);
            if (set_tile(&t, p, unit, key, first + i * QUERIES, vjp_min(QUERIES, rows - i * QUERIES), &self->prefetch))
                backward_tile(w, unit, &t, m, i, sums);
        }
    }
}

/* Stores rows of dk and dv. */
static void store_keys(const vjp_work *work, const unit_plan *p, int64_t unit, int64_t key, int64_t count,
                       const float *dk_rows, const float *dv_rows) {
    row_source dk = key_slot(work, p, unit, ATTENTION_B_DK), dv = key_slot(work, p, unit, ATTENTION_B_DV);
    if (dk.data) store_rows(&dk, key, count, dk_rows, NULL, (float)p->sizes.scale);
    if (dv.data) store_rows(&dv, key, count, dv_rows, NULL, 1);
}

/* Without rows dk and dv are 0; without keys dq is. */
static void backward_empty(const workers *w, int64_t unit, const key_sums *sums, const backward_memory *m) {
    const unit_plan *p = w->plan;
    row_source dq = query_slot(w->work, p, unit, ATTENTION_B_DQ);
    memset(sums->dk, 0, (size_t)unit_sums(p) * sizeof *sums->dk);
    if (p->parts == 1) store_keys(w->work, p, unit, 0, p->sizes.keys, sums->dk, sums->dv);
    memset(m->dq, 0, (size_t)(p->block * padded_dim(p->sizes.dim)) * sizeof *m->dq);
    for (int64_t first = 0; dq.data && first < p->rows; first += p->block)
        store_rows(&dq, first, vjp_min(p->block, p->rows - first), m->dq, NULL, 1);
}

static void backward_task(worker *self, int64_t unit) {
    const workers *w = self->all;
    const unit_plan *p = w->plan;
    const backward_call *call = w->call;
    arena memory = {.base = self->memory};
    backward_memory m = backward_memory_of(p, &memory);
    key_sums sums = {.dk = call->sums + (p->parts > 1 ? unit : self->index) * unit_sums(p)};
    sums.dv = sums.dk + p->sizes.keys * padded_dim(p->sizes.dim);
    if (p->rows == 0 || p->sizes.keys == 0) {
        backward_empty(w, unit, &sums, &m);
        return;
    }
    /* Keys that no row sees get no sums: those of all keys begin with zeros. */
    if (p->late) {
        memset(sums.dk, 0, (size_t)unit_sums(p) * sizeof *sums.dk);
        sums.dk_begun = sums.dv_begun = p->sizes.keys;
    }
    for (int64_t first = 0; first < p->rows; first += p->block)
        backward_block(self, unit, first, vjp_min(p->block, p->rows - first), &m, &sums);
    if (p->late && p->parts == 1) store_keys(w->work, p, unit, 0, p->sizes.keys, sums.dk, sums.dv);
}

/* ---- dk and dv of units that share a head ------------------------------------------------------------  */

typedef struct addition {
    const vjp_work *work;
    const unit_plan *plan;
    float *sums;
    cpu_split split; /* of the keys of all heads */
} addition;

/* Adds the sums of the other parts to the first's, in order. */
static void add_splits_task(void *argument, size_t task) {
    const addition *a = argument;
    const unit_plan *p = a->plan;
    int64_t keys = p->sizes.keys, padded = padded_dim(p->sizes.dim), step = unit_sums(p);
    for (int64_t i = cpu_split_begin(&a->split, task); i < cpu_split_end(&a->split, task); i++) {
        int64_t unit = i / keys * p->parts, key = i % keys;
        float *dk = a->sums + unit * step + key * padded, *dv = dk + keys * padded;
        for (int64_t part = 1; part < p->parts; part++)
            for (int64_t d = 0; d < p->sizes.dim; d++) {
                dk[d] += dk[part * step + d];
                dv[d] += dv[part * step + d];
            }
        store_keys(a->work, p, unit, key, 1, dk, dv);
    }
}

static void add_splits(const vjp_work *work, const unit_plan *p, float *sums) {
    int64_t heads = p->units / p->parts;
    addition a = {.work = work, .plan = p, .sums = sums};
    a.split =
        vjp_cpu_split_items(heads * p->sizes.keys, 2 * p->parts * p->sizes.dim * (int64_t)sizeof(float), CPU_MAX_TASKS);
    vjp_cpu_for(work, a.split.count, add_splits_task, &a);
}

/* ---- Workspace and call ------------------------------------------------------------------------------  */

static bool is_saved(const vjp_work *work) {
    return work->tensor[ATTENTION_B_Y] && work->tensor[ATTENTION_B_LSE];
}

/* The workspace: dk and dv, recomputed y and lse, the workers' memory. */
static int64_t sums_floats(const unit_plan *p) {
    return (p->parts > 1 ? p->units : p->workers) * unit_sums(p);
}

static int64_t y_floats(const unit_plan *p) {
    return whole_vectors(p->sizes.batch * p->sizes.time * p->sizes.heads * p->sizes.dim);
}

static int64_t lse_floats(const unit_plan *p) {
    return whole_vectors(p->sizes.batch * p->sizes.time * p->sizes.heads);
}

static size_t backward_workspace(const vjp_work *work) {
    if (is_too_large(work)) return SIZE_MAX;
    unit_plan p = plan_backward(work), forward_plan = plan_forward(work);
    int64_t floats = sums_floats(&p), worker_floats = p.workers * p.worker_floats;
    if (!is_saved(work)) {
        floats += y_floats(&p) + 2 * lse_floats(&p);
        worker_floats = vjp_max(worker_floats, forward_plan.workers * forward_plan.worker_floats);
    }
    return (size_t)(floats + worker_floats) * sizeof(float);
}

static vjp_status backward(const vjp_work *work) {
    bool dk = work->tensor[ATTENTION_B_DK], dv = work->tensor[ATTENTION_B_DV];
    if (!work->tensor[ATTENTION_B_DQ] && !dk && !dv) return VJP_OK;
    unit_plan p = plan_backward(work);
    if (p.tasks == 0) return VJP_OK;
    arena memory = {.base = work->workspace};
    backward_call call = {.sums = take(&memory, sums_floats(&p))};
    call.y = (row_source){.data = vjp_data(work, ATTENTION_B_Y), .dtype = vjp_type(work, ATTENTION_B_Y)};
    call.lse = vjp_data(work, ATTENTION_B_LSE);
    if (!is_saved(work)) {
        float *y = take(&memory, y_floats(&p)), *lse = take(&memory, lse_floats(&p)), *rest;
        rest = take(&memory, lse_floats(&p));
        unit_plan forward_plan = plan_forward(work);
        forward_call recompute = {
            .q = ATTENTION_B_Q, .k = ATTENTION_B_K, .v = ATTENTION_B_V, .y = y, .lse = lse, .rest = rest};
        recompute.y_dtype = VJP_F32;
        run_forward(work, &forward_plan, &recompute, memory.base + memory.used);
        call.y = (row_source){.data = y, .dtype = VJP_F32};
        call.lse = lse;
        call.rest = rest;
    }
    workers w = {.work = work, .plan = &p, .run = backward_task, .memory = memory.base + memory.used, .call = &call};
    run_workers(&w);
    if (p.parts > 1 && (dk || dv)) add_splits(work, &p, call.sums);
    return VJP_OK;
}

extern const vjp_kernel CPU_NAME(attention)[VJP_PASS_COUNT];

const vjp_kernel CPU_NAME(attention)[VJP_PASS_COUNT] = {
    {forward, forward_workspace, VJP_STORAGE_16_32 | VJP_TAKES_ROWS},
    {backward, backward_workspace, VJP_STORAGE_16_32 | VJP_TAKES_ROWS},
};

/*
 * attention, tile by tile (attention_tile.h): no matrix of all scores is ever stored, and memory grows with time, not
 * with its square.
 *
 * The heads of q that share a head of k and v are rows of one problem, a unit, ordered by time: row r is time r /
 * group.
 *
 * Forward: a task is a chunk of a unit's rows; it walks along the keys and keeps for each row the maximum of the
 * scores so far, the sum of exp of them, and the sum of weighted values, corrected whenever the maximum grows. A row's
 * result does not depend on the chunk it is in.
 *
 * Backward: a task is a unit; scores are made once more, weights come from the saved log-sum-exp, and all five products
 * of a tile are made while it is in cache. Rows are packed a block at a time, dq summed over the keys of a block, dk
 * and dv over all blocks. Where there are few units, the heads of a group are dealt out to several; each has sums of dk
 * and dv of its own, which are added in order. Without y and lse a forward into the workspace goes before.
 */
#include <math.h>
#include <stdatomic.h>

#include "cpu/attention_tile.h"
#include "op/op.h"

/* Rows of the forward's chunks at most: what is packed and summed for them is 0.5 MiB at a dim of 64. */
enum { CHUNK_TILES = 4 };

/* Rows of a block of the backward: q and dy packed in two ways and dq are 1.1 MiB at a dim of 64, and stay in cache. */
enum { BLOCK_TILES = 4, BLOCK_ROWS = BLOCK_TILES * QUERIES };

/* So many tasks keep the threads busy to the end; a worker is woken for so many multiply-adds. */
enum { ENOUGH_TASKS = 32, WORKER_MACS = 1 << 18 };

typedef struct unit_plan {
    vjp_attention_sizes sizes;
    int64_t group; /* heads of q in a unit */
    int64_t parts; /* units that share a head of k and v */
    int64_t units;
    int64_t rows;  /* of a unit */
    int64_t chunk; /* forward: rows of a task */
    int64_t tasks, workers;
    int64_t worker_floats;
} unit_plan;

static int64_t rounded(int64_t floats) {
    return divide_up(floats, LANES) * LANES;
}

static unit_plan plan_units(const vjp_work *work, int64_t group) {
    unit_plan p = {.sizes = vjp_attention_sizes_of(work), .group = group};
    const vjp_attention_sizes *s = &p.sizes;
    p.parts = group ? s->group / group : 0;
    p.units = s->batch * s->kv_heads * p.parts;
    p.rows = s->time * group;
    return p;
}

static int64_t workers_for(const vjp_work *work, const unit_plan *p) {
    double macs = (double)p->units * (double)p->rows * (double)p->sizes.keys * (double)p->sizes.dim;
    int64_t worth = macs > (double)WORKER_MACS * 1024 ? 1024 : 1 + (int64_t)(macs / WORKER_MACS);
    return most(1, least(cpu_state_of(work)->threads, least(p->tasks, worth)));
}

/* ---- Rows and tiles of a unit ------------------------------------------------------------------------ */

/* Rows of q, y or one of their gradients; `data` of a slot or of the workspace. */
static row_source query_rows(const unit_plan *p, int64_t unit, void *data, vjp_dtype dtype, bool accumulate) {
    const vjp_attention_sizes *s = &p->sizes;
    int64_t batch = unit / (s->kv_heads * p->parts), head = unit % (s->kv_heads * p->parts) * p->group;
    return (row_source){.data = data,
                        .dtype = dtype,
                        .first = (batch * s->time * s->heads + head) * s->dim,
                        .time_step = s->heads * s->dim,
                        .head_step = s->dim,
                        .group = p->group,
                        .dim = s->dim,
                        .accumulate = accumulate};
}

static row_source query_slot(const vjp_work *work, const unit_plan *p, int64_t unit, int slot) {
    return query_rows(p, unit, vjp_data(work, slot), vjp_type(work, slot), vjp_accumulates(work, slot));
}

static row_source key_slot(const vjp_work *work, const unit_plan *p, int64_t unit, int slot) {
    const vjp_attention_sizes *s = &p->sizes;
    int64_t head = unit / p->parts % s->kv_heads, batch = unit / p->parts / s->kv_heads;
    return (row_source){.data = vjp_data(work, slot),
                        .dtype = vjp_type(work, slot),
                        .first = (batch * s->keys * s->kv_heads + head) * s->dim,
                        .time_step = s->kv_heads * s->dim,
                        .group = 1,
                        .dim = s->dim,
                        .accumulate = vjp_accumulates(work, slot)};
}

/* Where row r's number is among [batch, heads, time]. */
static int64_t lse_place(const unit_plan *p, int64_t unit, int64_t row) {
    const vjp_attention_sizes *s = &p->sizes;
    return (unit * p->group + row % p->group) * s->time + row / p->group;
}

/* How many keys a row sees. */
static int64_t keys_seen(const unit_plan *p, int64_t row) {
    const vjp_attention_sizes *s = &p->sizes;
    return s->causal ? row / p->group + s->keys - s->time + 1 : s->keys;
}

/* False: no row of it sees any of these keys. */
static bool set_tile(attention_tile *t, const unit_plan *p, int64_t key, int64_t row, int64_t rows) {
    t->key = key;
    t->keys = least(KEYS, p->sizes.keys - key);
    t->row = row;
    t->rows = rows;
    if (keys_seen(p, row + rows - 1) <= key) return false;
    t->whole = keys_seen(p, row) >= key + t->keys;
    for (int64_t i = 0; !t->whole && i < divide_up(rows, STRIP) * STRIP; i++)
        t->seen[i] = (float)most(0, least(t->keys, keys_seen(p, row + least(i, rows - 1)) - key));
    return true;
}

/* ---- Workers ----------------------------------------------------------------------------------------- */

/* Tasks of any cost: each worker, with memory of its own, takes the next one that is left. */
typedef struct workers {
    const vjp_work *work;
    const unit_plan *plan;
    void (*run)(const struct workers *w, int64_t task, float *memory, int64_t worker);
    float *memory;
    const void *own;
    _Atomic int64_t *next;
} workers;

static void worker_task(void *argument, size_t worker) {
    const workers *w = argument;
    int64_t task;
    while ((task = atomic_fetch_add(w->next, 1)) < w->plan->tasks)
        w->run(w, task, w->memory + (int64_t)worker * w->plan->worker_floats, (int64_t)worker);
}

static void run_workers(workers *w) {
    _Atomic int64_t next = 0;
    w->next = &next;
    vjp_cpu_for(w->work, w->plan->workers, worker_task, w);
}

/* Memory that is handed out piece by piece; without a base it only counts. */
typedef struct arena {
    float *base;
    int64_t used;
} arena;

static float *take(arena *memory, int64_t floats) {
    float *taken = memory->base ? memory->base + memory->used : NULL;
    memory->used += rounded(floats);
    return taken;
}

/* ---- Forward ----------------------------------------------------------------------------------------- */

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
    float *scores, *keys, *values;
    float *queries, *sums; /* of each tile of the chunk, QUERIES_PADDED x dim and QUERIES x padded dim */
    softmax_state state;   /* of all rows, QUERIES_PADDED a tile */
} forward_memory;

static forward_memory forward_memory_of(const unit_plan *p, arena *memory) {
    int64_t dim = p->sizes.dim, tiles = divide_up(p->chunk, QUERIES), lanes = tiles * QUERIES_PADDED;
    forward_memory m = {.scores = take(memory, score_floats(p->sizes.keys))};
    m.keys = take(memory, left_floats(p->sizes.keys, dim));
    m.values = take(memory, KEYS * padded_dim(dim));
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

/* One tile: its weights, and their values added to the sums. */
static void forward_tile(const unit_plan *p, const attention_tile *t, const forward_memory *m, int64_t index,
                         bool values) {
    int64_t dim = p->sizes.dim, lanes = index * QUERIES_PADDED;
    softmax_state state = {m->state.maximum + lanes, m->state.sum + lanes, m->state.correction + lanes};
    float *sums = m->sums + index * QUERIES * padded_dim(dim);
    for (int64_t strip = 0; strip < t->rows; strip += STRIP) {
        multiply_strip(t, dim, m->keys, m->queries + lanes * dim, strip, m->scores);
        for (int64_t at = strip; at < strip + STRIP; at += LANES)
            weigh_running(t, at, m->scores, &state);
    }
    if (!values) return;
    if (t->key > 0) correct_sums(t, dim, state.correction, sums);
    sum_over_keys(t, dim, m->scores, m->values, sums, t->key > 0);
}

static void finish_rows(const unit_plan *p, const forward_call *call, int64_t unit, int64_t first, int64_t rows,
                        const forward_memory *m) {
    row_source y = query_rows(p, unit, call->y, call->y_dtype, call->accumulate);
    int64_t stride = padded_dim(p->sizes.dim);
    for (int64_t r = 0; r < rows; r++) {
        int64_t lane = r / QUERIES * QUERIES_PADDED + r % QUERIES;
        float maximum = m->state.maximum[lane], sum = m->state.sum[lane];
        int64_t place = lse_place(p, unit, first + r);
        if (call->lse) call->lse[place] = call->rest ? maximum : (float)((double)maximum + log((double)sum));
        if (call->rest) call->rest[place] = (float)log((double)sum);
        if (call->y) put_row(&y, first + r, m->sums + r * stride, p->sizes.keys ? 1 / sum : 0);
    }
}

static void forward_task(const workers *w, int64_t task, float *memory, int64_t worker) {
    (void)worker;
    const unit_plan *p = w->plan;
    const forward_call *call = w->own;
    arena own = {.base = memory};
    forward_memory m = forward_memory_of(p, &own);
    /* The last chunks see the most keys: they go first, so that the threads finish together. */
    int64_t chunks = p->tasks / p->units, unit = task % p->units, chunk = chunks - 1 - task / p->units;
    int64_t first = chunk * p->chunk, rows = least(p->chunk, p->rows - first), tiles = divide_up(rows, QUERIES);
    row_source q = query_slot(w->work, p, unit, call->q), k = key_slot(w->work, p, unit, call->k);
    row_source v = key_slot(w->work, p, unit, call->v);
    for (int64_t i = 0; i < tiles; i++)
        pack_turned(&q, first + i * QUERIES, least(QUERIES, rows - i * QUERIES), (float)p->sizes.scale,
                    m.queries + i * QUERIES_PADDED * p->sizes.dim);
    for (int64_t i = 0; i < tiles * QUERIES_PADDED; i++) {
        m.state.maximum[i] = -INFINITY;
        m.state.sum[i] = 0;
    }
    if (p->sizes.keys == 0) memset(m.sums, 0, (size_t)(rows * padded_dim(p->sizes.dim)) * sizeof *m.sums);
    int64_t seen = keys_seen(p, first + rows - 1);
    for (int64_t key = 0; key < seen; key += KEYS) {
        int64_t keys = least(KEYS, p->sizes.keys - key);
        pack_left(&k, key, keys, m.keys);
        if (call->y) pack_right(&v, key, keys, KEYS, m.values);
        for (int64_t i = 0; i < tiles; i++) {
            attention_tile t;
            if (set_tile(&t, p, key, first + i * QUERIES, least(QUERIES, rows - i * QUERIES)))
                forward_tile(p, &t, &m, i, call->y);
        }
    }
    finish_rows(p, call, unit, first, rows, &m);
}

static void run_forward(const vjp_work *work, const unit_plan *p, const forward_call *call, float *memory) {
    if (p->tasks == 0 || (!call->y && !call->lse)) return;
    workers w = {.work = work, .plan = p, .run = forward_task, .memory = memory, .own = call};
    run_workers(&w);
}

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

/* Sizes that no memory holds; below that nothing here overflows. */
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

typedef struct backward_call {
    row_source y;            /* `first` and `group` of no unit: see query_rows() */
    const float *lse, *rest; /* as in known_state; rest NULL: 0 */
    float *sums;             /* dk and dv of each unit, or of each worker */
} backward_call;

typedef struct backward_memory {
    float *scores, *slopes;
    float *keys, *values, *keys_right;
    /* Of each tile of a block of rows; the right ones are QUERIES rows of padded dim, the turned ones QUERIES_PADDED.
     */
    float *queries, *dy, *queries_right, *dy_right, *dq;
    known_state state; /* of all rows, QUERIES_PADDED a tile */
    float *turned;     /* y of one tile */
} backward_memory;

static backward_memory backward_memory_of(const unit_plan *p, arena *memory) {
    int64_t dim = p->sizes.dim, padded = padded_dim(dim), tiles = divide_up(least(BLOCK_ROWS, p->rows), QUERIES);
    int64_t lanes = tiles * QUERIES_PADDED;
    backward_memory m = {.scores = take(memory, score_floats(p->sizes.keys))};
    m.slopes = take(memory, score_floats(p->sizes.keys));
    m.keys = take(memory, left_floats(p->sizes.keys, dim));
    m.values = take(memory, left_floats(p->sizes.keys, dim));
    m.keys_right = take(memory, KEYS * padded);
    m.queries = take(memory, lanes * dim);
    m.dy = take(memory, lanes * dim);
    m.queries_right = take(memory, tiles * QUERIES * padded);
    m.dy_right = take(memory, tiles * QUERIES * padded);
    m.dq = take(memory, tiles * QUERIES * padded);
    m.state.maximum = take(memory, lanes);
    m.state.rest = take(memory, lanes);
    m.state.mean = take(memory, lanes);
    m.turned = take(memory, QUERIES_PADDED * dim);
    return m;
}

/* Sums of dk, then of dv. */
static int64_t unit_sums(const unit_plan *p) {
    return rounded(2 * p->sizes.keys * padded_dim(p->sizes.dim));
}

/* As many heads in a unit as leave enough units: the more, the fewer times keys are packed and sums added. */
static unit_plan plan_backward(const vjp_work *work) {
    vjp_attention_sizes s = vjp_attention_sizes_of(work);
    int64_t group = s.group;
    while (group > 1 && (s.group % group || s.batch * s.kv_heads * (s.group / group) < ENOUGH_TASKS))
        group--;
    unit_plan p = plan_units(work, group);
    p.tasks = p.units;
    p.workers = workers_for(work, &p);
    arena count = {0};
    backward_memory_of(&p, &count);
    p.worker_floats = count.used;
    return p;
}

/* A tile of rows: q and dy as they will be read, lse, and mean = <dy, y> in the order of terms that dp is summed in. */
static void pack_rows(const workers *w, int64_t unit, int64_t first, int64_t count, int64_t index,
                      const backward_memory *m) {
    const unit_plan *p = w->plan;
    const backward_call *call = w->own;
    int64_t dim = p->sizes.dim, lanes = index * QUERIES_PADDED, right = index * QUERIES * padded_dim(dim);
    row_source q = query_slot(w->work, p, unit, ATTENTION_B_Q), dy = query_slot(w->work, p, unit, ATTENTION_B_DY);
    row_source y = query_rows(p, unit, call->y.data, call->y.dtype, false);
    pack_turned(&q, first, count, (float)p->sizes.scale, m->queries + lanes * dim);
    pack_turned(&dy, first, count, 1, m->dy + lanes * dim);
    pack_turned(&y, first, count, 1, m->turned);
    pack_right(&q, first, count, QUERIES, m->queries_right + right);
    pack_right(&dy, first, count, QUERIES, m->dy_right + right);
    for (int64_t i = 0; i < divide_up(count, STRIP) * STRIP; i++) {
        int64_t place = lse_place(p, unit, first + least(i, count - 1));
        m->state.maximum[lanes + i] = call->lse[place];
        m->state.rest[lanes + i] = call->rest ? call->rest[place] : 0;
    }
    for (int64_t c = 0; c < count; c += GEMM_COLUMNS) {
        const float *a = m->turned + c * dim, *b = m->dy + (lanes + c) * dim;
        float total[GEMM_COLUMNS] = {0};
        for (int64_t d = 0; d < dim; d += GEMM_DEPTH) {
            float sum[GEMM_COLUMNS] = {0};
            for (int64_t k = d; k < least(dim, d + GEMM_DEPTH); k++)
                for (int i = 0; i < GEMM_COLUMNS; i++)
                    sum[i] = f32_fma(a[k * GEMM_COLUMNS + i], b[k * GEMM_COLUMNS + i], sum[i]);
            for (int i = 0; i < GEMM_COLUMNS; i++)
                total[i] += sum[i];
        }
        memcpy(m->state.mean + lanes + c, total, sizeof total);
    }
}

/* One tile: weights and their gradients, and what they add to dq, dk and dv. */
static void backward_tile(const workers *w, const attention_tile *t, const backward_memory *m, int64_t index, float *dk,
                          float *dv) {
    const unit_plan *p = w->plan;
    int64_t dim = p->sizes.dim, lanes = index * QUERIES_PADDED, right = index * QUERIES * padded_dim(dim);
    bool slopes = w->work->tensor[ATTENTION_B_DQ] || w->work->tensor[ATTENTION_B_DK];
    known_state state = {m->state.maximum + lanes, m->state.rest + lanes, m->state.mean + lanes};
    for (int64_t strip = 0; strip < t->rows; strip += STRIP) {
        multiply_strip(t, dim, m->keys, m->queries + lanes * dim, strip, m->scores);
        if (slopes) multiply_strip(t, dim, m->values, m->dy + lanes * dim, strip, m->slopes);
        for (int64_t at = strip; at < strip + STRIP; at += LANES)
            weigh_known(t, at, m->scores, slopes ? m->slopes : NULL, &state);
    }
    if (w->work->tensor[ATTENTION_B_DV]) sum_over_queries(t, dim, m->scores, m->dy_right + right, dv);
    if (w->work->tensor[ATTENTION_B_DK]) sum_over_queries(t, dim, m->slopes, m->queries_right + right, dk);
    if (w->work->tensor[ATTENTION_B_DQ]) sum_over_keys(t, dim, m->slopes, m->keys_right, m->dq + right, t->key > 0);
}

/* A block of rows with all keys that they see. */
static void backward_block(const workers *w, int64_t unit, int64_t first, int64_t rows, const backward_memory *m,
                           float *dk, float *dv) {
    const unit_plan *p = w->plan;
    int64_t dim = p->sizes.dim, padded = padded_dim(dim), tiles = divide_up(rows, QUERIES);
    row_source k = key_slot(w->work, p, unit, ATTENTION_B_K), v = key_slot(w->work, p, unit, ATTENTION_B_V);
    for (int64_t i = 0; i < tiles; i++)
        pack_rows(w, unit, first + i * QUERIES, least(QUERIES, rows - i * QUERIES), i, m);
    if (p->sizes.keys == 0) memset(m->dq, 0, (size_t)(rows * padded) * sizeof *m->dq);
    int64_t seen = keys_seen(p, first + rows - 1);
    for (int64_t key = 0; key < seen; key += KEYS) {
        int64_t keys = least(KEYS, p->sizes.keys - key);
        pack_left(&k, key, keys, m->keys);
        pack_left(&v, key, keys, m->values);
        pack_right(&k, key, keys, KEYS, m->keys_right);
        for (int64_t i = 0; i < tiles; i++) {
            attention_tile t;
            if (set_tile(&t, p, key, first + i * QUERIES, least(QUERIES, rows - i * QUERIES)))
                backward_tile(w, &t, m, i, dk + key * padded, dv + key * padded);
        }
    }
    row_source dq = query_slot(w->work, p, unit, ATTENTION_B_DQ);
    for (int64_t r = 0; dq.data && r < rows; r++)
        put_row(&dq, first + r, m->dq + r * padded, (float)p->sizes.scale);
}

/* A row of dk and dv. */
static void put_key(const vjp_work *work, const unit_plan *p, int64_t unit, int64_t key, const float *dk_row,
                    const float *dv_row) {
    row_source dk = key_slot(work, p, unit, ATTENTION_B_DK), dv = key_slot(work, p, unit, ATTENTION_B_DV);
    if (dk.data) put_row(&dk, key, dk_row, (float)p->sizes.scale);
    if (dv.data) put_row(&dv, key, dv_row, 1);
}

static void backward_task(const workers *w, int64_t unit, float *memory, int64_t worker) {
    const unit_plan *p = w->plan;
    const backward_call *call = w->own;
    arena own = {.base = memory};
    backward_memory m = backward_memory_of(p, &own);
    int64_t padded = padded_dim(p->sizes.dim);
    float *dk = call->sums + (p->parts > 1 ? unit : worker) * unit_sums(p), *dv = dk + p->sizes.keys * padded;
    memset(dk, 0, (size_t)unit_sums(p) * sizeof *dk);
    for (int64_t first = 0; first < p->rows; first += BLOCK_ROWS)
        backward_block(w, unit, first, least(BLOCK_ROWS, p->rows - first), &m, dk, dv);
    for (int64_t key = 0; p->parts == 1 && key < p->sizes.keys; key++)
        put_key(w->work, p, unit, key, dk + key * padded, dv + key * padded);
}

/* ---- dk and dv of units that share a head ------------------------------------------------------------- */

typedef struct addition {
    const vjp_work *work;
    const unit_plan *plan;
    float *sums;
    cpu_cut cut; /* of the keys of all heads */
} addition;

/* Adds the sums of the other parts to the first's, in order. */
static void add_parts_task(void *argument, size_t task) {
    const addition *a = argument;
    const unit_plan *p = a->plan;
    int64_t keys = p->sizes.keys, padded = padded_dim(p->sizes.dim), step = unit_sums(p);
    for (int64_t i = cpu_cut_begin(&a->cut, task); i < cpu_cut_end(&a->cut, task); i++) {
        int64_t unit = i / keys * p->parts, key = i % keys;
        float *dk = a->sums + unit * step + key * padded, *dv = dk + keys * padded;
        for (int64_t part = 1; part < p->parts; part++)
            for (int64_t d = 0; d < p->sizes.dim; d++) {
                dk[d] += dk[part * step + d];
                dv[d] += dv[part * step + d];
            }
        put_key(a->work, p, unit, key, dk, dv);
    }
}

static void add_parts(const vjp_work *work, const unit_plan *p, float *sums) {
    int64_t heads = p->units / p->parts;
    addition a = {.work = work, .plan = p, .sums = sums};
    a.cut =
        vjp_cpu_cut_items(heads * p->sizes.keys, 2 * p->parts * p->sizes.dim * (int64_t)sizeof(float), CPU_MOST_TASKS);
    vjp_cpu_for(work, a.cut.count, add_parts_task, &a);
}

/* ---- The whole backward ------------------------------------------------------------------------------- */

static bool is_saved(const vjp_work *work) {
    return work->tensor[ATTENTION_B_Y] && work->tensor[ATTENTION_B_LSE];
}

/* dk and dv; then y and lse where they are computed again; then what the workers need. */
static int64_t sums_floats(const unit_plan *p) {
    return (p->parts > 1 ? p->units : p->workers) * unit_sums(p);
}

static int64_t y_floats(const unit_plan *p) {
    return rounded(p->sizes.batch * p->sizes.time * p->sizes.heads * p->sizes.dim);
}

static int64_t lse_floats(const unit_plan *p) {
    return rounded(p->sizes.batch * p->sizes.time * p->sizes.heads);
}

static size_t backward_workspace(const vjp_work *work) {
    if (is_too_large(work)) return SIZE_MAX;
    unit_plan p = plan_backward(work), again = plan_forward(work);
    int64_t floats = sums_floats(&p), own = p.workers * p.worker_floats;
    if (!is_saved(work)) {
        floats += y_floats(&p) + 2 * lse_floats(&p);
        own = most(own, again.workers * again.worker_floats);
    }
    return (size_t)(floats + own) * sizeof(float);
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
        unit_plan again = plan_forward(work);
        forward_call made = {
            .q = ATTENTION_B_Q, .k = ATTENTION_B_K, .v = ATTENTION_B_V, .y = y, .lse = lse, .rest = rest};
        made.y_dtype = VJP_F32;
        run_forward(work, &again, &made, memory.base + memory.used);
        call.y = (row_source){.data = y, .dtype = VJP_F32};
        call.lse = lse;
        call.rest = rest;
    }
    workers w = {.work = work, .plan = &p, .run = backward_task, .memory = memory.base + memory.used, .own = &call};
    run_workers(&w);
    if (p.parts > 1 && (dk || dv)) add_parts(work, &p, call.sums);
    return VJP_OK;
}

extern const vjp_kernel CPU_NAME(attention)[VJP_PASS_COUNT];

const vjp_kernel CPU_NAME(attention)[VJP_PASS_COUNT] = {
    {forward, forward_workspace, VJP_BITS_CPU},
    {backward, backward_workspace, VJP_BITS_CPU},
};

/* SPDX-License-Identifier: MIT */
/*
 * attention: its launches. The kernels, and what each computes, are in attention.wgsl and attention.metal, those of
 * `first` in attention_first.wgsl and .metal.
 *
 *     with first, before all    `edges` for queries, in the backward also for keys; last, the value of a bad `first`
 *     forward                   `forward`
 *     backward, y and lse       `deltas`, then `gradient` for dq; one for dk and dv, or one for each where a head has
 *                               more columns than a workgroup sums at once
 *     backward without them     `forward` first, with y in f32 in the workspace and the two parts of lse kept apart
 *
 * All launches but those of `first` are repeated for as many batches as span GPU_CHUNK elements of q or k, so that no
 * tensor has to fit a binding as a whole, and the workspace is bounded: a batch has to fit. The workspace has, with
 * first for all batches,
 *
 *     edges                     [batch, time] for queries, in the backward also [batch, keys] for keys, of i32
 *
 * and for those of a launch
 *
 *     row_max, row_log, delta   [batch, heads, time], the first two only without a saved lse
 *     y                         [batch, time, heads, dim], f32, only without a saved lse and y
 *
 * A workgroup of fewer than 256 threads has fewer rows, terms and columns.
 */
#include <math.h>

#include "gpu/gpu.h"

enum {
    MAX_FOURS = 16, /* of rows and of columns of a workgroup; a thread has four by four */
    MAX_CHUNKS = 2, /* of columns that a workgroup has: more sums than that do not fit the registers of a thread */
    ABSENT = -1     /* instead of a slot */
};

/* The operands whose rows may lie apart. A shader's Params begins with their steps, in this order. */
typedef enum side { LEFT, RIGHT, LEFT2, RIGHT2, OUT, OUT2, SIDES } side;
static const char *const side_name[SIDES] = {"left", "right", "left2", "right2", "out", "out2"};

/* What a pass does, and the offsets in its workspace. */
typedef struct plan {
    const vjp_work *work;
    vjp_attention_sizes s;
    int64_t q_batch, rows_batch;   /* elements of q, rows of queries, for a batch */
    int64_t batches;               /* in a launch */
    int64_t rows, columns, chunks; /* of a workgroup; the chunks have `columns` each */
    bool again;                    /* y and lse must be computed again */
    bool y, delta;                 /* whether that y, and <dy, y>, are needed */
    int first;                     /* the slot of first, or ABSENT */
    size_t key_edges_at;           /* those of queries are at 0 */
    size_t row_max_at, row_log_at, delta_at, y_at, bytes;
} plan;

/* Elements of memory that a batch of the largest tensor spans. */
static int64_t batch_span(const vjp_work *work) {
    const vjp_pass_info *pass = &work->op->info.pass[work->pass];
    int64_t most = 1;
    for (size_t i = 0; i < pass->count; i++)
        if (pass->slots[i].flags & VJP_SLOT_ROWS && work->tensor[i] && vjp_elements(work, (int)i))
            most = vjp_max(most, work->tensor[i]->shape[1] * vjp_step(work, (int)i));
    return most;
}

static plan plan_of(const vjp_work *work) {
    plan p = {.work = work, .s = vjp_attention_sizes_of(work)};
    const vjp_attention_sizes *s = &p.s;
    p.rows_batch = s->time * s->heads;
    p.q_batch = p.rows_batch * s->dim;
    p.batches = vjp_min(s->batch, vjp_max(1, GPU_CHUNK / batch_span(work)));
    int64_t threads = gpu_threads(work->device), across = vjp_min(threads, MAX_FOURS);
    p.rows = 4 * vjp_min(threads / across, MAX_FOURS);
    p.columns = 4 * across;
    p.chunks = vjp_min(vjp_divide_up(s->dim, p.columns), MAX_CHUNKS);
    int first = work->pass == VJP_FORWARD ? ATTENTION_FIRST : ATTENTION_B_FIRST;
    p.first = work->tensor[first] ? first : ABSENT;
    p.key_edges_at = p.bytes = p.first == ABSENT ? 0 : gpu_scratch_bytes(s->batch * s->time, sizeof(int32_t));
    if (work->pass == VJP_FORWARD) return p;
    bool slopes = work->tensor[ATTENTION_B_DQ] || work->tensor[ATTENTION_B_DK];
    p.again = !work->tensor[ATTENTION_B_Y] || !work->tensor[ATTENTION_B_LSE];
    p.delta = slopes;
    p.y = p.again && slopes;
    size_t statistic = gpu_scratch_bytes(p.batches * p.rows_batch, sizeof(float));
    p.row_max_at = p.key_edges_at + (p.first == ABSENT ? 0 : gpu_scratch_bytes(s->batch * s->keys, sizeof(int32_t)));
    p.row_log_at = p.row_max_at + (p.again ? statistic : 0);
    p.delta_at = p.row_log_at + (p.again ? statistic : 0);
    p.y_at = p.delta_at + (p.delta ? statistic : 0);
    p.bytes = p.y_at + (p.y ? gpu_scratch_bytes(p.batches * p.q_batch, sizeof(float)) : 0);
    return p;
}

/* ---- Operands ---------------------------------------------------------------------------------------- */

/* Batches [first, first + count). */
typedef struct part {
    const plan *p;
    int64_t first, count;
} part;

/* Of the workspace, `each` elements per batch. */
static void bind_scratch(gpu_launch *l, const part *at, const char *name, size_t offset, int64_t each, bool present,
                         bool output) {
    gpu_scratch(l, name, VJP_F32, offset, present ? at->count * each : 0, output);
    gpu_operand *o = &l->operand[l->operands - 1];
    o->fours = o->present && at->p->s.dim % 4 == 0 && each != at->p->rows_batch;
    o->output = o->present && output;
    o->paired = o->present;
}

static void bind_absent(gpu_launch *l, const part *at, const char *name) {
    bind_scratch(l, at, name, 0, 0, false, false);
}

/* A tensor of [heads, dim] for each of `times` times per batch. */
static void bind_rows(gpu_launch *l, const part *at, side where, int slot, int64_t times) {
    if (slot == ABSENT) {
        bind_absent(l, at, side_name[where]);
        return;
    }
    gpu_fours(l, side_name[where], slot, at->p->s.dim);
    gpu_rows(l, slot, at->first * times, at->count * times);
    l->param[where] = (uint32_t)vjp_step(l->work, slot);
}

/* The y that is computed again. */
static void bind_y(gpu_launch *l, const part *at, side where, bool output) {
    const plan *p = at->p;
    bind_scratch(l, at, side_name[where], p->y_at, p->q_batch, p->y, output);
    l->param[where] = (uint32_t)(p->s.heads * p->s.dim);
}

static void bind_lse(gpu_launch *l, const part *at, const char *name, int slot) {
    gpu_tensor(l, name, slot, 1);
    gpu_part(l, at->first * at->p->rows_batch, at->count * at->p->rows_batch);
}

static gpu_launch begin(const part *at, const char *kernel, bool key_rows) {
    const plan *p = at->p;
    const vjp_attention_sizes *s = &p->s;
    gpu_launch l = gpu_begin(p->work, kernel);
    l.threads = gpu_threads(p->work->device);
    gpu_constant(&l, "CHUNKS", p->chunks);
    gpu_constant(&l, "KEY_ROWS", key_rows);
    if (gpu_has_matrices(p->work->device)) gpu_constant(&l, "MATRIX", 8);
    l.params = SIDES;
    gpu_u32(&l, at->count * s->kv_heads);
    gpu_u32(&l, s->time);
    gpu_u32(&l, s->keys);
    gpu_u32(&l, s->kv_heads);
    gpu_u32(&l, s->group);
    gpu_u32(&l, s->dim);
    gpu_u32(&l, s->causal);
    gpu_u32(&l, s->window ? s->window : s->keys);
    gpu_u32(&l, vjp_divide_up(key_rows ? s->keys : s->time * s->group, p->rows));
    gpu_u32(&l, vjp_divide_up(s->dim, p->chunks * p->columns));
    gpu_f32(&l, s->scale);
    gpu_f32(&l, (double)INFINITY);
    gpu_f32(&l, (double)NAN);
    gpu_u32(&l, 0); /* a zero that compilers cannot know */
    gpu_u32(&l, at->first);
    return l;
}

/* What `first` makes of the limits of rows of keys, or of queries. */
static void bind_edges(gpu_launch *l, const plan *p, bool key_rows, bool output) {
    if (p->first == ABSENT) return;
    gpu_scratch(l, "edge", VJP_I32, key_rows ? p->key_edges_at : 0, p->s.batch * (key_rows ? p->s.keys : p->s.time),
                output);
}

static vjp_status find_edges(const plan *p, bool key_rows) {
    const vjp_attention_sizes *s = &p->s;
    int64_t rows = s->batch * (key_rows ? s->keys : s->time);
    gpu_launch l = gpu_begin(p->work, "edges");
    l.shader = "attention_first";
    l.threads = gpu_threads(p->work->device);
    gpu_constant(&l, "KEY_ROWS", key_rows);
    gpu_tensor(&l, "first", p->first, 1);
    bind_edges(&l, p, key_rows, true);
    gpu_report_bad_index(&l, s->keys);
    gpu_u32(&l, rows);
    gpu_u32(&l, s->time);
    gpu_u32(&l, s->keys);
    gpu_u32(&l, s->window ? s->window : s->keys);
    return gpu_enqueue(&l, vjp_divide_up(rows, l.threads));
}

/*
 * Each kernel goes through all terms of its rows: `products` sums over dim, and `sums` over the terms, for every 32.
 * A loop of n iterations counts as n + 1.
 */
static vjp_status enqueue(gpu_launch *l, const part *at, bool key_rows, int products, int sums) {
    enum { TERMS = 32, DEPTH = 16, PRODUCT_STEP = 6, SUM = 37, EXCHANGE = 34, OTHERS = 100 };
    const plan *p = at->p;
    int64_t queries = p->s.time * p->s.group, rows = key_rows ? p->s.keys : queries;
    int64_t terms = key_rows ? queries : p->s.keys;
    if (p->s.window) terms = vjp_min(terms, (p->s.window + p->rows) * (key_rows ? p->s.group : 1));
    int64_t tile =
        EXCHANGE + 4 + products * (PRODUCT_STEP * vjp_divide_up(p->s.dim, DEPTH) + 4) + sums * SUM * p->chunks;
    l->iterations = vjp_divide_up(terms, TERMS) * tile + OTHERS;
    return gpu_enqueue(l, at->count * p->s.kv_heads * vjp_divide_up(rows, p->rows) *
                              vjp_divide_up(p->s.dim, p->chunks * p->columns));
}

/* ---- Forward ----------------------------------------------------------------------------------------- */

static vjp_status forward_part(const part *at) {
    const plan *p = at->p;
    bool backward = p->work->pass == VJP_BACKWARD;
    gpu_launch l = begin(at, "forward", false);
    bind_rows(&l, at, LEFT, backward ? ATTENTION_B_Q : ATTENTION_Q, p->s.time);
    bind_rows(&l, at, RIGHT, backward ? ATTENTION_B_K : ATTENTION_K, p->s.keys);
    bind_rows(&l, at, RIGHT2, backward ? ATTENTION_B_V : ATTENTION_V, p->s.keys);
    if (backward) {
        bind_y(&l, at, OUT, true);
        bind_absent(&l, at, "lse");
    } else {
        bind_rows(&l, at, OUT, ATTENTION_Y, p->s.time);
        bind_lse(&l, at, "lse", ATTENTION_LSE);
    }
    bind_scratch(&l, at, "row_max", p->row_max_at, p->rows_batch, backward, true);
    bind_scratch(&l, at, "row_log", p->row_log_at, p->rows_batch, backward, true);
    bind_edges(&l, p, false, false);
    return enqueue(&l, at, false, 1, 1);
}

/* Calls run() for each run of batches that one launch takes, between what `first` needs. */
static vjp_status for_parts(const plan *p, vjp_status (*run)(const part *at)) {
    vjp_status status = p->first == ABSENT ? VJP_OK : find_edges(p, false);
    if (status == VJP_OK && p->first != ABSENT && p->work->pass == VJP_BACKWARD) status = find_edges(p, true);
    for (int64_t first = 0; first < p->s.batch && status == VJP_OK; first += p->batches)
        status = run(&(part){p, first, vjp_min(p->batches, p->s.batch - first)});
    if (status == VJP_OK && p->first != ABSENT) status = gpu_explain(p->work, p->first);
    return status;
}

static vjp_status forward(const vjp_work *work) {
    plan p = plan_of(work);
    if (!work->tensor[ATTENTION_Y] && !work->tensor[ATTENTION_LSE]) return VJP_OK;
    return for_parts(&p, forward_part);
}

/* ---- Backward ---------------------------------------------------------------------------------------- */

static vjp_status deltas(const part *at) {
    const plan *p = at->p;
    gpu_launch l = begin(at, "deltas", false);
    bind_rows(&l, at, LEFT2, ATTENTION_B_DY, p->s.time);
    if (p->again)
        bind_y(&l, at, RIGHT2, false);
    else
        bind_rows(&l, at, RIGHT2, ATTENTION_B_Y, p->s.time);
    bind_scratch(&l, at, "delta", p->delta_at, p->rows_batch, true, true);
    int64_t queries = gpu_has_matrices(p->work->device) ? p->rows : l.threads; /* of a workgroup */
    return gpu_enqueue(&l, vjp_divide_up(at->count * p->rows_batch, queries));
}

/* dq, or dk (`out`) and dv (`out2`), or one of these. */
static vjp_status gradient(const part *at, bool key_rows, int out, int out2) {
    const plan *p = at->p;
    int64_t row_times = key_rows ? p->s.keys : p->s.time, term_times = key_rows ? p->s.time : p->s.keys;
    gpu_launch l = begin(at, "gradient", key_rows);
    bind_rows(&l, at, LEFT, key_rows ? ATTENTION_B_K : ATTENTION_B_Q, row_times);
    bind_rows(&l, at, RIGHT, key_rows ? ATTENTION_B_Q : ATTENTION_B_K, term_times);
    bind_rows(&l, at, LEFT2, key_rows ? ATTENTION_B_V : ATTENTION_B_DY, row_times);
    bind_rows(&l, at, RIGHT2, key_rows ? ATTENTION_B_DY : ATTENTION_B_V, term_times);
    bind_rows(&l, at, OUT, out, row_times);
    bind_rows(&l, at, OUT2, out2, row_times);
    if (p->again)
        bind_scratch(&l, at, "row_max", p->row_max_at, p->rows_batch, true, false);
    else
        bind_lse(&l, at, "row_max", ATTENTION_B_LSE);
    bind_scratch(&l, at, "row_log", p->row_log_at, p->rows_batch, p->again, false);
    bind_scratch(&l, at, "delta", p->delta_at, p->rows_batch, p->delta && out != ABSENT, false);
    bind_edges(&l, p, key_rows, false);
    return enqueue(&l, at, key_rows, out == ABSENT ? 1 : 2, (out != ABSENT) + (out2 != ABSENT));
}

static vjp_status backward_part(const part *at) {
    const plan *p = at->p;
    const vjp_work *work = p->work;
    int dk = work->tensor[ATTENTION_B_DK] ? ATTENTION_B_DK : ABSENT;
    int dv = work->tensor[ATTENTION_B_DV] ? ATTENTION_B_DV : ABSENT;
    bool together = p->chunks == 1;
    vjp_status status = p->again ? forward_part(at) : VJP_OK;
    if (status == VJP_OK && p->delta) status = deltas(at);
    if (status == VJP_OK && work->tensor[ATTENTION_B_DQ]) status = gradient(at, false, ATTENTION_B_DQ, ABSENT);
    if (status == VJP_OK && (dk != ABSENT || (together && dv != ABSENT)))
        status = gradient(at, true, dk, together ? dv : ABSENT);
    if (status == VJP_OK && !together && dv != ABSENT) status = gradient(at, true, ABSENT, dv);
    return status;
}

static vjp_status backward(const vjp_work *work) {
    plan p = plan_of(work);
    if (!p.delta && !work->tensor[ATTENTION_B_DV]) return VJP_OK;
    return for_parts(&p, backward_part);
}

static size_t workspace(const vjp_work *work) {
    return plan_of(work).bytes;
}

const vjp_kernel gpu_attention[VJP_PASS_COUNT] = {{forward, workspace, VJP_STORAGE_16_32 | VJP_TAKES_ROWS},
                                                  {backward, workspace, VJP_STORAGE_16_32 | VJP_TAKES_ROWS}};

/* SPDX-License-Identifier: MIT */
/*
 * Definitions shared by attention's passes: units, their rows and tiles, and workers that take tasks and prefetch the
 * start of the next one.
 *
 * The heads of q that share a head of k and v are rows of one problem, a unit, ordered by time: row r is time r /
 * group.
 */
#ifndef VJP_CPU_ATTENTION_UNITS_H
#define VJP_CPU_ATTENTION_UNITS_H

#include <stdatomic.h>

#include "cpu/attention/attention_tile.h"
#include "op/op.h"

/*
 * The products of this many last tiles prefetch what follows. It is enough for the rows of the next task; with more, a
 * worker would hold a task longer that another could start.
 */
enum { PREFETCH_TILES = 4 };

/* This many tasks keep the threads busy to the end; a worker is woken for this many multiply-adds. */
enum { ENOUGH_TASKS = 32, WORKER_MACS = 1 << 18 };

typedef struct unit_plan {
    vjp_attention_sizes sizes;
    bool late;     /* some queries do not see key 0: there is a window, or `first` */
    int64_t group; /* heads of q in a unit */
    int64_t parts; /* units that share a head of k and v */
    int64_t units;
    int64_t rows;  /* of a unit */
    int64_t chunk; /* forward: rows of a task */
    int64_t block; /* backward: rows that are packed at a time */
    int64_t tasks, workers;
    int64_t worker_floats;
} unit_plan;

static int64_t whole_vectors(int64_t floats) {
    return vjp_round_up(floats, LANES);
}

static unit_plan plan_units(const vjp_work *work, int64_t group) {
    unit_plan p = {.sizes = vjp_attention_sizes_of(work), .group = group};
    const vjp_attention_sizes *s = &p.sizes;
    p.late = s->window || s->first;
    p.parts = group ? s->group / group : 0;
    p.units = s->batch * s->kv_heads * p.parts;
    p.rows = s->time * group;
    return p;
}

static int64_t workers_for(const vjp_work *work, const unit_plan *p) {
    double macs = (double)p->units * (double)p->rows * (double)p->sizes.keys * (double)p->sizes.dim;
    int64_t worth = macs > (double)WORKER_MACS * 1024 ? 1024 : 1 + (int64_t)(macs / WORKER_MACS);
    return vjp_max(1, vjp_min(cpu_state_of(work)->threads, vjp_min(p->tasks, worth)));
}

/* ---- Rows and tiles of a unit ------------------------------------------------------------------------ */

/* Rows of q, y or a gradient of theirs. `step`: elements from one time to the next. */
static row_source query_source(const unit_plan *p, int64_t unit, int64_t step, void *data, vjp_dtype dtype,
                               bool accumulate) {
    const vjp_attention_sizes *s = &p->sizes;
    int64_t batch = unit / (s->kv_heads * p->parts), head = unit % (s->kv_heads * p->parts) * p->group;
    return (row_source){.data = data,
                        .dtype = dtype,
                        .first = batch * s->time * step + head * s->dim,
                        .time_step = step,
                        .head_step = s->dim,
                        .group = p->group,
                        .dim = s->dim,
                        .accumulate = accumulate};
}

/* Those of a slot. */
static row_source query_slot(const vjp_work *work, const unit_plan *p, int64_t unit, int slot) {
    return query_source(p, unit, vjp_step(work, slot), vjp_data(work, slot), vjp_type(work, slot),
                        vjp_accumulates(work, slot));
}

/* Packed ones: y, in a slot or in the workspace. */
static row_source query_rows(const unit_plan *p, int64_t unit, void *data, vjp_dtype dtype, bool accumulate) {
    return query_source(p, unit, p->sizes.heads * p->sizes.dim, data, dtype, accumulate);
}

static row_source key_slot(const vjp_work *work, const unit_plan *p, int64_t unit, int slot) {
    const vjp_attention_sizes *s = &p->sizes;
    int64_t head = unit / p->parts % s->kv_heads, batch = unit / p->parts / s->kv_heads;
    int64_t step = vjp_step(work, slot);
    return (row_source){.data = vjp_data(work, slot),
                        .dtype = vjp_type(work, slot),
                        .first = batch * s->keys * step + head * s->dim,
                        .time_step = step,
                        .group = 1,
                        .dim = s->dim,
                        .accumulate = vjp_accumulates(work, slot)};
}

/* Number of keys that a row sees. */
static int64_t keys_seen(const unit_plan *p, int64_t row) {
    const vjp_attention_sizes *s = &p->sizes;
    return s->causal ? row / p->group + s->keys - s->time + 1 : s->keys;
}

/* The first of them. */
static int64_t first_key(const unit_plan *p, int64_t unit, int64_t row) {
    if (!p->late) return 0;
    return vjp_attention_first(&p->sizes, unit / (p->sizes.kv_heads * p->parts), row / p->group);
}

/* Where the tiles of keys of some rows begin. */
static int64_t first_tile(const unit_plan *p, int64_t unit, int64_t row) {
    return first_key(p, unit, row) / KEYS * KEYS;
}

/* Returns false if no row of the tile sees any of these keys. */
static bool set_tile(attention_tile *t, const unit_plan *p, int64_t unit, int64_t key, int64_t row, int64_t rows,
                     prefetch_queue *prefetch) {
    int64_t sees = keys_seen(p, row) - key, from = first_key(p, unit, row) - key, into = row % p->group;
    t->key = key;
    t->keys = vjp_min(KEYS, p->sizes.keys - key);
    t->row = row;
    t->rows = rows;
    t->prefetch = prefetch;
    t->windowed = first_key(p, unit, row + rows - 1) > key;
    if (keys_seen(p, row + rows - 1) <= key || from >= t->keys) return false;
    t->whole = sees >= t->keys && !t->windowed;
    for (int64_t i = 0; !t->whole && i < vjp_round_up(rows, STRIP); i++) {
        t->seen[i] = (float)vjp_max(0, vjp_min(t->keys, sees));
        if (t->windowed) t->from[i] = (float)vjp_max(0, vjp_min(t->keys, from));
        if (i + 1 < rows && ++into == p->group) {
            into = 0;
            sees++;
            if (t->windowed) from = first_key(p, unit, row + i + 1) - key;
        }
    }
    return true;
}

/* ---- Workers ----------------------------------------------------------------------------------------- */

struct worker;

/* Tasks of varying cost: each worker, with memory of its own, takes the next task that is left. */
typedef struct workers {
    const vjp_work *work;
    const unit_plan *plan;
    void (*run)(struct worker *self, int64_t task);
    float *memory;
    const void *call;
    _Atomic int64_t *next;
} workers;

typedef struct worker {
    const workers *all;
    float *memory;
    int64_t index;
    int64_t next; /* already taken, or NONE */
    prefetch_queue prefetch;
} worker;

enum { NONE = -1 };

/* A worker takes its next task shortly before the current one ends, to prefetch what it starts with. */
static int64_t next_task(worker *self) {
    if (self->next == NONE) self->next = atomic_fetch_add(self->all->next, 1);
    return self->next;
}

static void worker_task(void *argument, size_t index) {
    const workers *all = argument;
    worker self = {.all = all, .index = (int64_t)index, .next = NONE};
    self.memory = all->memory + self.index * all->plan->worker_floats;
    int64_t task;
    while ((task = next_task(&self)) < all->plan->tasks) {
        self.next = NONE;
        self.prefetch.now = self.prefetch.count = 0;
        all->run(&self, task);
    }
}

static void run_workers(workers *all) {
    _Atomic int64_t next = 0;
    all->next = &next;
    vjp_cpu_for(all->work, all->plan->workers, worker_task, all);
}

/* Memory handed out in sections; without a base it only counts. */
typedef struct arena {
    float *base;
    int64_t used;
} arena;

static float *take(arena *memory, int64_t floats) {
    float *taken = memory->base ? memory->base + memory->used : NULL;
    memory->used += whole_vectors(floats);
    return taken;
}

/* Queues the prefetch of a tile of keys that will be packed. */
static void queue_keys(worker *self, int64_t unit, int64_t key, int k_slot, int v_slot) {
    const unit_plan *p = self->all->plan;
    row_source k = key_slot(self->all->work, p, unit, k_slot), v = key_slot(self->all->work, p, unit, v_slot);
    int64_t keys = vjp_min(KEYS, p->sizes.keys - key);
    queue_rows(&self->prefetch, &k, key, keys);
    queue_rows(&self->prefetch, &v, key, keys);
}

#endif

/* SPDX-License-Identifier: MIT */
/*
 * The driver of the matrix products (gemm.h): the same blocking, packing and scheduling for every engine.
 *
 *     path                taken when                                 why
 *     pack both           more than one tile of rows and columns     tiles share what is packed
 *     pack one operand    rows or columns fit one tile (112 x 128    a tile packs the other's panels on its stack:
 *                         with AVX-512)                              a one-row product reads b once, copies nothing
 *     slabs in place      FMA, operand in slabs, not transposed      a slab has the layout of packed panels
 *     few rows            at most 4 rows (16 with AMX, bf16), b      generating text: each weight is read once, from
 *                         stored as [n, k], not split along K        where it is
 *     split along K       one item, fewer than 16 tiles of           the gradient of a small weight over many rows
 *                         128 x 128, and K >= 4096                   would otherwise keep few threads busy
 *     BLAS                the caller chose it                        f32 operands are used in place, others copied
 *                                                                    to f32; a tile is one single-threaded sgemm
 *
 * A product is divided into blocks of about 1024 x 4096 with K up to 1024 (or 1024 x 1024 with K up to 4096), and a
 * block into tiles. Packing is done by tasks of its own, which run among the tiles of the previous block: packed
 * operands are double-buffered.
 *
 * All tasks of a product form one sequence: the packing of the first block, then for each block the packing of the next
 * block and its own tiles. A free thread takes the next task and waits only for what that task needs, all of which was
 * taken earlier. So there are no barriers, and a slow thread delays nothing until the end, where tiles are quartered.
 *
 * A product that is split along K runs as a batch whose items are the splits; their partial sums are added in order, in
 * double.
 *
 * Whatever decides bits (K's slices and splits) depends on the sizes alone. Tiles also depend on the threads: an
 * element is the same sums in the same order whatever tile it is in.
 */
#include <stdatomic.h>

#include "cpu/gemm/blas.h"
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/gemm_plan.h"

/* ---- State of a running product ----------------------------------------------------------------------  */

/*
 * Progress, counted in tasks. The counts of a step continue those of the step RING before it, which has finished:
 * packing for step s waits for the tiles of all steps up to s - 2.
 */
enum { RING = 4 };

typedef struct progress {
    _Atomic int64_t next;
    _Atomic int64_t packed[RING], multiplied[RING];
    _Atomic int64_t tile[]; /* with several blocks of K: how many each tile has finished */
} progress;

typedef struct run {
    const gemm_call *call;
    const plan *plan;
    float *a[2], *b[2]; /* packed operands, double-buffered */
    float *buffer;
    float *splits; /* partial sums [m, n] of each split along K */
    progress *progress;
} run;

/* One block of the sequence. */
typedef struct step {
    int64_t index, item, items, m0, m, n0, n, k0;
    bool pack_a, pack_b; /* else it reads what an earlier step packed */
    float *a, *b;        /* packed */
} step;

static int64_t terms_of(const plan *p, int64_t item, int64_t k0) {
    int64_t k = vjp_min(p->k, p->k_total - item * p->k);
    return vjp_max(0, vjp_min(p->block_k, k - k0));
}

/* Which packing of an operand a step reads, counted from 0. */
static int64_t version_of(const plan *p, bool is_a, int64_t index) {
    if (p->blocks_k > 1 || (!is_a && p->blocks_n > 1)) return index;
    return is_a ? index / p->blocks_n : index / p->blocks_m;
}

static step step_of(const run *r, int64_t index) {
    const plan *p = r->plan;
    int64_t ki = index % p->blocks_k, rest = index / p->blocks_k;
    int64_t ni = rest % p->blocks_n, mi = rest / p->blocks_n % p->blocks_m, group = rest / p->blocks_n / p->blocks_m;
    int64_t a = version_of(p, true, index), b = version_of(p, false, index);
    step s = {.index = index, .item = group * p->group, .m0 = mi * p->block_m, .n0 = ni * p->block_n};
    s.k0 = ki * p->block_k;
    s.items = vjp_min(p->group, p->items - s.item);
    s.m = vjp_min(p->block_m, p->m - s.m0);
    s.n = vjp_min(p->block_n, p->n - s.n0);
    s.pack_a = index == 0 || a != version_of(p, true, index - 1);
    s.pack_b = index == 0 || b != version_of(p, false, index - 1);
    s.a = r->a[a % 2];
    s.b = r->b[b % 2];
    return s;
}

/* Tasks that are finished when this step is, over all steps that share its counter. */
static int64_t count_up_to(int64_t index, int64_t tasks) {
    return (index / RING + 1) * tasks;
}

static void add_one(_Atomic int64_t *count) {
    atomic_fetch_add_explicit(count, 1, memory_order_release);
}

static void pack_unit(const run *r, const step *s, bool is_a, int64_t u) {
    const plan *p = r->plan;
    const gemm_operand *o = is_a ? &r->call->a : &r->call->b;
    packing t = packing_of(p, is_a);
    int64_t strip = u % t.count, group = u / t.count % t.groups;
    int64_t d = u / t.count / t.groups % p->slices, item = u / t.count / t.groups / p->slices;
    int64_t side = is_a ? GEMM_ROWS : GEMM_COLUMNS, begin = group * t.extent;
    int64_t first = t.panels * strip / t.count, end = vjp_min(t.extent, t.panels * (strip + 1) / t.count * side);
    int64_t from = begin + first * side, count = vjp_min(begin + end, is_a ? s->m : s->n) - from;
    int64_t depth = vjp_min(GEMM_DEPTH, terms_of(p, s->item + item, s->k0) - d * GEMM_DEPTH);
    if (count <= 0 || depth <= 0) return;
    int64_t panel = (d * t.groups + group) * t.panels + first, k = s->k0 + d * GEMM_DEPTH;
    if (is_a)
        pack_a_panels(o, p->limbs.a, s->item + item, s->m0 + from, count, k, depth,
                      s->a + item * p->a_floats + panel * p->a_panel);
    else
        pack_b_panels(o, p->limbs.b, s->item + item, s->n0 + from, count, k, depth,
                      s->b + item * p->b_floats + panel * p->b_panel);
}

/* The same for BLAS: a few rows of the block in f32, in the order in which they are stored. */
static void copy_unit(const run *r, const step *s, bool is_a, int64_t u) {
    const plan *p = r->plan;
    const gemm_operand *o = is_a ? &r->call->a : &r->call->b;
    bool terms_down = o->transposed == is_a; /* stored rows run along K */
    int64_t strips = vjp_divide_up(stored_rows(p, o, is_a), BLAS_STRIP), stride = stored_columns(p, o, is_a);
    int64_t strip = u % strips, item = u / strips, depth = terms_of(p, s->item + item, s->k0);
    int64_t across0 = is_a ? s->m0 : s->n0, across = is_a ? s->m : s->n;
    int64_t row0 = terms_down ? s->k0 : across0, rows = terms_down ? depth : across;
    int64_t column0 = terms_down ? across0 : s->k0, columns = terms_down ? across : depth;
    float *to = is_a ? s->a + item * p->a_floats : s->b + item * p->b_floats;
    for (int64_t i = strip * BLAS_STRIP; i < vjp_min(rows, (strip + 1) * BLAS_STRIP); i++) {
        float *row = to + i * stride;
        const float *from = stored_row(o, s->item + item, row0 + i, column0, columns, row);
        if (from != row) memcpy(row, from, (size_t)columns * sizeof *row);
    }
}

/* ---- Tiles -------------------------------------------------------------------------------------------  */

typedef struct tile {
    step block;
    int64_t index;      /* within the block */
    int64_t item;       /* of the batch */
    int64_t slot;       /* within the block's items */
    int64_t i, j, m, n; /* within the block; a tile past the edge has no rows or no columns */
    float *c;           /* destination of the finished sums */
    int64_t ldc;
    float *buffer; /* holds sums between slices of K; may be c itself */
    int64_t ldb;
    bool padded; /* c has room for whole panels; the buffer always has */
    bool add;    /* the first slice adds to c */
} tile;

/* The tile of a block's task, without its memory. */
static tile tile_at(const run *r, const step *s, int64_t task) {
    const plan *p = r->plan;
    bool quartered = s->index == p->steps - 1 && task >= p->whole;
    int64_t index = quartered ? p->whole + (task - p->whole) / QUARTERS : task;
    int64_t tj = index % p->tiles_n, ti = index / p->tiles_n % p->tiles_m, slot = index / p->tiles_n / p->tiles_m;
    tile t = {.block = *s, .index = index, .item = s->item + slot, .slot = slot};
    t.i = ti * p->tile_m;
    t.j = tj * p->tile_n;
    t.m = slot < s->items ? vjp_min(p->tile_m, s->m - t.i) : 0;
    t.n = vjp_min(p->tile_n, s->n - t.j);
    if (!quartered) return t;
    bool lower = (task - p->whole) % QUARTERS / 2, right = (task - p->whole) % 2;
    t.m = lower ? t.m - p->half_m : vjp_min(p->half_m, t.m);
    t.n = right ? t.n - p->half_n : vjp_min(p->half_n, t.n);
    t.i += lower ? p->half_m : 0;
    t.j += right ? p->half_n : 0;
    return t;
}

/* Packed panels of a tile for slice d of K, or slabs with the same layout; of b, from column j of the tile. */
static const float *packed_a(const run *r, const tile *t, int64_t d) {
    const plan *p = r->plan;
    if (p->a_in_slabs) return slab_at(&r->call->a, t->item, t->block.m0 + t->i, t->block.k0 + d * GEMM_DEPTH);
    int64_t panel = t->i / p->tile_m * vjp_divide_up(p->tile_m, GEMM_ROWS) + t->i % p->tile_m / GEMM_ROWS;
    return t->block.a + t->slot * p->a_floats + (d * p->a_panels + panel) * p->a_panel;
}

static const float *packed_b(const run *r, const tile *t, int64_t d, int64_t j) {
    const plan *p = r->plan;
    if (p->b_in_slabs) return slab_at(&r->call->b, t->item, t->block.k0 + d * GEMM_DEPTH, t->block.n0 + t->j + j);
    return t->block.b + t->slot * p->b_floats + (d * p->b_panels + (t->j + j) / GEMM_COLUMNS) * p->b_panel;
}

/* The next GEMM_PREFETCH bytes of each range; at the end of a range, what is being read anyway. */
INLINE gemm_prefetch take_prefetch(gemm_prefetch *left, const float *a, const float *b) {
    gemm_prefetch now = {.a = (const char *)a, .b = (const char *)b};
    if (left->a < left->a_end) {
        now.a = left->a;
        left->a += GEMM_PREFETCH;
    }
    if (left->b < left->b_end) {
        now.b = left->b;
        left->b += GEMM_PREFETCH;
    }
    return now;
}

/* One slice of K, at most GEMM_DEPTH terms, for some columns of a tile. */
typedef struct k_slice {
    int64_t index, depth;
    bool first, last;
    int64_t column, columns_end;
} k_slice;

/* Multiplies rows of one panel of a by one panel of b and adds them to the tile's sums. */
INLINE void add_panels(const plan *p, bool by_terms, bool slab, const tile *t, int64_t i, int64_t j, const k_slice *d,
                       const float *a, const float *b, gemm_prefetch *prefetch) {
    int64_t rows = vjp_min(GEMM_ROWS, t->m - i), columns = t->n - j;
    float *c = t->c + i * t->ldc + j, *buffer = t->buffer + i * t->ldb + j;
    gemm_target to = {.from = buffer, .from_stride = t->ldb, .to = buffer, .to_stride = t->ldb};
    if (d->first) {
        to.from = t->add ? c : NULL;
        to.from_stride = t->ldc;
    }
    if (d->last) {
        to.to = c;
        to.to_stride = t->ldc;
    }
    bool room = t->padded || (to.from != c && to.to != c);
    gemm_prefetch now = take_prefetch(prefetch, a, b);
    multiply_panels(p->limbs, by_terms, slab, rows, room ? GEMM_COLUMNS : columns, d->depth, a, b, &to, &now);
}

/* All panels of a tile for one slice of K, each operand packed in the workspace or on the stack. */
INLINE void multiply_slice(const run *r, const tile *t, bool by_terms, bool slab, const k_slice *d,
                           gemm_prefetch prefetch) {
    const plan *p = r->plan;
    const step *s = &t->block;
    const gemm_call *call = r->call;
    int64_t k = s->k0 + d->index * GEMM_DEPTH;
    const float *a = packed_a(r, t, d->index);
    if (!PACKS_ALL && !p->pack_a) {
        float panel[GEMM_A_PANEL];
        for (int64_t i = 0; i < t->m; i += GEMM_ROWS) {
            pack_a_panels(&call->a, p->limbs.a, t->item, s->m0 + t->i + i, vjp_min(GEMM_ROWS, t->m - i), k, d->depth,
                          panel);
            for (int64_t j = d->column; j < d->columns_end; j += GEMM_COLUMNS)
                add_panels(p, by_terms, slab, t, i, j, d, panel, packed_b(r, t, d->index, j), &prefetch);
        }
        return;
    }
    float panel[PACKS_ALL ? 1 : GEMM_B_PANEL];
    for (int64_t j = d->column; j < d->columns_end; j += GEMM_COLUMNS) {
        const float *column = packed_b(r, t, d->index, j);
        if (!PACKS_ALL && !p->pack_b) {
            pack_b_panels(&call->b, p->limbs.b, t->item, s->n0 + t->j + j, vjp_min(GEMM_COLUMNS, t->n - j), k, d->depth,
                          panel);
            column = panel;
        }
        for (int64_t i = 0; i < t->m; i += GEMM_ROWS)
            add_panels(p, by_terms, slab, t, i, j, d, a + i / GEMM_ROWS * p->a_panel, column, &prefetch);
    }
}

/* The packed panels read after slice d of a tile: those of its next slice, or the first of the following tile. */
static gemm_prefetch prefetch_after(const run *r, const tile *t, const k_slice *d, const tile *following) {
    const plan *p = r->plan;
    int64_t index = d->last ? 0 : d->index + 1, column = d->last ? d->columns_end : d->column;
    const tile *next = column < t->n ? t : following;
    gemm_prefetch prefetch = {0};
    if (column >= t->n) column = 0;
    if (next->m <= 0 || next->n <= 0) return prefetch;
    if (p->pack_a && column == 0) {
        prefetch.a = (const char *)packed_a(r, next, index);
        prefetch.a_end = prefetch.a + vjp_divide_up(next->m, GEMM_ROWS) * p->a_panel * (int64_t)sizeof(float);
    }
    if (p->pack_b) {
        int64_t columns = vjp_min(columns_at_once(next->n), next->n - column);
        int64_t floats = p->b_in_slabs ? GEMM_DEPTH * SLAB_STRIDE : vjp_divide_up(columns, GEMM_COLUMNS) * p->b_panel;
        prefetch.b = (const char *)packed_b(r, next, index, column);
        prefetch.b_end = prefetch.b + floats * (int64_t)sizeof(float);
    }
    return prefetch;
}

static int64_t take_ticket(const run *r) {
    return atomic_fetch_add_explicit(&r->progress->next, 1, memory_order_relaxed);
}

static tile tile_of_ticket(const run *r, int64_t ticket);

/* Takes the next ticket before the last slice, early enough to prefetch the panels that it starts with. */
static int64_t multiply_builtin(const run *r, const tile *t, int64_t count) {
    int64_t next = 0, width = columns_at_once(t->n);
    for (int64_t j = 0; j < t->n; j += width) {
        k_slice d = {.first = true, .column = j, .columns_end = vjp_min(t->n, j + width)};
        do {
            int64_t rest = count - d.index * GEMM_DEPTH;
            tile following = {0};
            d.depth = vjp_min(GEMM_DEPTH, rest);
            d.last = rest <= GEMM_DEPTH;
            if (d.last && d.columns_end == t->n) {
                next = take_ticket(r);
                following = tile_of_ticket(r, next);
            }
            gemm_prefetch prefetch = prefetch_after(r, t, &d, &following);
            bool by_terms = r->call->a.transposed, slab = READS_SLABS_AS_B && r->plan->b_in_slabs;
            if (by_terms && slab)
                multiply_slice(r, t, true, true, &d, prefetch);
            else if (by_terms)
                multiply_slice(r, t, true, false, &d, prefetch);
            else if (slab)
                multiply_slice(r, t, false, true, &d, prefetch);
            else
                multiply_slice(r, t, false, false, &d, prefetch);
            d.first = false;
            d.index++;
        } while (!d.last);
    }
    return next;
}

/* The address and stride that BLAS needs for an operand of a tile. */
static const float *blas_operand(const run *r, bool is_a, const tile *t, int64_t *stride) {
    const plan *p = r->plan;
    const step *s = &t->block;
    const gemm_operand *o = is_a ? &r->call->a : &r->call->b;
    int64_t across = is_a ? t->i : t->j;
    bool terms_down = o->transposed == is_a;
    if (is_a ? p->pack_a : p->pack_b) {
        *stride = stored_columns(p, o, is_a);
        return (is_a ? s->a + t->slot * p->a_floats : s->b + t->slot * p->b_floats) +
               (terms_down ? across : across * *stride);
    }
    *stride = o->stride;
    across += is_a ? s->m0 : s->n0;
    int64_t row = terms_down ? s->k0 : across, column = terms_down ? across : s->k0;
    return (const float *)o->data + operand_index(o, t->item, row, column);
}

static void multiply_blas(const run *r, const tile *t, int64_t count) {
    int64_t lda, ldb;
    const float *a = blas_operand(r, true, t, &lda), *b = blas_operand(r, false, t, &ldb);
    vjp_blas_sgemm(r->call->a.transposed, r->call->b.transposed, t->m, t->n, count, 1, a, lda, b, ldb, t->add ? 1 : 0,
                   t->c, t->ldc);
}

/* Stores finished sums or passes them to the epilogue. */
static void store_sums(const gemm_result *c, int64_t row, int64_t column, int64_t count, const float *sums) {
    if (c->epilogue) {
        c->epilogue(c->target, row, column, count, sums);
        return;
    }
    float *to = c->plain + row * c->stride + column;
    for (int64_t j = 0; j < count; j++)
        to[j] = c->accumulate ? to[j] + sums[j] : sums[j];
}

/* Sets a tile's destination and buffer: its own across blocks of K, or the worker's. */
static void place_tile(const run *r, int64_t worker, tile *t) {
    const plan *p = r->plan;
    const step *s = &t->block;
    const gemm_result *c = &r->call->c;
    int64_t row = s->m0 + t->i, column = s->n0 + t->j;
    t->ldb = p->tile_n + BUFFER_PAD;
    t->buffer = r->buffer + worker * p->buffer_floats;
    if (p->kept) t->buffer = r->buffer + t->index * p->buffer_floats + t->i % p->tile_m * t->ldb + t->j % p->tile_n;
    if (r->splits) {
        t->c = r->splits + (t->item * p->m + row) * p->n + column;
        t->ldc = p->n;
    } else if (p->direct) {
        t->c = c->plain + (t->item * c->item_row + row) * c->stride + column;
        t->ldc = c->stride;
        t->add = c->accumulate;
    } else {
        t->c = t->buffer;
        t->ldc = t->ldb;
        t->padded = true;
    }
    t->add = t->add || s->k0 > 0;
    if (p->buffer_floats) return;
    t->buffer = t->c;
    t->ldb = t->ldc;
}

/* Runs a tile when its inputs are ready; returns the next ticket. */
static int64_t run_tile(const run *r, tile t, int64_t worker) {
    const plan *p = r->plan;
    const step *s = &t.block;
    const gemm_result *c = &r->call->c;
    progress *done = r->progress;
    int64_t packs = p->a_tasks + p->b_tasks, ki = s->index % p->blocks_k, next;
    /* It may read what the previous step packed; earlier steps are done, since packing waits for tiles. */
    for (int64_t i = vjp_max(0, s->index - 1); i <= s->index; i++)
        vjp_cpu_wait(&done->packed[i % RING], count_up_to(i, packs));
    if (p->blocks_k > 1) vjp_cpu_wait(&done->tile[t.index], s->index);
    if (t.m <= 0 || t.n <= 0) {
        next = take_ticket(r);
    } else {
        place_tile(r, worker, &t);
        int64_t count = terms_of(p, t.item, s->k0);
        if (r->call->blas) {
            multiply_blas(r, &t, count);
            next = take_ticket(r);
        } else {
            next = multiply_builtin(r, &t, count);
        }
        for (int64_t i = 0; !p->direct && ki == p->blocks_k - 1 && i < t.m; i++)
            store_sums(c, t.item * c->item_row + s->m0 + t.i + i, s->n0 + t.j, t.n, t.c + i * t.ldc);
    }
    if (p->blocks_k > 1) atomic_store_explicit(&done->tile[t.index], s->index + 1, memory_order_release);
    add_one(&done->multiplied[s->index % RING]);
    return next;
}

/* ---- Running -----------------------------------------------------------------------------------------  */

/* Packs some units for a step, once the tiles that read the same buffer are done. */
static void run_packing(const run *r, int64_t index, int64_t task) {
    const plan *p = r->plan;
    step s = step_of(r, index);
    bool is_a = task < p->a_tasks;
    int64_t size = is_a ? p->units_a_task : p->units_b_task, first = (is_a ? task : task - p->a_tasks) * size;
    int64_t units = units_of(p, r->call, is_a);
    /* Steps up to index - 4 are done: the packing of step index - 2 waited for them. */
    for (int64_t i = vjp_max(0, index - 3); i <= index - 2; i++)
        vjp_cpu_wait(&r->progress->multiplied[i % RING], count_up_to(i, p->tiles));
    for (int64_t u = first; (is_a ? s.pack_a : s.pack_b) && u < vjp_min(units, first + size); u++)
        if (r->call->blas)
            copy_unit(r, &s, is_a, u);
        else
            pack_unit(r, &s, is_a, u);
    add_one(&r->progress->packed[index % RING]);
}

/*
 * Tickets in order: the packing of step 0; then for each step but the last the packing of the next step and its own
 * tiles; then the tiles of the last step. Returns the task within the step: packing from 0, tiles from `packs`.
 */
static int64_t task_of(const plan *p, int64_t ticket, int64_t *step_index) {
    int64_t packs = p->a_tasks + p->b_tasks, cycle = packs + p->tiles;
    *step_index = 0;
    if (ticket < packs) return ticket;
    ticket -= packs;
    *step_index = vjp_min(ticket / cycle, p->steps - 1);
    int64_t task = ticket - *step_index * cycle;
    if (*step_index == p->steps - 1) return task + packs;
    if (task < packs) ++*step_index;
    return task;
}

static tile tile_of_ticket(const run *r, int64_t ticket) {
    const plan *p = r->plan;
    int64_t index, packs = p->a_tasks + p->b_tasks, task = task_of(p, ticket, &index);
    if (ticket >= p->tickets || task < packs) return (tile){0};
    step s = step_of(r, index);
    return tile_at(r, &s, task - packs);
}

static void run_worker(void *argument, size_t worker) {
    const run *r = argument;
    const plan *p = r->plan;
    engine_begin();
    for (int64_t ticket = take_ticket(r); ticket < p->tickets;) {
        int64_t index, packs = p->a_tasks + p->b_tasks, task = task_of(p, ticket, &index);
        if (task < packs) {
            run_packing(r, index, task);
            ticket = take_ticket(r);
        } else {
            ticket = run_tile(r, tile_of_ticket(r, ticket), (int64_t)worker);
        }
    }
    engine_end();
}

/* Partial sums of a split along K are added for this many columns of a row at a time. */
enum { ADD_COLUMNS = 256 };

typedef struct addition {
    const run *run;
    int64_t chunks, count, count_task; /* per row; in all; per task */
} addition;

static void add_splits_task(void *argument, size_t task) {
    const addition *add = argument;
    const run *r = add->run;
    const plan *p = r->plan;
    int64_t first = (int64_t)task * add->count_task;
    for (int64_t q = first; q < vjp_min(add->count, first + add->count_task); q++) {
        int64_t row = q / add->chunks, column = q % add->chunks * ADD_COLUMNS;
        int64_t count = vjp_min(ADD_COLUMNS, p->n - column);
        double total[ADD_COLUMNS] = {0};
        float sums[ADD_COLUMNS];
        for (int64_t split = 0; split < p->items; split++) {
            const float *from = r->splits + (split * p->m + row) * p->n + column;
            for (int64_t j = 0; j < count; j++)
                total[j] += (double)from[j];
        }
        for (int64_t j = 0; j < count; j++)
            sums[j] = (float)total[j];
        store_sums(&r->call->c, row, column, count, sums);
    }
}

static void add_splits(const vjp_work *work, const run *r) {
    const plan *p = r->plan;
    addition add = {.run = r, .chunks = vjp_divide_up(p->n, ADD_COLUMNS)};
    add.count = p->m * add.chunks;
    add.count_task = vjp_max(1, TASK_FLOATS / (p->items * vjp_min(ADD_COLUMNS, p->n)));
    vjp_cpu_for(work, vjp_divide_up(add.count, add.count_task), add_splits_task, &add);
}

/* The workspace: progress, packed operands (two sets if there are several steps), tile buffers, partial sums. */
static int64_t sets_of(const plan *p) {
    return p->steps > 1 ? 2 : 1;
}

/* Rounded to whole cache lines, to align what follows. */
static size_t progress_bytes(const plan *p) {
    return whole_lines((int64_t)sizeof(progress) + p->tiles * (int64_t)sizeof(_Atomic int64_t));
}

/* The choice depends on sizes and types alone. */
#if defined(VJP_HAVE_AMX) && !defined(CPU_ISA_AMX)
enum { MIN_FOR_AMX = 32 };

size_t vjp_cpu_gemm_workspace_amx(const gemm_call *call);
void vjp_cpu_gemm_amx(const vjp_work *work, const gemm_call *call, void *workspace);

static bool suits_amx(const gemm_call *call) {
    return call->amx && !call->blas && (call->a.dtype != VJP_F32 || call->b.dtype != VJP_F32) &&
           vjp_min(call->n, call->k) >= MIN_FOR_AMX && (call->m >= MIN_FOR_AMX || call->fixed_rows);
}
#endif

/* ---- Few rows ----------------------------------------------------------------------------------------  */

#ifdef CPU_ISA_AMX
#include "cpu/gemm/gemm_few_amx.h"
#else
#include "cpu/gemm/gemm_few_fma.h"
#endif

typedef struct few_rows {
    const gemm_call *call;
    const void *packed; /* a */
    cpu_split split;    /* of blocks of FEW_COLUMNS columns */
} few_rows;

static void few_rows_task(void *argument, size_t task) {
    const few_rows *f = argument;
    const gemm_call *call = f->call;
    _Alignas(CACHE_LINE) float sums[FEW_ROWS][FEW_COLUMNS];
    begin_few_rows(call->m);
    for (int64_t i = cpu_split_begin(&f->split, task); i < cpu_split_end(&f->split, task); i++) {
        /* The last block begins earlier where it would be short; what the one before it has stored is left out. */
        int64_t first = i * FEW_COLUMNS, column = vjp_min(first, call->n - FEW_COLUMNS), skip = first - column;
        few_block(call, f->packed, column, sums);
        for (int64_t r = 0; r < call->m; r++)
            store_sums(&call->c, r, first, FEW_COLUMNS - skip, sums[r] + skip);
    }
    end_few_rows();
}

static void run_few_rows(const vjp_work *work, const gemm_call *call, void *workspace) {
    int64_t block_bytes = FEW_COLUMNS * call->k * (int64_t)dtype_bytes(call->b.dtype);
    few_rows f = {.call = call, .packed = workspace};
    pack_few_rows(call, workspace);
    f.split = vjp_cpu_split_items(vjp_divide_up(call->n, FEW_COLUMNS), block_bytes, CPU_MAX_TASKS);
    vjp_cpu_for(work, f.split.count, few_rows_task, &f);
}

size_t CPU_NAME(gemm_workspace)(const gemm_call *call) {
#if defined(VJP_HAVE_AMX) && !defined(CPU_ISA_AMX)
    if (suits_amx(call)) return vjp_cpu_gemm_workspace_amx(call);
#endif
    if (call->items == 0 || call->m == 0 || call->n == 0) return 0;
    if (suits_few_rows(call)) return few_rows_bytes(call);
    int64_t splits = splits_of(call);
    plan p = plan_of(call, splits);
    int64_t floats = p.group * (p.a_floats + p.b_floats) * sets_of(&p) + p.buffers * p.buffer_floats;
    if (splits > 1) floats += p.items * p.m * p.n;
    return (size_t)floats * sizeof(float) + progress_bytes(&p);
}

void CPU_NAME(gemm)(const vjp_work *work, const gemm_call *call, void *workspace) {
#if defined(VJP_HAVE_AMX) && !defined(CPU_ISA_AMX)
    if (suits_amx(call)) {
        vjp_cpu_gemm_amx(work, call, workspace);
        return;
    }
#endif
    if (call->items == 0 || call->m == 0 || call->n == 0) return;
    if (suits_few_rows(call)) {
        run_few_rows(work, call, workspace);
        return;
    }
    int64_t splits = splits_of(call);
    plan p = plan_of(call, splits);
    gemm_call batch = *call;
    if (splits > 1) {
        /* Item i of the batch is the terms from i * p.k. */
        *(batch.a.transposed ? &batch.a.item_row : &batch.a.item_column) = p.k;
        *(batch.a.transposed ? &batch.a.item_column : &batch.a.item_row) = 0;
        *(batch.b.transposed ? &batch.b.item_column : &batch.b.item_row) = p.k;
        *(batch.b.transposed ? &batch.b.item_row : &batch.b.item_column) = 0;
    }
    run r = {.call = &batch, .plan = &p, .progress = memset(workspace, 0, progress_bytes(&p))};
    float *at = (float *)(void *)((char *)workspace + progress_bytes(&p));
    for (int64_t set = 0; set < 2; set++) {
        int64_t used = vjp_min(set, sets_of(&p) - 1);
        r.a[set] = at + used * p.group * p.a_floats;
        r.b[set] = at + sets_of(&p) * p.group * p.a_floats + used * p.group * p.b_floats;
    }
    at += sets_of(&p) * p.group * (p.a_floats + p.b_floats);
    r.buffer = at;
    at += p.buffers * p.buffer_floats;
    if (splits > 1) r.splits = at;
    vjp_cpu_for(work, p.workers, run_worker, &r);
    if (splits > 1) add_splits(work, &r);
}

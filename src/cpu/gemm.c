/*
 * The driver of the matrix products (gemm.h).
 *
 * A product is cut into blocks of about 1024 x 4096 with 1024 terms (or 1024 x 1024 with 4096), and a block into tiles,
 * the tasks of the pool. What several tiles of a block share is packed once, by tasks of its own that run among the
 * tiles of the block before: two sets of packed operands take turns, and the threads meet once a block. Where nothing
 * is shared (a few rows, a few columns) a tile packs its panel on the stack, so that a product of one row reads b once
 * and writes no copy.
 *
 * A product with few tiles and many terms (the gradient of a small weight over many rows) is cut along the terms too:
 * each part is an item of a batch, and the parts are added in order, in double.
 *
 * BLAS runs under the same driver: operands that are f32 in memory are used where they are, others are copied as f32 in
 * place of being packed, and a tile is one call on one thread. All cuts depend on the sizes alone.
 */
#include "cpu/gemm.h"
#include "cpu/blas.h"
#include "cpu/gemm_kernel.h"

/*
 * A block's sides: BLOCK rows by up to BLOCK_N columns, or terms where there are fewer columns. The threads meet once a
 * block, so a large one loses less to waiting: with 16 threads and 1024 x 1024 x 4096, 1200 GFLOP/s at 1024 columns,
 * 1300 at 2048, 1670 at 4096. A packed operand of a block is 16 MiB at most.
 */
enum { BLOCK = 1024, BLOCK_N = 4 * BLOCK, BLOCK_FLOATS = BLOCK * BLOCK };

/*
 * A tile: 112 x 128 with AVX-512, so 57 KiB of sums and a quarter MiB of operands for GEMM_DEPTH terms; 1024 x 1024
 * makes 80 of them, five each for 16 threads. BLAS packs for itself and wants more to do in a call.
 */
enum { TILE_M = 112 / GEMM_ROWS * GEMM_ROWS, TILE_N = 128 / GEMM_COLUMNS * GEMM_COLUMNS };
enum { BLAS_TILE_M = 256, BLAS_TILE_N = 512, BLAS_STRIP = 64 };

/* The least multiply-adds and packed floats that a task is worth: about 5 us each. */
enum { TASK_MACS = 1 << 18, TASK_FLOATS = 1 << 14 };

/* Parts of a product cut along its terms: where there are fewer tiles than this, in parts of at least so many terms. */
enum { SPLIT_TILES = 16, SPLIT_TILE_SIDE = 128, SPLIT_TERMS = 8 * GEMM_DEPTH };

/* What 32-bit BLAS takes for a dimension or a stride. */
enum { BLAS_LIMIT = INT32_MAX };

typedef struct plan {
    int64_t items, m, n, k;            /* of the batch that is run: the call's, or its parts */
    int64_t k_total;                   /* terms of all parts; item i has min(k, k_total - i * k) */
    int64_t group;                     /* items in a block; more than 1 only if each is one block */
    int64_t block_m, block_n, block_k; /* multiples of a panel for the built-in kernel */
    int64_t groups, blocks_m, blocks_n, blocks_k, steps;
    int64_t tile_m, tile_n;
    bool pack_a, pack_b;                    /* into the workspace, before the tiles; else in the tile or not at all */
    bool direct;                            /* sums go straight to plain rows; else through a tile's own buffer */
    int64_t a_panels, b_panels, depths;     /* of a block */
    int64_t a_floats, b_floats, sum_floats; /* an item's share of a buffer */
    int64_t tiles_m, tiles_n;
} plan;

/* `size` in equal blocks of at most about `limit`, each a multiple of `step` (the last may be less). */
static int64_t block_of(int64_t size, int64_t limit, int64_t step) {
    int64_t blocks = most(1, divide_up(size, most(limit, step)));
    return most(1, divide_up(divide_up(size, blocks), step)) * step;
}

static void plan_blocks_builtin(plan *p) {
    int64_t k = most(1, p->k);
    p->tile_m = TILE_M;
    p->tile_n = TILE_N;
    p->pack_b = p->m > TILE_M;
    p->pack_a = !p->pack_b || p->n > TILE_N;
    p->block_m = block_of(p->m, p->pack_a ? BLOCK : BLOCK_FLOATS / TILE_N, GEMM_ROWS);
    p->block_n = block_of(p->n, p->pack_b ? BLOCK_N : BLOCK_FLOATS / TILE_M, GEMM_COLUMNS);
    int64_t terms = p->pack_a && p->pack_b ? (int64_t)BLOCK * BLOCK_N / most(BLOCK, p->block_n)
                                           : BLOCK_FLOATS / (p->pack_b ? TILE_N : TILE_M);
    p->block_k = block_of(k, terms, GEMM_DEPTH);
    p->a_panels = p->block_m / GEMM_ROWS;
    p->b_panels = p->block_n / GEMM_COLUMNS;
    p->depths = p->block_k / GEMM_DEPTH;
    p->a_floats = p->pack_a ? p->depths * p->a_panels * GEMM_A_PANEL : 0;
    p->b_floats = p->pack_b ? p->depths * p->b_panels * GEMM_B_PANEL : 0;
}

static void plan_blocks_blas(plan *p, const gemm_call *call) {
    p->tile_m = BLAS_TILE_M;
    p->tile_n = BLAS_TILE_N;
    p->pack_a = call->a.read || call->a.stride > BLAS_LIMIT;
    p->pack_b = call->b.read || call->b.stride > BLAS_LIMIT;
    p->block_k = block_of(p->k, p->pack_a || p->pack_b ? BLOCK : BLAS_LIMIT, 1);
    p->block_m = block_of(p->m, BLOCK, 1);
    p->block_n = block_of(p->n, BLOCK, 1);
    p->a_floats = p->pack_a ? p->block_m * p->block_k : 0;
    p->b_floats = p->pack_b ? p->block_n * p->block_k : 0;
}

static plan plan_of(const gemm_call *call, int64_t parts) {
    plan p = {.items = call->items, .m = call->m, .n = call->n, .k = call->k, .k_total = call->k};
    if (parts > 1) {
        p.k = divide_up(divide_up(call->k, parts), GEMM_DEPTH) * GEMM_DEPTH;
        p.items = divide_up(call->k, p.k);
    } else {
        p.k_total = p.k * p.items;
    }
    if (call->blas)
        plan_blocks_blas(&p, call);
    else
        plan_blocks_builtin(&p);
    p.direct = parts > 1 || (!call->c.finish && call->c.stride <= BLAS_LIMIT);
    p.tiles_m = divide_up(p.block_m, p.tile_m);
    p.tiles_n = divide_up(p.block_n, p.tile_n);
    p.sum_floats = p.direct ? 0 : p.tiles_m * p.tiles_n * p.tile_m * p.tile_n;
    p.blocks_m = divide_up(p.m, p.block_m);
    p.blocks_n = divide_up(p.n, p.block_n);
    p.blocks_k = most(1, divide_up(p.k, p.block_k));
    p.group = 1;
    if (p.blocks_m * p.blocks_n * p.blocks_k == 1) {
        int64_t largest = most(most(p.a_floats, p.b_floats), most(p.sum_floats, 1));
        p.group = most(1, least(p.items, BLOCK_FLOATS / largest));
    }
    p.groups = divide_up(p.items, p.group);
    p.steps = p.groups * p.blocks_m * p.blocks_n * p.blocks_k;
    return p;
}

/* By the sizes alone, whatever the instruction set: cutting along the terms changes the bits. */
static int64_t parts_of(const gemm_call *call) {
    int64_t tiles = divide_up(call->m, SPLIT_TILE_SIDE) * divide_up(call->n, SPLIT_TILE_SIDE);
    if (call->items != 1 || tiles >= SPLIT_TILES || call->m == 0 || call->n == 0) return 1;
    return most(1, least(call->k / SPLIT_TERMS, BLOCK_FLOATS / (call->m * call->n)));
}

/* ---- One block under way ----------------------------------------------------------------------------- */

typedef struct step {
    int64_t item, items, m0, m, n0, n, k0;
    float *a, *b; /* packed */
} step;

typedef struct run {
    const gemm_call *call;
    const plan *plan;
    float *sums;
    float *parts; /* where a product is cut along its terms: each part's [m, n] */
    step now, next;
    bool pack_a, pack_b; /* for `next`, in this phase */
    int64_t a_units, b_units, units_a_task, units_b_task, a_tasks, b_tasks;
    int64_t tiles, tiles_task;
} run;

static int64_t depth_of(const plan *p, int64_t item, int64_t k0) {
    int64_t k = least(p->k, p->k_total - item * p->k);
    return most(0, least(p->block_k, k - k0));
}

static step step_of(const plan *p, int64_t index) {
    int64_t ki = index % p->blocks_k, rest = index / p->blocks_k;
    int64_t ni = rest % p->blocks_n, mi = rest / p->blocks_n % p->blocks_m, group = rest / p->blocks_n / p->blocks_m;
    step s = {.item = group * p->group, .m0 = mi * p->block_m, .n0 = ni * p->block_n, .k0 = ki * p->block_k};
    s.items = least(p->group, p->items - s.item);
    s.m = least(p->block_m, p->m - s.m0);
    s.n = least(p->block_n, p->n - s.n0);
    return s;
}

/* Rows as stored, from (row, column) on: where they are, or made in `buffer`. */
INLINE const float *stored_row(const gemm_operand *o, int64_t item, int64_t row, int64_t column, int64_t count,
                               float *buffer) {
    row += item * o->item_row;
    column += item * o->item_column;
    if (!o->read) return o->plain + row * o->stride + column;
    o->read(o->source, row, column, count, buffer);
    return buffer;
}

/* Panels of a from row i on, `rows` of them, GEMM_A_PANEL apart. */
static void pack_a_panels(const gemm_operand *o, int64_t item, int64_t i, int64_t rows, int64_t k, int64_t depth,
                          float *to) {
    if (o->transposed) {
        float buffer[GEMM_STRIP * GEMM_ROWS];
        for (int64_t t = 0; t < depth; t++)
            gemm_pack_term(stored_row(o, item, k + t, i, rows, buffer), rows, GEMM_ROWS, GEMM_A_PANEL,
                           to + t * GEMM_ROWS);
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        float *row = to + r / GEMM_ROWS * GEMM_A_PANEL + r % GEMM_ROWS * GEMM_ROW_STRIDE;
        const float *from = stored_row(o, item, i + r, k, depth, row);
        if (from != row) memcpy(row, from, (size_t)depth * sizeof *row);
    }
}

static void pack_b_panels(const gemm_operand *o, int64_t item, int64_t j, int64_t columns, int64_t k, int64_t depth,
                          float *to) {
    if (!o->transposed) {
        float buffer[GEMM_STRIP * GEMM_COLUMNS];
        for (int64_t t = 0; t < depth; t++)
            gemm_pack_term(stored_row(o, item, k + t, j, columns, buffer), columns, GEMM_COLUMNS, GEMM_B_PANEL,
                           to + t * GEMM_COLUMNS);
        return;
    }
    static const float zeros[GEMM_DEPTH];
    float made[NATIVE_LANES * GEMM_DEPTH];
    for (int64_t c = 0; c < divide_up(columns, GEMM_COLUMNS) * GEMM_COLUMNS; c += NATIVE_LANES) {
        const float *rows[NATIVE_LANES];
        for (int l = 0; l < NATIVE_LANES; l++)
            rows[l] = c + l < columns ? stored_row(o, item, j + c + l, k, depth, made + l * GEMM_DEPTH) : zeros;
        gemm_pack_turned(rows, depth, to + c / GEMM_COLUMNS * GEMM_B_PANEL + c % GEMM_COLUMNS);
    }
}

/* Unit u of packing an operand of a block: for one item, GEMM_DEPTH terms of a strip of panels. */
static void pack_unit(const run *r, bool is_a, int64_t u) {
    const plan *p = r->plan;
    const step *s = &r->next;
    const gemm_operand *o = is_a ? &r->call->a : &r->call->b;
    int64_t panels = is_a ? p->a_panels : p->b_panels, side = is_a ? GEMM_ROWS : GEMM_COLUMNS;
    int64_t strips = divide_up(panels, GEMM_STRIP);
    int64_t strip = u % strips, d = u / strips % p->depths, item = u / strips / p->depths;
    int64_t first = strip * GEMM_STRIP, from = first * side, extent = is_a ? s->m : s->n;
    int64_t count = least(least(GEMM_STRIP, panels - first) * side, extent - from);
    int64_t depth = least(GEMM_DEPTH, depth_of(p, s->item + item, s->k0) - d * GEMM_DEPTH);
    if (count <= 0 || depth <= 0) return;
    int64_t panel = d * panels + first, k = s->k0 + d * GEMM_DEPTH;
    if (is_a)
        pack_a_panels(o, s->item + item, s->m0 + from, count, k, depth,
                      s->a + item * p->a_floats + panel * GEMM_A_PANEL);
    else
        pack_b_panels(o, s->item + item, s->n0 + from, count, k, depth,
                      s->b + item * p->b_floats + panel * GEMM_B_PANEL);
}

/* The same for BLAS: a few rows of the block as stored, in f32. */
static int64_t stored_rows(const plan *p, const gemm_operand *o, bool is_a) {
    return o->transposed == is_a ? p->block_k : is_a ? p->block_m : p->block_n;
}

static int64_t stored_columns(const plan *p, const gemm_operand *o, bool is_a) {
    return o->transposed != is_a ? p->block_k : is_a ? p->block_m : p->block_n;
}

static void copy_unit(const run *r, bool is_a, int64_t u) {
    const plan *p = r->plan;
    const step *s = &r->next;
    const gemm_operand *o = is_a ? &r->call->a : &r->call->b;
    bool terms_down = o->transposed == is_a; /* the rows as stored are terms */
    int64_t strips = divide_up(stored_rows(p, o, is_a), BLAS_STRIP), stride = stored_columns(p, o, is_a);
    int64_t strip = u % strips, item = u / strips, depth = depth_of(p, s->item + item, s->k0);
    int64_t across0 = is_a ? s->m0 : s->n0, across = is_a ? s->m : s->n;
    int64_t row0 = terms_down ? s->k0 : across0, rows = terms_down ? depth : across;
    int64_t column0 = terms_down ? across0 : s->k0, columns = terms_down ? across : depth;
    float *to = is_a ? s->a + item * p->a_floats : s->b + item * p->b_floats;
    for (int64_t i = strip * BLAS_STRIP; i < least(rows, (strip + 1) * BLAS_STRIP); i++) {
        float *row = to + i * stride;
        const float *from = stored_row(o, s->item + item, row0 + i, column0, columns, row);
        if (from != row) memcpy(row, from, (size_t)columns * sizeof *row);
    }
}

/* ---- A tile ------------------------------------------------------------------------------------------ */

typedef struct tile {
    int64_t item;       /* of the batch */
    int64_t slot;       /* of the block's items */
    int64_t i, j, m, n; /* in the block */
    float *c;
    int64_t ldc;
    bool padded; /* c has room for whole panels */
    bool add;    /* the first terms add to c */
} tile;

/* Rows of one panel of a by one panel of b; a panel that hangs over the edge of c goes through a buffer. */
INLINE void multiply_panels(bool by_terms, const tile *t, int64_t i, int64_t j, int64_t depth, const float *a,
                            const float *b, bool add) {
    int64_t rows = least(GEMM_ROWS, t->m - i), columns = t->n - j;
    float *c = t->c + i * t->ldc + j;
    if (t->padded || columns >= GEMM_COLUMNS) {
        gemm_rows(by_terms, rows, depth, a, b, c, t->ldc, add);
        return;
    }
    float edge[GEMM_ROWS * GEMM_COLUMNS];
    gemm_rows(by_terms, rows, depth, a, b, edge, GEMM_COLUMNS, false);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t q = 0; q < columns; q++)
            c[r * t->ldc + q] = add ? c[r * t->ldc + q] + edge[r * GEMM_COLUMNS + q] : edge[r * GEMM_COLUMNS + q];
}

/* All panels of a tile for one run of at most GEMM_DEPTH terms, each operand from the workspace or packed here. */
INLINE void multiply_depth(const run *r, const tile *t, bool by_terms, int64_t d, int64_t depth, bool add) {
    const plan *p = r->plan;
    const step *s = &r->now;
    const gemm_call *call = r->call;
    int64_t k = s->k0 + d * GEMM_DEPTH;
    const float *a = s->a + t->slot * p->a_floats + (d * p->a_panels + t->i / GEMM_ROWS) * GEMM_A_PANEL;
    const float *b = s->b + t->slot * p->b_floats + (d * p->b_panels + t->j / GEMM_COLUMNS) * GEMM_B_PANEL;
    if (!p->pack_a) {
        float panel[GEMM_A_PANEL];
        for (int64_t i = 0; i < t->m; i += GEMM_ROWS) {
            pack_a_panels(&call->a, t->item, s->m0 + t->i + i, least(GEMM_ROWS, t->m - i), k, depth, panel);
            for (int64_t j = 0; j < t->n; j += GEMM_COLUMNS)
                multiply_panels(by_terms, t, i, j, depth, panel, b + j / GEMM_COLUMNS * GEMM_B_PANEL, add);
        }
        return;
    }
    float panel[GEMM_B_PANEL];
    for (int64_t j = 0; j < t->n; j += GEMM_COLUMNS) {
        const float *column = b + j / GEMM_COLUMNS * GEMM_B_PANEL;
        if (!p->pack_b) {
            pack_b_panels(&call->b, t->item, s->n0 + t->j + j, least(GEMM_COLUMNS, t->n - j), k, depth, panel);
            column = panel;
        }
        for (int64_t i = 0; i < t->m; i += GEMM_ROWS)
            multiply_panels(by_terms, t, i, j, depth, a + i / GEMM_ROWS * GEMM_A_PANEL, column, add);
    }
}

static void multiply_builtin(const run *r, const tile *t, int64_t terms) {
    int64_t d = 0;
    do {
        int64_t depth = least(GEMM_DEPTH, terms - d * GEMM_DEPTH);
        if (r->call->a.transposed)
            multiply_depth(r, t, true, d, depth, t->add || d > 0);
        else
            multiply_depth(r, t, false, d, depth, t->add || d > 0);
    } while (++d * GEMM_DEPTH < terms);
}

/* Where BLAS finds (row, column) of an operand, counted in the block, and its stride. */
static const float *blas_operand(const run *r, bool is_a, const tile *t, int64_t *stride) {
    const plan *p = r->plan;
    const step *s = &r->now;
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
    return o->plain + (t->item * o->item_row + (terms_down ? s->k0 : across)) * o->stride + t->item * o->item_column +
           (terms_down ? across : s->k0);
}

static void multiply_blas(const run *r, const tile *t, int64_t terms) {
    int64_t lda, ldb;
    const float *a = blas_operand(r, true, t, &lda), *b = blas_operand(r, false, t, &ldb);
    vjp_blas_sgemm(r->call->a.transposed, r->call->b.transposed, t->m, t->n, terms, 1, a, lda, b, ldb, t->add ? 1 : 0,
                   t->c, t->ldc);
}

/* Finished sums go where the caller wants them. */
static void finish_row(const gemm_result *c, int64_t row, int64_t column, int64_t count, const float *sums) {
    if (c->finish) {
        c->finish(c->target, row, column, count, sums);
        return;
    }
    float *to = c->plain + row * c->stride + column;
    for (int64_t j = 0; j < count; j++)
        to[j] = c->accumulate ? to[j] + sums[j] : sums[j];
}

static void run_tile(const run *r, int64_t index) {
    const plan *p = r->plan;
    const step *s = &r->now;
    const gemm_result *c = &r->call->c;
    int64_t tj = index % p->tiles_n, ti = index / p->tiles_n % p->tiles_m, slot = index / p->tiles_n / p->tiles_m;
    tile t = {.item = s->item + slot, .slot = slot, .i = ti * p->tile_m, .j = tj * p->tile_n};
    t.m = least(p->tile_m, s->m - t.i);
    t.n = least(p->tile_n, s->n - t.j);
    if (t.m <= 0 || t.n <= 0) return;
    int64_t row = s->m0 + t.i, column = s->n0 + t.j;
    if (r->parts) {
        t.c = r->parts + (t.item * p->m + row) * p->n + column;
        t.ldc = p->n;
    } else if (p->direct) {
        t.c = c->plain + (t.item * c->item_row + row) * c->stride + column;
        t.ldc = c->stride;
        t.add = c->accumulate;
    } else {
        t.c = r->sums + index * p->tile_m * p->tile_n;
        t.ldc = p->tile_n;
        t.padded = true;
    }
    t.add = t.add || s->k0 > 0;
    int64_t terms = depth_of(p, t.item, s->k0);
    if (r->call->blas)
        multiply_blas(r, &t, terms);
    else
        multiply_builtin(r, &t, terms);
    if (p->direct || s->k0 + p->block_k < p->k) return;
    for (int64_t i = 0; i < t.m; i++)
        finish_row(c, t.item * c->item_row + row + i, column, t.n, t.c + i * t.ldc);
}

/* ---- Running ----------------------------------------------------------------------------------------- */

/* The first tasks pack a of the next block, then come those that pack b, then the tiles of this one. */
static void run_task(void *argument, size_t task) {
    const run *r = argument;
    int64_t t = (int64_t)task;
    if (t < r->a_tasks + r->b_tasks) {
        bool is_a = t < r->a_tasks;
        int64_t size = is_a ? r->units_a_task : r->units_b_task, units = is_a ? r->a_units : r->b_units;
        int64_t first = (is_a ? t : t - r->a_tasks) * size;
        for (int64_t u = first; u < least(units, first + size); u++)
            if (r->call->blas)
                copy_unit(r, is_a, u);
            else
                pack_unit(r, is_a, u);
        return;
    }
    int64_t first = (t - r->a_tasks - r->b_tasks) * r->tiles_task;
    for (int64_t i = first; i < least(r->tiles, first + r->tiles_task); i++)
        run_tile(r, i);
}

static int64_t units_of(const run *r, bool is_a) {
    const plan *p = r->plan;
    if (r->call->blas) return p->group * divide_up(stored_rows(p, is_a ? &r->call->a : &r->call->b, is_a), BLAS_STRIP);
    return p->group * p->depths * divide_up(is_a ? p->a_panels : p->b_panels, GEMM_STRIP);
}

/* Packs for `next` (where asked) while the tiles of `now` run (where there is one). */
static void run_phase(const vjp_work *work, run *r, bool tiles) {
    const plan *p = r->plan;
    r->a_units = r->pack_a ? units_of(r, true) : 0;
    r->b_units = r->pack_b ? units_of(r, false) : 0;
    r->tiles = tiles ? r->now.items * p->tiles_m * p->tiles_n : 0;
    r->units_a_task = r->a_units ? most(1, r->a_units * TASK_FLOATS / most(1, p->group * p->a_floats)) : 1;
    r->units_b_task = r->b_units ? most(1, r->b_units * TASK_FLOATS / most(1, p->group * p->b_floats)) : 1;
    int64_t macs = least(p->tile_m, p->m) * least(p->tile_n, p->n) * most(1, least(p->block_k, p->k));
    r->tiles_task = most(1, TASK_MACS / most(1, macs));
    r->a_tasks = divide_up(r->a_units, r->units_a_task);
    r->b_tasks = divide_up(r->b_units, r->units_b_task);
    vjp_cpu_for(work, r->a_tasks + r->b_tasks + divide_up(r->tiles, r->tiles_task), run_task, r);
}

/* Adds the parts of a product that was cut along its terms, some columns of a row at a time. */
enum { ADD_COLUMNS = 256 };

static void add_parts_task(void *argument, size_t task) {
    const run *r = argument;
    const plan *p = r->plan;
    int64_t pieces = divide_up(p->n, ADD_COLUMNS);
    int64_t first = (int64_t)task * r->tiles_task;
    for (int64_t q = first; q < least(r->tiles, first + r->tiles_task); q++) {
        int64_t row = q / pieces, column = q % pieces * ADD_COLUMNS, count = least(ADD_COLUMNS, p->n - column);
        double total[ADD_COLUMNS] = {0};
        float sums[ADD_COLUMNS];
        for (int64_t part = 0; part < p->items; part++) {
            const float *from = r->parts + (part * p->m + row) * p->n + column;
            for (int64_t j = 0; j < count; j++)
                total[j] += (double)from[j];
        }
        for (int64_t j = 0; j < count; j++)
            sums[j] = (float)total[j];
        finish_row(&r->call->c, row, column, count, sums);
    }
}

static void add_parts(const vjp_work *work, run *r) {
    const plan *p = r->plan;
    r->tiles = p->m * divide_up(p->n, ADD_COLUMNS);
    r->tiles_task = most(1, TASK_FLOATS / (p->items * least(ADD_COLUMNS, p->n)));
    vjp_cpu_for(work, divide_up(r->tiles, r->tiles_task), add_parts_task, r);
}

/* Two sets of packed operands, where a second is ever used, then the tiles' sums, then the parts. */
static int64_t sets_of(const plan *p) {
    return p->steps > 1 ? 2 : 1;
}

size_t CPU_NAME(gemm_workspace)(const gemm_call *call) {
    if (call->items == 0 || call->m == 0 || call->n == 0) return 0;
    int64_t parts = parts_of(call);
    plan p = plan_of(call, parts);
    int64_t floats = p.group * ((p.a_floats + p.b_floats) * sets_of(&p) + p.sum_floats);
    if (parts > 1) floats += p.items * p.m * p.n;
    return (size_t)floats * sizeof(float);
}

void CPU_NAME(gemm)(const vjp_work *work, const gemm_call *call, void *workspace) {
    if (call->items == 0 || call->m == 0 || call->n == 0) return;
    int64_t parts = parts_of(call);
    plan p = plan_of(call, parts);
    gemm_call cut = *call;
    if (parts > 1) {
        /* Item i of the batch is the terms from i * p.k on. */
        *(cut.a.transposed ? &cut.a.item_row : &cut.a.item_column) = p.k;
        *(cut.a.transposed ? &cut.a.item_column : &cut.a.item_row) = 0;
        *(cut.b.transposed ? &cut.b.item_column : &cut.b.item_row) = p.k;
        *(cut.b.transposed ? &cut.b.item_row : &cut.b.item_column) = 0;
    }
    float *a[2], *b[2], *at = workspace;
    run r = {.call = &cut, .plan = &p};
    for (int64_t set = 0; set < 2; set++) {
        int64_t used = least(set, sets_of(&p) - 1);
        a[set] = at + used * p.group * p.a_floats;
        b[set] = at + sets_of(&p) * p.group * p.a_floats + used * p.group * p.b_floats;
    }
    r.sums = at + sets_of(&p) * p.group * (p.a_floats + p.b_floats);
    if (parts > 1) r.parts = r.sums + p.group * p.sum_floats;
    int a_set = 0, b_set = 0;
    for (int64_t i = -1; i < p.steps; i++) {
        r.now = r.next;
        r.pack_a = r.pack_b = false;
        if (i + 1 < p.steps) {
            step next = step_of(&p, i + 1);
            r.pack_a = p.pack_a && (i < 0 || next.item != r.now.item || next.m0 != r.now.m0 || next.k0 != r.now.k0);
            r.pack_b = p.pack_b && (i < 0 || next.item != r.now.item || next.n0 != r.now.n0 || next.k0 != r.now.k0);
            a_set ^= r.pack_a;
            b_set ^= r.pack_b;
            next.a = a[a_set];
            next.b = b[b_set];
            r.next = next;
        }
        if (i >= 0 || r.pack_a || r.pack_b) run_phase(work, &r, i >= 0);
    }
    if (parts > 1) add_parts(work, &r);
}

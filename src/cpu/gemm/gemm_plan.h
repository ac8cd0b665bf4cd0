/*
 * How a matrix product is cut (gemm.h): blocks, the tiles of a block, what is packed and what memory that takes.
 * Nothing here looks at data.
 *
 * The cuts that decide bits (along the terms) depend on the sizes alone. The tiles depend on the threads too: a number
 * is the same sums in the same order whatever tile it is in.
 */
#ifndef VJP_CPU_GEMM_PLAN_H
#define VJP_CPU_GEMM_PLAN_H

#include "cpu/gemm/gemm.h"
#ifdef CPU_ISA_AMX
#include "cpu/gemm/gemm_amx.h"
#else
#include "cpu/gemm/gemm_fma.h"
#endif

/*
 * A block's sides: at most BLOCK_N columns, and as many terms and rows as keep each operand and the result within
 * BLOCK_MOST, 16 MiB; at least BLOCK of both. A large block packs its operands less often and leaves the tiles a
 * choice.
 */
enum { BLOCK = 1024, BLOCK_N = 4 * BLOCK, BLOCK_FLOATS = BLOCK * BLOCK, BLOCK_MOST = BLOCK * BLOCK_N };

/*
 * Up to so many rows or columns nothing is shared: 112 x 128 with AVX-512. Such products are cut into tiles of this
 * size. BLAS packs for itself and wants more to do in a call.
 */
enum { TILE_M = 112 / GEMM_ROWS * GEMM_ROWS, TILE_N = 128 / GEMM_COLUMNS * GEMM_COLUMNS };
enum { BLAS_TILE_M = 256, BLAS_TILE_N = 512, BLAS_STRIP = 64 };

/*
 * Larger products are cut into tiles such that the threads finish together, of sides between these and, if possible, of
 * at most TILE_BYTES in a second-level cache of 2 MiB.
 */
enum { LEAST_TILE_M = 80, LEAST_TILE_N = 128, MOST_TILE_M = 384, MOST_TILE_N = 512 };
enum { TILE_BYTES = 1 << 20 };

/* So many more tiles than the fewest are tried along each side. */
enum { TILE_COUNTS = 12 };

/* The least packed floats that a task is worth: about 5 us. */
enum { TASK_FLOATS = 1 << 14 };

/* The tiles that end a product are cut in four, so that the threads end together. */
enum { QUARTERS = 4 };

/* Parts of a product cut along its terms: where there are fewer tiles than this, in parts of at least so many terms. */
enum { SPLIT_TILES = 16, SPLIT_TILE_SIDE = 128, SPLIT_TERMS = 8 * GEMM_DEPTH };

/* What 32-bit BLAS takes for a dimension or a stride. */
enum { BLAS_LIMIT = INT32_MAX };

/* Rows of a buffer are so much longer than a tile's: rows of a power of two would share sets of the cache. */
enum { BUFFER_PAD = 16 };

typedef struct plan {
    int64_t items, m, n, k;            /* of the batch that is run: the call's, or its parts */
    int64_t k_total;                   /* terms of all parts; item i has min(k, k_total - i * k) */
    int64_t group;                     /* items in a block; more than 1 only if each is one block */
    int64_t block_m, block_n, block_k; /* for the built-in kernel the last two are whole panels and GEMM_DEPTHs */
    int64_t groups, blocks_m, blocks_n, blocks_k, steps;
    bool pack_a, pack_b;                      /* into the workspace, before the tiles; else in the tile or not at all */
    bool a_in_slabs, b_in_slabs;              /* read where it lies, as if it were packed */
    bool direct;                              /* sums go straight to plain rows; else from a buffer to `finish` */
    bool kept;                                /* the buffer is a tile's own, from block to block; else a worker's */
    int64_t tiles_m, tiles_n, tile_m, tile_n; /* of a block; the last in a row or column may be smaller */
    int64_t a_panels, b_panels, depths;       /* of a block; of a, the tiles' panels one tile after the other */
    int64_t a_panel, b_panel;                 /* floats of a packed panel */
    gemm_pieces pieces;                       /* in which the engine packs numbers */
    int64_t a_floats, b_floats;               /* an item's share of a buffer */
    int64_t buffer_floats, buffers;
    int64_t a_tasks, b_tasks, units_a_task, units_b_task; /* that pack a block's operands */
    int64_t tiles;                                        /* of a block: a task each */
    int64_t whole, last_tasks; /* of the last block: tiles that are a task each, and all tasks */
    int64_t half_m, half_n;    /* where its other tiles are cut in four */
    int64_t tickets;           /* tasks of the product */
    int64_t workers;           /* tasks of the pool, which take tickets until there are none */
} plan;

/* `size` in equal blocks of at most about `limit`, each a multiple of `step` (the last may be less). */
static int64_t block_of(int64_t size, int64_t limit, int64_t step) {
    int64_t blocks = most(1, divide_up(size, most(limit, step)));
    return most(1, divide_up(divide_up(size, blocks), step)) * step;
}

static void plan_blocks_builtin(plan *p, const gemm_call *call) {
    int64_t k = most(1, p->k);
    p->pack_b = PACKS_ALL || p->m > TILE_M;
    p->pack_a = PACKS_ALL || !p->pack_b || p->n > TILE_N;
    p->a_in_slabs = READS_SLABS_AS_A && p->pack_a && call->a.slab_rows && !call->a.transposed;
    p->b_in_slabs = READS_SLABS_AS_B && p->pack_b && call->b.slab_rows && !call->b.transposed;
    p->block_n =
        block_of(p->n, p->pack_b ? BLOCK_N : BLOCK_FLOATS / TILE_M, p->b_in_slabs ? SLAB_COLUMNS : GEMM_COLUMNS);
    int64_t terms =
        p->pack_a && p->pack_b ? BLOCK_MOST / most(BLOCK, p->block_n) : BLOCK_FLOATS / (p->pack_b ? TILE_N : TILE_M);
    p->block_k = block_of(k, least(terms, MOST_TERMS), GEMM_DEPTH);
    int64_t rows = p->pack_a ? most(BLOCK, BLOCK_MOST / most(p->block_k, p->block_n)) : BLOCK_FLOATS / TILE_N;
    p->block_m = block_of(p->m, rows, p->pack_a ? TILE_STEP_M : GEMM_ROWS);
    p->b_panels = p->block_n / GEMM_COLUMNS;
    p->depths = p->block_k / GEMM_DEPTH;
    p->b_floats = p->pack_b && !p->b_in_slabs ? p->depths * p->b_panels * p->b_panel : 0;
}

static void plan_blocks_blas(plan *p, const gemm_call *call) {
    p->pack_a = is_made(&call->a) || call->a.stride > BLAS_LIMIT;
    p->pack_b = is_made(&call->b) || call->b.stride > BLAS_LIMIT;
    p->block_k = block_of(p->k, p->pack_a || p->pack_b ? BLOCK : BLAS_LIMIT, 1);
    p->block_m = block_of(p->m, BLOCK, 1);
    p->block_n = block_of(p->n, BLOCK, 1);
    p->a_floats = p->pack_a ? p->block_m * p->block_k : 0;
    p->b_floats = p->pack_b ? p->block_n * p->block_k : 0;
}

static void set_tiles(plan *p, int64_t tile_m, int64_t tile_n) {
    p->tile_m = tile_m;
    p->tile_n = tile_n;
    p->tiles_m = divide_up(least(p->m, p->block_m), tile_m);
    p->tiles_n = divide_up(least(p->n, p->block_n), tile_n);
    p->a_panels = p->tiles_m * divide_up(tile_m, GEMM_ROWS);
}

/*
 * The cut of a block whose last thread is done first, of those that fit into TILE_BYTES where any does. Tiles of a b in
 * slabs are a slab wide.
 */
static void choose_tiles(plan *p, int64_t threads) {
    int64_t least_over = INT64_MAX, least_time = INT64_MAX, rows = least(p->m, p->block_m),
            columns = p->block_n / GEMM_COLUMNS;
    plan best = *p;
    int64_t i0 = divide_up(rows, MOST_TILE_M), j0 = divide_up(p->block_n, MOST_TILE_N);
    int64_t j_end = least(divide_up(p->block_n, LEAST_TILE_N), j0 + TILE_COUNTS);
    if (p->b_in_slabs) j0 = j_end = p->block_n / SLAB_COLUMNS;
    for (int64_t i = i0; i <= least(divide_up(rows, LEAST_TILE_M), i0 + TILE_COUNTS); i++)
        for (int64_t j = j0; j <= j_end; j++) {
            plan q = *p;
            set_tiles(&q, divide_up(divide_up(rows, i), TILE_STEP_M) * TILE_STEP_M,
                      divide_up(columns, j) * GEMM_COLUMNS);
            int64_t edges = q.tile_m * p->pieces.a + q.tile_n * p->pieces.b, area = q.tile_m * q.tile_n;
            int64_t bytes = tile_bytes(q.tile_m * p->pieces.a, q.tile_n, least(p->k, p->block_k));
            int64_t work = area * p->pieces.a * p->pieces.b + TILE_EDGE * edges;
            int64_t time = divide_up(p->group * q.tiles_m * q.tiles_n, threads) * work;
            int64_t over = most(0, bytes - TILE_BYTES);
            if (over > least_over || (over == least_over && time >= least_time)) continue;
            least_over = over;
            least_time = time;
            best = q;
        }
    *p = best;
}

/* Rows and columns of a block's operand, as stored. */
static int64_t stored_rows(const plan *p, const gemm_operand *o, bool is_a) {
    return o->transposed == is_a ? p->block_k : is_a ? p->block_m : p->block_n;
}

static int64_t stored_columns(const plan *p, const gemm_operand *o, bool is_a) {
    return o->transposed != is_a ? p->block_k : is_a ? p->block_m : p->block_n;
}

/*
 * An operand of a block is packed in units: for one item and GEMM_DEPTH terms, a strip of about GEMM_STRIP panels. The
 * strips of a stay within a tile; b is one stretch.
 */
typedef struct packing {
    int64_t stretches, extent; /* and rows or columns of each */
    int64_t panels, count;     /* of a stretch: its panels and strips */
} packing;

static packing packing_of(const plan *p, bool is_a) {
    packing t = {.stretches = is_a ? p->tiles_m : 1, .extent = is_a ? p->tile_m : p->block_n};
    t.panels = (is_a ? p->a_panels : p->b_panels) / t.stretches;
    t.count = divide_up(t.panels, GEMM_STRIP);
    return t;
}

static int64_t units_of(const plan *p, const gemm_call *call, bool is_a) {
    if (is_a ? !p->pack_a || p->a_in_slabs : !p->pack_b || p->b_in_slabs) return 0;
    if (call->blas) return p->group * divide_up(stored_rows(p, is_a ? &call->a : &call->b, is_a), BLAS_STRIP);
    packing t = packing_of(p, is_a);
    return p->group * p->depths * t.stretches * t.count;
}

/*
 * The tasks of a product: those that pack a block, and its tiles. Of the last block the tiles for about one round of
 * all threads are cut in four, where the quarters are large enough. As many threads work as have enough to do.
 */
static void plan_tasks(plan *p, const gemm_call *call) {
    int64_t a_units = units_of(p, call, true), b_units = units_of(p, call, false), threads = call->threads;
    int64_t macs = least(p->tile_m, p->m) * least(p->tile_n, p->n) * most(1, least(p->block_k, p->k));
    p->units_a_task = most(1, a_units * TASK_FLOATS / most(1, p->group * p->a_floats));
    p->units_b_task = most(1, b_units * TASK_FLOATS / most(1, p->group * p->b_floats));
    p->a_tasks = divide_up(a_units, p->units_a_task);
    p->b_tasks = divide_up(b_units, p->units_b_task);
    bool cut = threads > 1 && !call->blas && p->pack_a && p->pack_b && macs >= QUARTERS * TASK_MACS;
    p->half_m = divide_up(p->tile_m / 2, GEMM_ROWS) * GEMM_ROWS;
    p->half_n = divide_up(p->tile_n / 2, GEMM_COLUMNS) * GEMM_COLUMNS;
    p->whole = cut ? p->tiles - least(p->tiles, threads + p->tiles % threads) : p->tiles;
    p->last_tasks = p->whole + (p->tiles - p->whole) * QUARTERS;
    p->tickets = p->steps * (p->a_tasks + p->b_tasks) + (p->steps - 1) * p->tiles + p->last_tasks;
    p->workers = least(threads, cut ? p->last_tasks : divide_up(p->tiles, most(1, TASK_MACS / most(1, macs))));
}

static plan plan_of(const gemm_call *call, int64_t parts) {
    plan p = {.items = call->items, .m = call->m, .n = call->n, .k = call->k, .k_total = call->k};
    if (parts > 1) {
        p.k = divide_up(divide_up(call->k, parts), GEMM_DEPTH) * GEMM_DEPTH;
        p.items = divide_up(call->k, p.k);
    } else {
        p.k_total = p.k * p.items;
    }
    p.pieces = pieces_of(call);
    p.a_panel = p.pieces.a * GEMM_A_PANEL;
    p.b_panel = p.pieces.b * GEMM_B_PANEL;
    if (call->blas)
        plan_blocks_blas(&p, call);
    else
        plan_blocks_builtin(&p, call);
    p.blocks_m = divide_up(p.m, p.block_m);
    p.blocks_n = divide_up(p.n, p.block_n);
    p.blocks_k = most(1, divide_up(p.k, p.block_k));
    p.group = 1;
    if (p.blocks_m * p.blocks_n * p.blocks_k == 1) {
        int64_t largest = most(p.block_m, p.block_n) * most(p.block_k, least(p.block_m, p.block_n));
        p.group = most(1, least(p.items, BLOCK_FLOATS / largest));
    }
    if (call->blas)
        set_tiles(&p, least(p.block_m, BLAS_TILE_M), least(p.block_n, BLAS_TILE_N));
    else if (p.pack_a && p.pack_b)
        choose_tiles(&p, call->threads);
    else
        set_tiles(&p, least(p.block_m, TILE_M), least(p.block_n, TILE_N));
    if (!call->blas && p.pack_a && !p.a_in_slabs) p.a_floats = p.depths * p.a_panels * p.a_panel;
    p.tiles = p.group * p.tiles_m * p.tiles_n;
    p.direct = parts > 1 || (!call->c.finish && call->c.stride <= BLAS_LIMIT);
    p.kept = !p.direct && p.blocks_k > 1;
    p.groups = divide_up(p.items, p.group);
    p.steps = p.groups * p.blocks_m * p.blocks_n * p.blocks_k;
    plan_tasks(&p, call);
    p.buffers = p.kept ? p.tiles : p.workers;
    if (!p.direct || (!call->blas && p.pack_a && p.pack_b && p.depths > 1))
        p.buffer_floats = p.tile_m * (p.tile_n + BUFFER_PAD);
    return p;
}

/* By the sizes alone, whatever the instruction set: cutting along the terms changes the bits. */
static int64_t parts_of(const gemm_call *call) {
    int64_t tiles = divide_up(call->m, SPLIT_TILE_SIDE) * divide_up(call->n, SPLIT_TILE_SIDE);
    if (call->items != 1 || tiles >= SPLIT_TILES || call->m == 0 || call->n == 0) return 1;
    return most(1, least(call->k / SPLIT_TERMS, BLOCK_FLOATS / (call->m * call->n)));
}

#endif

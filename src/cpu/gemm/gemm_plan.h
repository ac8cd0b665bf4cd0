/* SPDX-License-Identifier: MIT */
/*
 * The blocking of a matrix product (gemm.c): blocks, their tiles, what is packed, tasks, and the memory for all of it.
 * Nothing here reads data.
 *
 * Whatever decides bits (K's slices and splits) depends on the sizes alone; tiles also depend on the threads.
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
 * Blocks have at most BLOCK_N columns, and as many rows and terms as keep each operand and the result within 16 MiB
 * (MAX_BLOCK_FLOATS), but at least BLOCK of both. Large blocks pack their operands less often and leave more choice of
 * tiles.
 */
enum { BLOCK = 1024, BLOCK_N = 4 * BLOCK, BLOCK_FLOATS = BLOCK * BLOCK, MAX_BLOCK_FLOATS = BLOCK * BLOCK_N };

/*
 * With no more rows or columns than one tile (112 x 128 with AVX-512), tiles share nothing, and that operand is packed
 * within the tile. BLAS packs for itself and is more efficient with larger tiles.
 */
enum { TILE_M = 112 / GEMM_ROWS * GEMM_ROWS, TILE_N = 128 / GEMM_COLUMNS * GEMM_COLUMNS };
enum { BLAS_TILE_M = 256, BLAS_TILE_N = 512, BLAS_STRIP = 64 };

/*
 * Larger products get the tiles that let all threads finish together, with sides between these and, if possible, at
 * most TILE_BYTES of a 2 MiB second-level cache.
 */
enum { MIN_TILE_M = 80, MIN_TILE_N = 128, MAX_TILE_M = 384, MAX_TILE_N = 512 };
enum { TILE_BYTES = 1 << 20 };

/* Up to this many more tiles than the fewest are tried along each side. */
enum { TILE_COUNTS = 12 };

/* The fewest floats that are worth a packing task: about 5 us. */
enum { TASK_FLOATS = 1 << 14 };

/* The last tiles of a product are quartered, so that the threads finish together. */
enum { QUARTERS = 4 };

/* K is split where there are fewer tiles than SPLIT_TILES, into splits of at least SPLIT_TERMS. */
enum { SPLIT_TILES = 16, SPLIT_TILE_SIDE = 128, SPLIT_TERMS = 8 * GEMM_DEPTH };

/* The largest dimension or stride that a 32-bit BLAS accepts. */
enum { BLAS_LIMIT = INT32_MAX };

/* Padding of buffer rows: with a stride that is a power of two, rows would share cache sets. */
enum { BUFFER_PAD = 16 };

typedef struct plan {
    int64_t items, m, n, k;            /* of the batch that runs: the call's items, or its splits */
    int64_t k_total;                   /* over all splits; item i has min(k, k_total - i * k) */
    int64_t group;                     /* items per block; above 1 only if each item is one block */
    int64_t block_m, block_n, block_k; /* built-in: block_n is whole panels, block_k whole slices */
    int64_t groups, blocks_m, blocks_n, blocks_k, steps;
    bool pack_a, pack_b;                      /* into the workspace, before the tiles; else within the tile */
    bool a_in_slabs, b_in_slabs;              /* read in place, in the layout of packed panels */
    bool direct;                              /* sums go straight to `plain`; else through a buffer */
    bool kept;                                /* each tile keeps its buffer from block to block; else one per worker */
    int64_t tiles_m, tiles_n, tile_m, tile_n; /* per block; the last in a row or column may be smaller */
    int64_t a_panels, b_panels, slices;       /* per block; the panels of a are grouped by tile */
    int64_t a_panel, b_panel;                 /* floats of a packed panel */
    gemm_limbs limbs;                         /* per packed number */
    int64_t a_floats, b_floats;               /* packed floats per item */
    int64_t buffer_floats, buffers;
    int64_t a_tasks, b_tasks, units_a_task, units_b_task; /* packing of one block */
    int64_t tiles;                                        /* per block, one task each */
    int64_t whole, last_tasks; /* of the last block: tiles that stay whole, and all its tasks */
    int64_t half_m, half_n;    /* where the other tiles of the last block are quartered */
    int64_t tickets;           /* all tasks of the product */
    int64_t workers;           /* pool tasks, which take tickets until none are left */
} plan;

/* Divides `size` into equal blocks of at most about `limit`, each a multiple of `step`; the last may be smaller. */
static int64_t block_of(int64_t size, int64_t limit, int64_t step) {
    int64_t blocks = vjp_max(1, vjp_divide_up(size, vjp_max(limit, step)));
    return vjp_max(1, vjp_divide_up(vjp_divide_up(size, blocks), step)) * step;
}

static void plan_blocks_builtin(plan *p, const gemm_call *call) {
    int64_t k = vjp_max(1, p->k);
    p->pack_b = PACKS_ALL || p->m > TILE_M;
    p->pack_a = PACKS_ALL || !p->pack_b || p->n > TILE_N;
    p->a_in_slabs = READS_SLABS_AS_A && p->pack_a && call->a.slab_rows && !call->a.transposed;
    p->b_in_slabs = READS_SLABS_AS_B && p->pack_b && call->b.slab_rows && !call->b.transposed;
    p->block_n =
        block_of(p->n, p->pack_b ? BLOCK_N : BLOCK_FLOATS / TILE_M, p->b_in_slabs ? SLAB_COLUMNS : GEMM_COLUMNS);
    int64_t terms = p->pack_a && p->pack_b ? MAX_BLOCK_FLOATS / vjp_max(BLOCK, p->block_n)
                                           : BLOCK_FLOATS / (p->pack_b ? TILE_N : TILE_M);
    p->block_k = block_of(k, vjp_min(terms, MAX_TERMS), GEMM_DEPTH);
    int64_t rows =
        p->pack_a ? vjp_max(BLOCK, MAX_BLOCK_FLOATS / vjp_max(p->block_k, p->block_n)) : BLOCK_FLOATS / TILE_N;
    p->block_m = block_of(p->m, rows, p->pack_a ? TILE_STEP_M : GEMM_ROWS);
    p->b_panels = p->block_n / GEMM_COLUMNS;
    p->slices = p->block_k / GEMM_DEPTH;
    p->b_floats = p->pack_b && !p->b_in_slabs ? p->slices * p->b_panels * p->b_panel : 0;
}

static void plan_blocks_blas(plan *p, const gemm_call *call) {
    p->pack_a = !is_plain_f32(&call->a) || call->a.stride > BLAS_LIMIT;
    p->pack_b = !is_plain_f32(&call->b) || call->b.stride > BLAS_LIMIT;
    p->block_k = block_of(p->k, p->pack_a || p->pack_b ? BLOCK : BLAS_LIMIT, 1);
    p->block_m = block_of(p->m, BLOCK, 1);
    p->block_n = block_of(p->n, BLOCK, 1);
    p->a_floats = p->pack_a ? p->block_m * p->block_k : 0;
    p->b_floats = p->pack_b ? p->block_n * p->block_k : 0;
}

static void set_tiles(plan *p, int64_t tile_m, int64_t tile_n) {
    p->tile_m = tile_m;
    p->tile_n = tile_n;
    p->tiles_m = vjp_divide_up(vjp_min(p->m, p->block_m), tile_m);
    p->tiles_n = vjp_divide_up(vjp_min(p->n, p->block_n), tile_n);
    p->a_panels = p->tiles_m * vjp_divide_up(tile_m, GEMM_ROWS);
}

/*
 * Chooses the tiles with the shortest estimated time, among those within TILE_BYTES if there are any. With b in slabs,
 * tiles are one slab wide.
 */
static void choose_tiles(plan *p, int64_t threads) {
    int64_t best_over = INT64_MAX, best_time = INT64_MAX, rows = vjp_min(p->m, p->block_m),
            columns = p->block_n / GEMM_COLUMNS;
    plan best = *p;
    int64_t i0 = vjp_divide_up(rows, MAX_TILE_M), j0 = vjp_divide_up(p->block_n, MAX_TILE_N);
    int64_t j_end = vjp_min(vjp_divide_up(p->block_n, MIN_TILE_N), j0 + TILE_COUNTS);
    if (p->b_in_slabs) j0 = j_end = p->block_n / SLAB_COLUMNS;
    for (int64_t i = i0; i <= vjp_min(vjp_divide_up(rows, MIN_TILE_M), i0 + TILE_COUNTS); i++)
        for (int64_t j = j0; j <= j_end; j++) {
            plan q = *p;
            set_tiles(&q, vjp_round_up(vjp_divide_up(rows, i), TILE_STEP_M), vjp_divide_up(columns, j) * GEMM_COLUMNS);
            int64_t edges = q.tile_m * p->limbs.a + q.tile_n * p->limbs.b, area = q.tile_m * q.tile_n;
            int64_t bytes = tile_bytes(q.tile_m * p->limbs.a, q.tile_n, vjp_min(p->k, p->block_k));
            int64_t work = area * p->limbs.a * p->limbs.b + TILE_EDGE * edges;
            int64_t time = vjp_divide_up(p->group * q.tiles_m * q.tiles_n, threads) * work;
            int64_t over = vjp_max(0, bytes - TILE_BYTES);
            if (over > best_over || (over == best_over && time >= best_time)) continue;
            best_over = over;
            best_time = time;
            best = q;
        }
    *p = best;
}

/* Rows and columns of a block's operand in the order in which it is stored. */
static int64_t stored_rows(const plan *p, const gemm_operand *o, bool is_a) {
    return o->transposed == is_a ? p->block_k : is_a ? p->block_m : p->block_n;
}

static int64_t stored_columns(const plan *p, const gemm_operand *o, bool is_a) {
    return o->transposed != is_a ? p->block_k : is_a ? p->block_m : p->block_n;
}

/*
 * An operand of a block is packed in units: for one item and one slice of K, a strip of about GEMM_STRIP panels. The
 * panels of a are grouped by tile, and a strip never crosses a group; b is one group.
 */
typedef struct packing {
    int64_t groups, extent; /* and rows or columns of each */
    int64_t panels, count;  /* per group */
} packing;

static packing packing_of(const plan *p, bool is_a) {
    packing t = {.groups = is_a ? p->tiles_m : 1, .extent = is_a ? p->tile_m : p->block_n};
    t.panels = (is_a ? p->a_panels : p->b_panels) / t.groups;
    t.count = vjp_divide_up(t.panels, GEMM_STRIP);
    return t;
}

static int64_t units_of(const plan *p, const gemm_call *call, bool is_a) {
    if (is_a ? !p->pack_a || p->a_in_slabs : !p->pack_b || p->b_in_slabs) return 0;
    if (call->blas) return p->group * vjp_divide_up(stored_rows(p, is_a ? &call->a : &call->b, is_a), BLAS_STRIP);
    packing t = packing_of(p, is_a);
    return p->group * p->slices * t.groups * t.count;
}

/*
 * Divides a product into tasks: packing, and tiles. In the last block, the tiles of about one round of all threads are
 * quartered where the quarters are large enough. Only as many threads work as have enough to do.
 */
static void plan_tasks(plan *p, const gemm_call *call) {
    int64_t a_units = units_of(p, call, true), b_units = units_of(p, call, false), threads = call->threads;
    int64_t macs = vjp_min(p->tile_m, p->m) * vjp_min(p->tile_n, p->n) * vjp_max(1, vjp_min(p->block_k, p->k));
    p->units_a_task = vjp_max(1, a_units * TASK_FLOATS / vjp_max(1, p->group * p->a_floats));
    p->units_b_task = vjp_max(1, b_units * TASK_FLOATS / vjp_max(1, p->group * p->b_floats));
    p->a_tasks = vjp_divide_up(a_units, p->units_a_task);
    p->b_tasks = vjp_divide_up(b_units, p->units_b_task);
    bool quartered = threads > 1 && !call->blas && p->pack_a && p->pack_b && macs >= QUARTERS * TASK_MACS;
    p->half_m = vjp_round_up(p->tile_m / 2, GEMM_ROWS);
    p->half_n = vjp_round_up(p->tile_n / 2, GEMM_COLUMNS);
    p->whole = quartered ? p->tiles - vjp_min(p->tiles, threads + p->tiles % threads) : p->tiles;
    p->last_tasks = p->whole + (p->tiles - p->whole) * QUARTERS;
    p->tickets = p->steps * (p->a_tasks + p->b_tasks) + (p->steps - 1) * p->tiles + p->last_tasks;
    p->workers =
        vjp_min(threads, quartered ? p->last_tasks : vjp_divide_up(p->tiles, vjp_max(1, TASK_MACS / vjp_max(1, macs))));
}

static plan plan_of(const gemm_call *call, int64_t splits) {
    plan p = {.items = call->items, .m = call->m, .n = call->n, .k = call->k, .k_total = call->k};
    if (splits > 1) {
        p.k = vjp_round_up(vjp_divide_up(call->k, splits), GEMM_DEPTH);
        p.items = vjp_divide_up(call->k, p.k);
    } else {
        p.k_total = p.k * p.items;
    }
    p.limbs = limbs_of(call);
    p.a_panel = p.limbs.a * GEMM_A_PANEL;
    p.b_panel = p.limbs.b * GEMM_B_PANEL;
    if (call->blas)
        plan_blocks_blas(&p, call);
    else
        plan_blocks_builtin(&p, call);
    p.blocks_m = vjp_divide_up(p.m, p.block_m);
    p.blocks_n = vjp_divide_up(p.n, p.block_n);
    p.blocks_k = vjp_max(1, vjp_divide_up(p.k, p.block_k));
    p.group = 1;
    if (p.blocks_m * p.blocks_n * p.blocks_k == 1) {
        int64_t largest = vjp_max(p.block_m, p.block_n) * vjp_max(p.block_k, vjp_min(p.block_m, p.block_n));
        p.group = vjp_max(1, vjp_min(p.items, BLOCK_FLOATS / largest));
    }
    if (call->blas)
        set_tiles(&p, vjp_min(p.block_m, BLAS_TILE_M), vjp_min(p.block_n, BLAS_TILE_N));
    else if (p.pack_a && p.pack_b)
        choose_tiles(&p, call->threads);
    else
        set_tiles(&p, vjp_min(p.block_m, TILE_M), vjp_min(p.block_n, TILE_N));
    if (!call->blas && p.pack_a && !p.a_in_slabs) p.a_floats = p.slices * p.a_panels * p.a_panel;
    p.tiles = p.group * p.tiles_m * p.tiles_n;
    p.direct = splits > 1 || (!call->c.epilogue && call->c.stride <= BLAS_LIMIT);
    p.kept = !p.direct && p.blocks_k > 1;
    p.groups = vjp_divide_up(p.items, p.group);
    p.steps = p.groups * p.blocks_m * p.blocks_n * p.blocks_k;
    plan_tasks(&p, call);
    p.buffers = p.kept ? p.tiles : p.workers;
    if (!p.direct || (!call->blas && p.pack_a && p.pack_b && p.slices > 1))
        p.buffer_floats = p.tile_m * (p.tile_n + BUFFER_PAD);
    return p;
}

/* By the sizes alone, on every instruction set: splitting along K changes the bits. */
static int64_t splits_of(const gemm_call *call) {
    int64_t tiles = vjp_divide_up(call->m, SPLIT_TILE_SIDE) * vjp_divide_up(call->n, SPLIT_TILE_SIDE);
    if (call->items != 1 || tiles >= SPLIT_TILES || call->m == 0 || call->n == 0 || call->fixed_rows) return 1;
    return vjp_max(1, vjp_min(call->k / SPLIT_TERMS, BLOCK_FLOATS / (call->m * call->n)));
}

#endif

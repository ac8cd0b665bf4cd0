/* SPDX-License-Identifier: MIT */
/*
 * Convolution with channels first on the GEMM micro-kernel, without an im2col matrix, one block of positions
 * (conv2d_block.h) at a time. Two variants give the same bits; the one with the lower estimated time is taken:
 *
 *     vectors along    faster for                       cost
 *     positions        wide planes, few out channels    sums between the rows of a block are discarded
 *     out channels     small planes, 1 x 1 kernels      sums are transposed; few out channels waste lanes
 *
 * Positions alone took up to 1.6 times as long (14 x 14), channels alone 3 to 10 times (3 channels, depthwise).
 *
 * Along positions: q = row * pitch + column makes the positions of a block one long row of the copied planes, and each
 * term is that row, shifted; the micro-kernel reads it in place. Where too many sums would fall between the end of one
 * row and the start of the next, each tap along the row gets a plane of its own.
 *
 * Along out channels (`by_channels`): a number of the source, found through two offset tables, times a vector of
 * weights. Nothing is discarded, and the source may be read in place.
 *
 * Each output is FMA chains of at most GEMM_DEPTH terms, in the order (channel, tap), added in order, whatever the
 * variant, block, tile or thread.
 */
#ifndef VJP_CPU_CONV2D_PLANES_H
#define VJP_CPU_CONV2D_PLANES_H

#include <stdatomic.h>

#include "cpu/conv/conv2d_block.h"

/*
 * Positions of a block, floats of a tile's sums (384 KiB) and of the copied planes (384 KiB; as many channels at a time
 * as fit, at least one). With a tile's weights all of it stays in a 2 MiB second-level cache, and 1 MiB does not lose
 * much.
 */
enum { PLANES_POSITIONS = 1024, PLANES_SUMS = 96 << 10, PLANES_COPY = 96 << 10 };

/* Blocks and tiles are divided until each thread has PLANES_ITEMS items; a tile keeps at least this many panels. */
enum { PLANES_ITEMS = 4, PLANES_MIN_PANELS = 4, CHANNELS_MIN_PANELS = 1 };

/*
 * Cost of transposing a finished sum, in multiply-adds: about a cycle. And the slowdown of vectors that start anywhere
 * in the copy and so cross cache lines: measured with 64 channels of 56 x 56 and 128 of 28 x 28.
 */
enum { PLANES_TRANSPOSE_COST = 32 };
#define PLANES_CROSS_COST 1.0625

/* The fewest multiply-adds that are worth waking a thread: about 5 us. */
enum { PLANES_TASK_MACS = 1 << 18 };

typedef struct planes_plan {
    planes_grid grid;
    bool by_channels, in_place;
    int64_t held;               /* channels copied at a time: whole chains */
    int64_t chain;              /* channels per FMA chain, from the taps alone: chains decide bits */
    int64_t taps, terms;        /* per channel, in all */
    int64_t tile, tiles, items; /* out channels per tile; tiles and items in all */
    int64_t width, panels;      /* out channels per panel of weights, and panels */
    int64_t positions;          /* per block, including those between rows where they are computed */
    int64_t sums_stride;        /* from channel to channel, or by_channels from position to position */
    int64_t copy_floats, sums_floats, transpose_floats, offset_floats, worker_floats; /* per worker */
    double time; /* estimate, in multiply-adds of one thread */
    int64_t workers;
    cpu_split packing; /* of the panels of all groups */
    size_t weight_bytes, offset_bytes;
} planes_plan;

/* As many tiles as the sums' memory and the threads require. They change no bits. */
static void plan_tiles(const conv_sum *p, planes_plan *q) {
    int64_t blocks = q->grid.blocks_n * p->groups * q->grid.blocks_h * q->grid.blocks_w;
    int64_t panels = vjp_max(1, PLANES_SUMS / (q->positions * q->width));
    int64_t wanted = vjp_divide_up(PLANES_ITEMS * p->threads, blocks);
    int64_t fewest = q->by_channels ? CHANNELS_MIN_PANELS : PLANES_MIN_PANELS;
    if (p->threads > 1) panels = vjp_min(panels, vjp_max(fewest, vjp_divide_up(q->panels, wanted)));
    q->tile = balanced(q->panels, panels) * q->width;
    q->tiles = vjp_divide_up(p->outs, q->tile);
    q->items = blocks * q->tiles;
}

/*
 * An item costs its products (whole register blocks), the copy (once per block where all channels are held) and the
 * transposition; items do not finish together, which costs another quarter of one.
 */
static double planes_time(const conv_sum *p, const planes_plan *q) {
    int64_t side = q->by_channels ? GEMM_ROWS : GEMM_COLUMNS,
            outs = q->by_channels ? q->tile : vjp_divide_up(p->outs, q->tiles);
    int64_t computed = q->by_channels ? q->positions : q->positions - q->grid.h.extra * q->grid.pitch - q->grid.w.extra;
    double products = (double)(vjp_round_up(computed, side) * outs) * (double)q->terms;
    if (!q->by_channels) products *= PLANES_CROSS_COST;
    double copy = q->in_place ? 0 : (double)(PLANES_COPY_COST * q->grid.channel_floats * p->ins);
    if (q->held == p->ins) copy /= (double)q->tiles;
    double transposing = q->by_channels ? (double)(PLANES_TRANSPOSE_COST * q->positions * outs) : 0;
    double rounds = (double)vjp_divide_up(q->items, p->threads) + (p->threads > 1 ? 0.25 : 0);
    return rounds * (products + copy + transposing);
}

/*
 * With vectors along the out channels, a block is read in place only where it is whole planes, contiguous in memory:
 * terms from 256 planes of 56 x 56, each on a page of its own, took twice as long as copying them first.
 */
static planes_plan plan_variant(const conv_sum *p, bool by_channels, int64_t images) {
    planes_plan q = {
        .by_channels = by_channels, .width = by_channels ? GEMM_COLUMNS : GEMM_ROWS, .taps = p->h.taps * p->w.taps};
    q.terms = q.taps * p->ins;
    q.grid = grid_of(p, PLANES_POSITIONS, images, !by_channels);
    q.in_place = by_channels && q.grid.blocks_h * q.grid.blocks_w == 1 && reads_in_place(p, &q.grid);
    q.chain = vjp_max(1, GEMM_DEPTH / q.taps);
    q.held = vjp_min(p->ins, vjp_max(1, PLANES_COPY / q.grid.channel_floats / q.chain) * q.chain);
    q.positions = q.grid.images * (by_channels ? q.grid.rows * q.grid.columns : q.grid.image_floats);
    q.panels = vjp_divide_up(p->outs, q.width);
    plan_tiles(p, &q);
    q.time = planes_time(p, &q);
    return q;
}

static planes_plan plan_planes(const conv_sum *p) {
    planes_plan q = plan_variant(p, false, vjp_divide_up(p->batch * p->groups, p->threads));
    int64_t plane = p->h.out * p->w.out, images = vjp_max(1, vjp_min(p->batch, PLANES_POSITIONS / plane));
    for (int64_t n = 1; n < 2 * images; n *= 2) {
        planes_plan other = plan_variant(p, true, vjp_min(n, images));
        if (other.time < q.time) q = other;
    }
    q.copy_floats = q.in_place ? 0 : vjp_round_up(q.held * q.grid.channel_floats + PLANES_OVER, LANES);
    q.sums_stride = q.by_channels ? q.tile + LANES : vjp_round_up(q.positions, GEMM_COLUMNS) + LANES;
    q.sums_floats = (q.by_channels ? q.positions : q.tile) * q.sums_stride;
    q.transpose_floats = q.by_channels ? NATIVE_LANES * vjp_round_up(q.positions, LANES) : 0;
    q.offset_floats = q.by_channels ? vjp_round_up(q.positions, LANES) : 0;
    q.worker_floats = q.copy_floats + q.sums_floats + q.transpose_floats + q.offset_floats;
    double macs = (double)(p->batch * p->groups * p->h.out * p->w.out) * (double)(p->outs * q.terms);
    q.workers = vjp_min(vjp_min(p->threads, q.items), 1 + (int64_t)(macs / PLANES_TASK_MACS));
    q.packing = vjp_cpu_split_items(p->groups * q.panels, q.width * q.terms * (int64_t)sizeof(float), CPU_MAX_TASKS);
    q.weight_bytes = whole_lines(p->groups * q.panels * q.width * q.terms * (int64_t)sizeof(float));
    q.offset_bytes = whole_lines(q.held * q.taps * (int64_t)sizeof(int32_t));
    return q;
}

enum { PLANES_COUNTER = 64 };

static size_t planes_workspace(const conv_sum *p) {
    if (has_no_outputs(p)) return 0;
    planes_plan q = plan_planes(p);
    if (q.copy_floats > INT32_MAX) return SIZE_MAX;
    return PLANES_COUNTER + q.weight_bytes + q.offset_bytes + (size_t)(q.workers * q.worker_floats) * sizeof(float);
}

typedef struct planes_run {
    const conv_sum *sum;
    planes_plan plan;
    _Atomic int64_t *next;
    float *weights;        /* per group: panels of out channels by terms */
    int32_t *term_offsets; /* of each term of the held channels */
    float *space;          /* of the workers */
} planes_run;

/* ---- Weights ----------------------------------------------------------------------------------------- */

/* The weights of `rows` out channels from `first`, term by term, as one panel. */
INLINE void pack_terms(const conv_sum *p, vjp_dtype dtype, int64_t group, int64_t first, int64_t rows, int64_t width,
                       float *to) {
    for (int64_t in = 0; in < p->ins; in++)
        for (int64_t down = 0; down < p->h.taps; down++)
            for (int64_t across = 0; across < p->w.taps; across++, to += width)
                load_strided(dtype, p->weight.data, weight_index(p, group, first, in, down, across), p->weight_out,
                             rows, to);
}

static void pack_panel(const planes_run *r, int64_t index) {
    const conv_sum *p = r->sum;
    const planes_plan *q = &r->plan;
    int64_t group = index / q->panels, first = index % q->panels * q->width, rows = vjp_min(q->width, p->outs - first);
    float *to = r->weights + (group * q->panels * q->width + first) * q->terms;
    if (rows < q->width) memset(to, 0, (size_t)(q->terms * q->width) * sizeof *to);
    switch (p->weight.dtype) {
    case VJP_BF16: pack_terms(p, VJP_BF16, group, first, rows, q->width, to); break;
    case VJP_F16: pack_terms(p, VJP_F16, group, first, rows, q->width, to); break;
    default: pack_terms(p, VJP_F32, group, first, rows, q->width, to); break;
    }
}

static void pack_task(void *argument, size_t task) {
    const planes_run *r = argument;
    for (int64_t i = cpu_split_begin(&r->plan.packing, task); i < cpu_split_end(&r->plan.packing, task); i++)
        pack_panel(r, i);
}

/* ---- Blocks ------------------------------------------------------------------------------------------  */

/* Where the terms of a block are read: a copy, or the source itself. */
typedef struct planes_source {
    const float *numbers;
    const int32_t *at; /* position offsets, where by_channels */
} planes_source;

/* Adds `depth` terms, from term k of the held ones, the first of which is term `before` of all. */
static void multiply_chain(const planes_run *r, const planes_block *b, int64_t out, int64_t outs, int64_t before,
                           int64_t k, int64_t depth, planes_source source, float *sums) {
    const planes_plan *q = &r->plan;
    const float *weights = r->weights + (b->group * q->panels * q->width + out) * q->terms + (before + k) * q->width;
    gemm_target target = {.from_stride = q->sums_stride, .to_stride = q->sums_stride};
    for (int64_t i = 0; q->by_channels && i < outs; i += GEMM_COLUMNS)
        for (int64_t j = 0; j < b->positions; j += GEMM_ROWS) {
            target.to = sums + j * q->sums_stride + i;
            target.from = before + k == 0 ? NULL : target.to;
            gemm_left rows = {source.numbers, source.at + j, r->term_offsets + k};
            gemm_rows_in_place(vjp_min(GEMM_ROWS, b->positions - j), depth, rows, weights + i * q->terms, target);
        }
    for (int64_t j = 0; !q->by_channels && j < b->positions; j += GEMM_COLUMNS)
        for (int64_t i = 0; i < outs; i += GEMM_ROWS) {
            const float *panel = weights + i * q->terms;
            target.to = sums + i * q->sums_stride + j;
            target.from = before + k == 0 ? NULL : target.to;
            gemm_prefetch prefetch = {.a = (const char *)panel, .b = (const char *)panel};
            gemm_right planes = {.numbers = source.numbers + j, .offsets = r->term_offsets + k};
            gemm_rows_of(GEMM_ROWS, vjp_min(GEMM_ROWS, outs - i), depth, (gemm_left){.numbers = panel}, planes, target,
                         &prefetch);
        }
}

/* sums (+)= weights x source, for `outs` out channels from `out` and `count` channels from `in`. */
static void multiply_planes(const planes_run *r, const planes_block *b, int64_t out, int64_t outs, int64_t in,
                            int64_t count, planes_source source, float *sums) {
    const planes_plan *q = &r->plan;
    /* A channel with more than GEMM_DEPTH taps takes several chains. */
    int64_t chain = vjp_min(q->chain * q->taps, GEMM_DEPTH), step = vjp_max(chain, q->taps), all = count * q->taps;
    for (int64_t first = 0; first < all; first += step)
        for (int64_t k = first; k < vjp_min(all, first + step); k += chain)
            multiply_chain(r, b, out, outs, in * q->taps, k, vjp_min(chain, vjp_min(all, first + step) - k), source,
                           sums);
}

INLINE void store_run(vjp_dtype dtype, const matrix *to, int64_t at, int64_t step, int64_t count, const float *sums,
                      float bias) {
    int64_t i = 0;
    for (; step == 1 && i + LANES <= count; i += LANES) {
        vf v = vf_add(vf_load(VJP_F32, sums, i), vf_set(bias));
        if (to->accumulate) v = vf_add(vf_load(dtype, to->data, at + i), v);
        vf_store(dtype, to->data, at + i, v);
    }
    for (; i < count; i++) {
        float value = sums[i] + bias;
        if (to->accumulate) value = f32_load(dtype, to->data, at + i * step) + value;
        f32_store(dtype, to->data, at + i * step, value);
    }
}

/* Stores finished sums of some out channels, `stride` apart, laid out in planes of `image_floats` and `pitch`. */
static void store_outs(const conv_sum *p, const planes_block *b, int64_t out, int64_t outs, const float *sums,
                       int64_t stride, int64_t image_floats, int64_t pitch) {
    for (int64_t k = 0; k < outs * b->images; k++) {
        int64_t o = k / b->images, image = k % b->images, channel = b->group * p->outs + out + o;
        float bias = p->bias.data ? load_element(&p->bias, channel) : 0;
        int64_t plane = ((b->image + image) * p->groups * p->outs + channel) * p->target_h;
        for (int64_t i = 0; i < b->rows; i++) {
            int64_t h = p->h.to + (b->row + i) * p->h.to_step, w = p->w.to + b->column * p->w.to_step;
            int64_t at = (plane + h) * p->target_w + w;
            const float *from = sums + o * stride + image * image_floats + i * pitch;
            switch (p->target.dtype) {
            case VJP_BF16: store_run(VJP_BF16, &p->target, at, p->w.to_step, b->columns, from, bias); break;
            case VJP_F16: store_run(VJP_F16, &p->target, at, p->w.to_step, b->columns, from, bias); break;
            default: store_run(VJP_F32, &p->target, at, p->w.to_step, b->columns, from, bias); break;
            }
        }
    }
}

/* Transposes and stores sums by channels, one native vector of out channels at a time. */
static void store_transposed(const conv_sum *p, const planes_plan *q, const planes_block *b, int64_t out, int64_t outs,
                             const float *sums, float *transposed) {
    int64_t stride = vjp_round_up(q->positions, LANES);
    for (int64_t o = 0; o < outs; o += NATIVE_LANES) {
        for (int64_t j = 0; j < b->positions; j += NATIVE_LANES) {
            native_f square[NATIVE_LANES];
            for (int64_t i = 0; i < NATIVE_LANES; i++)
                memcpy(&square[i], sums + vjp_min(j + i, b->positions - 1) * q->sums_stride + o, sizeof square[i]);
            native_transpose(square);
            for (int64_t i = 0; i < NATIVE_LANES; i++)
                memcpy(transposed + i * stride + j, &square[i], sizeof square[i]);
        }
        store_outs(p, b, out + o, vjp_min(NATIVE_LANES, outs - o), transposed, stride, b->rows * b->columns,
                   b->columns);
    }
}

/* An item is one tile of a block. Tiles of the same block are consecutive, so that its copy can be reused. */
static void planes_item(const planes_run *r, int64_t item, float *copy, int64_t *copied) {
    const conv_sum *p = r->sum;
    const planes_plan *q = &r->plan;
    float *sums = copy + q->copy_floats, *transposed = sums + q->sums_floats;
    int32_t *at = (int32_t *)(void *)(transposed + q->transpose_floats);
    int64_t out = item % q->tiles * q->tile, outs = vjp_min(q->tile, p->outs - out), block = item / q->tiles;
    int64_t within = q->grid.blocks_w * q->grid.blocks_h, group = block / within % p->groups;
    planes_block b = block_at(p, &q->grid, block / within / p->groups * within + block % within, group);
    b.positions = q->by_channels ? b.images * b.rows * b.columns
                                 : (b.images - 1) * q->grid.image_floats + (b.rows - 1) * q->grid.pitch + b.columns;
    if (q->by_channels) set_position_offsets(p, &q->grid, q->in_place, &b, q->held, at);
    for (int64_t in = 0; in < p->ins; in += q->held) {
        int64_t count = vjp_min(q->held, p->ins - in), wanted = block * p->ins + in;
        if (!q->in_place && *copied != wanted) copy_planes(p, &q->grid, &b, in, count, copy);
        *copied = wanted;
        planes_source source = {q->in_place ? block_in_place(p, &b, in) : copy, at};
        multiply_planes(r, &b, out, outs, in, count, source, sums);
    }
    if (p->ins == 0) memset(sums, 0, (size_t)q->sums_floats * sizeof *sums);
    if (q->by_channels)
        store_transposed(p, q, &b, out, outs, sums, transposed);
    else
        store_outs(p, &b, out, outs, sums, q->sums_stride, q->grid.image_floats, q->grid.pitch);
}

static void planes_task(void *argument, size_t task) {
    const planes_run *r = argument;
    const planes_plan *q = &r->plan;
    float *space = r->space + (int64_t)task * q->worker_floats;
    int64_t copied = -1;
    for (int64_t i; (i = atomic_fetch_add(r->next, 1)) < q->items;)
        planes_item(r, i, space, &copied);
}

static void sum_planes(const vjp_work *work, const conv_sum *p, void *workspace) {
    if (has_no_outputs(p)) return;
    planes_run r = {.sum = p, .plan = plan_planes(p)};
    char *at = workspace;
    r.next = workspace;
    r.weights = (float *)(void *)(at + PLANES_COUNTER);
    r.term_offsets = (int32_t *)(void *)(at + PLANES_COUNTER + r.plan.weight_bytes);
    r.space = (float *)(void *)(at + PLANES_COUNTER + r.plan.weight_bytes + r.plan.offset_bytes);
    atomic_init(r.next, 0);
    set_term_offsets(p, &r.plan.grid, r.plan.in_place, r.plan.held, r.term_offsets);
    vjp_cpu_for(work, r.plan.packing.count, pack_task, &r);
    vjp_cpu_for(work, r.plan.workers, planes_task, &r);
}

#endif

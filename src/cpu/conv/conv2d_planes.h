/*
 * Convolution of planes (channels first) as a matrix product that needs no matrix of windows: a block of outputs
 * (conv2d_block.h) at a time, with vectors along the outputs or along the outs, whichever takes less.
 *
 * Along the outputs: output q = row * pitch + column of the copied planes makes all outputs of a block one long row,
 * the terms are that row further on, and the product's inner kernel reads them where they are. What it computes between
 * the end of an output row and the beginning of the next is thrown away; where that would be much, each tap along the
 * row gets a plane of its own and nothing lies between.
 *
 * Along the outs ("turned"): the kernel multiplies one number of the source by a vector of weights and finds the number
 * by two tables, of the terms and of the outputs. So nothing is computed in vain, planes are never copied tap by tap,
 * and the source may be read where it lies; but the finished sums must be turned, and few outs fill no vector. This is
 * the way for small planes, whose rows are shorter than a vector, and for kernels of one element.
 *
 * Each output is FMA chains of at most GEMM_DEPTH terms, in the order (channel, tap), added in order. Which way, block,
 * tile or thread it is computed in changes nothing about that.
 */
#ifndef VJP_CPU_CONV2D_PLANES_H
#define VJP_CPU_CONV2D_PLANES_H

#include <stdatomic.h>

#include "cpu/conv/conv2d_block.h"
#include "cpu/gemm/blas.h"

/*
 * Outputs of a block, the sums that a tile of them may take (384 KiB), and the floats of the copied planes (384 KiB
 * too, as many channels at a time as fit, at least one): with a tile's weights all of it stays in a second-level cache
 * of 2 MiB, and one of 1 MiB does not lose much.
 */
enum { PLANES_POSITIONS = 1024, PLANES_SUMS = 96 << 10, PLANES_COPY = 96 << 10 };

/* Blocks and tiles are cut until there are so many items for each thread, and tiles to no fewer panels than this. */
enum { PLANES_ITEMS = 4, PLANES_LEAST_PANELS = 4, TURNED_LEAST_PANELS = 1 };

/*
 * What turning a finished sum costs, in multiply-adds: about a cycle. And how much longer products take whose vectors
 * begin anywhere in the copy, and so lie across two cache lines: measured with 64 channels of 56 x 56 and 128 of 28
 * x 28.
 */
enum { PLANES_TURN_COST = 32 };
#define PLANES_CROSS_COST 1.0625

/* A BLAS may sum differently in a call of other sizes, so with one the cut is always that for so many threads. */
enum { PLANES_BLAS_THREADS = 16 };

/* The least multiply-adds that waking a thread is worth: about 5 us. */
enum { PLANES_TASK_MACS = 1 << 18 };

typedef struct planes_plan {
    planes_grid grid;
    bool turned, in_place;
    int64_t held;               /* channels copied at a time: whole chains */
    int64_t chain;              /* channels of one FMA chain, by the taps alone: where a chain ends decides bits */
    int64_t taps, terms;        /* of a channel, of all */
    int64_t tile, tiles, items; /* outs of a tile; tiles and items of all */
    int64_t width, panels;      /* outs of a panel of weights, and panels */
    int64_t positions;          /* of a block, with those between its rows where they are computed */
    int64_t sums_stride;        /* from out to out, or turned from output to output */
    int64_t copy_floats, sums_floats, turn_floats, at_floats, worker_floats; /* of a worker */
    double time;                                                             /* in multiply-adds of one thread */
    int64_t workers;
    cpu_cut packing; /* of the panels of all groups */
    size_t weight_bytes, place_bytes;
} planes_plan;

static int64_t planned_threads(const conv_sum *p) {
    return p->blas ? PLANES_BLAS_THREADS : p->threads;
}

/* As many tiles as the sums' room asks for, and as the threads do. They change no bits. */
static void plan_tiles(const conv_sum *p, planes_plan *q) {
    int64_t blocks = q->grid.blocks_n * p->groups * q->grid.blocks_h * q->grid.blocks_w;
    int64_t panels = most(1, PLANES_SUMS / (q->positions * q->width));
    int64_t threads = planned_threads(p), wanted = divide_up(PLANES_ITEMS * threads, blocks);
    int64_t fewest = q->turned ? TURNED_LEAST_PANELS : PLANES_LEAST_PANELS;
    if (threads > 1) panels = least(panels, most(fewest, divide_up(q->panels, wanted)));
    q->tile = balanced(q->panels, panels) * q->width;
    q->tiles = divide_up(p->outs, q->tile);
    q->items = blocks * q->tiles;
}

/*
 * Items cost their products, whole register blocks of them, the copy (once a block where all of it is held) and the
 * turning; since they never end together, a quarter of one is lost at the end.
 */
static double planes_time(const conv_sum *p, const planes_plan *q) {
    int64_t side = q->turned ? GEMM_ROWS : GEMM_COLUMNS, outs = q->turned ? q->tile : divide_up(p->outs, q->tiles);
    int64_t computed = q->turned ? q->positions : q->positions - q->grid.h.extra * q->grid.pitch - q->grid.w.extra;
    double products = (double)(divide_up(computed, side) * side * outs) * (double)q->terms;
    if (!q->turned) products *= PLANES_CROSS_COST;
    double copy = q->in_place ? 0 : (double)(PLANES_COPY_COST * q->grid.channel_floats * p->ins);
    if (q->held == p->ins) copy /= (double)q->tiles;
    double turning = q->turned ? (double)(PLANES_TURN_COST * q->positions * outs) : 0;
    double rounds = (double)divide_up(q->items, p->threads) + (p->threads > 1 ? 0.25 : 0);
    return rounds * (products + copy + turning);
}

/*
 * Turned, a block is read in place only where it is whole planes, one stretch of memory: a run of terms over short
 * pieces of 256 planes of 56 x 56, each from a page of its own, took twice as long as copying them first.
 */
static planes_plan plan_way(const conv_sum *p, bool turned, int64_t images) {
    planes_plan q = {.turned = turned, .width = turned ? GEMM_COLUMNS : GEMM_ROWS, .taps = p->h.taps * p->w.taps};
    q.terms = q.taps * p->ins;
    q.grid = grid_of(p, PLANES_POSITIONS, images, !turned);
    q.in_place = turned && q.grid.blocks_h * q.grid.blocks_w == 1 && reads_in_place(p, &q.grid);
    q.chain = most(1, GEMM_DEPTH / q.taps);
    q.held = least(p->ins, most(1, PLANES_COPY / q.grid.channel_floats / q.chain) * q.chain);
    q.positions = q.grid.images * (turned ? q.grid.rows * q.grid.columns : q.grid.image_floats);
    q.panels = divide_up(p->outs, q.width);
    plan_tiles(p, &q);
    q.time = planes_time(p, &q);
    return q;
}

static planes_plan plan_planes(const conv_sum *p) {
    planes_plan q = plan_way(p, false, divide_up(p->batch * p->groups, planned_threads(p)));
    int64_t plane = p->h.out * p->w.out, images = most(1, least(p->batch, PLANES_POSITIONS / plane));
    for (int64_t n = 1; !p->blas && n < 2 * images; n *= 2) {
        planes_plan other = plan_way(p, true, least(n, images));
        if (other.time < q.time) q = other;
    }
    q.copy_floats = q.in_place ? 0 : divide_up(q.held * q.grid.channel_floats + PLANES_OVER, LANES) * LANES;
    q.sums_stride = q.turned ? q.tile + LANES : divide_up(q.positions, GEMM_COLUMNS) * GEMM_COLUMNS + LANES;
    q.sums_floats = (q.turned ? q.positions : q.tile) * q.sums_stride;
    q.turn_floats = q.turned ? NATIVE_LANES * divide_up(q.positions, LANES) * LANES : 0;
    q.at_floats = q.turned ? divide_up(q.positions, LANES) * LANES : 0;
    q.worker_floats = q.copy_floats + q.sums_floats + q.turn_floats + q.at_floats;
    double macs = (double)(p->batch * p->groups * p->h.out * p->w.out) * (double)(p->outs * q.terms);
    q.workers = least(least(p->threads, q.items), 1 + (int64_t)(macs / PLANES_TASK_MACS));
    q.packing = vjp_cpu_cut_items(p->groups * q.panels, q.width * q.terms * (int64_t)sizeof(float), CPU_MOST_TASKS);
    q.weight_bytes = round_up(p->groups * q.panels * q.width * q.terms * (int64_t)sizeof(float));
    q.place_bytes = round_up(q.held * q.taps * (int64_t)sizeof(int32_t));
    return q;
}

enum { PLANES_COUNTER = 64 };

static size_t planes_workspace(const conv_sum *p) {
    if (planes_are_empty(p)) return 0;
    planes_plan q = plan_planes(p);
    if (q.copy_floats > INT32_MAX) return SIZE_MAX;
    return PLANES_COUNTER + q.weight_bytes + q.place_bytes + (size_t)(q.workers * q.worker_floats) * sizeof(float);
}

typedef struct planes_run {
    const conv_sum *sum;
    planes_plan plan;
    _Atomic int64_t *next;
    float *weights;  /* of each group: panels of some outs by terms; for BLAS, [tap][out][in] */
    int32_t *places; /* of each term of the channels that are held */
    float *space;    /* of the workers */
} planes_run;

/* ---- Weights ----------------------------------------------------------------------------------------- */

/* The weights of `rows` outs from `first` on, term by term; `to` moves by `term_step` and from out to out by
 * `row_step`. */
INLINE void pack_terms(const conv_sum *p, vjp_dtype dtype, int64_t group, int64_t first, int64_t rows, float *to,
                       int64_t row_step, int64_t in_step, int64_t tap_step) {
    for (int64_t in = 0; in < p->ins; in++)
        for (int64_t down = 0; down < p->h.taps; down++)
            for (int64_t across = 0; across < p->w.taps; across++) {
                float *term = to + in * in_step + (down * p->w.taps + across) * tap_step;
                load_strided(dtype, p->weight.data, weight_place(p, group, first, in, down, across), p->weight_out,
                             rows, term, row_step);
            }
}

static void pack_panel(const planes_run *r, int64_t index) {
    const conv_sum *p = r->sum;
    const planes_plan *q = &r->plan;
    int64_t group = index / q->panels, first = index % q->panels * q->width, rows = least(q->width, p->outs - first);
    float *all = r->weights + group * q->panels * q->width * q->terms;
    float *to = p->blas ? all + first * p->ins : all + first * q->terms;
    int64_t row_step = p->blas ? p->ins : 1, in_step = p->blas ? 1 : q->taps * q->width;
    int64_t tap_step = p->blas ? p->outs * p->ins : q->width;
    if (!p->blas && rows < q->width) memset(to, 0, (size_t)(q->terms * q->width) * sizeof *to);
    switch (p->weight.dtype) {
    case VJP_BF16: pack_terms(p, VJP_BF16, group, first, rows, to, row_step, in_step, tap_step); break;
    case VJP_F16: pack_terms(p, VJP_F16, group, first, rows, to, row_step, in_step, tap_step); break;
    default: pack_terms(p, VJP_F32, group, first, rows, to, row_step, in_step, tap_step); break;
    }
}

static void pack_task(void *argument, size_t task) {
    const planes_run *r = argument;
    for (int64_t i = cpu_cut_begin(&r->plan.packing, task); i < cpu_cut_end(&r->plan.packing, task); i++)
        pack_panel(r, i);
}

/* ---- A block ----------------------------------------------------------------------------------------- */

/* What the terms of a block are read from: a copy, or the source itself. */
typedef struct planes_source {
    const float *numbers;
    const int32_t *at; /* turned: the outputs */
} planes_source;

/* Adds `depth` terms, from term k of those that are held; the first of these is term `before` of all. */
static void multiply_chain(const planes_run *r, const planes_block *b, int64_t out, int64_t outs, int64_t before,
                           int64_t k, int64_t depth, planes_source source, float *sums) {
    const planes_plan *q = &r->plan;
    const float *weights = r->weights + (b->group * q->panels * q->width + out) * q->terms + (before + k) * q->width;
    gemm_target target = {.from_stride = q->sums_stride, .to_stride = q->sums_stride};
    for (int64_t i = 0; q->turned && i < outs; i += GEMM_COLUMNS)
        for (int64_t j = 0; j < b->positions; j += GEMM_ROWS) {
            target.to = sums + j * q->sums_stride + i;
            target.from = before + k == 0 ? NULL : target.to;
            gemm_left rows = {source.numbers, source.at + j, r->places + k};
            gemm_rows_in_place(least(GEMM_ROWS, b->positions - j), depth, rows, weights + i * q->terms, target);
        }
    for (int64_t j = 0; !q->turned && j < b->positions; j += GEMM_COLUMNS)
        for (int64_t i = 0; i < outs; i += GEMM_ROWS) {
            const float *panel = weights + i * q->terms;
            target.to = sums + i * q->sums_stride + j;
            target.from = before + k == 0 ? NULL : target.to;
            gemm_ahead ahead = {.a = (const char *)panel, .b = (const char *)panel};
            gemm_right planes = {.numbers = source.numbers + j, .places = r->places + k};
            gemm_rows_of(GEMM_ROWS, least(GEMM_ROWS, outs - i), depth, (gemm_left){.numbers = panel}, planes, target,
                         &ahead);
        }
}

/* sums (+)= weights x copied planes, for `outs` outs from `out` on and `count` channels from `in` on. */
static void multiply_planes(const planes_run *r, const planes_block *b, int64_t out, int64_t outs, int64_t in,
                            int64_t count, planes_source source, float *sums) {
    const conv_sum *p = r->sum;
    const planes_plan *q = &r->plan;
    if (p->blas) {
        const float *weights = r->weights + b->group * q->panels * q->width * q->terms;
        for (int64_t tap = 0; tap < q->taps; tap++)
            vjp_blas_sgemm(false, false, outs, b->positions, count, 1, weights + (tap * p->outs + out) * p->ins + in,
                           p->ins, source.numbers + r->places[tap], q->grid.channel_floats, in + tap > 0 ? 1 : 0, sums,
                           q->sums_stride);
        return;
    }
    /* A channel of more than GEMM_DEPTH taps is several chains. */
    int64_t chain = least(q->chain * q->taps, GEMM_DEPTH), step = most(chain, q->taps), all = count * q->taps;
    for (int64_t first = 0; first < all; first += step)
        for (int64_t k = first; k < least(all, first + step); k += chain)
            multiply_chain(r, b, out, outs, in * q->taps, k, least(chain, least(all, first + step) - k), source, sums);
}

INLINE void finish_run(vjp_dtype dtype, const matrix *to, int64_t at, int64_t step, int64_t count, const float *sums,
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

/* Finished sums of some outs, `stride` from one to the next, as they lie in planes of `image_floats` and `pitch`. */
static void finish_outs(const conv_sum *p, const planes_block *b, int64_t out, int64_t outs, const float *sums,
                        int64_t stride, int64_t image_floats, int64_t pitch) {
    for (int64_t k = 0; k < outs * b->images; k++) {
        int64_t o = k / b->images, image = k % b->images, channel = b->group * p->outs + out + o;
        float bias = p->bias.data ? one_element(&p->bias, channel) : 0;
        int64_t plane = ((b->image + image) * p->groups * p->outs + channel) * p->target_h;
        for (int64_t i = 0; i < b->rows; i++) {
            int64_t h = p->h.to + (b->row + i) * p->h.to_step, w = p->w.to + b->column * p->w.to_step;
            int64_t at = (plane + h) * p->target_w + w;
            const float *from = sums + o * stride + image * image_floats + i * pitch;
            switch (p->target.dtype) {
            case VJP_BF16: finish_run(VJP_BF16, &p->target, at, p->w.to_step, b->columns, from, bias); break;
            case VJP_F16: finish_run(VJP_F16, &p->target, at, p->w.to_step, b->columns, from, bias); break;
            default: finish_run(VJP_F32, &p->target, at, p->w.to_step, b->columns, from, bias); break;
            }
        }
    }
}

/* Turned: as many outs at a time as a native vector holds. */
static void finish_turned_planes(const conv_sum *p, const planes_plan *q, const planes_block *b, int64_t out,
                                 int64_t outs, const float *sums, float *turned) {
    int64_t stride = divide_up(q->positions, LANES) * LANES;
    for (int64_t o = 0; o < outs; o += NATIVE_LANES) {
        for (int64_t j = 0; j < b->positions; j += NATIVE_LANES) {
            native_f square[NATIVE_LANES];
            for (int64_t i = 0; i < NATIVE_LANES; i++)
                memcpy(&square[i], sums + least(j + i, b->positions - 1) * q->sums_stride + o, sizeof square[i]);
            native_transpose(square);
            for (int64_t i = 0; i < NATIVE_LANES; i++)
                memcpy(turned + i * stride + j, &square[i], sizeof square[i]);
        }
        finish_outs(p, b, out + o, least(NATIVE_LANES, outs - o), turned, stride, b->rows * b->columns, b->columns);
    }
}

/* Items are a tile of a block, the tiles of one block after another: its planes may still be there. */
static void planes_item(const planes_run *r, int64_t item, float *copy, int64_t *copied) {
    const conv_sum *p = r->sum;
    const planes_plan *q = &r->plan;
    float *sums = copy + q->copy_floats, *turned = sums + q->sums_floats;
    int32_t *at = (int32_t *)(void *)(turned + q->turn_floats);
    int64_t out = item % q->tiles * q->tile, outs = least(q->tile, p->outs - out), block = item / q->tiles;
    int64_t within = q->grid.blocks_w * q->grid.blocks_h, group = block / within % p->groups;
    planes_block b = block_at(p, &q->grid, block / within / p->groups * within + block % within, group);
    b.positions = q->turned ? b.images * b.rows * b.columns
                            : (b.images - 1) * q->grid.image_floats + (b.rows - 1) * q->grid.pitch + b.columns;
    if (q->turned) set_outputs(p, &q->grid, q->in_place, &b, q->held, at);
    for (int64_t in = 0; in < p->ins; in += q->held) {
        int64_t count = least(q->held, p->ins - in), wanted = block * p->ins + in;
        if (!q->in_place && *copied != wanted) copy_planes(p, &q->grid, &b, in, count, copy);
        *copied = wanted;
        planes_source source = {q->in_place ? block_in_place(p, &b, in) : copy, at};
        multiply_planes(r, &b, out, outs, in, count, source, sums);
    }
    if (p->ins == 0) memset(sums, 0, (size_t)q->sums_floats * sizeof *sums);
    if (q->turned)
        finish_turned_planes(p, q, &b, out, outs, sums, turned);
    else
        finish_outs(p, &b, out, outs, sums, q->sums_stride, q->grid.image_floats, q->grid.pitch);
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
    if (planes_are_empty(p)) return;
    planes_run r = {.sum = p, .plan = plan_planes(p)};
    char *at = workspace;
    r.next = workspace;
    r.weights = (float *)(void *)(at + PLANES_COUNTER);
    r.places = (int32_t *)(void *)(at + PLANES_COUNTER + r.plan.weight_bytes);
    r.space = (float *)(void *)(at + PLANES_COUNTER + r.plan.weight_bytes + r.plan.place_bytes);
    atomic_init(r.next, 0);
    set_places(p, &r.plan.grid, r.plan.in_place, r.plan.held, r.places);
    vjp_cpu_for(work, r.plan.packing.count, pack_task, &r);
    vjp_cpu_for(work, r.plan.workers, planes_task, &r);
}

#endif

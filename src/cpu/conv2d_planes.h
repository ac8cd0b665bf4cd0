/*
 * Convolution of planes (channels first) as a matrix product that needs no matrix of windows.
 *
 * A block of output rows is computed at a time. The source's rows that it reads are copied into f32 planes with their
 * zeros round them, one plane for each remainder of a tap's shift by the step, `pitch` floats from row to row. Then
 * term (channel, tap) of output q = row * pitch + column is element `place of the term` + q of the copy: all outputs of
 * a block are one long row, the terms are that row further on, and the product's inner kernel reads them where they
 * are. What it computes between the end of an output row and the beginning of the next is thrown away; where that
 * would be much, each tap along the row gets a plane of its own and nothing lies between.
 *
 * Each output is FMA chains of at most GEMM_DEPTH terms, in the order (channel, tap), added in order. Which block, tile
 * or thread it is computed in changes nothing about that.
 */
#ifndef VJP_CPU_CONV2D_PLANES_H
#define VJP_CPU_CONV2D_PLANES_H

#include <stdatomic.h>

#include "cpu/blas.h"
#include "cpu/conv2d.h"
#include "cpu/gemm_kernel.h"

/*
 * Outputs of a block, the sums that a tile of them may take (384 KiB), and the floats of the copied planes (384 KiB
 * too, as many channels at a time as fit, at least one): with a tile's weights all of it stays in a second-level cache
 * of 2 MiB, and one of 1 MiB does not lose much.
 */
enum { PLANES_POSITIONS = 1024, PLANES_SUMS = 96 << 10, PLANES_COPY = 96 << 10 };

/* Floats past the end of a copy that copying may write; the inner kernel reads some there too. */
enum { PLANES_OVER = (int)GEMM_COLUMNS > (int)LANES ? (int)GEMM_COLUMNS : (int)LANES };

/* What copying a float costs, in multiply-adds of the inner kernel: half a cycle, in which AVX-512 makes 16. */
enum { PLANES_COPY_COST = 16 };

/* Blocks and tiles are cut until there are so many items for each thread, and tiles to no fewer panels than this. */
enum { PLANES_ITEMS = 4, PLANES_LEAST_PANELS = 4 };

/* A BLAS may sum differently in a call of other sizes, so with one the cut is always that for so many threads. */
enum { PLANES_BLAS_THREADS = 16 };

/* The least multiply-adds that waking a thread is worth: about 5 us. */
enum { PLANES_TASK_MACS = 1 << 18 };

/* The planes of a channel along one direction. */
typedef struct plane_axis {
    bool shared;           /* by taps whose shifts leave the same remainder; else a plane a tap */
    int64_t planes, apart; /* the shift of plane a is a * apart */
    int64_t extra;         /* rows or columns of a plane beyond the outputs' */
} plane_axis;

/* The blocks of outputs, and the copies of the source that a block reads. */
typedef struct planes_grid {
    plane_axis h, w;
    int64_t rows, columns, blocks_h, blocks_w; /* of a block; the last may be smaller */
    int64_t images, blocks_n;                  /* a block of whole planes has several images, one below the other */
    int64_t image_floats;
    int64_t pitch, plane_floats, channel_floats;
} planes_grid;

typedef struct planes_plan {
    planes_grid grid;
    int64_t held;               /* channels copied at a time: whole chains */
    int64_t chain;              /* channels of one FMA chain, by the taps alone: where a chain ends decides bits */
    int64_t taps, terms;        /* of a channel, of all */
    int64_t tile, tiles, items; /* outs of a tile; tiles and items of all */
    int64_t panels;             /* of GEMM_ROWS outs */
    int64_t sums_stride;
    int64_t copy_floats, sums_floats; /* of a worker */
    int64_t workers;
    cpu_cut packing; /* of the panels of all groups */
    size_t weight_bytes, place_bytes;
} planes_plan;

static plane_axis plane_axis_of(const conv_axis *x, bool shared) {
    int64_t divisor = common_divisor(x->step, x->dilation);
    if (!shared) return (plane_axis){false, x->taps, x->dilation, 0};
    return (plane_axis){true, x->step / divisor, divisor, (x->taps - 1) * x->dilation / x->step};
}

/* Plane and shift within it of a tap. */
static int64_t plane_of(const conv_axis *x, const plane_axis *a, int64_t tap) {
    return a->shared ? tap * x->dilation % x->step / a->apart : tap;
}

static int64_t shift_in(const conv_axis *x, const plane_axis *a, int64_t tap) {
    return a->shared ? tap * x->dilation / x->step : 0;
}

static int64_t balanced(int64_t size, int64_t limit) {
    return divide_up(size, divide_up(size, limit));
}

/* Whether the taps along one direction share planes, given what is copied and multiplied for a row or column. */
static plane_axis cheaper_axis(const conv_axis *x, int64_t out, int64_t others, int64_t products, bool wastes) {
    plane_axis shared = plane_axis_of(x, true), apart = plane_axis_of(x, false);
    int64_t computed = wastes ? out + shared.extra : out;
    int64_t joined = PLANES_COPY_COST * shared.planes * others * (out + shared.extra) + products * computed;
    return joined <= (PLANES_COPY_COST * apart.planes * others + products) * out ? shared : apart;
}

static int64_t planned_threads(const conv_sum *p) {
    return p->blas ? PLANES_BLAS_THREADS : p->threads;
}

/* As many tiles as the sums' room asks for, and as the threads do. They change no bits. */
static void plan_tiles(const conv_sum *p, planes_plan *q) {
    int64_t blocks = q->grid.blocks_n * p->groups * q->grid.blocks_h * q->grid.blocks_w;
    int64_t panels = most(1, PLANES_SUMS / (q->sums_stride * GEMM_ROWS));
    int64_t threads = planned_threads(p), wanted = divide_up(PLANES_ITEMS * threads, blocks);
    if (threads > 1) panels = least(panels, most(PLANES_LEAST_PANELS, divide_up(q->panels, wanted)));
    q->tile = balanced(q->panels, panels) * GEMM_ROWS;
    q->tiles = divide_up(p->outs, q->tile);
    q->items = blocks * q->tiles;
}

/* Planes begin on cache lines, an odd number of them apart: a power of two would crowd them into few sets of the cache.
 */
static int64_t spread(int64_t floats) {
    int64_t lines = divide_up(floats, LANES);
    return (lines | 1) * LANES;
}

/*
 * Blocks of about `positions` outputs, and of no more than `images` images. `gaps` says whether what lies between the
 * rows of a block is computed too.
 */
static planes_grid grid_of(const conv_sum *p, int64_t positions, int64_t images, bool gaps) {
    planes_grid g = {.columns = balanced(p->w.out, positions), .images = 1};
    g.rows = balanced(p->h.out, most(1, positions / g.columns));
    if (g.rows == p->h.out && g.columns == p->w.out)
        g.images = least(most(1, positions / (g.rows * g.columns)), images);
    g.images = balanced(p->batch, least(g.images, p->batch));
    int64_t products = p->h.taps * p->w.taps * p->outs;
    plane_axis w = plane_axis_of(&p->w, true);
    g.h = cheaper_axis(&p->h, g.rows, least(w.planes, p->w.taps), products, gaps && g.images > 1);
    g.w = cheaper_axis(&p->w, g.columns, g.h.planes, products, gaps);
    g.blocks_h = divide_up(p->h.out, g.rows);
    g.blocks_w = divide_up(p->w.out, g.columns);
    g.blocks_n = divide_up(p->batch, g.images);
    g.pitch = g.columns + g.w.extra;
    g.image_floats = (g.rows + g.h.extra) * g.pitch;
    g.plane_floats = spread(g.images * g.image_floats);
    g.channel_floats = g.plane_floats * g.h.planes * g.w.planes;
    return g;
}

static planes_plan plan_planes(const conv_sum *p) {
    planes_plan q = {.taps = p->h.taps * p->w.taps};
    q.terms = q.taps * p->ins;
    q.grid = grid_of(p, PLANES_POSITIONS, divide_up(p->batch * p->groups, planned_threads(p)), true);
    q.chain = most(1, GEMM_DEPTH / q.taps);
    q.held = least(p->ins, most(1, PLANES_COPY / q.grid.channel_floats / q.chain) * q.chain);
    q.copy_floats = divide_up(q.held * q.grid.channel_floats + PLANES_OVER, LANES) * LANES;
    q.sums_stride = divide_up(q.grid.images * q.grid.image_floats, GEMM_COLUMNS) * GEMM_COLUMNS + LANES;
    q.panels = divide_up(p->outs, GEMM_ROWS);
    plan_tiles(p, &q);
    q.sums_floats = q.tile * q.sums_stride;
    double macs = (double)(p->batch * p->groups * p->h.out * p->w.out) * (double)(p->outs * q.terms);
    q.workers = least(least(p->threads, q.items), 1 + (int64_t)(macs / PLANES_TASK_MACS));
    q.packing = vjp_cpu_cut_items(p->groups * q.panels, GEMM_ROWS * q.terms * (int64_t)sizeof(float), CPU_MOST_TASKS);
    q.weight_bytes = round_up(p->groups * q.panels * GEMM_ROWS * q.terms * (int64_t)sizeof(float));
    q.place_bytes = round_up(q.held * q.taps * (int64_t)sizeof(int32_t));
    return q;
}

enum { PLANES_COUNTER = 64 };

static bool planes_are_empty(const conv_sum *p) {
    return p->batch == 0 || p->groups == 0 || p->outs == 0 || p->h.out == 0 || p->w.out == 0;
}

static size_t planes_workspace(const conv_sum *p) {
    if (planes_are_empty(p)) return 0;
    planes_plan q = plan_planes(p);
    if (q.copy_floats > INT32_MAX) return SIZE_MAX;
    return PLANES_COUNTER + q.weight_bytes + q.place_bytes +
           (size_t)(q.workers * (q.copy_floats + q.sums_floats)) * sizeof(float);
}

typedef struct planes_run {
    const conv_sum *sum;
    planes_plan plan;
    _Atomic int64_t *next;
    float *weights;  /* of each group: panels of GEMM_ROWS outs by terms; for BLAS, [tap][out][in] */
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
    int64_t group = index / q->panels, first = index % q->panels * GEMM_ROWS, rows = least(GEMM_ROWS, p->outs - first);
    float *all = r->weights + group * q->panels * GEMM_ROWS * q->terms;
    float *to = p->blas ? all + first * p->ins : all + first * q->terms;
    int64_t row_step = p->blas ? p->ins : 1, in_step = p->blas ? 1 : q->taps * GEMM_ROWS;
    int64_t tap_step = p->blas ? p->outs * p->ins : GEMM_ROWS;
    if (!p->blas && rows < GEMM_ROWS) memset(to, 0, (size_t)(q->terms * GEMM_ROWS) * sizeof *to);
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

/* Where in the copy the terms of so many channels begin. */
static void set_places(const conv_sum *p, const planes_grid *g, int64_t channels, int32_t *place) {
    for (int64_t in = 0; in < channels; in++)
        for (int64_t down = 0; down < p->h.taps; down++)
            for (int64_t across = 0; across < p->w.taps; across++) {
                int64_t plane = plane_of(&p->h, &g->h, down) * g->w.planes + plane_of(&p->w, &g->w, across);
                *place++ = (int32_t)(in * g->channel_floats + plane * g->plane_floats +
                                     shift_in(&p->h, &g->h, down) * g->pitch + shift_in(&p->w, &g->w, across));
            }
}

/* ---- A block ----------------------------------------------------------------------------------------- */

typedef struct planes_block {
    int64_t image, images, group, row, rows, column, columns;
    int64_t positions; /* that are computed: with or without those between its rows */
} planes_block;

/* Block `index` of one group: those of the first images, then of the next. */
static planes_block block_at(const conv_sum *p, const planes_grid *g, int64_t index, int64_t group) {
    planes_block b = {.group = group, .image = index / g->blocks_w / g->blocks_h * g->images};
    b.row = index / g->blocks_w % g->blocks_h * g->rows;
    b.column = index % g->blocks_w * g->columns;
    b.images = least(g->images, p->batch - b.image);
    b.rows = least(g->rows, p->h.out - b.row);
    b.columns = least(g->columns, p->w.out - b.column);
    return b;
}

/* Where a plane of one image comes from and goes to; a row's first `before` numbers are zero, `inner` come from x. */
typedef struct plane_copy {
    const void *source;
    int64_t size, channel_row, row, rows, shift_h, first, before, inner;
    float *to;
} plane_copy;

/*
 * The rows of one plane of one image. A row is written as whole vectors, up to PLANES_OVER floats past its end, where
 * the next is written later. Planes are small and many: step, a constant where this is inlined (0: any), is decided
 * once a plane.
 */
INLINE void copy_rows(vjp_dtype dtype, int step, const conv_sum *p, int64_t pitch, const plane_copy *c) {
    float *to = c->to;
    for (int64_t i = 0; i < c->rows; i++, to += pitch) {
        int64_t h = (c->row + i) * p->h.step + c->shift_h, j = 0;
        if (h >= 0 && h < p->h.size) {
            int64_t at = (c->channel_row + h) * p->w.size + c->first;
            for (int64_t z = 0; z < c->before; z += LANES)
                vf_store(VJP_F32, to, z, vf_zero());
            for (; j < c->inner; j += LANES) {
                int64_t n = c->inner - j;
                float *vector = to + c->before + j;
                if (step == 1)
                    vf_store(VJP_F32, vector, 0, load_first(dtype, c->source, at + j, n, c->size));
                else if (step == 2)
                    vf_store(VJP_F32, vector, 0, load_every_second(dtype, c->source, at + 2 * j, n, c->size));
                else
                    load_apart(dtype, c->source, at + j * p->w.step, p->w.step, least(n, LANES), vector);
            }
            j = c->before + (step ? j : c->inner);
        }
        for (; j < pitch; j += LANES)
            vf_store(VJP_F32, to, j, vf_zero());
    }
}

INLINE void copy_plane(vjp_dtype dtype, const conv_sum *p, int64_t pitch, const plane_copy *c) {
    if (p->w.step == 1)
        copy_rows(dtype, 1, p, pitch, c);
    else if (p->w.step == 2)
        copy_rows(dtype, 2, p, pitch, c);
    else
        copy_rows(dtype, 0, p, pitch, c);
}

OUTLINE void copy_plane_f32(const conv_sum *p, int64_t pitch, const plane_copy *c) {
    copy_plane(VJP_F32, p, pitch, c);
}

OUTLINE void copy_plane_bf16(const conv_sum *p, int64_t pitch, const plane_copy *c) {
    copy_plane(VJP_BF16, p, pitch, c);
}

OUTLINE void copy_plane_f16(const conv_sum *p, int64_t pitch, const plane_copy *c) {
    copy_plane(VJP_F16, p, pitch, c);
}

/*
 * Calls the block's rows of channel `in` into the cache, while the one before it is copied: each is a short piece,
 * where the processor's own prefetching hardly begins before it must stop.
 */
static void call_in_channel(const conv_sum *p, const planes_grid *g, const planes_block *b, int64_t in) {
    int64_t bytes = (int64_t)dtype_bytes(p->source.dtype);
    int64_t above = b->row * p->h.step + p->h.base, below = above + (b->rows + g->h.extra) * p->h.step;
    int64_t begin = most(0, above) * p->w.size * bytes, end = least(p->h.size, below) * p->w.size * bytes;
    for (int64_t image = b->image; image < b->image + b->images; image++) {
        int64_t channel = (image * p->groups + b->group) * p->ins + in;
        const char *plane = (const char *)p->source.data + channel * p->h.size * p->w.size * bytes;
        for (int64_t at = begin; at < end; at += GEMM_LINE)
            __builtin_prefetch(plane + at, 0, 3);
    }
}

/* Channels [first, first + count) of the block's source. */
static void copy_planes(const conv_sum *p, const planes_grid *g, const planes_block *b, int64_t first, int64_t count,
                        float *to) {
    plane_copy c = {.source = p->source.data, .row = b->row, .rows = b->rows + g->h.extra};
    c.size = p->batch * p->groups * p->ins * p->h.size * p->w.size;
    for (int64_t in = first; in < first + count; in++) {
        if (in + 1 < first + count) call_in_channel(p, g, b, in + 1);
        for (int64_t down = 0; down < g->h.planes; down++)
            for (int64_t across = 0; across < g->w.planes; across++, to += g->plane_floats) {
                int64_t shift = p->w.base + across * g->w.apart;
                conv_range r = inside(&p->w, shift, b->column, g->pitch);
                c.shift_h = p->h.base + down * g->h.apart;
                c.before = least(r.begin - b->column, g->pitch);
                c.inner = r.end - r.begin;
                c.first = r.begin * p->w.step + shift;
                for (int64_t image = 0; image < b->images; image++) {
                    c.channel_row = (((b->image + image) * p->groups + b->group) * p->ins + in) * p->h.size;
                    c.to = to + image * g->image_floats;
                    switch (p->source.dtype) {
                    case VJP_BF16: copy_plane_bf16(p, g->pitch, &c); break;
                    case VJP_F16: copy_plane_f16(p, g->pitch, &c); break;
                    default: copy_plane_f32(p, g->pitch, &c); break;
                    }
                }
            }
    }
}

/* Adds `depth` terms, from term k of those that are held; the first of these is term `before` of all. */
static void multiply_chain(const planes_run *r, const planes_block *b, int64_t out, int64_t outs, int64_t before,
                           int64_t k, int64_t depth, const float *copy, float *sums) {
    const planes_plan *q = &r->plan;
    const float *weights = r->weights + (b->group * q->panels * GEMM_ROWS + out) * q->terms;
    for (int64_t j = 0; j < b->positions; j += GEMM_COLUMNS)
        for (int64_t i = 0; i < outs; i += GEMM_ROWS) {
            const float *panel = weights + i * q->terms + (before + k) * GEMM_ROWS;
            float *c = sums + i * q->sums_stride + j;
            gemm_target target = {before + k == 0 ? NULL : c, c, q->sums_stride, q->sums_stride};
            gemm_ahead ahead = {.a = (const char *)panel, .b = (const char *)panel};
            gemm_rows(GEMM_ROWS, least(GEMM_ROWS, outs - i), depth, panel, copy + j, r->places + k, target, &ahead);
        }
}

/* sums (+)= weights x copied planes, for `outs` outs from `out` on and `count` channels from `in` on. */
static void multiply_planes(const planes_run *r, const planes_block *b, int64_t out, int64_t outs, int64_t in,
                            int64_t count, const float *copy, float *sums) {
    const conv_sum *p = r->sum;
    const planes_plan *q = &r->plan;
    if (p->blas) {
        const float *weights = r->weights + b->group * q->panels * GEMM_ROWS * q->terms;
        for (int64_t tap = 0; tap < q->taps; tap++)
            vjp_blas_sgemm(false, false, outs, b->positions, count, 1, weights + (tap * p->outs + out) * p->ins + in,
                           p->ins, copy + r->places[tap], q->grid.channel_floats, in + tap > 0 ? 1 : 0, sums,
                           q->sums_stride);
        return;
    }
    /* A channel of more than GEMM_DEPTH taps is several chains. */
    int64_t chain = least(q->chain * q->taps, GEMM_DEPTH), step = most(chain, q->taps), all = count * q->taps;
    for (int64_t first = 0; first < all; first += step)
        for (int64_t k = first; k < least(all, first + step); k += chain)
            multiply_chain(r, b, out, outs, in * q->taps, k, least(chain, least(all, first + step) - k), copy, sums);
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

static void finish_planes(const conv_sum *p, const planes_plan *q, const planes_block *b, int64_t out, int64_t outs,
                          const float *sums) {
    for (int64_t k = 0; k < outs * b->images; k++) {
        int64_t o = k / b->images, image = k % b->images, channel = b->group * p->outs + out + o;
        float bias = p->bias.data ? one_element(&p->bias, channel) : 0;
        int64_t plane = ((b->image + image) * p->groups * p->outs + channel) * p->target_h;
        for (int64_t i = 0; i < b->rows; i++) {
            int64_t h = p->h.to + (b->row + i) * p->h.to_step, w = p->w.to + b->column * p->w.to_step;
            int64_t at = (plane + h) * p->target_w + w;
            const float *from = sums + o * q->sums_stride + image * q->grid.image_floats + i * q->grid.pitch;
            switch (p->target.dtype) {
            case VJP_BF16: finish_run(VJP_BF16, &p->target, at, p->w.to_step, b->columns, from, bias); break;
            case VJP_F16: finish_run(VJP_F16, &p->target, at, p->w.to_step, b->columns, from, bias); break;
            default: finish_run(VJP_F32, &p->target, at, p->w.to_step, b->columns, from, bias); break;
            }
        }
    }
}

/* Items are a tile of a block, the tiles of one block after another: its planes may still be there. */
static void planes_item(const planes_run *r, int64_t item, float *copy, float *sums, int64_t *copied) {
    const conv_sum *p = r->sum;
    const planes_plan *q = &r->plan;
    int64_t out = item % q->tiles * q->tile, outs = least(q->tile, p->outs - out), block = item / q->tiles;
    int64_t within = q->grid.blocks_w * q->grid.blocks_h, group = block / within % p->groups;
    planes_block b = block_at(p, &q->grid, block / within / p->groups * within + block % within, group);
    b.positions = (b.images - 1) * q->grid.image_floats + (b.rows - 1) * q->grid.pitch + b.columns;
    for (int64_t in = 0; in < p->ins; in += q->held) {
        int64_t count = least(q->held, p->ins - in), wanted = block * p->ins + in;
        if (*copied != wanted) copy_planes(p, &q->grid, &b, in, count, copy);
        *copied = wanted;
        multiply_planes(r, &b, out, outs, in, count, copy, sums);
    }
    if (p->ins == 0) memset(sums, 0, (size_t)q->sums_floats * sizeof *sums);
    finish_planes(p, q, &b, out, outs, sums);
}

static void planes_task(void *argument, size_t task) {
    const planes_run *r = argument;
    const planes_plan *q = &r->plan;
    float *copy = r->space + (int64_t)task * (q->copy_floats + q->sums_floats);
    int64_t copied = -1;
    for (int64_t i; (i = atomic_fetch_add(r->next, 1)) < q->items;)
        planes_item(r, i, copy, copy + q->copy_floats, &copied);
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
    set_places(p, &r.plan.grid, r.plan.held, r.places);
    vjp_cpu_for(work, r.plan.packing.count, pack_task, &r);
    vjp_cpu_for(work, r.plan.workers, planes_task, &r);
}

#endif

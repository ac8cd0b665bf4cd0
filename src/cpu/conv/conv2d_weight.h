/* SPDX-License-Identifier: MIT */
/*
 * dweight in either layout, as a product over all output positions on the GEMM micro-kernel, without an im2col matrix.
 *
 * Positions are processed in blocks (conv2d_block.h): the block's part of x is copied with zero padding, or read in
 * place where it is f32 and needs none. Term (channel, tap) at position q is then number `offset of the term` + `offset
 * of the position`: the micro-kernel finds it through two tables, multiplies it by a vector along the out channels, and
 * wastes nothing. dy is packed with the out channels of a position side by side.
 *
 * Positions are split into parts, parts into blocks, and blocks into chains of at most GEMM_DEPTH positions, all by the
 * sizes alone. A sum adds chains in order, and parts in double, in order. Terms and out channels are tiled for the
 * threads, which changes no sum. An item, one part of one tile, stays on one thread, which copies and packs for itself
 * and waits for no other.
 */
#ifndef VJP_CPU_CONV2D_WEIGHT_H
#define VJP_CPU_CONV2D_WEIGHT_H

#include "cpu/conv/conv2d_planes.h"

/*
 * Positions of a block, out channels of a tile and floats of a tile's sums: with the copied planes (PLANES_COPY) 256 +
 * 384 + 384 KiB, a thread's share of a 2 MiB second-level cache that two threads use.
 */
enum { WEIGHT_POSITIONS = 512, WEIGHT_OUTS = 128, WEIGHT_SUMS = 96 << 10 };

/*
 * Enough parts for WEIGHT_ITEMS items with tiles of this size, each part of at least WEIGHT_PART positions (adding one
 * sum of a part takes as long as about 64 positions), and all parts within WEIGHT_PARTS_FLOATS (8 MiB), computed with
 * the widest panels of any instruction set.
 */
enum { WEIGHT_ITEMS = 64, WEIGHT_TILE_TERMS = 384, WEIGHT_PART = 2048 };
enum { WEIGHT_PARTS_FLOATS = 1 << 21, WEIGHT_PADDED = 32 };

/* Cost of packing a number of dy, in multiply-adds: 0.4 cycles. For a number of x it is PLANES_COPY_COST. */
enum { WEIGHT_PACK_COST = 12 };

/* Terms that are added and transposed at a time, for one native vector of out channels. */
enum { WEIGHT_STRIP = 64 };

typedef struct weight_plan {
    planes_grid grid;
    bool in_place;
    int64_t taps, terms, blocks;
    int64_t channel_floats;     /* of a copy */
    int64_t chain;              /* longest chain */
    int64_t parts, part_blocks; /* and blocks per part; the last part may have fewer */
    int64_t channels, outs;     /* per tile; outs are whole panels */
    int64_t tiles_in, tiles_out, items;
    int64_t stride, part_floats; /* of a term's sums; of a part, where there are several */
    int64_t copy_floats, dy_floats, sums_floats, worker_floats;
    int64_t workers;
} weight_plan;

static bool has_no_weights(const conv_sum *p) {
    return p->groups * p->ins * p->outs == 0;
}

/* By the sizes alone: parts decide bits. */
static void plan_parts(const conv_sum *p, weight_plan *q) {
    int64_t tiles = p->groups * vjp_divide_up(q->terms, WEIGHT_TILE_TERMS) * vjp_divide_up(p->outs, WEIGHT_OUTS);
    int64_t parts = vjp_min(vjp_divide_up(WEIGHT_ITEMS, tiles), p->batch * p->h.out * p->w.out / WEIGHT_PART);
    int64_t padded = vjp_round_up(p->outs, WEIGHT_PADDED) + LANES;
    parts = vjp_min(parts, WEIGHT_PARTS_FLOATS / (p->groups * q->terms * padded));
    q->part_blocks = vjp_divide_up(q->blocks, vjp_max(1, parts));
    q->parts = vjp_divide_up(q->blocks, q->part_blocks);
}

/*
 * Chooses the tiles with the shortest estimated time. Besides its products a tile costs its copies and packing; items
 * do not finish together, which costs another quarter of one.
 */
static void plan_weight_tiles(const conv_sum *p, weight_plan *q) {
    int64_t panels = vjp_divide_up(p->outs, GEMM_COLUMNS), copied = q->in_place ? 0 : q->channel_floats;
    int64_t positions = q->grid.images * q->grid.rows * q->grid.columns, wanted = PLANES_ITEMS * p->threads;
    double best_time = INFINITY;
    for (int64_t j = vjp_divide_up(panels, WEIGHT_OUTS / GEMM_COLUMNS); j <= panels; j++) {
        int64_t outs = vjp_divide_up(panels, j) * GEMM_COLUMNS, tiles_out = vjp_divide_up(p->outs, outs);
        int64_t max_channels = vjp_max(1, WEIGHT_SUMS / (q->taps * outs));
        if (copied) max_channels = vjp_min(max_channels, vjp_max(1, PLANES_COPY / copied));
        int64_t others = q->parts * p->groups * tiles_out, first = vjp_divide_up(p->ins, max_channels);
        for (int64_t i = first; i <= vjp_max(first, vjp_min(p->ins, vjp_divide_up(wanted, others))); i++) {
            int64_t channels = vjp_divide_up(p->ins, i), tiles_in = vjp_divide_up(p->ins, channels);
            int64_t items = others * tiles_in, terms = channels * q->taps;
            double cost = (double)(terms * outs * positions) + (double)(WEIGHT_PACK_COST * outs * positions) +
                          (double)(PLANES_COPY_COST * channels * copied);
            double time = ((double)vjp_divide_up(items, p->threads) + (p->threads > 1 ? 0.25 : 0)) * cost;
            if (time >= best_time) continue;
            best_time = time;
            q->channels = channels;
            q->tiles_in = tiles_in;
            q->outs = outs;
            q->tiles_out = tiles_out;
            q->items = items;
        }
        if (others * first >= wanted) break;
    }
}

static weight_plan plan_weights(const conv_sum *p) {
    weight_plan q = {.grid = grid_of(p, WEIGHT_POSITIONS, p->batch, false), .taps = p->h.taps * p->w.taps};
    q.terms = q.taps * p->ins;
    q.in_place = reads_in_place(p, &q.grid);
    q.channel_floats = p->channels_last ? pixel_floats(p, &q.grid) : q.grid.channel_floats;
    q.blocks = q.grid.blocks_n * q.grid.blocks_h * q.grid.blocks_w;
    plan_parts(p, &q);
    plan_weight_tiles(p, &q);
    int64_t positions = q.grid.images * q.grid.rows * q.grid.columns;
    q.chain = balanced(positions, GEMM_DEPTH);
    int64_t all_outs = vjp_round_up(p->outs, GEMM_COLUMNS);
    q.stride = (q.parts > 1 ? all_outs : q.outs) + LANES;
    q.part_floats = q.parts > 1 ? p->groups * q.terms * q.stride : 0;
    q.copy_floats = q.in_place ? 0 : q.channels * q.channel_floats + PLANES_OVER;
    q.dy_floats = q.outs * positions;
    q.sums_floats = q.parts > 1 ? 0 : q.channels * q.taps * q.stride;
    q.worker_floats =
        vjp_round_up(q.copy_floats + q.dy_floats + q.sums_floats + positions + q.channels * q.taps, LANES);
    double macs = (double)(p->batch * p->h.out * p->w.out) * (double)(p->groups * p->outs * q.terms);
    q.workers = vjp_min(vjp_min(p->threads, q.items), 1 + (int64_t)(macs / PLANES_TASK_MACS));
    return q;
}

static size_t weights_workspace(const conv_sum *p) {
    if (has_no_weights(p) || has_no_outputs(p)) return 0;
    weight_plan q = plan_weights(p);
    if (q.copy_floats > INT32_MAX) return SIZE_MAX;
    return PLANES_COUNTER + (size_t)(q.workers * q.worker_floats + q.parts * q.part_floats) * sizeof(float);
}

typedef struct weight_run {
    const conv_sum *sum; /* the forward's: source is x */
    const matrix *dy, *dweight;
    weight_plan plan;
    _Atomic int64_t *next;
    float *space;   /* of the workers */
    float *partial; /* [part][group][term][out], where there are several */
} weight_run;

/* ---- Blocks ------------------------------------------------------------------------------------------  */

/* dy at positions [first, first + count) of a block: in place, or converted in `to`. */
static const float *outputs_of_dy(const weight_run *r, const planes_block *b, int64_t out, int64_t first, int64_t count,
                                  float *to) {
    const conv_sum *p = r->sum;
    int64_t run = b->columns == p->w.out ? b->rows * b->columns : b->columns; /* contiguous positions */
    int64_t of_image = b->rows * b->columns;
    for (int64_t done = 0; done < count;) {
        int64_t q = first + done, image = q / of_image, i = q % of_image / b->columns, j = q % b->columns;
        int64_t plane = ((b->image + image) * p->groups + b->group) * p->outs + out;
        int64_t at = (plane * p->h.out + b->row + i) * p->w.out + b->column + j,
                n = vjp_min(count - done, run - q % run);
        if (n == count && r->dy->dtype == VJP_F32) return (const float *)r->dy->data + at;
        load_row(r->dy->dtype, r->dy->data, at, n, to + done);
        done += n;
    }
    return to;
}

/* The same for channels last, where the out channels of position `q` are contiguous. */
static const float *outs_of_dy(const weight_run *r, const planes_block *b, int64_t out, int64_t outs, int64_t q,
                               float *to) {
    const conv_sum *p = r->sum;
    int64_t of_image = b->rows * b->columns, image = b->image + q / of_image;
    int64_t i = b->row + q % of_image / b->columns, j = b->column + q % b->columns;
    int64_t at = (((image * p->h.out + i) * p->w.out + j) * p->groups + b->group) * p->outs + out;
    if (r->dy->dtype == VJP_F32) return (const float *)r->dy->data + at;
    load_row(r->dy->dtype, r->dy->data, at, outs, to);
    return to;
}

/* Packs panels of `outs` out channels from `out`, for each chain of the block. */
static void pack_dy(const weight_run *r, const planes_block *b, int64_t out, int64_t outs, int64_t chain, float *to) {
    static const float zeros[GEMM_DEPTH];
    float converted[NATIVE_LANES * GEMM_DEPTH];
    for (int64_t first = 0; first < b->positions; first += chain) {
        int64_t depth = vjp_min(chain, b->positions - first);
        for (int64_t k = 0; r->sum->channels_last && k < depth; k++)
            gemm_pack_term(outs_of_dy(r, b, out, outs, first + k, converted), outs, GEMM_COLUMNS, GEMM_COLUMNS * depth,
                           to + k * GEMM_COLUMNS);
        for (int64_t o = 0; !r->sum->channels_last && o < vjp_round_up(outs, GEMM_COLUMNS); o += NATIVE_LANES) {
            const float *rows[NATIVE_LANES];
            for (int64_t l = 0; l < NATIVE_LANES; l++)
                rows[l] =
                    o + l < outs ? outputs_of_dy(r, b, out + o + l, first, depth, converted + l * GEMM_DEPTH) : zeros;
            gemm_pack_transposed(rows, depth, to + o / GEMM_COLUMNS * GEMM_COLUMNS * depth + o % GEMM_COLUMNS);
        }
        to += vjp_round_up(outs, GEMM_COLUMNS) * depth;
    }
}

/* sums (+)= windows x dy, for `terms` terms and the positions that x describes. */
static void multiply_block(const weight_run *r, const planes_block *b, int64_t terms, int64_t outs, gemm_left x,
                           const float *dy, float *sums, bool add) {
    const weight_plan *q = &r->plan;
    for (int64_t first = 0; first < b->positions; first += q->chain) {
        int64_t depth = vjp_min(q->chain, b->positions - first);
        for (int64_t o = 0; o < outs; o += GEMM_COLUMNS, dy += GEMM_COLUMNS * depth)
            for (int64_t t = 0; t < terms; t += GEMM_ROWS) {
                float *to = sums + t * q->stride + o;
                gemm_left windows = {x.numbers, x.rows + t, x.terms + first};
                gemm_target target = {add || first > 0 ? to : NULL, to, q->stride, q->stride};
                gemm_rows_in_place(vjp_min(GEMM_ROWS, terms - t), depth, windows, dy, target);
            }
    }
}

/* ---- Finished sums -----------------------------------------------------------------------------------  */

/* Adds the parts of up to NATIVE_LANES out channels of `terms` terms, and stores them as rows of dweight. */
static void store_strip(const weight_run *r, int64_t row, int64_t outs, int64_t term, int64_t terms,
                        const float *sums) {
    const weight_plan *q = &r->plan;
    float transposed[NATIVE_LANES * WEIGHT_STRIP];
    for (int64_t t = 0; t < terms; t += NATIVE_LANES) {
        native_f square[NATIVE_LANES];
        for (int64_t i = 0; i < NATIVE_LANES; i++) {
            const float *from = sums + vjp_min(t + i, terms - 1) * q->stride;
            double total[NATIVE_LANES] = {0};
            for (int64_t part = 0; part < q->parts; part++)
                for (int l = 0; l < NATIVE_LANES; l++)
                    total[l] += (double)from[part * q->part_floats + l];
            float sum[NATIVE_LANES];
            for (int l = 0; l < NATIVE_LANES; l++)
                sum[l] = (float)total[l];
            memcpy(&square[i], sum, sizeof square[i]);
        }
        native_transpose(square);
        for (int64_t l = 0; l < NATIVE_LANES; l++)
            memcpy(transposed + l * WEIGHT_STRIP + t, &square[l], sizeof square[l]);
    }
    const matrix *to = r->dweight;
    for (int64_t o = 0; o < outs; o++)
        store_row(to->dtype, to->data, (row + o) * q->terms + term, terms, transposed + o * WEIGHT_STRIP,
                  to->accumulate);
}

/*
 * The terms of a tile are one contiguous run of a row of dweight; channels last, one run per tap. Stores strip `index`
 * of them, for out channels from `out`; `sums` starts at the tile and channel. Strips past the end of a run are empty.
 */
static void store_tile_strip(const weight_run *r, int64_t group, int64_t in, int64_t out, int64_t outs, int64_t index,
                             const float *sums) {
    const conv_sum *p = r->sum;
    const weight_plan *q = &r->plan;
    int64_t channels = vjp_min(q->channels, p->ins - in), run = p->channels_last ? channels : channels * q->taps;
    int64_t strips = vjp_divide_up(p->channels_last ? q->channels : q->channels * q->taps, WEIGHT_STRIP);
    int64_t tap = index / strips, first = index % strips * WEIGHT_STRIP,
            term = p->channels_last ? tap * p->ins + in : in * q->taps;
    if (first >= run) return;
    store_strip(r, group * p->outs + out, outs, term + first, vjp_min(WEIGHT_STRIP, run - first),
                sums + (tap * run + first) * q->stride);
}

static int64_t strips_of(const conv_sum *p, const weight_plan *q) {
    return p->channels_last ? q->taps * vjp_divide_up(q->channels, WEIGHT_STRIP)
                            : vjp_divide_up(q->channels * q->taps, WEIGHT_STRIP);
}

/* Stores a tile that is not split into parts. */
static void store_tile(const weight_run *r, int64_t group, int64_t in, int64_t out, int64_t outs, const float *sums) {
    for (int64_t o = 0; o < outs; o += NATIVE_LANES)
        for (int64_t i = 0; i < strips_of(r->sum, &r->plan); i++)
            store_tile_strip(r, group, in, out + o, vjp_min(NATIVE_LANES, outs - o), i, sums + o);
}

typedef struct weight_addition {
    const weight_run *run;
    int64_t strips, outs; /* strips per tile of terms, and per group of out channels */
    cpu_split split;
} weight_addition;

static void add_weights_task(void *argument, size_t task) {
    const weight_addition *add = argument;
    const conv_sum *p = add->run->sum;
    const weight_plan *q = &add->run->plan;
    for (int64_t s = cpu_split_begin(&add->split, task); s < cpu_split_end(&add->split, task); s++) {
        int64_t strip = s % add->strips, tile = s / add->strips, in = tile % q->tiles_in * q->channels;
        int64_t out = tile / q->tiles_in % add->outs * NATIVE_LANES, group = tile / q->tiles_in / add->outs;
        store_tile_strip(add->run, group, in, out, vjp_min(NATIVE_LANES, p->outs - out), strip,
                         add->run->partial + (group * q->terms + in * q->taps) * q->stride + out);
    }
}

static void add_weights(const vjp_work *work, const weight_run *r) {
    const conv_sum *p = r->sum;
    const weight_plan *q = &r->plan;
    weight_addition add = {.run = r, .strips = strips_of(p, q), .outs = vjp_divide_up(p->outs, NATIVE_LANES)};
    int64_t bytes = q->parts * WEIGHT_STRIP * NATIVE_LANES * (int64_t)sizeof(float);
    add.split = vjp_cpu_split_items(p->groups * add.outs * q->tiles_in * add.strips, bytes, CPU_MAX_TASKS);
    vjp_cpu_for(work, add.split.count, add_weights_task, &add);
}

/* ---- Running ----------------------------------------------------------------------------------------- */

/* An item is one part of a tile; the parts of a tile are consecutive. */
static void weight_item(const weight_run *r, int64_t item, float *space) {
    const conv_sum *p = r->sum;
    const weight_plan *q = &r->plan;
    int64_t part = item % q->parts, tile = item / q->parts, group = tile / q->tiles_in / q->tiles_out;
    int64_t in = tile % q->tiles_in * q->channels, channels = vjp_min(q->channels, p->ins - in);
    int64_t out = tile / q->tiles_in % q->tiles_out * q->outs, outs = vjp_min(q->outs, p->outs - out);
    float *copy = space, *dy = copy + q->copy_floats, *sums = dy + q->dy_floats;
    int32_t *term_offsets = (int32_t *)(void *)(sums + q->sums_floats), *at = term_offsets + channels * q->taps;
    if (q->parts > 1) sums = r->partial + part * q->part_floats + (group * q->terms + in * q->taps) * q->stride + out;
    set_term_offsets(p, &q->grid, q->in_place, channels, term_offsets);
    int64_t first = part * q->part_blocks, end = vjp_min(q->blocks, first + q->part_blocks);
    for (int64_t index = first; index < end; index++) {
        planes_block b = block_at(p, &q->grid, index, group);
        b.positions = b.images * b.rows * b.columns;
        if (!q->in_place && p->channels_last) copy_pixels(p, &q->grid, &b, in, channels, copy);
        if (!q->in_place && !p->channels_last) copy_planes(p, &q->grid, &b, in, channels, copy);
        set_position_offsets(p, &q->grid, q->in_place, &b, channels, at);
        pack_dy(r, &b, out, outs, q->chain, dy);
        gemm_left x = {q->in_place ? block_in_place(p, &b, in) : copy, term_offsets, at};
        multiply_block(r, &b, channels * q->taps, outs, x, dy, sums, index > first);
    }
    if (q->parts == 1) store_tile(r, group, in, out, outs, sums);
}

static void weight_task(void *argument, size_t task) {
    const weight_run *r = argument;
    for (int64_t i; (i = atomic_fetch_add(r->next, 1)) < r->plan.items;)
        weight_item(r, i, r->space + (int64_t)task * r->plan.worker_floats);
}

/* `p` is the forward's sum, over x. */
static void weight_gradient_of(const vjp_work *work, const conv_sum *p, const matrix *dy, const matrix *dweight,
                               void *workspace) {
    if (has_no_weights(p)) return;
    if (has_no_outputs(p)) {
        for (int64_t i = 0; i < p->groups * p->outs * p->ins * p->h.taps * p->w.taps; i++)
            store_element(dweight, i, 0);
        return;
    }
    weight_run r = {.sum = p, .dy = dy, .dweight = dweight, .plan = plan_weights(p), .next = workspace};
    r.space = (float *)(void *)((char *)workspace + PLANES_COUNTER);
    r.partial = r.space + r.plan.workers * r.plan.worker_floats;
    atomic_init(r.next, 0);
    vjp_cpu_for(work, r.plan.workers, weight_task, &r);
    if (r.plan.parts > 1) add_weights(work, &r);
}

#endif

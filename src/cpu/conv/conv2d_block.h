/* SPDX-License-Identifier: MIT */
/*
 * Blocks of output positions of a convolution, and the part of the source that a block reads.
 *
 * A block is some rows of positions, or whole planes of several images where they are small. The source rows that it
 * reads are copied into zero-padded f32 planes, one plane per remainder of a tap's shift by the step, with rows `pitch`
 * floats apart. Term (channel, tap) of the output at (row, column) is then element `offset of the term` + row * pitch +
 * column of the copy. A source that is f32 and needs no padding can be read in place instead, with other offsets.
 */
#ifndef VJP_CPU_CONV2D_BLOCK_H
#define VJP_CPU_CONV2D_BLOCK_H

#include "cpu/conv/conv2d.h"
#include "cpu/gemm/gemm_kernel.h"

/* Floats past the end of a copy that copying may write, and that the micro-kernel may read. */
enum { PLANES_OVER = (int)GEMM_COLUMNS > (int)LANES ? (int)GEMM_COLUMNS : (int)LANES };

/* Cost of copying a float, in multiply-adds of the micro-kernel: half a cycle, in which AVX-512 performs 16. */
enum { PLANES_COPY_COST = 16 };

/* The planes of a channel along one axis. */
typedef struct plane_axis {
    bool shared;           /* by taps whose shifts leave the same remainder; else one plane per tap */
    int64_t planes, apart; /* the shift of plane a is a * apart */
    int64_t extra;         /* rows or columns of a plane beyond the positions' */
} plane_axis;

/* The blocks of positions, and the source copies that a block reads. */
typedef struct planes_grid {
    plane_axis h, w;
    int64_t rows, columns, blocks_h, blocks_w; /* per block; the last may be smaller */
    int64_t images, blocks_n;                  /* a block of whole planes holds several images */
    int64_t image_floats;
    int64_t pitch, plane_floats, channel_floats;
} planes_grid;

static plane_axis plane_axis_of(const conv_axis *x, bool shared) {
    int64_t divisor = common_divisor(x->step, x->dilation);
    if (!shared) return (plane_axis){false, x->taps, x->dilation, 0};
    return (plane_axis){true, x->step / divisor, divisor, (x->taps - 1) * x->dilation / x->step};
}

/* The plane of a tap, and the tap's shift within it. */
static int64_t plane_of(const conv_axis *x, const plane_axis *a, int64_t tap) {
    return a->shared ? tap * x->dilation % x->step / a->apart : tap;
}

static int64_t shift_in(const conv_axis *x, const plane_axis *a, int64_t tap) {
    return a->shared ? tap * x->dilation / x->step : 0;
}

static int64_t balanced(int64_t size, int64_t limit) {
    return vjp_divide_up(size, vjp_divide_up(size, limit));
}

/*
 * Decides whether taps along one axis share planes, from the estimated cost of copies and products per row or column.
 */
static plane_axis cheaper_axis(const conv_axis *x, int64_t out, int64_t others, int64_t products, bool wastes) {
    plane_axis shared = plane_axis_of(x, true), apart = plane_axis_of(x, false);
    int64_t computed = wastes ? out + shared.extra : out;
    int64_t joined = PLANES_COPY_COST * shared.planes * others * (out + shared.extra) + products * computed;
    return joined <= (PLANES_COPY_COST * apart.planes * others + products) * out ? shared : apart;
}

static bool has_no_outputs(const conv_sum *p) {
    return p->batch == 0 || p->groups == 0 || p->outs == 0 || p->h.out == 0 || p->w.out == 0;
}

/* Planes start on cache lines, an odd number of lines apart: with a power of two they would share few cache sets. */
static int64_t spread(int64_t floats) {
    int64_t lines = vjp_divide_up(floats, LANES);
    return (lines | 1) * LANES;
}

/*
 * Blocks of about `positions` positions, and of at most `images` images. `gaps`: what lies between the rows of a block
 * is computed too.
 */
static planes_grid grid_of(const conv_sum *p, int64_t positions, int64_t images, bool gaps) {
    planes_grid g = {.columns = balanced(p->w.out, positions), .images = 1};
    g.rows = balanced(p->h.out, vjp_max(1, positions / g.columns));
    if (g.rows == p->h.out && g.columns == p->w.out)
        g.images = vjp_min(vjp_max(1, positions / (g.rows * g.columns)), images);
    g.images = balanced(p->batch, vjp_min(g.images, p->batch));
    int64_t products = p->h.taps * p->w.taps * p->outs;
    plane_axis w = plane_axis_of(&p->w, true);
    g.h = cheaper_axis(&p->h, g.rows, vjp_min(w.planes, p->w.taps), products, gaps && g.images > 1);
    g.w = cheaper_axis(&p->w, g.columns, g.h.planes, products, gaps);
    g.blocks_h = vjp_divide_up(p->h.out, g.rows);
    g.blocks_w = vjp_divide_up(p->w.out, g.columns);
    g.blocks_n = vjp_divide_up(p->batch, g.images);
    g.pitch = g.columns + g.w.extra;
    g.image_floats = (g.rows + g.h.extra) * g.pitch;
    g.plane_floats = spread(g.images * g.image_floats);
    g.channel_floats = g.plane_floats * g.h.planes * g.w.planes;
    return g;
}

/* ---- Copying planes: channels first ------------------------------------------------------------------  */

typedef struct planes_block {
    int64_t image, images, group, row, rows, column, columns;
    int64_t positions; /* that are computed, with or without those between rows */
} planes_block;

/* Block `index` of one group, ordered by images, then rows, then columns. */
static planes_block block_at(const conv_sum *p, const planes_grid *g, int64_t index, int64_t group) {
    planes_block b = {.group = group, .image = index / g->blocks_w / g->blocks_h * g->images};
    b.row = index / g->blocks_w % g->blocks_h * g->rows;
    b.column = index % g->blocks_w * g->columns;
    b.images = vjp_min(g->images, p->batch - b.image);
    b.rows = vjp_min(g->rows, p->h.out - b.row);
    b.columns = vjp_min(g->columns, p->w.out - b.column);
    return b;
}

/* Source and destination of one plane of one image; in each row, `before` zeros precede `inner` source numbers. */
typedef struct plane_copy {
    const void *source;
    int64_t size, channel_row, row, rows, shift_h, first, before, inner;
    float *to;
} plane_copy;

/*
 * The rows of one plane of one image. A row is written as whole vectors, up to PLANES_OVER floats past its end, which
 * the next row overwrites. step is a constant after inlining (0: any), chosen once per plane: planes are small and
 * many.
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
                    load_strided(dtype, c->source, at + j * p->w.step, p->w.step, vjp_min(n, LANES), vector);
            }
            j = c->before + (step ? j : c->inner);
        }
        for (; j < pitch; j += LANES)
            vf_store(VJP_F32, to, j, vf_zero());
    }
}

INLINE void copy_plane_as(vjp_dtype dtype, const conv_sum *p, int64_t pitch, const plane_copy *c) {
    if (p->w.step == 1)
        copy_rows(dtype, 1, p, pitch, c);
    else if (p->w.step == 2)
        copy_rows(dtype, 2, p, pitch, c);
    else
        copy_rows(dtype, 0, p, pitch, c);
}

OUTLINE void copy_plane(const conv_sum *p, int64_t pitch, const plane_copy *c) {
    switch (p->source.dtype) {
    case VJP_BF16: copy_plane_as(VJP_BF16, p, pitch, c); break;
    case VJP_F16: copy_plane_as(VJP_F16, p, pitch, c); break;
    default: copy_plane_as(VJP_F32, p, pitch, c); break;
    }
}

/*
 * Prefetches the block's rows of channel `in`, while the previous channel is copied: the rows are short, so the
 * hardware prefetcher hardly starts before it has to stop.
 */
static void prefetch_channel(const conv_sum *p, const planes_grid *g, const planes_block *b, int64_t in) {
    int64_t bytes = (int64_t)dtype_bytes(p->source.dtype);
    int64_t above = b->row * p->h.step + p->h.base, below = above + (b->rows + g->h.extra) * p->h.step;
    int64_t begin = vjp_max(0, above) * p->w.size * bytes, end = vjp_min(p->h.size, below) * p->w.size * bytes;
    for (int64_t image = b->image; image < b->image + b->images; image++) {
        int64_t channel = (image * p->groups + b->group) * p->ins + in;
        const char *plane = element(p->source.data, p->source.dtype, channel * p->h.size * p->w.size);
        prefetch_bytes(true, plane + begin, end - begin);
    }
}

/* Channels [first, first + count) of the block's source. */
static void copy_planes(const conv_sum *p, const planes_grid *g, const planes_block *b, int64_t first, int64_t count,
                        float *to) {
    plane_copy c = {.source = p->source.data, .row = b->row, .rows = b->rows + g->h.extra};
    c.size = p->batch * p->groups * p->ins * p->h.size * p->w.size;
    for (int64_t in = first; in < first + count; in++) {
        if (in + 1 < first + count) prefetch_channel(p, g, b, in + 1);
        for (int64_t down = 0; down < g->h.planes; down++)
            for (int64_t across = 0; across < g->w.planes; across++, to += g->plane_floats) {
                int64_t shift = p->w.base + across * g->w.apart;
                conv_range r = inside(&p->w, shift, b->column, g->pitch);
                c.shift_h = p->h.base + down * g->h.apart;
                c.before = vjp_min(r.begin - b->column, g->pitch);
                c.inner = r.end - r.begin;
                c.first = r.begin * p->w.step + shift;
                for (int64_t image = 0; image < b->images; image++) {
                    c.channel_row = (((b->image + image) * p->groups + b->group) * p->ins + in) * p->h.size;
                    c.to = to + image * g->image_floats;
                    copy_plane(p, g->pitch, &c);
                }
            }
    }
}

/* ---- Copying pixels: channels last -------------------------------------------------------------------  */

/*
 * Along one axis, the window of output i is pixels i * apart + 0 ... span - 1 of the copy. Pixels between windows that
 * do not overlap are not copied.
 */
typedef struct pixel_axis {
    int64_t apart, span;
} pixel_axis;

static pixel_axis pixel_axis_of(const conv_axis *x) {
    int64_t span = (x->taps - 1) * x->dilation + 1;
    return (pixel_axis){vjp_min(x->step, span), span};
}

static int64_t pixels_of(pixel_axis a, int64_t outputs) {
    return (outputs - 1) * a.apart + a.span;
}

/* The source pixel of pixel i of the copy, relative to the first window. */
static int64_t pixel_at(const conv_axis *x, pixel_axis a, int64_t i) {
    return a.apart == x->step ? i : i / a.span * x->step + i % a.span;
}

/* Floats per channel of a block's copy. */
static int64_t pixel_floats(const conv_sum *p, const planes_grid *g) {
    return g->images * pixels_of(pixel_axis_of(&p->h), g->rows) * pixels_of(pixel_axis_of(&p->w), g->columns);
}

/* `pixels` pixels of a row, `channels` numbers each; the pixel of column 0 is at `at`. Pixels outside are zero. */
static void copy_pixel_row(const conv_sum *p, pixel_axis across, int64_t first, int64_t pixels, int64_t at,
                           int64_t channels, float *to) {
    int64_t all = p->groups * p->ins;
    if (channels == all && across.apart == p->w.step) { /* one contiguous range */
        int64_t begin = vjp_min(pixels, vjp_max(0, -first)), end = vjp_max(begin, vjp_min(pixels, p->w.size - first));
        memset(to, 0, (size_t)(begin * all) * sizeof *to);
        load_row(p->source.dtype, p->source.data, at + (first + begin) * all, (end - begin) * all, to + begin * all);
        memset(to + end * all, 0, (size_t)((pixels - end) * all) * sizeof *to);
        return;
    }
    for (int64_t j = 0; j < pixels; j++, to += channels) {
        int64_t w = first + pixel_at(&p->w, across, j);
        if (w < 0 || w >= p->w.size)
            memset(to, 0, (size_t)channels * sizeof *to);
        else
            load_row(p->source.dtype, p->source.data, at + w * all, channels, to);
    }
}

/* Channels [first, first + count) of the block's source, pixel by pixel. */
static void copy_pixels(const conv_sum *p, const planes_grid *g, const planes_block *b, int64_t first, int64_t count,
                        float *to) {
    pixel_axis down = pixel_axis_of(&p->h), across = pixel_axis_of(&p->w);
    int64_t rows = pixels_of(down, g->rows), pixels = pixels_of(across, g->columns);
    for (int64_t image = b->image; image < b->image + b->images; image++)
        for (int64_t i = 0; i < rows; i++, to += pixels * count) {
            int64_t h = b->row * p->h.step + p->h.base + pixel_at(&p->h, down, i);
            int64_t at = (image * p->h.size + h) * p->w.size * p->groups * p->ins + b->group * p->ins + first;
            if (h < 0 || h >= p->h.size)
                memset(to, 0, (size_t)(pixels * count) * sizeof *to);
            else
                copy_pixel_row(p, across, b->column * p->w.step + p->w.base, pixels, at, count, to);
        }
}

/* ---- Reading in place --------------------------------------------------------------------------------  */

static bool is_inside(const conv_axis *x) {
    return x->base >= 0 && (x->out - 1) * x->step + x->base + (x->taps - 1) * x->dilation < x->size;
}

/*
 * Reading in place saves the copy, which is expensive relative to a single tap. Not where planes are a multiple of this
 * many bytes apart: they would share few cache sets.
 */
enum { CROWDED_BYTES = 1024 };

static bool reads_in_place(const conv_sum *p, const planes_grid *g) {
    int64_t plane = p->h.size * p->w.size;
    bool crowded = !p->channels_last && plane * (int64_t)sizeof(float) % CROWDED_BYTES == 0;
    return p->source.dtype == VJP_F32 && is_inside(&p->h) && is_inside(&p->w) && !crowded &&
           g->images * p->groups * p->ins <= INT32_MAX / plane;
}

/* The source address of a block's terms from channel `in`. */
static const float *block_in_place(const conv_sum *p, const planes_block *b, int64_t in) {
    int64_t row = b->row * p->h.step + p->h.base, column = b->column * p->w.step + p->w.base;
    int64_t channel = (b->image * p->groups + b->group) * p->ins + in;
    int64_t at = (channel * p->h.size + row) * p->w.size + column;
    if (p->channels_last)
        at = ((b->image * p->h.size + row) * p->w.size + column) * p->groups * p->ins + b->group * p->ins + in;
    return (const float *)p->source.data + at;
}

/* ---- Offsets -----------------------------------------------------------------------------------------  */

/* Strides in a copy of `channels` channels, or in the source: of images, positions, taps and channels. */
typedef struct planes_steps {
    int64_t image, row, column, down, across, channel;
} planes_steps;

/* Copied planes have no stride for taps: see plane_of() and shift_in(). */
static planes_steps steps_of(const conv_sum *p, const planes_grid *g, bool in_place, int64_t channels) {
    int64_t all = p->groups * p->ins, w = p->w.size, unit = p->channels_last ? all : 1;
    if (in_place)
        return (planes_steps){.image = all * p->h.size * w,
                              .row = p->h.step * w * unit,
                              .column = p->w.step * unit,
                              .down = p->h.dilation * w * unit,
                              .across = p->w.dilation * unit,
                              .channel = p->channels_last ? 1 : p->h.size * w};
    if (!p->channels_last) return (planes_steps){.image = g->image_floats, .row = g->pitch, .column = 1};
    pixel_axis down = pixel_axis_of(&p->h), across = pixel_axis_of(&p->w);
    int64_t pitch = pixels_of(across, g->columns) * channels;
    return (planes_steps){.image = pixels_of(down, g->rows) * pitch,
                          .row = down.apart * pitch,
                          .column = across.apart * channels,
                          .down = p->h.dilation * pitch,
                          .across = p->w.dilation * channels,
                          .channel = 1};
}

/* Offsets of the terms of `channels` channels, ordered (channel, tap), or for channels last (tap, channel). */
static void set_term_offsets(const conv_sum *p, const planes_grid *g, bool in_place, int64_t channels, int32_t *place) {
    planes_steps s = steps_of(p, g, in_place, channels);
    int64_t taps = p->h.taps * p->w.taps;
    for (int64_t in = 0; in < channels; in++)
        for (int64_t down = 0; down < p->h.taps; down++)
            for (int64_t across = 0; across < p->w.taps; across++) {
                int64_t tap = down * p->w.taps + across, k = p->channels_last ? tap * channels + in : in * taps + tap;
                int64_t at = in * s.channel + down * s.down + across * s.across;
                if (!in_place && !p->channels_last) {
                    int64_t plane = plane_of(&p->h, &g->h, down) * g->w.planes + plane_of(&p->w, &g->w, across);
                    at = in * g->channel_floats + plane * g->plane_floats + shift_in(&p->h, &g->h, down) * g->pitch +
                         shift_in(&p->w, &g->w, across);
                }
                place[k] = (int32_t)at;
            }
}

/* Offsets of a block's positions, ordered by image, row and column. */
static void set_position_offsets(const conv_sum *p, const planes_grid *g, bool in_place, const planes_block *b,
                                 int64_t channels, int32_t *at) {
    planes_steps s = steps_of(p, g, in_place, channels);
    for (int64_t image = 0; image < b->images; image++)
        for (int64_t i = 0; i < b->rows; i++)
            for (int64_t j = 0; j < b->columns; j++)
                *at++ = (int32_t)(image * s.image + i * s.row + j * s.column);
}

/* ---- Micro-kernel ------------------------------------------------------------------------------------  */

/* Multiplies rows and terms found through offset tables by one packed panel. Not inlined: it is long. */
OUTLINE void gemm_rows_in_place(int64_t rows, int64_t depth, gemm_left a, const float *panel, gemm_target target) {
    gemm_prefetch prefetch = {.a = (const char *)panel, .b = (const char *)panel};
    gemm_rows_of(GEMM_IN_PLACE, rows, depth, a, (gemm_right){.numbers = panel}, target, &prefetch);
}

#endif

/* SPDX-License-Identifier: MIT */
/*
 * conv2d: how y, dx, dweight and dbias are split. The kernels are in conv2d.wgsl and conv2d.metal.
 *
 *     y, dx     FEW or more channels of the result in a group: `product`; else `direct`
 *     dweight   FEW or more out channels in a group: `product`; else `reduce`
 *     dbias     `reduce`
 *     parts     where `product` or `reduce` would leave a GPU idle, or a sum is long, its depth is split into parts by
 *               the sizes alone, and `join` adds them
 *     images    a launch has as many images as fit into GPU_CHUNK elements of x and of y, one at least: tensors that no
 *               device binds at once are split, but an image or a weight that is too large is refused
 */
#include "gpu/ops/tiles.h"

enum {
    /*
     * Rows of a tile that are worth it. On lavapipe, 3x3 on 28x28: y and dx of 4 channels per group took 15 to 18 ms by
     * `direct` and 23 to 39 by `product`, those of 8 channels 25 to 31 and 17 to 32.
     */
    FEW = 8,
    SHORT_SUM = 64,  /* pixels that a thread of `reduce` sums, at least, before there are more parts */
    LONG_SUM = 8192, /* pixels that it sums, at most: 256 chains of 32 */
    ABSENT = -1      /* instead of a slot */
};

/* As in the shaders. */
typedef enum result { RESULT_Y, RESULT_DX, RESULT_DWEIGHT, RESULT_DBIAS } result;

/* The kernels that make results or parts of them. */
typedef enum algorithm { PRODUCT, DIRECT, REDUCE } algorithm;
static const char *const kernels[] = {"product", "direct", "reduce"};

typedef struct plan {
    const vjp_work *work;
    vjp_conv2d_sizes s;
    result result;
    algorithm by;
    int out, picture, other, bias; /* slots */
    bool per_image;                /* the result is y or dx */
    int64_t channels, outs;        /* of a group */
    int64_t rows, terms;           /* of `product` */
    int64_t x_image, y_image;      /* elements */
    int64_t images, launches;      /* of a launch, at most; of the call */
    int64_t phases_h, phases_w, every_h, every_w, step_h, step_w;
    int64_t lanes, fours; /* of `reduce`: out channels, and fours of terms */
    gpu_tiles tiles;
    int64_t outputs; /* of a launch */
    int64_t parts;   /* that are joined */
} plan;

static int64_t common_divisor(int64_t a, int64_t b) {
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Pixels of dx along an axis and taps over them, by phase. A single window has no stride that matters. */
static void split_axis(int64_t size, int64_t out_size, int64_t dilation, int64_t *stride, int64_t *phases,
                       int64_t *every, int64_t *step) {
    if (out_size == 1) *stride = 1;
    int64_t divisor = common_divisor(*stride, dilation);
    *phases = vjp_min(*stride, size);
    *every = *stride / divisor;
    *step = dilation / divisor;
}

static void split_product(plan *p) {
    const vjp_conv2d_sizes *s = &p->s;
    int64_t pixels = p->images * s->out_height * s->out_width, columns = pixels, depth = p->terms;
    p->by = PRODUCT;
    if (p->result == RESULT_DWEIGHT) {
        columns = p->terms;
        depth = pixels;
    }
    if (p->result == RESULT_DX) { /* of the largest phase */
        columns = p->images * vjp_divide_up(s->height, s->stride_h) * vjp_divide_up(s->width, s->stride_w);
        depth = p->outs * vjp_divide_up(s->kernel_h, p->every_h) * vjp_divide_up(s->kernel_w, p->every_w);
    }
    p->tiles = gpu_tiles_of(p->work, s->groups * p->phases_h * p->phases_w, p->rows, columns, depth);
}

static void split_reduce(plan *p) {
    const vjp_conv2d_sizes *s = &p->s;
    int64_t threads = gpu_threads(p->work->device), pixels = p->images * s->out_height * s->out_width;
    p->by = REDUCE;
    p->lanes = s->channels_last ? vjp_min(gpu_power_of_two(s->out_channels, threads), threads) : 1;
    p->fours = p->result == RESULT_DBIAS ? 1 : vjp_divide_up(p->terms, 4);
    int64_t teams = threads / p->lanes;
    p->tiles.row_tiles = vjp_divide_up(s->out_channels, p->lanes);
    int64_t groups = vjp_max(1, p->tiles.row_tiles * p->fours);
    int64_t busy = vjp_min(GPU_BUSY / vjp_min(groups, GPU_BUSY), pixels / (teams * SHORT_SUM));
    int64_t parts = vjp_max(vjp_max(busy, vjp_divide_up(pixels, teams * LONG_SUM)), 1);
    p->tiles.span = vjp_divide_up(vjp_divide_up(pixels, parts), teams) * teams;
    p->tiles.parts = vjp_max(1, vjp_divide_up(pixels, vjp_max(p->tiles.span, 1)));
    p->tiles.column_tiles = p->tiles.chain = 1;
}

static plan plan_of(const vjp_work *work, result kind, int out, int picture, int other, int bias) {
    plan p = {.work = work, .s = vjp_conv2d_sizes_of(work), .result = kind};
    vjp_conv2d_sizes *s = &p.s;
    p.out = out;
    p.picture = picture;
    p.other = other;
    p.bias = bias;
    p.per_image = kind == RESULT_Y || kind == RESULT_DX;
    p.channels = s->channels / s->groups;
    p.outs = s->out_channels / s->groups;
    p.rows = kind == RESULT_DX ? p.channels : p.outs;
    p.terms = (kind == RESULT_DX ? p.outs : p.channels) * s->kernel_h * s->kernel_w;
    p.x_image = s->channels * s->height * s->width;
    p.y_image = s->out_channels * s->out_height * s->out_width;
    p.images = vjp_max(1, vjp_min(s->batch, GPU_CHUNK / vjp_max(1, vjp_max(p.x_image, p.y_image))));
    p.launches = vjp_max(1, vjp_divide_up(s->batch, p.images));
    p.phases_h = p.phases_w = 1;
    if (kind == RESULT_DX) {
        split_axis(s->height, s->out_height, s->dilation_h, &s->stride_h, &p.phases_h, &p.every_h, &p.step_h);
        split_axis(s->width, s->out_width, s->dilation_w, &s->stride_w, &p.phases_w, &p.every_w, &p.step_w);
    }
    if (kind == RESULT_DBIAS || (kind == RESULT_DWEIGHT && p.rows < FEW)) {
        split_reduce(&p);
    } else if (p.rows < FEW) {
        p.by = DIRECT;
        p.tiles = (gpu_tiles){.row_tiles = 1, .column_tiles = 1, .parts = 1, .chain = 1};
    } else {
        split_product(&p);
    }
    p.outputs = kind == RESULT_Y    ? p.images * p.y_image
                : kind == RESULT_DX ? p.images * p.x_image
                                    : vjp_elements(work, out);
    p.parts = p.tiles.parts;
    if (!p.per_image) { /* the last launch may have fewer images, and parts */
        int64_t pixels = (s->batch - (p.launches - 1) * p.images) * s->out_height * s->out_width;
        p.parts = (p.launches - 1) * p.parts + vjp_max(1, vjp_divide_up(pixels, vjp_max(p.tiles.span, 1)));
    }
    /* A launch that has a tensor of 2^31 elements is refused: its workspace must not overflow before that. */
    int64_t x_elements = kind == RESULT_DBIAS ? 0 : s->batch * p.x_image, y_elements = s->batch * p.y_image;
    if (vjp_max(vjp_max(x_elements, y_elements), p.terms * p.rows * s->groups) > INT32_MAX) p.parts = 1;
    return p;
}

/* ---- Launches ---------------------------------------------------------------------------------------- */

static gpu_launch begin(const plan *p, const char *kernel, int64_t images, int64_t parts, int64_t first_part) {
    const vjp_conv2d_sizes *s = &p->s;
    gpu_launch l = gpu_begin(p->work, kernel);
    l.threads = gpu_threads(p->work->device);
    gpu_constant(&l, "PASS", p->result);
    gpu_constant(&l, "LAST", s->channels_last);
    const int64_t values[] = {
        images,
        p->channels,
        p->outs,
        s->groups,
        s->height,
        s->width,
        s->out_height,
        s->out_width,
        s->kernel_h,
        s->kernel_w,
        s->stride_h,
        s->stride_w,
        s->padding_h,
        s->padding_w,
        s->dilation_h,
        s->dilation_w,
        p->every_h,
        p->every_w,
        p->step_h,
        p->step_w,
        p->phases_h,
        p->phases_w,
        p->per_image ? images * (p->result == RESULT_Y ? p->y_image : p->x_image) : p->outputs,
        p->tiles.row_tiles,
        p->tiles.column_tiles,
        parts,
        first_part,
        p->tiles.span,
        p->tiles.chain,
    };
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        gpu_u32(&l, values[i]);
    return l;
}

/* The images of a launch. */
static void bind_images(gpu_launch *l, const plan *p, const char *name, int slot, int64_t run, int64_t first,
                        int64_t images) {
    bool x = slot == (p->work->pass == VJP_FORWARD ? CONV2D_X : CONV2D_B_X) ||
             (p->work->pass == VJP_BACKWARD && slot == CONV2D_B_DX);
    int64_t image = x ? p->x_image : p->y_image;
    if (slot == p->out)
        gpu_tensor(l, name, slot, run);
    else
        gpu_fours(l, name, slot, run);
    gpu_part(l, first * image, images * image);
}

static void bind_out(gpu_launch *l, const plan *p, int64_t run, int64_t first, int64_t images) {
    if (p->per_image)
        bind_images(l, p, "out", p->out, run, first, images);
    else
        gpu_tensor(l, "out", p->out, run);
    if (p->bias >= 0) gpu_tensor(l, "bias", p->bias, 1);
}

/* All elements of a launch's output are one run. */
static int64_t whole_run(const plan *p) {
    if (!p->per_image || p->launches == 1) return vjp_elements(p->work, p->out);
    return p->result == RESULT_Y ? p->y_image : p->x_image;
}

static vjp_status join(const plan *p, int64_t first, int64_t images) {
    int64_t lanes = gpu_joining_lanes(p->work, p->parts), teams = gpu_threads(p->work->device) / lanes;
    gpu_launch l = begin(p, "join", images, p->parts, 0);
    gpu_constant(&l, "LANES", lanes);
    gpu_constant(&l, "TEAMS", teams);
    int64_t outputs = p->per_image ? p->outputs / p->images * images : p->outputs;
    bind_out(&l, p, whole_run(p), first, images);
    gpu_scratch(&l, "parts", VJP_F32, 0, p->parts * outputs, false);
    l.operand[l.operands - 1].fours = outputs % 4 == 0;
    return gpu_enqueue(&l, vjp_divide_up(vjp_divide_up(outputs, 4), teams));
}

/* Which neighbours a thread of `product` stores two at a time, and how many of them are a run. */
static int64_t product_run(const plan *p) {
    if (p->result == RESULT_DWEIGHT) return p->terms;
    if (p->s.channels_last) return p->rows;
    int64_t plane = p->result == RESULT_Y ? p->s.out_height * p->s.out_width : p->s.height * p->s.width;
    return plane % 2 == 0 && p->phases_h * p->phases_w == 1 ? plane : 1;
}

/* What a kernel reads: the picture and the other factor, along the axis on which they are contiguous. */
static void bind_inputs(gpu_launch *l, const plan *p, int64_t first, int64_t images) {
    bool last = p->s.channels_last;
    int64_t plane = p->s.out_height * p->s.out_width, in_group = p->result == RESULT_DX ? p->outs : p->channels;
    if (p->picture >= 0) bind_images(l, p, "picture", p->picture, last ? in_group : 1, first, images);
    if (!p->per_image)
        bind_images(l, p, "other", p->other, last ? p->outs : plane, first, images);
    else
        gpu_fours(l, "other", p->other, p->result == RESULT_Y ? p->terms : last ? p->channels : 1);
}

static vjp_status launch(const plan *p, int64_t n) {
    const gpu_tiles *t = &p->tiles;
    int64_t first = n * p->images, images = vjp_min(p->images, p->s.batch - first);
    int64_t pixels = images * p->s.out_height * p->s.out_width, parts = t->parts;
    if (!p->per_image) parts = vjp_max(1, vjp_divide_up(pixels, vjp_max(t->span, 1)));
    gpu_launch l = begin(p, kernels[p->by], images, parts, p->per_image ? 0 : n * t->parts);
    bool last = p->s.channels_last, dweight = p->result == RESULT_DWEIGHT, dx = p->result == RESULT_DX;
    int64_t groups, run = p->by == DIRECT ? whole_run(p) : p->by == REDUCE ? 1 : product_run(p);
    if (p->by == DIRECT) {
        groups = vjp_divide_up(vjp_divide_up(p->outputs / p->images * images, 2), l.threads);
    } else if (p->by == REDUCE) {
        groups = p->fours * t->row_tiles * parts;
        gpu_constant(&l, "LANES", p->lanes);
        gpu_constant(&l, "TEAMS", l.threads / p->lanes);
        gpu_constant(&l, "BY_FOURS", last && p->channels % 4 == 0);
    } else {
        bool planes = dweight && !last; /* four pixels of dy are loaded at once, else four channels of the picture */
        int64_t inner = planes ? p->s.out_height * p->s.out_width : dx ? p->outs : p->channels;
        groups = p->phases_h * p->phases_w * p->s.groups * t->row_tiles * t->column_tiles * parts;
        gpu_tiles_choose(&l, t);
        gpu_constant(&l, "LEFT_ALONG", !last || p->result == RESULT_Y);
        gpu_constant(&l, "RIGHT_ALONG", last != dweight);
        gpu_constant(&l, "BY_FOURS", (last || dweight) && inner % 4 == 0);
        gpu_constant(&l, "BY_TWOS", run != 1 || last || dweight);
    }
    bind_inputs(&l, p, first, images);
    if (p->parts > 1)
        gpu_scratch(&l, "parts_out", VJP_F32, 0, p->parts * p->outputs, true);
    else
        bind_out(&l, p, run, first, images);
    vjp_status status = gpu_enqueue(&l, groups);
    return status == VJP_OK && p->parts > 1 && p->per_image ? join(p, first, images) : status;
}

static vjp_status run(const plan *p) {
    vjp_status status = VJP_OK;
    if (vjp_elements(p->work, p->out) == 0) return status;
    for (int64_t n = 0; n < p->launches && status == VJP_OK; n++)
        status = launch(p, n);
    return status == VJP_OK && p->parts > 1 && !p->per_image ? join(p, 0, p->s.batch) : status;
}

static size_t bytes_of(const plan *p) {
    return p->parts > 1 ? gpu_scratch_bytes(p->parts * p->outputs, sizeof(float)) : 0;
}

/* ---- The passes -------------------------------------------------------------------------------------- */

static plan plan_y(const vjp_work *work) {
    int bias = work->tensor[CONV2D_BIAS] ? CONV2D_BIAS : ABSENT;
    return plan_of(work, RESULT_Y, CONV2D_Y, CONV2D_X, CONV2D_WEIGHT, bias);
}

/* The gradients that are wanted, at most three. */
static int plan_gradients(const vjp_work *work, plan wanted[3]) {
    int count = 0;
    if (work->tensor[CONV2D_B_DX])
        wanted[count++] = plan_of(work, RESULT_DX, CONV2D_B_DX, CONV2D_B_DY, CONV2D_B_WEIGHT, ABSENT);
    if (work->tensor[CONV2D_B_DWEIGHT])
        wanted[count++] = plan_of(work, RESULT_DWEIGHT, CONV2D_B_DWEIGHT, CONV2D_B_X, CONV2D_B_DY, ABSENT);
    if (work->tensor[CONV2D_B_DBIAS])
        wanted[count++] = plan_of(work, RESULT_DBIAS, CONV2D_B_DBIAS, ABSENT, CONV2D_B_DY, ABSENT);
    return count;
}

static vjp_status forward(const vjp_work *work) {
    if (!work->tensor[CONV2D_Y]) return VJP_OK;
    plan p = plan_y(work);
    return run(&p);
}

static vjp_status backward(const vjp_work *work) {
    plan wanted[3];
    int count = plan_gradients(work, wanted);
    vjp_status status = VJP_OK;
    for (int i = 0; i < count && status == VJP_OK; i++)
        status = run(&wanted[i]);
    return status;
}

static size_t forward_workspace(const vjp_work *work) {
    if (!work->tensor[CONV2D_Y]) return 0;
    plan p = plan_y(work);
    return bytes_of(&p);
}

static size_t backward_workspace(const vjp_work *work) {
    plan wanted[3];
    size_t bytes = 0;
    for (int i = plan_gradients(work, wanted) - 1; i >= 0; i--)
        if (bytes_of(&wanted[i]) > bytes) bytes = bytes_of(&wanted[i]);
    return bytes;
}

const vjp_kernel gpu_conv2d[VJP_PASS_COUNT] = {{forward, forward_workspace, VJP_STORAGE_16_32},
                                               {backward, backward_workspace, VJP_STORAGE_16_32}};

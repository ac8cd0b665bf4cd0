/* SPDX-License-Identifier: MIT */
/*
 * See sums.h. A team of `lanes` threads by `columns` pairs of columns has a chunk of an axis, FOUR positions per thread
 * in each step; where inner is 1 a thread has four neighbours of the line instead. Teams smaller than a workgroup share
 * one. The kernels are in sums.wgsl and sums.metal.
 *
 *     enough teams to fill a GPU   one launch, `sums`
 *     fewer, or squares where      an axis is split into chunks: `sums` leaves a sum of each, and `finish` adds them;
 *     launches can be merged       of many calls the first launches are one, and the second ones are one
 *
 * `sums` is repeated per GPU_CHUNK elements, which every device can bind at once.
 */
#include "gpu/ops/sums.h"

enum {
    FOUR = 4,     /* positions of a thread in a step */
    PARTIAL = 4,  /* floats of a chunk's sum: two pairs */
    ENOUGH = 512, /* teams that fill a large GPU */
    SHORTEST = 4  /* steps of a chunk, at least */
};

/* An item is a chunk of all columns of an axis; items follow each other in memory. */
typedef struct split {
    bool lines;                    /* inner is 1 */
    int64_t threads;               /* of a workgroup: the largest power of two that the device has */
    int64_t lanes, columns, tiles; /* of a team: threads along the axis and across it; tiles of columns */
    int64_t chunk, chunks, items;
    bool two_stages; /* `sums` leaves partial sums, which `finish` adds */
} split;

static split split_of(const vjp_work *work, const gpu_sums *s) {
    split c = {.lines = s->inner == 1};
    int64_t pairs = vjp_divide_up(s->inner, 2);
    c.threads = gpu_power_of_two(gpu_threads(work->device) / 2 + 1, GPU_THREADS);
    c.columns = gpu_power_of_two(pairs, c.threads);
    c.tiles = vjp_divide_up(pairs, c.columns);
    c.lanes = gpu_power_of_two(vjp_divide_up(s->length, FOUR), c.threads / c.columns);
    int64_t step = FOUR * c.lanes, teams = s->outer * c.tiles;
    int64_t chunks = vjp_max(1, vjp_min(ENOUGH / vjp_max(teams, 1), s->length / (SHORTEST * step)));
    chunks = vjp_max(chunks, vjp_divide_up(s->length * s->inner, GPU_CHUNK));
    c.chunk = vjp_max(vjp_max(s->length / chunks / step, 1) * step, 1);
    if (chunks == 1) c.chunk = vjp_max(s->length, 1);
    c.chunks = vjp_max(vjp_divide_up(s->length, c.chunk), 1);
    c.items = s->outer * c.chunks;
    c.two_stages = c.chunks > 1 || (s->term == GPU_SQUARES && gpu_merges(work->device));
    return c;
}

static int64_t partials_of(const split *c, const gpu_sums *s) {
    return c->two_stages ? PARTIAL * c->items * s->inner : 0;
}

static int64_t element_of(const split *c, const gpu_sums *s, int64_t item) {
    int64_t outer = item / c->chunks;
    return (outer * s->length + (item - outer * c->chunks) * c->chunk) * s->inner;
}

/* Items or results [first, end). */
static gpu_launch begin(const vjp_work *work, const split *c, const gpu_sums *s, const char *kernel, int64_t first,
                        int64_t end, int64_t lanes) {
    gpu_launch l = gpu_begin(work, kernel);
    l.shader = "sums";
    l.threads = (int)c->threads;
    gpu_constant(&l, "LINES", c->lines);
    gpu_constant(&l, "TERM", s->term);
    gpu_u32(&l, first);
    gpu_u32(&l, end);
    gpu_u32(&l, element_of(c, s, first));
    gpu_u32(&l, s->length);
    gpu_u32(&l, s->inner);
    gpu_u32(&l, c->chunks);
    gpu_u32(&l, c->chunk);
    gpu_u32(&l, vjp_divide_up(c->chunk, FOUR * c->lanes));
    gpu_u32(&l, lanes);
    gpu_u32(&l, c->columns);
    gpu_u32(&l, c->tiles);
    gpu_u32(&l, 0); /* a zero that compilers cannot know */
    gpu_f32(&l, s->factor);
    return l;
}

static vjp_status sum_items(const vjp_work *work, const split *c, const gpu_sums *s, int64_t first, int64_t end) {
    gpu_launch l = begin(work, c, s, "sums", first, end, c->lanes);
    int64_t offset = element_of(c, s, first), count = element_of(c, s, end) - offset;
    for (int i = 0; i <= (s->term == GPU_PRODUCTS); i++) {
        gpu_fours(&l, i ? "in1" : "in0", s->in[i], c->lines ? s->length : s->inner);
        gpu_part(&l, offset, count);
    }
    if (c->two_stages) {
        l.merge = GPU_BESIDE;
        gpu_scratch(&l, "partials_out", VJP_F32, 0, partials_of(c, s), true);
    } else {
        gpu_tensor(&l, "out", s->out, 1);
    }
    return gpu_enqueue(&l, vjp_divide_up((end - first) * c->tiles, c->threads / (c->lanes * c->columns)));
}

static vjp_status finish(const vjp_work *work, const split *c, const gpu_sums *s) {
    int64_t results = s->outer * s->inner, lanes = gpu_power_of_two(vjp_divide_up(c->chunks, FOUR), c->threads);
    gpu_launch l = begin(work, c, s, "finish", 0, results, lanes);
    l.merge = GPU_IN_ORDER;
    gpu_tensor(&l, "out", s->out, 1);
    gpu_scratch(&l, "partials", VJP_F32, 0, partials_of(c, s), false);
    return gpu_enqueue(&l, vjp_divide_up(results, c->threads / lanes));
}

vjp_status gpu_run_sums(const vjp_work *work, const gpu_sums *s) {
    if (!vjp_data(work, s->out) || s->outer == 0 || s->inner == 0) return VJP_OK;
    split c = split_of(work, s);
    int64_t step = vjp_max(1, GPU_CHUNK / (c.chunk * s->inner));
    vjp_status status = VJP_OK;
    for (int64_t first = 0; first < c.items && status == VJP_OK; first += step)
        status = sum_items(work, &c, s, first, vjp_min(first + step, c.items));
    return status == VJP_OK && c.two_stages ? finish(work, &c, s) : status;
}

size_t gpu_sums_workspace(const vjp_work *work, const gpu_sums *s) {
    if (!work->tensor[s->out] || s->outer == 0 || s->inner == 0) return 0;
    split c = split_of(work, s);
    return gpu_scratch_bytes(partials_of(&c, s), 4);
}

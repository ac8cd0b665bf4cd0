/* SPDX-License-Identifier: MIT */
/*
 * cumsum: x as [outer, length, inner], running sums along length; the backward is the scan from the other end, as the
 * sizes say. A team of `lanes` threads by `columns` pairs of columns goes along the axis, ROWS positions per thread in
 * each step, and carries the sum so far. Where inner is 1 a thread's pair is two lines instead. Teams smaller than a
 * workgroup share one. The kernels are in cumsum.wgsl and cumsum.metal.
 *
 *     enough teams to fill a GPU   one launch, `scan`
 *     fewer                        the axis is split into segments: `sums` sums each, then each team of `scan` starts
 *                                  from the sum of the segments before its own
 *
 * Either is repeated per GPU_CHUNK elements, which every device can bind at once.
 */
#include "gpu/gpu.h"

enum {
    ROWS = 4, /* positions of a thread in a step */

    /*
     * With fewer tracks (lines, or a team's columns twice) than ENOUGH a large GPU is idle; then they are split into
     * segments, up to MAX_TRACKS of them, each of SHORTEST steps or more. Two tracks are a workgroup.
     */
    ENOUGH = 512,
    MAX_TRACKS = 1024,
    SHORTEST = 4
};

/* An item is a segment of all columns of an axis; items follow each other in memory. */
typedef struct split {
    vjp_cumsum_sizes s;
    bool lines;                    /* inner is 1 */
    int64_t threads;               /* of a workgroup: the largest power of two that the device has */
    int64_t lanes, columns, tiles; /* of a team: threads along the axis and across it; tiles of columns */
    int64_t segment, segments;     /* positions in each, and how many */
    int64_t items;
} split;

static split split_of(const vjp_work *work) {
    split c = {.s = vjp_cumsum_sizes_of(work)};
    int64_t length = c.s.length, pairs = vjp_divide_up(c.s.inner, 2);
    if (c.s.outer == 0 || length == 0 || c.s.inner == 0) return c;
    c.lines = c.s.inner == 1;
    c.threads = gpu_power_of_two(gpu_threads(work->device) / 2 + 1, GPU_THREADS);
    c.columns = gpu_power_of_two(pairs, c.threads);
    c.tiles = vjp_divide_up(pairs, c.columns);
    c.lanes = gpu_power_of_two(vjp_divide_up(length, ROWS), c.threads / c.columns);
    int64_t tracks = c.lines ? c.s.outer : 2 * c.s.outer * c.tiles, step = ROWS * c.lanes, segments = 1;
    if (tracks < ENOUGH) segments = vjp_min(MAX_TRACKS / tracks, length / (SHORTEST * step));
    /* A segment reads all sums before its own: at most a quarter as many as it has positions. */
    while (segments > 1 && 4 * segments * segments > length)
        segments--;
    segments = vjp_max(segments, vjp_divide_up(length * c.s.inner, GPU_CHUNK));
    c.segment = segments > 1 ? length / segments / step * step : length;
    c.segment = vjp_max(c.segment, vjp_min(step, length));
    c.segments = vjp_divide_up(length, c.segment);
    c.items = c.s.outer * c.segments;
    return c;
}

/* Floats of the segments' sums, two per sum. */
static int64_t totals_of(const split *c) {
    return c->segments > 1 ? 2 * c->items * c->s.inner : 0;
}

static int64_t element_of(const split *c, int64_t item) {
    int64_t outer = item / c->segments;
    return (outer * c->s.length + (item - outer * c->segments) * c->segment) * c->s.inner;
}

static void bind(const split *c, gpu_launch *l, const char *name, int slot, int64_t first, int64_t end) {
    int64_t begin = element_of(c, first);
    gpu_fours(l, name, slot, c->lines ? c->s.length : c->s.inner);
    gpu_part(l, begin, element_of(c, end) - begin);
}

/* Items [first, end). */
static vjp_status launch_items(const vjp_work *work, const split *c, bool sums, int64_t first, int64_t end) {
    gpu_launch l = gpu_begin(work, sums ? "sums" : "scan");
    l.threads = (int)c->threads;
    gpu_constant(&l, "LINES", c->lines);
    bind(c, &l, "x", CUMSUM_X, first, end);
    if (!sums) bind(c, &l, "y", CUMSUM_Y, first, end);
    if (c->segments > 1) gpu_scratch(&l, "totals", VJP_F32, 0, totals_of(c), sums);
    gpu_u32(&l, first);
    gpu_u32(&l, end);
    gpu_u32(&l, element_of(c, first));
    gpu_u32(&l, c->s.length);
    gpu_u32(&l, c->s.inner);
    gpu_u32(&l, c->segments);
    gpu_u32(&l, c->segment);
    gpu_u32(&l, vjp_divide_up(c->segment, ROWS * c->lanes));
    gpu_u32(&l, c->lanes);
    gpu_u32(&l, c->columns);
    gpu_u32(&l, c->tiles);
    gpu_u32(&l, c->s.reverse);
    gpu_u32(&l, c->s.exclusive);
    gpu_u32(&l, 0); /* a zero that compilers cannot know */
    int64_t teams = c->lines ? vjp_divide_up(end - first, 2) : (end - first) * c->tiles;
    return gpu_enqueue(&l, vjp_divide_up(teams, c->threads / (c->lanes * c->columns)));
}

static vjp_status launch_all(const vjp_work *work, const split *c, bool sums) {
    int64_t step = vjp_max(1, GPU_CHUNK / (c->segment * c->s.inner));
    vjp_status status = VJP_OK;
    for (int64_t first = 0; first < c->items && status == VJP_OK; first += step)
        status = launch_items(work, c, sums, first, vjp_min(first + step, c->items));
    return status;
}

static vjp_status scan(const vjp_work *work) {
    split c = split_of(work);
    if (!vjp_data(work, CUMSUM_Y) || c.items == 0) return VJP_OK;
    vjp_status status = c.segments > 1 ? launch_all(work, &c, true) : VJP_OK;
    return status == VJP_OK ? launch_all(work, &c, false) : status;
}

static size_t workspace(const vjp_work *work) {
    split c = split_of(work);
    return work->tensor[CUMSUM_Y] ? gpu_scratch_bytes(totals_of(&c), 4) : 0;
}

const vjp_kernel gpu_cumsum[VJP_PASS_COUNT] = {{scan, workspace, VJP_STORAGE_16_32},
                                               {scan, workspace, VJP_STORAGE_16_32}};

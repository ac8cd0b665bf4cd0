/*
 * cumsum: x as [outer, length, inner], running sums along length; the backward is the scan from the other end, which
 * the sizes already say. A team of `lanes` threads by `columns` pairs of columns walks along the axis, ROWS places a
 * thread at each step, and carries what has been summed. Where inner is 1 a thread's pair is two lines instead. Teams
 * that are less than a workgroup share one.
 *
 * Where that gives too few workgroups the axis is cut into segments. A first launch sums each of them; in the second
 * each team adds up the sums of the segments before its own and scans from there. So a pass is one launch or two, each
 * done in pieces where a tensor is larger than every device binds at once.
 */
#include "gpu/gpu.h"

enum {
    ROWS = 4, /* of a thread: places of a step */

    /*
     * With fewer tracks (lines, or a team's columns twice) than ENOUGH a large card is idle; then they are cut into
     * segments, up to MOST_TRACKS of them, each of SHORTEST steps or more. Two tracks are a workgroup.
     */
    ENOUGH = 512,
    MOST_TRACKS = 1024,
    SHORTEST = 4
};

/* An item is a segment of all columns of an axis; items lie one after the other in memory. */
typedef struct cut {
    vjp_cumsum_sizes s;
    bool lines;                    /* inner is 1 */
    int64_t threads;               /* of a workgroup: a power of two, no more than there are */
    int64_t lanes, columns, tiles; /* of a team: threads along the axis and across it; tiles of columns */
    int64_t segment, segments;     /* places in each, and how many */
    int64_t items;
} cut;

static cut cut_of(const vjp_work *work) {
    cut c = {.s = vjp_cumsum_sizes_of(work)};
    int64_t length = c.s.length, pairs = gpu_divide_up(c.s.inner, 2);
    if (c.s.outer == 0 || length == 0 || c.s.inner == 0) return c;
    c.lines = c.s.inner == 1;
    c.threads = gpu_power(gpu_threads(work->device) / 2 + 1, GPU_THREADS);
    c.columns = gpu_power(pairs, c.threads);
    c.tiles = gpu_divide_up(pairs, c.columns);
    c.lanes = gpu_power(gpu_divide_up(length, ROWS), c.threads / c.columns);
    int64_t tracks = c.lines ? c.s.outer : 2 * c.s.outer * c.tiles, step = ROWS * c.lanes, segments = 1;
    if (tracks < ENOUGH) segments = gpu_least(MOST_TRACKS / tracks, length / (SHORTEST * step));
    /* All sums before a segment are read again: at most a quarter as many as it has places. */
    while (segments > 1 && 4 * segments * segments > length)
        segments--;
    segments = gpu_most(segments, gpu_divide_up(length * c.s.inner, GPU_PIECE));
    c.segment = segments > 1 ? length / segments / step * step : length;
    c.segment = gpu_most(c.segment, gpu_least(step, length));
    c.segments = gpu_divide_up(length, c.segment);
    c.items = c.s.outer * c.segments;
    return c;
}

/* Floats of the segments' sums, two each. */
static int64_t totals_of(const cut *c) {
    return c->segments > 1 ? 2 * c->items * c->s.inner : 0;
}

static int64_t element_of(const cut *c, int64_t item) {
    int64_t outer = item / c->segments;
    return (outer * c->s.length + (item - outer * c->segments) * c->segment) * c->s.inner;
}

static void bind(const cut *c, gpu_launch *l, const char *name, int slot, int64_t first, int64_t end) {
    int64_t begin = element_of(c, first);
    gpu_fours(l, name, slot, c->lines ? c->s.length : c->s.inner);
    gpu_part(l, begin, element_of(c, end) - begin);
}

/* Items [first, end). */
static vjp_status piece(const vjp_work *work, const cut *c, bool sums, int64_t first, int64_t end) {
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
    gpu_u32(&l, gpu_divide_up(c->segment, ROWS * c->lanes));
    gpu_u32(&l, c->lanes);
    gpu_u32(&l, c->columns);
    gpu_u32(&l, c->tiles);
    gpu_u32(&l, c->s.reverse);
    gpu_u32(&l, c->s.exclusive);
    gpu_u32(&l, 0); /* a zero that compilers do not know of */
    int64_t teams = c->lines ? gpu_divide_up(end - first, 2) : (end - first) * c->tiles;
    return gpu_enqueue(&l, gpu_divide_up(teams, c->threads / (c->lanes * c->columns)));
}

static vjp_status pieces(const vjp_work *work, const cut *c, bool sums) {
    int64_t step = gpu_most(1, GPU_PIECE / (c->segment * c->s.inner));
    vjp_status status = VJP_OK;
    for (int64_t first = 0; first < c->items && status == VJP_OK; first += step)
        status = piece(work, c, sums, first, gpu_least(first + step, c->items));
    return status;
}

static vjp_status scan(const vjp_work *work) {
    cut c = cut_of(work);
    if (!vjp_data(work, CUMSUM_Y) || c.items == 0) return VJP_OK;
    vjp_status status = c.segments > 1 ? pieces(work, &c, true) : VJP_OK;
    return status == VJP_OK ? pieces(work, &c, false) : status;
}

static size_t workspace(const vjp_work *work) {
    cut c = cut_of(work);
    return work->tensor[CUMSUM_Y] ? gpu_piece(totals_of(&c), 4) : 0;
}

const vjp_kernel gpu_cumsum[VJP_PASS_COUNT] = {{scan, workspace, VJP_BITS_CPU}, {scan, workspace, VJP_BITS_CPU}};

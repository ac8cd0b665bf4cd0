/*
 * How group_norm is cut. A team of threads has a group while that is small; larger ones are cut into pieces, and their
 * numbers go through the workspace:
 *
 *   pieces   [batch, groups, pieces]: statistics of a piece of a group's flat run of elements
 *   lines    [batch, groups, parts]: sums of g and g * xh over a part, some channels and some of their places
 *   cells    [batch, pieces of the plane, channels]: sums of dy and dy * xh, of which dbeta and dgamma are the sums
 */
#include "gpu/gpu.h"

enum {
    WHOLE_EACH = 32,   /* elements of a thread, at most, where a team has a whole group: 8192 are 64 KiB of x and dy */
    PIECE_EACH = 16,   /* elements of a thread of a piece, while there are not more than MOST_PIECES */
    MOST_PIECES = 256, /* of a group: each team that needs the group's numbers reads those of all pieces */
    NEAR = 16,         /* elements side by side that teams of one workgroup should have between them: 64 bytes of f32 */
    COLUMNS = 8,       /* channels that a workgroup adds over the batch */
    LARGEST_SCALE = 60 /* groups of 1e-20 need 2^60 for their squares; eps * 2^120 must stay finite, so eps < 1 there */
};

typedef struct cut {
    vjp_group_norm_sizes s;
    bool last, whole, saved;
    bool dx, sums, normal; /* of the backward: what is wanted, and whether that needs xh */
    int64_t rows, count;   /* groups of all samples, elements of one */
    int64_t threads, lanes, teams, along, columns;
    int64_t piece, pieces;
    int64_t channel_piece, place_piece, place_pieces, parts;
    size_t lines, cells, bytes; /* where they lie in the workspace, behind the pieces; all of it */
} cut;

/* Parts by channel: whole planes where they are small, else pieces of them. The whole group is one part. */
static void cut_parts(cut *c) {
    int64_t channels = c->s.group_channels, plane = c->s.plane;
    c->channel_piece = channels;
    c->place_piece = plane;
    if (!c->whole && c->last) {
        c->channel_piece = gpu_least(channels, 2 * c->lanes);
        c->place_piece = gpu_most(1, c->piece / c->channel_piece);
    } else if (!c->whole) {
        c->channel_piece = gpu_least(channels, gpu_most(1, c->piece / plane));
        c->place_piece = gpu_least(plane, c->piece);
    }
    c->place_pieces = gpu_divide_up(plane, c->place_piece);
    c->parts = c->place_pieces * gpu_divide_up(channels, c->channel_piece);
    c->along = c->last ? c->lanes / gpu_power(gpu_divide_up(c->channel_piece, 2), c->lanes)
                       : gpu_power(gpu_divide_up(c->place_piece, 2), c->lanes);
}

static cut cut_of(const vjp_work *work) {
    cut c = {.s = vjp_group_norm_sizes_of(work)};
    const vjp_group_norm_attributes *a = work->attributes;
    bool backward = work->pass == VJP_BACKWARD;
    c.last = a->layout == VJP_LAYOUT_CHANNELS_LAST;
    c.saved = backward && work->tensor[GROUP_NORM_B_MEAN] && work->tensor[GROUP_NORM_B_RSTD];
    c.dx = backward && work->tensor[GROUP_NORM_B_DX];
    c.sums = backward && (work->tensor[GROUP_NORM_B_DGAMMA] || work->tensor[GROUP_NORM_B_DBETA]);
    c.normal = !backward || c.dx || work->tensor[GROUP_NORM_B_DGAMMA];
    c.rows = c.s.batch * c.s.groups;
    c.count = c.s.group_channels * c.s.plane;
    c.threads = gpu_power(gpu_threads(work->device) / 2 + 1, GPU_THREADS); /* a power of two, no more than there are */
    c.lanes = gpu_power(gpu_divide_up(c.count, 2), c.threads);
    if (c.last) {
        int64_t beside = gpu_least(gpu_divide_up(NEAR, c.s.group_channels), c.s.groups);
        c.lanes = gpu_least(c.lanes, c.threads / gpu_power(beside, gpu_least(NEAR, c.threads)));
    }
    c.teams = c.threads / c.lanes;
    c.columns = gpu_power(c.s.channels, gpu_least(COLUMNS, c.threads));
    c.whole = c.count <= c.lanes * WHOLE_EACH;
    int64_t turn = 2 * c.lanes; /* what a team takes at a time */
    c.piece = gpu_most(c.lanes * PIECE_EACH, gpu_divide_up(gpu_divide_up(c.count, MOST_PIECES), turn) * turn);
    c.pieces = gpu_divide_up(c.count, c.piece);
    cut_parts(&c);
    bool measures = !c.whole && !c.saved && c.normal;
    c.lines = measures ? gpu_piece(c.rows * c.pieces * 4, 4) : 0;
    c.cells = c.lines + (!c.whole && c.dx ? gpu_piece(c.rows * c.parts * 2, 4) : 0);
    c.bytes = c.cells + (c.sums ? gpu_piece(c.s.batch * c.place_pieces * c.s.channels * 2, 4) : 0);
    return c;
}

static size_t workspace(const vjp_work *work) {
    return cut_of(work).bytes;
}

/* `cuts`: in how many items each group is cut, a team for each. */
static gpu_launch begin(const vjp_work *work, const cut *c, const char *kernel, int64_t cuts) {
    const vjp_group_norm_attributes *a = work->attributes;
    gpu_launch l = gpu_begin(work, kernel);
    int64_t inner = c->last ? c->s.group_channels : c->s.plane;
    l.threads = (int)c->threads;
    gpu_constant(&l, "LAST", c->last);
    gpu_constant(&l, "SAVED", c->saved);
    gpu_constant(&l, "NORMAL", c->normal);
    gpu_u32(&l, c->rows * cuts);
    gpu_u32(&l, c->s.groups);
    gpu_u32(&l, cuts);
    gpu_u32(&l, c->s.channels);
    gpu_u32(&l, c->s.group_channels);
    gpu_u32(&l, c->s.plane);
    gpu_u32(&l, c->lanes);
    gpu_u32(&l, c->teams);
    gpu_u32(&l, c->along);
    gpu_u32(&l, inner);
    gpu_u32(&l, c->last ? c->s.channels : c->s.plane);
    gpu_u32(&l, 2 * c->lanes / inner);
    gpu_u32(&l, 2 * c->lanes % inner);
    gpu_u32(&l, c->piece);
    gpu_u32(&l, c->pieces);
    gpu_u32(&l, c->channel_piece);
    gpu_u32(&l, c->place_piece);
    gpu_u32(&l, c->place_pieces);
    gpu_u32(&l, c->parts);
    gpu_u32(&l, c->s.batch * c->place_pieces);
    gpu_u32(&l, c->columns);
    gpu_u32(&l, a->eps < 1 ? LARGEST_SCALE : 0);
    gpu_f32(&l, a->eps);
    gpu_f32(&l, 1 / (double)c->count);
    return l;
}

static vjp_status enqueue(const gpu_launch *l, const cut *c, int64_t cuts) {
    return gpu_enqueue(l, gpu_divide_up(c->rows * cuts, c->teams));
}

/* Runs of elements that start at a multiple of their length and are walked in twos. */
static int64_t run_of(const cut *c) {
    if (!c->last || c->s.groups == 1) return c->count;
    return c->s.group_channels % 2 ? 1 : c->s.group_channels;
}

static void bind_pieces(gpu_launch *l, const cut *c, bool output) {
    gpu_scratch(l, "pieces", VJP_F32, 0, c->rows * c->pieces * 4, output);
}

/* Absent where nothing needs them, like the tensors. */
static void bind_lines(gpu_launch *l, const cut *c, bool output) {
    gpu_scratch(l, "lines", VJP_F32, c->lines, c->dx ? c->rows * c->parts * 2 : 0, output);
}

static void bind_cells(gpu_launch *l, const cut *c, bool output) {
    int64_t count = c->s.batch * c->place_pieces * c->s.channels * 2;
    gpu_scratch(l, "cells", VJP_F32, c->cells, c->sums ? count : 0, output);
}

static vjp_status moments(const vjp_work *work, const cut *c, int x) {
    gpu_launch l = begin(work, c, "moments", c->pieces);
    gpu_tensor(&l, "x", x, run_of(c));
    bind_pieces(&l, c, true);
    return enqueue(&l, c, c->pieces);
}

static vjp_status forward(const vjp_work *work) {
    cut c = cut_of(work);
    bool y = work->tensor[GROUP_NORM_Y];
    if (!c.rows || (!y && !work->tensor[GROUP_NORM_MEAN] && !work->tensor[GROUP_NORM_RSTD])) return VJP_OK;
    vjp_status status = c.whole ? VJP_OK : moments(work, &c, GROUP_NORM_X);
    if (status != VJP_OK) return status;
    int64_t cuts = !c.whole && y ? c.pieces : 1;
    gpu_launch l = begin(work, &c, c.whole ? "forward" : "normalise", cuts);
    gpu_tensor(&l, "y", GROUP_NORM_Y, run_of(&c));
    gpu_tensor(&l, "mean", GROUP_NORM_MEAN, 1);
    gpu_tensor(&l, "rstd", GROUP_NORM_RSTD, 1);
    gpu_tensor(&l, "x", GROUP_NORM_X, run_of(&c));
    gpu_tensor(&l, "gamma", GROUP_NORM_GAMMA, 1);
    gpu_tensor(&l, "beta", GROUP_NORM_BETA, 1);
    if (!c.whole) bind_pieces(&l, &c, false);
    return enqueue(&l, &c, cuts);
}

static void bind_inputs(gpu_launch *l, const cut *c) {
    gpu_tensor(l, "dy", GROUP_NORM_B_DY, run_of(c));
    gpu_tensor(l, "x", GROUP_NORM_B_X, run_of(c));
    gpu_tensor(l, "gamma", GROUP_NORM_B_GAMMA, 1);
    if (c->saved) {
        gpu_tensor(l, "mean_in", GROUP_NORM_B_MEAN, 1);
        gpu_tensor(l, "rstd_in", GROUP_NORM_B_RSTD, 1);
    } else if (!c->whole && c->normal) {
        bind_pieces(l, c, false);
    }
}

static vjp_status backward_whole(const vjp_work *work, const cut *c) {
    gpu_launch l = begin(work, c, "backward", 1);
    gpu_tensor(&l, "dx", GROUP_NORM_B_DX, run_of(c));
    bind_inputs(&l, c);
    bind_cells(&l, c, true);
    return enqueue(&l, c, 1);
}

static vjp_status backward_cut(const vjp_work *work, const cut *c) {
    vjp_status status = c->saved || !c->normal ? VJP_OK : moments(work, c, GROUP_NORM_B_X);
    if (status != VJP_OK) return status;
    gpu_launch l = begin(work, c, "sums", c->parts);
    bind_inputs(&l, c);
    bind_lines(&l, c, true);
    bind_cells(&l, c, true);
    status = enqueue(&l, c, c->parts);
    if (status != VJP_OK || !c->dx) return status;
    l = begin(work, c, "gradient", c->pieces);
    gpu_tensor(&l, "dx", GROUP_NORM_B_DX, run_of(c));
    bind_inputs(&l, c);
    bind_lines(&l, c, false);
    return enqueue(&l, c, c->pieces);
}

/* With no sample there are no cells, and the sums are 0. */
static vjp_status finish(const vjp_work *work, const cut *c) {
    gpu_launch l = begin(work, c, "finish", 1);
    gpu_tensor(&l, "dgamma", GROUP_NORM_B_DGAMMA, 1);
    gpu_tensor(&l, "dbeta", GROUP_NORM_B_DBETA, 1);
    bind_cells(&l, c, false);
    return gpu_enqueue(&l, gpu_divide_up(c->s.channels, c->columns));
}

static vjp_status backward(const vjp_work *work) {
    cut c = cut_of(work);
    if (!c.dx && !c.sums) return VJP_OK;
    vjp_status status = VJP_OK;
    if (c.rows) status = c.whole ? backward_whole(work, &c) : backward_cut(work, &c);
    return status == VJP_OK && c.sums ? finish(work, &c) : status;
}

const vjp_kernel gpu_group_norm[VJP_PASS_COUNT] = {{forward, workspace, VJP_BITS_CPU},
                                                   {backward, workspace, VJP_BITS_CPU}};

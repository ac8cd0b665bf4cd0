/* SPDX-License-Identifier: MIT */
/*
 * layer_norm and rms_norm: one set of kernels (norm.wgsl, norm.metal), compiled once for each op; here are the split of
 * the work and the slots of both ops.
 *
 *     rows up to 4096 columns   one launch forward; `columns` and, for dgamma and dbeta, `finish` backward
 *     longer rows               the same, with `measure` before `columns`: a row's statistics go through the workspace
 *
 * A team of threads, at most a whole workgroup, has a row, and a thread up to MAX_PAIRS pairs of its columns, so that
 * its column sums stay in registers. Longer rows are split into tiles of columns.
 */
#include "gpu/gpu.h"

enum {
    MAX_PAIRS = 8,     /* of a thread: 256 threads then have rows of 4096 columns */
    CHUNKS = 256,      /* of rows, at most: each leaves column sums in the workspace */
    TEAM_ROWS = 4,     /* that a team has at least, before rows are split into more chunks */
    STATS = 7,         /* numbers of a row that `measure` leaves */
    LARGEST_SCALE = 60 /* rows of 1e-20 need 2^60 for their squares; eps * 2^120 must stay finite, so eps < 1 there */
};

/* A call. A slot that the op does not have is -1. */
typedef struct norm_call {
    const vjp_work *work;
    vjp_norm_sizes sizes;
    double eps;
    int y, x, gamma, beta, mean, rstd; /* the backward's mean and rstd are inputs, and its beta is for y */
    int dx, dgamma, dbeta, dy;
} norm_call;

typedef struct split {
    int64_t threads, lanes, teams, pairs, tiles, chunks, chunk_rows;
    bool fused, saved, sums;
    size_t stats, bytes; /* where the workspace has the statistics of long rows, after the column sums; its size */
} split;

static bool has(const norm_call *n, int slot) {
    return slot >= 0 && vjp_data(n->work, slot);
}

static split split_of(const norm_call *n) {
    split c = {0};
    int64_t rows = n->sizes.rows, dim = n->sizes.dim, pairs = vjp_divide_up(dim, 2);
    c.threads = gpu_threads(n->work->device);
    c.lanes = vjp_min(gpu_power_of_two(pairs, c.threads), c.threads);
    c.teams = c.threads / c.lanes;
    c.pairs = gpu_power_of_two(vjp_divide_up(pairs, c.lanes), MAX_PAIRS);
    c.tiles = vjp_divide_up(pairs, c.lanes * c.pairs);
    c.fused = c.tiles == 1;
    c.chunks = vjp_max(1, vjp_min(CHUNKS / vjp_min(c.tiles, CHUNKS), vjp_divide_up(rows, c.teams * TEAM_ROWS)));
    c.chunk_rows = vjp_divide_up(vjp_divide_up(rows, c.chunks), c.teams) * c.teams;
    c.chunks = vjp_divide_up(rows, vjp_max(c.chunk_rows, 1));
    c.saved = n->work->pass == VJP_BACKWARD && has(n, n->rstd) && (n->mean < 0 || has(n, n->mean));
    c.sums = n->work->pass == VJP_BACKWARD && (n->work->tensor[n->dgamma] || n->work->tensor[n->dbeta]);
    c.stats = c.sums ? gpu_scratch_bytes(c.chunks * 2 * dim, 4) : 0;
    c.bytes = c.stats + (c.fused ? 0 : gpu_scratch_bytes(rows * STATS, 4));
    return c;
}

static gpu_launch begin(const norm_call *n, const split *c, const char *kernel) {
    gpu_launch l = gpu_begin(n->work, kernel);
    l.threads = (int)c->threads;
    gpu_u32(&l, n->sizes.rows);
    gpu_u32(&l, n->sizes.dim);
    gpu_u32(&l, c->chunks);
    gpu_u32(&l, c->chunk_rows);
    gpu_u32(&l, c->tiles);
    gpu_u32(&l, c->lanes);
    gpu_u32(&l, c->teams);
    gpu_f32(&l, n->eps);
    gpu_f32(&l, 1 / (double)n->sizes.dim);
    gpu_u32(&l, n->eps < 1 ? LARGEST_SCALE : 0);
    return l;
}

static void bind(gpu_launch *l, const char *name, int slot, int64_t run) {
    if (slot >= 0) gpu_tensor(l, name, slot, run);
}

static vjp_status forward(const norm_call *n) {
    if (!n->sizes.rows || !n->sizes.dim) return VJP_OK;
    split c = split_of(n);
    gpu_launch l = begin(n, &c, "forward");
    bind(&l, "y", n->y, n->sizes.dim);
    bind(&l, "mean", n->mean, 1);
    bind(&l, "rstd", n->rstd, 1);
    bind(&l, "x", n->x, n->sizes.dim);
    bind(&l, "gamma", n->gamma, 1);
    bind(&l, "beta", n->beta, 1);
    return gpu_enqueue(&l, vjp_divide_up(n->sizes.rows, c.teams));
}

static void bind_rows(const norm_call *n, const split *c, gpu_launch *l) {
    bind(l, "dy", n->dy, n->sizes.dim);
    bind(l, "x", n->x, n->sizes.dim);
    bind(l, "gamma", n->gamma, 1);
    if (!c->saved) return;
    bind(l, "mean_in", n->mean, 1);
    bind(l, "rstd_in", n->rstd, 1);
}

/* The statistics of rows that are too long for one workgroup. */
static vjp_status measure(const norm_call *n, const split *c) {
    gpu_launch l = begin(n, c, "measure");
    gpu_constant(&l, "SAVED", c->saved);
    bind_rows(n, c, &l);
    gpu_scratch(&l, "stats", VJP_F32, c->stats, n->sizes.rows * STATS, true);
    return gpu_enqueue(&l, n->sizes.rows);
}

static vjp_status columns(const norm_call *n, const split *c) {
    gpu_launch l = begin(n, c, "columns");
    gpu_constant(&l, "PAIRS", c->pairs);
    gpu_constant(&l, "FUSED", c->fused);
    gpu_constant(&l, "SAVED", c->saved);
    gpu_constant(&l, "GAMMA", n->work->tensor[n->dgamma] != NULL);
    bind(&l, "dx", n->dx, n->sizes.dim);
    bind_rows(n, c, &l);
    if (has(n, n->y)) {
        bind(&l, "y", n->y, n->sizes.dim);
        bind(&l, "beta", n->beta, 1);
    }
    if (!c->fused) gpu_scratch(&l, "stats", VJP_F32, c->stats, n->sizes.rows * STATS, false);
    if (c->sums) gpu_scratch(&l, "partials", VJP_F32, 0, c->chunks * 2 * n->sizes.dim, true);
    return gpu_enqueue(&l, c->chunks * c->tiles);
}

static vjp_status finish(const norm_call *n, const split *c) {
    gpu_launch l = begin(n, c, "finish");
    bind(&l, "dgamma", n->dgamma, 1);
    bind(&l, "dbeta", n->dbeta, 1);
    gpu_scratch(&l, "partials", VJP_F32, 0, c->chunks * 2 * n->sizes.dim, false);
    return gpu_enqueue(&l, vjp_divide_up(2 * n->sizes.dim, c->threads));
}

static vjp_status backward(const norm_call *n) {
    split c = split_of(n);
    if (!n->sizes.dim || (!has(n, n->dx) && !has(n, n->y) && !c.sums)) return VJP_OK;
    vjp_status status = VJP_OK;
    if (!c.fused && n->sizes.rows) status = measure(n, &c);
    if (status == VJP_OK) status = columns(n, &c);
    if (status == VJP_OK && c.sums) status = finish(n, &c);
    return status;
}

/* ---- The two ops ------------------------------------------------------------------------------------- */

static const norm_call layer_norm_slots[VJP_PASS_COUNT] = {
    {.y = LAYER_NORM_Y,
     .x = LAYER_NORM_X,
     .gamma = LAYER_NORM_GAMMA,
     .beta = LAYER_NORM_BETA,
     .mean = LAYER_NORM_MEAN,
     .rstd = LAYER_NORM_RSTD},
    {.dx = LAYER_NORM_B_DX,
     .dgamma = LAYER_NORM_B_DGAMMA,
     .dbeta = LAYER_NORM_B_DBETA,
     .dy = LAYER_NORM_B_DY,
     .x = LAYER_NORM_B_X,
     .gamma = LAYER_NORM_B_GAMMA,
     .y = -1,
     .beta = -1,
     .mean = LAYER_NORM_B_MEAN,
     .rstd = LAYER_NORM_B_RSTD},
};

static const norm_call rms_norm_slots[VJP_PASS_COUNT] = {
    {.y = RMS_NORM_Y,
     .x = RMS_NORM_X,
     .gamma = RMS_NORM_GAMMA,
     .beta = RMS_NORM_BETA,
     .mean = -1,
     .rstd = RMS_NORM_RSTD},
    {.dx = RMS_NORM_B_DX,
     .dgamma = RMS_NORM_B_DGAMMA,
     .dbeta = RMS_NORM_B_DBETA,
     .dy = RMS_NORM_B_DY,
     .x = RMS_NORM_B_X,
     .gamma = RMS_NORM_B_GAMMA,
     .y = RMS_NORM_B_Y,
     .beta = RMS_NORM_B_BETA,
     .mean = -1,
     .rstd = RMS_NORM_B_RSTD},
};

static norm_call call_of(const vjp_work *work) {
    bool layer = work->op->id == OP_ID(layer_norm);
    norm_call n = layer ? layer_norm_slots[work->pass] : rms_norm_slots[work->pass];
    n.work = work;
    n.sizes = layer ? vjp_layer_norm_sizes(work) : vjp_rms_norm_sizes(work);
    n.eps = layer ? ((const vjp_layer_norm_attributes *)work->attributes)->eps
                  : ((const vjp_rms_norm_attributes *)work->attributes)->eps;
    return n;
}

static vjp_status run(const vjp_work *work) {
    norm_call n = call_of(work);
    return work->pass == VJP_FORWARD ? forward(&n) : backward(&n);
}

static size_t workspace(const vjp_work *work) {
    norm_call n = call_of(work);
    return n.sizes.dim ? split_of(&n).bytes : 0;
}

const vjp_kernel gpu_layer_norm[VJP_PASS_COUNT] = {{run, NULL, VJP_STORAGE_16_32}, {run, workspace, VJP_STORAGE_16_32}};
const vjp_kernel gpu_rms_norm[VJP_PASS_COUNT] = {{run, NULL, VJP_STORAGE_16_32}, {run, workspace, VJP_STORAGE_16_32}};

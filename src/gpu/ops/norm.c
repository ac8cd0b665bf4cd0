/*
 * How the norms' rows are cut. A team of threads, one or all of a workgroup, has a row, a thread up to MOST_PAIRS pairs
 * of columns, so that its column sums stay in registers. Wider rows are measured first and then taken in tiles of
 * columns.
 */
#include "gpu/ops/norm.h"

#include <stdint.h>

enum {
    MOST_PAIRS = 8,    /* of a thread: 256 threads then have rows of 4096 columns */
    CHUNKS = 256,      /* of rows, at most: each leaves column sums in the workspace */
    TEAM_ROWS = 4,     /* that a team takes at least, before rows are cut into more chunks */
    LARGEST_SCALE = 60 /* rows of 1e-20 need 2^60 for their squares; eps * 2^120 must stay finite, so eps < 1 there */
};

typedef struct cut {
    int64_t threads, lanes, teams, pairs, tiles, chunks, chunk_rows;
    bool fused, saved, sums;
    size_t facts, bytes; /* where the facts of long rows lie in the workspace, behind the column sums; all of it */
} cut;

static bool has(const gpu_norm *n, int slot) {
    return slot >= 0 && vjp_data(n->work, slot);
}

static cut cut_of(const gpu_norm *n) {
    cut c = {0};
    int64_t rows = n->sizes.rows, dim = n->sizes.dim, pairs = gpu_divide_up(dim, 2);
    c.threads = gpu_threads(n->work->device);
    c.lanes = gpu_least(gpu_power(pairs, c.threads), c.threads);
    c.teams = c.threads / c.lanes;
    c.pairs = gpu_power(gpu_divide_up(pairs, c.lanes), MOST_PAIRS);
    c.tiles = gpu_divide_up(pairs, c.lanes * c.pairs);
    c.fused = c.tiles == 1;
    c.chunks = gpu_most(1, gpu_least(CHUNKS / gpu_least(c.tiles, CHUNKS), gpu_divide_up(rows, c.teams * TEAM_ROWS)));
    c.chunk_rows = gpu_divide_up(gpu_divide_up(rows, c.chunks), c.teams) * c.teams;
    c.chunks = gpu_divide_up(rows, gpu_most(c.chunk_rows, 1));
    c.saved = n->work->pass == VJP_BACKWARD && has(n, n->rstd) && (n->mean < 0 || has(n, n->mean));
    c.sums = n->work->pass == VJP_BACKWARD && (n->work->tensor[n->dgamma] || n->work->tensor[n->dbeta]);
    c.facts = c.sums ? gpu_piece(c.chunks * 2 * dim, 4) : 0;
    c.bytes = c.facts + (c.fused ? 0 : gpu_piece(rows * 5, 4));
    return c;
}

size_t gpu_norm_workspace(const gpu_norm *n) {
    return n->sizes.dim ? cut_of(n).bytes : 0;
}

static gpu_launch begin(const gpu_norm *n, const cut *c, const char *kernel) {
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

static vjp_status forward(const gpu_norm *n) {
    if (!n->sizes.rows || !n->sizes.dim) return VJP_OK;
    cut c = cut_of(n);
    gpu_launch l = begin(n, &c, "forward");
    bind(&l, "y", n->y, n->sizes.dim);
    bind(&l, "mean", n->mean, 1);
    bind(&l, "rstd", n->rstd, 1);
    bind(&l, "x", n->x, n->sizes.dim);
    bind(&l, "gamma", n->gamma, 1);
    bind(&l, "beta", n->beta, 1);
    return gpu_enqueue(&l, gpu_divide_up(n->sizes.rows, c.teams));
}

static void bind_rows(const gpu_norm *n, const cut *c, gpu_launch *l) {
    bind(l, "dy", n->dy, n->sizes.dim);
    bind(l, "x", n->x, n->sizes.dim);
    bind(l, "gamma", n->gamma, 1);
    if (!c->saved) return;
    bind(l, "mean_in", n->mean, 1);
    bind(l, "rstd_in", n->rstd, 1);
}

/* The facts of rows that are too long for one workgroup's columns. */
static vjp_status measure(const gpu_norm *n, const cut *c) {
    gpu_launch l = begin(n, c, "measure");
    gpu_constant(&l, "SAVED", c->saved);
    bind_rows(n, c, &l);
    gpu_scratch(&l, "facts", VJP_F32, c->facts, n->sizes.rows * 5, true);
    return gpu_enqueue(&l, n->sizes.rows);
}

static vjp_status columns(const gpu_norm *n, const cut *c) {
    gpu_launch l = begin(n, c, "columns");
    gpu_constant(&l, "PAIRS", c->pairs);
    gpu_constant(&l, "FUSED", c->fused);
    gpu_constant(&l, "SAVED", c->saved);
    gpu_constant(&l, "GAMMA", n->work->tensor[n->dgamma] != NULL);
    bind(&l, "dx", n->dx, n->sizes.dim);
    bind_rows(n, c, &l);
    if (!c->fused) gpu_scratch(&l, "facts", VJP_F32, c->facts, n->sizes.rows * 5, false);
    if (c->sums) gpu_scratch(&l, "partials", VJP_F32, 0, c->chunks * 2 * n->sizes.dim, true);
    return gpu_enqueue(&l, c->chunks * c->tiles);
}

static vjp_status finish(const gpu_norm *n, const cut *c) {
    gpu_launch l = begin(n, c, "finish");
    bind(&l, "dgamma", n->dgamma, 1);
    bind(&l, "dbeta", n->dbeta, 1);
    gpu_scratch(&l, "partials", VJP_F32, 0, c->chunks * 2 * n->sizes.dim, false);
    return gpu_enqueue(&l, gpu_divide_up(2 * n->sizes.dim, c->threads));
}

static vjp_status backward(const gpu_norm *n) {
    cut c = cut_of(n);
    if (!n->sizes.dim || (!has(n, n->dx) && !c.sums)) return VJP_OK;
    vjp_status status = VJP_OK;
    if (!c.fused && n->sizes.rows) status = measure(n, &c);
    if (status == VJP_OK) status = columns(n, &c);
    if (status == VJP_OK && c.sums) status = finish(n, &c);
    return status;
}

gpu_norm gpu_norm_call(const gpu_norm *slots, const vjp_work *work, vjp_norm_sizes sizes, double eps) {
    gpu_norm n = *slots;
    n.work = work;
    n.sizes = sizes;
    n.eps = eps;
    return n;
}

vjp_status gpu_norm_run(const gpu_norm *n) {
    return n->work->pass == VJP_FORWARD ? forward(n) : backward(n);
}

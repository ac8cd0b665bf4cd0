/* SPDX-License-Identifier: MIT */
/*
 * linear: how its products are split. The kernels are in linear.wgsl and linear.metal.
 *
 *     enough tiles to fill a GPU   `product` alone; all three products are this kernel, compiled for which axis of an
 *                                  operand is contiguous
 *     fewer tiles, or a long depth the depth is split into parts, by the sizes alone (tiles.c), and `join` adds them
 *     backward with an activation  `columns` first turns dy into dpre; without a saved pre, `product` recomputes it
 */
#include "gpu/ops/tiles.h"

enum {
    CHUNKS = 1024, /* of rows times tiles of columns, at most: each leaves column sums in the workspace */
    TEAM_ROWS = 4, /* that a team has at least, before rows are split into more chunks */
    ABSENT = -1,   /* instead of a slot */
    WORKSPACE_DPRE = -2,
    WORKSPACE_PARTS = -3
};

/* What a pass does, and its workspace: dpre first, then sums that live from one launch to the next. */
typedef struct plan {
    const vjp_work *work;
    vjp_linear_sizes sizes;
    int64_t all_rows;
    bool da, db, dbias;  /* what is wanted */
    bool slope;          /* dy must be multiplied by the activation's slope */
    bool recompute;      /* pre must be recomputed */
    int64_t dpre, parts; /* elements */
    size_t parts_at;
} plan;

/* One product. Operands are slots, or the workspace's dpre. */
typedef struct product {
    int64_t batches, rows, columns, depth;
    bool left_along, right_along; /* the depth is contiguous */
    int left, right, bias, dy, pre, y;
    vjp_activation activation;
} product;

static gpu_tiles split_of(const vjp_work *work, const product *p) {
    return gpu_tiles_of(work, p->batches, p->rows, p->columns, p->depth);
}

/* Elements of workspace that a product's parts take. */
static int64_t parts_of(const vjp_work *work, const product *p) {
    gpu_tiles c = split_of(work, p);
    return c.parts > 1 ? c.parts * p->batches * p->rows * p->columns : 0;
}

/* ---- The products ------------------------------------------------------------------------------------ */

static product forward_product(const vjp_linear_sizes *s) {
    return (product){.batches = s->batch,
                     .rows = s->m,
                     .columns = s->n,
                     .depth = s->k,
                     .left_along = true,
                     .right_along = s->transpose_b,
                     .left = LINEAR_A,
                     .right = LINEAR_B,
                     .bias = LINEAR_BIAS,
                     .dy = ABSENT,
                     .pre = LINEAR_PRE,
                     .y = LINEAR_Y,
                     .activation = s->activation};
}

/* dpre from a recomputed pre. */
static product dpre_product(const vjp_linear_sizes *s) {
    product p = forward_product(s);
    p.left = LINEAR_B_A;
    p.right = LINEAR_B_B;
    p.bias = LINEAR_B_BIAS;
    p.dy = LINEAR_B_DY;
    p.pre = ABSENT;
    p.y = WORKSPACE_DPRE;
    return p;
}

static product da_product(const vjp_linear_sizes *s) {
    return (product){.batches = s->batch,
                     .rows = s->m,
                     .columns = s->k,
                     .depth = s->n,
                     .left_along = true,
                     .right_along = !s->transpose_b,
                     .left = s->activation == VJP_ACTIVATION_NONE ? LINEAR_B_DY : WORKSPACE_DPRE,
                     .right = LINEAR_B_B,
                     .bias = ABSENT,
                     .dy = ABSENT,
                     .pre = ABSENT,
                     .y = LINEAR_B_DA,
                     .activation = VJP_ACTIVATION_NONE};
}

/* db as it is stored: a^T dpre, or dpre^T a. */
static product db_product(const vjp_linear_sizes *s) {
    int dpre = s->activation == VJP_ACTIVATION_NONE ? LINEAR_B_DY : WORKSPACE_DPRE;
    return (product){.batches = s->batch,
                     .rows = s->transpose_b ? s->n : s->k,
                     .columns = s->transpose_b ? s->k : s->n,
                     .depth = s->m,
                     .left = s->transpose_b ? dpre : LINEAR_B_A,
                     .right = s->transpose_b ? LINEAR_B_A : dpre,
                     .bias = ABSENT,
                     .dy = ABSENT,
                     .pre = ABSENT,
                     .y = LINEAR_B_DB,
                     .activation = VJP_ACTIVATION_NONE};
}

/* ---- The rows of dpre -------------------------------------------------------------------------------- */

typedef struct rows_split {
    int64_t lanes, teams, tiles, chunks, chunk_rows;
} rows_split;

static rows_split rows_of(const vjp_work *work, int64_t rows, int64_t columns) {
    rows_split c = {0};
    int64_t fours = vjp_divide_up(columns, 4), threads = gpu_threads(work->device);
    c.lanes = vjp_min(gpu_power_of_two(fours, threads), threads);
    c.teams = threads / c.lanes;
    c.tiles = vjp_divide_up(fours, c.lanes);
    c.chunks =
        vjp_max(1, vjp_min(CHUNKS / vjp_max(1, vjp_min(c.tiles, CHUNKS)), vjp_divide_up(rows, c.teams * TEAM_ROWS)));
    c.chunk_rows = vjp_divide_up(vjp_divide_up(rows, c.chunks), c.teams) * c.teams;
    c.chunks = vjp_divide_up(rows, vjp_max(c.chunk_rows, 1));
    return c;
}

/* ---- Plans ------------------------------------------------------------------------------------------- */

static plan forward_plan(const vjp_work *work) {
    plan p = {.work = work, .sizes = vjp_linear_sizes_of(work)};
    product y = forward_product(&p.sizes);
    p.parts = parts_of(work, &y);
    return p;
}

static plan backward_plan(const vjp_work *work) {
    plan p = {.work = work, .sizes = vjp_linear_sizes_of(work)};
    const vjp_linear_sizes *s = &p.sizes;
    p.all_rows = s->batch * s->m;
    p.da = work->tensor[LINEAR_B_DA];
    p.db = work->tensor[LINEAR_B_DB];
    p.dbias = work->tensor[LINEAR_B_DBIAS];
    p.slope = s->activation != VJP_ACTIVATION_NONE && (p.da || p.db || p.dbias);
    p.recompute = p.slope && !work->tensor[LINEAR_B_PRE];
    if (p.recompute || (p.slope && (p.da || p.db))) p.dpre = p.all_rows * s->n;
    p.parts_at = gpu_scratch_bytes(p.dpre, sizeof(float));
    product dpre = dpre_product(s), da = da_product(s), db = db_product(s);
    if (p.recompute) p.parts = parts_of(work, &dpre);
    if (p.da) p.parts = vjp_max(p.parts, parts_of(work, &da));
    if (p.db) p.parts = vjp_max(p.parts, parts_of(work, &db));
    if (p.dbias && s->n) p.parts = vjp_max(p.parts, rows_of(work, p.all_rows, s->n).chunks * s->n);
    return p;
}

static size_t plan_bytes(const plan *p) {
    return p->parts_at + gpu_scratch_bytes(p->parts, sizeof(float));
}

/* ---- Launches ---------------------------------------------------------------------------------------- */

/*
 * Every launch of a kernel lists the same operands in the same order, absent ones too, because a pipeline's key is made
 * of them. Rows in the workspace have no padding, as in a tensor.
 */
static void bind(gpu_launch *l, const plan *p, const char *name, int slot, int64_t run, bool output) {
    if (slot >= 0) {
        if (output)
            gpu_tensor(l, name, slot, run);
        else
            gpu_fours(l, name, slot, run);
        return;
    }
    bool dpre = slot == WORKSPACE_DPRE, parts = slot == WORKSPACE_PARTS;
    gpu_scratch(l, name, VJP_F32, dpre ? 0 : p->parts_at, dpre ? p->dpre : parts ? p->parts : 0, output);
    gpu_operand *o = &l->operand[l->operands - 1];
    o->output = o->present && output;
    o->paired = o->present;
    o->fours = o->present && run % 4 == 0;
}

static gpu_launch begin(const plan *p, const product *m, const gpu_tiles *c, const char *kernel,
                        vjp_activation activation) {
    gpu_launch l = gpu_begin(p->work, kernel);
    l.threads = gpu_threads(p->work->device);
    gpu_constant(&l, "LEFT_ALONG", m->left_along);
    gpu_constant(&l, "RIGHT_ALONG", m->right_along);
    gpu_constant(&l, "ACTIVATION", activation);
    gpu_constant(&l, "BLOCK", c->block);
    gpu_u32(&l, m->rows);
    gpu_u32(&l, m->columns);
    gpu_u32(&l, m->depth);
    gpu_u32(&l, m->batches);
    gpu_u32(&l, c->row_tiles);
    gpu_u32(&l, c->column_tiles);
    gpu_u32(&l, c->parts);
    gpu_u32(&l, c->span);
    gpu_u32(&l, c->chain);
    gpu_u32(&l, p->sizes.zero_nan);
    return l;
}

static void bind_results(gpu_launch *l, const plan *p, const product *m) {
    bind(l, p, "bias", m->bias, 1, false); /* short: not worth more pipelines, one per alignment */
    bind(l, p, "dy", m->dy, m->columns, false);
    bind(l, p, "pre", m->pre, m->columns, true);
    bind(l, p, "y", m->y, m->columns, true);
}

static void bind_operands(gpu_launch *l, const plan *p, const product *m) {
    bind(l, p, "left", m->left, m->left_along ? m->depth : m->rows, false);
    bind(l, p, "right", m->right, m->right_along ? m->depth : m->columns, false);
}

/* Adds the parts in the workspace to m's results. */
static vjp_status join(const plan *p, const product *m, const gpu_tiles *c) {
    int64_t lanes = gpu_joining_lanes(p->work, c->parts), teams = gpu_threads(p->work->device) / lanes;
    gpu_launch l = begin(p, m, c, "join", m->activation);
    gpu_constant(&l, "LANES", lanes);
    gpu_constant(&l, "TEAMS", teams);
    bind(&l, p, "parts", WORKSPACE_PARTS, m->columns, false);
    bind_results(&l, p, m);
    return gpu_enqueue(&l, vjp_divide_up(m->batches * m->rows * vjp_divide_up(m->columns, 4), teams));
}

static vjp_status multiply(const plan *p, const product *m) {
    gpu_tiles c = split_of(p->work, m);
    int64_t tiles = m->batches * c.row_tiles * c.column_tiles;
    if (tiles == 0) return VJP_OK;
    product parts = *m;
    if (c.parts > 1) {
        parts.bias = parts.dy = parts.pre = ABSENT;
        parts.y = WORKSPACE_PARTS;
        parts.activation = VJP_ACTIVATION_NONE;
    }
    gpu_launch l = begin(p, m, &c, "product", parts.activation);
    bind_operands(&l, p, m);
    bind_results(&l, p, &parts);
    vjp_status status = gpu_enqueue(&l, tiles * c.parts);
    return status == VJP_OK && c.parts > 1 ? join(p, m, &c) : status;
}

static vjp_status forward(const vjp_work *work) {
    if (!work->tensor[LINEAR_Y] && !work->tensor[LINEAR_PRE]) return VJP_OK;
    plan p = forward_plan(work);
    product y = forward_product(&p.sizes);
    return multiply(&p, &y);
}

/* dpre from a saved pre, and dbias. Where pre was recomputed, dpre is there already. */
static vjp_status dpre_and_dbias(const plan *p) {
    const vjp_linear_sizes *s = &p->sizes;
    bool saved = p->slope && !p->recompute;
    if (!(saved || p->dbias) || s->n == 0) return VJP_OK;
    rows_split r = rows_of(p->work, p->all_rows, s->n);
    gpu_tiles c = {.column_tiles = r.tiles, .block = 1, .parts = r.chunks, .span = r.chunk_rows};
    product rows = {.rows = p->all_rows, .columns = s->n};
    gpu_launch l = begin(p, &rows, &c, "columns", saved ? s->activation : VJP_ACTIVATION_NONE);
    gpu_constant(&l, "LANES", r.lanes);
    gpu_constant(&l, "TEAMS", r.teams);
    bind(&l, p, "dy", p->recompute ? WORKSPACE_DPRE : LINEAR_B_DY, s->n, false);
    bind(&l, p, "pre", saved ? LINEAR_B_PRE : ABSENT, s->n, false);
    bind(&l, p, "y", saved ? WORKSPACE_DPRE : ABSENT, s->n, true);
    bind(&l, p, "parts", p->dbias ? WORKSPACE_PARTS : ABSENT, s->n, true);
    vjp_status status = gpu_enqueue(&l, r.tiles * r.chunks);
    if (status != VJP_OK || !p->dbias) return status;
    product dbias = {.batches = 1, .rows = 1, .columns = s->n, .y = LINEAR_B_DBIAS};
    dbias.bias = dbias.dy = dbias.pre = ABSENT;
    return join(p, &dbias, &c);
}

static vjp_status backward(const vjp_work *work) {
    plan p = backward_plan(work);
    product dpre = dpre_product(&p.sizes), da = da_product(&p.sizes), db = db_product(&p.sizes);
    vjp_status status = VJP_OK;
    if (p.recompute) status = multiply(&p, &dpre);
    if (status == VJP_OK) status = dpre_and_dbias(&p);
    if (status == VJP_OK && p.da) status = multiply(&p, &da);
    if (status == VJP_OK && p.db) status = multiply(&p, &db);
    return status;
}

static size_t forward_workspace(const vjp_work *work) {
    plan p = forward_plan(work);
    return plan_bytes(&p);
}

static size_t backward_workspace(const vjp_work *work) {
    plan p = backward_plan(work);
    return plan_bytes(&p);
}

const vjp_kernel gpu_linear[VJP_PASS_COUNT] = {{forward, forward_workspace, VJP_STORAGE_16_32},
                                               {backward, backward_workspace, VJP_STORAGE_16_32}};

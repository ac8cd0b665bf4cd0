/* SPDX-License-Identifier: MIT */
/*
 * linear: its products (product.c says how they are split) and the rows of dpre. The kernels are in linear.wgsl and
 * linear.metal.
 *
 *     forward                      one product
 *     backward                     da and db are a product each; dbias is `columns`, then `join`
 *     backward with an activation  `columns` first turns dy into dpre; without a saved pre, a product recomputes it
 *     dresidual                    `columns` copies dy
 *     backward with a gate         the kernels of swiglu's backward, then those above (vjp_linear_gated())
 */
#include "gpu/ops/product.h"

extern const vjp_kernel gpu_linear[VJP_PASS_COUNT], gpu_swiglu[VJP_PASS_COUNT];

enum {
    CHUNKS = 1024, /* of rows times tiles of columns, at most: each leaves column sums in the workspace */
    TEAM_ROWS = 4  /* that a team has at least, before rows are split into more chunks */
};

/* What a pass does, and its workspace: dpre first, then sums that live from one launch to the next. */
typedef struct plan {
    const vjp_work *work;
    vjp_linear_sizes sizes;
    int64_t all_rows;
    bool da, db, dbias; /* what is wanted */
    bool slope;         /* dy must be multiplied by the activation's slope */
    bool recompute;     /* pre must be recomputed */
    gpu_matrix dpre;
    int64_t parts; /* elements */
    size_t parts_at;
} plan;

/* ---- The products ------------------------------------------------------------------------------------ */

static gpu_product forward_product(const plan *p) {
    const vjp_linear_sizes *s = &p->sizes;
    return (gpu_product){.batches = s->batch,
                         .rows = s->m,
                         .columns = s->n,
                         .depth = s->k,
                         .left_along = true,
                         .right_along = s->transpose_b,
                         .left = gpu_matrix_of(LINEAR_A),
                         .right = gpu_matrix_of(LINEAR_B),
                         .bias = gpu_matrix_of(LINEAR_BIAS),
                         .residual = gpu_matrix_of(LINEAR_RESIDUAL),
                         .gate = gpu_matrix_of(LINEAR_GATE),
                         .pre = gpu_matrix_of(LINEAR_PRE),
                         .y = gpu_matrix_of(LINEAR_Y),
                         .activation = s->activation,
                         .zero_nan = s->zero_nan,
                         .parts_at = p->parts_at};
}

/* dpre from a recomputed pre. */
static gpu_product dpre_product(const plan *p) {
    gpu_product m = forward_product(p);
    m.left = gpu_matrix_of(LINEAR_B_A);
    m.right = gpu_matrix_of(LINEAR_B_B);
    m.bias = gpu_matrix_of(LINEAR_B_BIAS);
    m.dy = gpu_matrix_of(LINEAR_B_DY);
    m.residual = m.gate = m.pre = (gpu_matrix){.place = GPU_NOWHERE};
    m.y = p->dpre;
    return m;
}

/* Without an activation dpre is dy. */
static gpu_matrix dpre_of(const plan *p) {
    return p->sizes.activation == VJP_ACTIVATION_NONE ? gpu_matrix_of(LINEAR_B_DY) : p->dpre;
}

static gpu_product da_product(const plan *p) {
    const vjp_linear_sizes *s = &p->sizes;
    return (gpu_product){.batches = s->batch,
                         .rows = s->m,
                         .columns = s->k,
                         .depth = s->n,
                         .left_along = true,
                         .right_along = !s->transpose_b,
                         .left = dpre_of(p),
                         .right = gpu_matrix_of(LINEAR_B_B),
                         .y = gpu_matrix_of(LINEAR_B_DA),
                         .activation = VJP_ACTIVATION_NONE,
                         .zero_nan = s->zero_nan,
                         .parts_at = p->parts_at};
}

/* db as it is stored: a^T dpre, or dpre^T a. */
static gpu_product db_product(const plan *p) {
    const vjp_linear_sizes *s = &p->sizes;
    return (gpu_product){.batches = s->batch,
                         .rows = s->transpose_b ? s->n : s->k,
                         .columns = s->transpose_b ? s->k : s->n,
                         .depth = s->m,
                         .left = s->transpose_b ? dpre_of(p) : gpu_matrix_of(LINEAR_B_A),
                         .right = s->transpose_b ? gpu_matrix_of(LINEAR_B_A) : dpre_of(p),
                         .y = gpu_matrix_of(LINEAR_B_DB),
                         .activation = VJP_ACTIVATION_NONE,
                         .zero_nan = s->zero_nan,
                         .parts_at = p->parts_at};
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
    gpu_product y = forward_product(&p);
    p.parts = gpu_product_parts(work, &y);
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
    if (p.recompute || (p.slope && (p.da || p.db))) p.dpre = gpu_matrix_scratch(0, p.all_rows * s->n);
    p.parts_at = gpu_scratch_bytes(p.dpre.count, sizeof(float));
    gpu_product dpre = dpre_product(&p), da = da_product(&p), db = db_product(&p);
    if (p.recompute) p.parts = gpu_product_parts(work, &dpre);
    if (p.da) p.parts = vjp_max(p.parts, gpu_product_parts(work, &da));
    if (p.db) p.parts = vjp_max(p.parts, gpu_product_parts(work, &db));
    if (p.dbias && s->n) p.parts = vjp_max(p.parts, rows_of(work, p.all_rows, s->n).chunks * s->n);
    return p;
}

static size_t plan_bytes(const plan *p) {
    return p->parts_at + gpu_scratch_bytes(p->parts, sizeof(float));
}

/* ---- Launches ---------------------------------------------------------------------------------------- */

static vjp_status forward(const vjp_work *work) {
    if (!work->tensor[LINEAR_Y] && !work->tensor[LINEAR_PRE]) return VJP_OK;
    plan p = forward_plan(work);
    gpu_product y = forward_product(&p);
    return gpu_multiply(work, &y);
}

static gpu_tiles tiles_of(const rows_split *r) {
    return (gpu_tiles){.block = 1, .column_tiles = r->tiles, .parts = r->chunks, .span = r->chunk_rows};
}

/* One pass over dy: times the slope at pre, if there is one, into y, and column sums into parts; each may be absent. */
static vjp_status columns(const plan *p, const rows_split *r, const gpu_matrix *dy, const gpu_matrix *pre,
                          const gpu_matrix *y, const gpu_matrix *parts) {
    const vjp_linear_sizes *s = &p->sizes;
    gpu_tiles c = tiles_of(r);
    gpu_product rows = {.rows = p->all_rows, .columns = s->n, .zero_nan = s->zero_nan};
    bool slope = pre->place != GPU_NOWHERE;
    gpu_launch l = gpu_product_begin(p->work, &rows, &c, "columns", slope ? s->activation : VJP_ACTIVATION_NONE);
    gpu_constant(&l, "LANES", r->lanes);
    gpu_constant(&l, "TEAMS", r->teams);
    gpu_matrix_bind(&l, "dy", dy, s->n, false);
    gpu_matrix_bind(&l, "pre", pre, s->n, false);
    gpu_matrix_bind(&l, "y", y, s->n, true);
    gpu_matrix_bind(&l, "parts", parts, s->n, true);
    return gpu_enqueue(&l, r->tiles * r->chunks);
}

static vjp_status dresidual(const plan *p) {
    const gpu_matrix absent = {.place = GPU_NOWHERE}, dy = gpu_matrix_of(LINEAR_B_DY),
                     y = gpu_matrix_of(LINEAR_B_DRESIDUAL);
    if (!p->work->tensor[LINEAR_B_DRESIDUAL] || p->all_rows == 0 || p->sizes.n == 0) return VJP_OK;
    rows_split r = rows_of(p->work, p->all_rows, p->sizes.n);
    return columns(p, &r, &dy, &absent, &y, &absent);
}

/* dpre from a saved pre, and dbias. Where pre was recomputed, dpre is there already. */
static vjp_status dpre_and_dbias(const plan *p) {
    const vjp_linear_sizes *s = &p->sizes;
    const gpu_matrix absent = {.place = GPU_NOWHERE}, dy = gpu_matrix_of(LINEAR_B_DY),
                     pre = gpu_matrix_of(LINEAR_B_PRE);
    bool saved = p->slope && !p->recompute;
    if (!(saved || p->dbias) || s->n == 0) return VJP_OK;
    rows_split r = rows_of(p->work, p->all_rows, s->n);
    gpu_tiles c = tiles_of(&r);
    gpu_matrix parts = p->dbias ? gpu_matrix_scratch(p->parts_at, r.chunks * s->n) : absent;
    vjp_status status =
        columns(p, &r, p->recompute ? &p->dpre : &dy, saved ? &pre : &absent, saved ? &p->dpre : &absent, &parts);
    if (status != VJP_OK || !p->dbias) return status;
    gpu_product dbias = {.batches = 1,
                         .rows = 1,
                         .columns = s->n,
                         .y = gpu_matrix_of(LINEAR_B_DBIAS),
                         .zero_nan = s->zero_nan,
                         .parts_at = p->parts_at};
    return gpu_product_join(p->work, &dbias, &c);
}

static vjp_status backward(const vjp_work *work) {
    if (work->tensor[LINEAR_B_GATE]) return vjp_linear_gated(work, gpu_linear, gpu_swiglu);
    plan p = backward_plan(work);
    gpu_product dpre = dpre_product(&p), da = da_product(&p), db = db_product(&p);
    vjp_status status = dresidual(&p);
    if (status == VJP_OK && p.recompute) status = gpu_multiply(work, &dpre);
    if (status == VJP_OK) status = dpre_and_dbias(&p);
    if (status == VJP_OK && p.da) status = gpu_multiply(work, &da);
    if (status == VJP_OK && p.db) status = gpu_multiply(work, &db);
    return status;
}

static size_t forward_workspace(const vjp_work *work) {
    plan p = forward_plan(work);
    return plan_bytes(&p);
}

static size_t backward_workspace(const vjp_work *work) {
    if (work->tensor[LINEAR_B_GATE]) return vjp_linear_gated_workspace(work, gpu_linear);
    plan p = backward_plan(work);
    return plan_bytes(&p);
}

const vjp_kernel gpu_linear[VJP_PASS_COUNT] = {{forward, forward_workspace, VJP_STORAGE_16_32},
                                               {backward, backward_workspace, VJP_STORAGE_16_32}};

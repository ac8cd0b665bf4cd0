/* SPDX-License-Identifier: MIT */
/*
 * linear_cross_entropy: a chunk of rows at a time, its logits in one f32 buffer of the workspace, where dlogits replace
 * them. The products are those of product.h, the rows those of loss.h.
 *
 *     for each chunk of rows      logits = x weight^T; their losses, lse and, in the backward, gradients in one launch;
 *                                 dx = dlogits weight, dweight += dlogits^T x
 *
 *     dweight                     when                            how
 *     in the loop over rows       f32, or all rows are one chunk  the chunks' products are added in order
 *     in a second loop            16 bits, several chunks         blocks of classes with all rows: logits again,
 *                                                                 dlogits, dweight = dlogits^T x, rounded once
 *
 * Logits and dlogits are f32 whatever the storage type: rounded to 16 bits, they would make every result as inaccurate
 * as that. Chunks and blocks depend on sizes alone.
 *
 * Dispatches: forward 2 per chunk, backward 4 (a product with a split depth is one more), 2 and 3 per block; and one
 * each for `count` (of a mean), `finish` (several workgroups) and the value of a bad target. Memory traffic of a chunk
 * beside the products': its logits written once, read and replaced by dlogits once, read by each gradient's product.
 */
#include <math.h>

#include "gpu/ops/loss.h"
#include "gpu/ops/product.h"

/*
 * The buffer has 4 times the bytes of dweight in f32, so that reading and writing dweight for each chunk is little
 * beside the chunk itself, within these limits: the larger one is half of what every device can bind.
 */
enum { MIN_BUFFER = 4 << 20, MAX_BUFFER = GPU_CHUNK * 4, BUFFER_PER_WEIGHT = 4 };

typedef struct plan {
    vjp_linear_cross_entropy_sizes s;
    vjp_linear_cross_entropy_slots at;
    gpu_loss loss;
    gpu_matrix lse; /* of all rows; nowhere: not wanted, nor needed */
    bool dx, dweight;
    int64_t chunk_rows, chunks;
    int64_t block_classes; /* of the second loop; 0: there is none */
    size_t buffer, parts;  /* in the workspace: logits, and parts of products */
    size_t bytes;
} plan;

/* Rows [row, row + rows) by classes [first, first + classes). */
typedef struct tile {
    int64_t row, rows, first, classes;
} tile;

static gpu_matrix given(const vjp_work *work, int slot) {
    return work->tensor[slot] ? gpu_matrix_of(slot) : (gpu_matrix){.place = GPU_NOWHERE};
}

static gpu_matrix logits_of(const plan *p, const tile *t) {
    return gpu_matrix_scratch(p->buffer, t->rows * t->classes);
}

static gpu_matrix rows_of(const plan *p, int slot, int64_t row, int64_t rows) {
    gpu_matrix all = gpu_matrix_of(slot);
    return gpu_matrix_slice(&all, row * p->s.dim, rows * p->s.dim);
}

/* ---- The products ------------------------------------------------------------------------------------ */

static gpu_product logits_product(const plan *p, const tile *t) {
    return (gpu_product){.batches = 1,
                         .rows = t->rows,
                         .columns = t->classes,
                         .depth = p->s.dim,
                         .left_along = true,
                         .right_along = true,
                         .left = rows_of(p, p->at.x, t->row, t->rows),
                         .right = rows_of(p, p->at.weight, t->first, t->classes),
                         .y = logits_of(p, t),
                         .parts_at = p->parts};
}

static gpu_product dx_product(const plan *p, const tile *t) {
    return (gpu_product){.batches = 1,
                         .rows = t->rows,
                         .columns = p->s.dim,
                         .depth = t->classes,
                         .left_along = true,
                         .left = logits_of(p, t),
                         .right = gpu_matrix_of(p->at.weight),
                         .y = rows_of(p, p->at.dx, t->row, t->rows),
                         .parts_at = p->parts};
}

/* Added to that of the rows before. Without rows it is 0. */
static gpu_product dweight_product(const plan *p, const tile *t) {
    gpu_product q = {.batches = 1,
                     .rows = t->classes,
                     .columns = p->s.dim,
                     .depth = t->rows,
                     .left = logits_of(p, t),
                     .right = rows_of(p, p->at.x, t->row, t->rows),
                     .y = rows_of(p, p->at.dweight, t->first, t->classes),
                     .parts_at = p->parts};
    q.y.adds = t->row > 0;
    return q;
}

/* ---- The plan ---------------------------------------------------------------------------------------- */

static tile chunk_at(const plan *p, int64_t chunk) {
    int64_t row = chunk * p->chunk_rows;
    return (tile){row, vjp_min(p->chunk_rows, p->s.loss.rows - row), 0, p->s.loss.classes};
}

static tile block_at(const plan *p, int64_t first) {
    return (tile){0, p->s.loss.rows, first, vjp_min(p->block_classes, p->s.loss.classes - first)};
}

/* Parts of the products of a tile. The second loop has no dx. */
static int64_t parts_of(const vjp_work *work, const plan *p, const tile *t, bool dx) {
    gpu_product logits = logits_product(p, t);
    int64_t parts = gpu_product_parts(work, &logits);
    if (dx) {
        gpu_product q = dx_product(p, t);
        parts = vjp_max(parts, gpu_product_parts(work, &q));
    }
    if (p->dweight) {
        gpu_product q = dweight_product(p, t);
        parts = vjp_max(parts, gpu_product_parts(work, &q));
    }
    return parts;
}

static size_t take(plan *p, size_t bytes) {
    size_t at = p->bytes;
    p->bytes += bytes;
    return at;
}

static void plan_chunks(const vjp_work *work, plan *p) {
    int64_t rows = p->s.loss.rows, classes = p->s.loss.classes;
    double wanted = (double)BUFFER_PER_WEIGHT * sizeof(float) * (double)classes * (double)p->s.dim;
    size_t buffer = (size_t)fmin(fmax(wanted, (double)MIN_BUFFER), (double)MAX_BUFFER);
    p->chunk_rows = vjp_linear_cross_entropy_chunk(rows, classes, sizeof(float), buffer);
    p->chunks = vjp_divide_up(rows, p->chunk_rows);
    bool narrow = p->dweight && vjp_type(work, p->at.dweight) != VJP_F32;
    if (narrow && p->chunks > 1)
        p->block_classes = vjp_linear_cross_entropy_chunk(classes, rows, sizeof(float), buffer);
}

/* Small ranges first: a device that cannot bind the whole workspace can then bind them with the buffer. */
static void plan_workspace(const vjp_work *work, plan *p) {
    int64_t rows = p->s.loss.rows, classes = p->s.loss.classes, parts = 0;
    if (!p->lse.place && p->block_classes)
        p->lse = gpu_matrix_scratch(take(p, gpu_scratch_bytes(rows, sizeof(float))), rows);
    if (p->loss.loss.place) {
        for (int64_t i = 0; i < p->chunks; i++)
            p->loss.partials += gpu_loss_partials(work, chunk_at(p, i).rows, classes);
        if (p->loss.partials > 1) p->loss.partials_at = take(p, gpu_loss_partials_bytes(p->loss.partials));
    }
    if (p->dx || p->dweight) {
        size_t bytes = gpu_loss_plan_counts(&p->loss);
        p->loss.counts_at = take(p, bytes);
    }
    int64_t floats = vjp_max(vjp_min(rows, p->chunk_rows) * classes, rows * p->block_classes);
    p->buffer = take(p, gpu_scratch_bytes(floats, sizeof(float)));
    p->parts = p->bytes;
    /* All chunks but the last are alike, and so are the blocks. */
    tile tiles[] = {chunk_at(p, 0), chunk_at(p, vjp_max(p->chunks, 1) - 1), block_at(p, 0),
                    block_at(p, p->block_classes ? (classes - 1) / p->block_classes * p->block_classes : 0)};
    for (int i = 0; i < (p->block_classes ? 4 : 2); i++)
        parts = vjp_max(parts, parts_of(work, p, &tiles[i], p->dx && i < 2));
    take(p, gpu_scratch_bytes(parts, sizeof(float)));
}

static plan plan_of(const vjp_work *work) {
    plan p = {.s = vjp_linear_cross_entropy_sizes_of(work), .at = vjp_linear_cross_entropy_slots_of(work)};
    p.dx = work->tensor[p.at.dx];
    p.dweight = work->tensor[p.at.dweight];
    p.lse = given(work, p.at.lse);
    p.loss = (gpu_loss){.work = work, .s = p.s.loss, .target = p.at.target};
    p.loss.loss = given(work, p.at.loss);
    p.loss.dloss = given(work, p.at.dloss);
    plan_chunks(work, &p);
    plan_workspace(work, &p);
    return p;
}

static size_t workspace(const vjp_work *work) {
    return plan_of(work).bytes;
}

/* ---- Launches ---------------------------------------------------------------------------------------- */

static vjp_status multiply(const vjp_work *work, bool wanted, gpu_product q) {
    return wanted ? gpu_multiply(work, &q) : VJP_OK;
}

static vjp_status run_chunks(const vjp_work *work, const plan *p) {
    bool dweight = p->dweight && !p->block_classes;
    int64_t partial = 0;
    vjp_status status = VJP_OK;
    for (int64_t i = 0; i < p->chunks && status == VJP_OK; i++) {
        tile t = chunk_at(p, i);
        gpu_loss_rows r = {.first_row = t.row,
                           .rows = t.rows,
                           .width = t.classes,
                           .first_partial = partial,
                           .logits = logits_of(p, &t)};
        if (p->lse.place) r.lse = gpu_matrix_slice(&p->lse, t.row, t.rows);
        if (p->dx || dweight) r.dlogits = r.logits;
        status = multiply(work, true, logits_product(p, &t));
        if (status == VJP_OK) status = gpu_loss_run(&p->loss, &r);
        if (status == VJP_OK) status = multiply(work, p->dx, dx_product(p, &t));
        if (status == VJP_OK) status = multiply(work, dweight, dweight_product(p, &t));
        partial += p->loss.loss.place ? gpu_loss_partials(work, t.rows, t.classes) : 0;
    }
    return status;
}

/* dweight, a block of classes at a time; lse is complete. */
static vjp_status run_blocks(const vjp_work *work, const plan *p) {
    vjp_status status = VJP_OK;
    for (int64_t first = 0; first < p->s.loss.classes && status == VJP_OK; first += p->block_classes) {
        tile t = block_at(p, first);
        gpu_loss_rows r = {.rows = t.rows,
                           .first_class = first,
                           .width = t.classes,
                           .logits = logits_of(p, &t),
                           .dlogits = logits_of(p, &t),
                           .lse_in = p->lse};
        status = multiply(work, true, logits_product(p, &t));
        if (status == VJP_OK) status = gpu_loss_run(&p->loss, &r);
        if (status == VJP_OK) status = multiply(work, true, dweight_product(p, &t));
    }
    return status;
}

/* Without rows no chunk writes dweight; a product of depth 0 does. */
static vjp_status clear_dweight(const vjp_work *work, const plan *p) {
    tile none = {.classes = p->s.loss.classes};
    bool wanted = p->dweight && p->chunks == 0 && !vjp_accumulates(work, p->at.dweight);
    return multiply(work, wanted, dweight_product(p, &none));
}

static vjp_status run(const vjp_work *work) {
    plan p = plan_of(work);
    if (!p.dx && !p.dweight && !p.loss.loss.place && !p.lse.place) return VJP_OK;
    vjp_status status = clear_dweight(work, &p);
    if (status == VJP_OK) status = gpu_loss_count(&p.loss);
    if (status == VJP_OK) status = run_chunks(work, &p);
    if (status == VJP_OK && p.block_classes) status = run_blocks(work, &p);
    return status == VJP_OK ? gpu_loss_finish(&p.loss) : status;
}

const vjp_kernel gpu_linear_cross_entropy[VJP_PASS_COUNT] = {{run, workspace, VJP_STORAGE_16_32},
                                                             {run, workspace, VJP_STORAGE_16_32}};

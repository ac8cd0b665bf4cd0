/* SPDX-License-Identifier: MIT */
/*
 * linear_cross_entropy on the CPU: a chunk of rows at a time, its logits in one f32 buffer, where dlogits replace them.
 *
 *     for each chunk of rows      logits = x weight^T, their losses and lse;
 *                                 backward: dlogits in place, dx = dlogits weight, dweight += dlogits^T x
 *
 *     dweight                     when                            how
 *     in the loop over rows       f32, or all rows are one chunk  the chunks' products are added in order
 *     in a second loop            16 bits, several chunks         blocks of classes with all rows: logits again,
 *                                                                 dlogits, dweight = dlogits^T x, rounded once
 *
 * The second loop computes all logits twice, but a 16-bit sum that is rounded after each chunk would lose digits, and
 * an f32 copy of dweight can take gigabytes. Chunks and blocks depend on sizes alone. Both passes are one function, so
 * the loss and lse of the backward are those of the forward, bit by bit.
 */
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/rows.h"
#include "cpu/loss/loss_rows.h"

extern const vjp_kernel CPU_NAME(linear_cross_entropy)[VJP_PASS_COUNT];

/*
 * The buffer has 4 times the bytes of dweight in f32, so that reading and writing dweight for each chunk is little
 * beside the chunk itself, within these limits.
 */
enum { MIN_BUFFER = 4 << 20, MAX_BUFFER = 128 << 20, BUFFER_PER_WEIGHT = 4 };

typedef struct plan {
    vjp_linear_cross_entropy_sizes s;
    vjp_linear_cross_entropy_slots at;
    bool has_gradients; /* dx or dweight is wanted */
    int64_t chunk_rows, chunks;
    int64_t block_classes; /* of the second loop; 0: there is none */
    int64_t chunk_partials;
    /* The workspace: the buffer, partial losses, lse of the rows where the caller has none, counts, products. */
    size_t buffer, partials, lse, counts, products;
} plan;

/* The matrices and the products of rows [row, row + rows) and classes [first, first + classes). */
typedef struct products {
    matrix x, weight, dx, dweight, logits;
    gemm_call logits_product, dx_product, dweight_product;
} products;

static void set_products(const vjp_work *work, const plan *p, int64_t row, int64_t rows, int64_t first, int64_t classes,
                         products *q) {
    int64_t dim = p->s.dim;
    q->x = matrix_of(work, p->at.x, dim, row);
    q->weight = matrix_of(work, p->at.weight, dim, first);
    q->dx = matrix_of(work, p->at.dx, dim, row);
    q->dweight = matrix_of(work, p->at.dweight, dim, first);
    q->dweight.accumulate = q->dweight.accumulate || row > 0;
    q->logits = (matrix){.data = work->workspace, .dtype = VJP_F32, .columns = classes};
    q->logits_product = product_of(work, 1, rows, classes, dim);
    q->logits_product.a = operand_of(&q->x, false, rows);
    q->logits_product.b = operand_of(&q->weight, true, classes);
    q->logits_product.c = result_in(&q->logits, rows);
    q->dx_product = product_of(work, 1, rows, dim, classes);
    q->dx_product.a = operand_of(&q->logits, false, rows);
    q->dx_product.b = operand_of(&q->weight, false, classes);
    q->dx_product.c = result_in(&q->dx, rows);
    q->dweight_product = product_of(work, 1, classes, dim, rows);
    q->dweight_product.a = operand_of(&q->logits, true, rows);
    q->dweight_product.b = operand_of(&q->x, false, rows);
    q->dweight_product.c = result_in(&q->dweight, classes);
}

static size_t product_bytes(const vjp_work *work, const plan *p, int64_t rows, int64_t classes) {
    products q;
    set_products(work, p, 0, rows, 0, classes, &q);
    size_t bytes = CPU_NAME(gemm_workspace)(&q.logits_product);
    if (work->tensor[p->at.dx]) bytes = max_bytes(bytes, CPU_NAME(gemm_workspace)(&q.dx_product));
    if (work->tensor[p->at.dweight]) bytes = max_bytes(bytes, CPU_NAME(gemm_workspace)(&q.dweight_product));
    return bytes;
}

static plan plan_of(const vjp_work *work) {
    plan p = {.s = vjp_linear_cross_entropy_sizes_of(work), .at = vjp_linear_cross_entropy_slots_of(work)};
    int64_t rows = p.s.loss.rows, classes = p.s.loss.classes, dim = p.s.dim;
    double wanted = (double)BUFFER_PER_WEIGHT * sizeof(float) * (double)classes * (double)dim;
    size_t buffer = wanted < MIN_BUFFER ? MIN_BUFFER : wanted > MAX_BUFFER ? MAX_BUFFER : (size_t)wanted;
    p.has_gradients = work->tensor[p.at.dx] || work->tensor[p.at.dweight];
    p.chunk_rows = vjp_linear_cross_entropy_chunk(rows, classes, sizeof(float), buffer);
    p.chunks = vjp_divide_up(rows, p.chunk_rows);
    bool narrow = work->tensor[p.at.dweight] && vjp_type(work, p.at.dweight) != VJP_F32;
    if (narrow && p.chunks > 1) p.block_classes = vjp_linear_cross_entropy_chunk(classes, rows, sizeof(float), buffer);
    p.chunk_partials = CPU_NAME(loss_split)(p.chunk_rows, classes).count;
    int64_t floats = vjp_max(vjp_min(rows, p.chunk_rows) * classes, rows * p.block_classes);
    p.buffer = whole_lines(floats * (int64_t)sizeof(float));
    p.partials = whole_lines(p.chunks * p.chunk_partials * (int64_t)sizeof(loss_partial));
    if (p.has_gradients && !work->tensor[p.at.lse]) p.lse = whole_lines(rows * (int64_t)sizeof(float));
    if (p.has_gradients) p.counts = whole_lines((int64_t)CPU_NAME(loss_scale_workspace)(&p.s.loss));
    p.products = product_bytes(work, &p, p.chunk_rows, classes);
    if (rows % p.chunk_rows) p.products = max_bytes(p.products, product_bytes(work, &p, rows % p.chunk_rows, classes));
    if (p.block_classes) p.products = max_bytes(p.products, product_bytes(work, &p, rows, p.block_classes));
    if (p.block_classes && classes % p.block_classes)
        p.products = max_bytes(p.products, product_bytes(work, &p, rows, classes % p.block_classes));
    return p;
}

static size_t workspace(const vjp_work *work) {
    plan p = plan_of(work);
    return p.buffer + p.partials + p.lse + p.counts + p.products;
}

/* ---- Chunks ------------------------------------------------------------------------------------------ */

typedef struct call {
    const vjp_work *work;
    plan p;
    loss_partial *partials;
    float *lse; /* NULL: not wanted, nor needed */
    float scale;
    void *space; /* of the products */
} call;

/* The targets from a row on. */
static const void *targets_from(const call *c, int64_t row) {
    int slot = c->p.at.target;
    return (const char *)vjp_data(c->work, slot) + row * (int64_t)vjp_dtype_size(vjp_type(c->work, slot));
}

static void measure_chunk(const call *c, int64_t chunk, int64_t row, int64_t rows, const products *q) {
    loss_rows losses = {
        .s = c->p.s.loss,
        .dtype = VJP_F32,
        .target_type = vjp_type(c->work, c->p.at.target),
        .logits = q->logits.data,
        .target = targets_from(c, row),
        .lse = c->lse ? c->lse + row : NULL,
        .wants_loss = c->work->tensor[c->p.at.loss],
        .partials = c->partials + chunk * c->p.chunk_partials,
    };
    losses.s.rows = rows;
    CPU_NAME(loss_rows)(c->work, &losses);
    for (int64_t i = losses.split.count; i < c->p.chunk_partials; i++)
        losses.partials[i] = (loss_partial){0}; /* the last chunk is shorter */
}

/* Replaces logits by their gradients. */
static void differentiate(const call *c, int64_t row, int64_t rows, int64_t first, int64_t classes, const products *q) {
    gradient_rows gradients = {
        .s = c->p.s.loss,
        .first_class = first,
        .width = classes,
        .mode = WRITE_PLAIN,
        .dtype = VJP_F32,
        .target_type = vjp_type(c->work, c->p.at.target),
        .dlogits = q->logits.data,
        .logits = q->logits.data,
        .target = targets_from(c, row),
        .lse = c->lse + row,
        .scale = c->scale,
    };
    gradients.s.rows = rows;
    CPU_NAME(gradient_rows)(c->work, &gradients);
}

static void run_chunks(const call *c) {
    const plan *p = &c->p;
    int64_t classes = p->s.loss.classes, all = p->s.loss.rows;
    for (int64_t chunk = 0; chunk < p->chunks; chunk++) {
        int64_t row = chunk * p->chunk_rows, rows = vjp_min(p->chunk_rows, all - row);
        bool dx = c->work->tensor[p->at.dx], dweight = c->work->tensor[p->at.dweight] && !p->block_classes;
        products q;
        set_products(c->work, p, row, rows, 0, classes, &q);
        CPU_NAME(gemm)(c->work, &q.logits_product, c->space);
        measure_chunk(c, chunk, row, rows, &q);
        if (!dx && !dweight) continue;
        differentiate(c, row, rows, 0, classes, &q);
        if (dx) CPU_NAME(gemm)(c->work, &q.dx_product, c->space);
        if (dweight) CPU_NAME(gemm)(c->work, &q.dweight_product, c->space);
    }
}

/* dweight, a block of classes at a time; lse is complete. */
static void run_blocks(const call *c) {
    const plan *p = &c->p;
    int64_t all = p->s.loss.classes, rows = p->s.loss.rows;
    for (int64_t first = 0; first < all; first += p->block_classes) {
        int64_t classes = vjp_min(p->block_classes, all - first);
        products q;
        set_products(c->work, p, 0, rows, first, classes, &q);
        CPU_NAME(gemm)(c->work, &q.logits_product, c->space);
        differentiate(c, 0, rows, first, classes, &q);
        CPU_NAME(gemm)(c->work, &q.dweight_product, c->space);
    }
}

/* Without rows no product writes dweight. */
static void clear_dweight(const vjp_work *work, const plan *p) {
    size_t bytes = (size_t)(p->s.loss.classes * p->s.dim) * dtype_bytes(vjp_type(work, p->at.dweight));
    if (work->tensor[p->at.dweight] && !vjp_accumulates(work, p->at.dweight))
        memset(vjp_data(work, p->at.dweight), 0, bytes);
}

static vjp_status compute(const vjp_work *work) {
    call c = {.work = work, .p = plan_of(work)};
    const plan *p = &c.p;
    char *space = work->workspace;
    c.partials = (loss_partial *)(space + p->buffer);
    c.lse = p->lse ? (float *)(space + p->buffer + p->partials) : vjp_data(work, p->at.lse);
    c.space = space + p->buffer + p->partials + p->lse + p->counts;
    if (!p->has_gradients && !work->tensor[p->at.loss] && !c.lse) return VJP_OK;
    if (p->s.loss.rows == 0) clear_dweight(work, p);
    if (p->has_gradients && p->s.loss.rows > 0)
        c.scale =
            CPU_NAME(loss_scale)(work, &p->s.loss, p->at.target, p->at.dloss, space + p->buffer + p->partials + p->lse);
    run_chunks(&c);
    if (p->block_classes) run_blocks(&c);
    if (work->tensor[p->at.loss]) CPU_NAME(loss_store)
    (&p->s.loss, c.partials, p->chunks * p->chunk_partials, vjp_data(work, p->at.loss),
     vjp_accumulates(work, p->at.loss));
    return VJP_OK;
}

const vjp_kernel CPU_NAME(linear_cross_entropy)[VJP_PASS_COUNT] = {
    {compute, workspace, VJP_STORAGE_16_32},
    {compute, workspace, VJP_STORAGE_16_32},
};

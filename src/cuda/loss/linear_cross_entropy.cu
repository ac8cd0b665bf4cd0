/* SPDX-License-Identifier: MIT */
/*
 * linear_cross_entropy on CUDA: cuBLASLt's products (gemm/products.cuh) and the kernels of loss_rows.cuh between them,
 * a chunk of rows at a time. One buffer holds the chunk's logits in the storage type, and then their gradients.
 *
 *     for each chunk of rows      logits = x weight^T; their losses, lse and, in the backward, gradients in one kernel;
 *                                 dx = dlogits weight, dweight += dlogits^T x
 *
 *     dweight                     when                            how
 *     in the loop over rows       f32, or all rows are one chunk  the chunks' products are added in order
 *     in a second loop            16 bits, several chunks         blocks of classes with all rows: logits again,
 *                                                                 dlogits, dweight = dlogits^T x, rounded once
 *
 * dlogits are stored as differences of probabilities, of size 1, and dloss over the number of rows is a factor of the
 * products: so in 16 bits none is lost because there are many rows or dloss is small. In f16 they are multiplied by
 * 4096 besides.
 *
 * The second loop is a fourth product, but a 16-bit sum that is rounded after each chunk would lose digits, and an f32
 * copy of dweight can take gigabytes: training asks for dweight in f32. Chunks and blocks depend on sizes and types
 * alone. The host never waits, so a call can be captured in a CUDA graph.
 */
#include "cuda/gemm/steps.cuh"
#include "cuda/loss/loss_rows.cuh"

namespace vjp {
namespace {

/*
 * The buffer has 16 times the bytes of dweight in f32, so that reading and writing dweight for each chunk is little
 * beside the chunk itself, within these limits. The larger one has room for 3072 rows, the longest sum of bf16 that is
 * one product on Hopper, of 50304 classes: dweight is read and written the fewest times.
 */
constexpr int64_t MIN_BUFFER = 4 << 20, MAX_BUFFER = 296 << 20, BUFFER_PER_WEIGHT = 16;

/* What dlogits are multiplied by: the largest that leaves f16 room for sums of labels that are smoothed. */
constexpr float F16_UNIT = 4096;

struct pass {
    vjp_linear_cross_entropy_sizes s;
    vjp_linear_cross_entropy_slots at;
    bool dx, dweight;
    int64_t chunk_rows, chunks;
    int64_t block_classes; /* of the second loop; 0: there is none */
    int64_t chunk_partials;
    const void *x, *weight;   /* aligned */
    void *to_dx, *to_dweight; /* aligned */
    void *buffer;
    float *factors;   /* of the products of dlogits */
    loss_call losses; /* of all rows */
};

size_t buffer_bytes(const vjp_linear_cross_entropy_sizes &s) {
    double wanted = (double)BUFFER_PER_WEIGHT * sizeof(float) * (double)s.loss.classes * (double)s.dim;
    return wanted < MIN_BUFFER ? MIN_BUFFER : wanted > MAX_BUFFER ? MAX_BUFFER : (size_t)wanted;
}

/* dlogits as the products expect them. */
void use_factors(const pass &p, loss_call *c) {
    c->dloss = p.factors ? p.factors + UNIT_FACTOR : nullptr;
    c->counts = nullptr;
}

/* The call of loss_rows.cuh for rows of the buffer. */
loss_call rows_call(const vjp_work *work, const pass &p, int64_t first_row, int64_t rows) {
    loss_call c = p.losses;
    c.rows = rows;
    c.first_row = first_row;
    c.logits = c.dlogits = p.buffer;
    use_factors(p, &c);
    plan_rows(work->storage, &c);
    return c;
}

/* Splits the work and lays out the workspace. */
pass plan_of(steps &w) {
    const vjp_work *work = w.work;
    pass p{};
    p.s = vjp_linear_cross_entropy_sizes_of(work);
    p.at = vjp_linear_cross_entropy_slots_of(work);
    p.dx = work->tensor[p.at.dx];
    p.dweight = work->tensor[p.at.dweight];
    int64_t rows = p.s.loss.rows, classes = p.s.loss.classes, dim = p.s.dim;
    size_t size = vjp_dtype_size(work->storage), bytes = buffer_bytes(p.s);
    p.chunk_rows = vjp_linear_cross_entropy_chunk(rows, classes, size, bytes);
    p.chunks = vjp_divide_up(rows, p.chunk_rows);
    if (p.dweight && vjp_type(work, p.at.dweight) != VJP_F32 && p.chunks > 1)
        p.block_classes = vjp_linear_cross_entropy_chunk(classes, rows, size, bytes);
    p.x = input_of(w, p.at.x, rows * dim);
    p.weight = input_of(w, p.at.weight, classes * dim);
    if (p.dx) p.to_dx = output_of(w, p.at.dx, rows * dim);
    if (p.dweight) p.to_dweight = output_of(w, p.at.dweight, classes * dim);
    p.buffer = take(w, vjp_max(vjp_min(rows, p.chunk_rows) * classes, rows * p.block_classes), size);

    loss_call &c = p.losses;
    c = loss_call_of(p.s.loss);
    c.target = vjp_data(work, p.at.target);
    c.target_type = vjp_type(work, p.at.target);
    c.loss = static_cast<float *>(vjp_data(work, p.at.loss));
    c.add_loss = vjp_accumulates(work, p.at.loss);
    c.lse_out = static_cast<float *>(vjp_data(work, p.at.lse));
    if (!c.lse_out && p.block_classes) c.lse_out = static_cast<float *>(take(w, rows, sizeof(float)));
    c.dloss = static_cast<const float *>(vjp_data(work, p.at.dloss));
    if (c.mean && (p.dx || p.dweight)) {
        c.count_blocks = count_blocks_of(rows);
        c.counts = w.layout.take<double>(c.count_blocks);
    }
    if (p.dx || p.dweight) p.factors = w.layout.take<float>(FACTORS);
    p.chunk_partials = rows_call(work, p, 0, p.chunk_rows).chunks;
    c.partials = w.layout.take<partial_loss>(p.chunks * p.chunk_partials);
    return p;
}

/* Rows of a matrix with rows of `dim` elements. */
void *rows_from(const void *data, vjp_dtype dtype, int64_t row, int64_t dim) {
    return const_cast<void *>(moved(data, dtype, row * dim));
}

/* buffer = x weight^T for rows [row, row + rows) and classes [first, first + classes). */
void compute_logits(steps &w, const pass &p, int64_t row, int64_t rows, int64_t first, int64_t classes) {
    product q = product_of(w.work, 1, rows, classes, p.s.dim);
    q.a = factor_of(rows_from(p.x, w.work->storage, row, p.s.dim), rows, p.s.dim, false);
    q.b = factor_of(rows_from(p.weight, w.work->storage, first, p.s.dim), classes, p.s.dim, true);
    q.result = p.buffer;
    q.f32 = w.work->storage == VJP_F32;
    if (is_enqueuing(w)) then(w, multiply(w.work, q));
}

/* dx = buffer weight, for all classes. */
void compute_dx(steps &w, const pass &p, int64_t row, int64_t rows) {
    product q = product_of(w.work, 1, rows, p.s.dim, p.s.loss.classes);
    q.a = factor_of(p.buffer, rows, p.s.loss.classes, false);
    q.b = factor_of(p.weight, p.s.loss.classes, p.s.dim, false);
    q.result = rows_from(p.to_dx, w.work->storage, row, p.s.dim);
    q.f32 = w.work->storage == VJP_F32;
    q.add = vjp_accumulates(w.work, p.at.dx);
    q.factors = p.factors;
    if (is_enqueuing(w)) then(w, multiply(w.work, q));
}

/* dweight = buffer^T x, added to that of the rows before. */
void compute_dweight(steps &w, const pass &p, int64_t row, int64_t rows, int64_t first, int64_t classes) {
    product q = product_of(w.work, 1, classes, p.s.dim, rows);
    q.a = factor_of(p.buffer, rows, classes, true);
    q.b = factor_of(rows_from(p.x, w.work->storage, row, p.s.dim), rows, p.s.dim, false);
    q.result = rows_from(p.to_dweight, vjp_type(w.work, p.at.dweight), first, p.s.dim);
    q.f32 = vjp_type(w.work, p.at.dweight) == VJP_F32;
    q.add = row > 0 || vjp_accumulates(w.work, p.at.dweight);
    q.factors = p.factors;
    int64_t terms = q.f32 && q.storage != VJP_F32 ? max_tensor_terms(w.work->device, q.storage, true) : rows;
    multiply_in_order(w, q, equal_part(rows, vjp_divide_up(rows, terms)));
}

void run_chunks(steps &w, const pass &p) {
    bool dweight = p.dweight && !p.block_classes;
    for (int64_t i = 0; i < p.chunks && is_enqueuing(w); i++) {
        int64_t row = i * p.chunk_rows, rows = vjp_min(p.chunk_rows, p.s.loss.rows - row);
        loss_call c = rows_call(w.work, p, row, rows);
        c.partials += i * p.chunk_partials;
        compute_logits(w, p, row, rows, 0, p.s.loss.classes);
        if (is_enqueuing(w)) then(w, p.dx || dweight ? enqueue_gradients(w.work, c) : enqueue_losses(w.work, c));
        if (p.dx) compute_dx(w, p, row, rows);
        if (dweight) compute_dweight(w, p, row, rows, 0, p.s.loss.classes);
    }
}

/* dweight, a block of classes at a time; lse is complete. */
void run_blocks(steps &w, const pass &p) {
    for (int64_t first = 0; first < p.s.loss.classes && is_enqueuing(w); first += p.block_classes) {
        int64_t classes = vjp_min(p.block_classes, p.s.loss.classes - first);
        loss_call c = p.losses;
        c.lse = c.lse_out;
        c.lse_out = nullptr;
        c.loss = nullptr;
        c.logits = c.dlogits = p.buffer;
        c.first_class = first;
        c.width = classes;
        use_factors(p, &c);
        plan_rows(w.work->storage, &c);
        compute_logits(w, p, 0, c.rows, first, classes);
        if (is_enqueuing(w)) then(w, enqueue_gradients(w.work, c));
        compute_dweight(w, p, 0, c.rows, first, classes);
    }
}

/* Without rows no product writes dweight. */
void clear_dweight(steps &w, const pass &p) {
    size_t bytes = (size_t)(p.s.loss.classes * p.s.dim) * vjp_dtype_size(vjp_type(w.work, p.at.dweight));
    if (vjp_accumulates(w.work, p.at.dweight)) return;
    then(w, result_of(w.work, cudaMemsetAsync(p.to_dweight, 0, bytes, stream_of(w.work))));
}

void compute_steps(steps &w) {
    pass p = plan_of(w);
    if (!w.enqueues || (!p.dx && !p.dweight && !p.losses.loss && !p.losses.lse_out)) return;
    p.losses.found = findings_of(w.work);
    if (p.dweight && p.s.loss.rows == 0) clear_dweight(w, p);
    if (p.losses.counts) then(w, enqueue_count(w.work, p.losses));
    if (p.factors && is_enqueuing(w))
        then(w, enqueue_factors(w.work, p.losses, w.work->storage == VJP_F16 ? F16_UNIT : 1.0f, p.factors));
    run_chunks(w, p);
    if (p.block_classes) run_blocks(w, p);
    if (p.losses.loss && is_enqueuing(w)) {
        loss_call c = p.losses;
        int64_t last = p.s.loss.rows - (p.chunks - 1) * p.chunk_rows;
        c.chunks = p.chunks ? (p.chunks - 1) * p.chunk_partials + rows_call(w.work, p, 0, last).chunks : 0;
        then(w, enqueue_loss(w.work, c));
    }
    if (p.dx) copy_back(w, p.at.dx, p.to_dx, p.s.loss.rows * p.s.dim);
    if (p.dweight) copy_back(w, p.at.dweight, p.to_dweight, p.s.loss.classes * p.s.dim);
}

} // namespace
} // namespace vjp

extern "C" {
extern const vjp_kernel vjp_cuda_linear_cross_entropy[VJP_PASS_COUNT];
const vjp_kernel vjp_cuda_linear_cross_entropy[VJP_PASS_COUNT] = {
    {vjp::run_steps<vjp::compute_steps>, vjp::steps_workspace<vjp::compute_steps>, VJP_STORAGE_16_32},
    {vjp::run_steps<vjp::compute_steps>, vjp::steps_workspace<vjp::compute_steps>, VJP_STORAGE_16_32},
};
}

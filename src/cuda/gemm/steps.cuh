/* SPDX-License-Identifier: MIT */
/*
 * The steps of a pass that consists of products and kernels between them: written once, as a function that runs twice,
 * the first time for the size of its workspace, the second time to enqueue them. And the tensors of such a pass, where
 * they are not aligned for products: copies of them.
 */
#ifndef VJP_CUDA_STEPS_CUH
#define VJP_CUDA_STEPS_CUH

#include "cuda/gemm/products.cuh"

namespace vjp {

struct steps {
    const vjp_work *work;
    bool enqueues; /* false: only lay out the workspace */
    vjp_status status;
    workspace_layout layout;
};

inline bool is_enqueuing(const steps &w) {
    return w.enqueues && w.status == VJP_OK;
}

inline void *take(steps &w, int64_t count, size_t size) {
    return w.layout.take<void>(count, size);
}

/* Records the status of a step. */
inline void then(steps &w, vjp_status status) {
    if (w.status == VJP_OK) w.status = status;
}

inline void copy(steps &w, void *to, const void *from, int64_t count, vjp_dtype dtype) {
    if (!is_enqueuing(w) || count == 0) return;
    size_t bytes = (size_t)count * vjp_dtype_size(dtype);
    then(w, result_of(w.work, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_of(w.work))));
}

/* An input, or a copy of it that is aligned for products. */
inline const void *input_of(steps &w, int slot, int64_t count) {
    const void *data = vjp_data(w.work, slot);
    if (data && is_aligned(data, PRODUCT_ALIGNMENT)) return data;
    vjp_dtype dtype = vjp_type(w.work, slot);
    void *aligned = take(w, count, vjp_dtype_size(dtype));
    copy(w, aligned, data, count, dtype);
    return aligned;
}

/*
 * An output, or an aligned copy of it that products write (with the old values if they are added to); copy_back()
 * copies it to the output.
 */
inline void *output_of(steps &w, int slot, int64_t count) {
    void *data = vjp_data(w.work, slot);
    if (data && is_aligned(data, PRODUCT_ALIGNMENT)) return data;
    vjp_dtype dtype = vjp_type(w.work, slot);
    void *aligned = take(w, count, vjp_dtype_size(dtype));
    if (vjp_accumulates(w.work, slot)) copy(w, aligned, data, count, dtype);
    return aligned;
}

inline void copy_back(steps &w, int slot, const void *from, int64_t count) {
    void *data = vjp_data(w.work, slot);
    if (!is_aligned(data, PRODUCT_ALIGNMENT)) copy(w, data, from, count, vjp_type(w.work, slot));
}

inline const void *moved(const void *data, vjp_dtype dtype, int64_t elements) {
    return data ? static_cast<const char *>(data) + elements * (int64_t)vjp_dtype_size(dtype) : nullptr;
}

/* The terms of each of so many parts of a sum; a multiple of 64, so that all parts are aligned like the first. */
inline int64_t equal_part(int64_t terms, int64_t parts) {
    return parts == 1 ? terms : vjp_round_up(vjp_divide_up(terms, parts), 64);
}

/* Products of so many terms each, each added to the result of those before. */
inline void multiply_in_order(steps &w, const product &p, int64_t length) {
    for (int64_t first = 0; first < p.k && is_enqueuing(w); first += length) {
        product part = p;
        part.k = vjp_min(length, p.k - first);
        part.a.data = moved(p.a.data, p.storage, first * (p.a.transposed ? p.a.row : 1));
        part.b.data = moved(p.b.data, p.storage, first * (p.b.transposed ? 1 : p.b.row));
        part.add = p.add || first > 0;
        then(w, multiply(w.work, part));
    }
}

/* A product of packed matrices; the factors and the result are still to be set. */
inline product product_of(const vjp_work *work, int64_t items, int64_t m, int64_t n, int64_t k) {
    product p{};
    p.storage = work->storage;
    p.items = items;
    p.m = m;
    p.n = n;
    p.k = k;
    p.item = m * n;
    p.scale = 1;
    return p;
}

/* A factor that is [rows, columns] in memory. */
inline factor factor_of(const void *data, int64_t rows, int64_t columns, bool transposed) {
    return {data, transposed, columns, rows * columns};
}

template <void (*STEPS)(steps &)> vjp_status run_steps(const vjp_work *work) {
    steps w{work, true, VJP_OK, workspace_layout(work->workspace)};
    STEPS(w);
    return w.status;
}

template <void (*STEPS)(steps &)> size_t steps_workspace(const vjp_work *work) {
    steps w{work, false, VJP_OK, workspace_layout(nullptr)};
    STEPS(w);
    return w.layout.max;
}

} // namespace vjp

#endif

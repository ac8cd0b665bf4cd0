/* SPDX-License-Identifier: MIT */
/*
 * linear: y = act(a b + bias) + residual and its gradients, by cuBLASLt's products (gemm/products.cuh) and passes over
 * rows between them (linear_rows.cuh).
 *
 *     forward path  when                                        what
 *     direct        no activation, relu, f32, or pre wanted     the product adds the bias and writes pre or y; an
 *                   in 16 bits; the product is one call         activation is a pass over that. Without one the
 *                                                               product adds a residual, too
 *     through f32   otherwise                                   the product in f32, then one pass
 *
 *     product       when                                        what
 *     one call      usually                                     cuBLASLt
 *     narrow        up to 16 results of over 1024 terms         sums in double, without cuBLASLt
 *     long          more terms than in a part, 16-bit factors,  a kernel for Hopper that adds short sums in f32
 *                   an f32 result whose tiles fill the card     (gemm/long_sums.cu)
 *     parts         more than 65536 terms, or of 16-bit         of a large f32 result: products that add to it, one
 *                   factors more than max_tensor_terms()        after the other; else a batch of partial products,
 *                                                               added in double
 *
 * In 16 bits any other activation needs pre in f32: rounded before and after it, y would be off by twice what it may.
 * If pre is wanted in 16 bits, y is act of the pre that is stored, which is what the backward uses. cuBLASLt's own relu
 * and gelu are not used: one need not keep a NaN, the other is an approximation.
 *
 * Backward: one pass over dy and pre computes dpre and the parts of dbias; then da = dpre b^T and db = a^T dpre.
 * Without an activation dpre is dy itself.
 *
 * With a gate either pass is a product and the kernel of swiglu (vjp_linear_gated()).
 *
 * Results do not depend on alignment nor on which outputs are wanted: what is not aligned to 16 bytes is copied to an
 * aligned place before a product reads it, and copied back after a product has written it.
 */
#include <limits>

#include "cuda/gemm/long_sums.cuh"
#include "cuda/gemm/steps.cuh"
#include "cuda/linear/linear_rows.cuh"

extern "C" {
extern const vjp_kernel vjp_cuda_linear[VJP_PASS_COUNT];
extern const vjp_kernel vjp_cuda_swiglu[VJP_PASS_COUNT];
}

namespace vjp {
namespace {

/* ---- Products ---------------------------------------------------------------------------------------- */

/*
 * Longer sums are split into parts.
 *
 * A result with less than LARGE_RESULT elements does not fill the card: its parts are a batch, which is added in
 * double. Measured on an H200, eight parts with 768 x 768 results take 59 us so and 101 us in order; four with 1024 x
 * 2816, 145 and 151; two with 2048 x 2048, 100 and 98. Parts take at most 64 MiB; a 16-bit result too large for two of
 * them is computed at once.
 */
constexpr int64_t MAX_TERMS = 65536, MAX_PARTIAL = 16 << 20, LARGE_RESULT = 1 << 22;

bool is_narrow(const product &p) {
    return p.items == 1 && p.m * p.n <= FEW_RESULTS && p.k > LONG_SUM;
}

int64_t parts_of(const vjp_work *work, const product &p) {
    int64_t terms = p.storage == VJP_F32 ? MAX_TERMS : max_tensor_terms(work->device, p.storage, p.f32 && !p.rounded);
    return vjp_divide_up(p.k, vjp_min(terms, MAX_TERMS));
}

/* Whether products add their parts to the result itself. */
bool adds_in_order(const vjp_work *work, const product &p) {
    int64_t elements = p.m * p.n;
    return p.f32 && (p.items * elements >= LARGE_RESULT || parts_of(work, p) > MAX_PARTIAL / elements);
}

/* The terms of a part; k: all at once. */
int64_t part_length(const vjp_work *work, const product &p) {
    int64_t parts = parts_of(work, p);
    if (!adds_in_order(work, p)) parts = vjp_min(parts, vjp_max(1, MAX_PARTIAL / (p.m * p.n)));
    return equal_part(p.k, parts);
}

/*
 * Whether cuBLASLt may be left to add a result to something. Its kernels for Hopper, seen with tiles of 64 x 8 and 64 x
 * 32, round a 16-bit product before they add it: results up to SMALL_SUM elements are added in f32, by a pass that
 * costs microseconds.
 */
constexpr int64_t SMALL_SUM = 1 << 20;

bool adds_itself(const vjp_work *work, int64_t elements) {
    return work->storage == VJP_F32 || elements > SMALL_SUM;
}

/* Whether one call computes the product, so that it can add the bias. */
bool is_one_call(const vjp_work *work, const product &p) {
    return p.k > 0 && !is_narrow(p) && part_length(work, p) == p.k;
}

template <class S> void add_parts(steps &w, const product &p, const void *parts, int64_t count, int64_t apart) {
    parts_call s{parts, count, p.m * p.n, apart, slices_of(count, p.m * p.n), {p.result, p.f32, p.add}};
    int64_t grid = vjp_divide_up(s.columns, THREADS / s.slices);
    if (std::is_same_v<S, float> && p.f32 && count <= FEW_PARTS && s.columns % 4 == 0 && apart % 4 == 0 &&
        is_aligned(parts, 16) && is_aligned(p.result, 16))
        return then(w, launch(w.work, true, sum_few_parts, vjp_divide_up(s.columns / 4, THREADS), THREADS, 0, s));
    then(w, with_type(p.storage, [&](auto zero) {
             return launch(w.work, true, sum_parts<decltype(zero), S>, grid, THREADS, 0, s);
         }));
}

void multiply_narrow(steps &w, const product &p) {
    narrow_product q{p.a.data, p.b.data, p.n, p.k, 0, 0, 0, 0, (int)(p.m * p.n), p.scale, nullptr};
    q.a_m = p.a.transposed ? 1 : p.a.row;
    q.a_k = p.a.transposed ? p.a.row : 1;
    q.b_k = p.b.transposed ? 1 : p.b.row;
    q.b_n = p.b.transposed ? p.b.row : 1;
    int64_t chunks = vjp_divide_up(p.k, SUM_CHUNK);
    q.partial = static_cast<double *>(take(w, chunks * q.results, sizeof(double)));
    if (!is_enqueuing(w)) return;
    then(w, with_type(p.storage, [&](auto zero) {
             return launch(w.work, true, sum_narrow<decltype(zero)>, chunks * q.results, THREADS, 0, q);
         }));
    if (is_enqueuing(w)) add_parts<double>(w, p, q.partial, chunks, q.results);
}

void multiply_long(steps &w, const product &p, int64_t parts) {
    product q = p;
    if (parts > 1) {
        q.item = vjp_round_up(p.m * p.n, 64);
        q.result = take(w, parts * q.item, sizeof(float));
        q.add = false;
    }
    if (is_enqueuing(w)) then(w, multiply_long_sums(w.work, q, parts));
    if (parts > 1 && is_enqueuing(w)) add_parts<float>(w, p, q.result, parts, q.item);
}

/* One item's product in parts: those of full length as a batch, then the rest. */
void multiply_parts(steps &w, const product &p, int64_t length) {
    int64_t whole = p.k / length, rest = p.k % length, apart = vjp_round_up(p.m * p.n, 64);
    float *partial = static_cast<float *>(take(w, (whole + (rest > 0)) * apart, sizeof(float)));
    if (!is_enqueuing(w)) return;
    product q = p;
    q.result = partial;
    q.f32 = true;
    q.add = false;
    q.items = whole;
    q.k = length;
    q.item = apart;
    q.a.item = length * (p.a.transposed ? p.a.row : 1);
    q.b.item = length * (p.b.transposed ? 1 : p.b.row);
    then(w, multiply(w.work, q));
    if (rest) {
        q.items = 1;
        q.k = rest;
        q.result = partial + whole * apart;
        q.a.data = moved(p.a.data, p.storage, whole * q.a.item);
        q.b.data = moved(p.b.data, p.storage, whole * q.b.item);
        if (is_enqueuing(w)) then(w, multiply(w.work, q));
    }
    if (is_enqueuing(w)) add_parts<float>(w, p, partial, whole + (rest > 0), apart);
}

void multiply(steps &w, const product &p) {
    if (p.items == 0 || p.m == 0 || p.n == 0) return;
    size_t used = w.layout.used; /* parts are not needed after the product: the next one reuses their space */
    if (p.k == 0) {
        size_t bytes = (size_t)(p.items * p.m * p.n) * vjp_dtype_size(p.f32 ? VJP_F32 : p.storage);
        if (is_enqueuing(w) && !p.add)
            then(w, result_of(w.work, cudaMemsetAsync(p.result, 0, bytes, stream_of(w.work))));
    } else if (is_narrow(p)) {
        multiply_narrow(w, p);
    } else if (int64_t parts = long_sum_parts(w.work, p)) {
        multiply_long(w, p, parts);
    } else if (is_one_call(w.work, p)) {
        if (is_enqueuing(w)) then(w, multiply(w.work, p));
    } else if (adds_in_order(w.work, p)) {
        multiply_in_order(w, p, part_length(w.work, p));
    } else {
        for (int64_t i = 0; i < p.items && w.status == VJP_OK; i++) {
            product item = p;
            item.items = 1;
            item.a.data = moved(p.a.data, p.storage, i * p.a.item);
            item.b.data = moved(p.b.data, p.storage, i * p.b.item);
            item.result = const_cast<void *>(moved(p.result, p.f32 ? VJP_F32 : p.storage, i * p.item));
            w.layout.used = used;
            multiply_parts(w, item, part_length(w.work, p));
            if (!w.enqueues) break;
        }
    }
    w.layout.used = used;
}

/* a b, for either pass. */
product pre_product(const vjp_work *work, const vjp_linear_sizes &s, const void *a, const void *b) {
    product p = product_of(work, s.batch, s.m, s.n, s.k);
    p.a = factor_of(a, s.m, s.k, false);
    p.b = s.transpose_b ? factor_of(b, s.n, s.k, true) : factor_of(b, s.k, s.n, false);
    return p;
}

/* ---- Passes over rows -------------------------------------------------------------------------------- */

/* Whether 16-byte accesses are possible: rows are whole vectors, and every present matrix is aligned. */
template <class... Data> bool is_fast(const tiling &t, int wide, Data... data) {
    return t.columns % wide == 0 && (is_aligned(data, 16) && ...);
}

/* The usual activations are compiled in; the others are chosen per element. */
template <class T, class S> auto epilogue_kernel(const epilogue &f, bool fast) {
    if (!fast) return epilogue_rows<T, S, ANY_ACTIVATION, false>;
    switch (f.activation) {
    case VJP_ACTIVATION_NONE: return epilogue_rows<T, S, VJP_ACTIVATION_NONE, true>;
    case VJP_ACTIVATION_RELU: return epilogue_rows<T, S, VJP_ACTIVATION_RELU, true>;
    case VJP_ACTIVATION_GELU_TANH: return epilogue_rows<T, S, VJP_ACTIVATION_GELU_TANH, true>;
    case VJP_ACTIVATION_GELU_ERF: return epilogue_rows<T, S, VJP_ACTIVATION_GELU_ERF, true>;
    case VJP_ACTIVATION_SILU: return epilogue_rows<T, S, VJP_ACTIVATION_SILU, true>;
    default: return epilogue_rows<T, S, ANY_ACTIVATION, true>;
    }
}

template <class S> void run_epilogue(steps &w, const epilogue &f, int64_t rows, int64_t columns) {
    if (!is_enqueuing(w)) return;
    then(w, with_type(w.work->storage, [&](auto zero) {
             using T = decltype(zero);
             /* Sums are f32 or T. */
             using Sums = std::conditional_t<std::is_void_v<S>, T, float>;
             tiling t = tiling_of(rows, columns, WIDE<T>);
             bool fast = is_fast(t, WIDE<T>, f.sums, (const void *)f.pre.data, (const void *)f.y, f.residual);
             return launch(w.work, true, epilogue_kernel<T, Sums>(f, fast), t.chunks * t.tiles, THREADS, 0, f, t);
         }));
}

template <class T, class P> auto dpre_kernel(const dpre_call &s, bool fast) {
    if (!fast) return dpre_rows<T, P, ANY_ACTIVATION, false>;
    switch (s.activation) {
    case VJP_ACTIVATION_RELU: return dpre_rows<T, P, VJP_ACTIVATION_RELU, true>;
    case VJP_ACTIVATION_GELU_TANH: return dpre_rows<T, P, VJP_ACTIVATION_GELU_TANH, true>;
    case VJP_ACTIVATION_GELU_ERF: return dpre_rows<T, P, VJP_ACTIVATION_GELU_ERF, true>;
    case VJP_ACTIVATION_SILU: return dpre_rows<T, P, VJP_ACTIVATION_SILU, true>;
    case VJP_ACTIVATION_SIGMOID: return dpre_rows<T, P, VJP_ACTIVATION_SIGMOID, true>;
    case VJP_ACTIVATION_TANH: return dpre_rows<T, P, VJP_ACTIVATION_TANH, true>;
    default: return dpre_rows<T, T, VJP_ACTIVATION_NONE, true>; /* reads no pre */
    }
}

void run_dpre(steps &w, const dpre_call &s, bool pre_f32, const tiling &t) {
    if (!is_enqueuing(w)) return;
    then(w, with_type(w.work->storage, [&](auto zero) {
             using T = decltype(zero);
             bool fast = is_fast(t, WIDE<T>, s.dy, s.pre, (const void *)s.dpre, (const void *)s.lost);
             auto kernel = pre_f32 ? dpre_kernel<T, float>(s, fast) : dpre_kernel<T, T>(s, fast);
             return launch(w.work, true, kernel, t.chunks * t.tiles, THREADS, 0, s, t);
         }));
}

/* ---- Forward ----------------------------------------------------------------------------------------- */

/* The product with its bias, in T, is pre itself; y is that, or its activation. */
void forward_direct(steps &w, const vjp_linear_sizes &s, product p) {
    const vjp_work *work = w.work;
    bool y = work->tensor[LINEAR_Y], pre = work->tensor[LINEAR_PRE];
    int64_t rows = s.batch * s.m, count = rows * s.n;
    int target = pre ? LINEAR_PRE : LINEAR_Y;
    if (work->tensor[LINEAR_BIAS]) p.bias = input_of(w, LINEAR_BIAS, s.n);
    p.f32 = work->storage == VJP_F32;
    p.result = output_of(w, target, count);
    p.add = vjp_accumulates(work, target);
    if (work->tensor[LINEAR_RESIDUAL]) {
        p.add = true;
        p.addend = input_of(w, LINEAR_RESIDUAL, count);
    }
    multiply(w, p);
    copy_back(w, target, p.result, count);
    if (!(y && pre) && s.activation == VJP_ACTIVATION_NONE) return;
    epilogue f{};
    f.sums = vjp_data(work, target);
    f.y = vjp_data(work, LINEAR_Y);
    f.activation = s.activation;
    if (y) run_epilogue<void>(w, f, rows, s.n);
}

/* The product in f32, in the workspace or in an output; then one pass. */
void forward_through_f32(steps &w, const vjp_linear_sizes &s, product p) {
    const vjp_work *work = w.work;
    int64_t rows = s.batch * s.m;
    epilogue f{};
    f.bias = parameter_of(work, LINEAR_BIAS);
    f.pre = parameter_output_of(work, LINEAR_PRE);
    f.y = vjp_data(work, LINEAR_Y);
    f.add = vjp_accumulates(work, LINEAR_Y);
    f.residual = vjp_data(work, LINEAR_RESIDUAL);
    f.activation = s.activation;
    p.f32 = true;
    p.rounded = !(f.pre.data && f.pre.f32);
    bool in_pre = f.pre.data && f.pre.f32 && is_aligned(f.pre.data, PRODUCT_ALIGNMENT);
    bool in_y = work->storage == VJP_F32 && f.y && !f.add && is_aligned(f.y, PRODUCT_ALIGNMENT);
    if (s.k > 0) {
        p.result = in_pre ? f.pre.data : in_y ? f.y : take(w, rows * s.n, sizeof(float));
        multiply(w, p);
        f.sums = p.result;
    }
    run_epilogue<float>(w, f, rows, s.n);
}

void forward_steps(steps &w) {
    const vjp_work *work = w.work;
    vjp_linear_sizes s = vjp_linear_sizes_of(work);
    bool y = work->tensor[LINEAR_Y], pre = work->tensor[LINEAR_PRE];
    if ((!y && !pre) || s.batch == 0 || s.m == 0 || s.n == 0) return;
    const void *a = input_of(w, LINEAR_A, s.batch * s.m * s.k);
    const void *b = input_of(w, LINEAR_B, s.batch * s.k * s.n); /* batch is 1 where b is shared */
    product p = pre_product(work, s, a, b);
    /* What is added to y must be rounded together with y, not before. */
    bool can_be_direct =
        s.activation == VJP_ACTIVATION_NONE || s.activation == VJP_ACTIVATION_RELU || pre || work->storage == VJP_F32;
    int addends = vjp_accumulates(work, LINEAR_Y) + (work->tensor[LINEAR_RESIDUAL] != nullptr);
    bool rounds_once = addends == 0 || (addends == 1 && !pre && s.activation == VJP_ACTIVATION_NONE &&
                                        adds_itself(work, s.batch * s.m * s.n));
    bool same_type = vjp_type(work, LINEAR_BIAS) == work->storage && vjp_type(work, LINEAR_PRE) == work->storage;
    /*
     * Some versions of cuBLASLt refuse a bias on a matrix of one row or column. And where rows are not multiples of 16
     * bytes, 16-bit sums are rounded before the bias is added: twice.
     */
    int64_t wide = 16 / (int64_t)vjp_dtype_size(work->storage);
    bool whole = work->storage == VJP_F32 || (s.n % wide == 0 && s.k % wide == 0);
    bool takes_bias = !work->tensor[LINEAR_BIAS] || (s.m > 1 && s.n > 1 && s.k > 1 && whole);
    p.f32 = work->storage == VJP_F32;
    if (can_be_direct && rounds_once && same_type && takes_bias && is_one_call(work, p))
        forward_direct(w, s, p);
    else
        forward_through_f32(w, s, p);
}

/* ---- Backward ---------------------------------------------------------------------------------------- */

void write_dbias(steps &w, const double *partial, const tiling &t) {
    parameter_output to = parameter_output_of(w.work, LINEAR_B_DBIAS);
    parts_call s{partial, t.chunks, t.columns, t.columns, slices_of(t.chunks, t.columns), to};
    if (!is_enqueuing(w)) return;
    then(w, with_type(w.work->storage, [&](auto zero) {
             return launch(w.work, true, sum_parts<decltype(zero), double>,
                           vjp_divide_up(s.columns, THREADS / s.slices), THREADS, 0, s);
         }));
}

/* da = dpre b^T */
product da_product(const vjp_work *work, const vjp_linear_sizes &s, const void *b) {
    product p = product_of(work, s.batch, s.m, s.k, s.n);
    p.a = factor_of(nullptr, s.m, s.n, false);
    p.b = s.transpose_b ? factor_of(b, s.n, s.k, false) : factor_of(b, s.k, s.n, true);
    p.f32 = work->storage == VJP_F32;
    return p;
}

/* db = a^T dpre; as [n, k], dpre^T a. */
product db_product(const vjp_work *work, const vjp_linear_sizes &s, const void *a) {
    product p = s.transpose_b ? product_of(work, s.batch, s.n, s.k, s.m) : product_of(work, s.batch, s.k, s.n, s.m);
    (s.transpose_b ? p.b : p.a) = factor_of(a, s.m, s.k, !s.transpose_b);
    (s.transpose_b ? p.a : p.b) = factor_of(nullptr, s.m, s.n, s.transpose_b);
    p.f32 = vjp_type(work, LINEAR_B_DB) == VJP_F32;
    return p;
}

/*
 * dpre rounded to 16 bits is as accurate as a 16-bit gradient is stored, if it is a sum of many terms; for f32 it is
 * not enough. Then what rounding has lost is multiplied, too. So it is where the second product costs no more than its
 * launch (2^28 multiplications take a microsecond or two): with few terms, one can be all that is left of a gradient.
 */
constexpr double SMALL_PRODUCT = 1 << 28, SMALL_MATRICES = 1 << 22;

bool wants_lost(const vjp_work *work, const vjp_linear_sizes &s, const product &p) {
    if (work->storage == VJP_F32 || s.activation == VJP_ACTIVATION_NONE) return false;
    double m = (double)p.m, n = (double)p.n, k = (double)p.k, items = (double)p.items;
    return p.f32 || (items * m * n * k <= SMALL_PRODUCT && items * (m * n + m * k + n * k) <= SMALL_MATRICES);
}

/* Computes a gradient from its product, which reads dpre as the given factor; and `lost` where it is needed. */
void write_gradient(steps &w, const vjp_linear_sizes &s, int slot, product p, factor product::*of_dpre,
                    const void *dpre, const void *lost) {
    int64_t count = p.items * p.m * p.n;
    (p.*of_dpre).data = dpre;
    p.result = output_of(w, slot, count);
    p.add = vjp_accumulates(w.work, slot);
    bool adds_lost = wants_lost(w.work, s, p);
    bool through_f32 = !p.f32 && (adds_lost || (p.add && !adds_itself(w.work, count)));
    product sum = p;
    if (through_f32) { /* all are added before they are rounded */
        sum.result = take(w, count, sizeof(float));
        sum.f32 = true;
        sum.add = false;
    }
    multiply(w, sum);
    if (adds_lost && p.k > 0) {
        (sum.*of_dpre).data = lost;
        sum.scale = 1 / (w.work->storage == VJP_BF16 ? LOST_SCALE<bf16> : LOST_SCALE<f16>);
        sum.add = true;
        multiply(w, sum);
    }
    if (through_f32 && count > 0) {
        p.m = p.items * p.m; /* one matrix, whose only part is the sum */
        if (is_enqueuing(w)) add_parts<float>(w, p, sum.result, 1, count);
    }
    copy_back(w, slot, p.result, count);
}

/* dresidual is dy. */
void write_dresidual(steps &w, int64_t rows, int64_t columns) {
    epilogue f{};
    f.sums = vjp_data(w.work, LINEAR_B_DY);
    f.y = vjp_data(w.work, LINEAR_B_DRESIDUAL);
    f.add = vjp_accumulates(w.work, LINEAR_B_DRESIDUAL);
    f.activation = VJP_ACTIVATION_NONE;
    if (rows > 0 && columns > 0) run_epilogue<void>(w, f, rows, columns);
}

void backward_steps(steps &w) {
    const vjp_work *work = w.work;
    vjp_linear_sizes s = vjp_linear_sizes_of(work);
    bool da = work->tensor[LINEAR_B_DA], db = work->tensor[LINEAR_B_DB], dbias = work->tensor[LINEAR_B_DBIAS];
    if (work->tensor[LINEAR_B_DRESIDUAL]) write_dresidual(w, s.batch * s.m, s.n);
    if (!da && !db && !dbias) return;
    size_t size = vjp_dtype_size(work->storage);
    int64_t rows = s.batch * s.m, count = rows * s.n;
    bool active = s.activation != VJP_ACTIVATION_NONE, again = active && !work->tensor[LINEAR_B_PRE] && count > 0;
    bool passes = count > 0 && (active || dbias);
    const void *a = db || again ? input_of(w, LINEAR_B_A, rows * s.k) : nullptr;
    const void *b = nullptr;
    if (da || again) b = input_of(w, LINEAR_B_B, s.batch * s.k * s.n); /* batch is 1 where b is shared */

    dpre_call q{};
    q.dy = vjp_data(work, LINEAR_B_DY);
    q.activation = s.activation;
    q.slope_of_nan = s.zero_nan ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    if (active && !again) q.pre = vjp_data(work, LINEAR_B_PRE);
    if (again) q.bias = parameter_of(work, LINEAR_B_BIAS);
    bool pre_f32 = again || vjp_type(work, LINEAR_B_PRE) == VJP_F32;
    if (again && s.k > 0) {
        product p = pre_product(work, s, a, b);
        p.f32 = true;
        p.result = take(w, count, sizeof(float));
        multiply(w, p);
        q.pre = p.result;
    }
    /* In f32 dpre may overwrite a pre in our workspace. */
    bool in_place = again && s.k > 0 && work->storage == VJP_F32;
    product for_da = da_product(work, s, b), for_db = db_product(work, s, a);
    bool has_lost = (da && wants_lost(work, s, for_da)) || (db && wants_lost(work, s, for_db));
    if (active && (da || db)) q.dpre = in_place ? const_cast<void *>(q.pre) : take(w, count, size);
    if (has_lost) q.lost = take(w, count, size);
    tiling t = tiling_of(rows, s.n, 16 / (int)size);
    if (dbias) q.partial = static_cast<double *>(take(w, t.chunks * s.n, sizeof(double)));
    if (passes) run_dpre(w, q, pre_f32, t);
    if (dbias) write_dbias(w, q.partial, t);

    const void *dpre = q.dpre;
    if (!active && (da || db)) dpre = input_of(w, LINEAR_B_DY, count);
    if (da) write_gradient(w, s, LINEAR_B_DA, for_da, &product::a, dpre, q.lost);
    if (db) write_gradient(w, s, LINEAR_B_DB, for_db, s.transpose_b ? &product::a : &product::b, dpre, q.lost);
}

/* ---- With a gate or without ---------------------------------------------------------------------------- */

template <int GATE, void (*STEPS)(steps &)> vjp_status run(const vjp_work *work) {
    if (work->tensor[GATE]) return vjp_linear_gated(work, vjp_cuda_linear, vjp_cuda_swiglu);
    return run_steps<STEPS>(work);
}

template <int GATE, void (*STEPS)(steps &)> size_t workspace(const vjp_work *work) {
    if (work->tensor[GATE]) return vjp_linear_gated_workspace(work, vjp_cuda_linear);
    return steps_workspace<STEPS>(work);
}

} // namespace
} // namespace vjp

extern "C" {
const vjp_kernel vjp_cuda_linear[VJP_PASS_COUNT] = {
    {vjp::run<LINEAR_GATE, vjp::forward_steps>, vjp::workspace<LINEAR_GATE, vjp::forward_steps>, VJP_STORAGE_16_32},
    {vjp::run<LINEAR_B_GATE, vjp::backward_steps>, vjp::workspace<LINEAR_B_GATE, vjp::backward_steps>,
     VJP_STORAGE_16_32},
};
}

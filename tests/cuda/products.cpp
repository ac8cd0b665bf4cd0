/* SPDX-License-Identifier: MIT */
// In the place of src/cuda/gemm/products.cu, which calls cuBLASLt, and of the kernels that only Hopper runs: matrix
// products with sums in double, and no Hopper.
#include "cuda/gemm/products.cuh"
#include "cuda/attention/fast.cuh"
#include "cuda/conv/conv2d_hopper.cuh"
#include "cuda/elementwise/silu.cuh"
#include "cuda/gemm/long_sums.cuh"
#include "cuda/linear/gated.cuh"

#include <cstring>
#include <vector>

extern "C" {
#include "core/half.h"
}

namespace vjp {

namespace {

float number_at(const void *data, vjp_dtype dtype, int64_t i) {
    switch (dtype) {
    case VJP_BF16: return vjp_bf16_to_f32(static_cast<const uint16_t *>(data)[i]);
    case VJP_F16: return vjp_f16_to_f32(static_cast<const uint16_t *>(data)[i]);
    default: return static_cast<const float *>(data)[i];
    }
}

void put(void *data, vjp_dtype dtype, int64_t i, float value) {
    switch (dtype) {
    case VJP_BF16: static_cast<uint16_t *>(data)[i] = vjp_f32_to_bf16(value); break;
    case VJP_F16: static_cast<uint16_t *>(data)[i] = vjp_f32_to_f16(value); break;
    default: static_cast<float *>(data)[i] = value;
    }
}

// An item of a factor as [rows, columns].
std::vector<float> numbers_of(const factor &f, vjp_dtype dtype, bool tf32, int64_t item, int64_t rows,
                              int64_t columns) {
    std::vector<float> all((size_t)(rows * columns));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            int64_t at = item * f.item + (f.transposed ? c * f.row + r : r * f.row + c);
            float x = number_at(f.data, dtype, at);
            all[(size_t)(r * columns + c)] = tf32 ? __uint_as_float(round_tf32(x)) : x;
        }
    return all;
}

cudaError_t multiply_now(const product &p, bool tf32) {
    float scale = p.factors ? p.factors[0] : p.scale, keep = p.factors ? p.factors[1 + p.add] : p.add;
    vjp_dtype type = p.f32 ? VJP_F32 : p.storage;
    std::vector<double> sums((size_t)p.n);
    for (int64_t item = 0; item < p.items; item++) {
        std::vector<float> a = numbers_of(p.a, p.storage, tf32, item, p.m, p.k);
        std::vector<float> b = numbers_of(p.b, p.storage, tf32, item, p.k, p.n);
        for (int64_t m = 0; m < p.m; m++) {
            std::fill(sums.begin(), sums.end(), 0);
            for (int64_t k = 0; k < p.k; k++) {
                double left = a[(size_t)(m * p.k + k)];
                const float *right = &b[(size_t)(k * p.n)];
                for (int64_t n = 0; n < p.n; n++)
                    sums[(size_t)n] += left * right[n];
            }
            for (int64_t n = 0; n < p.n; n++) {
                int64_t at = item * p.item + m * p.n + n;
                float sum = (float)(scale * sums[(size_t)n]);
                if (keep != 0) sum += keep * number_at(p.addend ? p.addend : p.result, type, at);
                put(p.result, type, at, p.bias ? sum + number_at(p.bias, type, n) : sum);
            }
        }
    }
    return cudaSuccess;
}

vjp_status refuse(const vjp_work *work) {
    return vjp_refuse(work, VJP_DEVICE_FAILED, "%s: a kernel of Hopper's was chosen", work->device->name);
}

} // namespace

struct products {
    int nothing;
};

vjp_status products_open(vjp_device *device) {
    state_of(device)->matrix_products = new products{};
    return VJP_OK;
}

void products_close(products *p) {
    delete p;
}

vjp_status multiply(const vjp_work *work, const product &p) {
    const void *data[] = {p.a.data, p.b.data, p.result, p.bias, p.addend};
    for (const void *each : data)
        if (!is_aligned(each, PRODUCT_ALIGNMENT))
            return vjp_refuse(work, VJP_DEVICE_FAILED, "%s: a product of data that is not aligned", work->device->name);
    bool tf32 = p.storage == VJP_F32 && state_of(work->device)->tf32;
    if (!p.items || !p.m || !p.n) return VJP_OK;
    return result_of(work, emulated::enqueue(stream_of(work), [=] { return multiply_now(p, tf32); }));
}

// As on Hopper, but of any size: so that programs with pairs of calls are run.
bool gated_forward_pays(const vjp_device *, const gated_forward &p) {
    return p.dtype != VJP_F32 && p.terms % 8 == 0 && p.columns % 8 == 0 && p.terms > 0;
}

bool gated_product_pays(const vjp_device *, const gated_product &p) {
    return p.dtype != VJP_F32 && p.terms % 8 == 0 && p.columns % 8 == 0 && p.terms > 0;
}

// A product [rows, columns] of 16-bit numbers, rounded.
std::vector<uint16_t> product_now(vjp_dtype dtype, int64_t rows, int64_t columns, int64_t terms, factor a, factor b) {
    std::vector<uint16_t> result((size_t)(rows * columns));
    product q{};
    q.storage = dtype;
    q.items = 1;
    q.m = rows;
    q.n = columns;
    q.k = terms;
    q.scale = 1;
    q.a = a;
    q.b = b;
    q.result = result.data();
    multiply_now(q, false);
    return result;
}

template <class T> cudaError_t multiply_gated_forward_now(const gated_forward &p) {
    factor x = {p.x, false, p.terms, 0};
    auto product_with = [&](const void *weight) {
        return product_now(p.dtype, p.rows, p.columns, p.terms, x, {weight, true, p.terms, 0});
    };
    std::vector<uint16_t> gate = product_with(p.gate_weight), up = product_with(p.up_weight);
    size_t bytes = gate.size() * sizeof gate[0];
    if (p.gate) memcpy(p.gate, gate.data(), bytes);
    if (p.up) memcpy(p.up, up.data(), bytes);
    for (int64_t i = 0; i < p.rows * p.columns; i++)
        put(p.y, p.dtype, i, gated_value<T>(number_at(gate.data(), p.dtype, i), number_at(up.data(), p.dtype, i)));
    return cudaSuccess;
}

vjp_status multiply_gated_forward(const vjp_work *work, const gated_forward &p, bool *done) {
    *done = true;
    return result_of(work, emulated::enqueue(stream_of(work), [=] {
                         return p.dtype == VJP_BF16 ? multiply_gated_forward_now<bf16>(p)
                                                    : multiply_gated_forward_now<f16>(p);
                     }));
}

template <class T> cudaError_t multiply_gated_now(const gated_product &p) {
    std::vector<uint16_t> dy =
        product_now(p.dtype, p.rows, p.columns, p.terms, {p.dz, false, p.terms, 0}, {p.w, false, p.columns, 0});
    for (int64_t i = 0; i < p.rows * p.columns; i++) {
        gated_slopes all = gated_gradient<T>(number_at(dy.data(), p.dtype, i), number_at(p.gate, p.dtype, i),
                                             number_at(p.up, p.dtype, i));
        put(p.dgate, p.dtype, i, all.dgate);
        put(p.dup, p.dtype, i, all.dup);
        if (p.y) put(p.y, p.dtype, i, all.y);
    }
    return cudaSuccess;
}

vjp_status multiply_gated(const vjp_work *work, const gated_product &p, bool *done) {
    *done = true;
    return result_of(work, emulated::enqueue(stream_of(work), [=] {
                         return p.dtype == VJP_BF16 ? multiply_gated_now<bf16>(p) : multiply_gated_now<f16>(p);
                     }));
}

int64_t long_sum_parts(const vjp_work *, const product &) {
    return 0;
}
vjp_status multiply_long_sums(const vjp_work *work, const product &, int64_t) {
    return refuse(work);
}

namespace hopper {

bool takes_gradients(const attention_call &) {
    return false;
}
dq_sums dq_sums_of(const attention_call &, workspace_layout &) {
    return {};
}
vjp_status enqueue_forward(const fast_call &c) {
    return refuse(c.work);
}
vjp_status enqueue_dq(const fast_call &c) {
    return refuse(c.work);
}
vjp_status enqueue_dkv(const fast_call &c) {
    return refuse(c.work);
}
vjp_status enqueue_gradients(const fast_call &c, const dq_sums &, int *) {
    return refuse(c.work);
}

bool can_walk(const walk_axis &) {
    return false;
}
vjp_status multiply_windows(const vjp_work *work, windows) {
    return refuse(work);
}
int64_t weight_parts(const weight_sums &) {
    return 1;
}
int64_t bias_chunks(const weight_sums &) {
    return 1;
}
vjp_status multiply_weight_sums(const vjp_work *work, const weight_sums &) {
    return refuse(work);
}

} // namespace hopper
} // namespace vjp

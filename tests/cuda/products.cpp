/* SPDX-License-Identifier: MIT */
// In the place of src/cuda/gemm/products.cu, which calls cuBLASLt: matrix products with sums as tensor cores have them,
// and of f32 in double.
#include "cuda/gemm/products.cuh"
#include "cuda/common/kernel.cuh"

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

cudaError_t multiply_now(const product &p, bool tf32, emulated::tensor_cores cores) {
    float scale = p.factors ? p.factors[0] : p.scale, keep = p.factors ? p.factors[1 + p.add] : p.add;
    vjp_dtype type = p.f32 ? VJP_F32 : p.storage;
    std::vector<double> sums((size_t)p.n);
    std::vector<float> chains((size_t)p.n);
    bool exact = p.storage == VJP_F32 && !tf32;
    for (int64_t item = 0; item < p.items; item++) {
        std::vector<float> a = numbers_of(p.a, p.storage, tf32, item, p.m, p.k);
        std::vector<float> b = numbers_of(p.b, p.storage, tf32, item, p.k, p.n);
        for (int64_t m = 0; m < p.m; m++) {
            std::fill(sums.begin(), sums.end(), 0);
            std::fill(chains.begin(), chains.end(), 0.f);
            if (!exact) {
                emulated::add_products(cores, tf32, chains.data(), (int)p.n, &a[(size_t)(m * p.k)], b.data(),
                                       (size_t)p.n, (int)p.k);
                std::copy(chains.begin(), chains.end(), sums.begin());
            }
            for (int64_t k = 0; exact && k < p.k; k++) {
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
    auto cores = state_of(work->device)->capability < 90 ? emulated::AMPERE : emulated::HOPPER;
    if (!p.items || !p.m || !p.n) return VJP_OK;
    return result_of(work, emulated::enqueue(stream_of(work), [=] { return multiply_now(p, tf32, cores); }));
}

} // namespace vjp

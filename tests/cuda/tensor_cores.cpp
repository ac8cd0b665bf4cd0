/* SPDX-License-Identifier: MIT */
// See tensor_cores.h.
#include "tensor_cores.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// The same code for wider vectors: products are most of what some kernels do.
#if defined __x86_64__ && defined __GNUC__ && !defined __clang__
#define VJP_WIDE __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define VJP_WIDE
#endif

namespace emulated {
namespace {

constexpr int WIDTH = 8;          // columns at a time
constexpr int MOST_PRODUCTS = 16; // at once
constexpr int NOT_LARGEST = -900; // the exponent of 0

inline int exponent_of(float x) {
    int bits;
    memcpy(&bits, &x, sizeof bits);
    return x == 0 ? NOT_LARGEST : (bits >> 23 & 255) - 127;
}

inline double power_of_two(int exponent) {
    int64_t bits = static_cast<int64_t>(exponent + 1023) << 52;
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Truncated to the 24 binary places of f32.
inline double truncated(double x) {
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits &= ~((INT64_C(1) << 29) - 1);
    memcpy(&x, &bits, sizeof x);
    return x;
}

/*
 * What is added at once, for WIDTH columns. Products are exact in double. A factor's exponent is that of its leading
 * place, so a product that is 2 or more times its power of two keeps one place more, as on the card.
 */
VJP_WIDE void add_at_once(int places, float *sums, const float *left, const float *right, size_t step, int products) {
    int largest[WIDTH];
    double scale[WIDTH], total[WIDTH], plain[WIDTH];
    for (int n = 0; n < WIDTH; n++)
        largest[n] = exponent_of(sums[n]);
    for (int k = 0; k < products; k++) {
        int exponent = exponent_of(left[k]);
        for (int n = 0; n < WIDTH; n++)
            largest[n] = std::max(largest[n], exponent + exponent_of(right[static_cast<size_t>(k) * step + n]));
    }
    for (int n = 0; n < WIDTH; n++) {
        scale[n] = power_of_two(places - std::max(largest[n], NOT_LARGEST));
        total[n] = std::trunc(sums[n] * scale[n]);
        plain[n] = sums[n];
    }
    for (int k = 0; k < products; k++)
        for (int n = 0; n < WIDTH; n++) {
            double product = static_cast<double>(left[k]) * right[static_cast<size_t>(k) * step + n];
            total[n] += std::trunc(product * scale[n]);
            plain[n] += product;
        }
    for (int n = 0; n < WIDTH; n++) // a sum in double is not finite only where a term is not
        sums[n] = static_cast<float>(std::isfinite(plain[n]) ? truncated(total[n] / scale[n]) : plain[n]);
}

} // namespace

void add_products(tensor_cores cores, bool tf32, float *sums, int columns, const float *left, const float *right,
                  size_t step, int terms) {
    int at_once = tf32 ? cores.products / 2 : cores.products;
    for (int n = 0; n < columns; n += WIDTH) {
        float own[WIDTH] = {}, factors[MOST_PRODUCTS * WIDTH]; // of the last columns
        int count = std::min(WIDTH, columns - n);
        std::copy(sums + n, sums + n + count, own);
        for (int first = 0; first < terms; first += at_once) {
            int products = std::min(at_once, terms - first);
            const float *from = right + static_cast<size_t>(first) * step + n;
            size_t apart = step;
            if (count < WIDTH) {
                for (int k = 0; k < products; k++)
                    for (int i = 0; i < WIDTH; i++)
                        factors[k * WIDTH + i] =
                            i < count ? from[static_cast<size_t>(k) * step + static_cast<size_t>(i)] : 0;
                from = factors;
                apart = WIDTH;
            }
            add_at_once(cores.places, own, left + first, from, apart, products);
        }
        std::copy(own, own + count, sums + n);
    }
}

} // namespace emulated

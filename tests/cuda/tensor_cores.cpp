/* SPDX-License-Identifier: MIT */
// See tensor_cores.h.
#include "tensor_cores.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

// The same code for wider vectors: products are most of what some kernels do.
#if defined __x86_64__ && defined __GLIBC__ && !defined __clang__
#define VJP_WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VJP_WIDE
#endif

namespace emulated {
namespace {

constexpr int WIDTH = 8;          // columns at a time
constexpr int MOST_PRODUCTS = 16; // at once
constexpr int NOT_LARGEST = -900; // the exponent of 0

using singles = float __attribute__((vector_size(WIDTH * sizeof(float))));
using words = int __attribute__((vector_size(WIDTH * sizeof(int))));
using doubles = double __attribute__((vector_size(WIDTH * sizeof(double))));
using longs = int64_t __attribute__((vector_size(WIDTH * sizeof(int64_t))));

// Of the leading places. Macros, because what functions do with such vectors depends on the instruction set.
#define VJP_EXPONENTS(x) ((x) == 0 ? (words){} + NOT_LARGEST : ((words)(x) >> 23 & 255) - 127)
// Numbers below 2^31 without their fraction.
#define VJP_WHOLE(x) __builtin_convertvector(__builtin_convertvector(x, words), doubles)

/*
 * What is added at once, for WIDTH columns. Products are exact in double. A product's exponent is the sum of those of
 * its factors, so one that is 2 or more times its power of two keeps a place more, as on the card.
 */
VJP_WIDE void add_at_once(int places, float *sums, const float *left, const float *right, size_t step, int products) {
    singles sum, factors[MOST_PRODUCTS];
    memcpy(&sum, sums, sizeof sum);
    words largest = VJP_EXPONENTS(sum);
    for (int k = 0; k < products; k++) {
        memcpy(&factors[k], right + static_cast<size_t>(k) * step, sizeof factors[k]);
        singles same = (singles){} + left[k];
        words exponents = VJP_EXPONENTS(factors[k]) + VJP_EXPONENTS(same);
        largest = exponents > largest ? exponents : largest;
    }
    largest = largest > NOT_LARGEST ? largest : (words){} + NOT_LARGEST;
    doubles scale = (doubles)(__builtin_convertvector(places - largest + 1023, longs) << 52); // a power of two
    doubles plain = __builtin_convertvector(sum, doubles), total = VJP_WHOLE(plain * scale);
    for (int k = 0; k < products; k++) {
        doubles product = __builtin_convertvector(factors[k], doubles) * static_cast<double>(left[k]);
        total += VJP_WHOLE(product * scale);
        plain += product;
    }
    doubles result = (doubles)((longs)(total / scale) & -(INT64_C(1) << 29)); // the 24 places of f32
    result = plain - plain == 0 ? result : plain; // a sum in double is not finite only where a term is not
    sum = __builtin_convertvector(result, singles);
    memcpy(sums, &sum, sizeof sum);
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

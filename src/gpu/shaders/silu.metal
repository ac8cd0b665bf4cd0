/* SPDX-License-Identifier: MIT */
// silu and its slope with one exponential, for a product with another factor: swiglu, and linear with a gate. Included
// after activation.metal.

// Below -80 silu and its slope are x exp(x) and (1 + x) exp(x), and exp(x) may be too small for f32 where its product
// with a large factor is not. There exp(x + SHIFT) is used, and `last`, exp(-SHIFT), multiplies the finished product.
constexpr constant float TAIL = -80.0f;
constexpr constant float SHIFT = 40.0f;
constexpr constant float EXP_MINUS_SHIFT = 4.248354255291589e-18f;
constexpr constant float SILU_END = 130.0f;

struct Silu {
    float value;
    float slope;
    float last;
};

inline Silu silu_of(float x) {
    if (is_nan(x)) {
        return {x, x, 1.0f};
    }
    bool negative = x < 0.0f;
    bool tail = x < TAIL;
    float size = min(abs(x), SILU_END);
    Logistic s = logistic(tail ? size - SHIFT : size);
    float sigmoid = negative ? s.small : s.large;
    float near = negative ? -size : size;
    return {(negative ? near : x) * sigmoid, fma(near * (negative ? s.large : s.small), sigmoid, sigmoid),
            tail ? EXP_MINUS_SHIFT : 1.0f};
}

/* SPDX-License-Identifier: MIT */
// What the optimizers share: weight decay, and a gradient's factor. Both have operands lr and scale. With a factor that
// is not finite a step changes nothing.

// g + decay w. Without decay an infinite w adds nothing, as 0 * Inf would: the product is then a zero of w's sign.
inline float decayed(float w, float decay, float g) {
    return decay != 0.0f ? fma(w, decay, g) : copysign(0.0f, w) + g;
}

inline float scale_factor(thread const Call &c) {
    return c.scale.is() ? c.scale.at(0) : 1.0f;
}

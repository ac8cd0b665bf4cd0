/* SPDX-License-Identifier: MIT */
// Sums of two f32 each: twice the digits of one, for sums of many terms. A shader that includes this, after
// common.metal, has `uint zero`, a 0 that compilers cannot know, in its Params.

struct Pair {
    float2 high;
    float2 low; // what rounding took from high
};

inline Pair no_pair() {
    return {float2(0.0f), float2(0.0f)};
}

// v after rounding. By the rules of algebra a rounding takes away 0, and a compiler that applies them makes the sum
// as inaccurate as one f32. None can know that c.p.zero is 0, so none removes this.
inline float rounded(thread const Call &c, float v) {
    return as_type<float>(as_type<uint>(v) ^ c.p.zero);
}

inline float2 rounded(thread const Call &c, float2 v) {
    return float2(rounded(c, v.x), rounded(c, v.y));
}

// p + v: the sum, and exactly what its rounding took away (Knuth's two-sum), normalised so that low is small against
// high. An infinite or NaN sum has low 0: inf - inf would turn it into a NaN.
inline Pair plus(thread const Call &c, Pair p, float2 v) {
    float2 sum = rounded(c, p.high + v);
    float2 part = rounded(c, sum - p.high);
    float2 lost = rounded(c, p.high - rounded(c, sum - part)) + rounded(c, v - part);
    float2 low = rounded(c, p.low + lost);
    float2 high = rounded(c, sum + low);
    float2 left = low - rounded(c, high - sum);
    bool x = is_finite(high.x);
    bool y = is_finite(high.y);
    return {float2(x ? high.x : sum.x, y ? high.y : sum.y), float2(x ? left.x : 0.0f, y ? left.y : 0.0f)};
}

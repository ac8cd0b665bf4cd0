/* SPDX-License-Identifier: MIT */
// exp(x) and 1 - exp(x) for x <= 0, by a polynomial: the last digits of a device's exp() differ from one to the next.

// exp(x) = power (1 + rest).
struct Exponential {
    float power;
    float rest;
};

// exp(x) is 2^n exp(r), r = x - n ln 2 within half of ln 2. ln 2 is 22713 / 2^15 and a rest; n times the first is made
// of integers, because compilers may and do gather n (p + q) from n p + n q, which here would cost 30 units far out.
// x is -87 or more.
inline Exponential exponential(float x) {
    float n = rint(x * 1.44269502f);
    int power = int(n);
    float r = fma(n, -0x1.7f7d1cp-20f, x - float(power * 22713) * 0x1p-15f);
    float p = fma(r, 0x1.6a2316p-10f, 0x1.123a8ep-7f);
    p = fma(p, r, 0x1.5558f6p-5f);
    p = fma(p, r, 0x1.55549p-3f);
    p = fma(p, r, 0x1.fffffcp-2f);
    return {as_type<float>(uint(power + 127) << 23), fma(r * r, p, r)};
}

// Below -87 it is 0.
inline float exp_down(float x) {
    Exponential e = exponential(max(x, -87.0f));
    return x < -87.0f ? 0.0f : (e.rest + 1.0f) * e.power;
}

// 1 - exp(x), with all its digits where x is near 0.
inline float one_minus_exp(float x) {
    Exponential e = exponential(max(x, -87.0f));
    return fma(-e.power, e.rest, 1.0f - e.power);
}

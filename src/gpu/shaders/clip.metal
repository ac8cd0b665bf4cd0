/* SPDX-License-Identifier: MIT */
// clip: norm = sqrt(squares), scale = min(1, max_norm / norm), by one thread. Numbers too small for a device's f32 are
// taken by their bits: max_norm comes as a fraction of [0.5, 1) and a power of two, and so is the norm.
#define OPERANDS(operand) operand(Float, 0, scale) operand(Float, 1, norm) operand(Float, 2, squares)
#define NUMBERS(number)
#define KERNELS(kernel_of) kernel_of(clip)

struct Params {
    uint has_limit;
    float fraction;
    int power;
};

struct Shared {
    uint none;
};

#include "common.metal"

constexpr constant uint ABOVE_ALL = 0x7f800000u;

inline float power_of_two(int n) {
    return as_type<float>(uint(n + 127) << 23);
}

// The root; where the square is denormal it is an integer times 2^-149.
inline float root_of(float square) {
    uint bits = as_type<uint>(square);
    if (bits < 0x800000u) {
        return sqrt(2.0f * float(bits)) * 0x1p-75f;
    }
    if (bits >= ABOVE_ALL && bits <= 0x80000000u) {
        return square; // infinite, NaN, or -0
    }
    return sqrt(square);
}

// max_norm / norm, at most 1, of a norm that is positive and finite.
inline float quotient_of(thread const Call &c, uint bits) {
    // Between 1/4 and 1, times 2^n.
    float quotient = c.p.fraction / as_type<float>((bits & 0x7fffffu) | 0x3f800000u);
    int n = c.p.power - (int(bits >> 23) - 127);
    if (n > 2) {
        return 1.0f;
    }
    // 2^n by two factors, of which each is one that f32 holds.
    int both = max(n, -240);
    int one = both / 2;
    return min(1.0f, quotient * power_of_two(one) * power_of_two(both - one));
}

inline void clip(thread const Call &c) {
    if (c.lane != 0) {
        return;
    }
    float norm = root_of(c.squares.at(0));
    uint bits = as_type<uint>(norm);
    float scale = 1.0f;
    if (c.p.has_limit && (bits & 0x7fffffffu) != 0) {
        scale = bits > ABOVE_ALL ? norm : bits == ABOVE_ALL ? 0.0f : quotient_of(c, bits);
    }
    c.norm.set(0, norm);
    c.scale.set(0, scale);
}

KERNELS(ENTRY)

// SPDX-License-Identifier: MIT
// clip: norm = sqrt(squares), scale = min(1, max_norm / norm), by one thread. Numbers too small for a device's f32 are
// taken by their bits: max_norm comes as a fraction of [0.5, 1) and a power of two, and so is the norm.
//# float scale norm squares

struct Params {
    has_limit: u32,
    fraction: f32,
    power: i32,
}

const ABOVE_ALL = 0x7f800000u;

fn power_of_two(n: i32) -> f32 {
    return bitcast<f32>(u32(n + 127) << 23u);
}

// The root; where the square is denormal it is an integer times 2^-149.
fn root_of(square: f32) -> f32 {
    let bits = bitcast<u32>(square);
    if (bits < 0x800000u) {
        return sqrt(2.0 * f32(bits)) * 0x1p-75;
    }
    if (bits >= ABOVE_ALL && bits <= 0x80000000u) {
        return square; // infinite, NaN, or -0
    }
    return sqrt(square);
}

// max_norm / norm, at most 1, of a norm that is positive and finite.
fn quotient_of(bits: u32) -> f32 {
    // Between 1/4 and 1, times 2^n.
    let quotient = u.p.fraction / bitcast<f32>((bits & 0x7fffffu) | 0x3f800000u);
    let n = u.p.power - (i32(bits >> 23u) - 127);
    if (n > 2) {
        return 1.0;
    }
    // 2^n by two factors, of which each is one that f32 holds.
    let both = max(n, -240);
    let one = both / 2;
    return min(1.0, quotient * power_of_two(one) * power_of_two(both - one));
}

fn clip(group: u32, lane: u32) {
    if (lane != 0u) {
        return;
    }
    let norm = root_of(squares_at(0u));
    let bits = bitcast<u32>(norm);
    var scale = 1.0;
    if (u.p.has_limit == 1u && (bits & 0x7fffffffu) != 0u) {
        if (bits > ABOVE_ALL) {
            scale = norm; // NaN
        } else if (bits == ABOVE_ALL) {
            scale = 0.0;
        } else {
            scale = quotient_of(bits);
        }
    }
    norm_set(0u, norm);
    scale_set(0u, scale);
}

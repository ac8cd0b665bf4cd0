// SPDX-License-Identifier: MIT
// What every shader has: 16-bit floats by integer arithmetic (WGSL's own conversions may round either way and may lose
// very small numbers), indices, and sums over the threads of a team along a fixed tree.

fn bf16_value(bits: u32) -> f32 {
    return bitcast<f32>(bits << 16u);
}

fn bf16_bits(value: f32) -> u32 {
    let u = bitcast<u32>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
        return (u >> 16u) | 0x40u; // a NaN stays one
    }
    return (u + 0x7fffu + ((u >> 16u) & 1u)) >> 16u;
}

fn f16_value(bits: u32) -> f32 {
    let sign = (bits & 0x8000u) << 16u;
    let exponent = (bits >> 10u) & 31u;
    let mantissa = bits & 0x3ffu;
    if (exponent == 0u) {
        // Zero or too small for f16's exponents, but not for f32's.
        let small = f32(mantissa) * 5.9604644775390625e-8;
        return bitcast<f32>(bitcast<u32>(small) | sign);
    }
    let wide = select(exponent + 112u, 255u, exponent == 31u);
    return bitcast<f32>(sign | (wide << 23u) | (mantissa << 13u));
}

fn f16_bits(value: f32) -> u32 {
    let u = bitcast<u32>(value);
    let sign = (u >> 16u) & 0x8000u;
    let magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return sign | 0x7e00u;
    }
    if (magnitude >= 0x477ff000u) { // 65520 and more round to infinity
        return sign | 0x7c00u;
    }
    if (magnitude < 0x38800000u) { // below 2^-14: a multiple of 2^-24
        let mantissa = (magnitude & 0x7fffffu) | 0x800000u;
        let shift = 126u - (magnitude >> 23u);
        if (shift > 24u) {
            return sign;
        }
        let kept = mantissa >> shift;
        let rest = mantissa & ((1u << shift) - 1u);
        let half = 1u << (shift - 1u);
        let up = select(0u, 1u, rest > half || (rest == half && (kept & 1u) == 1u));
        return sign | (kept + up);
    }
    let rounded = magnitude + 0xfffu + ((magnitude >> 13u) & 1u);
    return sign | ((rounded - 0x38000000u) >> 13u);
}

// By its bits, because a compiler may assume that there are no NaN.
fn is_nan(value: f32) -> bool {
    return (bitcast<u32>(value) & 0x7fffffffu) > 0x7f800000u;
}

fn is_finite(value: f32) -> bool {
    return (bitcast<u32>(value) & 0x7fffffffu) < 0x7f800000u;
}

// ---- Powers of two ----

// 1 / power, exactly.
fn inverse_power(power: f32) -> f32 {
    return bitcast<f32>((254u << 23u) - bitcast<u32>(power));
}

// Values near f32's largest overflow when they are subtracted or added. Where the exponent of the largest magnitude of a
// row is LARGE or more, the row is multiplied by GUARD; else by 1, which changes no bit.
const LARGE = 217; // of 2^90
const GUARD = 0x1p-40;
const GUARD_EXPONENT = 40;

fn guard_of(exponent: i32) -> f32 {
    return select(1.0, GUARD, exponent >= LARGE);
}

const NO_INDEX = 0xffffffffu;

// An index from its words in memory, low word first; NO_INDEX where it is not an integer in [0, limit).
fn index_i32(low: u32, limit: u32) -> u32 {
    return select(NO_INDEX, low, low < limit); // a negative one is a large one
}

fn index_i64(low: u32, high: u32, limit: u32) -> u32 {
    return select(NO_INDEX, low, high == 0u && low < limit);
}

fn index_f32(bits: u32, limit: u32) -> u32 {
    if (bits == 0x80000000u) {
        return select(NO_INDEX, 0u, limit > 0u); // -0
    }
    if (bits > 0x4b800000u) { // negative, past 2^24, infinite or NaN
        return NO_INDEX;
    }
    let value = bitcast<f32>(bits);
    let index = u32(value);
    return select(NO_INDEX, index, f32(index) == value && index < limit);
}

// Any integer, from its words in memory: both words of its 64 bits, and 1; or 0 last where it is stored as f32 and is
// no integer that f32 holds exactly.
fn integer_i64(raw: vec2<u32>) -> vec3<u32> {
    return vec3<u32>(raw, 1u);
}

fn integer_i32(raw: vec2<u32>) -> vec3<u32> {
    return vec3<u32>(raw.x, select(0u, 0xffffffffu, raw.x >= 0x80000000u), 1u);
}

fn integer_f32(raw: vec2<u32>) -> vec3<u32> {
    let size = index_f32(raw.x & 0x7fffffffu, 0x1000001u);
    if (size == NO_INDEX) {
        return vec3<u32>();
    }
    if (raw.x >= 0x80000000u && size > 0u) {
        return vec3<u32>(~size + 1u, 0xffffffffu, 1u);
    }
    return vec3<u32>(size, 0u, 1u);
}

// ---- Sums over threads ----

var<workgroup> team_tree: array<vec4<f32>, 256>;

// For each run of `span` threads, and each remainder modulo `low` of a thread's number in it: the sum of v, for all
// threads that share it. Both are powers of two. Every thread of the workgroup must come here; the last barrier keeps
// the next sum from overwriting this one while it is still being read.
fn strided_sum(v: vec4<f32>, lane: u32, span: u32, low: u32) -> vec4<f32> {
    team_tree[lane] = v;
    workgroupBarrier();
    for (var stride = span / 2u; stride >= low; stride = stride >> 1u) {
        if ((lane & (span - 1u)) < stride) {
            team_tree[lane] += team_tree[lane + stride];
        }
        workgroupBarrier();
    }
    let total = team_tree[(lane & ~(span - 1u)) | (lane & (low - 1u))];
    workgroupBarrier();
    return total;
}

// The same for the largest of v.
fn strided_max(v: f32, lane: u32, span: u32, low: u32) -> f32 {
    team_tree[lane].x = v;
    workgroupBarrier();
    for (var stride = span / 2u; stride >= low; stride = stride >> 1u) {
        if ((lane & (span - 1u)) < stride) {
            team_tree[lane].x = max(team_tree[lane].x, team_tree[lane + stride].x);
        }
        workgroupBarrier();
    }
    let largest = team_tree[(lane & ~(span - 1u)) | (lane & (low - 1u))].x;
    workgroupBarrier();
    return largest;
}

// Over this thread's team: teams are `lanes` threads each, one after another.
fn team_sum4(v: vec4<f32>, lane: u32, lanes: u32) -> vec4<f32> {
    return strided_sum(v, lane, lanes, 1u);
}

fn team_sum(v: vec2<f32>, lane: u32, lanes: u32) -> vec2<f32> {
    return team_sum4(vec4<f32>(v, 0.0, 0.0), lane, lanes).xy;
}

fn team_max(v: f32, lane: u32, lanes: u32) -> f32 {
    return strided_max(v, lane, lanes, 1u);
}

// Over the teams, for the threads with the same number in each.
fn across_teams(v: vec4<f32>, lane: u32, lanes: u32) -> vec4<f32> {
    return strided_sum(v, lane, 256u, lanes);
}

fn across_max(v: f32, lane: u32, lanes: u32) -> f32 {
    return strided_max(v, lane, 256u, lanes);
}

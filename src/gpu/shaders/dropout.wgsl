// SPDX-License-Identifier: MIT
// dropout: y = x / (1 - p) where the element's random word is not below the threshold, else 0. The words are those of
// core/philox.h, in integers, so the mask is the same as on every backend. The backward is the forward with dy for x.
//
// Four elements share a call of the generator. The counter is in the device's memory, so each thread derives the key
// from it. A counter in f32 that is not an integer is reported, and nothing is written.
//# include elementwise
//# index counter
//# bad_index

struct Params {
    e: Elements,
    stream_low: u32,
    stream_high: u32,
    threshold: u32,
    factor: f32, // 1 / (1 - p)
}

var<private> key: vec4<u32>; // key and upper half of the counter

// The two words of a * b, the low one first: WGSL has no integer of 64 bits.
fn product(a: u32, b: u32) -> vec2<u32> {
    let low = (a & 0xffffu) * (b & 0xffffu);
    let middle = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
    let other = (a & 0xffffu) * (b >> 16u) + (middle & 0xffffu);
    return vec2<u32>((other << 16u) | (low & 0xffffu), (a >> 16u) * (b >> 16u) + (middle >> 16u) + (other >> 16u));
}

// Philox4x32-10.
fn philox(counter: vec4<u32>, start: vec2<u32>) -> vec4<u32> {
    var c = counter;
    var k = start;
    for (var round = 0u; round < 10u; round++) {
        let first = product(0xD2511F53u, c.x);
        let second = product(0xCD9E8D57u, c.z);
        c = vec4<u32>(second.y ^ c.y ^ k.x, second.x, first.y ^ c.w ^ k.y, first.x);
        k += vec2<u32>(0x9E3779B9u, 0xBB67AE85u);
    }
    return c;
}

fn prepare(reports: bool) -> bool {
    let seed = counter_integer(0u);
    let step = counter_integer(1u);
    if (seed.z == 0u || step.z == 0u) {
        if (reports) {
            let position = select(0u, 1u, seed.z != 0u);
            bad_index_explain(position, counter_raw(position));
        }
        return false;
    }
    key = philox(vec4<u32>(step.xy, u.p.stream_low, u.p.stream_high), seed.xy);
    return true;
}

fn formula(i: u32, v: Inputs) -> Outputs {
    let words = philox(vec4<u32>(i >> 2u, 0u, key.zw), key.xy);
    return outputs_of(select(v.in0 * u.p.factor, vec4<f32>(), words < vec4<u32>(u.p.threshold)), vec4<f32>());
}

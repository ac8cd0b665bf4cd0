// SPDX-License-Identifier: MIT
// The elementwise ops: every element of the outputs out0 to out2 comes from the same element of the inputs in0 to in3.
// An op is its formula, on four neighbouring elements at a time. A shader that includes this has
//
//     struct Params        `e: Elements` first, then the op's own numbers
//     fn prepare(reports)  reads what all elements share into private variables. False: nothing is to be written;
//                          `reports` is true in one thread of the launch, which then says why
//     fn formula(i, v)     the outputs of elements i to i + 3, i a multiple of four; BACKWARD says of which pass
//
// Where the launch has `row`, in1 is an element of it instead, repeated as `inner` and `span` say.
//
// A thread has `rounds` times four elements, neighbouring threads neighbouring fours. It reads all inputs of an element
// before it writes an output, so an output may be the memory of an input. Memory traffic: each tensor once, an output
// that is added to twice. One dispatch per 2^24 elements.
//# const BACKWARD
//# float out0 out1 out2 in0 in1 in2 in3 row

struct Elements {
    count: u32, // of this launch
    first: u32, // the element that is the launch's first
    rounds: u32,
    inner: u32, // element e of the tensor has element e / span * inner + e % inner of row
    span: u32,
    unused0: u32, // a struct among uniforms has a multiple of 16 bytes
    unused1: u32,
    unused2: u32,
}

struct Inputs {
    in0: vec4<f32>,
    in1: vec4<f32>,
    in2: vec4<f32>,
    in3: vec4<f32>,
}

struct Outputs {
    out0: vec4<f32>,
    out1: vec4<f32>,
    out2: vec4<f32>,
}

fn place_in_row(i: u32) -> u32 {
    let element = u.p.e.first + i;
    return element / u.p.e.span * u.p.e.inner + element % u.p.e.inner;
}

// Element i of in1, or of row.
fn second_at(i: u32) -> f32 {
    if (row_is) {
        return row_at(place_in_row(i));
    }
    return in1_at(i);
}

fn second_four(i: u32) -> vec4<f32> {
    if (!row_is) {
        return in1_four(i);
    }
    if (u.p.e.inner % 4u == 0u) {
        return row_four(place_in_row(i));
    }
    return vec4<f32>(second_at(i), second_at(i + 1u), second_at(i + 2u), second_at(i + 3u));
}

// Elements i to i + 3; past the end there are zeros.
fn load(i: u32, left: u32) -> Inputs {
    if (left >= 4u) {
        return Inputs(in0_four(i), second_four(i), in2_four(i), in3_four(i));
    }
    var v = Inputs();
    for (var k = 0u; k < left; k++) {
        v.in0[k] = in0_at(i + k);
        v.in1[k] = second_at(i + k);
        v.in2[k] = in2_at(i + k);
        v.in3[k] = in3_at(i + k);
    }
    return v;
}

fn store(i: u32, left: u32, r: Outputs) {
    if (left >= 4u) {
        out0_set_two(i, r.out0.xy);
        out0_set_two(i + 2u, r.out0.zw);
        out1_set_two(i, r.out1.xy);
        out1_set_two(i + 2u, r.out1.zw);
        out2_set_two(i, r.out2.xy);
        out2_set_two(i + 2u, r.out2.zw);
        return;
    }
    for (var k = 0u; k < left; k++) {
        out0_set(i + k, r.out0[k]);
        out1_set(i + k, r.out1[k]);
        out2_set(i + k, r.out2[k]);
    }
}

fn elements(group: u32, lane: u32) {
    if (!prepare(group == 0u && lane == 0u && u.p.e.first == 0u)) {
        return;
    }
    for (var k = 0u; k < u.p.e.rounds; k++) {
        let i = 4u * ((group * u.p.e.rounds + k) * 256u + lane);
        if (i < u.p.e.count) {
            let left = u.p.e.count - i;
            store(i, left, formula(u.p.e.first + i, load(i, left)));
        }
    }
}

fn outputs_of(out0: vec4<f32>, out1: vec4<f32>) -> Outputs {
    return Outputs(out0, out1, vec4<f32>());
}

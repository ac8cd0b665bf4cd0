// SPDX-License-Identifier: MIT
// Kernels of the device itself: the value of a bad index for the sentence, single bytes of an upload, and a copy
// between two ranges of one buffer, which WebGPU's own copy refuses.
//# float
//# index explained
//# word to from
//# bad_index

struct Params {
    first: u32,
    second: u32,
}

// The recorded position may be of an earlier call, which has already noted its value.
fn explain(group: u32, lane: u32) {
    if (lane != 0u) {
        return;
    }
    let position = bad_index_first();
    if (position != NO_INDEX && position != bad_index_explained() && position < u.p.first) {
        let raw = explained_raw(position);
        bad_index_note(position, raw.x, raw.y);
    }
}

// Some bytes of one word.
fn part(group: u32, lane: u32) {
    if (lane == 0u) {
        to_put(0u, (to_word(0u) & ~u.p.first) | u.p.second);
    }
}

fn copy(group: u32, lane: u32) {
    let i = group * 256u + lane;
    if (i < u.p.first) {
        to_put(i, from_word(i));
    }
}

// SPDX-License-Identifier: MIT
// attention's `first`, checked and turned into the limits that the kernels of attention.wgsl use, `edge`: the first key
// that each query sees, with the window in it, or with KEY_ROWS the end of the queries that see each key, by a binary
// search, because first keys never decrease.
//
// A bad value (not an integer, before that of the query before, past the query's own key) is reported. Key 0 takes the
// place of one outside the query's keys, so that whatever `first` holds every query sees its own key, and no kernel
// reads outside its tensors.
//# const KEY_ROWS
//# index first
//# word edge
//# bad_index

struct Params {
    rows: u32, // of all batches
    time: u32,
    keys: u32,
    window: u32, // how many of its last keys a query sees; all are `keys`
}

// The end of the keys up to a query's own.
fn end_key(query: u32) -> u32 {
    return query + u.p.keys - u.p.time + 1u;
}

// An element of first; 0 where it is bad.
fn given_first(batch: u32, query: u32) -> u32 {
    let value = first_in(batch * u.p.time + query, end_key(query));
    return select(value, 0u, value == NO_INDEX);
}

fn visible_from(batch: u32, query: u32) -> u32 {
    return max(given_first(batch, query), max(end_key(query), u.p.window) - u.p.window);
}

// The query at the key's own time sees it.
fn visible_until(batch: u32, key: u32) -> u32 {
    let ahead = u.p.keys - u.p.time;
    var low = max(key + 1u, ahead) - ahead;
    var high = u.p.time;
    while (low < high) {
        let middle = (low + high) / 2u;
        if (visible_from(batch, middle) <= key) {
            low = middle + 1u;
        } else {
            high = middle;
        }
    }
    return low;
}

fn edges(group: u32, lane: u32) {
    let row = group * 256u + lane;
    if (row >= u.p.rows) {
        return;
    }
    if (KEY_ROWS == 1u) {
        edge_put(row, visible_until(row / u.p.keys, row % u.p.keys));
        return;
    }
    let batch = row / u.p.time;
    let query = row % u.p.time;
    let before = given_first(batch, max(query, 1u) - 1u);
    if (first_in(row, end_key(query)) == NO_INDEX || given_first(batch, query) < before) {
        bad_index_report(row);
    }
    edge_put(row, visible_from(batch, query));
}

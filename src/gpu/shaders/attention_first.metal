/* SPDX-License-Identifier: MIT */
// attention's `first`, checked and turned into the limits that the kernels of attention.metal use, `edge`: the first
// key that each query sees, with the window in it, or with KEY_ROWS the end of the queries that see each key, by a
// binary search, because first keys never decrease.
//
// A bad value (not an integer, before that of the query before, past the query's own key) is reported. Key 0 takes the
// place of one outside the query's keys, so that whatever `first` holds every query sees its own key, and no kernel
// reads outside its tensors.
#define OPERANDS(operand)  operand(Index, 0, first) operand(Word, 1, edge) operand(BadIndex, 2, bad_index)
#define NUMBERS(number)    number(0, KEY_ROWS)
#define KERNELS(kernel_of) kernel_of(edges)

struct Params {
    uint rows; // of all batches
    uint time;
    uint keys;
    uint window; // how many of its last keys a query sees; all are `keys`
};

struct Shared {
    uint none;
};

#include "common.metal"

// The end of the keys up to a query's own.
inline uint end_key(thread const Call &c, uint query) {
    return query + c.p.keys - c.p.time + 1;
}

// An element of first; 0 where it is bad.
inline uint given_first(thread const Call &c, uint batch, uint query) {
    uint value = c.first.in(batch * c.p.time + query, end_key(c, query));
    return value == NO_INDEX ? 0 : value;
}

inline uint visible_from(thread const Call &c, uint batch, uint query) {
    return max(given_first(c, batch, query), max(end_key(c, query), c.p.window) - c.p.window);
}

// The query at the key's own time sees it.
inline uint visible_until(thread const Call &c, uint batch, uint key) {
    uint ahead = c.p.keys - c.p.time;
    uint low = max(key + 1, ahead) - ahead;
    uint high = c.p.time;
    while (low < high) {
        uint middle = (low + high) / 2;
        if (visible_from(c, batch, middle) <= key) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

inline void edges(thread const Call &c) {
    uint row = c.group * c.threads + c.lane;
    if (row >= c.p.rows) {
        return;
    }
    if (KEY_ROWS == 1) {
        c.edge.put(row, visible_until(c, row / c.p.keys, row % c.p.keys));
        return;
    }
    uint batch = row / c.p.time;
    uint query = row % c.p.time;
    uint before = query ? given_first(c, batch, query - 1) : 0;
    if (c.first.in(row, end_key(c, query)) == NO_INDEX || given_first(c, batch, query) < before) {
        c.bad_index.report(row);
    }
    c.edge.put(row, visible_from(c, batch, query));
}

KERNELS(ENTRY)

/* SPDX-License-Identifier: MIT */
// gather: y[o, k, :] = table[o, index[k], :]. Its backward adds rows back, repeats in the order of k, and writes every
// row of dtable, without float atomics and without searching all indices for each row. A bad index is reported and its
// row left out.
//
// Forward, one kernel: a thread copies 4 neighbours of y.
//
// Backward: the pairs (row, k) are sorted by row, stably, so that the occurrences of a row are adjacent and in order.
// It is a radix sort: one tile of indices, ITEMS per thread, is sorted by one threadgroup (`sort_few`); more are sorted
// 8 bits at a time, in three kernels: how often a tile has each digit (`count_digits`), where that digit of that tile
// goes
// (`scan_digits`), and the tile sorted and written there (`place_keys`). A bad index counts as row `rows`: it comes
// last and is never added.
//
// Then the sorted entries are split into chunks, each added by a team (`add_runs`). A run of one row inside a chunk is
// a finished sum. A run across an edge leaves its sum on either side: at most 2 per chunk, which are again a list
// sorted by row, a 16th as long, for the same kernel, until one chunk has all. So a row that a third of all indices
// name is added by as many teams as any other third, in f32 chains of 8. `clear_rows` writes the rows without an index:
// it looks each up in the sorted list, and nothing is written twice.
//
// A threadgroup has a power of two of threads, 8 or more. Their number decides about tiles, never about the order of
// sums.
#define OPERANDS(operand)                                                                                              \
    operand(Float, 0, y) operand(Float, 1, table) operand(Float, 2, dtable) operand(Float, 3, dy)                      \
        operand(Float, 4, entry_value) operand(Float, 5, left_value) operand(Index, 6, index) operand(Word, 7, key_in) \
            operand(Word, 8, k_in) operand(Word, 9, key_out) operand(Word, 10, k_out) operand(Word, 11, counts)        \
                operand(Word, 12, totals) operand(Word, 13, entry_row) operand(Word, 14, entry_k)                      \
                    operand(Word, 15, left_row) operand(BadIndex, 16, bad_index)
#define NUMBERS(number)
#define KERNELS(kernel_of)                                                                                             \
    kernel_of(forward) kernel_of(sort_few) kernel_of(count_digits) kernel_of(scan_digits) kernel_of(place_keys)        \
        kernel_of(add_runs) kernel_of(clear_rows)

struct Params {
    uint outer;
    uint rows;
    uint inner;
    uint count;
    uint shift; // the sort's first bit in this pass, and the one after its last
    uint shift_end;
    uint tiles;   // of as many indices as a threadgroup sorts
    uint entries; // of the list that add_runs adds
    uint chunk;   // entries of a chunk
    uint chunks;
    uint lanes;  // of a team, a power of two
    uint slices; // of a row
    uint tasks;  // chunks x slices x outer
    uint width;  // a row in the workspace: inner, rounded up to a multiple of 4
};

constexpr constant uint ITEMS = 8; // keys of a thread
constexpr constant uint DIGITS = 256;
constexpr constant uint CLEARED = 256; // rows, and columns at most, that a threadgroup clears

// The memory through which a tile is sorted: first 16 counters of 16 bits per thread, two in a word, counter words of
// all threads together; then keys; then their ks.
struct Shared {
    uint space[256 * ITEMS];
    uint ends[8]; // how often each digit occurs, two in a word
    uint line[256];
    uint bins[DIGITS];
    uint digit_base[DIGITS];  // where the tile's first key of a digit goes
    uint digit_start[DIGITS]; // where it is in the sorted tile
    uint used[CLEARED];
};

#include "common.metal"

// ---- Forward --------------------------------------------------------------------------------------------------

// The element of the table that is element i of y; NO_INDEX where the index is bad.
inline uint source_of(thread const Call &c, uint i) {
    uint item = i / c.p.inner;
    uint outer = item / c.p.count;
    uint k = item - outer * c.p.count;
    uint row = c.index.in(k, c.p.rows);
    if (row == NO_INDEX) {
        c.bad_index.report(k);
        return NO_INDEX;
    }
    return (outer * c.p.rows + row) * c.p.inner + (i - item * c.p.inner);
}

inline void copy_two(thread const Call &c, uint i, uint total) {
    if (i >= total) {
        return;
    }
    uint first = source_of(c, i);
    uint second = i + 1 < total ? source_of(c, i + 1) : NO_INDEX;
    if (first != NO_INDEX && second != NO_INDEX) {
        c.y.set_two(i, float2(c.table.at(first), c.table.at(second)));
    } else if (first != NO_INDEX) {
        c.y.set(i, c.table.at(first));
    } else if (second != NO_INDEX) {
        c.y.set(i + 1, c.table.at(second));
    }
}

inline void forward(thread const Call &c) {
    uint i = 4 * (c.group * c.threads + c.lane);
    uint total = c.p.outer * c.p.count * c.p.inner;
    if (i >= total) {
        return;
    }
    if (c.p.inner % 4 != 0) {
        copy_two(c, i, total);
        copy_two(c, i + 2, total);
        return;
    }
    uint source = source_of(c, i);
    if (source != NO_INDEX) {
        float4 v = c.table.four(source);
        c.y.set_two(i, v.xy);
        c.y.set_two(i + 2, v.zw);
    }
}

// ---- Sorting --------------------------------------------------------------------------------------------------

// Key i of the pass. The first pass takes the indices themselves.
inline uint key_at(thread const Call &c, uint i) {
    if (!c.index.is()) {
        return c.key_in.word(i);
    }
    uint row = c.index.in(i, c.p.rows);
    if (row == NO_INDEX) {
        c.bad_index.report(i);
        return c.p.rows;
    }
    return row;
}

inline uint digit_of(thread const Call &c, uint key) {
    return key >> c.p.shift & (DIGITS - 1);
}

inline void count_digits(thread const Call &c) {
    threadgroup atomic_uint *bins = (threadgroup atomic_uint *)c.shared->bins;
    for (uint digit = c.lane; digit < DIGITS; digit += c.threads) {
        atomic_store_explicit(&bins[digit], 0u, memory_order_relaxed);
    }
    wait_for_all();
    for (uint j = 0; j < ITEMS; j++) {
        uint i = (c.group * ITEMS + j) * c.threads + c.lane;
        if (i < c.p.count) {
            atomic_fetch_add_explicit(&bins[digit_of(c, key_at(c, i))], 1u, memory_order_relaxed);
        }
    }
    wait_for_all();
    for (uint digit = c.lane; digit < DIGITS; digit += c.threads) {
        c.counts.put(digit * c.p.tiles + c.group, atomic_load_explicit(&bins[digit], memory_order_relaxed));
    }
}

// The sum of v over this thread and those before it in its team of `width` threads, a power of two. Two halves of a
// word may be added at once: they never carry. Every thread of the threadgroup must come here.
inline uint running_sum(thread const Call &c, uint v, uint width) {
    threadgroup uint *line = c.shared->line;
    line[c.lane] = v;
    wait_for_all();
    for (uint stride = 1; stride < width; stride *= 2) {
        uint before = (c.lane & (width - 1)) >= stride ? line[c.lane - stride] : 0;
        wait_for_all();
        line[c.lane] += before;
        wait_for_all();
    }
    return line[c.lane];
}

// A threadgroup has a digit: how many of it are in the tiles before each one, and in all.
inline void scan_digits(thread const Call &c) {
    uint carry = 0;
    for (uint begin = 0; begin < c.p.tiles; begin += c.threads) {
        uint tile = begin + c.lane;
        uint mine = tile < c.p.tiles ? c.counts.word(c.group * c.p.tiles + tile) : 0;
        uint sum = running_sum(c, mine, c.threads);
        if (tile < c.p.tiles) {
            c.counts.put(c.group * c.p.tiles + tile, carry + sum - mine);
        }
        carry += c.shared->line[c.threads - 1];
        wait_for_all();
    }
    if (c.lane == 0) {
        c.totals.put(c.group, carry);
    }
}

// ITEMS neighbours of the tile, in registers.
struct Items {
    uint key[ITEMS];
    uint k[ITEMS];
    uint rank[ITEMS];
};

// After the last key come keys that no other exceeds, so that they stay last.
inline void load_tile(thread const Call &c, thread Items &t) {
    for (uint j = 0; j < ITEMS; j++) {
        uint i = (c.group * c.threads + c.lane) * ITEMS + j;
        bool has = i < c.p.count;
        t.key[j] = has ? key_at(c, i) : 0xffffffffu;
        t.k[j] = has && c.k_in.is() ? c.k_in.word(i) : i;
    }
}

// rank[]: where the thread's keys go when the tile is sorted, stably, by 4 bits. Each thread counts its own digits; a
// counter's sum over the threads before it is added to the count of smaller digits.
inline void rank_tile(thread const Call &c, thread Items &t, uint shift) {
    threadgroup uint *space = c.shared->space;
    threadgroup uint *ends = c.shared->ends;
    for (uint w = 0; w < 8; w++) {
        space[w * c.threads + c.lane] = 0;
    }
    for (uint j = 0; j < ITEMS; j++) {
        uint digit = t.key[j] >> shift & 15u;
        space[(digit >> 1) * c.threads + c.lane] += 1u << ((digit & 1u) * 16);
    }
    wait_for_all();
    // An 8th of the threads have one counter word of all threads, 8 of them each.
    uint team = c.threads / 8;
    uint first = 8 * c.lane;
    uint mine = 0;
    for (uint j = 0; j < 8; j++) {
        mine += space[first + j];
    }
    uint sum = running_sum(c, mine, team);
    if (c.lane % team == team - 1) {
        ends[c.lane / team] = sum;
    }
    sum -= mine;
    for (uint j = 0; j < 8; j++) {
        uint own = space[first + j];
        space[first + j] = sum;
        sum += own;
    }
    wait_for_all();
    for (uint j = 0; j < ITEMS; j++) {
        uint digit = t.key[j] >> shift & 15u;
        uint at = (digit >> 1) * c.threads + c.lane;
        uint bit = (digit & 1u) * 16;
        uint before = space[at] >> bit & 0xffffu;
        space[at] += 1u << bit;
        for (uint d = 0; d < digit; d++) {
            before += ends[d >> 1] >> ((d & 1u) * 16) & 0xffffu;
        }
        t.rank[j] = before;
    }
    wait_for_all();
}

inline void sort_tile(thread const Call &c, thread Items &t, uint shift) {
    threadgroup uint *space = c.shared->space;
    rank_tile(c, t, shift);
    for (uint j = 0; j < ITEMS; j++) {
        space[t.rank[j]] = t.key[j];
    }
    wait_for_all();
    for (uint j = 0; j < ITEMS; j++) {
        t.key[j] = space[c.lane * ITEMS + j];
    }
    wait_for_all();
    for (uint j = 0; j < ITEMS; j++) {
        space[t.rank[j]] = t.k[j];
    }
    wait_for_all();
    for (uint j = 0; j < ITEMS; j++) {
        t.k[j] = space[c.lane * ITEMS + j];
    }
    wait_for_all();
}

// All bits, where one tile has all indices.
inline void sort_few(thread const Call &c) {
    Items t;
    load_tile(c, t);
    for (uint shift = 0; shift < c.p.shift_end; shift += 4) {
        sort_tile(c, t, shift);
    }
    for (uint j = 0; j < ITEMS; j++) {
        uint i = c.lane * ITEMS + j;
        if (i < c.p.count) {
            c.key_out.put(i, t.key[j]);
            c.k_out.put(i, t.k[j]);
        }
    }
}

// digit_base[]: after all keys of smaller digits, and those of the same digit in earlier tiles.
inline void find_bases(thread const Call &c) {
    uint carry = 0;
    for (uint begin = 0; begin < DIGITS; begin += c.threads) {
        uint digit = begin + c.lane;
        uint total = c.totals.word(digit);
        uint sum = running_sum(c, total, c.threads);
        c.shared->digit_base[digit] = carry + sum - total + c.counts.word(digit * c.p.tiles + c.group);
        carry += c.shared->line[c.threads - 1];
        wait_for_all();
    }
}

inline void place_keys(thread const Call &c) {
    threadgroup uint *space = c.shared->space;
    Items t;
    load_tile(c, t);
    for (uint shift = c.p.shift; shift < c.p.shift_end; shift += 4) {
        sort_tile(c, t, shift);
    }
    find_bases(c);
    // Neighbouring keys go to neighbouring addresses, so neighbouring threads write them.
    for (uint j = 0; j < ITEMS; j++) {
        space[c.lane * ITEMS + j] = t.key[j];
    }
    wait_for_all();
    for (uint j = 0; j < ITEMS; j++) {
        uint i = j * c.threads + c.lane;
        t.key[j] = space[i];
        uint digit = digit_of(c, t.key[j]);
        if (i == 0 || digit_of(c, space[i - 1]) != digit) {
            c.shared->digit_start[digit] = i;
        }
    }
    wait_for_all();
    for (uint j = 0; j < ITEMS; j++) {
        space[c.lane * ITEMS + j] = t.k[j];
    }
    wait_for_all();
    for (uint j = 0; j < ITEMS; j++) {
        uint i = j * c.threads + c.lane;
        if (c.group * ITEMS * c.threads + i < c.p.count) {
            uint digit = digit_of(c, t.key[j]);
            uint at = c.shared->digit_base[digit] + (i - c.shared->digit_start[digit]);
            c.key_out.put(at, t.key[j]);
            c.k_out.put(at, space[i]);
        }
    }
}

// ---- Sums -----------------------------------------------------------------------------------------------------

// 4 columns of entry i. Past the end those of the last entry, which are then not used.
inline float4 value_of(thread const Call &c, uint i, uint outer, uint column) {
    uint near = min(i, c.p.entries - 1);
    if (c.entry_value.is()) {
        return c.entry_value.four((outer * c.p.entries + near) * c.p.width + column);
    }
    uint start = (outer * c.p.count + c.entry_k.word(near)) * c.p.inner + column;
    uint left = c.p.inner - column;
    if (left >= 4) {
        return c.dy.four(start);
    }
    float4 v = float4(0.0f);
    v.x = c.dy.at(start);
    if (left > 1) {
        v.y = c.dy.at(start + 1);
    }
    if (left > 2) {
        v.z = c.dy.at(start + 2);
    }
    return v;
}

inline void write_sum(thread const Call &c, uint row, uint outer, uint column, float4 sum) {
    uint start = (outer * c.p.rows + row) * c.p.inner + column;
    uint left = c.p.inner - column;
    if (left > 1) {
        c.dtable.set_two(start, sum.xy);
    } else {
        c.dtable.set(start, sum.x);
    }
    if (left > 3) {
        c.dtable.set_two(start + 2, sum.zw);
    } else if (left > 2) {
        c.dtable.set(start + 2, sum.z);
    }
}

inline void store_left(thread const Call &c, uint entry, uint outer, uint column, float4 sum) {
    c.left_value.set_four((outer * 2 * c.p.chunks + entry) * c.p.width + column, sum);
}

// The row of entry i; NO_INDEX past the end and where there is nothing to add.
inline uint row_of(thread const Call &c, uint i) {
    if (i >= c.p.entries) {
        return NO_INDEX;
    }
    uint row = c.entry_row.word(i);
    return row < c.p.rows ? row : NO_INDEX;
}

// A thread's sum of the run that it is adding.
struct Run {
    uint chunk;
    uint outer;
    uint column;
    uint row;
    bool before; // the run began in the chunk before
    float4 sum;
    float4 part; // of up to 8 entries: 2^24 equal terms, each rounded the same way, stay accurate in parts of parts
};

inline void take_entry(thread const Call &c, thread Run &w, float4 v, uint next) {
    if (w.row != NO_INDEX) {
        w.part += v;
    }
    if (next != w.row) {
        if (w.before) {
            store_left(c, 2 * w.chunk, w.outer, w.column, w.sum + w.part);
        } else if (w.row != NO_INDEX) {
            write_sum(c, w.row, w.outer, w.column, w.sum + w.part);
        }
        w.row = next;
        w.before = false;
        w.sum = w.part = float4(0.0f);
    }
}

// A team has a chunk, a thread 4 of its columns. Four entries are read ahead of their sums, which depend on each other.
inline void add_runs(thread const Call &c) {
    uint task = c.group * (c.threads / c.p.lanes) + c.lane / c.p.lanes;
    if (task >= c.p.tasks) {
        return;
    }
    uint slice = task % c.p.slices;
    uint chunk = task / c.p.slices % c.p.chunks;
    uint outer = task / c.p.slices / c.p.chunks;
    uint column = 4 * (slice * c.p.lanes + (c.lane & (c.p.lanes - 1)));
    if (column >= c.p.inner) {
        return;
    }
    uint begin = chunk * c.p.chunk;
    uint end = min(begin + c.p.chunk, c.p.entries);
    uint first = row_of(c, begin);
    bool before = begin > 0 && first != NO_INDEX && row_of(c, begin - 1) == first;
    Run w = {chunk, outer, column, first, before, float4(0.0f), float4(0.0f)};
    for (uint i = begin; i < end; i += 4) {
        float4 v0 = value_of(c, i, outer, column);
        float4 v1 = value_of(c, i + 1, outer, column);
        float4 v2 = value_of(c, i + 2, outer, column);
        float4 v3 = value_of(c, i + 3, outer, column);
        uint r1 = row_of(c, i + 1);
        uint r2 = row_of(c, i + 2);
        uint r3 = row_of(c, i + 3);
        uint r4 = row_of(c, i + 4);
        take_entry(c, w, v0, r1);
        take_entry(c, w, v1, r2);
        take_entry(c, w, v2, r3);
        take_entry(c, w, v3, r4);
        if ((i & 4u) != 0) {
            w.sum += w.part;
            w.part = float4(0.0f);
        }
    }
    // Now w.row is the first row after the chunk: a run continues there if the last entry has it too.
    uint last = row_of(c, end - 1);
    bool behind = w.row != NO_INDEX && w.row == last;
    if (behind) {
        // A chunk inside a run has one sum for both sides.
        if (w.before) {
            store_left(c, 2 * chunk, outer, column, w.sum);
            w.sum = float4(0.0f);
        }
        store_left(c, 2 * chunk + 1, outer, column, w.sum);
    }
    if (outer == 0 && column == 0) {
        c.left_row.put(2 * chunk, before ? first : NO_INDEX);
        c.left_row.put(2 * chunk + 1, behind ? last : NO_INDEX);
    }
}

// ---- Rows without an index -------------------------------------------------------------------------------

inline bool is_used(thread const Call &c, uint row) {
    if (!c.entry_row.is()) {
        return false;
    }
    uint low = 0;
    uint high = c.p.entries;
    while (low < high) {
        uint middle = (low + high) / 2;
        if (c.entry_row.word(middle) < row) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < c.p.entries && c.entry_row.word(low) == row;
}

inline void clear_rows(thread const Call &c) {
    uint slice = c.group % c.p.slices;
    uint begin = c.group / c.p.slices % c.p.chunks * CLEARED;
    uint outer = c.group / c.p.slices / c.p.chunks;
    uint rows = min(CLEARED, c.p.rows - begin);
    for (uint r = c.lane; r < rows; r += c.threads) {
        c.shared->used[r] = is_used(c, begin + r) ? 1 : 0;
    }
    wait_for_all();
    uint first = slice * CLEARED + 2 * (c.lane & (c.p.lanes - 1));
    uint end = min((slice + 1) * CLEARED, c.p.inner);
    for (uint r = c.lane / c.p.lanes; r < rows; r += c.threads / c.p.lanes) {
        if (c.shared->used[r] != 0) {
            continue;
        }
        uint start = (outer * c.p.rows + begin + r) * c.p.inner;
        for (uint column = first; column < end; column += 2 * c.p.lanes) {
            if (column + 1 < c.p.inner) {
                c.dtable.set_two(start + column, float2(0.0f));
            } else {
                c.dtable.set(start + column, 0.0f);
            }
        }
    }
}

KERNELS(ENTRY)

// SPDX-License-Identifier: MIT
// gather: y[o, k, :] = table[o, index[k], :]. Its backward adds rows back, repeats in the order of k, and writes every
// row of dtable, without float atomics and without searching all indices for each row. A bad index is reported and its
// row left out.
//
// Forward, one kernel: a thread copies 4 neighbours of y.
//
// Backward: the pairs (row, k) are sorted by row, stably, so that the occurrences of a row are adjacent and in order. It
// is a radix sort: one tile of indices, ITEMS per thread, is sorted by one workgroup (`sort_few`); more are sorted
// 8 bits at a time, in three kernels: how often a tile has each digit (`count_digits`), where that digit of that tile goes
// (`scan_digits`), and the tile sorted and written there (`place_keys`). A bad index counts as row `rows`: it comes last
// and is never added.
//
// Then the sorted entries are split into chunks, each added by a team (`add_runs`). A run of one row inside a chunk is a
// finished sum. A run across an edge leaves its sum on either side: at most 2 per chunk, which are again a list sorted by
// row, a 16th as long, for the same kernel, until one chunk has all. So a row that a third of all indices name is added
// by as many teams as any other third, in f32 chains of 8. `clear_rows` writes the rows without an index: it looks each
// up in the sorted list, and nothing is written twice.
//
// Dispatches: forward 1. Backward: to sort 1, or past 2048 indices 3 for each 8 bits of `rows`; for zeros 1, none where
// dtable is added to; for sums 1 up to 32 indices, 2 to 1024, 3 to 32768, 4 to 2^20, 5 to 2^25. In either pass 1 more
// records a bad index.
// Memory traffic: forward index, the rows that it names, y. Backward dy and dtable once, which is the minimum; the index
// twice; and workspace, for each index: 8 bytes written by the sort's first pass, 20 read and written by each later one, 8
// read for the sums; for each chunk of 32, the sums of at most 2 rows written and read.
//# const
//# float y table dtable dy entry_value left_value
//# index index
//# word key_in k_in key_out k_out counts totals entry_row entry_k left_row
//# bad_index

struct Params {
    outer: u32,
    rows: u32,
    inner: u32,
    count: u32,
    shift: u32, // the sort's first bit in this pass, and the one after its last
    shift_end: u32,
    tiles: u32, // of TILE indices
    entries: u32, // of the list that add_runs adds
    chunk: u32, // entries of a chunk
    chunks: u32,
    lanes: u32, // of a team, a power of two
    slices: u32, // of a row
    tasks: u32, // chunks x slices x outer
    width: u32, // a row in the workspace: inner, rounded up to a multiple of 4
}

// ---- Forward ----

// The element of the table that is element i of y; NO_INDEX where the index is bad.
fn source_of(i: u32) -> u32 {
    let item = i / u.p.inner;
    let outer = item / u.p.count;
    let k = item - outer * u.p.count;
    let row = index_in(k, u.p.rows);
    if (row == NO_INDEX) {
        bad_index_report(k);
        return NO_INDEX;
    }
    return (outer * u.p.rows + row) * u.p.inner + (i - item * u.p.inner);
}

fn copy_two(i: u32, total: u32) {
    if (i >= total) {
        return;
    }
    let first = source_of(i);
    var second = NO_INDEX;
    if (i + 1u < total) {
        second = source_of(i + 1u);
    }
    if (first != NO_INDEX && second != NO_INDEX) {
        y_set_two(i, vec2<f32>(table_at(first), table_at(second)));
    } else if (first != NO_INDEX) {
        y_set(i, table_at(first));
    } else if (second != NO_INDEX) {
        y_set(i + 1u, table_at(second));
    }
}

fn forward(group: u32, lane: u32) {
    let i = 4u * (group * 256u + lane);
    let total = u.p.outer * u.p.count * u.p.inner;
    if (i >= total) {
        return;
    }
    if (u.p.inner % 4u != 0u) {
        copy_two(i, total);
        copy_two(i + 2u, total);
        return;
    }
    let source = source_of(i);
    if (source != NO_INDEX) {
        let v = table_four(source);
        y_set_two(i, v.xy);
        y_set_two(i + 2u, v.zw);
    }
}

// ---- Sorting ----

const TILE = 2048u; // the keys of a workgroup
const ITEMS = 8u;   // of a thread
const DIGITS = 256u;

// Key i of the pass. The first pass takes the indices themselves.
fn key_at(i: u32) -> u32 {
    if (!index_is) {
        return key_in_word(i);
    }
    let row = index_in(i, u.p.rows);
    if (row == NO_INDEX) {
        bad_index_report(i);
        return u.p.rows;
    }
    return row;
}

fn digit_of(key: u32) -> u32 {
    return (key >> u.p.shift) & (DIGITS - 1u);
}

var<workgroup> bins: array<atomic<u32>, DIGITS>;

fn count_digits(group: u32, lane: u32) {
    atomicStore(&bins[lane], 0u);
    workgroupBarrier();
    for (var j = 0u; j < ITEMS; j++) {
        let i = group * TILE + j * 256u + lane;
        if (i < u.p.count) {
            atomicAdd(&bins[digit_of(key_at(i))], 1u);
        }
    }
    workgroupBarrier();
    counts_put(lane * u.p.tiles + group, atomicLoad(&bins[lane]));
}

var<workgroup> line: array<u32, 256>;

// The sum of v over this thread and those before it in its team of `width` threads, a power of two. Two halves of a
// word may be added at once: they never carry. Every thread of the workgroup must come here.
fn running_sum(v: u32, width: u32, lane: u32) -> u32 {
    line[lane] = v;
    workgroupBarrier();
    for (var stride = 1u; stride < width; stride = stride << 1u) {
        var before = 0u;
        if ((lane & (width - 1u)) >= stride) {
            before = line[lane - stride];
        }
        workgroupBarrier();
        line[lane] += before;
        workgroupBarrier();
    }
    return line[lane];
}

// A workgroup has a digit: how many of it are in the tiles before each one, and in all.
fn scan_digits(group: u32, lane: u32) {
    var carry = 0u;
    for (var begin = 0u; begin < u.p.tiles; begin += 256u) {
        let tile = begin + lane;
        var mine = 0u;
        if (tile < u.p.tiles) {
            mine = counts_word(group * u.p.tiles + tile);
        }
        let sum = running_sum(mine, 256u, lane);
        if (tile < u.p.tiles) {
            counts_put(group * u.p.tiles + tile, carry + sum - mine);
        }
        carry += line[255];
        workgroupBarrier();
    }
    if (lane == 0u) {
        totals_put(group, carry);
    }
}

// The tile in registers, ITEMS neighbours per thread, and the memory through which it is sorted: first 16 counters of 16
// bits per thread, two in a word, counter words of all threads together; then keys; then their ks.
var<private> key: array<u32, ITEMS>;
var<private> k_of: array<u32, ITEMS>;
var<private> rank: array<u32, ITEMS>;
var<workgroup> space: array<u32, TILE>;
var<workgroup> ends: array<u32, 8>; // how often each digit occurs, two in a word

// After the last key come keys that no other exceeds, so that they stay last.
fn load_tile(group: u32, lane: u32) {
    for (var j = 0u; j < ITEMS; j++) {
        let i = group * TILE + lane * ITEMS + j;
        key[j] = 0xffffffffu;
        k_of[j] = i;
        if (i < u.p.count) {
            key[j] = key_at(i);
            if (k_in_is) {
                k_of[j] = k_in_word(i);
            }
        }
    }
}

// rank[]: where the thread's keys go when the tile is sorted, stably, by 4 bits. Each thread counts its own digits; a
// counter's sum over the threads before it is added to the count of smaller digits.
fn rank_tile(shift: u32, lane: u32) {
    for (var w = 0u; w < 8u; w++) {
        space[w * 256u + lane] = 0u;
    }
    for (var j = 0u; j < ITEMS; j++) {
        let digit = (key[j] >> shift) & 15u;
        space[(digit >> 1u) * 256u + lane] += 1u << ((digit & 1u) * 16u);
    }
    workgroupBarrier();
    // 32 threads have one counter word of all 256 threads, 8 of them each.
    let first = 8u * lane;
    var mine = 0u;
    for (var j = 0u; j < 8u; j++) {
        mine += space[first + j];
    }
    var sum = running_sum(mine, 32u, lane);
    if (lane % 32u == 31u) {
        ends[lane / 32u] = sum;
    }
    sum -= mine;
    for (var j = 0u; j < 8u; j++) {
        let own = space[first + j];
        space[first + j] = sum;
        sum += own;
    }
    workgroupBarrier();
    for (var j = 0u; j < ITEMS; j++) {
        let digit = (key[j] >> shift) & 15u;
        let at = (digit >> 1u) * 256u + lane;
        let bit = (digit & 1u) * 16u;
        var before = (space[at] >> bit) & 0xffffu;
        space[at] += 1u << bit;
        for (var d = 0u; d < digit; d++) {
            before += (ends[d >> 1u] >> ((d & 1u) * 16u)) & 0xffffu;
        }
        rank[j] = before;
    }
    workgroupBarrier();
}

fn sort_tile(shift: u32, lane: u32) {
    rank_tile(shift, lane);
    for (var j = 0u; j < ITEMS; j++) {
        space[rank[j]] = key[j];
    }
    workgroupBarrier();
    for (var j = 0u; j < ITEMS; j++) {
        key[j] = space[lane * ITEMS + j];
    }
    workgroupBarrier();
    for (var j = 0u; j < ITEMS; j++) {
        space[rank[j]] = k_of[j];
    }
    workgroupBarrier();
    for (var j = 0u; j < ITEMS; j++) {
        k_of[j] = space[lane * ITEMS + j];
    }
    workgroupBarrier();
}

// All bits, where one tile has all indices.
fn sort_few(group: u32, lane: u32) {
    load_tile(group, lane);
    for (var shift = 0u; shift < u.p.shift_end; shift += 4u) {
        sort_tile(shift, lane);
    }
    for (var j = 0u; j < ITEMS; j++) {
        let i = lane * ITEMS + j;
        if (i < u.p.count) {
            key_out_put(i, key[j]);
            k_out_put(i, k_of[j]);
        }
    }
}

var<workgroup> digit_base: array<u32, DIGITS>;  // where the tile's first key of a digit goes
var<workgroup> digit_start: array<u32, DIGITS>; // where it is in the sorted tile

fn place_keys(group: u32, lane: u32) {
    load_tile(group, lane);
    for (var shift = u.p.shift; shift < u.p.shift_end; shift += 4u) {
        sort_tile(shift, lane);
    }
    let total = totals_word(lane);
    digit_base[lane] = running_sum(total, 256u, lane) - total + counts_word(lane * u.p.tiles + group);
    // Neighbouring keys go to neighbouring addresses, so neighbouring threads write them.
    for (var j = 0u; j < ITEMS; j++) {
        space[lane * ITEMS + j] = key[j];
    }
    workgroupBarrier();
    for (var j = 0u; j < ITEMS; j++) {
        let i = j * 256u + lane;
        key[j] = space[i];
        let digit = digit_of(key[j]);
        if (i == 0u || digit_of(space[max(i, 1u) - 1u]) != digit) {
            digit_start[digit] = i;
        }
    }
    workgroupBarrier();
    for (var j = 0u; j < ITEMS; j++) {
        space[lane * ITEMS + j] = k_of[j];
    }
    workgroupBarrier();
    for (var j = 0u; j < ITEMS; j++) {
        let i = j * 256u + lane;
        if (group * TILE + i < u.p.count) {
            let digit = digit_of(key[j]);
            let at = digit_base[digit] + (i - digit_start[digit]);
            key_out_put(at, key[j]);
            k_out_put(at, space[i]);
        }
    }
}

// ---- Sums ----

// 4 columns of entry i. Past the end those of the last entry, which are then not used.
fn value_of(i: u32, outer: u32, column: u32) -> vec4<f32> {
    let near = min(i, u.p.entries - 1u);
    if (entry_value_is) {
        return entry_value_four((outer * u.p.entries + near) * u.p.width + column);
    }
    let start = (outer * u.p.count + entry_k_word(near)) * u.p.inner + column;
    let left = u.p.inner - column;
    if (left >= 4u) {
        return dy_four(start);
    }
    var v = vec4<f32>();
    v.x = dy_at(start);
    if (left > 1u) {
        v.y = dy_at(start + 1u);
    }
    if (left > 2u) {
        v.z = dy_at(start + 2u);
    }
    return v;
}

fn write_sum(row: u32, outer: u32, column: u32, sum: vec4<f32>) {
    let start = (outer * u.p.rows + row) * u.p.inner + column;
    let left = u.p.inner - column;
    if (left > 1u) {
        dtable_set_two(start, sum.xy);
    } else {
        dtable_set(start, sum.x);
    }
    if (left > 3u) {
        dtable_set_two(start + 2u, sum.zw);
    } else if (left > 2u) {
        dtable_set(start + 2u, sum.z);
    }
}

fn store_left(entry: u32, outer: u32, column: u32, sum: vec4<f32>) {
    let start = (outer * 2u * u.p.chunks + entry) * u.p.width + column;
    left_value_set_two(start, sum.xy);
    left_value_set_two(start + 2u, sum.zw);
}

// The row of entry i; NO_INDEX past the end and where there is nothing to add.
fn row_of(i: u32) -> u32 {
    if (i >= u.p.entries) {
        return NO_INDEX;
    }
    let row = entry_row_word(i);
    return select(NO_INDEX, row, row < u.p.rows);
}

// A thread's sum of the run that it is adding.
struct Run {
    row: u32,
    before: bool, // the run began in the chunk before
    sum: vec4<f32>,
    part: vec4<f32>, // of up to 8 entries: 2^24 equal terms, each rounded the same way, stay accurate in parts of parts
}

fn take_entry(run: Run, v: vec4<f32>, next: u32, chunk: u32, outer: u32, column: u32) -> Run {
    var w = run;
    if (w.row != NO_INDEX) {
        w.part += v;
    }
    if (next != w.row) {
        if (w.before) {
            store_left(2u * chunk, outer, column, w.sum + w.part);
        } else if (w.row != NO_INDEX) {
            write_sum(w.row, outer, column, w.sum + w.part);
        }
        w = Run(next, false, vec4<f32>(), vec4<f32>());
    }
    return w;
}

// A team has a chunk, a thread 4 of its columns. Four entries are read ahead of their sums, which depend on each other.
fn add_runs(group: u32, lane: u32) {
    let task = group * (256u / u.p.lanes) + lane / u.p.lanes;
    if (task >= u.p.tasks) {
        return;
    }
    let slice = task % u.p.slices;
    let chunk = (task / u.p.slices) % u.p.chunks;
    let outer = task / u.p.slices / u.p.chunks;
    let column = 4u * (slice * u.p.lanes + (lane & (u.p.lanes - 1u)));
    if (column >= u.p.inner) {
        return;
    }
    let begin = chunk * u.p.chunk;
    let end = min(begin + u.p.chunk, u.p.entries);
    let first = row_of(begin);
    let before = begin > 0u && first != NO_INDEX && row_of(max(begin, 1u) - 1u) == first;
    var w = Run(first, before, vec4<f32>(), vec4<f32>());
    for (var i = begin; i < end; i += 4u) {
        let v0 = value_of(i, outer, column);
        let v1 = value_of(i + 1u, outer, column);
        let v2 = value_of(i + 2u, outer, column);
        let v3 = value_of(i + 3u, outer, column);
        let r1 = row_of(i + 1u);
        let r2 = row_of(i + 2u);
        let r3 = row_of(i + 3u);
        let r4 = row_of(i + 4u);
        w = take_entry(w, v0, r1, chunk, outer, column);
        w = take_entry(w, v1, r2, chunk, outer, column);
        w = take_entry(w, v2, r3, chunk, outer, column);
        w = take_entry(w, v3, r4, chunk, outer, column);
        if ((i & 4u) != 0u) {
            w.sum += w.part;
            w.part = vec4<f32>();
        }
    }
    // Now w.row is the first row after the chunk: a run continues there if the last entry has it too.
    let last = row_of(end - 1u);
    let behind = w.row != NO_INDEX && w.row == last;
    if (behind) {
        // A chunk inside a run has one sum for both sides.
        if (w.before) {
            store_left(2u * chunk, outer, column, w.sum);
            w.sum = vec4<f32>();
        }
        store_left(2u * chunk + 1u, outer, column, w.sum);
    }
    if (outer == 0u && column == 0u) {
        left_row_put(2u * chunk, select(NO_INDEX, first, before));
        left_row_put(2u * chunk + 1u, select(NO_INDEX, last, behind));
    }
}

// ---- Rows without an index ----

const CLEARED = 256u; // rows, and columns at most, of a workgroup

var<workgroup> used: array<u32, CLEARED>;

fn is_used(row: u32) -> bool {
    if (!entry_row_is) {
        return false;
    }
    var low = 0u;
    var high = u.p.entries;
    while (low < high) {
        let middle = (low + high) / 2u;
        if (entry_row_word(middle) < row) {
            low = middle + 1u;
        } else {
            high = middle;
        }
    }
    return low < u.p.entries && entry_row_word(min(low, u.p.entries - 1u)) == row;
}

fn clear_rows(group: u32, lane: u32) {
    let slice = group % u.p.slices;
    let begin = (group / u.p.slices) % u.p.chunks * CLEARED;
    let outer = group / u.p.slices / u.p.chunks;
    let rows = min(CLEARED, u.p.rows - begin);
    used[lane] = 1u;
    if (lane < rows && !is_used(begin + lane)) {
        used[lane] = 0u;
    }
    workgroupBarrier();
    let column = slice * CLEARED + 2u * (lane & (u.p.lanes - 1u));
    if (column >= u.p.inner) {
        return;
    }
    for (var r = lane / u.p.lanes; r < rows; r += 256u / u.p.lanes) {
        let start = (outer * u.p.rows + begin + r) * u.p.inner + column;
        if (used[r] != 0u) {
            continue;
        }
        if (column + 1u < u.p.inner) {
            dtable_set_two(start, vec2<f32>());
        } else {
            dtable_set(start, 0.0);
        }
    }
}

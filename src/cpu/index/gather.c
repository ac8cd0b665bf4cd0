/* SPDX-License-Identifier: MIT */
/*
 * gather on the CPU. Forward: rows of the table copied by index. Backward: the deterministic scatter-add
 * dtable[o, index[k], :] += dy[o, k, :], repeats in the order of k, every row of dtable written once.
 *
 * | forward path | taken for                     | why                                                              |
 * |--------------|-------------------------------|------------------------------------------------------------------|
 * | fixed size   | rows of 2, 4, 8, 16, 32 bytes | one load and one store each; a call of memcpy costs more         |
 * | add          | an output that accumulates    | the row is added in f32                                          |
 * | stream       | large outputs, aligned rows   | stores past the caches                                           |
 * | copy         | everything else               | memcpy                                                           |
 *
 * The backward sorts before it adds, so that a row of dtable is summed by one task from a list of its k:
 *   1. the table's rows are split into ranges; chunks of the index count how many of theirs fall in each;
 *   2. each chunk writes its k behind those of the chunks before, range by range, so a range's list keeps its order;
 *   3. each range sorts its list by row, by counting, which keeps the order too;
 *   4. rows of dtable are summed and written.
 * With one range (small tables) steps 1 and 2 are skipped. Step 4 has four paths, by row:
 *
 * | backward path | taken for                  | why                                                                |
 * |---------------|----------------------------|--------------------------------------------------------------------|
 * | zero          | rows that no index names   | nothing to sum; with += nothing to write                           |
 * | list          | most rows                  | vectors; a few repeats at a time in f32, those sums in double      |
 * | narrow        | fewer columns than lanes   | one number at a time in double                                     |
 * | hot           | HOT repeats or more, as a  | would keep one task busy for long: the list is split into segments, |
 * |               | padding token has          | each summed in double by its own task and added in order           |
 *
 * Nothing depends on the number of threads. The workspace is O(rows + count) numbers, and segments x inner doubles.
 */
#include "core/arithmetic.h"
#include "cpu/dispatch.h"
#include "cpu/simd/shuffle.h"
#include "cpu/simd/stream.h"
#include "op/op.h"

/* Indices are converted this many at a time, and rows this small are copied without a call. */
enum { INDEX_BLOCK = 128 };

/*
 * So many repeats are added in f32 (error below 16 x 6e-8), and such sums in double. Their rows of dy are read side by
 * side: one stream of reads from a row somewhere in memory waits for it, 16 together come as fast as memory in order.
 */
enum { FEW = 16 };

/* Repeats that make a row hot, and the length of a segment: partial sums stay below 1/256 of dy's bytes in f32. */
enum { HOT = 1024 };

/* Columns summed together: their sums in double stay in the first-level cache. */
enum { SUM_COLUMNS = 2048 };

/* What is prefetched of the table: the beginning of the next row, or some whole small rows. */
enum { PREFETCH_BYTES = 256, AHEAD = 16 };

/*
 * Rows of dy are prefetched this far ahead of their reading, and so much of the row that is FEW further in the order.
 * Sums of bf16 rows took 1.6 times as long without, those of f32 rows 1.1 times; 256 and 1024 came close.
 */
enum { SUM_PREFETCH_BYTES = 512 };

/* Ranges of rows, and chunks of the index: each pair has a counter. */
enum { MAX_RANGES = 256, MAX_CHUNKS = 64 };

INLINE int64_t index_at(vjp_dtype dtype, const void *index, int64_t k) {
    switch (dtype) {
    case VJP_I32: return ((const int32_t *)index)[k];
    case VJP_I64: return ((const int64_t *)index)[k];
    default: return (int64_t)((const float *)index)[k];
    }
}

/* Indices [k, k + n) as int64. */
static void read_indices(vjp_dtype dtype, const void *index, int64_t k, int64_t n, int64_t *to) {
    switch (dtype) {
    case VJP_I32:
        for (int64_t i = 0; i < n; i++)
            to[i] = index_at(VJP_I32, index, k + i);
        break;
    case VJP_I64:
        for (int64_t i = 0; i < n; i++)
            to[i] = index_at(VJP_I64, index, k + i);
        break;
    default:
        for (int64_t i = 0; i < n; i++)
            to[i] = index_at(VJP_F32, index, k + i);
        break;
    }
}

/* ---- Forward ----------------------------------------------------------------------------------------- */

typedef struct gather_call {
    vjp_gather_sizes s;
    write_mode mode;
    vjp_dtype dtype, index_type;
    void *y;
    const void *table, *index;
    int64_t row_bytes;
    cpu_split split; /* of outer x count */
} gather_call;

INLINE void add_row(vjp_dtype dtype, void *y, const void *x, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES)
        vf_write_part(WRITE_ADD, dtype, y, i, n - i, vf_load_part(dtype, x, i, n - i));
}

/* Bytes are moved as they are, so a NaN keeps its payload. */
static void write_row(const gather_call *call, char *y, const char *x) {
    if (call->mode == WRITE_ADD) {
        BY_DTYPE(call->dtype, add_row, y, x, call->s.inner);
    } else if (call->mode == WRITE_STREAM) {
        int64_t n = call->row_bytes / 4;
        for (int64_t i = 0; i < n; i += LANES)
            vf_stream(VJP_F32, y, i, vf_load(VJP_F32, x, i));
    } else {
        memcpy(y, x, (size_t)call->row_bytes);
    }
}

/* Rows of a size known when compiled: a load and a store each. */
INLINE void copy_rows(char *y, const char *table, const int64_t *rows, int64_t n, size_t bytes) {
    for (int64_t i = 0; i < n; i++)
        memcpy(y + (size_t)i * bytes, table + (size_t)rows[i] * bytes, bytes);
}

static void gather_task(void *argument, size_t task) {
    const gather_call *call = argument;
    int64_t end = cpu_split_end(&call->split, task), bytes = call->row_bytes;
    int64_t ahead = bytes > PREFETCH_BYTES ? 1 : AHEAD;
    for (int64_t item = cpu_split_begin(&call->split, task); item < end;) {
        int64_t outer = item / call->s.count, k = item % call->s.count;
        int64_t n = vjp_min(vjp_min(call->s.count - k, end - item), INDEX_BLOCK);
        int64_t rows[INDEX_BLOCK];
        read_indices(call->index_type, call->index, k, n, rows);
        const char *table = (const char *)call->table + outer * call->s.rows * bytes;
        char *y = (char *)call->y + item * bytes;
        switch (call->mode == WRITE_ADD ? 0 : bytes) {
        case 2: copy_rows(y, table, rows, n, 2); break;
        case 4: copy_rows(y, table, rows, n, 4); break;
        case 8: copy_rows(y, table, rows, n, 8); break;
        case 16: copy_rows(y, table, rows, n, 16); break;
        case 32: copy_rows(y, table, rows, n, 32); break;
        default:
            for (int64_t i = 0; i < n; i++) {
                if (i + ahead < n)
                    for (int64_t b = 0; b < bytes && b < PREFETCH_BYTES; b += 64)
                        __builtin_prefetch(table + rows[i + ahead] * bytes + b);
                write_row(call, y + i * bytes, table + rows[i] * bytes);
            }
        }
        item += n;
    }
    if (call->mode == WRITE_STREAM) vf_stream_done();
}

static vjp_status forward(const vjp_work *work) {
    gather_call call = {
        .s = vjp_gather_sizes_of(work),
        .dtype = work->storage,
        .index_type = vjp_type(work, GATHER_INDEX),
        .y = vjp_data(work, GATHER_Y),
        .table = vjp_data(work, GATHER_TABLE),
        .index = vjp_data(work, GATHER_INDEX),
    };
    call.row_bytes = call.s.inner * (int64_t)dtype_bytes(work->storage);
    int64_t items = call.s.outer * call.s.count;
    if (!call.y || items * call.row_bytes == 0) return VJP_OK;
    bool aligned = call.row_bytes % (4 * LANES) == 0 && vf_stream_aligned(VJP_F32, call.y);
    call.mode = write_mode_of(work, GATHER_Y, items * call.row_bytes, aligned, false);
    call.split = vjp_cpu_split_items(items, 2 * call.row_bytes, CPU_MAX_TASKS);
    vjp_cpu_for(work, call.split.count, gather_task, &call);
    return VJP_OK;
}

/* ---- Backward: sorting ------------------------------------------------------------------------------- */

/* An index and its place: kept together, for places by row are far apart in the index. */
typedef struct entry {
    int64_t row, k;
} entry;

/* Part of a hot row's list, and where its sum goes. */
typedef struct segment {
    int64_t row, begin, count;
} segment;

typedef struct scatter_call {
    vjp_gather_sizes s;
    write_mode mode;
    vjp_dtype dtype, table_type, index_type;
    void *dtable;
    const void *dy, *index;
    cpu_split ranges, chunks; /* of rows; of the index */
    int range_bits;           /* a range is 2^range_bits rows: a shift instead of a division */
    int64_t *cursors;         /* [chunks][ranges]: where a chunk's next k of a range goes */
    int64_t *range_begin;     /* [ranges + 1]: a range's list in `mixed` and `order` */
    int64_t *hot;             /* [ranges]: how many hot rows the range has */
    int64_t *row_end;         /* [rows]: the end of the row's list in `order` */
    entry *mixed;             /* [count]: by range; NULL with one range */
    int64_t *order;           /* [count]: k by row */
    segment *segments;        /* of hot rows */
    int64_t segment_count;
    int64_t outer;    /* whose hot rows are being summed */
    double *partials; /* [segments][inner] */
    cpu_split split;  /* of outer x rows, for the sums */
} scatter_call;

static void count_task(void *argument, size_t task) {
    const scatter_call *call = argument;
    int64_t *counts = call->cursors + (int64_t)task * call->ranges.count;
    memset(counts, 0, (size_t)call->ranges.count * sizeof counts[0]);
    int64_t rows[INDEX_BLOCK], end = cpu_split_end(&call->chunks, task);
    for (int64_t k = cpu_split_begin(&call->chunks, task); k < end; k += INDEX_BLOCK) {
        int64_t n = vjp_min(end - k, INDEX_BLOCK);
        read_indices(call->index_type, call->index, k, n, rows);
        for (int64_t i = 0; i < n; i++)
            counts[rows[i] >> call->range_bits]++;
    }
}

static void spread_task(void *argument, size_t task) {
    const scatter_call *call = argument;
    int64_t *cursors = call->cursors + (int64_t)task * call->ranges.count;
    int64_t rows[INDEX_BLOCK], end = cpu_split_end(&call->chunks, task);
    for (int64_t k = cpu_split_begin(&call->chunks, task); k < end; k += INDEX_BLOCK) {
        int64_t n = vjp_min(end - k, INDEX_BLOCK);
        read_indices(call->index_type, call->index, k, n, rows);
        for (int64_t i = 0; i < n; i++)
            call->mixed[cursors[rows[i] >> call->range_bits]++] = (entry){rows[i], k + i};
    }
}

INLINE entry entry_at(const scatter_call *call, int64_t i) {
    return call->mixed ? call->mixed[i] : (entry){index_at(call->index_type, call->index, i), i};
}

/* Counting sort of one range's list. row_end[] counts, then holds where a row begins, and ends as its name says. */
static void sort_task(void *argument, size_t task) {
    const scatter_call *call = argument;
    int64_t first = cpu_split_begin(&call->ranges, task), last = cpu_split_end(&call->ranges, task);
    int64_t begin = call->range_begin[task], end = call->range_begin[task + 1], hot = 0;
    memset(call->row_end + first, 0, (size_t)(last - first) * sizeof call->row_end[0]);
    for (int64_t i = begin; i < end; i++)
        call->row_end[entry_at(call, i).row]++;
    for (int64_t row = first, at_row = begin; row < last; row++) {
        int64_t n = call->row_end[row];
        hot += n >= HOT;
        call->row_end[row] = at_row;
        at_row += n;
    }
    for (int64_t i = begin; i < end; i++) {
        entry e = entry_at(call, i);
        call->order[call->row_end[e.row]++] = e.k;
    }
    call->hot[task] = hot;
}

static int64_t row_begin(const scatter_call *call, int64_t row) {
    return row ? call->row_end[row - 1] : 0;
}

static void sort_indices(const vjp_work *work, scatter_call *call) {
    int64_t ranges = call->ranges.count, chunks = call->chunks.count;
    call->range_begin[0] = 0;
    call->range_begin[ranges] = call->s.count;
    if (call->mixed) {
        vjp_cpu_for(work, chunks, count_task, call);
        int64_t place = 0;
        for (int64_t range = 0; range < ranges; range++) {
            call->range_begin[range] = place;
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                int64_t *cursor = &call->cursors[chunk * ranges + range], n = *cursor;
                *cursor = place;
                place += n;
            }
        }
        vjp_cpu_for(work, chunks, spread_task, call);
    }
    vjp_cpu_for(work, ranges, sort_task, call);
}

/* ---- Backward: summing ------------------------------------------------------------------------------- */

/* Up to FEW rows of dy, from some column on, and the rows FEW further in the order. */
typedef struct few_rows {
    const void *row[FEW], *next[FEW];
    int64_t count;
} few_rows;

/* Places [i, end) of the order. */
INLINE few_rows few_rows_at(const scatter_call *call, vjp_dtype dtype, const void *dy, int64_t i, int64_t end,
                            int64_t column) {
    few_rows rows;
    rows.count = end - i;
    for (int64_t r = 0; r < rows.count; r++) {
        int64_t next = i + r + FEW < call->s.count ? i + r + FEW : i + r;
        rows.row[r] = at(dtype, dy, call->order[i + r] * call->s.inner + column);
        rows.next[r] = at(dtype, dy, call->order[next] * call->s.inner + column);
    }
    return rows;
}

/* Prefetches the bytes SUM_PREFETCH_BYTES after column j's, in these rows or, past `width`, in the next ones. */
INLINE void prefetch_rows(const few_rows *rows, vjp_dtype dtype, int64_t j, int64_t width, int64_t bytes) {
    int64_t row_bytes = width * (int64_t)dtype_bytes(dtype), byte = j * (int64_t)dtype_bytes(dtype);
    int64_t ahead = byte + vjp_min(row_bytes, SUM_PREFETCH_BYTES);
    const void *const *from = ahead < row_bytes ? rows->row : rows->next;
    if (ahead >= row_bytes) ahead -= row_bytes;
    for (int64_t r = 0; r < rows->count; r++)
        for (int64_t b = 0; b < bytes; b += 64)
            __builtin_prefetch((const char *)from[r] + ahead + b);
}

/* Where the sum of a few rows goes: it begins or joins a sum in double, and the last is rounded and written. */
typedef struct sum_place {
    double *sums;
    void *to;
    bool first, last;
} sum_place;

INLINE void place_sum(const sum_place *place, vjp_dtype table_type, write_mode mode, int64_t j, int64_t n, vf few) {
    if (place->first && place->last) {
        vf_write_part(mode, table_type, place->to, j, n, few);
        return;
    }
    vd sum = vd_of(few);
    if (!place->first) sum = vd_add(vd_load(place->sums + j), sum);
    if (place->last)
        vf_write_part(mode, table_type, place->to, j, n, vd_round(sum));
    else
        vd_store(place->sums + j, sum);
}

INLINE void sum_few(const few_rows *rows, vjp_dtype dtype, vjp_dtype table_type, write_mode mode, int64_t width,
                    const sum_place *place) {
    int64_t j = 0, n = rows->count;
    for (; j + 2 * LANES <= width; j += 2 * LANES) { /* a cache line of 16-bit numbers, two of f32 */
        prefetch_rows(rows, dtype, j, width, 2 * LANES * (int64_t)dtype_bytes(dtype));
        vf a = vf_load(dtype, rows->row[0], j), b = vf_load(dtype, rows->row[0], j + LANES);
        for (int64_t r = 1; r < n; r++) {
            a = vf_add(a, vf_load(dtype, rows->row[r], j));
            b = vf_add(b, vf_load(dtype, rows->row[r], j + LANES));
        }
        place_sum(place, table_type, mode, j, LANES, a);
        place_sum(place, table_type, mode, j + LANES, LANES, b);
    }
    for (; j < width; j += LANES) {
        prefetch_rows(rows, dtype, j, width, LANES * (int64_t)dtype_bytes(dtype));
        vf a = vf_load_part(dtype, rows->row[0], j, width - j);
        for (int64_t r = 1; r < n; r++)
            a = vf_add(a, vf_load_part(dtype, rows->row[r], j, width - j));
        place_sum(place, table_type, mode, j, width - j, a);
    }
}

/*
 * The sum of the rows of dy at places [begin, end) of the order, columns [column, column + width), at most SUM_COLUMNS.
 * The list is split into equal parts of at most FEW: 17 are 8 and 9, so that no row is read alone.
 * With `to` the sum is written there; without, it stays in `sums`.
 */
INLINE void sum_list(const scatter_call *call, vjp_dtype dtype, vjp_dtype table_type, write_mode mode, double *sums,
                     void *to, const void *dy, int64_t begin, int64_t end, int64_t column, int64_t width) {
    int64_t parts = vjp_divide_up(end - begin, FEW);
    for (int64_t part = 0; part < parts; part++) {
        int64_t first = begin + (end - begin) * part / parts, last = begin + (end - begin) * (part + 1) / parts;
        few_rows rows = few_rows_at(call, dtype, dy, first, last, column);
        sum_place place = {sums, to, part == 0, to && part == parts - 1};
        sum_few(&rows, dtype, table_type, mode, width, &place);
    }
}

/* Rows of fewer columns than a vector has lanes: a number at a time. */
INLINE void sum_narrow(const scatter_call *call, vjp_dtype dtype, vjp_dtype table_type, write_mode mode, void *to,
                       const void *dy, const int64_t *order, int64_t count) {
    int64_t inner = call->s.inner;
    const int64_t *end = call->order + call->s.count;
    for (int64_t i = 0; i < count && order + i + FEW < end; i++)
        __builtin_prefetch(at(dtype, dy, order[i + FEW] * inner));
    for (int64_t j = 0; j < inner; j++) {
        double sum = 0;
        for (int64_t i = 0; i < count; i++)
            sum += (double)f32_load(dtype, dy, order[i] * inner + j);
        f32_write(mode, table_type, to, j, (float)sum);
    }
}

INLINE void sum_rows(vjp_dtype dtype, write_mode mode, vjp_dtype table_type, const scatter_call *call, size_t task) {
    int64_t inner = call->s.inner, rows = call->s.rows;
    double sums[SUM_COLUMNS];
    for (int64_t item = cpu_split_begin(&call->split, task); item < cpu_split_end(&call->split, task); item++) {
        int64_t outer = item / rows, row = item % rows, begin = row_begin(call, row), end = call->row_end[row];
        if (end - begin >= HOT || (begin == end && mode == WRITE_ADD)) continue;
        const void *dy = begin < end ? at(dtype, call->dy, outer * call->s.count * inner) : NULL; /* dy may be empty */
        void *to = at_mutable(table_type, call->dtable, item * inner);
        if (inner < LANES) {
            sum_narrow(call, dtype, table_type, mode, to, dy, call->order + begin, end - begin);
        } else if (begin == end) {
            for (int64_t j = 0; j < inner; j += LANES)
                vf_write_part(mode, table_type, to, j, inner - j, vf_zero());
        } else {
            for (int64_t j = 0; j < inner; j += SUM_COLUMNS)
                sum_list(call, dtype, table_type, mode, sums, at_mutable(table_type, to, j), dy, begin, end, j,
                         vjp_min(inner - j, SUM_COLUMNS));
        }
    }
    if (mode == WRITE_STREAM) vf_stream_done();
}

/* One segment of a hot row. */
INLINE void sum_segment(vjp_dtype dtype, const scatter_call *call, size_t task) {
    const segment *s = &call->segments[task];
    int64_t inner = call->s.inner;
    const void *dy = at(dtype, call->dy, call->outer * call->s.count * inner);
    double sums[SUM_COLUMNS];
    for (int64_t j = 0; j < inner; j += SUM_COLUMNS) {
        int64_t width = vjp_min(inner - j, SUM_COLUMNS);
        sum_list(call, dtype, VJP_F32, WRITE_PLAIN, sums, NULL, dy, s->begin, s->begin + s->count, j, width);
        memcpy(call->partials + (int64_t)task * inner + j, sums, (size_t)width * sizeof sums[0]);
    }
}

/* A table of 16 bits may have a gradient in f32. */
INLINE void sum_typed(vjp_dtype dtype, const scatter_call *call, size_t task) {
    if (call->table_type == VJP_F32)
        BY_MODE(dtype, call->mode, sum_rows, VJP_F32, call, task);
    else
        BY_MODE(dtype, call->mode, sum_rows, dtype, call, task);
}

static void sum_task(void *argument, size_t task) {
    const scatter_call *call = argument;
    BY_DTYPE(call->dtype, sum_typed, call, task);
}

static void segment_task(void *argument, size_t task) {
    const scatter_call *call = argument;
    BY_DTYPE(call->dtype, sum_segment, call, task);
}

static void list_segments(scatter_call *call) {
    for (int64_t range = 0; range < call->ranges.count; range++) {
        if (!call->hot[range]) continue;
        for (int64_t row = cpu_split_begin(&call->ranges, (size_t)range);
             row < cpu_split_end(&call->ranges, (size_t)range); row++) {
            int64_t begin = row_begin(call, row), end = call->row_end[row];
            if (end - begin < HOT) continue;
            for (; begin < end; begin += HOT)
                call->segments[call->segment_count++] = (segment){row, begin, vjp_min(end - begin, HOT)};
        }
    }
}

/* Hot rows: each segment is one task; then each row's segments are added in order. */
static void sum_hot(const vjp_work *work, scatter_call *call) {
    int64_t inner = call->s.inner;
    for (call->outer = 0; call->outer < call->s.outer && call->segment_count; call->outer++) {
        vjp_cpu_for(work, call->segment_count, segment_task, call);
        for (int64_t i = 0, next; i < call->segment_count; i = next) {
            int64_t row = call->segments[i].row;
            double *sums = call->partials + i * inner;
            for (next = i + 1; next < call->segment_count && call->segments[next].row == row; next++)
                for (int64_t j = 0; j < inner; j++)
                    sums[j] += call->partials[next * inner + j];
            void *to = at_mutable(call->table_type, call->dtable, (call->outer * call->s.rows + row) * inner);
            for (int64_t j = 0; j < inner; j++)
                f32_write(call->mode, call->table_type, to, j, (float)sums[j]);
        }
    }
}

/* Splits the problem and lays the workspace out; returns its bytes. A NULL workspace: only to count them. */
static size_t plan(const vjp_work *work, scatter_call *call) {
    vjp_gather_sizes s = call->s = vjp_gather_sizes_of(work);
    int64_t row_bytes = s.inner * 4;
    /* A range must be worth a task when it is sorted; small problems have one, and skip the first two steps. */
    int64_t share = s.rows ? 8 * s.count / s.rows : 0;
    call->ranges = vjp_cpu_split_items(s.rows, 8 + 2 * share, MAX_RANGES);
    for (call->range_bits = 0; (int64_t)1 << call->range_bits < call->ranges.size; call->range_bits++) {
    }
    call->ranges.size = (int64_t)1 << call->range_bits;
    call->ranges.count = (s.rows + call->ranges.size - 1) >> call->range_bits;
    call->chunks = vjp_cpu_split_items(s.count, 16, MAX_CHUNKS);
    call->split = vjp_cpu_split_items(s.outer * s.rows, row_bytes, CPU_MAX_TASKS);
    int64_t segments = 2 * (s.count / HOT);
    size_t place = 0;
    char *base = work->workspace;
#define PLACE(member, count)                                                                                           \
    do {                                                                                                               \
        call->member = base ? (void *)(base + place) : NULL;                                                           \
        place += (size_t)(count) * sizeof *call->member;                                                               \
    } while (0)
    PLACE(partials, segments * s.inner);
    PLACE(segments, segments);
    PLACE(cursors, call->ranges.count > 1 ? call->chunks.count * call->ranges.count : 0);
    PLACE(range_begin, call->ranges.count + 1);
    PLACE(hot, call->ranges.count);
    PLACE(row_end, s.rows);
    PLACE(order, s.count);
    PLACE(mixed, call->ranges.count > 1 ? s.count : 0);
#undef PLACE
    if (call->ranges.count <= 1) call->mixed = NULL;
    return place;
}

static vjp_status backward(const vjp_work *work) {
    scatter_call call = {
        .dtype = work->storage,
        .table_type = vjp_type(work, GATHER_B_DTABLE),
        .index_type = vjp_type(work, GATHER_B_INDEX),
        .dtable = vjp_data(work, GATHER_B_DTABLE),
        .dy = vjp_data(work, GATHER_B_DY),
        .index = vjp_data(work, GATHER_B_INDEX),
    };
    if (!call.dtable) return VJP_OK;
    plan(work, &call);
    int64_t bytes = call.s.outer * call.s.rows * call.s.inner * (int64_t)dtype_bytes(call.table_type);
    if (bytes == 0) return VJP_OK;
    bool aligned = call.s.inner % LANES == 0 && vf_stream_aligned(call.table_type, call.dtable);
    call.mode = write_mode_of(work, GATHER_B_DTABLE, bytes, aligned, false);
    sort_indices(work, &call);
    list_segments(&call);
    vjp_cpu_for(work, call.split.count, sum_task, &call);
    sum_hot(work, &call);
    return VJP_OK;
}

static size_t backward_workspace(const vjp_work *work) {
    scatter_call call;
    vjp_work unplaced = *work;
    unplaced.workspace = NULL;
    return work->tensor[GATHER_B_DTABLE] ? plan(&unplaced, &call) : 0;
}

extern const vjp_kernel CPU_NAME(gather)[VJP_PASS_COUNT];
const vjp_kernel CPU_NAME(gather)[VJP_PASS_COUNT] = {
    {forward, NULL, VJP_STORAGE_16_32},
    {backward, backward_workspace, VJP_STORAGE_16_32},
};

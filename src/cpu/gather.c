/*
 * gather on the CPU. Forward: rows of the table copied by index. Backward: the deterministic scatter-add
 * dtable[o, index[k], :] += dy[o, k, :], repeats in the order of k, every row of dtable written once.
 *
 * The backward sorts before it adds, so that a row of dtable is made by one task from a list of its k:
 *   1. the table's rows are cut into ranges; chunks of the index count how many of theirs fall in each;
 *   2. each chunk writes its k behind those of the chunks before, range by range, so a range's list keeps its order;
 *   3. each range sorts its list by row, by counting, which keeps the order too;
 *   4. rows of dtable are summed, a few repeats at a time in f32 and those sums in double; rows nobody asked for are
 * zero. A row asked for very often (a padding token) would hold one task up: such rows are left out of 4, their lists
 * are cut into segments, each summed by itself in double, and the segments are added in order. Nothing depends on the
 * number of threads. The workspace is O(rows + count) numbers, and segments x inner doubles.
 */
#include "cpu/shuffle.h"
#include "cpu/stream.h"
#include "op/op.h"

extern const vjp_kernel CPU_NAME(gather)[VJP_PASS_COUNT];

/* Indices are converted this many at a time, and rows this small are copied without a call. */
enum { INDEX_BLOCK = 128 };

/* So many repeats are added in f32 (error below 16 x 6e-8), and such sums in double. */
enum { FEW = 16 };

/* Repeats that make a row hot, and the length of a segment: partial sums stay below 1/256 of dy's bytes in f32. */
enum { HOT = 1024 };

/* Columns summed together: their sums, f32 or double, stay in the first-level cache. */
enum { SUM_COLUMNS = 2048, ROWS_AT_ONCE = 8 };

/* Rows of dy or the table asked for before they are needed: the beginning of the next one, or some whole small ones. */
enum { PREFETCH_BYTES = 256, AHEAD = 16 };

/* Ranges of rows, and chunks of the index: each pair has a counter. */
enum { MOST_RANGES = 256, MOST_CHUNKS = 64 };

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
    cpu_cut cut; /* of outer x count */
} gather_call;

INLINE void add_row(vjp_dtype dtype, void *y, const void *x, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES)
        vf_write_part(WRITE_ADD, dtype, y, i, n - i, vf_load_part(dtype, x, i, n - i));
}

/* Bytes are moved as they are, so a NaN keeps its payload. */
static void write_row(const gather_call *call, char *y, const char *x) {
    if (call->mode == WRITE_ADD) {
        switch (call->dtype) {
        case VJP_BF16: add_row(VJP_BF16, y, x, call->s.inner); break;
        case VJP_F16: add_row(VJP_F16, y, x, call->s.inner); break;
        default: add_row(VJP_F32, y, x, call->s.inner); break;
        }
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
    int64_t end = cpu_cut_end(&call->cut, task), bytes = call->row_bytes;
    int64_t ahead = bytes > PREFETCH_BYTES ? 1 : AHEAD;
    for (int64_t item = cpu_cut_begin(&call->cut, task); item < end;) {
        int64_t outer = item / call->s.count, k = item % call->s.count;
        int64_t n = call->s.count - k < end - item ? call->s.count - k : end - item;
        if (n > INDEX_BLOCK) n = INDEX_BLOCK;
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
    call.cut = vjp_cpu_cut_items(items, 2 * call.row_bytes, CPU_MOST_TASKS);
    vjp_cpu_for(work, call.cut.count, gather_task, &call);
    return VJP_OK;
}

/* ---- Backward: sorting ------------------------------------------------------------------------------- */

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
    cpu_cut ranges, chunks; /* of rows; of the index */
    int64_t *cursors;       /* [chunks][ranges]: where a chunk's next k of a range goes */
    int64_t *range_begin;   /* [ranges + 1]: a range's list in `mixed` and `order` */
    int64_t *hot;           /* [ranges]: hot rows in the range */
    int64_t *row_end;       /* [rows]: the end of the row's list in `order` */
    int64_t *mixed, *order; /* [count]: k by range; k by row */
    segment *segments;      /* of hot rows */
    int64_t segment_count;
    int64_t outer;    /* whose hot rows are being summed */
    double *partials; /* [segments][inner] */
    cpu_cut cut;      /* of outer x rows, for the sums */
} scatter_call;

static void count_task(void *argument, size_t task) {
    const scatter_call *call = argument;
    int64_t *counts = call->cursors + (int64_t)task * call->ranges.count;
    memset(counts, 0, (size_t)call->ranges.count * sizeof counts[0]);
    int64_t rows[INDEX_BLOCK], end = cpu_cut_end(&call->chunks, task);
    for (int64_t k = cpu_cut_begin(&call->chunks, task); k < end; k += INDEX_BLOCK) {
        int64_t n = end - k < INDEX_BLOCK ? end - k : INDEX_BLOCK;
        read_indices(call->index_type, call->index, k, n, rows);
        for (int64_t i = 0; i < n; i++)
            counts[rows[i] / call->ranges.size]++;
    }
}

static void spread_task(void *argument, size_t task) {
    const scatter_call *call = argument;
    int64_t *cursors = call->cursors + (int64_t)task * call->ranges.count;
    int64_t rows[INDEX_BLOCK], end = cpu_cut_end(&call->chunks, task);
    for (int64_t k = cpu_cut_begin(&call->chunks, task); k < end; k += INDEX_BLOCK) {
        int64_t n = end - k < INDEX_BLOCK ? end - k : INDEX_BLOCK;
        read_indices(call->index_type, call->index, k, n, rows);
        for (int64_t i = 0; i < n; i++)
            call->mixed[cursors[rows[i] / call->ranges.size]++] = k + i;
    }
}

/* Counting sort of one range's list. row_end[] counts, then holds where a row begins, and ends as its name says. */
static void sort_task(void *argument, size_t task) {
    const scatter_call *call = argument;
    int64_t first = cpu_cut_begin(&call->ranges, task), last = cpu_cut_end(&call->ranges, task);
    int64_t begin = call->range_begin[task], end = call->range_begin[task + 1], hot = 0;
    memset(call->row_end + first, 0, (size_t)(last - first) * sizeof call->row_end[0]);
    for (int64_t i = begin; i < end; i++)
        call->row_end[index_at(call->index_type, call->index, call->mixed ? call->mixed[i] : i)]++;
    for (int64_t row = first, at_row = begin; row < last; row++) {
        int64_t n = call->row_end[row];
        hot += n >= HOT;
        call->row_end[row] = at_row;
        at_row += n;
    }
    for (int64_t i = begin; i < end; i++) {
        int64_t k = call->mixed ? call->mixed[i] : i;
        call->order[call->row_end[index_at(call->index_type, call->index, k)]++] = k;
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

/*
 * sums[j] = the sum of rows order[0..count) of dy, in that order, columns [column, column + width). A few rows are read
 * at a time, each from end to end: a row somewhere in memory comes at speed only once it is read on and on.
 */
INLINE void add_rows(vjp_dtype dtype, float *sums, const void *dy, const int64_t *order, int64_t count, int64_t inner,
                     int64_t column, int64_t width) {
    for (int64_t i = 0; i < count; i += ROWS_AT_ONCE) {
        int64_t n = count - i < ROWS_AT_ONCE ? count - i : ROWS_AT_ONCE;
        for (int64_t j = 0; j < width; j += LANES) {
            vf sum = i ? vf_load(VJP_F32, sums, j) : vf_zero();
            for (int64_t r = 0; r < n; r++)
                sum = vf_add(sum, vf_load_part(dtype, dy, order[i + r] * inner + column + j, width - j));
            vf_store(VJP_F32, sums, j, sum);
        }
    }
}

/* Up to FEW rows of dy, columns [column, column + width) with width at most SUM_COLUMNS. */
INLINE void sum_few(const scatter_call *call, vjp_dtype dtype, vjp_dtype table_type, write_mode mode, void *to,
                    const void *dy, const int64_t *order, int64_t count, int64_t column, int64_t width) {
    float sums[SUM_COLUMNS];
    int64_t inner = call->s.inner;
    if (count > 1) add_rows(dtype, sums, dy, order, count, inner, column, width);
    for (int64_t j = 0; j < width; j += LANES) {
        vf sum = count > 1    ? vf_load(VJP_F32, sums, j)
                 : count == 1 ? vf_load_part(dtype, dy, order[0] * inner + column + j, width - j)
                              : vf_zero();
        vf_write_part(mode, table_type, to, column + j, width - j, sum);
    }
}

/* Any number of rows: FEW at a time in f32, and those sums in double. */
INLINE void sum_many(const scatter_call *call, vjp_dtype dtype, double *sums, const void *dy, const int64_t *order,
                     int64_t count, int64_t column, int64_t width) {
    float few[SUM_COLUMNS];
    for (int64_t j = 0; j < width; j += LANES)
        vd_store(sums + j, vd_zero());
    for (int64_t i = 0; i < count; i += FEW) {
        add_rows(dtype, few, dy, order + i, count - i < FEW ? count - i : FEW, call->s.inner, column, width);
        for (int64_t j = 0; j < width; j += LANES)
            vd_store(sums + j, vd_add(vd_load(sums + j), vd_of(vf_load(VJP_F32, few, j))));
    }
}

/* Rows of fewer columns than a vector has lanes: a number at a time. */
INLINE void sum_narrow(const scatter_call *call, vjp_dtype dtype, vjp_dtype table_type, write_mode mode, void *to,
                       const void *dy, const int64_t *order, int64_t count) {
    int64_t inner = call->s.inner;
    for (int64_t j = 0; j < inner; j++) {
        double sum = 0;
        for (int64_t i = 0; i < count; i++)
            sum += (double)f32_load(dtype, dy, order[i] * inner + j);
        f32_write(mode, table_type, to, j, (float)sum);
    }
}

/* A row of one k, or of none, needs no arithmetic: whole cache lines are moved as they are. */
INLINE void move_row(write_mode mode, void *to, const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes / 4; i += LANES)
        vf_write(mode, VJP_F32, to, i, from ? vf_load(VJP_F32, from, i) : vf_zero());
}

INLINE void sum_rows(const scatter_call *call, size_t task, vjp_dtype dtype, vjp_dtype table_type, write_mode mode) {
    int64_t inner = call->s.inner, rows = call->s.rows, bytes = inner * (int64_t)dtype_bytes(dtype);
    int64_t ahead = bytes > PREFETCH_BYTES ? 1 : AHEAD;
    for (int64_t item = cpu_cut_begin(&call->cut, task); item < cpu_cut_end(&call->cut, task); item++) {
        int64_t outer = item / rows, row = item % rows, begin = row_begin(call, row);
        int64_t count = call->row_end[row] - begin;
        if (count >= HOT || (count == 0 && mode == WRITE_ADD)) continue;
        const int64_t *order = call->order + begin;
        const void *dy = at(dtype, call->dy, outer * call->s.count * inner);
        void *to = at_mutable(table_type, call->dtable, item * inner);
        /* The next rows of dy are somewhere else: ask for their beginning before the hardware can know. */
        for (int64_t i = begin + ahead; i < begin + ahead + count && i < call->s.count; i++)
            for (int64_t b = 0; b < bytes && b < PREFETCH_BYTES; b += 64)
                __builtin_prefetch((const char *)at(dtype, dy, call->order[i] * inner) + b);
        if (count <= 1 && table_type == dtype && mode != WRITE_ADD && bytes % 64 == 0 && (uintptr_t)to % 64 == 0) {
            move_row(mode, to, count ? at(dtype, dy, order[0] * inner) : NULL, bytes);
        } else if (inner < LANES) {
            sum_narrow(call, dtype, table_type, mode, to, dy, order, count);
        } else if (count <= FEW) {
            for (int64_t j = 0; j < inner; j += SUM_COLUMNS)
                sum_few(call, dtype, table_type, mode, to, dy, order, count, j,
                        inner - j < SUM_COLUMNS ? inner - j : SUM_COLUMNS);
        } else {
            double sums[SUM_COLUMNS];
            for (int64_t j = 0; j < inner; j += SUM_COLUMNS) {
                int64_t width = inner - j < SUM_COLUMNS ? inner - j : SUM_COLUMNS;
                sum_many(call, dtype, sums, dy, order, count, j, width);
                for (int64_t i = 0; i < width; i += LANES)
                    vf_write_part(mode, table_type, to, j + i, width - i, vd_round(vd_load(sums + i)));
            }
        }
    }
    if (mode == WRITE_STREAM) vf_stream_done();
}

/* One segment of a hot row. */
INLINE void sum_segment(const scatter_call *call, size_t task, vjp_dtype dtype) {
    const segment *s = &call->segments[task];
    int64_t inner = call->s.inner;
    const void *dy = at(dtype, call->dy, call->outer * call->s.count * inner);
    double sums[SUM_COLUMNS];
    for (int64_t j = 0; j < inner; j += SUM_COLUMNS) {
        int64_t width = inner - j < SUM_COLUMNS ? inner - j : SUM_COLUMNS;
        sum_many(call, dtype, sums, dy, call->order + s->begin, s->count, j, width);
        memcpy(call->partials + (int64_t)task * inner + j, sums, (size_t)width * sizeof sums[0]);
    }
}

INLINE void sum_moded(const scatter_call *call, size_t task, vjp_dtype dtype, vjp_dtype table_type) {
    switch (call->mode) {
    case WRITE_STREAM: sum_rows(call, task, dtype, table_type, WRITE_STREAM); break;
    case WRITE_ADD: sum_rows(call, task, dtype, table_type, WRITE_ADD); break;
    default: sum_rows(call, task, dtype, table_type, WRITE_PLAIN); break;
    }
}

static void sum_f32(void *call, size_t task) {
    sum_moded(call, task, VJP_F32, VJP_F32);
}

static void sum_bf16(void *call, size_t task) {
    sum_moded(call, task, VJP_BF16, VJP_BF16);
}

static void sum_f16(void *call, size_t task) {
    sum_moded(call, task, VJP_F16, VJP_F16);
}

static void sum_bf16_f32(void *call, size_t task) {
    sum_moded(call, task, VJP_BF16, VJP_F32);
}

static void sum_f16_f32(void *call, size_t task) {
    sum_moded(call, task, VJP_F16, VJP_F32);
}

static void segment_f32(void *call, size_t task) {
    sum_segment(call, task, VJP_F32);
}

static void segment_bf16(void *call, size_t task) {
    sum_segment(call, task, VJP_BF16);
}

static void segment_f16(void *call, size_t task) {
    sum_segment(call, task, VJP_F16);
}

static void list_segments(scatter_call *call) {
    for (int64_t range = 0; range < call->ranges.count; range++) {
        if (!call->hot[range]) continue;
        for (int64_t row = cpu_cut_begin(&call->ranges, (size_t)range); row < cpu_cut_end(&call->ranges, (size_t)range);
             row++) {
            int64_t begin = row_begin(call, row), end = call->row_end[row];
            if (end - begin < HOT) continue;
            for (; begin < end; begin += HOT)
                call->segments[call->segment_count++] = (segment){row, begin, end - begin < HOT ? end - begin : HOT};
        }
    }
}

/* Hot rows: every segment by itself, then each row's segments in order. */
static void sum_hot(const vjp_work *work, scatter_call *call) {
    static const vjp_task tasks[] = {[VJP_F32] = segment_f32, [VJP_BF16] = segment_bf16, [VJP_F16] = segment_f16};
    int64_t inner = call->s.inner;
    for (call->outer = 0; call->outer < call->s.outer && call->segment_count; call->outer++) {
        vjp_cpu_for(work, call->segment_count, tasks[call->dtype], call);
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

/* The cut of the problem and the places in the workspace, which may be NULL when only its size is wanted. */
static size_t plan(const vjp_work *work, scatter_call *call) {
    vjp_gather_sizes s = call->s = vjp_gather_sizes_of(work);
    int64_t row_bytes = s.inner * 4;
    /* A range must be worth a task when it is sorted; small problems have one, and skip the first two steps. */
    int64_t share = s.rows ? 8 * s.count / s.rows : 0;
    call->ranges = vjp_cpu_cut_items(s.rows, 8 + 2 * share, MOST_RANGES);
    call->chunks = vjp_cpu_cut_items(s.count, 16, MOST_CHUNKS);
    call->cut = vjp_cpu_cut_items(s.outer * s.rows, row_bytes, CPU_MOST_TASKS);
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
    vjp_task task = call.dtype == VJP_F32        ? sum_f32
                    : call.table_type == VJP_F32 ? (call.dtype == VJP_BF16 ? sum_bf16_f32 : sum_f16_f32)
                    : call.dtype == VJP_BF16     ? sum_bf16
                                                 : sum_f16;
    vjp_cpu_for(work, call.cut.count, task, &call);
    sum_hot(work, &call);
    return VJP_OK;
}

static size_t backward_workspace(const vjp_work *work) {
    scatter_call call;
    vjp_work unplaced = *work;
    unplaced.workspace = NULL;
    return work->tensor[GATHER_B_DTABLE] ? plan(&unplaced, &call) : 0;
}

const vjp_kernel CPU_NAME(gather)[VJP_PASS_COUNT] = {
    {forward, NULL, VJP_BITS_CPU},
    {backward, backward_workspace, VJP_BITS_CPU},
};

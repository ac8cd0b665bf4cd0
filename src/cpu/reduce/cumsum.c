/* SPDX-License-Identifier: MIT */
/*
 * cumsum on the CPU: x as [outer, length, inner], running sums along length, from either end, an element's own value
 * left out or not. The backward is the same scan from the other end, which the sizes already say.
 *
 * The sum so far is carried in double, so a long axis loses nothing: 2^25 ones reach 33554432. Four paths:
 *   lines    inner is 1: each vector is scanned within itself by shifts of 1, 2, 4 and 8 lanes, then the carry
 *            is added. Only the carry's one addition waits for the vector before.
 *   packed   the same for lines shorter than a vector, several in one vector.
 *   columns  inner is 16 or more: sixteen running sums in double side by side, a block of columns at a time.
 *   short    otherwise: a tile is converted to f32, scanned one number at a time in double, and written back.
 *
 * Rows are independent tasks. Where there are too few of them, the axis itself is split into chunks by its length:
 * a group of chunks is first summed, its totals are carried from chunk to chunk in order, then it is scanned while it
 * is still in the caches. Every element is read before it is written, so y may be x.
 */
#include "cpu/reduce/sums.h"

extern const vjp_kernel CPU_NAME(cumsum)[VJP_PASS_COUNT];

/* Columns that one task scans together: 2 KiB of running sums; narrow blocks where wide ones would be too few. */
enum { WIDE_BLOCK = 256, NARROW_BLOCK = 64 };

/* With fewer independent tasks than this the axis is split: enough for 16 threads to share evenly. */
enum { ENOUGH_TASKS = 32 };

/*
 * Bytes of x in a chunk of a split axis, and chunks in a group. A group is 16 MiB: small enough to stay in the
 * second-level caches of 16 cores, large enough to be worth two wake-ups.
 */
enum { CHUNK_BYTES = 64 << 10, GROUP_CHUNKS = 256 };

/* Columns: rows prefetched ahead. A row is often a page away from the next, which the hardware does not prefetch. */
enum { ROWS_AHEAD = 8 };

/* Lines: prefetched this far ahead, past the end of a line into the next one that is scanned. */
enum { LINE_AHEAD_BYTES = 2048 };

enum { TILE = 1024 };

typedef enum scan_path { SCAN_LINES, SCAN_PACKED, SCAN_COLUMNS, SCAN_SHORT } scan_path;

typedef struct scan_call {
    vjp_cumsum_sizes s;
    vjp_dtype dtype;
    scan_path path;
    write_mode mode;
    void *y;
    const void *x;
    int64_t block;        /* SCAN_COLUMNS: columns of a task */
    cpu_split split;      /* whole rows: of outer, times the blocks of columns */
    int64_t chunk, count; /* a split axis: rows of a chunk, chunks of an axis */
    int64_t group;        /* the group's first chunk, counted over all outer */
    double *totals;       /* [GROUP_CHUNKS][inner]: first each chunk's sum, then the sum of all before it */
} scan_call;

/* A region to scan: rows [begin, begin + rows) of the [outer * length, inner] matrix, columns [column, + width).
 */
typedef struct region {
    int64_t begin, rows, column, width;
    double *carry; /* in: the sums before; out: after. NULL: zero */
    bool total;    /* only carry is computed, nothing is written */
    bool more;     /* a line: the task has another after it */
} region;

/* ---- Lines ------------------------------------------------------------------------------------------- */

/* A -0 that stays is 0 as soon as the carry is added, which starts from 0 and so never is -0 itself. */
INLINE vf scan_lanes(vf a, bool reverse) {
    for (int by = 1; by < LANES; by *= 2)
        a = reverse ? vf_add_down(a, by) : vf_add_up(a, by);
    return a;
}

INLINE double scan_vector(vjp_dtype dtype, bool reverse, bool exclusive, write_mode mode, void *y, const void *x,
                          int64_t i, int64_t n, double carry) {
    vf sums = scan_lanes(vf_load_part(dtype, x, i, n), reverse);
    vf own = !exclusive ? sums : reverse ? vf_shift_down(sums, 1) : vf_shift_up(sums, 1);
    vf_write_part(mode, dtype, y, i, n, vf_add(vf_set((float)carry), own));
    return carry + (double)(reverse ? sums.v[0][0] : sums.v[PARTS - 1][NATIVE_LANES - 1]);
}

/* `more`: x has another line after this one. */
INLINE double scan_line(vjp_dtype dtype, bool reverse, bool exclusive, write_mode mode, void *y, const void *x,
                        int64_t n, bool more, double carry) {
    int64_t whole = n / LANES * LANES, ahead = LINE_AHEAD_BYTES / (int64_t)dtype_bytes(dtype);
    if (ahead > n) ahead = n;
    if (reverse && whole < n) carry = scan_vector(dtype, reverse, exclusive, mode, y, x, whole, n - whole, carry);
    /* The prefetched element is in this line at first, then in the next, which is scanned from the same side. */
    const int64_t ends[2] = {whole - ahead, whole}, past = !more ? 0 : reverse ? 2 * n - ahead : ahead;
    for (int64_t part = 0, v = 0; part < 2; part++)
        for (int64_t distance = part ? past : reverse ? -ahead : ahead; v < ends[part]; v += LANES) {
            int64_t i = reverse ? whole - LANES - v : v;
            prefetch_first_level(at(dtype, x, i + distance), 1);
            carry = scan_vector(dtype, reverse, exclusive, mode, y, x, i, LANES, carry);
        }
    if (!reverse && whole < n) carry = scan_vector(dtype, reverse, exclusive, mode, y, x, whole, n - whole, carry);
    return carry;
}

INLINE void scan_lines_moded(const scan_call *call, const region *p, vjp_dtype dtype, bool reverse, bool exclusive) {
    double before = p->carry ? *p->carry : 0, after;
    const void *x = at(dtype, call->x, p->begin);
    void *y = at_mutable(dtype, call->y, p->begin);
    if (p->total)
        after = sum_line(dtype, x, p->rows);
    else if (call->mode == WRITE_STREAM)
        after = scan_line(dtype, reverse, exclusive, WRITE_STREAM, y, x, p->rows, p->more, before);
    else
        after = scan_line(dtype, reverse, exclusive, call->mode, y, x, p->rows, p->more, before);
    if (p->carry) *p->carry = after;
}

INLINE void scan_lines(const scan_call *call, const region *p, vjp_dtype dtype) {
    switch (2 * call->s.reverse + call->s.exclusive) {
    case 0: scan_lines_moded(call, p, dtype, false, false); break;
    case 1: scan_lines_moded(call, p, dtype, false, true); break;
    case 2: scan_lines_moded(call, p, dtype, true, false); break;
    default: scan_lines_moded(call, p, dtype, true, true); break;
    }
}

/*
 * Lines shorter than a vector, as many as it holds: the same shifts, where a lane adds only lanes of its own line. Each
 * line starts at zero, so there is nothing to carry.
 */
INLINE void scan_packed(vjp_dtype dtype, bool reverse, bool exclusive, write_mode mode, void *y, const void *x,
                        int64_t n, int64_t length) {
    vf own[4]; /* all bits where the shift by 1, 2, 4, 8 stays in the line */
    for (int k = 0; k < 4; k++) {
        int32_t lanes[LANES];
        for (int64_t i = 0; i < LANES; i++) {
            int64_t place = reverse ? length - 1 - i % length : i % length;
            lanes[i] = place >= 1 << k ? -1 : 0;
        }
        own[k] = vf_load(VJP_F32, lanes, 0);
    }
    int64_t step = LANES / length * length;
    for (int64_t i = 0; i < n; i += step) {
        int64_t count = n - i < step ? n - i : step;
        vf sums = vf_load_part(dtype, x, i, count);
        for (int k = 0; k < 4; k++) {
            vf before = reverse ? vf_shift_down(sums, 1 << k) : vf_shift_up(sums, 1 << k);
            sums = vf_add(sums, vi_as_vf(vi_and(vf_bits(before), vf_bits(own[k]))));
        }
        if (exclusive) {
            vf before = reverse ? vf_shift_down(sums, 1) : vf_shift_up(sums, 1);
            sums = vi_as_vf(vi_and(vf_bits(before), vf_bits(own[0])));
        }
        vf_write_part(mode, dtype, y, i, count, sums);
    }
}

INLINE void scan_packed_lines(const scan_call *call, const region *p, vjp_dtype dtype) {
    const void *x = at(dtype, call->x, p->begin);
    void *y = at_mutable(dtype, call->y, p->begin);
    /* Only lines that fill the vector keep it aligned. */
    bool aligned = LANES % call->s.length == 0 && vf_stream_aligned(dtype, y);
    write_mode mode = call->mode == WRITE_STREAM && !aligned ? WRITE_PLAIN : call->mode;
    switch (2 * call->s.reverse + call->s.exclusive) {
    case 0: scan_packed(dtype, false, false, mode, y, x, p->rows, call->s.length); break;
    case 1: scan_packed(dtype, false, true, mode, y, x, p->rows, call->s.length); break;
    case 2: scan_packed(dtype, true, false, mode, y, x, p->rows, call->s.length); break;
    default: scan_packed(dtype, true, true, mode, y, x, p->rows, call->s.length); break;
    }
}

/* ---- Columns ----------------------------------------------------------------------------------------- */

INLINE void scan_columns(const scan_call *call, const region *p, vjp_dtype dtype) {
    double sums[WIDE_BLOCK] = {0};
    if (p->carry && !p->total) memcpy(sums, p->carry, (size_t)p->width * sizeof sums[0]);
    for (int64_t r = 0; r < p->rows; r++) {
        int64_t row = p->begin + (call->s.reverse ? p->rows - 1 - r : r), first = row * call->s.inner + p->column;
        int64_t ahead = (call->s.reverse ? -ROWS_AHEAD : ROWS_AHEAD) * call->s.inner;
        bool more = r + ROWS_AHEAD < p->rows;
        for (int64_t j = 0; j < p->width; j += LANES) {
            if (more) prefetch_first_level(at(dtype, call->x, first + ahead + j), 1);
            vd before = vd_load(sums + j);
            vd after = vd_add(before, vd_of(vf_load_part(dtype, call->x, first + j, p->width - j)));
            vd_store(sums + j, after);
            if (!p->total)
                vf_write_part(call->mode, dtype, call->y, first + j, p->width - j,
                              vd_round(call->s.exclusive ? before : after));
        }
    }
    if (p->carry) memcpy(p->carry, sums, (size_t)p->width * sizeof sums[0]);
}

/* ---- Short ------------------------------------------------------------------------------------------- */

/* Scans `rows` rows of a tile; `left` counts the rows until the next sequence begins and the sums start anew. */
INLINE int64_t scan_tile(float *tile, int64_t rows, int64_t inner, double *sums, int64_t left, int64_t length,
                         bool reverse, bool exclusive) {
    for (int64_t r = 0; r < rows; r++) {
        float *row = tile + (reverse ? rows - 1 - r : r) * inner;
        if (left == 0) {
            for (int64_t j = 0; j < inner; j++)
                sums[j] = 0;
            left = length;
        }
        left--;
        for (int64_t j = 0; j < inner; j++) {
            double before = sums[j], after = before + (double)row[j];
            sums[j] = after;
            row[j] = (float)(exclusive ? before : after);
        }
    }
    return left;
}

/* Known widths keep their sums in registers. */
INLINE int64_t scan_tile_sized(float *tile, int64_t rows, const vjp_cumsum_sizes *s, double *sums, int64_t left,
                               bool reverse, bool exclusive) {
    switch (s->inner) {
    case 2: return scan_tile(tile, rows, 2, sums, left, s->length, reverse, exclusive);
    case 3: return scan_tile(tile, rows, 3, sums, left, s->length, reverse, exclusive);
    case 4: return scan_tile(tile, rows, 4, sums, left, s->length, reverse, exclusive);
    default: return scan_tile(tile, rows, s->inner, sums, left, s->length, reverse, exclusive);
    }
}

static int64_t scan_any_tile(float *tile, int64_t rows, const vjp_cumsum_sizes *s, double *sums, int64_t left) {
    switch (2 * s->reverse + s->exclusive) {
    case 0: return scan_tile_sized(tile, rows, s, sums, left, false, false);
    case 1: return scan_tile_sized(tile, rows, s, sums, left, false, true);
    case 2: return scan_tile_sized(tile, rows, s, sums, left, true, false);
    default: return scan_tile_sized(tile, rows, s, sums, left, true, true);
    }
}

INLINE void scan_short(const scan_call *call, const region *p, vjp_dtype dtype) {
    int64_t inner = call->s.inner;
    int64_t tile_rows = TILE / inner / LANES * LANES; /* so that every tile but the last is whole vectors */
    int64_t tiles = vjp_divide_up(p->rows, tile_rows);
    int64_t left = p->carry ? p->rows : call->s.length; /* a chunk lies inside one sequence */
    double sums[LANES] = {0};
    if (p->carry && !p->total) memcpy(sums, p->carry, (size_t)inner * sizeof sums[0]);
    for (int64_t t = 0; t < tiles; t++) {
        int64_t begin = (call->s.reverse ? tiles - 1 - t : t) * tile_rows;
        int64_t rows = vjp_min(p->rows - begin, tile_rows);
        int64_t first = (p->begin + begin) * inner, n = rows * inner;
        float tile[TILE];
        for (int64_t i = 0; i < n; i += LANES)
            vf_store(VJP_F32, tile, i, vf_load_part(dtype, call->x, first + i, n - i));
        left = scan_any_tile(tile, rows, &call->s, sums, left);
        if (p->total) continue;
        void *y = at_mutable(dtype, call->y, first);
        write_mode mode = call->mode == WRITE_STREAM && !vf_stream_aligned(dtype, y) ? WRITE_PLAIN : call->mode;
        for (int64_t i = 0; i < n; i += LANES)
            vf_write_part(mode, dtype, y, i, n - i, vf_load(VJP_F32, tile, i));
    }
    if (p->carry) memcpy(p->carry, sums, (size_t)inner * sizeof sums[0]);
}

/* ---- Tasks ------------------------------------------------------------------------------------------- */

INLINE void scan(vjp_dtype dtype, const scan_call *call, const region *p) {
    switch (call->path) {
    case SCAN_LINES: scan_lines(call, p, dtype); break;
    case SCAN_PACKED: scan_packed_lines(call, p, dtype); break;
    case SCAN_COLUMNS: scan_columns(call, p, dtype); break;
    default: scan_short(call, p, dtype); break;
    }
}

static void scan_region(const scan_call *call, const region *p) {
    BY_DTYPE(call->dtype, scan, call, p);
}

/* Whole rows. */
static void rows_task(void *argument, size_t task) {
    const scan_call *call = argument;
    const vjp_cumsum_sizes *s = &call->s;
    int64_t begin = cpu_split_begin(&call->split, task), end = cpu_split_end(&call->split, task);
    if (call->path == SCAN_SHORT || call->path == SCAN_PACKED) {
        scan_region(call, &(region){.begin = begin * s->length, .rows = (end - begin) * s->length, .width = s->inner});
    } else {
        int64_t blocks = vjp_divide_up(s->inner, call->block);
        for (int64_t item = begin; item < end; item++) {
            int64_t column = item % blocks * call->block, left = s->inner - column;
            scan_region(call, &(region){.begin = item / blocks * s->length,
                                        .rows = s->length,
                                        .column = column,
                                        .width = vjp_min(left, call->block),
                                        .more = item + 1 < end});
        }
    }
    if (call->mode == WRITE_STREAM) vf_stream_done();
}

/* One chunk of a split axis: its sum, or its scan, which starts from its total of all before it. */
static void chunk_of_group(const scan_call *call, size_t task, bool total) {
    const vjp_cumsum_sizes *s = &call->s;
    int64_t chunk = call->group + (int64_t)task, outer = chunk / call->count;
    int64_t begin = chunk % call->count * call->chunk, left = s->length - begin;
    for (int64_t column = 0; column < s->inner; column += call->block) {
        int64_t width = vjp_min(s->inner - column, call->block);
        scan_region(call, &(region){.begin = outer * s->length + begin,
                                    .rows = vjp_min(left, call->chunk),
                                    .column = column,
                                    .width = width,
                                    .carry = call->totals + (int64_t)task * s->inner + column,
                                    .total = total});
    }
    if (!total && call->mode == WRITE_STREAM) vf_stream_done();
}

static void total_task(void *call, size_t task) {
    chunk_of_group(call, task, true);
}

static void chunk_task(void *call, size_t task) {
    chunk_of_group(call, task, false);
}

/* Groups follow each other in the direction of the scan; `carry` is passed from one to the next. */
static void scan_chunks(const vjp_work *work, scan_call *call) {
    int64_t all = call->s.outer * call->count, groups = vjp_divide_up(all, GROUP_CHUNKS);
    int64_t inner = call->s.inner;
    bool reverse = call->s.reverse;
    double *carry = call->totals + GROUP_CHUNKS * inner;
    for (int64_t g = 0; g < groups; g++) {
        call->group = (reverse ? groups - 1 - g : g) * GROUP_CHUNKS;
        int64_t n = vjp_min(all - call->group, GROUP_CHUNKS);
        vjp_cpu_for(work, n, total_task, call);
        for (int64_t c = 0; c < n; c++) {
            int64_t i = reverse ? n - 1 - c : c, place = (call->group + i) % call->count;
            bool fresh = place == (reverse ? call->count - 1 : 0);
            double *total = call->totals + i * inner;
            for (int64_t j = 0; j < inner; j++) {
                double before = fresh ? 0 : carry[j];
                carry[j] = before + total[j];
                total[j] = before;
            }
        }
        vjp_cpu_for(work, n, chunk_task, call);
    }
}

/* How the problem is split; all of it follows from the sizes and the dtype. */
static scan_call plan(const vjp_work *work) {
    scan_call call = {.s = vjp_cumsum_sizes_of(work), .dtype = work->storage};
    const vjp_cumsum_sizes *s = &call.s;
    call.path = s->inner >= LANES    ? SCAN_COLUMNS
                : s->inner > 1       ? SCAN_SHORT
                : s->length >= LANES ? SCAN_LINES
                                     : SCAN_PACKED;
    call.block = s->inner;
    int64_t blocks = 1;
    if (call.path == SCAN_COLUMNS) {
        blocks = vjp_divide_up(s->inner, WIDE_BLOCK);
        call.block = s->outer * blocks < ENOUGH_TASKS ? NARROW_BLOCK : WIDE_BLOCK;
        blocks = vjp_divide_up(s->inner, call.block);
    }
    int64_t element = (int64_t)dtype_bytes(work->storage), row = s->inner * element;
    if (s->outer * s->length * row == 0) return call;
    int64_t width = vjp_min(s->inner, call.block);
    call.split = vjp_cpu_split_items(s->outer * blocks, 2 * s->length * width * element, CPU_MAX_TASKS);
    int64_t chunk = CHUNK_BYTES / row / LANES * LANES;
    call.chunk = chunk < LANES ? LANES : chunk;
    bool few = s->outer * blocks < ENOUGH_TASKS && s->length > 2 * call.chunk;
    call.count = few ? vjp_divide_up(s->length, call.chunk) : 0;
    if (few && call.path == SCAN_COLUMNS) call.block = WIDE_BLOCK;
    return call;
}

static vjp_status run(const vjp_work *work) {
    scan_call call = plan(work);
    const vjp_cumsum_sizes *s = &call.s;
    call.y = vjp_data(work, CUMSUM_Y);
    call.x = vjp_data(work, CUMSUM_X);
    int64_t bytes = s->outer * s->length * s->inner * (int64_t)dtype_bytes(call.dtype);
    if (!call.y || bytes == 0) return VJP_OK;
    /* Packed lines and short tiles check their own alignment. */
    bool aligned =
        vf_stream_aligned(call.dtype, call.y) && (call.path == SCAN_SHORT || call.path == SCAN_PACKED ||
                                                  (call.path == SCAN_LINES ? s->length : s->inner) % LANES == 0);
    call.mode = write_mode_of(work, CUMSUM_Y, bytes, aligned, call.x == call.y);
    call.totals = work->workspace;
    if (call.count)
        scan_chunks(work, &call);
    else
        vjp_cpu_for(work, call.split.count, rows_task, &call);
    return VJP_OK;
}

static size_t workspace(const vjp_work *work) {
    scan_call call = plan(work);
    return call.count ? (size_t)(GROUP_CHUNKS + 1) * (size_t)call.s.inner * sizeof(double) : 0;
}

const vjp_kernel CPU_NAME(cumsum)[VJP_PASS_COUNT] = {
    {run, workspace, VJP_STORAGE_16_32},
    {run, workspace, VJP_STORAGE_16_32},
};

/* SPDX-License-Identifier: MIT */
/*
 * gather: the forward copies rows; the backward sorts the indices, adds runs of equal ones, and clears the rows without
 * an index. gather.wgsl and gather.metal describe the kernels; here is how the sort and the sums are split, and their
 * workspace.
 *
 *     up to one tile of indices   one workgroup sorts them all
 *     more                        three launches for each DIGIT_BITS of the row numbers
 */
#include "gpu/gpu.h"

enum {
    ITEMS = 8,      /* indices per thread of a workgroup that sorts a tile */
    DIGIT_BITS = 8, /* per pass of the sort */
    DIGITS = 256,
    FIRST_CHUNK = 32, /* indices that a team adds in a chain: few, so that there are many teams */
    LATER_CHUNK = 64, /* sums that a team adds in a chain */
    COLUMNS = 4,      /* of a thread */
    MAX_LANES = 64,   /* of a team: 1 KiB of a row of f32 */
    CLEARED = 256,    /* rows, and columns at most, that a workgroup clears */
    MAX_LEVELS = 8    /* 2^31 indices: 2^27, 2^22, 2^17, 2^12, 2^7, 4 */
};

/*
 * A list that is added in chunks, and its offsets in the workspace. Level 0 is the sorted indices, each other what the
 * one before left.
 */
typedef struct level {
    int64_t entries, chunk, chunks;
    size_t row, value; /* of level 0, `value` are its ks */
} level;

typedef struct plan {
    vjp_gather_sizes s;
    int64_t threads, tiles, width, lanes, slices;
    int bits, passes;    /* of the sort; one pass where one workgroup sorts all */
    size_t key[2], k[2]; /* a pass reads one and writes the other */
    size_t counts, totals;
    level level[MAX_LEVELS];
    int levels;
    size_t bytes;
} plan;

/* Bits that hold any of 0 ... n. */
static int bits_for(int64_t n) {
    int bits = 0;
    for (; n; n >>= 1)
        bits++;
    return bits;
}

/* Of a workgroup: a power of two, which teams share; 8 or more, or the device refuses. No result depends on it. */
static int64_t threads_of(const vjp_work *work) {
    int64_t threads = 8;
    while (2 * threads <= gpu_threads(work->device))
        threads *= 2;
    return threads;
}

static size_t take(plan *p, int64_t words) {
    size_t at = p->bytes;
    p->bytes += gpu_scratch_bytes(words, 4);
    return at;
}

static void plan_sort(plan *p) {
    p->tiles = vjp_divide_up(p->s.count, ITEMS * p->threads);
    p->bits = bits_for(p->s.rows); /* `rows` itself means a bad index */
    p->passes = p->tiles > 1 ? (int)vjp_divide_up(p->bits, DIGIT_BITS) : 1;
    for (int i = 0; i < 2; i++) {
        bool used = i == 0 || p->passes > 1;
        p->key[i] = take(p, used ? p->s.count : 0);
        p->k[i] = take(p, used ? p->s.count : 0);
    }
    if (p->tiles == 1) return;
    p->counts = take(p, p->tiles * DIGITS);
    p->totals = take(p, DIGITS);
}

static void plan_sums(plan *p) {
    p->width = vjp_divide_up(p->s.inner, COLUMNS) * COLUMNS;
    p->lanes = gpu_power_of_two(p->width / COLUMNS, vjp_min(MAX_LANES, p->threads));
    p->slices = vjp_divide_up(p->width / COLUMNS, p->lanes);
    int sorted = (p->passes - 1) % 2;
    level l = {p->s.count, FIRST_CHUNK, vjp_divide_up(p->s.count, FIRST_CHUNK), p->key[sorted], p->k[sorted]};
    p->level[p->levels++] = l;
    while (l.chunks > 1 && p->levels < MAX_LEVELS) {
        l.entries = 2 * l.chunks;
        l.chunk = LATER_CHUNK;
        l.chunks = vjp_divide_up(l.entries, LATER_CHUNK);
        l.row = take(p, l.entries);
        l.value = take(p, l.entries * p->s.outer * p->width);
        p->level[p->levels++] = l;
    }
}

static plan plan_of(const vjp_work *work) {
    plan p = {.s = vjp_gather_sizes_of(work), .threads = threads_of(work)};
    if (!p.s.count) return p;
    plan_sort(&p);
    plan_sums(&p);
    return p;
}

/* Members of the shader's Params that a kernel does not use stay 0. */
typedef struct params {
    int64_t shift, shift_end, tiles, entries, chunk, chunks, lanes, slices, tasks, width;
} params;

static gpu_launch begin(const vjp_work *work, const char *kernel, const params *q) {
    vjp_gather_sizes s = vjp_gather_sizes_of(work);
    gpu_launch l = gpu_begin(work, kernel);
    l.threads = (int)threads_of(work);
    const int64_t values[] = {s.outer,    s.rows,   s.inner,   s.count,  q->shift,  q->shift_end, q->tiles,
                              q->entries, q->chunk, q->chunks, q->lanes, q->slices, q->tasks,     q->width};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        gpu_u32(&l, values[i]);
    return l;
}

static vjp_status forward(const vjp_work *work) {
    vjp_gather_sizes s = vjp_gather_sizes_of(work);
    if (!vjp_data(work, GATHER_Y) || s.outer == 0 || s.count == 0 || s.inner == 0) return VJP_OK;
    int64_t elements = vjp_elements(work, GATHER_Y);
    gpu_launch l = begin(work, "forward", &(params){0});
    gpu_tensor(&l, "y", GATHER_Y, elements);
    gpu_fours(&l, "table", GATHER_TABLE, vjp_elements(work, GATHER_TABLE));
    gpu_tensor(&l, "index", GATHER_INDEX, 1);
    gpu_report_bad_index(&l, s.rows);
    vjp_status status = gpu_enqueue(&l, vjp_divide_up(elements, COLUMNS * threads_of(work)));
    return status == VJP_OK ? gpu_explain(work, GATHER_INDEX) : status;
}

/* ---- Backward ---------------------------------------------------------------------------------------- */

/* The input of a pass of the sort: the indices themselves, or the output of the pass before. */
static void bind_keys(const plan *p, gpu_launch *l, int pass) {
    int before = (pass + 1) % 2;
    if (pass == 0) {
        gpu_tensor(l, "index", GATHER_B_INDEX, 1);
        return;
    }
    gpu_scratch(l, "key_in", VJP_I32, p->key[before], p->s.count, false);
    gpu_scratch(l, "k_in", VJP_I32, p->k[before], p->s.count, false);
}

static void bind_sorted(const plan *p, gpu_launch *l, int pass) {
    gpu_scratch(l, "key_out", VJP_I32, p->key[pass % 2], p->s.count, true);
    gpu_scratch(l, "k_out", VJP_I32, p->k[pass % 2], p->s.count, true);
}

static vjp_status sort_few(const vjp_work *work, const plan *p) {
    gpu_launch l = begin(work, "sort_few", &(params){.shift_end = p->bits});
    bind_keys(p, &l, 0);
    bind_sorted(p, &l, 0);
    gpu_report_bad_index(&l, p->s.rows);
    return gpu_enqueue(&l, 1);
}

static vjp_status sort_pass(const vjp_work *work, const plan *p, int pass) {
    int64_t shift = (int64_t)pass * DIGIT_BITS;
    params q = {.shift = shift, .shift_end = vjp_min(shift + DIGIT_BITS, p->bits), .tiles = p->tiles};
    gpu_launch count = begin(work, "count_digits", &q);
    bind_keys(p, &count, pass);
    gpu_scratch(&count, "counts", VJP_I32, p->counts, p->tiles * DIGITS, true);
    if (pass == 0) gpu_report_bad_index(&count, p->s.rows);
    vjp_status status = gpu_enqueue(&count, p->tiles);
    if (status != VJP_OK) return status;

    gpu_launch scan = begin(work, "scan_digits", &q);
    gpu_scratch(&scan, "counts", VJP_I32, p->counts, p->tiles * DIGITS, true);
    gpu_scratch(&scan, "totals", VJP_I32, p->totals, DIGITS, true);
    status = gpu_enqueue(&scan, DIGITS);
    if (status != VJP_OK) return status;

    gpu_launch place = begin(work, "place_keys", &q);
    bind_keys(p, &place, pass);
    bind_sorted(p, &place, pass);
    gpu_scratch(&place, "counts", VJP_I32, p->counts, p->tiles * DIGITS, false);
    gpu_scratch(&place, "totals", VJP_I32, p->totals, DIGITS, false);
    return gpu_enqueue(&place, p->tiles);
}

static vjp_status add_runs(const vjp_work *work, const plan *p, int i) {
    const level *of = &p->level[i];
    params q = {.entries = of->entries,
                .chunk = of->chunk,
                .chunks = of->chunks,
                .lanes = p->lanes,
                .slices = p->slices,
                .tasks = of->chunks * p->slices * p->s.outer,
                .width = p->width};
    gpu_launch l = begin(work, "add_runs", &q);
    gpu_tensor(&l, "dtable", GATHER_B_DTABLE, p->s.inner);
    gpu_scratch(&l, "entry_row", VJP_I32, of->row, of->entries, false);
    if (i == 0) {
        gpu_fours(&l, "dy", GATHER_B_DY, p->s.inner);
        gpu_scratch(&l, "entry_k", VJP_I32, of->value, of->entries, false);
    } else {
        gpu_scratch(&l, "entry_value", VJP_F32, of->value, of->entries * p->s.outer * p->width, false);
    }
    if (i + 1 < p->levels) {
        const level *next = &p->level[i + 1];
        gpu_scratch(&l, "left_row", VJP_I32, next->row, next->entries, true);
        gpu_scratch(&l, "left_value", VJP_F32, next->value, next->entries * p->s.outer * p->width, true);
    }
    return gpu_enqueue(&l, vjp_divide_up(q.tasks, p->threads / p->lanes));
}

static vjp_status clear_rows(const vjp_work *work, const plan *p) {
    int64_t columns = vjp_min(p->s.inner, CLEARED);
    params q = {.entries = p->s.count,
                .chunks = vjp_divide_up(p->s.rows, CLEARED),
                .lanes = gpu_power_of_two(vjp_divide_up(columns, 2), p->threads),
                .slices = vjp_divide_up(p->s.inner, CLEARED)};
    gpu_launch l = begin(work, "clear_rows", &q);
    gpu_tensor(&l, "dtable", GATHER_B_DTABLE, p->s.inner);
    if (p->s.count) gpu_scratch(&l, "entry_row", VJP_I32, p->level[0].row, p->s.count, false);
    return gpu_enqueue(&l, q.chunks * q.slices * p->s.outer);
}

static bool is_empty(const vjp_work *work) {
    return !work->tensor[GATHER_B_DTABLE] || vjp_elements(work, GATHER_B_DTABLE) == 0;
}

static vjp_status backward(const vjp_work *work) {
    if (is_empty(work)) return VJP_OK;
    plan p = plan_of(work);
    vjp_status status = VJP_OK;
    if (p.tiles == 1) status = sort_few(work, &p);
    for (int pass = 0; p.tiles > 1 && pass < p.passes && status == VJP_OK; pass++)
        status = sort_pass(work, &p, pass);
    if (status == VJP_OK && !vjp_accumulates(work, GATHER_B_DTABLE)) status = clear_rows(work, &p);
    for (int i = 0; i < p.levels && status == VJP_OK; i++)
        status = add_runs(work, &p, i);
    return status == VJP_OK && p.s.count ? gpu_explain(work, GATHER_B_INDEX) : status;
}

static size_t workspace(const vjp_work *work) {
    return is_empty(work) ? 0 : plan_of(work).bytes;
}

const vjp_kernel gpu_gather[VJP_PASS_COUNT] = {{forward, NULL, VJP_STORAGE_16_32},
                                               {backward, workspace, VJP_STORAGE_16_32}};

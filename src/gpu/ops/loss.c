/* SPDX-License-Identifier: MIT */
/*
 * See loss.h.
 *
 *     launch    when                                   what
 *     `count`   before the gradients of a mean         how many rows take part, one count per workgroup
 *     `rows`    once per GPU_CHUNK logits              losses, lse and gradients of whole rows
 *     `finish`  where `rows` had several workgroups    adds their losses; one workgroup alone stores the loss itself
 *     `explain` last                                   the value of the first bad target (gpu_explain())
 *
 * All splits follow from sizes and the device's threads per workgroup.
 */
#include "gpu/ops/loss.h"

enum {
    LANE_LOGITS = 16, /* of a thread, at least: with 4, 512 rows of 1024 take lavapipe 5 times as long, for barriers */
    PARTIAL = 6,      /* f32 of a chunk's losses, as in loss.wgsl */
    CHUNKS = 2048,    /* of rows per launch, at most: enough for a large GPU, and few sums to add */
    COUNT_CHUNKS = 256,          /* counts per launch, at most: every workgroup of `rows` adds them again */
    COUNT_ROWS = 4,              /* of a thread of `count`, before there are more workgroups */
    COUNT_LAUNCH = GPU_CHUNK / 2 /* rows per launch: 64 MiB of i64 */
};

/* Of a workgroup: the largest power of two that the device has. */
static int64_t threads_of(const vjp_work *work) {
    return gpu_power_of_two(gpu_threads(work->device) / 2 + 1, GPU_THREADS);
}

typedef struct split {
    int64_t threads, lanes;
    int64_t launch_rows; /* in each launch but the last */
} split;

static split split_of(const vjp_work *work, int64_t width) {
    split c = {.threads = threads_of(work), .launch_rows = vjp_max(1, GPU_CHUNK / width)};
    c.lanes = gpu_power_of_two(vjp_divide_up(width, LANE_LOGITS), c.threads);
    return c;
}

/* Rows of a workgroup where a launch has `rows`: a multiple of its teams. */
static int64_t chunk_of(const split *c, int64_t rows) {
    int64_t teams = c->threads / c->lanes;
    return vjp_max(1, vjp_divide_up(vjp_divide_up(rows, CHUNKS), teams)) * teams;
}

static int64_t chunks_of(const split *c, int64_t rows) {
    return vjp_divide_up(rows, chunk_of(c, rows));
}

int64_t gpu_loss_partials(const vjp_work *work, int64_t rows, int64_t width) {
    split c = split_of(work, width);
    return rows / c.launch_rows * chunks_of(&c, c.launch_rows) + chunks_of(&c, rows % c.launch_rows);
}

size_t gpu_loss_partials_bytes(int64_t partials) {
    return gpu_scratch_bytes(partials * PARTIAL, sizeof(float));
}

static int64_t counts_of(const gpu_loss *c, int64_t rows) {
    return vjp_min(COUNT_CHUNKS, vjp_divide_up(rows, COUNT_ROWS * threads_of(c->work)));
}

size_t gpu_loss_plan_counts(gpu_loss *c) {
    if (c->s.mean)
        c->counts = c->s.rows / COUNT_LAUNCH * counts_of(c, COUNT_LAUNCH) + counts_of(c, c->s.rows % COUNT_LAUNCH);
    return gpu_scratch_bytes(c->counts, sizeof(uint32_t));
}

/* Members of the shader's Params that a kernel does not use stay 0. */
typedef struct params {
    int64_t first_row, rows, width, first_class, lanes, chunk_rows, first_partial, counts;
} params;

static gpu_launch begin(const gpu_loss *c, const char *kernel, const params *q) {
    gpu_launch l = gpu_begin(c->work, kernel);
    uint64_t ignore = (uint64_t)c->s.ignore_index;
    l.shader = "loss";
    l.threads = (int)threads_of(c->work);
    gpu_constant(&l, "SMOOTH", c->s.smoothing != 0);
    gpu_u32(&l, q->first_row);
    gpu_u32(&l, q->rows);
    gpu_u32(&l, q->width);
    gpu_u32(&l, q->first_class);
    gpu_u32(&l, c->s.classes);
    gpu_u32(&l, q->lanes);
    gpu_u32(&l, q->chunk_rows);
    gpu_u32(&l, q->first_partial);
    gpu_u32(&l, c->partials);
    gpu_u32(&l, q->counts);
    gpu_u32(&l, (int64_t)(ignore & UINT32_MAX));
    gpu_u32(&l, (int64_t)(ignore >> 32));
    gpu_u32(&l, c->s.mean);
    gpu_u32(&l, 0); /* a zero that compilers cannot know */
    gpu_f32(&l, 1 - c->s.smoothing);
    gpu_f32(&l, c->s.elsewhere);
    gpu_f32(&l, 1 - c->s.at_target);
    return l;
}

static void bind_target(gpu_launch *l, const gpu_loss *c, int64_t first, int64_t rows) {
    gpu_tensor(l, "target", c->target, 1);
    gpu_part(l, first, rows);
}

vjp_status gpu_loss_count(const gpu_loss *c) {
    vjp_status status = VJP_OK;
    int64_t done = 0;
    for (int64_t first = 0; first < c->s.rows && c->counts && status == VJP_OK; first += COUNT_LAUNCH) {
        int64_t rows = vjp_min(COUNT_LAUNCH, c->s.rows - first), groups = counts_of(c, rows);
        gpu_launch l = begin(c, "count", &(params){.rows = rows, .first_partial = done, .counts = groups});
        bind_target(&l, c, first, rows);
        gpu_scratch(&l, "counts", VJP_I32, c->counts_at, c->counts, true);
        status = gpu_enqueue(&l, groups);
        done += groups;
    }
    return status;
}

/* Rows [first, first + rows) of the range. */
static vjp_status run_part(const gpu_loss *c, const gpu_loss_rows *r, const split *s, int64_t first, int64_t rows,
                           int64_t first_partial) {
    const gpu_matrix absent = {.place = GPU_NOWHERE};
    bool gives_loss = c->loss.place && !r->lse_in.place, alone = c->partials == 1;
    gpu_matrix logits = gpu_matrix_slice(&r->logits, first * r->width, rows * r->width);
    gpu_matrix dlogits = gpu_matrix_slice(&r->dlogits, first * r->width, rows * r->width);
    gpu_matrix lse = gpu_matrix_slice(&r->lse, first, rows), lse_in = gpu_matrix_slice(&r->lse_in, first, rows);
    gpu_matrix partials = gpu_matrix_scratch(c->partials_at, c->partials * PARTIAL);
    params q = {.first_row = r->first_row + first,
                .rows = rows,
                .width = r->width,
                .first_class = r->first_class,
                .lanes = s->lanes,
                .chunk_rows = chunk_of(s, rows),
                .first_partial = first_partial,
                .counts = c->counts};
    gpu_launch l = begin(c, "rows", &q);
    gpu_matrix_bind(&l, "logits", &logits, r->width, false);
    gpu_matrix_bind(&l, "dlogits", &dlogits, r->width, true);
    gpu_matrix_bind(&l, "lse", &lse, 1, true);
    gpu_matrix_bind(&l, "lse_in", &lse_in, 1, false);
    gpu_matrix_bind(&l, "loss", gives_loss && alone ? &c->loss : &absent, 1, true);
    gpu_matrix_bind(&l, "partials", gives_loss && !alone ? &partials : &absent, 1, true);
    gpu_matrix_bind(&l, "dloss", &c->dloss, 1, false);
    bind_target(&l, c, r->first_row + first, rows);
    gpu_scratch(&l, "counts", VJP_I32, c->counts_at, r->dlogits.place ? c->counts : 0, false);
    gpu_report_bad_index(&l, c->s.classes);
    return gpu_enqueue(&l, chunks_of(s, rows));
}

vjp_status gpu_loss_run(const gpu_loss *c, const gpu_loss_rows *r) {
    split s = split_of(c->work, r->width);
    int64_t partial = r->first_partial;
    vjp_status status = VJP_OK;
    for (int64_t first = 0; first < r->rows && status == VJP_OK; first += s.launch_rows) {
        int64_t rows = vjp_min(s.launch_rows, r->rows - first);
        status = run_part(c, r, &s, first, rows, partial);
        partial += chunks_of(&s, rows);
    }
    return status;
}

vjp_status gpu_loss_finish(const gpu_loss *c) {
    vjp_status status = VJP_OK;
    if (c->loss.place && c->partials != 1) {
        gpu_matrix partials = gpu_matrix_scratch(c->partials_at, c->partials * PARTIAL);
        gpu_launch l = begin(c, "finish", &(params){0});
        gpu_matrix_bind(&l, "loss", &c->loss, 1, true);
        gpu_matrix_bind(&l, "partials", &partials, 1, false);
        status = gpu_enqueue(&l, 1);
    }
    return status == VJP_OK ? gpu_explain(c->work, c->target) : status;
}

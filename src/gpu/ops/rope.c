/* SPDX-License-Identifier: MIT */
/*
 * rope: the first n_rot elements of each head are pairs, rotated by the angle of their position; the rest of the head
 * is copied. A thread has four pairs, whose angles it keeps for up to HEADS heads of a time. One launch per GPU_CHUNK
 * elements, with those between rows that lie apart, and where positions are given one more, of a single group, that
 * records the value of a bad one. The kernels are in rope.wgsl and rope.metal.
 */
#include "gpu/gpu.h"

enum {
    PAIRS = 4,    /* of a thread: 16 bytes of each half in f32 */
    HEADS = 4,    /* that share a thread's angles */
    REST_STEP = 8 /* elements that a thread copies */
};

/*
 * The largest power of two that every run of a head starts at a multiple of. With pairs of halves a run also starts at
 * n_rot / 2.
 */
static int64_t run_of(const vjp_rope_sizes *s, bool interleaved) {
    int64_t bits = interleaved ? s->head_dim : s->head_dim | (s->n_rot / 2);
    return bits & -bits;
}

/* Rows (batch x time) [first, end). */
static vjp_status rotate_rows(const vjp_work *work, const vjp_rope_sizes *s, int64_t first, int64_t end) {
    const vjp_rope_attributes *a = work->attributes;
    bool interleaved = a->pairing == VJP_PAIRING_INTERLEAVED;
    /* In place, the rest is there already. */
    bool stays = vjp_data(work, ROPE_Y) == vjp_data(work, ROPE_X) && !vjp_accumulates(work, ROPE_Y);
    int64_t pairs = s->n_rot / 2, rotating = vjp_divide_up(pairs, PAIRS);
    int64_t tasks = rotating + (stays ? 0 : vjp_divide_up(s->head_dim - s->n_rot, REST_STEP));
    int64_t head_sets = vjp_divide_up(s->heads, HEADS), threads = (end - first) * head_sets * tasks;
    gpu_launch l = gpu_begin(work, "rotate_heads");
    l.threads = gpu_threads(work->device);
    gpu_constant(&l, "INTERLEAVED", interleaved);
    gpu_constant(&l, "HEADS", HEADS);
    gpu_tensor(&l, "y", ROPE_Y, run_of(s, interleaved));
    gpu_rows(&l, ROPE_Y, first, end - first);
    gpu_fours(&l, "x", ROPE_X, run_of(s, interleaved));
    gpu_rows(&l, ROPE_X, first, end - first);
    gpu_fours(&l, "cosine", ROPE_COSINE, pairs);
    gpu_fours(&l, "sine", ROPE_SINE, pairs);
    if (work->tensor[ROPE_POSITIONS]) {
        gpu_tensor(&l, "positions", ROPE_POSITIONS, 1);
        gpu_report_bad_index(&l, s->table_rows);
    }
    gpu_u32(&l, threads);
    gpu_u32(&l, first);
    gpu_u32(&l, tasks);
    gpu_u32(&l, rotating);
    gpu_u32(&l, head_sets);
    gpu_u32(&l, s->heads);
    gpu_u32(&l, s->head_dim);
    gpu_u32(&l, vjp_step(work, ROPE_Y));
    gpu_u32(&l, vjp_step(work, ROPE_X));
    gpu_u32(&l, pairs);
    gpu_u32(&l, s->time);
    gpu_u32(&l, s->table_rows);
    gpu_u32(&l, s->position_stride);
    gpu_f32(&l, work->pass == VJP_BACKWARD ? -1 : 1);
    return gpu_enqueue(&l, vjp_divide_up(threads, l.threads));
}

static vjp_status rotate(const vjp_work *work) {
    vjp_rope_sizes s = vjp_rope_sizes_of(work);
    int64_t rows = s.batch * s.time;
    if (!vjp_data(work, ROPE_Y) || rows == 0 || s.heads == 0 || s.head_dim == 0) return VJP_OK;
    int64_t each = vjp_max(1, GPU_CHUNK / vjp_max(vjp_step(work, ROPE_Y), vjp_step(work, ROPE_X)));
    vjp_status status = VJP_OK;
    for (int64_t first = 0; first < rows && status == VJP_OK; first += each)
        status = rotate_rows(work, &s, first, vjp_min(first + each, rows));
    if (status != VJP_OK || !work->tensor[ROPE_POSITIONS]) return status;
    return gpu_explain(work, ROPE_POSITIONS);
}

const vjp_kernel gpu_rope[VJP_PASS_COUNT] = {{rotate, NULL, VJP_STORAGE_16_32 | VJP_TAKES_ROWS},
                                             {rotate, NULL, VJP_STORAGE_16_32 | VJP_TAKES_ROWS}};

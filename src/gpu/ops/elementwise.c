/* SPDX-License-Identifier: MIT */
/* See elementwise.h. One launch per GPU_CHUNK elements, which every device can bind at once. */
#include "gpu/ops/elementwise.h"

enum {
    FOUR = 4,       /* elements of a thread at a time */
    ENOUGH = 1024,  /* workgroups that keep a large GPU busy: beyond, a thread has several fours */
    MAX_ROUNDS = 8, /* fours of a thread, which share what it reads and derives first */
    UNUSED = 3      /* numbers before the op's own, which start at a multiple of four */
};

/* Elements [first, first + count). */
static vjp_status run_part(const vjp_work *work, const gpu_elements *e, int64_t all, int64_t first, int64_t count) {
    gpu_launch l = gpu_begin(work, "elements");
    l.threads = gpu_threads(work->device);
    l.merge = GPU_BESIDE;
    gpu_constant(&l, "BACKWARD", work->pass == VJP_BACKWARD);
    for (const gpu_element_operand *o = e->operand; o < e->operand + GPU_ELEMENT_OPERANDS && o->name; o++) {
        gpu_fours(&l, o->name, o->slot, all);
        gpu_part(&l, first, count);
    }
    if (e->span) gpu_fours(&l, "row", e->row, e->inner);
    int64_t step = FOUR * (int64_t)l.threads, fours = vjp_divide_up(count, step);
    int64_t rounds = vjp_max(1, vjp_min(fours / ENOUGH, MAX_ROUNDS));
    gpu_u32(&l, count);
    gpu_u32(&l, first);
    gpu_u32(&l, rounds);
    gpu_u32(&l, vjp_max(e->inner, 1));
    gpu_u32(&l, vjp_max(e->span, 1));
    for (int i = 0; i < UNUSED; i++)
        gpu_u32(&l, 0);
    if (e->more) e->more(&l);
    return gpu_enqueue(&l, vjp_divide_up(fours, rounds));
}

vjp_status gpu_run_elements(const vjp_work *work, const gpu_elements *e) {
    int64_t count = vjp_elements(work, e->operand[0].slot);
    bool wanted = e->reports;
    for (const gpu_element_operand *o = e->operand; o < e->operand + GPU_ELEMENT_OPERANDS && o->name; o++)
        wanted = wanted || ((vjp_slot_at(work, o->slot)->flags & VJP_SLOT_OUTPUT) && vjp_data(work, o->slot));
    vjp_status status = VJP_OK;
    for (int64_t first = 0; wanted && first < count && status == VJP_OK; first += GPU_CHUNK)
        status = run_part(work, e, count, first, vjp_min(GPU_CHUNK, count - first));
    return status;
}

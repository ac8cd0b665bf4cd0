/*
 * What the optimizers' steps share: all elements, in tasks, for each pair of storage types and both kinds of stores.
 * Included by a file that has said what a step is: the type step_call, with the members `mode` and `cut`, and
 *
 *     INLINE void step_vector(const step_call *c, int64_t i, int64_t n, vjp_dtype dtype, vjp_dtype g_type,
 *                             write_mode mode);
 *
 * for elements [i, i + n), n up to LANES.
 */
#ifndef VJP_CPU_STEPS_H
#define VJP_CPU_STEPS_H

INLINE void step_task(const step_call *c, size_t task, vjp_dtype dtype, vjp_dtype g_type, write_mode mode) {
    int64_t i = cpu_cut_begin(&c->cut, task), end = cpu_cut_end(&c->cut, task);
    for (; i + LANES <= end; i += LANES)
        step_vector(c, i, LANES, dtype, g_type, mode);
    if (i < end) step_vector(c, i, end - i, dtype, g_type, mode);
    if (mode == WRITE_STREAM) vf_stream_done();
}

INLINE void step_by_mode(const step_call *c, size_t task, vjp_dtype dtype, vjp_dtype g_type) {
    if (c->mode == WRITE_STREAM)
        step_task(c, task, dtype, g_type, WRITE_STREAM);
    else
        step_task(c, task, dtype, g_type, WRITE_PLAIN);
}

static void step_f32(void *call, size_t task) {
    step_by_mode(call, task, VJP_F32, VJP_F32);
}

static void step_bf16(void *call, size_t task) {
    step_by_mode(call, task, VJP_BF16, VJP_BF16);
}

static void step_bf16_f32(void *call, size_t task) {
    step_by_mode(call, task, VJP_BF16, VJP_F32);
}

static void step_f16(void *call, size_t task) {
    step_by_mode(call, task, VJP_F16, VJP_F16);
}

static void step_f16_f32(void *call, size_t task) {
    step_by_mode(call, task, VJP_F16, VJP_F32);
}

/* All `count` elements, of which each moves `moved` bytes. g is stored as w is, or in f32. */
static void run_steps(const vjp_work *work, step_call *call, vjp_dtype g_type, int64_t count, int64_t moved) {
    static const vjp_task tasks[][2] = {[VJP_F32] = {step_f32, step_f32},
                                        [VJP_BF16] = {step_bf16, step_bf16_f32},
                                        [VJP_F16] = {step_f16, step_f16_f32}};
    call->cut = cpu_cut_elements(count, moved, CPU_MOST_TASKS);
    vjp_cpu_for(work, call->cut.count, tasks[work->storage][g_type != work->storage], call);
}

#endif

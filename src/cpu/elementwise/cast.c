/*
 * cast on the CPU: every storage type to every other, at the speed of memory. The loads and stores of vec.h convert,
 * and they round to nearest even; there is nothing between them. The backward is the forward with dy for x.
 */
#include "cpu/elementwise/elementwise.h"
#include "op/op.h"

extern const vjp_kernel CPU_NAME(cast)[VJP_PASS_COUNT];

typedef struct cast_call {
    void *y;
    const void *x;
    vjp_dtype to;
    write_mode mode;
    element_cut cut;
} cast_call;

INLINE vf same(const void *call, element_variant v, int64_t i, int64_t j, int64_t n) {
    const cast_call *c = call;
    (void)j;
    return vf_load_part(v.dtype, c->x, i, n);
}

INLINE void cast_to(const cast_call *c, size_t task, vjp_dtype from, vjp_dtype to) {
    element_variant v = {.dtype = from};
    element_walk(c->mode, to, same, c, v, c->y, element_begin(&c->cut, task), element_end(&c->cut, task), 0);
    if (c->mode == WRITE_STREAM) vf_stream_done();
}

INLINE void cast_from(const void *call, size_t task, vjp_dtype from) {
    const cast_call c = *(const cast_call *)call;
    switch (c.to) {
    case VJP_BF16: cast_to(&c, task, from, VJP_BF16); break;
    case VJP_F16: cast_to(&c, task, from, VJP_F16); break;
    default: cast_to(&c, task, from, VJP_F32); break;
    }
}

static void cast_f32(void *call, size_t task) {
    cast_from(call, task, VJP_F32);
}

static void cast_bf16(void *call, size_t task) {
    cast_from(call, task, VJP_BF16);
}

static void cast_f16(void *call, size_t task) {
    cast_from(call, task, VJP_F16);
}

static vjp_status run(const vjp_work *work) {
    static const vjp_task tasks[] = {[VJP_F32] = cast_f32, [VJP_BF16] = cast_bf16, [VJP_F16] = cast_f16};
    int64_t count = vjp_shape_product(&work->shape[CAST_X], 0, work->shape[CAST_X].ndim);
    cast_call call = {.y = vjp_data(work, CAST_Y), .x = vjp_data(work, CAST_X), .to = vjp_type(work, CAST_Y)};
    if (!call.y || count == 0) return VJP_OK;
    call.mode = element_mode(work, CAST_Y, count, false);
    call.cut = element_cut_of(count, dtype_bytes(work->storage) + dtype_bytes(call.to));
    vjp_cpu_for(work, call.cut.units.count, tasks[work->storage], &call);
    return VJP_OK;
}

const vjp_kernel CPU_NAME(cast)[VJP_PASS_COUNT] = {
    {run, NULL, VJP_BITS_CPU},
    {run, NULL, VJP_BITS_CPU},
};

/* scale on the CPU: one product an element, at the speed of memory. The backward is the forward with dy for x. */
#include "cpu/elementwise/elementwise.h"
#include "op/op.h"

extern const vjp_kernel CPU_NAME(scale)[VJP_PASS_COUNT];

typedef struct scale_call {
    void *y;
    const void *x;
    float factor;
    write_mode mode;
    element_cut cut;
} scale_call;

INLINE vf scaled(const void *call, element_variant v, int64_t i, int64_t j, int64_t n) {
    const scale_call *c = call;
    (void)j;
    return vf_mul(vf_set(c->factor), vf_load_part(v.dtype, c->x, i, n));
}

INLINE void scale_task(const void *call, size_t task, vjp_dtype dtype) {
    const scale_call c = *(const scale_call *)call;
    element_variant v = {.dtype = dtype};
    element_walk(c.mode, dtype, scaled, &c, v, c.y, element_begin(&c.cut, task), element_end(&c.cut, task), 0);
    if (c.mode == WRITE_STREAM) vf_stream_done();
}

static void scale_f32(void *call, size_t task) {
    scale_task(call, task, VJP_F32);
}

static void scale_bf16(void *call, size_t task) {
    scale_task(call, task, VJP_BF16);
}

static void scale_f16(void *call, size_t task) {
    scale_task(call, task, VJP_F16);
}

static vjp_status run(const vjp_work *work) {
    static const vjp_task tasks[] = {[VJP_F32] = scale_f32, [VJP_BF16] = scale_bf16, [VJP_F16] = scale_f16};
    const vjp_scale_attributes *attributes = work->attributes;
    int64_t count = vjp_shape_product(&work->shape[SCALE_X], 0, work->shape[SCALE_X].ndim);
    scale_call call = {.y = vjp_data(work, SCALE_Y), .x = vjp_data(work, SCALE_X), .factor = (float)attributes->factor};
    if (!call.y || count == 0) return VJP_OK;
    call.mode = element_mode(work, SCALE_Y, count, call.x == call.y);
    call.cut = element_cut_of(count, 2 * dtype_bytes(work->storage));
    vjp_cpu_for(work, call.cut.units.count, tasks[work->storage], &call);
    return VJP_OK;
}

const vjp_kernel CPU_NAME(scale)[VJP_PASS_COUNT] = {
    {run, NULL, VJP_BITS_CPU},
    {run, NULL, VJP_BITS_CPU},
};

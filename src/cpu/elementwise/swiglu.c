/*
 * swiglu on the CPU: one walk over all tensors, a vector of each at a time. All inputs of a vector are read before an
 * output is written, so an output may be any input's memory. silu and its derivative share one exp.
 */
#include "cpu/elementwise/activation.h"
#include "cpu/simd/stream.h"
#include "op/op.h"

extern const vjp_kernel CPU_NAME(swiglu)[VJP_PASS_COUNT];

/* Elements that a task gets at least and is cut at: whole vectors, so that streaming stores stay aligned. */
enum { PIECE = 1024 };

typedef struct swiglu_call {
    int64_t count;
    vjp_dtype dtype;
    write_mode mode[2];
    void *out[2]; /* forward: y; backward: dgate, dup; NULL where not wanted */
    const void *dy, *gate, *up;
    cpu_cut cut; /* of pieces */
} swiglu_call;

INLINE void forward_vector(const swiglu_call *call, vjp_dtype dtype, write_mode mode, int64_t i, int64_t n) {
    vf gate = vf_load_part(dtype, call->gate, i, n), up = vf_load_part(dtype, call->up, i, n);
    vf_write_part(mode, dtype, call->out[0], i, n, vf_mul(activate(VJP_ACTIVATION_SILU, gate), up));
}

/* The slope first, which may be 0: dy * up alone may be past all range. */
INLINE void backward_vector(const swiglu_call *call, vjp_dtype dtype, write_mode gate_mode, write_mode up_mode,
                            int64_t i, int64_t n) {
    vf dy = vf_load_part(dtype, call->dy, i, n), gate = vf_load_part(dtype, call->gate, i, n);
    vf up = vf_load_part(dtype, call->up, i, n), slope, silu = silu_and_slope(gate, &slope);
    if (call->out[0]) vf_write_part(gate_mode, dtype, call->out[0], i, n, vf_mul(vf_mul(slope, dy), up));
    if (call->out[1]) vf_write_part(up_mode, dtype, call->out[1], i, n, vf_mul(dy, silu));
}

INLINE void forward_walk(const swiglu_call *call, size_t task, vjp_dtype dtype, write_mode mode) {
    int64_t i = cpu_cut_begin(&call->cut, task) * PIECE, end = cpu_cut_end(&call->cut, task) * PIECE;
    if (end > call->count) end = call->count;
    for (; i + LANES <= end; i += LANES)
        forward_vector(call, dtype, mode, i, LANES);
    if (i < end) forward_vector(call, dtype, mode, i, end - i);
    if (mode == WRITE_STREAM) vf_stream_done();
}

INLINE void backward_walk(const swiglu_call *call, size_t task, vjp_dtype dtype, write_mode gate_mode,
                          write_mode up_mode) {
    int64_t i = cpu_cut_begin(&call->cut, task) * PIECE, end = cpu_cut_end(&call->cut, task) * PIECE;
    if (end > call->count) end = call->count;
    for (; i + LANES <= end; i += LANES)
        backward_vector(call, dtype, gate_mode, up_mode, i, LANES);
    if (i < end) backward_vector(call, dtype, gate_mode, up_mode, i, end - i);
    if (gate_mode == WRITE_STREAM || up_mode == WRITE_STREAM) vf_stream_done();
}

INLINE void forward_task(const swiglu_call *call, size_t task, vjp_dtype dtype) {
    switch (call->mode[0]) {
    case WRITE_STREAM: forward_walk(call, task, dtype, WRITE_STREAM); break;
    case WRITE_ADD: forward_walk(call, task, dtype, WRITE_ADD); break;
    default: forward_walk(call, task, dtype, WRITE_PLAIN); break;
    }
}

/* Both outputs are alike as a rule; what is not goes by modes that are looked up at each vector. */
INLINE void backward_task(const swiglu_call *call, size_t task, vjp_dtype dtype) {
    if (call->mode[0] == WRITE_STREAM && call->mode[1] == WRITE_STREAM)
        backward_walk(call, task, dtype, WRITE_STREAM, WRITE_STREAM);
    else
        backward_walk(call, task, dtype, call->mode[0], call->mode[1]);
}

static void forward_f32(void *call, size_t task) {
    forward_task(call, task, VJP_F32);
}

static void forward_bf16(void *call, size_t task) {
    forward_task(call, task, VJP_BF16);
}

static void forward_f16(void *call, size_t task) {
    forward_task(call, task, VJP_F16);
}

static void backward_f32(void *call, size_t task) {
    backward_task(call, task, VJP_F32);
}

static void backward_bf16(void *call, size_t task) {
    backward_task(call, task, VJP_BF16);
}

static void backward_f16(void *call, size_t task) {
    backward_task(call, task, VJP_F16);
}

/* An output that lies in the place of an input is in the caches when it is written. */
static void set_output(const vjp_work *work, swiglu_call *call, int output) {
    void *data = call->out[output] = vjp_data(work, output);
    bool in_place = data == call->dy || data == call->gate || data == call->up;
    int64_t bytes = call->count * (int64_t)dtype_bytes(work->storage);
    call->mode[output] = write_mode_of(work, output, bytes, vf_stream_aligned(work->storage, data), in_place);
}

static void cut(swiglu_call *call, int tensors) {
    int64_t pieces = (call->count + PIECE - 1) / PIECE;
    call->cut = vjp_cpu_cut_items(pieces, (int64_t)PIECE * 4 * tensors, CPU_MOST_TASKS);
}

static vjp_status forward(const vjp_work *work) {
    static const vjp_task tasks[] = {[VJP_F32] = forward_f32, [VJP_BF16] = forward_bf16, [VJP_F16] = forward_f16};
    const vjp_shape *shape = &work->shape[SWIGLU_GATE];
    swiglu_call call = {
        .count = vjp_shape_product(shape, 0, shape->ndim),
        .gate = vjp_data(work, SWIGLU_GATE),
        .up = vjp_data(work, SWIGLU_UP),
    };
    set_output(work, &call, SWIGLU_Y);
    if (!call.out[0]) return VJP_OK;
    cut(&call, 3);
    vjp_cpu_for(work, call.cut.count, tasks[work->storage], &call);
    return VJP_OK;
}

static vjp_status backward(const vjp_work *work) {
    static const vjp_task tasks[] = {[VJP_F32] = backward_f32, [VJP_BF16] = backward_bf16, [VJP_F16] = backward_f16};
    const vjp_shape *shape = &work->shape[SWIGLU_B_GATE];
    swiglu_call call = {
        .count = vjp_shape_product(shape, 0, shape->ndim),
        .dy = vjp_data(work, SWIGLU_B_DY),
        .gate = vjp_data(work, SWIGLU_B_GATE),
        .up = vjp_data(work, SWIGLU_B_UP),
    };
    set_output(work, &call, SWIGLU_B_DGATE);
    set_output(work, &call, SWIGLU_B_DUP);
    if (!call.out[0] && !call.out[1]) return VJP_OK;
    cut(&call, 5);
    vjp_cpu_for(work, call.cut.count, tasks[work->storage], &call);
    return VJP_OK;
}

const vjp_kernel CPU_NAME(swiglu)[VJP_PASS_COUNT] = {
    {forward, NULL, VJP_BITS_CPU},
    {backward, NULL, VJP_BITS_CPU},
};

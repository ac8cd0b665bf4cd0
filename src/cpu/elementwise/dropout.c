/*
 * dropout on the CPU: the generator's words for a few dozen elements at a time (philox.h), compared as integers, then
 * the products that are kept. The backward is the forward with dy for x: the same words, the same elements.
 */
#include "cpu/elementwise/elementwise.h"
#include "cpu/simd/philox.h"
#include "op/op.h"

extern const vjp_kernel CPU_NAME(dropout)[VJP_PASS_COUNT];

_Static_assert(ELEMENT_UNIT % PHILOX_ELEMENTS == 0, "a task begins with a whole batch of words");

typedef struct dropout_call {
    void *y;
    const void *x;
    vjp_dropout_key key;
    uint32_t threshold;
    float factor;
    write_mode mode;
    element_cut cut;
} dropout_call;

/* Vector k of a batch: x * factor where the word is not below the threshold, else zero. */
INLINE vf kept(const dropout_call *c, const native_u *words, int k, vf x) {
    vf r = vf_mul(x, vf_set(c->factor));
    native_u threshold = c->threshold - (native_u){0};
    EACH_PART r.v[p] = (native_f)((native_i)(words[k * PARTS + p] >= threshold) & (native_i)r.v[p]);
    return r;
}

INLINE void dropout_elements(const dropout_call *c, size_t task, vjp_dtype dtype, write_mode mode) {
    int64_t end = element_end(&c->cut, task), i = element_begin(&c->cut, task);
    native_u words[2 * PHILOX_GROUPS];
    philox_rounds rounds;
    philox_rounds_make(&rounds, &c->key);
    for (; i + PHILOX_ELEMENTS <= end; i += PHILOX_ELEMENTS) {
        philox_words(&rounds, (uint64_t)i / 4, words);
        for (int k = 0; k < PHILOX_VECTORS; k++)
            vf_write(mode, dtype, c->y, i + k * LANES, kept(c, words, k, vf_load(dtype, c->x, i + k * LANES)));
    }
    if (i == end) return;
    philox_words(&rounds, (uint64_t)i / 4, words);
    for (int k = 0; k < PHILOX_VECTORS && i + k * LANES < end; k++) {
        int64_t at = i + k * LANES, n = end - at < LANES ? end - at : LANES;
        vf_write_part(mode, dtype, c->y, at, n, kept(c, words, k, vf_load_part(dtype, c->x, at, n)));
    }
}

INLINE void dropout_task(const void *call, size_t task, vjp_dtype dtype) {
    const dropout_call c = *(const dropout_call *)call;
    switch (c.mode) {
    case WRITE_STREAM:
        dropout_elements(&c, task, dtype, WRITE_STREAM);
        vf_stream_done();
        break;
    case WRITE_ADD: dropout_elements(&c, task, dtype, WRITE_ADD); break;
    default: dropout_elements(&c, task, dtype, WRITE_PLAIN); break;
    }
}

static void dropout_f32(void *call, size_t task) {
    dropout_task(call, task, VJP_F32);
}

static void dropout_bf16(void *call, size_t task) {
    dropout_task(call, task, VJP_BF16);
}

static void dropout_f16(void *call, size_t task) {
    dropout_task(call, task, VJP_F16);
}

static vjp_status run(const vjp_work *work) {
    static const vjp_task tasks[] = {[VJP_F32] = dropout_f32, [VJP_BF16] = dropout_bf16, [VJP_F16] = dropout_f16};
    const vjp_dropout_attributes *attributes = work->attributes;
    int64_t count = vjp_shape_product(&work->shape[DROPOUT_X], 0, work->shape[DROPOUT_X].ndim);
    size_t size = dtype_bytes(work->storage);
    dropout_call call = {.y = vjp_data(work, DROPOUT_Y),
                         .x = vjp_data(work, DROPOUT_X),
                         .threshold = vjp_dropout_threshold(attributes->p),
                         .factor = (float)(1 / (1 - attributes->p))};
    if (!call.y || count == 0) return VJP_OK;
    call.key = vjp_dropout_key_read(work);
    bool aligned = vf_stream_aligned(work->storage, call.y);
    call.mode = write_mode_of(work, DROPOUT_Y, count * (int64_t)size, aligned, call.x == call.y);
    call.cut = element_cut_of(count, 2 * size);
    vjp_cpu_for(work, call.cut.units.count, tasks[work->storage], &call);
    return VJP_OK;
}

const vjp_kernel CPU_NAME(dropout)[VJP_PASS_COUNT] = {
    {run, NULL, VJP_BITS_CPU},
    {run, NULL, VJP_BITS_CPU},
};

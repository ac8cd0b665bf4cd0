/* SPDX-License-Identifier: MIT */
/*
 * rope on the CPU. Each head's first n_rot elements are pairs (x0, x1), which turn by the angle of their position:
 * y0 = x0 c - x1 s, y1 = x1 c + x0 s; the rest of the head passes through. The backward is the same with -s.
 *
 * All heads of one time share their angles, so a block of the tables' row is first converted to f32 on the stack, with
 * the sign of s that the pass and the pairing need, and then every head is rotated by it. For interleaved pairs the
 * block holds c c and -s s, and a rotation is one swap of neighbours, a product and an FMA. Each output is
 * FMA(its partner, +-s, product of itself and c) for both pairings.
 *
 * Both elements of a pair are read before either is written, so y may be x.
 */
#include "core/arithmetic.h"
#include "cpu/dispatch.h"
#include "cpu/simd/shuffle.h"
#include "cpu/simd/stream.h"
#include "op/op.h"

/* Pairs whose angles are on the stack at once: 4 KiB of f32, and more than any usual head has. */
enum { ANGLE_BLOCK = 256 };

typedef struct angles {
    float cosine[2 * ANGLE_BLOCK], sine[2 * ANGLE_BLOCK];
} angles;

typedef struct rope_call {
    vjp_rope_sizes s;
    bool interleaved, in_place;
    float sign; /* of s: -1 in the backward */
    write_mode mode;
    void *y;
    const void *x, *cosine, *sine, *positions;
    vjp_dtype dtype, cosine_type, sine_type, position_type;
    int64_t y_step, x_step; /* elements from one time to the next */
    cpu_split split;        /* of batch x time */
} rope_call;

static int64_t position_at(const rope_call *call, int64_t item) {
    int64_t batch = item / call->s.time, time = item % call->s.time;
    if (!call->positions) return time;
    int64_t k = batch * call->s.position_stride + time;
    switch (call->position_type) {
    case VJP_I32: return ((const int32_t *)call->positions)[k];
    case VJP_I64: return ((const int64_t *)call->positions)[k];
    default: return (int64_t)((const float *)call->positions)[k];
    }
}

/* Elements [i, i + n) of a table, times `sign`, as f32. */
INLINE void widen(vjp_dtype dtype, float *to, const void *from, int64_t i, int64_t n, float sign) {
    for (int64_t j = 0; j < n; j += LANES)
        vf_store(VJP_F32, to, j, vf_mul(vf_load_part(dtype, from, i + j, n - j), vf_set(sign)));
}

static void widen_table(vjp_dtype dtype, float *to, const void *from, int64_t i, int64_t n, float sign) {
    BY_DTYPE(dtype, widen, to, from, i, n, sign);
}

/* The angles of n pairs from element i of the tables on. */
static void prepare_angles(const rope_call *call, angles *a, int64_t i, int64_t n) {
    if (!call->interleaved) {
        widen_table(call->cosine_type, a->cosine, call->cosine, i, n, 1);
        widen_table(call->sine_type, a->sine, call->sine, i, n, call->sign);
        return;
    }
    float cosine[ANGLE_BLOCK], sine[ANGLE_BLOCK];
    widen_table(call->cosine_type, cosine, call->cosine, i, n, 1);
    widen_table(call->sine_type, sine, call->sine, i, n, call->sign);
    for (int64_t j = 0; j < n; j += LANES) {
        vf c = vf_load(VJP_F32, cosine, j), s = vf_load(VJP_F32, sine, j), minus = vf_mul(s, vf_set(-1));
        vf_store(VJP_F32, a->cosine, 2 * j, vf_zip(c, c, false));
        vf_store(VJP_F32, a->cosine, 2 * j + LANES, vf_zip(c, c, true));
        vf_store(VJP_F32, a->sine, 2 * j, vf_zip(minus, s, false));
        vf_store(VJP_F32, a->sine, 2 * j + LANES, vf_zip(minus, s, true));
    }
}

/* Pairs i with i + half, for n values of i. */
INLINE void rotate_halves(vjp_dtype dtype, write_mode mode, void *y, const void *x, const angles *a, int64_t n,
                          int64_t half) {
    for (int64_t i = 0; i < n; i += LANES) {
        vf c = vf_load(VJP_F32, a->cosine, i), s = vf_load(VJP_F32, a->sine, i);
        vf x0 = vf_load_part(dtype, x, i, n - i), x1 = vf_load_part(dtype, x, half + i, n - i);
        vf y0 = vf_fma(vf_mul(s, vf_set(-1)), x1, vf_mul(x0, c));
        vf y1 = vf_fma(s, x0, vf_mul(x1, c));
        vf_write_part(mode, dtype, y, i, n - i, y0);
        vf_write_part(mode, dtype, y, half + i, n - i, y1);
    }
}

/* Pairs of neighbours, n elements in all. */
INLINE void rotate_neighbours(vjp_dtype dtype, write_mode mode, void *y, const void *x, const angles *a, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        vf c = vf_load(VJP_F32, a->cosine, i), s = vf_load(VJP_F32, a->sine, i);
        vf value = vf_load_part(dtype, x, i, n - i);
        vf_write_part(mode, dtype, y, i, n - i, vf_fma(vf_swap_pairs(value), s, vf_mul(value, c)));
    }
}

INLINE void pass_through(vjp_dtype dtype, write_mode mode, void *y, const void *x, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES)
        vf_write_part(mode, dtype, y, i, n - i, vf_load_part(dtype, x, i, n - i));
}

INLINE void rope_items(vjp_dtype dtype, write_mode mode, const rope_call *call, size_t task) {
    const vjp_rope_sizes *s = &call->s;
    int64_t half = s->n_rot / 2, dim = s->head_dim;
    angles a;
    for (int64_t item = cpu_split_begin(&call->split, task); item < cpu_split_end(&call->split, task); item++) {
        int64_t row = position_at(call, item) * half;
        void *y_row = at_mutable(dtype, call->y, item * call->y_step);
        const void *x_row = at(dtype, call->x, item * call->x_step);
        for (int64_t i = 0; i < half; i += ANGLE_BLOCK) {
            int64_t n = vjp_min(half - i, ANGLE_BLOCK);
            prepare_angles(call, &a, row + i, n);
            for (int64_t head = 0; head < s->heads; head++) {
                int64_t start = head * dim + (call->interleaved ? 2 * i : i);
                void *y = at_mutable(dtype, y_row, start);
                const void *x = at(dtype, x_row, start);
                if (call->interleaved)
                    rotate_neighbours(dtype, mode, y, x, &a, 2 * n);
                else
                    rotate_halves(dtype, mode, y, x, &a, n, half);
            }
        }
        if (s->n_rot == dim || call->in_place) continue;
        for (int64_t head = 0; head < s->heads; head++) {
            int64_t start = head * dim + s->n_rot;
            pass_through(dtype, mode, at_mutable(dtype, y_row, start), at(dtype, x_row, start), dim - s->n_rot);
        }
    }
    if (mode == WRITE_STREAM) vf_stream_done();
}

static void rope_task(void *argument, size_t task) {
    const rope_call *call = argument;
    BY_DTYPE_AND_MODE(call->dtype, call->mode, rope_items, call, task);
}

static vjp_status run(const vjp_work *work) {
    const vjp_rope_attributes *attributes = work->attributes;
    rope_call call = {
        .s = vjp_rope_sizes_of(work),
        .dtype = work->storage,
        .interleaved = attributes->pairing == VJP_PAIRING_INTERLEAVED,
        .sign = work->pass == VJP_BACKWARD ? -1 : 1,
        .y = vjp_data(work, ROPE_Y),
        .x = vjp_data(work, ROPE_X),
        .cosine = vjp_data(work, ROPE_COSINE),
        .sine = vjp_data(work, ROPE_SINE),
        .positions = vjp_data(work, ROPE_POSITIONS),
        .cosine_type = vjp_type(work, ROPE_COSINE),
        .sine_type = vjp_type(work, ROPE_SINE),
        .position_type = vjp_type(work, ROPE_POSITIONS),
        .y_step = vjp_step(work, ROPE_Y),
        .x_step = vjp_step(work, ROPE_X),
    };
    const vjp_rope_sizes *s = &call.s;
    int64_t row_bytes = s->heads * s->head_dim * (int64_t)dtype_bytes(work->storage);
    if (!call.y || s->batch * s->time * row_bytes == 0) return VJP_OK;
    int64_t unit = call.interleaved ? s->n_rot : s->n_rot / 2; /* a vector may start after any multiple of it */
    bool aligned = s->head_dim % LANES == 0 && call.y_step % LANES == 0 && unit % LANES == 0 &&
                   vf_stream_aligned(work->storage, call.y);
    call.in_place = call.x == call.y;
    call.mode = write_mode_of(work, ROPE_Y, s->batch * s->time * row_bytes, aligned, call.in_place);
    call.split = vjp_cpu_split_items(s->batch * s->time, 2 * row_bytes, CPU_MAX_TASKS);
    vjp_cpu_for(work, call.split.count, rope_task, &call);
    return VJP_OK;
}

extern const vjp_kernel CPU_NAME(rope)[VJP_PASS_COUNT];
const vjp_kernel CPU_NAME(rope)[VJP_PASS_COUNT] = {
    {run, NULL, VJP_STORAGE_16_32 | VJP_TAKES_ROWS},
    {run, NULL, VJP_STORAGE_16_32 | VJP_TAKES_ROWS},
};

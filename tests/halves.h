/* SPDX-License-Identifier: MIT */
/*
 * adamw of weights in halves, on any device: the bits are those of adamw of whole weights, in every element of w, m and
 * v, for any number of elements, whole or in place, with every dtype of gradient and moments.
 */
#ifndef VJP_TESTS_HALVES_H
#define VJP_TESTS_HALVES_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attributes.h"
#include "core/core.h"
#include "core/half.h"
#include "numbers.h"
#include "op/op.h"

/* A packed vector on the device. `content` NULL: whatever is there. */
static inline vjp_tensor halves_tensor(vjp_device *on, vjp_dtype dtype, int64_t count, const void *content) {
    vjp_tensor t = vjp_tensor_of(NULL, dtype, 1, &count);
    size_t bytes = (size_t)count * vjp_dtype_size(dtype);
    assert_int_equal(vjp_alloc(on, bytes ? bytes : 1, &t.data), VJP_OK);
    if (content) assert_int_equal(vjp_upload(on, t.data, 0, content, bytes), VJP_OK);
    return t;
}

/* A weight whose lower half is anything, the ends of its range included. */
static inline float halves_weight(int64_t i) {
    static const uint32_t ends[] = {0, 0x7fff, 0x8000, 0x8001, 0xffff, 0x18000, 0x17fff};
    uint32_t bits = vjp_f32_to_bits((float)random_of(3, 9, (uint64_t)i));
    if (i % 5 == 0) bits = (bits & 0xffff0000u) + ends[(size_t)(i / 5) % (sizeof ends / sizeof ends[0])];
    return i == 1 ? INFINITY : i == 2 ? -NAN : i == 3 ? 0 : vjp_bits_to_f32(bits);
}

typedef struct halves_case {
    int64_t count;
    vjp_dtype gradient, moments;
    bool in_place, skips;
} halves_case;

/* The weights, whole, and the moments' bytes, after a step. */
static inline vjp_status halves_step(vjp_device *on, const halves_case *c, bool halves, float *w, void *m, void *v) {
    size_t count = (size_t)c->count, narrow = count * 2, wide = count * 4;
    float *number = malloc(4 * wide + 16), *first = number + count, rate = 0.01f;
    uint16_t *stored = malloc(4 * wide + 16);
    const float scale = c->skips ? INFINITY : 0.5f;
    const int64_t step = 3;
    for (int64_t i = 0; i < c->count; i++) {
        number[i] = halves_weight(i);
        stored[i] = vjp_upper_half(number[i]);
        stored[c->count + i] = vjp_lower_half(number[i]);
    }
    vjp_tensor w_in = halves_tensor(on, VJP_F32, c->count, halves ? (void *)stored : number), w_out = w_in;
    vjp_tensor in[3], out[3]; /* g, m, v */
    for (int k = 0; k < 3; k++) {
        vjp_dtype dtype = k ? c->moments : c->gradient;
        for (int64_t i = 0; i < c->count; i++) {
            double value = random_of((uint32_t)k, 4, (uint64_t)i);
            first[i] = (float)(k == 2 ? value * value : value);
            stored[i] = vjp_f32_to_bf16(first[i]);
        }
        in[k] = halves_tensor(on, dtype, c->count, dtype == VJP_F32 ? (void *)first : stored);
        out[k] = c->in_place || !k ? in[k] : halves_tensor(on, dtype, c->count, NULL);
    }
    if (!c->in_place) w_out = halves_tensor(on, VJP_F32, c->count, NULL);
    vjp_tensor lr = halves_tensor(on, VJP_F32, 1, &rate), number_of = halves_tensor(on, VJP_I64, 1, &step);
    vjp_tensor factor = halves_tensor(on, VJP_F32, 1, &scale);
    lr.ndim = number_of.ndim = factor.ndim = 0;
    vjp_status status =
        vjp_adamw_forward(on, &w_out, &out[1], &out[2], &w_in, &in[1], &in[2], &in[0], &lr, &number_of, &factor,
                          WITH(adamw, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .halves = halves));
    if (status == VJP_OK) {
        size_t moment = c->moments == VJP_F32 ? wide : narrow;
        assert_int_equal(vjp_download(on, halves ? (void *)stored : w, w_out.data, 0, wide), VJP_OK);
        assert_int_equal(vjp_download(on, m, out[1].data, 0, moment), VJP_OK);
        assert_int_equal(vjp_download(on, v, out[2].data, 0, moment), VJP_OK);
        assert_int_equal(vjp_synchronize(on), VJP_OK);
        for (int64_t i = 0; i < c->count && halves; i++)
            w[i] = vjp_join_halves(stored[i], stored[c->count + i]);
        /* The upper half is what the products read. */
        for (int64_t i = 0; i < c->count && halves; i++)
            assert_int_equal(stored[i], vjp_upper_half(w[i]));
    }
    if (!c->in_place) vjp_free(on, w_out.data), vjp_free(on, out[1].data), vjp_free(on, out[2].data);
    for (int k = 0; k < 3; k++)
        vjp_free(on, in[k].data);
    vjp_free(on, w_in.data), vjp_free(on, lr.data), vjp_free(on, number_of.data), vjp_free(on, factor.data);
    free(number);
    free(stored);
    return status;
}

/* On a device that has no such kernel: refused, with a sentence. */
static inline void check_halves(vjp_device *on) {
    static const halves_case cases[] = {
        {1, VJP_F32, VJP_F32, true, false},       {4, VJP_F32, VJP_F32, false, false},
        {63, VJP_BF16, VJP_F32, true, false},     {1028, VJP_F32, VJP_BF16, true, false},
        {1025, VJP_BF16, VJP_BF16, true, true},   {4096, VJP_F32, VJP_F32, true, true},
        {100003, VJP_F32, VJP_F32, true, false},  {100004, VJP_F32, VJP_F32, true, false},
        {100004, VJP_BF16, VJP_F32, false, false}};
    const vjp_kernel *kernel = on->found->kernel(on, &vjp_op_adamw, VJP_FORWARD);
    bool takes = kernel && kernel->storage & VJP_TAKES_HALVES;
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        const halves_case *c = &cases[k];
        size_t bytes = (size_t)c->count * 4;
        char *memory = calloc(6, bytes + 8);
        float *w[2];
        void *m[2], *v[2];
        for (int h = 0; h < 2; h++) {
            w[h] = (float *)(void *)(memory + (3 * (size_t)h + 0) * bytes);
            m[h] = memory + (3 * (size_t)h + 1) * bytes;
            v[h] = memory + (3 * (size_t)h + 2) * bytes;
            vjp_status status = halves_step(on, c, h, w[h], m[h], v[h]);
            if (status != (h && !takes ? VJP_UNSUPPORTED : VJP_OK)) fail_msg("case %zu: %s", k, vjp_error(on));
        }
        if (!takes) assert_non_null(strstr(vjp_error(on), "has no kernel for weights in halves"));
        for (int64_t i = 0; i < c->count && takes; i++)
            if (memcmp(&w[0][i], &w[1][i], 4) != 0 && !(isnan(w[0][i]) && isnan(w[1][i])))
                fail_msg("case %zu: weight %lld is %.9g in halves, %.9g whole", k, (long long)i, (double)w[1][i],
                         (double)w[0][i]);
        if (takes) {
            size_t moment = (size_t)c->count * vjp_dtype_size(c->moments);
            assert_memory_equal(m[0], m[1], moment);
            assert_memory_equal(v[0], v[1], moment);
        }
        free(memory);
    }
}

#endif

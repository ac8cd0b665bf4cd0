/* SPDX-License-Identifier: MIT */
/*
 * Tests of CUDA, for a file that includes device_tests.h: attention of f32 on a device for exact products and on one
 * for TF32, and of f16 over many keys or queries, compared with ref in f64 on the same numbers.
 */
#ifndef VJP_TESTS_ATTENTION_ACCURACY_H
#define VJP_TESTS_ATTENTION_ACCURACY_H

#include "numbers.h"
#include "parts.h"

typedef struct attention_case {
    const char *name;
    int64_t batch, time, keys, heads, kv_heads, dim;
    int64_t window, apart; /* apart: elements from the end of a row to the next row, of q, k, v and their gradients */
    double scale;          /* not 0: scores so large that exact products compute the gradients */
    bool causal, first, add, saved, nan; /* saved: the backward gets y and lse; nan: the first key and value are NaN */
    bool unaligned;                      /* dq is, so that exact products compute the backward */
    vjp_dtype storage;                   /* VJP_F32 or VJP_F16 */
    /* Numbers are between 0 and 2 but for k, and v is k + 1: then dq does not cancel. f16 and TF32 hold all of them. */
    bool positive;
} attention_case;

/* Dims are filled up to 64, 128 or 256, and each of these has kernels of its own; so have windows and first keys. */
static const attention_case tf32_cases[] = {
    {"dim 64, grouped", 2, 200, 200, 4, 2, 64, .causal = true, .saved = true},
    {"dim 64, computed again", 1, 130, 130, 2, 1, 64, .causal = true},
    {"dim 128, all keys", 1, 150, 150, 2, 2, 128, .saved = true},
    {"dim 128, fewer keys, computed again", 1, 150, 90, 2, 1, 128, .saved = false},
    {"dim 256", 1, 130, 130, 2, 1, 256, .causal = true, .saved = true},
    {"dim 160, more keys, added", 1, 70, 200, 2, 1, 160, .add = true},
    {"dim 8", 1, 300, 300, 1, 1, 8, .causal = true, .saved = true},
    {"dim 72, window, rows apart, added", 1, 180, 180, 2, 2, 72, .window = 33, .apart = 4, .causal = true, .add = true},
    {"dim 64, window, more keys", 1, 140, 300, 4, 1, 64, .window = 100, .causal = true, .saved = true},
    {"dim 200, window, rows apart", 1, 100, 100, 2, 1, 200, .window = 70, .apart = 12, .causal = true, .saved = true},
    {"dim 40, first keys", 2, 190, 190, 2, 2, 40, .causal = true, .first = true, .saved = true},
    {"dim 128, first keys, more keys", 2, 190, 220, 2, 1, 128, .causal = true, .first = true},
    {"dim 64, a NaN before the window", 1, 200, 200, 2, 1, 64, .window = 20, .causal = true, .nan = true},
    {"dim 64, large scores", 1, 200, 200, 2, 1, 64, .scale = 1000, .causal = true},
    {"dim 64, large scores, saved", 1, 90, 90, 1, 1, 64, .scale = 1000, .saved = true, .unaligned = true},
};

/*
 * Of relative L2 errors. A number rounded to TF32 is off by 2^-11 of itself at most, 2.0e-4 in the root mean square. A
 * result has two rounded operands, of which one was computed from others: in f64 with rounded operands that made 3e-4
 * in y and dv and 4e-4 in dq and dk. Where bits are cut off instead of rounded it is twice as much. Exact products are
 * closer than 1e-5; but of scores of 1e4 f32 has 1e-3 left, which its weights are off by.
 */
static const double tf32_bound = 6e-4, exact_bound = 1e-5, large_bound = 1e-2, f16_bound = 5e-4,
                    drift_bound = 8e-5; /* of chains of 4096 rows: 3e-5, on cards before Hopper 6e-5 */

enum { IN_Q, IN_K, IN_V, IN_DY, OUT_Y, OUT_DQ, OUT_DK, OUT_DV, ATTENTION_TENSORS };
static const char *const attention_names[ATTENTION_TENSORS] = {"q", "k", "v", "dy", "y", "dq", "dk", "dv"};

/* What outputs hold before, and what is between rows. */
static const double case_old = 0.25, case_gap = 7;

static bool has_keys(int part) {
    return part == IN_K || part == IN_V || part == OUT_DK || part == OUT_DV;
}

/* A tensor [batch, rows, heads, dim] of the case on a device. */
static vjp_tensor case_tensor(vjp_device *on, vjp_dtype dtype, const attention_case *c, int part) {
    const int64_t shape[] = {c->batch, has_keys(part) ? c->keys : c->time, has_keys(part) ? c->kv_heads : c->heads,
                             c->dim};
    int64_t width = shape[2] * shape[3], step = width + (part == IN_DY || part == OUT_Y ? 0 : c->apart);
    int64_t count = shape[0] * shape[1] * step;
    size_t bytes = (size_t)count * vjp_dtype_size(dtype);
    void *data;
    vjp_tensor host = vjp_tensor_of(malloc(bytes), dtype, 1, &count);
    assert_non_null(host.data);
    for (int64_t i = 0; i < count; i++) {
        int64_t row = i / step, column = i % step;
        int stream = c->positive && part == IN_V ? IN_K : part;
        double value =
            random_of((uint32_t)stream, 5, (uint64_t)(row * width + column)) + (c->positive && part != IN_K ? 1 : 0);
        value = (double)(c->positive ? vjp_f16_to_f32(vjp_f32_to_f16((float)value)) : (float)value);
        if (c->nan && (part == IN_K || part == IN_V) && row % shape[1] == 0) value = (double)NAN;
        put(&host, i, column >= width ? case_gap : part >= OUT_Y ? case_old : value);
    }
    uint64_t offset = c->unaligned && part == OUT_DQ ? vjp_dtype_size(dtype) : 0;
    assert_int_equal(vjp_alloc(on, offset + bytes, &data), VJP_OK);
    assert_int_equal(vjp_upload(on, data, offset, host.data, bytes), VJP_OK);
    free(host.data);
    vjp_tensor t = vjp_tensor_of(data, dtype, 4, shape);
    t.offset = offset;
    t.stride[1] = step;
    t.stride[0] = shape[1] * step;
    if (part >= OUT_Y && c->add) t.flags = VJP_ACCUMULATE;
    return t;
}

/* What the call added to an output, packed. */
static double *case_result(vjp_device *on, const attention_case *c, const vjp_tensor *t) {
    int64_t width = t->shape[2] * t->shape[3], step = t->stride[1], rows = t->shape[0] * t->shape[1],
            count = rows * step;
    size_t bytes = (size_t)count * vjp_dtype_size(t->dtype);
    double *result = malloc((size_t)(rows * width) * sizeof *result);
    vjp_tensor host = vjp_tensor_of(malloc(bytes), t->dtype, 1, &count);
    assert_true(result && host.data);
    assert_int_equal(vjp_download(on, host.data, t->data, t->offset, bytes), VJP_OK);
    for (int64_t i = 0; i < count; i++) {
        if (i % step < width)
            result[i / step * width + i % step] = get(&host, i) - (c->add ? case_old : 0);
        else
            assert_true(get(&host, i) == case_gap);
    }
    free(host.data);
    return result;
}

/* Forward and backward of a case on a device; result[OUT_Y ...] are the caller's to free. */
static void run_attention_case(vjp_device *on, vjp_dtype dtype, const attention_case *c,
                               double *result[ATTENTION_TENSORS]) {
    vjp_attention_attributes attributes = VJP_ATTENTION_DEFAULTS;
    attributes.causal = c->causal;
    attributes.window = c->window;
    attributes.scale = c->scale;
    vjp_tensor t[ATTENTION_TENSORS], lse, first;
    for (int i = 0; i < ATTENTION_TENSORS; i++)
        t[i] = case_tensor(on, dtype, c, i);
    const int64_t lse_shape[] = {c->batch, c->heads, c->time}, first_shape[] = {c->batch, c->time};
    vjp_dtype lse_dtype = dtype == VJP_F64 ? VJP_F64 : VJP_F32;
    size_t rows = (size_t)(c->batch * c->time), lse_bytes = rows * (size_t)c->heads * vjp_dtype_size(lse_dtype);
    int32_t *keys = malloc(rows * sizeof *keys);
    void *data;
    for (size_t i = 0; i < rows; i++) /* documents of 37 and 101 queries */
        keys[i] = (int32_t)(i % (size_t)c->time) / (i < (size_t)c->time ? 37 : 101) * (i < (size_t)c->time ? 37 : 101);
    assert_int_equal(vjp_alloc(on, lse_bytes, &data), VJP_OK);
    lse = vjp_tensor_of(data, lse_dtype, 3, lse_shape);
    assert_int_equal(vjp_alloc(on, rows * sizeof *keys, &data), VJP_OK);
    assert_int_equal(vjp_upload(on, data, 0, keys, rows * sizeof *keys), VJP_OK);
    first = vjp_tensor_of(data, VJP_I32, 2, first_shape);
    const vjp_tensor *from = c->first ? &first : NULL;
    assert_int_equal(vjp_reserve(on, 400 << 20), VJP_OK); /* of the workspace: most is for sums of dq */
    vjp_status status = vjp_attention_forward(on, &t[OUT_Y], &lse, &t[IN_Q], &t[IN_K], &t[IN_V], from, &attributes);
    if (status == VJP_OK)
        status = vjp_attention_backward(on, &t[OUT_DQ], &t[OUT_DK], &t[OUT_DV], &t[IN_DY], &t[IN_Q], &t[IN_K], &t[IN_V],
                                        c->saved ? &t[OUT_Y] : NULL, c->saved ? &lse : NULL, from, &attributes);
    if (status == VJP_OK) status = vjp_synchronize(on);
    if (status != VJP_OK) fail_msg("%s: %s", c->name, vjp_error(on));
    for (int i = 0; i < ATTENTION_TENSORS; i++) {
        if (i >= OUT_Y) result[i] = case_result(on, c, &t[i]);
        vjp_free(on, t[i].data);
    }
    vjp_free(on, lse.data), vjp_free(on, first.data);
    free(keys);
}

static int64_t case_count(const attention_case *c, int part) {
    return c->batch * c->dim * (has_keys(part) ? c->keys * c->kv_heads : c->time * c->heads);
}

/* Relative L2 error where `right` is a number; infinite where only one of both is. */
static double case_error(const double *wrong, const double *right, int64_t count) {
    double off = 0, all = 0;
    for (int64_t i = 0; i < count; i++) {
        if (isfinite(wrong[i]) != isfinite(right[i])) return (double)INFINITY;
        if (!isfinite(right[i])) continue;
        off += (wrong[i] - right[i]) * (wrong[i] - right[i]);
        all += right[i] * right[i];
    }
    return sqrt(off / all);
}

/* TF32's errors are within its bound and above that of exact products, so that it was used; the same bits twice. */
static void attention_takes_tf32_where_asked(void **state) {
    (void)state;
    need_device();
    const vjp_options options = {.struct_size = sizeof options, .matrix_products = "tf32"};
    double worst[ATTENTION_TENSORS] = {0};
    vjp_device *rounding, *ref;
    assert_int_equal(vjp_open("cuda", &options, &rounding), VJP_OK);
    assert_int_equal(vjp_open("ref", NULL, &ref), VJP_OK);
    for (size_t n = 0; n < sizeof tf32_cases / sizeof tf32_cases[0]; n++) {
        const attention_case *c = &tf32_cases[n];
        double *right[ATTENTION_TENSORS], *exact[ATTENTION_TENSORS], *one[ATTENTION_TENSORS], *two[ATTENTION_TENSORS];
        run_attention_case(ref, VJP_F64, c, right);
        run_attention_case(device, VJP_F32, c, exact);
        run_attention_case(rounding, VJP_F32, c, one);
        run_attention_case(rounding, VJP_F32, c, two);
        for (int i = OUT_Y; i < ATTENTION_TENSORS; i++) {
            int64_t count = case_count(c, i);
            double error = case_error(exact[i], right[i], count), rounded = case_error(one[i], right[i], count);
            bool large = c->scale != 0;
            if (!(error < (large ? large_bound : exact_bound)))
                fail_msg("%s: %s of exact products is off by %g", c->name, attention_names[i], error);
            if (large && i == OUT_Y) continue; /* scores of TF32 have nothing left */
            if (!(rounded < (large ? large_bound : tf32_bound)))
                fail_msg("%s: %s of TF32 is off by %g", c->name, attention_names[i], rounded);
            if (!large && !(rounded > exact_bound))
                fail_msg("%s: %s is off by %g only: not of TF32", c->name, attention_names[i], rounded);
            if (!large) worst[i] = fmax(worst[i], rounded);
        }
        for (int i = OUT_Y; i < ATTENTION_TENSORS; i++) {
            assert_memory_equal(one[i], two[i], (size_t)case_count(c, i) * sizeof *one[i]);
            free(right[i]), free(exact[i]), free(one[i]), free(two[i]);
        }
    }
    printf("attention of TF32 is off by at most:");
    for (int i = OUT_Y; i < ATTENTION_TENSORS; i++)
        printf(" %s %.1e", attention_names[i], worst[i]);
    printf("\n");
    vjp_close(rounding);
    vjp_close(ref);
}

/* The mean error, which rounding alone leaves near 0. */
static double case_drift(const double *wrong, const double *right, int64_t count) {
    double off = 0, all = 0;
    for (int64_t i = 0; i < count; i++) {
        off += (wrong[i] - right[i]) * right[i];
        all += right[i] * right[i];
    }
    return off / all;
}

/*
 * Sums over so many rows of numbers of one sign, with weights of similar sizes, that one chain on the tensor cores
 * would drift too far: by 1.3e-4 over the rows that an emulated Hopper has time for. What is not a sum over many rows
 * is left out: it nearly cancels, or is too small for f16.
 */
static void check_many_rows(vjp_device *on, vjp_device *ref, const attention_case *c) {
    bool emulated = device_is("cuda", "emulated");
    double *right[ATTENTION_TENSORS], *one[ATTENTION_TENSORS], *two[ATTENTION_TENSORS] = {0};
    run_attention_case(ref, VJP_F64, c, right);
    run_attention_case(on, c->storage, c, one);
    if (!emulated) run_attention_case(on, c->storage, c, two);
    printf("%s, %s:", c->name, c->storage == VJP_F16 ? "f16" : "TF32");
    for (int i = OUT_Y; i < ATTENTION_TENSORS; i++) {
        int64_t count = case_count(c, i);
        if (has_keys(i) == (c->keys < c->time)) {
            double error = case_error(one[i], right[i], count), drift = case_drift(one[i], right[i], count);
            printf(" %s %.1e, drift %.1e", attention_names[i], error, drift);
            if (!(error < (c->storage == VJP_F16 ? f16_bound : tf32_bound) && fabs(drift) < drift_bound))
                fail_msg("%s: %s is off by %g, in the mean by %g", c->name, attention_names[i], error, drift);
        }
        if (two[i]) assert_memory_equal(one[i], two[i], (size_t)count * sizeof *one[i]);
        free(right[i]), free(one[i]), free(two[i]);
    }
    printf("\n");
}

/* Each kernel has a case; f32 is multiplied as TF32. */
static void attention_is_accurate_over_many_rows(void **state) {
    (void)state;
    need_device();
    bool emulated = device_is("cuda", "emulated");
    const int64_t many = emulated ? 20000 : 131072;
    const vjp_options options = {.struct_size = sizeof options, .matrix_products = "tf32"};
    const attention_case cases[] = {
        {"dim 64, many keys", 1, 8, many, 1, 1, 64, .saved = true, .storage = VJP_F16},
        {"dim 64, many queries", 1, many, 8, 1, 1, 64, .saved = true, .storage = VJP_F16},
        {"dim 128, many keys", 1, 8, many, 1, 1, 128, .saved = true, .storage = VJP_F16},
        {"dim 128, many queries of two heads", 1, many / 2, 8, 2, 1, 128, .saved = true, .storage = VJP_F16},
        {"dim 64, a window of keys", 1, 70, many, 1, 1, 64, .window = many - 999, .causal = true, .saved = true,
         .storage = VJP_F16},
        {"dim 256, many queries", 1, many, 8, 1, 1, 256, .saved = true, .storage = VJP_F16},
        {"dim 64, many keys", 1, 8, many, 1, 1, 64, .saved = true, .storage = VJP_F32},
        {"dim 64, many queries", 1, many, 8, 1, 1, 64, .saved = true, .storage = VJP_F32}};
    vjp_device *ref, *rounding;
    assert_int_equal(vjp_open("ref", NULL, &ref), VJP_OK);
    assert_int_equal(vjp_open("cuda", &options, &rounding), VJP_OK);
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        if (emulated && !in_part(n, sizeof cases / sizeof cases[0])) continue;
        attention_case c = cases[n];
        c.positive = true;
        c.scale = 1.0 / 256;
        check_many_rows(c.storage == VJP_F16 ? device : rounding, ref, &c);
    }
    vjp_close(rounding);
    vjp_close(ref);
}

#endif

/* SPDX-License-Identifier: MIT */
/*
 * attention's forward on the CPU where sums are long or near the end of the range, compared with ref in f64 on the same
 * numbers: many keys (sums in two levels, rescaled while the maximum grows) and values whose mean fits f32 while their
 * sum does not.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "numbers.h"
#include "vjp.h"

typedef enum values { EQUAL, RANDOM, LARGE, LARGE_LATER, LARGE_COLUMN } values;

typedef struct long_case {
    const char *name;
    int64_t time, keys;
    int64_t causal;
    values values;
    double slope; /* of the scores, from the first key to the last */
} long_case;

/* 4096 keys are summed in one level. */
static const long_case cases[] = {
    {"equal keys", 3, 65536, 0, EQUAL, 0},
    {"a maximum that grows", 3, 13000, 0, RANDOM, 20},
    {"a maximum that grows, causal", 140, 8300, 1, RANDOM, 20},
    {"large values", 3, 128, 0, LARGE, 0},
    {"large values, two levels", 3, 5000, 0, LARGE, 1},
    {"large values after small ones", 3, 128, 0, LARGE_LATER, 0},
    {"large values in the second level", 3, 9000, 0, LARGE_LATER, 0},
    {"large values in a later tile", 300, 300, 1, LARGE_LATER, 0},
    {"large values in one column", 3, 1000, 0, LARGE_COLUMN, 0},
};

enum { DIM = 5 };

/* One level gives 3.9e-6 for 65536 equal keys. */
static const double bound = 2.5e-6;

static double value_of(const long_case *c, int64_t key, int64_t column) {
    switch (c->values) {
    case EQUAL: return 0.1;
    case LARGE: return 3e38;
    case LARGE_LATER: return key < c->keys * 2 / 3 ? 1e30 : 3e38;
    case LARGE_COLUMN: return column ? 1e-30 : -3e38;
    default: return 1 + 0.5 * random_of(2, 7, (uint64_t)(key * DIM + column));
    }
}

static vjp_tensor tensor_of(vjp_dtype dtype, int64_t rows) {
    const int64_t shape[] = {1, rows, 1, DIM};
    void *data = calloc((size_t)(rows * DIM), dtype == VJP_F64 ? sizeof(double) : sizeof(float));
    assert_non_null(data);
    return vjp_tensor_of(data, dtype, 4, shape);
}

/* y of the case on a device; the numbers are f32 in either type. */
static vjp_tensor forward(const char *device_name, vjp_dtype dtype, const long_case *c) {
    vjp_device *device;
    vjp_options options = VJP_OPTIONS_DEFAULTS;
    vjp_attention_attributes attributes = VJP_ATTENTION_DEFAULTS;
    vjp_tensor y = tensor_of(dtype, c->time), q = tensor_of(dtype, c->time), k = tensor_of(dtype, c->keys);
    vjp_tensor v = tensor_of(dtype, c->keys);
    options.threads = 2;
    attributes.causal = c->causal;
    attributes.scale = 1;
    for (int64_t i = 0; i < c->time * DIM; i++)
        put(&q, i, 1);
    for (int64_t i = 0; i < c->keys * DIM; i++) {
        put(&k, i, (float)(c->slope * (double)(i / DIM) / (double)c->keys / DIM));
        put(&v, i, (float)value_of(c, i / DIM, i % DIM));
    }
    assert_int_equal(vjp_open(device_name, &options, &device), VJP_OK);
    assert_int_equal(vjp_attention_forward(device, &y, NULL, &q, &k, &v, NULL, &attributes), VJP_OK);
    vjp_close(device);
    free(q.data);
    free(k.data);
    free(v.data);
    return y;
}

static void test_long_sums(void **state) {
    (void)state;
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        const long_case *c = &cases[n];
        vjp_tensor y = forward("cpu", VJP_F32, c), exact = forward("ref", VJP_F64, c);
        double worst = 0;
        for (int64_t i = 0; i < count_of(&y); i++) {
            double error = fabs(get(&y, i) - get(&exact, i)) / fabs(get(&exact, i));
            if (!(error <= worst)) worst = isnan(error) ? INFINITY : error;
        }
        if (!(worst <= bound)) fail_msg("%s: relative error %g, at most %g", c->name, worst, bound);
        free(y.data);
        free(exact.data);
    }
}

/* A key and a value that are NaN reach the queries whose window has them, and no others. */
static void test_nan_before_window(void **state) {
    (void)state;
    enum { TIME = 40, WINDOW = 7 };
    vjp_device *device;
    vjp_attention_attributes attributes = VJP_ATTENTION_DEFAULTS;
    attributes.window = WINDOW;
    vjp_tensor y = tensor_of(VJP_F32, TIME), q = tensor_of(VJP_F32, TIME), k = tensor_of(VJP_F32, TIME);
    vjp_tensor v = tensor_of(VJP_F32, TIME), dq = tensor_of(VJP_F32, TIME);
    for (int64_t i = 0; i < TIME * DIM; i++) {
        put(&q, i, (float)random_of(2, 8, (uint64_t)i));
        put(&k, i, i < DIM ? NAN : (float)random_of(2, 9, (uint64_t)i));
        put(&v, i, i < DIM ? NAN : (float)random_of(2, 10, (uint64_t)i));
    }
    assert_int_equal(vjp_open("cpu", NULL, &device), VJP_OK);
    assert_int_equal(vjp_attention_forward(device, &y, NULL, &q, &k, &v, NULL, &attributes), VJP_OK);
    assert_int_equal(vjp_reserve(device, 1 << 20), VJP_OK);
    assert_int_equal(vjp_attention_backward(device, &dq, NULL, NULL, &q, &q, &k, &v, NULL, NULL, NULL, &attributes),
                     VJP_OK);
    for (int64_t i = 0; i < TIME * DIM; i++) {
        assert_int_equal(isnan(get(&y, i)) != 0, i / DIM < WINDOW);
        assert_int_equal(isnan(get(&dq, i)) != 0, i / DIM < WINDOW);
    }
    vjp_close(device);
    free(y.data), free(q.data), free(k.data), free(v.data), free(dq.data);
}

/* Which numbers `first` may have; a call that is refused writes nothing. */
static void test_first_keys(void **state) {
    (void)state;
    enum { TIME = 3, KEYS = 5 };
    static const struct {
        int32_t first[TIME];
        int causal;
        const char *says; /* NULL: it is right */
    } calls[] = {
        {{0, 0, 0}, 1, NULL},
        {{2, 3, 4}, 1, NULL},
        {{1, 1, 3}, 1, NULL},
        {{3, 3, 3}, 1, "first[0, 0] is 3; the last key that this query sees is 2"},
        {{0, 4, 4}, 1, "first[0, 1] is 4; the last key that this query sees is 3"},
        {{1, 2, 1}, 1, "first[0, 2] is 1, less than the 2 of the query before it"},
        {{-1, 0, 0}, 1, "first[0] is -1, outside [0, 5), the keys"},
        {{0, 0, 0}, 0, "first is given, but causal is false"},
    };
    vjp_device *device;
    assert_int_equal(vjp_open("cpu", NULL, &device), VJP_OK);
    vjp_tensor y = tensor_of(VJP_F32, TIME), q = tensor_of(VJP_F32, TIME), k = tensor_of(VJP_F32, KEYS);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        vjp_attention_attributes attributes = VJP_ATTENTION_DEFAULTS;
        attributes.causal = calls[i].causal;
        vjp_tensor first = vjp_tensor_of((void *)(uintptr_t)calls[i].first, VJP_I32, 2, (const int64_t[]){1, TIME});
        put(&y, 0, 7);
        vjp_status status = vjp_attention_forward(device, &y, NULL, &q, &k, &k, &first, &attributes);
        assert_int_equal(status == VJP_OK, calls[i].says == NULL);
        if (!calls[i].says) continue;
        if (!strstr(vjp_error(device), calls[i].says)) fail_msg("%s", vjp_error(device));
        assert_true(get(&y, 0) == 7);
    }
    vjp_close(device);
    free(y.data), free(q.data), free(k.data);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_long_sums), cmocka_unit_test(test_nan_before_window),
                                       cmocka_unit_test(test_first_keys)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

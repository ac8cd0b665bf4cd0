/* SPDX-License-Identifier: MIT */
/*
 * Tests of conv2d on CUDA that `vjp check` does not make: TF32, and pictures with more tiles than the card has
 * multiprocessors. After device_tests.h.
 */
#ifndef VJP_TESTS_CONVOLUTIONS_H
#define VJP_TESTS_CONVOLUTIONS_H

#include "device_tests.h"
#include "parts.h"

/* Random, between `low` and low + 2. */
static float random_number(size_t i, uint32_t seed, float low) {
    uint32_t random = (uint32_t)i * 2654435761u + seed;
    random = (random ^ random >> 15) * 2246822519u;
    return (float)((random ^ random >> 13) >> 8) * 0x1p-23f + low;
}

enum { CONV_Y, CONV_DX, CONV_DWEIGHT, CONV_RESULTS };

typedef struct conv_case {
    vjp_dtype dtype;
    int64_t x[4], weight[4], y[4];
    vjp_conv2d_attributes attributes;
    double most[CONV_RESULTS]; /* the relative L2 error; of f32 cases with TF32 */
} conv_case;

#define CONV_ATTRIBUTES(stride, padding, groups, layout)                                                               \
    {                                                                                                                  \
        sizeof(vjp_conv2d_attributes), stride, stride, padding, padding, 1, 1, groups, VJP_LAYOUT_CHANNELS_##layout,   \
            0, 0                                                                                                       \
    }

static size_t conv_elements(const int64_t shape[4]) {
    return (size_t)(shape[0] * shape[1] * shape[2] * shape[3]);
}

static size_t conv_bytes(const conv_case *c, const int64_t shape[4]) {
    return conv_elements(shape) * (c->dtype == VJP_F32 ? 4 : 2);
}

static float conv_number(const conv_case *c, const void *numbers, size_t i) {
    if (c->dtype == VJP_F32) return ((const float *)numbers)[i];
    uint16_t bits = ((const uint16_t *)numbers)[i];
    return c->dtype == VJP_BF16 ? vjp_bf16_to_f32(bits) : vjp_f16_to_f32(bits);
}

/* Random numbers between -1 and 1, rounded to the case's type. */
static void *conv_random(const conv_case *c, const int64_t shape[4], uint32_t seed) {
    void *to = malloc(conv_bytes(c, shape));
    assert_non_null(to);
    for (size_t i = 0; i < conv_elements(shape); i++) {
        float value = random_number(i, seed * 977, -1);
        if (c->dtype == VJP_F32)
            ((float *)to)[i] = value;
        else
            ((uint16_t *)to)[i] = c->dtype == VJP_BF16 ? vjp_f32_to_bf16(value) : vjp_f32_to_f16(value);
    }
    return to;
}

/* dbias must be `times` the sums of dy. */
static void check_dbias(const conv_case *c, const void *dbias, const void *dy, int times) {
    bool last = c->attributes.layout == VJP_LAYOUT_CHANNELS_LAST;
    size_t outs = (size_t)c->weight[0], plane = (size_t)(last ? 1 : c->y[2] * c->y[3]);
    double wrong = 0, right = 0, *sum = calloc(outs, sizeof *sum);
    assert_non_null(sum);
    for (size_t i = 0; i < conv_elements(c->y); i++)
        sum[i / plane % outs] += times * (double)conv_number(c, dy, i);
    for (size_t i = 0; i < outs; i++) {
        double off = (double)conv_number(c, dbias, i) - sum[i];
        wrong += off * off;
        right += sum[i] * sum[i];
    }
    free(sum);
    assert_true(sqrt(wrong / right) <= (c->dtype == VJP_F32 ? 1e-5 : c->dtype == VJP_BF16 ? 4e-3 : 5e-4));
}

/* y from x and weight, of which the first numbers are the bias too; the gradients from dy, x and weight. In f32 twice,
 * the second time added. */
static void convolve(const char *name, const char *products, const conv_case *c, void *const in[3],
                     void *const result[CONV_RESULTS]) {
    enum { X, WEIGHT, DY, RESULTS, ALL = RESULTS + CONV_RESULTS };
    const int64_t *const shape[ALL] = {c->x, c->weight, c->y, c->y, c->x, c->weight};
    vjp_device *on;
    vjp_tensor t[ALL];
    assert_int_equal(
        vjp_open(name, &(vjp_options){.struct_size = sizeof(vjp_options), .matrix_products = products}, &on), VJP_OK);
    for (int i = 0; i < ALL; i++) {
        void *data;
        assert_int_equal(vjp_alloc(on, conv_bytes(c, shape[i]), &data), VJP_OK);
        if (i < RESULTS) assert_int_equal(vjp_upload(on, data, 0, in[i], conv_bytes(c, shape[i])), VJP_OK);
        t[i] = vjp_tensor_of(data, c->dtype, 4, shape[i]);
    }
    int times = c->dtype == VJP_F32 ? 2 : 1;
    size_t bias_bytes = (size_t)c->weight[0] * (c->dtype == VJP_F32 ? 4 : 2);
    void *dbias_data, *dbias_result = malloc(bias_bytes);
    assert_non_null(dbias_result);
    assert_int_equal(vjp_alloc(on, bias_bytes, &dbias_data), VJP_OK);
    vjp_tensor bias = vjp_tensor_of(t[WEIGHT].data, c->dtype, 1, c->weight);
    vjp_tensor dbias = vjp_tensor_of(dbias_data, c->dtype, 1, c->weight);
    for (int time = 0; time < times; time++) {
        for (int i = RESULTS; i < ALL; i++)
            t[i].flags = time ? VJP_ACCUMULATE : 0;
        dbias.flags = t[RESULTS].flags;
        if (vjp_conv2d_forward(on, &t[RESULTS + CONV_Y], &t[X], &t[WEIGHT], &bias, &c->attributes) != VJP_OK ||
            vjp_conv2d_backward(on, &t[RESULTS + CONV_DX], &t[RESULTS + CONV_DWEIGHT], &dbias, &t[DY], &t[X],
                                &t[WEIGHT], &c->attributes) != VJP_OK)
            fail_msg("%s", vjp_error(on));
    }
    for (int i = 0; i < CONV_RESULTS; i++)
        assert_int_equal(vjp_download(on, result[i], t[RESULTS + i].data, 0, conv_bytes(c, shape[RESULTS + i])),
                         VJP_OK);
    assert_int_equal(vjp_download(on, dbias_result, dbias_data, 0, bias_bytes), VJP_OK);
    check_dbias(c, dbias_result, in[DY], times);
    vjp_free(on, dbias_data);
    free(dbias_result);
    for (int i = 0; i < ALL; i++)
        vjp_free(on, t[i].data);
    vjp_close(on);
}

static double conv_error(const conv_case *c, const void *is, const void *expected, size_t count) {
    double wrong = 0, right = 0;
    for (size_t i = 0; i < count; i++) {
        double value = (double)conv_number(c, expected, i), off = (double)conv_number(c, is, i) - value;
        wrong += off * off;
        right += value * value;
    }
    return sqrt(wrong / right);
}

/* Compares a case with `expected_on`; `least` and `most`: of the errors. */
static void compare_convolutions(const conv_case *c, const char *products, const char *expected_on, double least,
                                 const double most[CONV_RESULTS], void *const in[3]) {
    const int64_t *const shape[CONV_RESULTS] = {c->y, c->x, c->weight};
    void *expected[CONV_RESULTS], *result[CONV_RESULTS];
    for (int i = 0; i < CONV_RESULTS; i++) {
        expected[i] = malloc(conv_bytes(c, shape[i]));
        result[i] = malloc(conv_bytes(c, shape[i]));
        assert_true(expected[i] && result[i]);
    }
    convolve(expected_on, NULL, c, in, expected);
    convolve("cuda", products, c, in, result);
    for (int i = 0; i < CONV_RESULTS; i++) {
        double error = conv_error(c, result[i], expected[i], conv_elements(shape[i]));
        if (!(error >= least && error <= most[i]))
            fail_msg("x [%lld, %lld, %lld, %lld], result %d, %s: error %g, not in [%g, %g]", (long long)c->x[0],
                     (long long)c->x[1], (long long)c->x[2], (long long)c->x[3], i, products, error, least, most[i]);
    }
    for (int i = 0; i < CONV_RESULTS; i++)
        free(expected[i]), free(result[i]);
}

static void conv_inputs(const conv_case *c, void *in[3]) {
    const int64_t *const shape[3] = {c->x, c->weight, c->y};
    for (int i = 0; i < 3; i++)
        in[i] = conv_random(c, shape[i], (uint32_t)i);
}

/* With operands rounded to the nearest TF32 the results of these numbers are 2.6e-4 off; Hopper truncates: 6.9e-4. */
#define OF_TF32                                                                                                        \
    { 1e-3, 1e-3, 1e-3 }

static const conv_case conv_tf32_cases[] = {
    {VJP_F32, {1, 93, 94, 32}, {128, 3, 3, 32}, {1, 93, 94, 128}, CONV_ATTRIBUTES(1, 1, 1, LAST), OF_TF32},
    {VJP_F32, {2, 64, 56, 56}, {48, 64, 3, 3}, {2, 48, 56, 56}, CONV_ATTRIBUTES(1, 1, 1, FIRST), OF_TF32},
    {VJP_F32, {2, 40, 17, 19}, {72, 20, 3, 3}, {2, 72, 9, 10}, CONV_ATTRIBUTES(2, 1, 2, FIRST), {4e-4, 4e-4, 4e-4}},
    /* dweight: planes of no whole stages, channels of no whole units, several tiles of out channels */
    {VJP_F32, {3, 72, 30, 30}, {136, 72, 3, 3}, {3, 136, 30, 30}, CONV_ATTRIBUTES(1, 1, 1, FIRST), OF_TF32},
    {VJP_F32, {4, 64, 57, 55}, {64, 64, 3, 3}, {4, 64, 29, 28}, CONV_ATTRIBUTES(2, 1, 1, FIRST), OF_TF32},
    /* planes of no whole runs, and stages of several images */
    {VJP_F32, {2, 64, 45, 45}, {72, 64, 3, 3}, {2, 72, 45, 45}, CONV_ATTRIBUTES(1, 1, 1, FIRST), OF_TF32},
    {VJP_F32, {3, 49, 46, 100}, {72, 3, 3, 100}, {3, 25, 23, 72}, CONV_ATTRIBUTES(2, 1, 1, LAST), OF_TF32},
    {VJP_F32, {101, 3, 3, 64}, {136, 3, 3, 64}, {101, 3, 3, 136}, CONV_ATTRIBUTES(1, 1, 1, LAST), OF_TF32},
    {VJP_F32, {3, 41, 40, 71}, {39, 3, 3, 71}, {3, 41, 40, 39}, CONV_ATTRIBUTES(1, 1, 1, LAST), OF_TF32},
    /* 1 x 1: pictures stay channels first */
    {VJP_F32, {3, 72, 36, 32}, {200, 72, 1, 1}, {3, 200, 36, 32}, CONV_ATTRIBUTES(1, 0, 1, FIRST), OF_TF32},
    {VJP_F32, {2, 520, 20, 18}, {72, 520, 1, 1}, {2, 72, 20, 18}, CONV_ATTRIBUTES(1, 0, 1, FIRST), OF_TF32},
    {VJP_F32, {5, 64, 30, 30}, {60, 64, 1, 1}, {5, 60, 30, 30}, CONV_ATTRIBUTES(1, 0, 1, FIRST), OF_TF32},
};

static void convolutions_are_f32_unless_tf32_is_asked_for(void **state) {
    (void)state;
    need_device();
    for (size_t k = 0; k < sizeof conv_tf32_cases / sizeof conv_tf32_cases[0]; k++) {
        if (!in_part(k, sizeof conv_tf32_cases / sizeof conv_tf32_cases[0])) continue;
        const conv_case *c = &conv_tf32_cases[k];
        const int64_t *const shape[CONV_RESULTS] = {c->y, c->x, c->weight};
        void *in[3], *result[CONV_RESULTS];
        conv_inputs(c, in);
        if (!device_is("cuda", "emulated")) /* `vjp check` has such */
            compare_convolutions(c, "f32", "cpu", 0, (const double[]){1e-6, 1e-6, 1e-6}, in);
        compare_convolutions(c, "tf32", "cpu", 1e-4, c->most, in);
        /* Rounding must not turn the NaN that the device itself makes into a number. */
        const uint32_t all_ones = 0x7fffffff;
        memcpy(in[0], &all_ones, sizeof all_ones);
        for (int i = 0; i < CONV_RESULTS; i++)
            assert_non_null(result[i] = malloc(conv_bytes(c, shape[i])));
        convolve("cuda", "tf32", c, in, result);
        for (int i = 0; i < CONV_RESULTS; i++)
            assert_int_equal(isnan(conv_error(c, result[i], result[i], conv_elements(shape[i]))), i != CONV_DX);
        /* Nor must an infinite number of one image meet a zero that stands for pixels behind the end of another. */
        const float zero = 0, infinite = INFINITY;
        memcpy(in[0], &zero, sizeof zero);
        if (c->x[0] > 1) memcpy((float *)in[0] + conv_elements(c->x) / (size_t)c->x[0], &infinite, sizeof infinite);
        convolve("cuda", "tf32", c, in, result);
        for (int i = 0; i < CONV_RESULTS; i++) {
            for (size_t j = 0; j < conv_elements(shape[i]); j++)
                assert_false(isnan(((const float *)result[i])[j]));
            free(result[i]), free(in[i]);
        }
    }
}

/* The rounding of both results to 16 bits. */
#define OF_BF16                                                                                                        \
    { 4e-3, 4e-3, 4e-3 }
#define OF_F16                                                                                                         \
    { 5e-4, 5e-4, 5e-4 }

/* The pictures of `vjp check` have no more tiles than a card has multiprocessors. */
static const conv_case conv_large_cases[] = {
    {VJP_BF16, {16, 64, 56, 56}, {64, 64, 3, 3}, {16, 64, 56, 56}, CONV_ATTRIBUTES(1, 1, 1, FIRST), OF_BF16},
    {VJP_BF16, {16, 56, 56, 64}, {64, 3, 3, 64}, {16, 56, 56, 64}, CONV_ATTRIBUTES(1, 1, 1, LAST), OF_BF16},
    {VJP_F16, {32, 28, 28, 192}, {256, 3, 3, 192}, {32, 28, 28, 256}, CONV_ATTRIBUTES(1, 1, 1, LAST), OF_F16},
    {VJP_BF16, {24, 256, 56, 56}, {64, 256, 1, 1}, {24, 64, 56, 56}, CONV_ATTRIBUTES(1, 0, 1, FIRST), OF_BF16},
    {VJP_BF16, {24, 56, 56, 64}, {256, 1, 1, 64}, {24, 56, 56, 256}, CONV_ATTRIBUTES(1, 0, 1, LAST), OF_BF16},
    {VJP_F16, {24, 57, 57, 128}, {128, 3, 3, 128}, {24, 29, 29, 128}, CONV_ATTRIBUTES(2, 1, 1, LAST), OF_F16},
    {VJP_BF16, {24, 14, 14, 512}, {512, 3, 3, 512}, {24, 14, 14, 512}, CONV_ATTRIBUTES(1, 1, 1, LAST), OF_BF16},
    {VJP_F32, {16, 64, 56, 56}, {64, 64, 3, 3}, {16, 64, 56, 56}, CONV_ATTRIBUTES(1, 1, 1, FIRST), OF_TF32},
    {VJP_F32, {24, 256, 56, 56}, {64, 256, 1, 1}, {24, 64, 56, 56}, CONV_ATTRIBUTES(1, 0, 1, FIRST), OF_TF32},
    /* dweight in several chains */
    {VJP_F32, {8, 56, 56, 128}, {256, 5, 5, 128}, {8, 56, 56, 256}, CONV_ATTRIBUTES(1, 2, 1, LAST), OF_TF32},
    {VJP_BF16, {16, 56, 56, 128}, {256, 5, 5, 128}, {16, 56, 56, 256}, CONV_ATTRIBUTES(1, 2, 1, LAST), OF_BF16},
    /* of many stages, and small enough for an emulated card */
    {VJP_BF16, {4, 34, 33, 64}, {136, 5, 5, 64}, {4, 34, 33, 136}, CONV_ATTRIBUTES(1, 2, 1, LAST), OF_BF16},
    {VJP_F16, {4, 64, 34, 33}, {136, 64, 5, 5}, {4, 136, 34, 33}, CONV_ATTRIBUTES(1, 2, 1, FIRST), OF_F16},
};

static bool can_be_emulated(const conv_case *c) {
    return conv_elements(c->y) * conv_elements(c->weight) / (size_t)c->weight[0] <= 1000000000;
}

static void convolutions_of_many_tiles(void **state) {
    (void)state;
    need_device();
    bool emulated = device_is("cuda", "emulated");
    for (size_t k = 0; k < sizeof conv_large_cases / sizeof conv_large_cases[0]; k++) {
        if (emulated && !(can_be_emulated(&conv_large_cases[k]) && in_part(k, 2))) continue;
        void *in[3];
        conv_inputs(&conv_large_cases[k], in);
        const char *products = conv_large_cases[k].dtype == VJP_F32 ? "tf32" : NULL;
        compare_convolutions(&conv_large_cases[k], products, "cpu", 0, conv_large_cases[k].most, in);
        for (int i = 0; i < 3; i++)
            free(in[i]);
    }
}

#endif

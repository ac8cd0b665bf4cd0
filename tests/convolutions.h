/* SPDX-License-Identifier: MIT */
/*
 * Tests of conv2d on CUDA that `vjp check` does not make: TF32, and pictures with more tiles than the card has
 * multiprocessors. After device_tests.h.
 */
#ifndef VJP_TESTS_CONVOLUTIONS_H
#define VJP_TESTS_CONVOLUTIONS_H

#include "device_tests.h"

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

/* y from x and weight; dx and dweight from dy, x and weight. */
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
    assert_int_equal(vjp_conv2d_forward(on, &t[RESULTS + CONV_Y], &t[X], &t[WEIGHT], NULL, &c->attributes), VJP_OK);
    assert_int_equal(vjp_conv2d_backward(on, &t[RESULTS + CONV_DX], &t[RESULTS + CONV_DWEIGHT], NULL, &t[DY], &t[X],
                                         &t[WEIGHT], &c->attributes),
                     VJP_OK);
    for (int i = 0; i < CONV_RESULTS; i++)
        assert_int_equal(vjp_download(on, result[i], t[RESULTS + i].data, 0, conv_bytes(c, shape[RESULTS + i])),
                         VJP_OK);
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

/*
 * With operands rounded to the nearest TF32 the results of these numbers are 2.6e-4 off; Hopper's products of y and dx
 * without groups truncate them: 6.9e-4.
 */
static const conv_case conv_tf32_cases[] = {
    {VJP_F32, {1, 93, 94, 32}, {128, 3, 3, 32}, {1, 93, 94, 128}, CONV_ATTRIBUTES(1, 1, 1, LAST), {1e-3, 1e-3, 4e-4}},
    {VJP_F32, {2, 64, 56, 56}, {48, 64, 3, 3}, {2, 48, 56, 56}, CONV_ATTRIBUTES(1, 1, 1, FIRST), {1e-3, 1e-3, 4e-4}},
    {VJP_F32, {2, 40, 17, 19}, {72, 20, 3, 3}, {2, 72, 9, 10}, CONV_ATTRIBUTES(2, 1, 2, FIRST), {4e-4, 4e-4, 4e-4}},
};

static void convolutions_are_f32_unless_tf32_is_asked_for(void **state) {
    (void)state;
    need_device();
    for (size_t k = 0; k < sizeof conv_tf32_cases / sizeof conv_tf32_cases[0]; k++) {
        const conv_case *c = &conv_tf32_cases[k];
        const int64_t *const shape[CONV_RESULTS] = {c->y, c->x, c->weight};
        void *in[3], *result[CONV_RESULTS];
        conv_inputs(c, in);
        compare_convolutions(c, "f32", "cpu", 0, (const double[]){1e-6, 1e-6, 1e-6}, in);
        compare_convolutions(c, "tf32", "cpu", 1e-4, c->most, in);
        /* Rounding must not turn the NaN that the device itself makes into a number. */
        const uint32_t all_ones = 0x7fffffff;
        memcpy(in[0], &all_ones, sizeof all_ones);
        for (int i = 0; i < CONV_RESULTS; i++)
            assert_non_null(result[i] = malloc(conv_bytes(c, shape[i])));
        convolve("cuda", "tf32", c, in, result);
        for (int i = 0; i < CONV_RESULTS; i++) {
            size_t count = conv_elements(shape[i]);
            assert_int_equal(isnan(conv_error(c, result[i], result[i], count)), i != CONV_DX);
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
};

static void convolutions_of_many_tiles(void **state) {
    (void)state;
    need_device();
    for (size_t k = 0; k < sizeof conv_large_cases / sizeof conv_large_cases[0]; k++) {
        void *in[3];
        conv_inputs(&conv_large_cases[k], in);
        compare_convolutions(&conv_large_cases[k], NULL, "cpu", 0, conv_large_cases[k].most, in);
        for (int i = 0; i < 3; i++)
            free(in[i]);
    }
}

#endif

/* SPDX-License-Identifier: MIT */
/*
 * The ends of the range on the CPU: finite inputs whose exact result fits give that result, even where an intermediate
 * sum or product does not fit; and steps of optimizers where a weight or the rate is not finite.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include <math.h>

#include "attributes.h"
#include "core/arithmetic.h"
#include "opening.h"
#include "sample.h"
#include "vjp.h"

static vjp_device *open_cpu(void) {
    vjp_device *device;
    assert_int_equal(vjp_open("cpu", &(vjp_options){.struct_size = sizeof(vjp_options), .threads = 2}, &device),
                     VJP_OK);
    return device;
}

/* Means of equal numbers near the largest, along lines of every kind of split and down columns. */
static void means(void **state) {
    (void)state;
    static const struct {
        int64_t rows, dim;
        int axis;
    } shapes[] = {{1, 64, 1}, {3, 1025, 1}, {1, 140000, 1}, {64, 1, 0}, {257, 3, 0}, {40, 130, 0}, {5000, 130, 0}};
    vjp_device *device = open_cpu();
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        int64_t rows = shapes[s].rows, dim = shapes[s].dim, results = shapes[s].axis ? rows : dim;
        float *x = malloc((size_t)(rows * dim) * sizeof *x), *y = malloc((size_t)results * sizeof *y);
        for (int64_t i = 0; i < rows * dim; i++)
            x[i] = 3e38f;
        vjp_tensor from = vjp_tensor_of(x, VJP_F32, 2, (int64_t[]){rows, dim});
        vjp_tensor to = vjp_tensor_of(y, VJP_F32, 1, &results);
        assert_int_equal(vjp_reserve(device, 64 << 20), VJP_OK);
        assert_int_equal(vjp_mean_forward(device, &to, &from, WITH(mean, .axis = shapes[s].axis, .axes = 1)), VJP_OK);
        for (int64_t i = 0; i < results; i++)
            if (!(fabs((double)y[i] / 3e38 - 1) < 1e-6)) fail_msg("[%d, %d]: %g", (int)rows, (int)dim, (double)y[i]);
        free(x);
        free(y);
    }
    vjp_close(device);
}

/* Without decay an infinite weight stays, and the momentum does not see it. */
static void infinite_weights(void **state) {
    (void)state;
    vjp_device *device = open_cpu();
    float w[3] = {INFINITY, -INFINITY, 1}, g[3] = {1, 1, 1}, m[3] = {0}, v[3] = {0}, lr = 0.5f, out[3], next[3],
          more[3];
    int32_t one = 1;
    vjp_tensor weights = vjp_tensor_of(w, VJP_F32, 1, (int64_t[]){3}), gradient = weights, first = weights;
    vjp_tensor second = weights, result = weights, first_next = weights, second_next = weights;
    gradient.data = g, first.data = m, second.data = v, result.data = out, first_next.data = next;
    second_next.data = more;
    vjp_tensor rate = vjp_tensor_of(&lr, VJP_F32, 0, NULL), step = vjp_tensor_of(&one, VJP_I32, 0, NULL);
    assert_int_equal(
        vjp_sgd_forward(device, &result, &first_next, &weights, &first, &gradient, &rate, NULL, WITH(sgd, .beta = 0.9)),
        VJP_OK);
    assert_true(out[0] == INFINITY && out[1] == -INFINITY && out[2] == 0.5f);
    assert_true(next[0] == 1 && next[1] == 1 && next[2] == 1);
    assert_int_equal(vjp_adamw_forward(device, &result, &first_next, &second_next, &weights, &first, &second, &gradient,
                                       &rate, &step, NULL, WITH(adamw, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8)),
                     VJP_OK);
    assert_true(out[0] == INFINITY && out[1] == -INFINITY && fabs((double)out[2] - 0.5) < 1e-6);
    vjp_close(device);
}

/* A NaN rate shows in the weights and does not reach the averages. */
static void nan_rate(void **state) {
    (void)state;
    static const char *const names[] = {"cpu", "ref"}, *const ops[] = {"adamw", "sgd"};
    for (int d = 0; d < 2; d++)
        for (int o = 0; o < 2; o++) {
            vjp_device *device = open_with(names[d], &(vjp_options){.struct_size = sizeof(vjp_options), .threads = 1});
            call made;
            assert_true(call_make(&made, device, sample_find(ops[o]), VJP_FORWARD,
                                  (sample_types){VJP_F32, VJP_F32, VJP_I32}, 1));
            call_put(&made.tensor[call_slot(&made, "lr")], 0, (double)NAN);
            assert_int_equal(call_run(device, &made), VJP_OK);
            for (int64_t i = 0; i < 390; i++) {
                assert_true(isnan(call_get(&made.tensor[0], i)));
                assert_true(isfinite(call_get(&made.tensor[1], i)));
            }
            call_free(&made);
            vjp_close(device);
        }
}

/* core/arithmetic.h at the ends of its types. */
static void sizes(void **state) {
    (void)state;
    size_t r = 7;
    assert_true(vjp_add_size(SIZE_MAX - 1, 1, &r) && r == SIZE_MAX);
    assert_false(vjp_add_size(SIZE_MAX, 1, &r));
    assert_true(vjp_mul_size(SIZE_MAX / 3, 3, &r) && r == SIZE_MAX / 3 * 3);
    assert_true(vjp_mul_size(SIZE_MAX, 0, &r) && r == 0);
    r = 7;
    assert_false(vjp_mul_size(SIZE_MAX / 3 + 1, 3, &r));
    assert_false(vjp_align_size(SIZE_MAX - 62, 64, &r));
    assert_int_equal(r, 7);
    assert_true(vjp_align_size(65, 64, &r) && r == 128);
    assert_true(vjp_align_size(0, 64, &r) && r == 0);
    assert_true(vjp_align_size(SIZE_MAX - 63, 64, &r) && r == SIZE_MAX - 63);
    assert_true(vjp_divide_up(INT64_MAX, 2) == INT64_MAX / 2 + 1 && vjp_divide_up(0, 5) == 0);
    assert_true(vjp_round_up(65, 64) == 128 && vjp_round_up(64, 64) == 64);
    assert_true(vjp_min(-1, 2) == -1 && vjp_max(-1, 2) == 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(means), cmocka_unit_test(infinite_weights),
                                       cmocka_unit_test(nan_rate), cmocka_unit_test(sizes)};
    return cmocka_run_group_tests_name("range", tests, NULL, NULL);
}

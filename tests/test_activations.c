/* SPDX-License-Identifier: MIT */
/*
 * Activations and their derivatives, one number at a time. A norm over a whole tensor hides what happens far from 0:
 * there tanh' is 1e-8 and less, and 1 - t * t can lose every digit without changing the norm. Here each derivative is
 * compared with ref separately, from 1e-30 to 1e30 on both sides, through linear with a single weight of 1.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <math.h>

#include "attributes.h"
#include "vjp.h"

enum { MAX_COUNT = 4096 };

/*
 * Near 0 there are zero crossings, where only the absolute error means something; from FAR on every value is a small
 * tail or close to 1, and must be accurate relative to itself. Values that f32 holds with fewer digits are left out.
 * Without FMA the rounding error of an exponent is lost, which far from 0 costs a digit.
 */
static const double FAR = 6, RELATIVE = 1e-6, RELATIVE_PLAIN = 1e-5, ABSOLUTE = 1e-6, SMALLEST = 1e-30;
static const double LAST_DIGIT = 0x1p-149; /* of the smallest f32 */

/* The instruction sets of the CPU, of which a machine has some. */
static const char *const sets[] = {"plain", "neon", "avx2", "avx512"};

enum { SETS = sizeof sets / sizeof sets[0] };

static vjp_device *open_set(const char *name, const char *set) {
    vjp_device *device;
    vjp_status status = vjp_open(
        name, &(vjp_options){.struct_size = sizeof(vjp_options), .threads = 2, .instruction_set = set}, &device);
    if (status == VJP_OK) return device;
    assert_non_null(set);
    vjp_close(device);
    return NULL;
}

static int fill(float *x) {
    int n = 0;
    x[n++] = 0;
    for (double magnitude = 1e-30; magnitude < 2e30 && n + 2 <= MAX_COUNT;
         magnitude *= magnitude < 1e-2 || magnitude > 200 ? 2 : 1.01) {
        x[n++] = (float)magnitude;
        x[n++] = (float)-magnitude;
    }
    return n;
}

/* y and da of act(x * 1), dy = 1; false where there is no such set. */
static bool run_set(const char *name, const char *set, vjp_dtype dtype, vjp_activation activation, int n, void *x,
                    void *one, void *dy, void *y, void *da) {
    vjp_device *device = open_set(name, set);
    if (!device) return false;
    vjp_tensor a = vjp_tensor_of(x, dtype, 2, (int64_t[]){n, 1}), b = vjp_tensor_of(one, dtype, 2, (int64_t[]){1, 1});
    vjp_tensor up = vjp_tensor_of(dy, dtype, 2, (int64_t[]){n, 1}), out = vjp_tensor_of(y, dtype, 2, (int64_t[]){n, 1});
    vjp_tensor down = vjp_tensor_of(da, dtype, 2, (int64_t[]){n, 1});
    assert_int_equal(vjp_linear_forward(device, &out, NULL, &a, &b, NULL, NULL, NULL,
                                        WITH(linear, .activation = activation, .transpose_b = 0)),
                     VJP_OK);
    assert_int_equal(vjp_linear_backward(device, &down, NULL, NULL, NULL, NULL, &up, &a, &b, NULL, NULL, NULL,
                                         WITH(linear, .activation = activation, .transpose_b = 0, .zero_nan = 0)),
                     VJP_OK);
    vjp_close(device);
    return true;
}

static void run(const char *name, vjp_dtype dtype, vjp_activation activation, int n, void *x, void *one, void *dy,
                void *y, void *da) {
    run_set(name, NULL, dtype, activation, n, x, one, dy, y, da);
}

static int compare(const char *what, const char *set, int activation, int n, const float *x, const float *have,
                   const double *want) {
    double relative = strcmp(set, "plain") == 0 ? RELATIVE_PLAIN : RELATIVE;
    int failed = 0;
    for (int i = 0; i < n; i++) {
        double error = fabs((double)have[i] - want[i]), size = fabs(want[i]);
        double bound = relative * size + (fabs((double)x[i]) < FAR ? ABSOLUTE : 0);
        if (size < SMALLEST) /* f32 holds few digits there; silu is accurate to the last of them */
            bound = activation == VJP_ACTIVATION_SILU ? bound + 2 * LAST_DIGIT : SMALLEST;
        if (error <= bound) continue;
        if (failed++ < 5)
            print_error("activation %d, %s, %s at %g: %.9g, not %.9g\n", activation, set, what, (double)x[i],
                        (double)have[i], want[i]);
    }
    return failed;
}

static void every_activation(void **state) {
    (void)state;
    static float x[MAX_COUNT], dy[MAX_COUNT], y[MAX_COUNT], da[MAX_COUNT];
    static double exact_x[MAX_COUNT], exact_dy[MAX_COUNT], exact_y[MAX_COUNT], exact_da[MAX_COUNT];
    float one = 1;
    double exact_one = 1;
    int n = fill(x), failed = 0, found = 0;
    assert_true(n > 1000);
    for (int i = 0; i < n; i++) {
        exact_x[i] = x[i];
        exact_dy[i] = dy[i] = 1;
    }
    for (int activation = VJP_ACTIVATION_NONE; activation <= VJP_ACTIVATION_TANH; activation++) {
        run("ref", VJP_F64, (vjp_activation)activation, n, exact_x, &exact_one, exact_dy, exact_y, exact_da);
        for (int s = 0; s < SETS; s++) {
            if (!run_set("cpu", sets[s], VJP_F32, (vjp_activation)activation, n, x, &one, dy, y, da)) continue;
            found++;
            failed += compare("y", sets[s], activation, n, x, y, exact_y);
            failed += compare("derivative", sets[s], activation, n, x, da, exact_da);
        }
    }
    assert_true(found > 0);
    assert_int_equal(failed, 0);
}

/* What is known without an oracle. */
static void known_values(void **state) {
    (void)state;
    static const char *const names[] = {"cpu", "ref"};
    float x[] = {0, -0.0f, 1e30f, -1e30f, INFINITY, -INFINITY, 20}, one = 1, dy[] = {1, 1, 1, 1, 1, 1, 1}, y[7], da[7];
    for (int d = 0; d < 2; d++) {
        run(names[d], VJP_F32, VJP_ACTIVATION_RELU, 7, x, &one, dy, y, da);
        assert_true(da[0] == 0 && da[1] == 0 && da[2] == 1 && da[3] == 0); /* relu'(0) = 0 */
        static const int squashed[] = {VJP_ACTIVATION_GELU_TANH, VJP_ACTIVATION_GELU_ERF, VJP_ACTIVATION_SILU};
        for (int k = 0; k < 3; k++) {
            run(names[d], VJP_F32, (vjp_activation)squashed[k], 7, x, &one, dy, y, da);
            assert_true(fabs((double)da[0] - 0.5) < 1e-6 && da[2] == 1 && da[3] == 0 && da[4] == 1 && da[5] == 0);
            assert_true(y[0] == 0 && y[2] == 1e30f && y[3] == 0 && y[4] == INFINITY);
        }
        run(names[d], VJP_F32, VJP_ACTIVATION_TANH, 7, x, &one, dy, y, da);
        assert_true(da[0] == 1 && da[2] == 0 && fabs((double)da[6] / (4 * exp(-40)) - 1) < 1e-5);
    }
}

/* swiglu's y, dgate and dup of these gates. */
static void run_swiglu(const char *name, vjp_dtype dtype, int n, void *gate, void *up, void *dy, void *out[3]) {
    vjp_device *device = open_set(name, NULL);
    vjp_tensor tensor[6];
    void *data[6] = {out[0], out[1], out[2], gate, up, dy};
    for (int i = 0; i < 6; i++)
        tensor[i] = vjp_tensor_of(data[i], dtype, 1, (int64_t[]){n});
    assert_int_equal(vjp_swiglu_forward(device, &tensor[0], &tensor[3], &tensor[4]), VJP_OK);
    assert_int_equal(vjp_swiglu_backward(device, &tensor[1], &tensor[2], NULL, &tensor[5], &tensor[3], &tensor[4]),
                     VJP_OK);
    vjp_close(device);
}

/* With up and dy 1 they are silu, its derivative, and silu again, which share one exp there. */
static void through_swiglu(void **state) {
    (void)state;
    static float x[MAX_COUNT], one[MAX_COUNT], out[3][MAX_COUNT];
    static double exact_x[MAX_COUNT], exact_one[MAX_COUNT], exact_out[3][MAX_COUNT];
    static const char *const names[] = {"swiglu's y", "dgate", "dup"};
    int n = fill(x), failed = 0;
    for (int i = 0; i < n; i++) {
        exact_x[i] = x[i];
        exact_one[i] = one[i] = 1;
    }
    run_swiglu("cpu", VJP_F32, n, x, one, one, (void *[3]){out[0], out[1], out[2]});
    run_swiglu("ref", VJP_F64, n, exact_x, exact_one, exact_one, (void *[3]){exact_out[0], exact_out[1], exact_out[2]});
    for (int i = 0; i < 3; i++)
        failed += compare(names[i], "the best set", VJP_ACTIVATION_SILU, n, x, out[i], exact_out[i]);
    assert_int_equal(failed, 0);
    /* dy * up is past all range where the slope is 0. */
    float gate = -200, huge = 1e30f, results[3];
    run_swiglu("cpu", VJP_F32, 1, &gate, &huge, &huge, (void *[3]){&results[0], &results[1], &results[2]});
    assert_true(results[0] == 0 && results[1] == 0 && results[2] == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_activation), cmocka_unit_test(known_values),
                                       cmocka_unit_test(through_swiglu)};
    return cmocka_run_group_tests_name("activations", tests, NULL, NULL);
}

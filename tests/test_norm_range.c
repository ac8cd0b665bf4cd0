/* SPDX-License-Identifier: MIT */
/*
 * The norms at the ends of the range: finite inputs whose result f32 holds, while an intermediate number that the fast
 * kernels keep in f32 exceeds it. Each case is compared with ref, number by number where ref is finite, on every
 * instruction set of the CPU. Then the bits of NaN: they must be the same for every set.
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

typedef enum norm_op { LAYER, RMS, GROUP, GROUP_LAST } norm_op;

/* Element i of x is `x`, times -1 where i is odd if it alternates; dy in the same way. */
typedef struct range_case {
    norm_op op;
    int64_t rows, dim; /* group norms: samples; elements of each, in 4 channels and 2 groups */
    double x, dy, gamma;
    bool x_alternates, dy_alternates;
} range_case;

static const range_case cases[] = {
    {LAYER, 5, 16, 1.1e36, 1, 1, false, true},         {LAYER, 5, 1000, -3e38, 1, 1, false, true},
    {LAYER, 5, 100, 3e38, 1, 1, true, true},           {LAYER, 2, 9000, 1.1e36, 1, 1, false, true},
    {LAYER, 5, 100, 1e20, 1e38, 100, true, false},     {LAYER, 5, 100, 1e20, 1e38, 0, true, false},
    {LAYER, 2, 9000, 1e20, 1e38, 0, true, false},      {RMS, 5, 64, 3e38, 1, 1, false, true},
    {RMS, 5, 64, 1e20, 1e38, 100, false, true},        {GROUP, 2, 80, 1e37, 1, 1, false, true},
    {GROUP, 2, 80, 1, 1e38, 0, true, false},           {GROUP, 1, 1 << 20, 1e37, 1, 1, false, true},
    {GROUP, 1, 1 << 20, 1, 1e38, 0, true, false},      {GROUP_LAST, 2, 80, 1e37, 1, 1, false, true},
    {GROUP_LAST, 2, 80, 1, 1e38, 0, true, false},      {GROUP_LAST, 1, 1 << 20, 1e37, 1, 1, false, true},
    {GROUP_LAST, 1, 1 << 20, 1, 1e38, 0, true, false},
};

enum { OUTPUTS = 6, CHANNELS = 4, GROUPS = 2 };

static const char *const output_names[OUTPUTS] = {"y", "mean", "rstd", "dx", "dgamma", "dbeta"};

typedef struct results {
    float *data[OUTPUTS];
    int64_t n[OUTPUTS];
} results;

static const char *const sets[] = {"plain", "neon", "avx2", "avx512"};

/* NULL: this machine or this build does not have the set. */
static vjp_device *open_set(const char *name, const char *set) {
    vjp_device *device;
    vjp_options options = {.struct_size = sizeof options, .threads = 2, .instruction_set = set};
    if (vjp_open(name, &options, &device) == VJP_OK) return device;
    assert_non_null(set);
    vjp_close(device);
    return NULL;
}

static results run(vjp_device *device, const range_case *c, float *x, float *dy) {
    bool group = c->op >= GROUP, last = c->op == GROUP_LAST;
    int64_t params = group ? CHANNELS : c->dim, statistics = group ? c->rows * GROUPS : c->rows;
    results r = {.n = {c->rows * c->dim, statistics, statistics, c->rows * c->dim, params, params}};
    for (int k = 0; k < OUTPUTS; k++)
        assert_non_null(r.data[k] = calloc((size_t)r.n[k], sizeof(float)));
    float *gamma = malloc((size_t)params * sizeof(float));
    assert_non_null(gamma);
    for (int64_t i = 0; i < params; i++)
        gamma[i] = (float)c->gamma;
    int64_t plane = c->dim / CHANNELS;
    const int64_t rows[] = {c->rows, c->dim}, first[] = {c->rows, CHANNELS, plane}, end[] = {c->rows, plane, CHANNELS};
    const int64_t groups[] = {c->rows, GROUPS};
    vjp_tensor t[OUTPUTS], in[3];
    float *inputs[] = {x, dy};
    for (int k = 0; k < OUTPUTS; k++)
        t[k] = k % 3 == 0         ? vjp_tensor_of(r.data[k], VJP_F32, group ? 3 : 2,
                                          !group ? rows
                                                  : last ? end
                                                         : first)
               : k == 1 || k == 2 ? vjp_tensor_of(r.data[k], VJP_F32, group ? 2 : 1, groups)
                                  : vjp_tensor_of(r.data[k], VJP_F32, 1, &params);
    for (int k = 0; k < 2; k++)
        in[k] = vjp_tensor_of(inputs[k], VJP_F32, group ? 3 : 2, !group ? rows : last ? end : first);
    in[2] = vjp_tensor_of(gamma, VJP_F32, 1, &params);
    vjp_status status[2];
    if (c->op == LAYER) {
        const vjp_layer_norm_attributes *a = WITH(layer_norm, .axes = 1, .eps = 1e-5);
        status[0] = vjp_layer_norm_forward(device, &t[0], &t[1], &t[2], &in[0], &in[2], NULL, a);
        status[1] = vjp_layer_norm_backward(device, &t[3], &t[4], &t[5], &in[1], &in[0], &in[2], NULL, NULL, a);
    } else if (c->op == RMS) {
        const vjp_rms_norm_attributes *a = WITH(rms_norm, .axes = 1, .eps = 1e-5);
        status[0] = vjp_rms_norm_forward(device, &t[0], &t[2], &in[0], &in[2], NULL, a);
        status[1] = vjp_rms_norm_backward(device, &t[3], &t[4], &t[5], NULL, &in[1], &in[0], &in[2], NULL, NULL, a);
    } else {
        vjp_layout layout = last ? VJP_LAYOUT_CHANNELS_LAST : VJP_LAYOUT_CHANNELS_FIRST;
        const vjp_group_norm_attributes *a = WITH(group_norm, .groups = GROUPS, .layout = layout, .eps = 1e-5);
        status[0] = vjp_group_norm_forward(device, &t[0], &t[1], &t[2], &in[0], &in[2], NULL, a);
        status[1] = vjp_group_norm_backward(device, &t[3], &t[4], &t[5], &in[1], &in[0], &in[2], NULL, NULL, a);
    }
    assert_int_equal(status[0], VJP_OK);
    assert_int_equal(status[1], VJP_OK);
    free(gamma);
    return r;
}

static void release(results *r) {
    for (int k = 0; k < OUTPUTS; k++)
        free(r->data[k]);
}

/* Errors are measured against the largest number of the output that ref has. */
static int compare(int which, const char *set, const results *have, const results *want) {
    int wrong = 0;
    for (int k = 0; k < OUTPUTS; k++) {
        double largest = 0;
        for (int64_t i = 0; i < want->n[k]; i++)
            if (isfinite(want->data[k][i])) largest = fmax(largest, fabs((double)want->data[k][i]));
        for (int64_t i = 0; i < want->n[k]; i++) {
            double h = (double)have->data[k][i], w = (double)want->data[k][i];
            if (!isfinite(w) || fabs(h - w) <= 1e-5 * largest) continue;
            if (!wrong++)
                print_error("case %d, %s: %s[%lld] is %g, ref has %g\n", which, set, output_names[k], (long long)i, h,
                            w);
        }
    }
    return wrong;
}

static void fill(const range_case *c, float *x, float *dy) {
    for (int64_t i = 0; i < c->rows * c->dim; i++) {
        x[i] = (float)(c->x_alternates && i % 2 ? -c->x : c->x);
        dy[i] = (float)(c->dy_alternates && i % 2 ? -c->dy : c->dy);
    }
}

static void test_ends_of_the_range(void **state) {
    (void)state;
    vjp_device *ref = open_set("ref", NULL);
    int wrong = 0, compared = 0;
    for (int which = 0; which < (int)(sizeof cases / sizeof cases[0]); which++) {
        const range_case *c = &cases[which];
        size_t bytes = (size_t)(c->rows * c->dim) * sizeof(float);
        float *x = malloc(bytes), *dy = malloc(bytes);
        assert_true(x && dy);
        fill(c, x, dy);
        results want = run(ref, c, x, dy);
        for (size_t s = 0; s < sizeof sets / sizeof sets[0]; s++) {
            vjp_device *cpu = open_set("cpu", sets[s]);
            if (!cpu) continue;
            results have = run(cpu, c, x, dy);
            wrong += compare(which, sets[s], &have, &want);
            compared++;
            release(&have);
            vjp_close(cpu);
        }
        release(&want);
        free(x);
        free(dy);
    }
    vjp_close(ref);
    assert_true(compared > 0);
    assert_int_equal(wrong, 0);
}

/* Two sets and both signs of NaN and Inf, in x and in dy; rows of 100 so that no element is past a vector alone. */
static void test_bits_of_nan(void **state) {
    (void)state;
    static const norm_op ops[] = {LAYER, RMS, GROUP, GROUP_LAST};
    static const float special[] = {NAN, -NAN, INFINITY, -INFINITY};
    int wrong = 0;
    for (size_t o = 0; o < 4; o++)
        for (int where = 0; where < 8; where++) {
            range_case c = {ops[o], 5, 100, 1.5, 0.5, 1, true, true};
            float x[500], dy[500];
            fill(&c, x, dy);
            (where < 4 ? x : dy)[137] = special[where % 4];
            results seen = {0};
            for (size_t s = 1; s < sizeof sets / sizeof sets[0]; s++) { /* plain may be without FMA */
                vjp_device *cpu = open_set("cpu", sets[s]);
                if (!cpu) continue;
                results have = run(cpu, &c, x, dy);
                vjp_close(cpu);
                for (int k = 0; k < OUTPUTS; k++) {
                    for (int64_t i = 0; i < have.n[k]; i++) {
                        float value = have.data[k][i];
                        uint32_t bits;
                        memcpy(&bits, &value, sizeof bits);
                        if (value != value && bits != 0x7fc00000) wrong++;
                    }
                    if (seen.data[k] && memcmp(seen.data[k], have.data[k], (size_t)have.n[k] * sizeof(float))) wrong++;
                }
                release(&seen);
                seen = have;
            }
            release(&seen);
            if (wrong) print_error("op %d, place %d: %d numbers differ\n", (int)ops[o], where, wrong);
        }
    assert_int_equal(wrong, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ends_of_the_range),
        cmocka_unit_test(test_bits_of_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* SPDX-License-Identifier: MIT */
/*
 * The generator of dropout: Philox4x32-10 against the vectors that its authors published, the share of elements that it
 * drops, that both halves of seed, step and stream change the mask, and that cpu and ref drop the same.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "attributes.h"
#include "core/philox.h"
#include "vjp.h"

static void published_vectors(void **state) {
    (void)state;
    static const struct {
        vjp_philox counter;
        uint32_t key[2];
        vjp_philox words;
    } rows[] = {
        {{{0, 0, 0, 0}}, {0, 0}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
        {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
         {0xffffffff, 0xffffffff},
         {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        vjp_philox words = vjp_philox4x32_10(rows[i].counter, rows[i].key[0], rows[i].key[1]);
        assert_memory_equal(&words, &rows[i].words, sizeof words);
    }
}

static void thresholds(void **state) {
    (void)state;
    assert_int_equal(vjp_dropout_threshold(0), 0);
    assert_int_equal(vjp_dropout_threshold(0.5), 0x80000000u);
    assert_int_equal(vjp_dropout_threshold(1 - 0x1p-53), 0xffffffffu);
}

enum { COUNT = 100003 };

static vjp_device *open_device(const char *name) {
    vjp_device *device;
    assert_int_equal(vjp_open(name, NULL, &device), VJP_OK);
    return device;
}

/* The mask: 1 where an element of ones is kept. */
static void mask_of(vjp_device *device, int64_t seed, int64_t step, int64_t stream, double p, char *kept) {
    float *x = malloc(COUNT * sizeof *x), *y = malloc(COUNT * sizeof *y);
    int64_t counter[2] = {seed, step};
    for (int i = 0; i < COUNT; i++)
        x[i] = 1;
    vjp_tensor tx = vjp_tensor_of(x, VJP_F32, 1, (int64_t[]){COUNT}), ty = vjp_tensor_of(y, VJP_F32, 1, tx.shape);
    vjp_tensor tc = vjp_tensor_of(counter, VJP_I64, 1, (int64_t[]){2});
    assert_int_equal(vjp_dropout_forward(device, &ty, &tx, &tc, WITH(dropout, .p = p, .stream = stream)), VJP_OK);
    for (int i = 0; i < COUNT; i++)
        kept[i] = y[i] != 0;
    free(x);
    free(y);
}

static int differences(const char *a, const char *b) {
    int count = 0;
    for (int i = 0; i < COUNT; i++)
        count += a[i] != b[i];
    return count;
}

static void masks(void **state) {
    (void)state;
    vjp_device *cpu = open_device("cpu"), *ref = open_device("ref");
    static char base[COUNT], other[COUNT];
    mask_of(cpu, 42, 7, 3, 0.3, base);
    int kept = 0, same_as_before = 0;
    for (int i = 0; i < COUNT; i++) {
        kept += base[i];
        same_as_before += i && base[i] == base[i - 1];
    }
    /* Within five standard deviations of what independent choices give. */
    assert_true(fabs(kept - 0.7 * COUNT) < 5 * sqrt(0.3 * 0.7 * COUNT));
    assert_true(fabs(same_as_before - 0.58 * COUNT) < 5 * sqrt(0.58 * 0.42 * COUNT));
    mask_of(ref, 42, 7, 3, 0.3, other);
    assert_int_equal(differences(base, other), 0);
    static const int64_t high = (int64_t)1 << 32;
    static const int64_t changed[][3] = {{43, 7, 3},        {42 + high, 7, 3}, {42, 8, 3}, {42, 7 + high, 3},
                                         {42, 7, 4},        {42, 7, 3 + high}, {7, 42, 3}, {42, 3, 7},
                                         {INT64_MIN, 7, 3}, {-1, -1, -1},      {0, 0, 0}};
    for (size_t i = 0; i < sizeof changed / sizeof changed[0]; i++) {
        mask_of(cpu, changed[i][0], changed[i][1], changed[i][2], 0.3, other);
        int different = differences(base, other);
        assert_true(fabs(different - 0.42 * COUNT) < 5 * sqrt(0.42 * 0.58 * COUNT));
    }
    vjp_close(cpu);
    vjp_close(ref);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_vectors),
        cmocka_unit_test(thresholds),
        cmocka_unit_test(masks),
    };
    return cmocka_run_group_tests_name("dropout", tests, NULL, NULL);
}

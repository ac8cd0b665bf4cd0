/* SPDX-License-Identifier: MIT */
/* vjp_call_many(): the bits of separate calls, whether the device merges them or not, and what stops it from merging.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "merging.h"
#include "op/op.h"

enum { MOST = 40, SLOTS = 5, TIME = 7, DIM = 8, ROW = 12 * DIM, FLOATS = TIME * ROW };

static size_t merged; /* calls that run_many() was given */

static vjp_status count_many(const vjp_work *const *works, size_t count) {
    merged += count;
    return merging_run(works, count);
}

/* A device of the host that merges calls, from the last to the first. */
static vjp_device *open_merging(const char *name, vjp_backend *backend) {
    vjp_device *device;
    vjp_options options = VJP_OPTIONS_DEFAULTS;
    assert_int_equal(vjp_open(name, &options, &device), VJP_OK);
    merge_calls(device, backend);
    backend->run_many = count_many;
    merged = 0;
    return device;
}

typedef struct ropes {
    float x[MOST][FLOATS], y[MOST][FLOATS], cosine[TIME * DIM / 2], sine[TIME * DIM / 2];
    vjp_tensor x_tensor[MOST], y_tensor[MOST], tables[2];
    const vjp_tensor *list[MOST * SLOTS];
} ropes;

/* Calls of rope with other numbers of heads. */
static ropes *make_ropes(void) {
    ropes *r = calloc(1, sizeof *r);
    assert_non_null(r);
    for (int i = 0; i < TIME * DIM / 2; i++) {
        r->cosine[i] = 0.9f - 0.03f * (float)i;
        r->sine[i] = 0.1f + 0.02f * (float)i;
    }
    const int64_t table[] = {TIME, DIM / 2};
    r->tables[0] = vjp_tensor_of(r->cosine, VJP_F32, 2, table);
    r->tables[1] = vjp_tensor_of(r->sine, VJP_F32, 2, table);
    for (int k = 0; k < MOST; k++) {
        const int64_t shape[] = {TIME, 1 + k % 12, DIM};
        for (int i = 0; i < FLOATS; i++) {
            r->x[k][i] = (float)((i * 31 + k * 17) % 101) - 50;
            r->y[k][i] = -1;
        }
        r->x_tensor[k] = vjp_tensor_of(r->x[k], VJP_F32, 3, shape);
        r->y_tensor[k] = vjp_tensor_of(r->y[k], VJP_F32, 3, shape);
        const vjp_tensor *one[SLOTS] = {&r->y_tensor[k], &r->x_tensor[k], &r->tables[0], &r->tables[1], NULL};
        memcpy(r->list + (size_t)k * SLOTS, one, sizeof one);
    }
    return r;
}

static void call_separately(vjp_device *device, const ropes *r, vjp_pass pass, size_t calls, const void *attributes) {
    for (size_t i = 0; i < calls; i++)
        assert_int_equal(vjp_call(device, &vjp_op_rope, pass, r->list + i * SLOTS, SLOTS, attributes), VJP_OK);
}

static void bits_are_those_of_calls(void **state) {
    (void)state;
    static const size_t counts[] = {0, 1, 2, 3, 16, 17, 40};
    static const char *const names[] = {"ref", "cpu"};
    const vjp_rope_attributes attributes = {
        .struct_size = sizeof attributes, .n_rot = DIM, .pairing = VJP_PAIRING_INTERLEAVED};
    for (int n = 0; n < 2; n++)
        for (int merges = 0; merges < 2; merges++)
            for (size_t k = 0; k < sizeof counts / sizeof counts[0]; k++)
                for (int pass = 0; pass < VJP_PASS_COUNT; pass++) {
                    vjp_backend backend;
                    vjp_device *device = open_merging(names[n], &backend);
                    if (!merges) backend.merges = NULL;
                    ropes *one = make_ropes(), *many = make_ropes();
                    const void *given = pass ? &attributes : NULL;
                    call_separately(device, one, (vjp_pass)pass, counts[k], given);
                    assert_int_equal(
                        vjp_call_many(device, &vjp_op_rope, (vjp_pass)pass, many->list, SLOTS, counts[k], given),
                        VJP_OK);
                    /* 17 calls are 16 and one that is left. */
                    assert_int_equal(merged, merges && counts[k] > 1 ? counts[k] - (counts[k] == 17) : 0);
                    assert_memory_equal(one->y, many->y, sizeof one->y);
                    free(one);
                    free(many);
                    vjp_close(device);
                }
}

/* Calls that use what another one writes run in their order, one by one. */
static void dependent_calls_keep_their_order(void **state) {
    (void)state;
    for (int what = 0; what < 4; what++) {
        vjp_backend backend;
        vjp_device *device = open_merging("cpu", &backend);
        ropes *r[2] = {make_ropes(), make_ropes()};
        for (int i = 0; i < 2; i++) {
            for (int k = 0; k < 2; k++) /* calls 0 and 12 have one head */
                memcpy(r[i]->list + k * SLOTS, r[i]->list + k * 12 * SLOTS, SLOTS * sizeof r[i]->list[0]);
            r[i]->list[SLOTS + 1] = what == 0 ? r[i]->list[0] : r[i]->list[SLOTS + 1]; /* reads the other's output */
            r[i]->list[SLOTS] = what == 1 ? r[i]->list[1] : r[i]->list[SLOTS];         /* writes the other's input */
            if (what >= 2) r[i]->list[SLOTS] = r[i]->list[0];                          /* both write one output */
            if (what == 3) r[i]->y_tensor[0].flags = VJP_ACCUMULATE;
        }
        call_separately(device, r[0], VJP_FORWARD, 2, NULL);
        assert_int_equal(vjp_call_many(device, &vjp_op_rope, VJP_FORWARD, r[1]->list, SLOTS, 2, NULL), VJP_OK);
        assert_int_equal(merged, 0);
        assert_memory_equal(r[0]->y, r[1]->y, sizeof r[0]->y);
        assert_memory_equal(r[0]->x, r[1]->x, sizeof r[0]->x);
        free(r[0]);
        free(r[1]);
        vjp_close(device);
    }
}

/* Queries and keys of one tensor: each one's rows are between those of the other. */
static void rows_apart_are_independent(void **state) {
    (void)state;
    vjp_backend backend;
    vjp_device *device = open_merging("cpu", &backend);
    ropes *r = make_ropes();
    for (int k = 0; k < 2; k++) {
        const int64_t shape[] = {TIME, 6, DIM};
        r->x_tensor[k] = vjp_tensor_of(r->x[0] + k * 6 * DIM, VJP_F32, 3, shape);
        r->x_tensor[k].stride[0] = ROW;
        r->y_tensor[k] = vjp_tensor_of(r->y[0] + k * 6 * DIM, VJP_F32, 3, shape);
        r->y_tensor[k].stride[0] = ROW;
    }
    assert_int_equal(vjp_call_many(device, &vjp_op_rope, VJP_FORWARD, r->list, SLOTS, 2, NULL), VJP_OK);
    assert_int_equal(merged, 2);
    const int64_t whole[] = {TIME, 12, DIM};
    vjp_tensor x = vjp_tensor_of(r->x[0], VJP_F32, 3, whole), y = vjp_tensor_of(r->y[1], VJP_F32, 3, whole);
    assert_int_equal(vjp_rope_forward(device, &y, &x, &r->tables[0], &r->tables[1], NULL, NULL), VJP_OK);
    assert_memory_equal(r->y[0], r->y[1], sizeof r->y[0]);
    free(r);
    vjp_close(device);
}

/* One wrong call among many: nothing is written. */
static void all_are_checked_first(void **state) {
    (void)state;
    static const size_t wrong[] = {0, 1, 16, 39};
    for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++) {
        vjp_backend backend;
        vjp_device *device = open_merging("cpu", &backend);
        ropes *r = make_ropes(), *before = make_ropes();
        r->x_tensor[wrong[k]].shape[0]++;
        assert_int_equal(vjp_call_many(device, &vjp_op_rope, VJP_FORWARD, r->list, SLOTS, MOST, NULL), VJP_INVALID);
        assert_non_null(strstr(vjp_error(device), "rope.forward: "));
        assert_memory_equal(r->y, before->y, sizeof r->y);
        free(r);
        free(before);
        vjp_close(device);
    }
    vjp_device *device = NULL;
    assert_int_equal(vjp_call_many(NULL, &vjp_op_rope, VJP_FORWARD, NULL, SLOTS, 2, NULL), VJP_NO_DEVICE);
    vjp_options options = VJP_OPTIONS_DEFAULTS;
    assert_int_equal(vjp_open("cpu", &options, &device), VJP_OK);
    assert_int_equal(vjp_call_many(device, &vjp_op_rope, VJP_FORWARD, NULL, SLOTS, 2, NULL), VJP_INVALID);
    assert_string_equal(vjp_error(device), "rope.forward: tensors is NULL");
    assert_int_equal(vjp_call_many(device, NULL, VJP_FORWARD, NULL, SLOTS, 20, NULL), VJP_INVALID);
    vjp_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bits_are_those_of_calls),
        cmocka_unit_test(dependent_calls_keep_their_order),
        cmocka_unit_test(rows_apart_are_independent),
        cmocka_unit_test(all_are_checked_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* SPDX-License-Identifier: MIT */
/*
 * What a call needs and gives, as the library says without running it: the shapes of outputs that are absent, the least
 * bytes and operations, which passes and dtypes there are, and the workspace, which must be enough.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "core/core.h"
#include "opening.h"
#include "sample.h"

static const sample_types plain_types = {VJP_F32, VJP_F32, VJP_I32};

/* ---- Inference and cost ------------------------------------------------------------------------------ */

static void infer_absent(void **state) {
    (void)state;
    vjp_device *device = open_device("ref");
    static const struct {
        const char *op;
        vjp_pass pass;
        const char *slot;
        vjp_dtype dtype;
        int ndim;
        int64_t shape[4];
    } rows[] = {
        {"layer_norm", VJP_FORWARD, "y", VJP_BF16, 3, {2, 3, 65}},
        {"layer_norm", VJP_FORWARD, "mean", VJP_F32, 2, {2, 3}},
        {"layer_norm", VJP_BACKWARD, "dx", VJP_BF16, 3, {2, 3, 65}},
        {"layer_norm", VJP_BACKWARD, "dgamma", VJP_BF16, 1, {65}},
        {"rms_norm", VJP_FORWARD, "rstd", VJP_F32, 2, {2, 3}},
        {"group_norm", VJP_FORWARD, "rstd", VJP_F32, 2, {2, 2}},
        {"group_norm", VJP_BACKWARD, "dbeta", VJP_BF16, 1, {6}},
        {"rope", VJP_FORWARD, "y", VJP_BF16, 4, {2, 5, 3, 8}},
        {"cumsum", VJP_BACKWARD, "dx", VJP_BF16, 3, {2, 17, 3}},
        {"gather", VJP_FORWARD, "y", VJP_BF16, 4, {2, 3, 4, 5}},
        {"maxpool2d", VJP_FORWARD, "y", VJP_BF16, 4, {2, 3, 4, 5}},
        {"maxpool2d", VJP_FORWARD, "argmax", VJP_I64, 4, {2, 3, 4, 5}},
        {"maxpool2d", VJP_BACKWARD, "dx", VJP_BF16, 4, {2, 3, 7, 9}},
        {"linear", VJP_FORWARD, "y", VJP_BF16, 3, {2, 5, 9}},
        {"linear", VJP_FORWARD, "pre", VJP_BF16, 3, {2, 5, 9}},
        {"linear", VJP_BACKWARD, "db", VJP_BF16, 2, {7, 9}},
        {"linear", VJP_BACKWARD, "dbias", VJP_BF16, 1, {9}},
        {"linear", VJP_BACKWARD, "dresidual", VJP_BF16, 3, {2, 5, 9}},
        {"sum_squares", VJP_FORWARD, "y", VJP_F32, 0, {0}},
        {"clip", VJP_FORWARD, "scale", VJP_F32, 0, {0}},
        {"adamw", VJP_FORWARD, "w_out", VJP_BF16, 3, {2, 3, 65}},
        {"adamw", VJP_FORWARD, "v_out", VJP_F32, 3, {2, 3, 65}},
        {"sgd", VJP_FORWARD, "momentum_out", VJP_F32, 3, {2, 3, 65}},
        {"cross_entropy", VJP_FORWARD, "loss", VJP_F32, 0, {0}},
        {"cross_entropy", VJP_FORWARD, "lse", VJP_F32, 2, {2, 3}},
        {"cross_entropy", VJP_BACKWARD, "dlogits", VJP_BF16, 3, {2, 3, 65}},
        {"linear_cross_entropy", VJP_FORWARD, "lse", VJP_F32, 2, {2, 3}},
        {"linear_cross_entropy", VJP_BACKWARD, "dx", VJP_BF16, 3, {2, 3, 17}},
        {"linear_cross_entropy", VJP_BACKWARD, "dweight", VJP_BF16, 2, {65, 17}},
        {"linear_cross_entropy", VJP_BACKWARD, "loss", VJP_F32, 0, {0}},
        {"swiglu", VJP_FORWARD, "y", VJP_BF16, 2, {3, 65}},
        {"swiglu", VJP_BACKWARD, "dup", VJP_BF16, 2, {3, 65}},
        {"conv2d", VJP_FORWARD, "y", VJP_BF16, 4, {2, 6, 4, 5}},
        {"conv2d", VJP_BACKWARD, "dx", VJP_BF16, 4, {2, 4, 7, 9}},
        {"conv2d", VJP_BACKWARD, "dweight", VJP_BF16, 4, {6, 2, 3, 3}},
        {"conv2d", VJP_BACKWARD, "dbias", VJP_BF16, 1, {6}},
        {"add", VJP_FORWARD, "y", VJP_BF16, 3, {2, 3, 65}},
        {"add", VJP_BACKWARD, "db", VJP_BF16, 3, {2, 3, 65}},
        {"mul", VJP_BACKWARD, "da", VJP_BF16, 3, {2, 3, 65}},
        {"mul", VJP_BACKWARD, "db", VJP_BF16, 2, {3, 65}},
        {"scale", VJP_BACKWARD, "dx", VJP_BF16, 2, {3, 65}},
        {"mean", VJP_FORWARD, "y", VJP_BF16, 2, {2, 3}},
        {"mean", VJP_BACKWARD, "dx", VJP_BF16, 3, {2, 17, 3}},
        {"dropout", VJP_FORWARD, "y", VJP_BF16, 2, {3, 65}},
        {"cast", VJP_FORWARD, "y", VJP_F32, 2, {3, 65}},
        {"cast", VJP_BACKWARD, "dx", VJP_F32, 2, {3, 65}},
        {"attention", VJP_FORWARD, "y", VJP_BF16, 4, {2, 5, 4, 3}},
        {"attention", VJP_FORWARD, "lse", VJP_F32, 3, {2, 4, 5}},
        {"attention", VJP_BACKWARD, "dk", VJP_BF16, 4, {2, 7, 2, 3}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        call made;
        sample_types types = {VJP_BF16, VJP_F32, VJP_I32};
        vjp_tensor described[VJP_MAX_SLOTS];
        assert_true(call_make(&made, device, sample_find(rows[i].op), rows[i].pass, types, 1));
        for (size_t k = 0; k < made.info->pass[made.pass].outputs; k++)
            made.pointer[k] = NULL;
        /* Data is not read. */
        for (size_t k = 0; k < made.count; k++)
            made.tensor[k].data = NULL;
        assert_int_equal(vjp_infer(device, made.op, made.pass, made.pointer, made.count, made.attributes, described),
                         VJP_OK);
        const vjp_tensor *t = &described[call_slot(&made, rows[i].slot)];
        assert_null(t->data);
        assert_int_equal(t->dtype, rows[i].dtype);
        assert_int_equal(t->ndim, rows[i].ndim);
        for (int k = 0; k < t->ndim; k++)
            assert_int_equal(t->shape[k], rows[i].shape[k]);
        call_free(&made);
    }
    vjp_close(device);
}

/* A gradient of conv2d needs only the inputs in its formula. */
static void conv2d_needs_no_more(void **state) {
    (void)state;
    static const char *const names[] = {"cpu", "ref"};
    static const struct {
        const char *output, *needless, *other;
    } rows[] = {{"dx", "x", "dweight"}, {"dweight", "weight", "dx"}};
    for (int d = 0; d < 2; d++)
        for (int i = 0; i < 2; i++) {
            vjp_device *device = open_device(names[d]);
            call whole, part;
            assert_true(call_make(&whole, device, sample_find("conv2d"), VJP_BACKWARD, plain_types, 5));
            assert_true(call_make(&part, device, sample_find("conv2d"), VJP_BACKWARD, plain_types, 5));
            part.pointer[call_slot(&part, rows[i].needless)] = NULL;
            part.pointer[call_slot(&part, rows[i].other)] = NULL;
            assert_int_equal(call_run(device, &whole), VJP_OK);
            assert_int_equal(call_run(device, &part), VJP_OK);
            const vjp_tensor *a = &whole.tensor[call_slot(&whole, rows[i].output)];
            const vjp_tensor *b = &part.tensor[call_slot(&part, rows[i].output)];
            assert_memory_equal(a->data, b->data, call_bytes(a));
            call_free(&whole);
            call_free(&part);
            vjp_close(device);
        }
}

/* Sizes that only an attribute gives. */
static void infer_from_attributes(void **state) {
    (void)state;
    vjp_device *device = open_device("ref");
    vjp_tensor dy = vjp_tensor_of(NULL, VJP_F32, 2, (int64_t[]){4, 5});
    vjp_tensor index = vjp_tensor_of(NULL, VJP_I32, 1, (int64_t[]){4});
    vjp_gather_attributes gather = {.struct_size = sizeof(vjp_gather_attributes), .axis = 0, .rows = 11};
    const vjp_tensor *tensors[] = {NULL, &dy, &index};
    vjp_tensor described[VJP_MAX_SLOTS];
    assert_int_equal(vjp_infer(device, vjp_op_find("gather"), VJP_BACKWARD, tensors, 3, &gather, described), VJP_OK);
    assert_true(described[0].ndim == 2 && described[0].shape[0] == 11 && described[0].shape[1] == 5);

    vjp_maxpool2d_attributes pool;
    vjp_op_defaults(vjp_op_find("maxpool2d"), &pool);
    pool.height = 9, pool.width = 7;
    vjp_tensor pooled = vjp_tensor_of(NULL, VJP_F32, 4, (int64_t[]){2, 3, 4, 3});
    vjp_tensor argmax = vjp_tensor_of(NULL, VJP_I32, 4, (int64_t[]){2, 3, 4, 3});
    const vjp_tensor *more[] = {NULL, &pooled, NULL, &argmax};
    assert_int_equal(vjp_infer(device, vjp_op_find("maxpool2d"), VJP_BACKWARD, more, 4, &pool, described), VJP_OK);
    assert_true(described[0].ndim == 4 && described[0].shape[2] == 9 && described[0].shape[3] == 7);

    vjp_conv2d_attributes conv;
    vjp_op_defaults(vjp_op_find("conv2d"), &conv);
    conv.height = 8, conv.width = 7, conv.stride_h = 2;
    vjp_tensor convolved = vjp_tensor_of(NULL, VJP_F32, 4, (int64_t[]){2, 3, 3, 5});
    vjp_tensor weight = vjp_tensor_of(NULL, VJP_F32, 4, (int64_t[]){3, 5, 3, 3});
    const vjp_tensor *most[] = {NULL, NULL, NULL, &convolved, NULL, &weight};
    assert_int_equal(vjp_infer(device, vjp_op_find("conv2d"), VJP_BACKWARD, most, 6, &conv, described), VJP_OK);
    assert_true(described[0].shape[1] == 5 && described[0].shape[2] == 8 && described[0].shape[3] == 7);
    vjp_add_attributes add = {.struct_size = sizeof(vjp_add_attributes), .b_axes = 1};
    const vjp_tensor *alone[] = {NULL, NULL, &dy};
    assert_int_equal(vjp_infer(device, vjp_op_find("add"), VJP_BACKWARD, alone, 3, &add, described), VJP_OK);
    assert_true(described[0].ndim == 2 && described[1].ndim == 1 && described[1].shape[0] == 5);
    vjp_close(device);
}

static void min_cost(void **state) {
    (void)state;
    vjp_device *device = open_device("ref");
    vjp_cost cost;
    static const struct {
        const char *op;
        vjp_pass pass;
        const char *accumulate;
        double bytes, flops;
    } rows[] = {
        /* x and y 390 elements, mean and rstd 6, gamma and beta 65, all of 4 bytes */
        {"layer_norm", VJP_FORWARD, NULL, 4 * (2 * 390 + 2 * 6 + 2 * 65), 0},
        {"layer_norm", VJP_FORWARD, "y", 4 * (3 * 390 + 2 * 6 + 2 * 65), 0},
        {"layer_norm", VJP_BACKWARD, NULL, 4 * (3 * 390 + 2 * 6 + 3 * 65), 0},
        {"rms_norm", VJP_BACKWARD, "dgamma", 4 * (4 * 390 + 6 + 5 * 65), 0},
        {"cumsum", VJP_FORWARD, NULL, 4 * 2 * 102, 0},
        /* 12 indices into 11 rows: the table (2 x 11 x 5) is smaller than what is read from it */
        {"gather", VJP_FORWARD, NULL, 4 * (120 + 110 + 12), 0},
        {"gather", VJP_BACKWARD, NULL, 4 * (110 + 120 + 12), 0},
        /* with argmax there, x is not read: dx 378, dy 120, argmax 120 */
        {"maxpool2d", VJP_BACKWARD, NULL, 4 * (378 + 120 + 120), 0},
        {"linear", VJP_FORWARD, NULL, 4 * (3 * 90 + 70 + 63 + 9), 2.0 * 10 * 7 * 9},
        {"linear", VJP_BACKWARD, NULL, 4 * (2 * 70 + 2 * 63 + 2 * 9 + 3 * 90), 2 * 2.0 * 10 * 7 * 9},
        {"sum_squares", VJP_FORWARD, NULL, 4 * (390 + 1), 0},
        {"sum_squares", VJP_FORWARD, "y", 4 * (390 + 2), 0},
        /* w, m and v both ways, g; and lr, step, scale */
        {"adamw", VJP_FORWARD, NULL, 4 * (7 * 390 + 3), 0},
        {"sgd", VJP_FORWARD, NULL, 4 * (5 * 390 + 2), 0},
        /* logits 390, lse and target 6, loss 1 */
        {"cross_entropy", VJP_FORWARD, NULL, 4 * (390 + 2 * 6 + 1), 0},
        {"cross_entropy", VJP_BACKWARD, NULL, 4 * (2 * 390 + 2 * 6 + 1), 0},
        /* x 102, weight 1105, lse and target 6, loss 1; a product for the logits, and one for each gradient */
        {"linear_cross_entropy", VJP_FORWARD, NULL, 4 * (102 + 1105 + 2 * 6 + 1), 2.0 * 6 * 65 * 17},
        {"linear_cross_entropy", VJP_BACKWARD, NULL, 4 * (2 * 102 + 2 * 1105 + 2 * 6 + 2), 3 * 2.0 * 6 * 65 * 17},
        {"swiglu", VJP_FORWARD, NULL, 4 * 3 * 195, 0},
        {"swiglu", VJP_BACKWARD, "dup", 4 * 7 * 195, 0},
        /* x 504, y 240, weight 108, bias 6; a product sums 18 terms for each of y */
        {"conv2d", VJP_FORWARD, NULL, 4 * (240 + 504 + 108 + 6), 2.0 * 240 * 18},
        {"conv2d", VJP_BACKWARD, NULL, 4 * (2 * 504 + 2 * 108 + 6 + 240), 2 * 2.0 * 240 * 18},
        {"add", VJP_BACKWARD, "db", 4 * (2 * 390 + 2 * 195), 0},
        {"mul", VJP_BACKWARD, NULL, 4 * (3 * 390 + 2 * 195), 0},
        /* x is given for its shape alone */
        {"mean", VJP_BACKWARD, NULL, 4 * (102 + 6), 0},
        {"dropout", VJP_FORWARD, NULL, 4 * (2 * 195 + 2), 0},
        /* q 120 elements, k 84, lse 40; each of 8 heads sees 3 + 4 + 5 + 6 + 7 pairs of 3 elements */
        {"attention", VJP_FORWARD, NULL, 4 * (2 * 120 + 2 * 84 + 40), 2 * 2.0 * 8 * 25 * 3},
        {"attention", VJP_BACKWARD, NULL, 4 * (4 * 120 + 4 * 84 + 40), 5 * 2.0 * 8 * 25 * 3},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        call made;
        assert_true(call_make(&made, device, sample_find(rows[i].op), rows[i].pass, plain_types, 1));
        if (rows[i].accumulate) made.tensor[call_slot(&made, rows[i].accumulate)].flags = VJP_ACCUMULATE;
        assert_int_equal(vjp_min_cost(device, made.op, made.pass, made.pointer, made.count, made.attributes, &cost),
                         VJP_OK);
        if (cost.bytes != rows[i].bytes || cost.flops != rows[i].flops)
            print_error("%s pass %d: %g bytes, %g flops\n", rows[i].op, (int)rows[i].pass, cost.bytes, cost.flops);
        assert_true(cost.bytes == rows[i].bytes && cost.flops == rows[i].flops);
        call_free(&made);
    }
    /* Without pre and with an activation, the backward computes a third product; without da and db only that one. */
    call made;
    assert_true(call_make(&made, device, sample_find("linear"), VJP_BACKWARD, plain_types, 1));
    made.pointer[call_slot(&made, "pre")] = NULL;
    vjp_min_cost(device, made.op, made.pass, made.pointer, made.count, made.attributes, &cost);
    assert_true(cost.flops == 3 * 2.0 * 10 * 7 * 9);
    made.pointer[call_slot(&made, "da")] = made.pointer[call_slot(&made, "db")] = NULL;
    vjp_min_cost(device, made.op, made.pass, made.pointer, made.count, made.attributes, &cost);
    assert_true(cost.flops == 2.0 * 10 * 7 * 9);
    call_free(&made);
    /* dbias alone reads dy alone. */
    assert_true(call_make(&made, device, sample_find("conv2d"), VJP_BACKWARD, plain_types, 1));
    made.pointer[call_slot(&made, "dx")] = made.pointer[call_slot(&made, "dweight")] = NULL;
    vjp_min_cost(device, made.op, made.pass, made.pointer, made.count, made.attributes, &cost);
    assert_true(cost.flops == 0 && cost.bytes == 4 * (6 + 240));
    call_free(&made);
    vjp_close(device);
}

static void supports(void **state) {
    (void)state;
    vjp_device *cpu = open_with("cpu", &(vjp_options){.struct_size = sizeof(vjp_options), .threads = 1}),
               *ref = open_device("ref");
    for (size_t i = 0; i < vjp_op_count(); i++)
        for (int pass = 0; pass < vjp_passes(vjp_op_describe(vjp_op_at(i))); pass++) {
            static const vjp_dtype types[] = {VJP_F32, VJP_BF16, VJP_F16, VJP_F64};
            for (int t = 0; t < 4; t++) {
                assert_int_equal(vjp_supports(ref, vjp_op_at(i), (vjp_pass)pass, types[t]), VJP_OK);
                if (types[t] != VJP_F64)
                    assert_int_equal(vjp_supports(cpu, vjp_op_at(i), (vjp_pass)pass, types[t]), VJP_OK);
            }
            assert_int_equal(vjp_supports(cpu, vjp_op_at(i), (vjp_pass)pass, VJP_I32), VJP_UNSUPPORTED);
            assert_non_null(strstr(vjp_error(cpu), "i32"));
            assert_int_equal(vjp_supports(cpu, vjp_op_at(i), (vjp_pass)pass, (vjp_dtype)77), VJP_INVALID);
        }
    assert_int_equal(vjp_supports(cpu, NULL, VJP_FORWARD, VJP_F32), VJP_INVALID);
    assert_int_equal(vjp_supports(cpu, vjp_op_at(0), (vjp_pass)3, VJP_F32), VJP_INVALID);
    assert_int_equal(vjp_supports(NULL, vjp_op_at(0), VJP_FORWARD, VJP_F32), VJP_NO_DEVICE);
    vjp_close(cpu);
    vjp_close(ref);
}

/* A step of training is not differentiated: a call of its backward is refused. */
static void no_backward(void **state) {
    (void)state;
    vjp_device *ref = open_device("ref");
    int found = 0;
    for (size_t i = 0; i < vjp_op_count(); i++) {
        const vjp_op *op = vjp_op_at(i);
        const vjp_tensor *none[VJP_MAX_SLOTS] = {0};
        vjp_tensor described[VJP_MAX_SLOTS];
        size_t bytes;
        vjp_cost cost;
        if (vjp_passes(vjp_op_describe(op)) == VJP_PASS_COUNT) continue;
        found++;
        const vjp_status answers[] = {vjp_supports(ref, op, VJP_BACKWARD, VJP_F32),
                                      vjp_call(ref, op, VJP_BACKWARD, none, 0, NULL),
                                      vjp_call(ref, op, VJP_BACKWARD, none, 3, NULL),
                                      vjp_infer(ref, op, VJP_BACKWARD, none, 0, NULL, described),
                                      vjp_workspace_size(ref, op, VJP_BACKWARD, none, 0, NULL, &bytes),
                                      vjp_min_cost(ref, op, VJP_BACKWARD, none, 0, NULL, &cost)};
        for (size_t k = 0; k < sizeof answers / sizeof answers[0]; k++)
            assert_int_equal(answers[k], VJP_UNSUPPORTED);
        assert_non_null(strstr(vjp_error(ref), vjp_op_describe(op)->name));
        assert_non_null(strstr(vjp_error(ref), "has no backward pass"));
    }
    assert_int_equal(found, 4);
    vjp_close(ref);
}

/* ---- Workspace --------------------------------------------------------------------------------------- */

static void workspace(void **state) {
    (void)state;
    static const char *const names[] = {"cpu", "ref"};
    for (int d = 0; d < 2; d++) {
        vjp_device *device = open_with(
            names[d], &(vjp_options){.struct_size = sizeof(vjp_options), .workspace_bytes = 64, .threads = 2});
        call made;
        size_t bytes;
        assert_true(call_make(&made, device, sample_find_large("layer_norm"), VJP_BACKWARD, plain_types, 1));
        assert_int_equal(
            vjp_workspace_size(device, made.op, made.pass, made.pointer, made.count, made.attributes, &bytes), VJP_OK);
        assert_true(bytes > 64);
        assert_true(bytes < 1025 * 300 * 4); /* chunks x dim, never rows x dim */

        /* Too small: both numbers in the sentence, nothing written. */
        unsigned char *before = malloc(made.block_bytes);
        memcpy(before, made.block, made.block_bytes);
        char number[32];
        assert_int_equal(call_run(device, &made), VJP_WORKSPACE);
        snprintf(number, sizeof number, "%zu bytes", bytes);
        assert_non_null(strstr(vjp_error(device), number));
        assert_non_null(strstr(vjp_error(device), "64"));
        assert_memory_equal(before, made.block, made.block_bytes);

        assert_int_equal(vjp_reserve(device, bytes), VJP_OK);
        assert_int_equal(call_run(device, &made), VJP_OK);
        uint64_t expected = call_hash(&made, 0);

        /* The caller's memory: misaligned, NULL, one byte too small, valid; and every byte outside stays. */
        unsigned char *own = aligned_alloc(64, (bytes + 63) / 64 * 64 + 128);
        memset(own, 0x5a, (bytes + 63) / 64 * 64 + 128);
        assert_int_equal(vjp_set_workspace(device, own + 4, bytes), VJP_INVALID);
        assert_non_null(strstr(vjp_error(device), "64-byte"));
        assert_int_equal(vjp_set_workspace(device, NULL, 100), VJP_INVALID);
        assert_int_equal(vjp_set_workspace(device, own + 64, bytes - 1), VJP_OK);
        assert_int_equal(call_run(device, &made), VJP_WORKSPACE);
        assert_int_equal(vjp_set_workspace(device, own + 64, bytes), VJP_OK);
        assert_int_equal(vjp_reserve(device, 2 * bytes), VJP_OK); /* grows the device's own, which is not in use */
        memset(own + 64, 0, bytes);
        assert_int_equal(call_run(device, &made), VJP_OK);
        assert_int_equal(call_hash(&made, 0), expected);
        bool used = false;
        for (size_t i = 0; i < bytes; i++)
            used = used || own[64 + i] != 0;
        assert_true(used);
        for (size_t i = 0; i < 64; i++)
            assert_true(own[i] == 0x5a && own[64 + bytes + i] == 0x5a);
        assert_int_equal(vjp_set_workspace(device, NULL, 0), VJP_OK);
        free(own);
        assert_int_equal(call_run(device, &made), VJP_OK);
        assert_int_equal(call_hash(&made, 0), expected);

        assert_int_equal(vjp_reserve(device, SIZE_MAX), VJP_OUT_OF_MEMORY);
        assert_int_equal(vjp_reserve(device, SIZE_MAX / 2), VJP_OUT_OF_MEMORY);
        assert_int_equal(call_run(device, &made), VJP_OK); /* the old workspace is still there */
        free(before);
        call_free(&made);
        vjp_close(device);
    }
}

/* For every op exactly the workspace that it requires is enough. */
static void workspace_is_enough(void **state) {
    (void)state;
    for (size_t op = 0; op < vjp_op_count(); op++)
        for (int pass = 0; pass < vjp_passes(vjp_op_describe(vjp_op_at(op))); pass++)
            for (int t = 0; t < 3; t++) {
                static const vjp_dtype types[] = {VJP_F32, VJP_BF16, VJP_F16};
                vjp_device *device = open_with("cpu", &(vjp_options){.struct_size = sizeof(vjp_options), .threads = 3});
                call made;
                const char *name = vjp_op_describe(vjp_op_at(op))->name;
                assert_true(call_make(&made, device, sample_find_large(name), (vjp_pass)pass,
                                      (sample_types){types[t], VJP_F32, VJP_I32}, 1));
                size_t bytes;
                assert_int_equal(
                    vjp_workspace_size(device, made.op, made.pass, made.pointer, made.count, made.attributes, &bytes),
                    VJP_OK);
                unsigned char *own = aligned_alloc(64, (bytes + 63) / 64 * 64 + 4096);
                memset(own, 0x5a, (bytes + 63) / 64 * 64 + 4096);
                assert_int_equal(vjp_set_workspace(device, own, bytes), VJP_OK);
                assert_int_equal(call_run(device, &made), VJP_OK);
                for (size_t i = bytes; i < (bytes + 63) / 64 * 64 + 4096; i++) {
                    if (own[i] != 0x5a) print_error("%s pass %d wrote past its workspace\n", name, pass);
                    assert_int_equal(own[i], 0x5a);
                }
                vjp_close(device);
                free(own);
                call_free(&made);
            }
}

int main(void) {
    unsetenv("VJP_THREADS");
    unsetenv("VJP_ISA");
    unsetenv("VJP_GEMM");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(infer_absent),
        cmocka_unit_test(infer_from_attributes),
        cmocka_unit_test(conv2d_needs_no_more),
        cmocka_unit_test(min_cost),
        cmocka_unit_test(supports),
        cmocka_unit_test(no_backward),
        cmocka_unit_test(workspace),
        cmocka_unit_test(workspace_is_enough),
    };
    return cmocka_run_group_tests_name("call needs", tests, NULL, NULL);
}

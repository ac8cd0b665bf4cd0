/* SPDX-License-Identifier: MIT */
/* Core: dtypes, the op table, inference, cost, workspace, opening. Nothing that a kernel computes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <math.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "attributes.h"
#include "cpu/cpu.h"
#include "sample.h"

static const sample_types plain_types = {VJP_F32, VJP_F32, VJP_I32};

static vjp_device *open_with(const char *name, vjp_options options) {
    vjp_device *device;
    vjp_status status = vjp_open(name, &options, &device);
    if (status != VJP_OK) print_error("%s\n", vjp_error(device));
    assert_int_equal(status, VJP_OK);
    return device;
}

/* ---- Names ------------------------------------------------------------------------------------------- */

static void dtypes(void **state) {
    (void)state;
    static const struct {
        vjp_dtype dtype;
        const char *name;
        size_t size;
    } rows[VJP_DTYPE_COUNT] = {{VJP_F32, "f32", 4}, {VJP_BF16, "bf16", 2}, {VJP_F16, "f16", 2},
                               {VJP_F64, "f64", 8}, {VJP_I32, "i32", 4},   {VJP_I64, "i64", 8}};
    for (int i = 0; i < VJP_DTYPE_COUNT; i++) {
        assert_string_equal(vjp_dtype_name(rows[i].dtype), rows[i].name);
        assert_int_equal(vjp_dtype_size(rows[i].dtype), rows[i].size);
        assert_int_equal(vjp_dtype_find(rows[i].name), rows[i].dtype);
    }
    assert_int_equal(vjp_dtype_find("f8"), -1);
    assert_int_equal(vjp_dtype_find(""), -1);
    assert_int_equal(vjp_dtype_find("F32"), -1);
    assert_int_equal(vjp_dtype_find(NULL), -1);
    assert_int_equal(vjp_dtype_size((vjp_dtype)-1), 0);
    assert_int_equal(vjp_dtype_size((vjp_dtype)VJP_DTYPE_COUNT), 0);
    assert_string_equal(vjp_dtype_name((vjp_dtype)99), "?");
}

static void statuses(void **state) {
    (void)state;
    for (int a = VJP_OK; a <= VJP_DEVICE_FAILED; a++)
        for (int b = a + 1; b <= VJP_DEVICE_FAILED + 1; b++)
            assert_string_not_equal(vjp_status_name((vjp_status)a), vjp_status_name((vjp_status)b));
    assert_string_equal(vjp_status_name(VJP_OK), "ok");
    assert_non_null(vjp_status_name((vjp_status)-5));
    int major, minor, patch, end = 0;
    assert_int_equal(sscanf(vjp_version(), "%d.%d.%d%n", &major, &minor, &patch, &end), 3);
    assert_int_equal(vjp_version()[end], 0);
    assert_string_equal(vjp_version(), VJP_VERSION);
    assert_int_equal(major, VJP_VERSION_MAJOR);
    assert_int_equal(minor, VJP_VERSION_MINOR);
    assert_int_equal(patch, VJP_VERSION_PATCH);
}

static void tensor_of(void **state) {
    (void)state;
    float data[6];
    vjp_tensor t = vjp_tensor_of(data, VJP_BF16, 2, (int64_t[]){3, 2});
    assert_ptr_equal(t.data, data);
    assert_int_equal(t.dtype, VJP_BF16);
    assert_int_equal(t.ndim, 2);
    assert_int_equal(t.shape[0], 3);
    assert_int_equal(t.shape[1], 2);
    assert_int_equal(t.offset, 0);
    assert_int_equal(t.flags, 0);
    assert_int_equal(t.reserved, 0);
    assert_int_equal(t.stride[0], 2);
    assert_int_equal(t.stride[1], 1);
    for (int i = 2; i < VJP_MAX_DIMS; i++)
        assert_true(t.stride[i] == 0 && t.shape[i] == 0);
    /* Nine dimensions: it must read no ninth size, and every call refuses the tensor. */
    vjp_device *device = open_with("ref", (vjp_options)VJP_OPTIONS_DEFAULTS);
    t = vjp_tensor_of(data, VJP_F32, 9, (int64_t[]){1, 1, 1, 1, 1, 1, 1, 1, 1});
    assert_int_equal(vjp_cumsum_forward(device, &t, &t, WITH(cumsum, .axis = 0, .exclusive = 0, .reverse = 0)),
                     VJP_INVALID);
    vjp_close(device);
}

/* ---- The op table ------------------------------------------------------------------------------------ */

static int find_slot(const vjp_pass_info *pass, const char *name) {
    for (size_t i = 0; i < pass->count; i++)
        if (strcmp(pass->slots[i].name, name) == 0) return (int)i;
    return -1;
}

static void check_slots(const vjp_op_info *info, int which) {
    const vjp_pass_info *pass = &info->pass[which];
    assert_true(pass->count > 0 && pass->count <= VJP_MAX_SLOTS);
    assert_true(pass->outputs > 0 && pass->outputs < pass->count);
    for (size_t i = 0; i < pass->count; i++) {
        const vjp_slot *slot = &pass->slots[i];
        assert_true(slot->name && *slot->name && slot->shape && *slot->shape && slot->about && *slot->about);
        assert_int_equal(find_slot(pass, slot->name), i); /* no name twice */
        bool output = slot->flags & VJP_SLOT_OUTPUT;
        assert_int_equal(output, i < pass->outputs); /* outputs first */
        assert_false(output && (slot->flags & VJP_SLOT_OPTIONAL));
        assert_false(!output && (slot->flags & VJP_SLOT_ACCUMULATES));
        assert_false(!output && slot->aliases);
        /* Values accumulate; what is saved for the backward does not. */
        bool saved = i > 0 && find_slot(&info->pass[VJP_BACKWARD], slot->name) >= 0 && which == VJP_FORWARD;
        bool step = vjp_passes(info) < VJP_PASS_COUNT; /* no backward: nothing is saved */
        /* An output of the forward that the backward computes on its way is the same in both. */
        int same = which == VJP_BACKWARD ? find_slot(&info->pass[VJP_FORWARD], slot->name) : -1;
        if (output && same >= 0)
            assert_int_equal(slot->flags, info->pass[VJP_FORWARD].slots[same].flags);
        else if (output && !step)
            assert_int_equal((slot->flags & VJP_SLOT_ACCUMULATES) != 0, !saved);
        for (size_t j = 0; j < VJP_MAX_SLOTS; j++) {
            if (!(slot->aliases >> j & 1)) continue;
            assert_true(j >= pass->outputs && j < pass->count);
            assert_int_equal(pass->slots[j].kind, slot->kind);
            assert_string_equal(pass->slots[j].shape, slot->shape);
        }
    }
}

/* "dx" is the gradient of the forward's input x, "dy" of its output y; every other input is the forward's own. */
static void check_names(const vjp_op_info *info) {
    const vjp_pass_info *forward = &info->pass[VJP_FORWARD], *backward = &info->pass[VJP_BACKWARD];
    for (size_t i = 0; i < backward->count; i++) {
        const vjp_slot *slot = &backward->slots[i];
        bool output = i < backward->outputs, gradient = slot->name[0] == 'd' && find_slot(forward, slot->name) < 0;
        int like = find_slot(forward, slot->name + (gradient ? 1 : 0));
        if (like < 0) print_error("%s.backward: %s\n", info->name, slot->name);
        assert_true(like >= 0);
        const vjp_slot *twin = &forward->slots[like];
        assert_string_equal(twin->shape, slot->shape);
        /* A gradient of an input, or an output of the forward that is computed on the way. */
        if (output) assert_int_equal((size_t)like >= forward->outputs, gradient);
        if (!output && gradient) assert_true((size_t)like < forward->outputs);
        if (!gradient) assert_int_equal(twin->kind, slot->kind);
        /* Saved values may be absent: they are computed again. */
        if (!output && !gradient && (size_t)like < forward->outputs) assert_true(slot->flags & VJP_SLOT_OPTIONAL);
    }
    /* Every real input of the forward has a gradient. */
    for (size_t i = forward->outputs; i < forward->count; i++) {
        const vjp_slot *slot = &forward->slots[i];
        char name[64];
        snprintf(name, sizeof name, "d%s", slot->name);
        bool constant = slot->kind == VJP_KIND_INDEX || strcmp(info->name, "rope") == 0;
        if (strcmp(slot->name, "x") != 0 && constant) continue;
        assert_true(find_slot(backward, name) >= 0);
    }
}

static void check_attributes(const vjp_op *op, const vjp_op_info *info) {
    int64_t values[SAMPLE_ATTRIBUTE_BYTES / 8];
    assert_true(info->attribute_bytes <= sizeof values);
    assert_int_equal(info->attribute_bytes,
                     info->attribute_count ? (info->attribute_count + 1) * 8 : 0); /* struct_size and a row each */
    memset(values, 0x77, sizeof values);
    vjp_op_defaults(op, values);
    for (size_t i = 0; i < info->attribute_count; i++) {
        const vjp_attribute *a = &info->attributes[i];
        assert_true(a->name && *a->name && a->about && *a->about);
        assert_true(a->offset % 8 == 0 && a->offset + 8 <= info->attribute_bytes);
        for (size_t j = 0; j < i; j++) {
            assert_int_not_equal(info->attributes[j].offset, a->offset);
            assert_string_not_equal(info->attributes[j].name, a->name);
        }
        double real;
        memcpy(&real, &values[a->offset / 8], 8);
        if (a->type == VJP_REAL)
            assert_true(real == a->real);
        else
            assert_int_equal(values[a->offset / 8], a->integer);
        int64_t choices = 0;
        while (a->type == VJP_CHOICE && a->choices[choices])
            choices++;
        if (a->type == VJP_CHOICE) assert_true(choices > 1 && a->integer >= 0 && a->integer < choices);
        if (a->type == VJP_BOOLEAN) assert_true(a->integer == 0 || a->integer == 1);
        if (a->type != VJP_CHOICE) assert_null(a->choices);
    }
    for (size_t i = info->attribute_bytes / 8; i < SAMPLE_ATTRIBUTE_BYTES / 8; i++)
        assert_int_equal(values[i], 0x7777777777777777); /* defaults stay inside the struct */
}

static void op_table(void **state) {
    (void)state;
    static const char *const names[] = {
#define OP(name, family, cuda, gpu) #name,
#include "op/ops.def"
    };
    assert_int_equal(vjp_op_count(), sizeof names / sizeof names[0]);
    for (size_t i = 0; i < vjp_op_count(); i++) {
        const vjp_op *op = vjp_op_at(i);
        const vjp_op_info *info = vjp_op_describe(op);
        assert_string_equal(info->name, names[i]);
        assert_ptr_equal(vjp_op_find(names[i]), op);
        assert_true(info->about && *info->about && info->formula && *info->formula && info->family && *info->family);
        check_slots(info, VJP_FORWARD);
        if (vjp_passes(info) == VJP_PASS_COUNT) check_slots(info, VJP_BACKWARD);
        if (vjp_passes(info) == VJP_PASS_COUNT) check_names(info);
        check_attributes(op, info);
    }
    assert_null(vjp_op_at(vjp_op_count()));
    assert_null(vjp_op_find("layer_norms"));
    assert_null(vjp_op_find(NULL));
    assert_null(vjp_op_describe(NULL));
}

static void attribute_defaults(void **state) {
    (void)state;
    vjp_maxpool2d_attributes pool;
    vjp_op_defaults(vjp_op_find("maxpool2d"), &pool);
    assert_true(pool.kernel_h == 2 && pool.kernel_w == 2 && pool.stride_h == 0 && pool.dilation_w == 1);
    vjp_cumsum_attributes sum;
    vjp_op_defaults(vjp_op_find("cumsum"), &sum);
    assert_true(sum.axis == -1 && sum.exclusive == 0 && sum.reverse == 0);
    vjp_layer_norm_attributes norm;
    vjp_op_defaults(vjp_op_find("layer_norm"), &norm);
    assert_true(norm.axes == 1 && norm.eps == 1e-5);
    vjp_rms_norm_attributes rms;
    vjp_op_defaults(vjp_op_find("rms_norm"), &rms);
    assert_true(rms.eps == 1e-6);
}

/* ---- Inference and cost ------------------------------------------------------------------------------ */

static void infer_absent(void **state) {
    (void)state;
    vjp_device *device = open_with("ref", (vjp_options)VJP_OPTIONS_DEFAULTS);
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
            vjp_device *device = open_with(names[d], (vjp_options)VJP_OPTIONS_DEFAULTS);
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
    vjp_device *device = open_with("ref", (vjp_options)VJP_OPTIONS_DEFAULTS);
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
    vjp_device *device = open_with("ref", (vjp_options)VJP_OPTIONS_DEFAULTS);
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
    vjp_device *cpu = open_with("cpu", (vjp_options){.struct_size = sizeof(vjp_options), .threads = 1}),
               *ref = open_with("ref", (vjp_options)VJP_OPTIONS_DEFAULTS);
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
    vjp_device *ref = open_with("ref", (vjp_options)VJP_OPTIONS_DEFAULTS);
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

/* A NaN rate shows in the weights and does not reach the averages. */
static void nan_rate(void **state) {
    (void)state;
    static const char *const names[] = {"cpu", "ref"}, *const ops[] = {"adamw", "sgd"};
    for (int d = 0; d < 2; d++)
        for (int o = 0; o < 2; o++) {
            vjp_device *device = open_with(names[d], (vjp_options){.struct_size = sizeof(vjp_options), .threads = 1});
            call made;
            assert_true(call_make(&made, device, sample_find(ops[o]), VJP_FORWARD, plain_types, 1));
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

/* ---- Workspace --------------------------------------------------------------------------------------- */

static void workspace(void **state) {
    (void)state;
    static const char *const names[] = {"cpu", "ref"};
    for (int d = 0; d < 2; d++) {
        vjp_device *device =
            open_with(names[d], (vjp_options){.struct_size = sizeof(vjp_options), .workspace_bytes = 64, .threads = 2});
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
                vjp_device *device = open_with("cpu", (vjp_options){.struct_size = sizeof(vjp_options), .threads = 3});
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

static void memory(void **state) {
    (void)state;
    vjp_device *device = open_with("cpu", (vjp_options){.struct_size = sizeof(vjp_options), .threads = 1});
    void *data;
    char text[8] = "abcdefg", back[8] = {0};
    assert_int_equal(vjp_alloc(device, 100, &data), VJP_OK);
    assert_int_equal((uintptr_t)data % 64, 0);
    assert_int_equal(vjp_upload(device, data, 50, text, 8), VJP_OK);
    assert_int_equal(vjp_download(device, back, data, 50, 8), VJP_OK);
    assert_string_equal(back, text);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    vjp_free(device, data);
    vjp_free(device, NULL);
    assert_int_equal(vjp_alloc(device, SIZE_MAX - 3, &data), VJP_OUT_OF_MEMORY);
    assert_null(data);
    assert_non_null(strstr(vjp_error(device), "memory"));
    vjp_close(device);
}

/* ---- Opening ----------------------------------------------------------------------------------------- */

static void open_failures(void **state) {
    (void)state;
    static const struct {
        const char *device;
        vjp_options options;
        const char *variable, *value;
        vjp_status status;
        const char *words[2];
    } rows[] = {
        {"gpu", {0}, NULL, NULL, VJP_NO_DEVICE, {"\"gpu\"", "ref, cpu"}},
        {"", {0}, NULL, NULL, VJP_NO_DEVICE, {"\"\"", NULL}},
        {"cpu:0", {0}, NULL, NULL, VJP_NO_DEVICE, {"cpu:0", NULL}},
        {"cudax", {0}, NULL, NULL, VJP_NO_DEVICE, {"cudax", NULL}},
        {"webgpu:9", {0}, NULL, NULL, VJP_NO_DEVICE, {"webgpu:9", NULL}},
        {NULL, {0}, NULL, NULL, VJP_NO_DEVICE, {"null", NULL}},
        {"cpu", {.instruction_set = "sse9"}, NULL, NULL, VJP_INVALID, {"sse9", "must be one of"}},
        {"cpu", {0}, "VJP_ISA", "sse9", VJP_INVALID, {"sse9", "must be one of"}},
        {"cpu", {.threads = -1}, NULL, NULL, VJP_INVALID, {"-1", "1 to"}},
        {"cpu", {.threads = 100000}, NULL, NULL, VJP_INVALID, {"100000", "1 to"}},
        {"cpu", {0}, "VJP_THREADS", "zero", VJP_INVALID, {"VJP_THREADS", "zero"}},
        {"cpu", {0}, "VJP_THREADS", "0", VJP_INVALID, {"VJP_THREADS", "\"0\""}},
        {"cpu", {0}, "VJP_THREADS", "-3", VJP_INVALID, {"VJP_THREADS", "-3"}},
        {"cpu", {0}, "VJP_THREADS", "4x", VJP_INVALID, {"VJP_THREADS", "4x"}},
        {"cpu", {0}, "VJP_THREADS", "99999999999999999999", VJP_INVALID, {"threads", NULL}},
        {"cpu", {.matrix_products = "fast"}, NULL, NULL, VJP_INVALID, {"fast", "builtin"}},
        {"cpu", {0}, "VJP_GEMM", "fast", VJP_INVALID, {"fast", "builtin"}},
#ifdef HAVE_SET_PLAIN
        {"cpu", {.matrix_products = "amx", .instruction_set = "plain"}, NULL, NULL, VJP_UNSUPPORTED, {"AMX", "plain"}},
#endif
        {"cpu", {.workspace_bytes = SIZE_MAX / 2, .threads = 1}, NULL, NULL, VJP_OUT_OF_MEMORY, {"memory", NULL}},
        {"ref", {.matrix_products = "tf32"}, NULL, NULL, VJP_UNSUPPORTED, {"matrix_products is \"tf32\"", "no choice"}},
        {"ref",
         {.instruction_set = "plain"},
         NULL,
         NULL,
         VJP_UNSUPPORTED,
         {"instruction_set is \"plain\"", "no choice"}},
        {"ref", {.workspace_bytes = SIZE_MAX}, NULL, NULL, VJP_OUT_OF_MEMORY, {"memory", NULL}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        vjp_device *device = NULL;
        if (rows[i].variable) setenv(rows[i].variable, rows[i].value, 1);
        vjp_options options = rows[i].options;
        options.struct_size = sizeof options;
        vjp_status status = vjp_open(rows[i].device, &options, &device);
        if (rows[i].variable) unsetenv(rows[i].variable);
        if (status != rows[i].status) print_error("row %zu: %s: %s\n", i, vjp_status_name(status), vjp_error(device));
        assert_int_equal(status, rows[i].status);
        assert_non_null(device);
        for (int k = 0; k < 2 && rows[i].words[k]; k++) {
            if (!strstr(vjp_error(device), rows[i].words[k])) print_error("row %zu: %s\n", i, vjp_error(device));
            assert_non_null(strstr(vjp_error(device), rows[i].words[k]));
        }
        /* Such a device answers every call and keeps its sentence. */
        char sentence[512];
        snprintf(sentence, sizeof sentence, "%s", vjp_error(device));
        float x = 1, y = 2;
        vjp_tensor tx = vjp_tensor_of(&x, VJP_F32, 1, (int64_t[]){1}),
                   ty = vjp_tensor_of(&y, VJP_F32, 1, (int64_t[]){1});
        void *data;
        assert_int_equal(vjp_cumsum_forward(device, &ty, &tx, WITH(cumsum, .axis = 0, .exclusive = 0, .reverse = 0)),
                         VJP_NO_DEVICE);
        assert_int_equal(vjp_reserve(device, 10), VJP_NO_DEVICE);
        assert_int_equal(vjp_set_workspace(device, NULL, 0), VJP_NO_DEVICE);
        assert_int_equal(vjp_alloc(device, 10, &data), VJP_NO_DEVICE);
        assert_int_equal(vjp_synchronize(device), VJP_NO_DEVICE);
        assert_int_equal(vjp_upload(device, &y, 0, &x, 4), VJP_NO_DEVICE);
        assert_int_equal(vjp_download(device, &y, &x, 0, 4), VJP_NO_DEVICE);
        vjp_free(device, &x);
        bool found = rows[i].device && (strcmp(rows[i].device, "cpu") == 0 || strcmp(rows[i].device, "ref") == 0);
        assert_true(!found || vjp_supports(device, vjp_op_find("cumsum"), VJP_FORWARD, VJP_F32) == VJP_OK);
        assert_true(y == 2);
        assert_string_equal(vjp_error(device), sentence);
        vjp_close(device);
    }
    assert_int_equal(vjp_open("cpu", NULL, NULL), VJP_INVALID);
    vjp_close(NULL);
    assert_true(strlen(vjp_error(NULL)) > 0);
    assert_string_equal(vjp_device_name(NULL), "");
    assert_string_equal(vjp_device_summary(NULL), "");
}

static void open_settings(void **state) {
    (void)state;
    static const struct {
        const char *variable, *value;
        vjp_options options;
        const char *summary;
    } rows[] = {
        {"VJP_THREADS", "3", {0}, "3 threads"},
        {"VJP_THREADS", "1", {0}, "1 thread "},
        {"VJP_THREADS", "3", {.threads = 2}, "2 threads"}, /* an option overrides the environment */
        {"VJP_THREADS", "", {.threads = 2}, "2 threads"},
#ifdef HAVE_SET_PLAIN
        {"VJP_ISA", "plain", {0}, "plain"},
        {"VJP_ISA", "sse9", {.instruction_set = "plain"}, "plain"},
        {"VJP_ISA", "", {.instruction_set = "plain"}, "plain"},
#endif
        {"VJP_GEMM", "builtin", {0}, "vjp itself"},
        {"VJP_GEMM", "blas", {.matrix_products = "builtin"}, "vjp itself"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        setenv(rows[i].variable, rows[i].value, 1);
        vjp_options options = rows[i].options;
        options.struct_size = sizeof options;
        vjp_device *device = open_with("cpu", options);
        unsetenv(rows[i].variable);
        if (!strstr(vjp_device_summary(device), rows[i].summary)) print_error("%s\n", vjp_device_summary(device));
        assert_non_null(strstr(vjp_device_summary(device), rows[i].summary));
        assert_string_equal(vjp_device_name(device), "cpu");
        assert_string_equal(vjp_error(device), "");
        vjp_close(device);
    }
}

/* ---- Two threads with one device each ---------------------------------------------------------------------- */

typedef struct worker {
    const char *device;
    uint64_t hash;
    vjp_status status;
} worker;

static void *work_alone(void *pointer) {
    worker *w = pointer;
    vjp_device *device;
    w->status = vjp_open(w->device, &(vjp_options){.struct_size = sizeof(vjp_options), .threads = 2}, &device);
    for (int i = 0; i < 20 && w->status == VJP_OK; i++) {
        call made;
        if (!call_make(&made, device, sample_find("layer_norm"), VJP_BACKWARD, plain_types, 1)) w->status = VJP_INVALID;
        if (w->status == VJP_OK) w->status = call_run(device, &made);
        w->hash = call_hash(&made, 0);
        /* A failure in one device's sentence only. */
        made.tensor[0].dtype = VJP_I32;
        if (call_run(device, &made) != VJP_INVALID) w->status = VJP_DEVICE_FAILED;
        if (!strstr(vjp_error(device), "layer_norm")) w->status = VJP_DEVICE_FAILED;
        call_free(&made);
    }
    vjp_close(device);
    return NULL;
}

static void two_threads(void **state) {
    (void)state;
    worker workers[2] = {{.device = "cpu"}, {.device = "cpu"}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, work_alone, &workers[i]), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(workers[0].status, VJP_OK);
    assert_int_equal(workers[1].status, VJP_OK);
    assert_int_equal(workers[0].hash, workers[1].hash);
}

/* ---- The header -------------------------------------------------------------------------------------- */

static int compile(const char *compiler, const char *flags, const char *file) {
    char command[1024];
    snprintf(command, sizeof command, "%s %s -fsyntax-only -I%s/include %s", compiler, flags, VJP_SOURCE_DIR, file);
    return system(command);
}

static void header_compiles(void **state) {
    (void)state;
    char folder[] = "/tmp/vjp_header_XXXXXX", file[64];
    assert_non_null(mkdtemp(folder));
    snprintf(file, sizeof file, "%s/header.c", folder);
    FILE *out = fopen(file, "w");
    assert_non_null(out);
    fputs("#include <vjp.h>\n#include <vjp_backend.h>\n#include <vjp.h>\n"
          "int use(vjp_device *d, const vjp_tensor *t);\n"
          "int use(vjp_device *d, const vjp_tensor *t) {\n"
          "    vjp_cumsum_attributes a = VJP_CUMSUM_DEFAULTS;\n"
          "    vjp_options o = VJP_OPTIONS_DEFAULTS;\n"
          "    vjp_program_options p = VJP_PROGRAM_OPTIONS_DEFAULTS;\n"
          "    return (int)vjp_cumsum_forward(d, t, t, &a) + o.threads + p.unplanned;\n"
          "}\n",
          out);
    fclose(out);
    const char *strict = "-Wall -Wextra -Wpedantic -pedantic-errors -Werror";
    char flags[256];
    snprintf(flags, sizeof flags, "-std=c99 %s -Wstrict-prototypes", strict);
    int c = compile(VJP_C_COMPILER, flags, file);
    snprintf(flags, sizeof flags, "-x c++ -std=c++11 %s", strict);
    int cpp = system("c++ --version >/dev/null 2>&1") == 0 ? compile("c++", flags, file) : 0;
    unlink(file);
    rmdir(folder);
    assert_int_equal(c, 0);
    assert_int_equal(cpp, 0);
}

int main(void) {
    unsetenv("VJP_THREADS");
    unsetenv("VJP_ISA");
    unsetenv("VJP_GEMM");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dtypes),
        cmocka_unit_test(statuses),
        cmocka_unit_test(tensor_of),
        cmocka_unit_test(op_table),
        cmocka_unit_test(attribute_defaults),
        cmocka_unit_test(infer_absent),
        cmocka_unit_test(infer_from_attributes),
        cmocka_unit_test(conv2d_needs_no_more),
        cmocka_unit_test(min_cost),
        cmocka_unit_test(supports),
        cmocka_unit_test(no_backward),
        cmocka_unit_test(nan_rate),
        cmocka_unit_test(workspace),
        cmocka_unit_test(workspace_is_enough),
        cmocka_unit_test(memory),
        cmocka_unit_test(open_failures),
        cmocka_unit_test(open_settings),
        cmocka_unit_test(two_threads),
        cmocka_unit_test(header_compiles),
    };
    return cmocka_run_group_tests_name("core", tests, NULL, NULL);
}

/* SPDX-License-Identifier: MIT */
/*
 * Sizes on a GPU that 32 bits do not hold: tensors past 2^31 elements, ten million rows, rows of 131072. Every op is
 * called on all of it, then on its last few items alone, in the same memory: what both write must be the same. Skipped
 * where there is no GPU, or one with too little memory.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/half.h"
#include "proof/text.h"
#include "vjp.h"

static vjp_device *device;

enum { LAST = 3, PATTERN = 1 << 20 };

typedef struct large {
    const char *op, *attributes;
    struct {
        const char *name;
        int ndim;
        int64_t shape[4];
    } input[3];
    vjp_dtype dtype;
} large;

static const large cases[] = {
    {"layer_norm", "", {{"x", 2, {10000000, 64}}, {"gamma", 1, {64}}, {"beta", 1, {64}}}, VJP_F32},
    {"layer_norm", "", {{"x", 2, {16500, 131072}}, {"gamma", 1, {131072}}, {"beta", 1, {131072}}}, VJP_BF16},
    {"rms_norm", "", {{"x", 2, {16500, 131072}}, {"gamma", 1, {131072}}}, VJP_BF16},
    {"rms_norm", "", {{"x", 2, {2200000, 1000}}, {"gamma", 1, {1000}}}, VJP_BF16},
    {"group_norm", "groups=8", {{"x", 4, {1100, 32, 256, 256}}, {"gamma", 1, {32}}, {"beta", 1, {32}}}, VJP_BF16},
    {"group_norm", "groups=8 layout=channels_last", {{"x", 4, {1100, 256, 256, 32}}, {"gamma", 1, {32}}}, VJP_BF16},
    {"rope", "", {{"x", 4, {258, 1024, 64, 128}}, {"cosine", 2, {1024, 64}}, {"sine", 2, {1024, 64}}}, VJP_BF16},
    {"cumsum", "axis=1", {{"x", 2, {16500, 131072}}}, VJP_BF16},
    {"cumsum", "axis=1", {{"x", 3, {10000000, 5, 43}}}, VJP_BF16},
    {"maxpool2d",
     "kernel_h=3 kernel_w=3 stride_h=2 stride_w=2 padding_h=1 padding_w=1",
     {{"x", 4, {1100, 32, 256, 256}}},
     VJP_BF16},
    {"linear", "activation=gelu_tanh", {{"a", 2, {2200000, 64}}, {"b", 2, {64, 1024}}, {"bias", 1, {1024}}}, VJP_BF16},
    {"attention",
     "",
     {{"q", 4, {258, 1024, 64, 128}}, {"k", 4, {258, 1024, 8, 128}}, {"v", 4, {258, 1024, 8, 128}}},
     VJP_BF16},
    {"attention",
     "",
     {{"q", 4, {4, 131072, 8, 64}}, {"k", 4, {4, 131072, 4, 64}}, {"v", 4, {4, 131072, 4, 64}}},
     VJP_BF16},
    {"gather", "axis=1", {{"table", 3, {1100, 2000, 1000}}, {"index", 1, {1990}}}, VJP_BF16},
};

typedef struct made {
    const vjp_op *op;
    const vjp_op_info *info;
    int64_t attributes[32];
    vjp_tensor tensor[VJP_MAX_SLOTS];
    const vjp_tensor *present[VJP_MAX_SLOTS];
} made;

static size_t bytes_of(const vjp_tensor *t) {
    size_t bytes = vjp_dtype_size((vjp_dtype)t->dtype);
    for (int i = 0; i < t->ndim; i++)
        bytes *= (size_t)t->shape[i];
    return bytes;
}

/* Small numbers that repeat every PATTERN bytes, a period that is no row's. */
static void fill(vjp_tensor *t, const char *name) {
    static unsigned char pattern[PATTERN + 8];
    size_t size = vjp_dtype_size((vjp_dtype)t->dtype), count = PATTERN / size - 7;
    for (size_t i = 0; i < count; i++) {
        double value = (double)((i * 2654435761u >> 7) % 1999) / 1000 - 1;
        float f = (float)value;
        uint16_t half = vjp_f32_to_bf16(f);
        int64_t index = (int64_t)(i * 31 % 2000);
        const void *from = t->dtype == VJP_F32 ? (void *)&f : t->dtype == VJP_BF16 ? (void *)&half : (void *)&index;
        memcpy(pattern + i * size, from, size);
    }
    size_t bytes = bytes_of(t), whole = count * size;
    for (size_t done = 0; done < bytes; done += whole)
        if (vjp_upload(device, t->data, done, pattern, bytes - done < whole ? bytes - done : whole) != VJP_OK)
            fail_msg("%s: %s", name, vjp_error(device));
}

static bool place(vjp_tensor *t) {
    return vjp_alloc(device, bytes_of(t) + 64, &t->data) == VJP_OK;
}

static void release(made *m, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (m->present[i]) vjp_free(device, m->tensor[i].data);
}

static bool is_given(const large *c, const char *name) {
    for (int i = 0; i < 3; i++)
        if (c->input[i].name && strcmp(c->input[i].name, name) == 0) return true;
    return false;
}

/* The tensors of a pass: shapes from the forward's inputs, by the names that the two passes share. */
static bool make(made *m, const large *c, vjp_pass pass) {
    const vjp_pass_info *forward = &m->info->pass[VJP_FORWARD], *info = &m->info->pass[pass];
    vjp_tensor given[VJP_MAX_SLOTS], described[VJP_MAX_SLOTS];
    const vjp_tensor *inputs[VJP_MAX_SLOTS] = {0};
    for (size_t s = forward->outputs; s < forward->count; s++)
        for (int i = 0; i < 3; i++)
            if (c->input[i].name && strcmp(c->input[i].name, forward->slots[s].name) == 0) {
                vjp_dtype dtype = forward->slots[s].kind == VJP_KIND_INDEX ? VJP_I64 : c->dtype;
                given[s] = vjp_tensor_of(NULL, dtype, c->input[i].ndim, c->input[i].shape);
                inputs[s] = &given[s];
            }
    if (vjp_infer(device, m->op, VJP_FORWARD, inputs, forward->count, m->attributes, described) != VJP_OK)
        fail_msg("%s", vjp_error(device));
    for (size_t s = 0; s < info->count; s++) {
        const char *name = info->slots[s].name;
        m->present[s] = NULL;
        for (size_t f = 0; f < forward->count; f++) {
            bool same = strcmp(name, forward->slots[f].name) == 0;
            bool gradient = pass == VJP_BACKWARD && name[0] == 'd' && strcmp(name + 1, forward->slots[f].name) == 0;
            bool output = f < forward->outputs;
            if (!same && !gradient) continue;
            if (!output && !is_given(c, forward->slots[f].name)) continue;
            if (pass == VJP_BACKWARD && same && output) continue; /* saved statistics are computed again */
            m->tensor[s] = described[f];
            m->present[s] = &m->tensor[s];
            if (!place(&m->tensor[s])) {
                m->present[s] = NULL;
                release(m, info->count);
                return false;
            }
            if (s >= info->outputs) fill(&m->tensor[s], name);
        }
    }
    return true;
}

static void run(made *m, vjp_pass pass, const vjp_tensor *const *tensors) {
    size_t bytes, count = m->info->pass[pass].count;
    if (vjp_workspace_size(device, m->op, pass, tensors, count, m->attributes, &bytes) != VJP_OK ||
        vjp_reserve(device, bytes) != VJP_OK ||
        vjp_call(device, m->op, pass, tensors, count, m->attributes) != VJP_OK || vjp_synchronize(device) != VJP_OK)
        fail_msg("%s", vjp_error(device));
}

static double element(const void *data, int dtype, size_t i) {
    if (dtype == VJP_F32) return ((const float *)data)[i];
    if (dtype == VJP_BF16) return vjp_bf16_to_f32(((const uint16_t *)data)[i]);
    return (double)((const int64_t *)data)[i];
}

/* The last items by themselves, against the last items of everything. */
static void compare_last(made *m, vjp_pass pass, int64_t items) {
    const vjp_pass_info *info = &m->info->pass[pass];
    vjp_tensor part[VJP_MAX_SLOTS];
    const vjp_tensor *present[VJP_MAX_SLOTS] = {0};
    for (size_t s = 0; s < info->count; s++) {
        if (!m->present[s]) continue;
        part[s] = m->tensor[s];
        bool cut = part[s].ndim && part[s].shape[0] == items;
        if (s < info->outputs && !cut) continue; /* sums over all items */
        if (cut) {
            part[s].shape[0] = LAST;
            part[s].offset = bytes_of(&m->tensor[s]) / (size_t)items * (size_t)(items - LAST);
        }
        if (s < info->outputs) {
            part[s].offset = 0;
            assert_true(place(&part[s]));
        }
        present[s] = &part[s];
    }
    run(m, pass, present);
    for (size_t s = 0; s < info->outputs; s++) {
        if (!present[s]) continue;
        size_t bytes = bytes_of(&part[s]), size = vjp_dtype_size((vjp_dtype)part[s].dtype);
        char *whole = malloc(bytes), *last = malloc(bytes);
        size_t from = bytes_of(&m->tensor[s]) - bytes;
        assert_int_equal(vjp_download(device, whole, m->tensor[s].data, from, bytes), VJP_OK);
        assert_int_equal(vjp_download(device, last, part[s].data, 0, bytes), VJP_OK);
        double error = 0, norm = 0;
        for (size_t i = 0; i < bytes / size; i++) {
            double a = element(whole, part[s].dtype, i), b = element(last, part[s].dtype, i);
            error += (a - b) * (a - b);
            norm += b * b;
        }
        double bound = part[s].dtype == VJP_BF16 ? 4e-3 : 2e-6;
        if (!(norm > 0 && sqrt(error / norm) <= bound))
            fail_msg("%s.%s: %s of the last items differs by %g", m->info->name, pass ? "backward" : "forward",
                     info->slots[s].name, sqrt(error / norm));
        free(whole);
        free(last);
        vjp_free(device, part[s].data);
    }
}

static void large_sizes(void **state) {
    const large *c = *state;
    if (!device) skip();
    char error[TEXT_ERROR];
    made m = {.op = vjp_op_find(c->op)};
    m.info = vjp_op_describe(m.op);
    vjp_op_defaults(m.op, m.attributes);
    if (!text_set_attributes(m.op, m.attributes, c->attributes, error)) fail_msg("%s", error);
    for (int pass = 0; pass < VJP_PASS_COUNT; pass++) {
        if (!make(&m, c, (vjp_pass)pass)) {
            print_message("%s: too little memory on this card\n", c->op);
            skip();
        }
        run(&m, (vjp_pass)pass, m.present);
        compare_last(&m, (vjp_pass)pass, c->input[0].shape[0]);
        release(&m, m.info->pass[pass].count);
    }
}

int main(void) {
    if (vjp_open("cuda", NULL, &device) != VJP_OK) {
        printf("skipped, it needs a GPU: %s\n", vjp_error(device));
        vjp_close(device);
        device = NULL;
    }
    enum { CASES = sizeof cases / sizeof cases[0] };
    struct CMUnitTest tests[CASES];
    for (int i = 0; i < CASES; i++)
        tests[i] = (struct CMUnitTest){cases[i].op, large_sizes, NULL, NULL, (void *)&cases[i]};
    int failed = cmocka_run_group_tests_name("cuda, large", tests, NULL, NULL);
    vjp_close(device);
    return failed;
}

/* SPDX-License-Identifier: MIT */
/* Core: dtypes, statuses, tensors, the op table, and the public headers. Nothing that a kernel computes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <unistd.h>

#include "attributes.h"
#include "core/core.h"
#include "opening.h"
#include "sample.h"

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
    vjp_device *device = open_device("ref");
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
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dtypes),   cmocka_unit_test(statuses),           cmocka_unit_test(tensor_of),
        cmocka_unit_test(op_table), cmocka_unit_test(attribute_defaults), cmocka_unit_test(header_compiles),
    };
    return cmocka_run_group_tests_name("core", tests, NULL, NULL);
}

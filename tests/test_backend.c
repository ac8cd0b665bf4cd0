/* SPDX-License-Identifier: MIT */
/*
 * The parts of the API that belong to devices rather than ops: a third-party backend (outside_backend.c), the lists of
 * devices, properties, memory, copies and events, the caller's memory and log, and what NULL gives.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "opening.h"
#include "vjp_backend.h"

/* Sizes are part of the interface: growing a struct must be a decision. */
_Static_assert(sizeof(vjp_tensor) == 160, "vjp_tensor");
_Static_assert(sizeof(void *) != 8 || sizeof(vjp_options) == 104, "vjp_options");
_Static_assert(sizeof(void *) != 8 || sizeof(vjp_slot) == 48, "vjp_slot");
_Static_assert(sizeof(void *) != 8 || sizeof(vjp_attribute) == 72, "vjp_attribute");
_Static_assert(sizeof(void *) != 8 || sizeof(vjp_op_info) == 136, "vjp_op_info");
_Static_assert(sizeof(vjp_cost) == 32, "vjp_cost");
_Static_assert(sizeof(void *) != 8 || sizeof(vjp_program_options) == 48, "vjp_program_options");
_Static_assert(sizeof(void *) != 8 || sizeof(vjp_program_report) == 88, "vjp_program_report");
_Static_assert(sizeof(void *) != 8 || sizeof(vjp_call_time) == 96, "vjp_call_time");
_Static_assert(sizeof(void *) != 8 || sizeof(vjp_minimize_options) == 104, "vjp_minimize_options");
_Static_assert(sizeof(vjp_muon_options) == 40, "vjp_muon_options");
_Static_assert(sizeof(vjp_group_options) == 16, "vjp_group_options");
_Static_assert(sizeof(void *) != 8 || sizeof(vjp_minimize_result) == 40, "vjp_minimize_result");
_Static_assert(sizeof(void *) != 8 || sizeof(vjp_backend) == 368, "vjp_backend");
_Static_assert(sizeof(vjp_adamw_attributes) == 48, "struct_size and five members");

/* ---- A backend from outside -------------------------------------------------------------------------- */

enum { LINES = 8 };

typedef struct journal {
    int count;
    char line[LINES][256];
} journal;

static void note(void *context, const char *line) {
    journal *j = context;
    if (j->count < LINES) snprintf(j->line[j->count], sizeof j->line[0], "%s", line);
    j->count++;
}

static void outside_backend(void **state) {
    (void)state;
    journal j = {0};
    vjp_options options = VJP_OPTIONS_DEFAULTS;
    options.log = note;
    options.log_context = &j;
    vjp_device *device = open_with("outside:0", &options);
    assert_string_equal(vjp_device_summary(device), "two kernels, for tests");
    assert_int_equal(j.count, 2);
    assert_string_equal(j.line[0], "outside: opening with 2 kernels");
    assert_string_equal(j.line[1], "outside:0: opened: two kernels, for tests");
    float x[6] = {1, 2, 3, 4, 5, 6}, y[6];
    const int64_t shape[] = {2, 3};
    vjp_tensor tx = vjp_tensor_of(x, VJP_F32, 2, shape), ty = vjp_tensor_of(y, VJP_F32, 2, shape);
    vjp_scale_attributes half = VJP_SCALE_DEFAULTS;
    half.factor = 0.5;
    assert_int_equal(vjp_scale_forward(device, &ty, &tx, &half), VJP_OK);
    for (int i = 0; i < 6; i++)
        assert_true(y[i] == 0.5f * x[i]);
    assert_int_equal(vjp_cumsum_forward(device, &ty, &tx, NULL), VJP_UNSUPPORTED);
    assert_non_null(strstr(vjp_error(device), "cumsum.forward: outside:0 has no kernel for f32"));
    static float many[2000];
    vjp_tensor large = vjp_tensor_of(many, VJP_F32, 1, (const int64_t[]){2000});
    assert_int_equal(vjp_scale_forward(device, &large, &large, NULL), VJP_UNSUPPORTED);
    assert_string_equal(vjp_error(device), "scale.forward: x has 2000 elements");
    vjp_close(device);

    assert_int_equal(vjp_open("outside:broken", NULL, &device), VJP_NO_DEVICE);
    assert_string_equal(vjp_error(device), "outside:broken: it is broken");
    vjp_close(device);
}

/* A kernel that was not written for rows that lie apart never sees them. */
static void outside_rows(void **state) {
    (void)state;
    vjp_device *device = open_device("outside:0");
    float x[6] = {1, 2, 9, 9, 3, 4}, y[4] = {0}, cosine[2] = {0, 0}, sine[2] = {1, 1};
    const int64_t shape[] = {2, 1, 2}, angles[] = {2, 1};
    vjp_tensor tx = vjp_tensor_of(x, VJP_F32, 3, shape), ty = vjp_tensor_of(y, VJP_F32, 3, shape);
    vjp_tensor tc = vjp_tensor_of(cosine, VJP_F32, 2, angles), ts = vjp_tensor_of(sine, VJP_F32, 2, angles);
    assert_int_equal(vjp_rope_forward(device, &ty, &tx, &tc, &ts, NULL, NULL), VJP_OK);
    assert_true(y[0] == -2 && y[1] == 1 && y[2] == -9 && y[3] == 9);
    tx.stride[0] = 4;
    assert_int_equal(vjp_rope_forward(device, &ty, &tx, &tc, &ts, NULL, NULL), VJP_UNSUPPORTED);
    assert_non_null(strstr(vjp_error(device), "rope.forward: x of shape [2, 1, 2] has strides [4, 2, 1]"));
    assert_true(y[2] == -9 && y[3] == 9);
    size_t bytes;
    const vjp_tensor *tensors[] = {&ty, &tx, &tc, &ts, NULL};
    assert_int_equal(vjp_workspace_size(device, vjp_op_find("rope"), VJP_FORWARD, tensors, 5, NULL, &bytes),
                     VJP_UNSUPPORTED);
    vjp_close(device);
    device = open_device("cpu");
    assert_int_equal(vjp_rope_forward(device, &ty, &tx, &tc, &ts, NULL, NULL), VJP_OK);
    assert_true(y[0] == -2 && y[1] == 1 && y[2] == -4 && y[3] == 3);
    vjp_close(device);
}

static void names_that_are_no_devices(void **state) {
    (void)state;
    static const char *const names[] = {"../outside", "outside/x", "Outside",
                                        "a b",        "nowhere",   "averyveryverylongnameofadevicethatdoesnotfit"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        vjp_device *device;
        assert_int_equal(vjp_open(names[i], NULL, &device), VJP_NO_DEVICE);
        assert_non_null(strstr(vjp_error(device), "unknown device"));
        vjp_close(device);
    }
}

/* ---- Lists and properties ---------------------------------------------------------------------------- */

static void lists_of_devices(void **state) {
    (void)state;
    static const char *const kinds[] = {"ref", "cpu", "cuda", "webgpu", "metal"};
    char text[256];
    for (size_t i = 0; i < 5; i++)
        assert_string_equal(vjp_device_kind(i), kinds[i]);
    assert_null(vjp_device_kind(5));
    assert_int_equal(vjp_device_count("cpu"), 1);
    assert_int_equal(vjp_device_count("nowhere"), 0);
    assert_int_equal(vjp_device_count(NULL), 0);
    assert_int_equal(vjp_device_describe("cpu", 0, text, sizeof text), VJP_OK);
    assert_non_null(strstr(text, "thread"));
    assert_int_equal(vjp_device_describe("cpu", 1, text, sizeof text), VJP_NO_DEVICE);
    assert_int_equal(vjp_device_describe("nowhere", 0, text, sizeof text), VJP_NO_DEVICE);
    assert_non_null(strstr(text, "unknown device"));
    assert_int_equal(vjp_device_describe("cpu", 0, NULL, 0), VJP_INVALID);
}

static void properties(void **state) {
    (void)state;
    vjp_options options = VJP_OPTIONS_DEFAULTS;
    options.threads = 2;
    options.matrix_products = "builtin";
    vjp_device *cpu = open_with("cpu", &options), *ref = open_device("ref");
    char text[64];
    assert_int_equal(vjp_device_property(cpu, "threads", text, sizeof text), VJP_OK);
    assert_string_equal(text, "2");
    assert_int_equal(vjp_device_property(cpu, "matrix_products", text, sizeof text), VJP_OK);
    assert_string_equal(text, "builtin");
    assert_int_equal(vjp_device_property(cpu, "instruction_set", text, sizeof text), VJP_OK);
    assert_non_null(strstr(vjp_device_summary(cpu), text));
    assert_int_equal(vjp_device_property(cpu, "colour", text, sizeof text), VJP_UNSUPPORTED);
    assert_non_null(strstr(vjp_error(cpu), "\"colour\""));
    assert_int_equal(vjp_device_property(ref, "threads", text, sizeof text), VJP_UNSUPPORTED);
    assert_int_equal(vjp_device_property(cpu, NULL, text, sizeof text), VJP_INVALID);
    assert_true(vjp_device_is_host(cpu) && vjp_device_is_host(ref) && !vjp_device_is_host(NULL));
    assert_int_equal(vjp_set_stream(cpu, NULL), VJP_UNSUPPORTED);
    assert_non_null(strstr(vjp_error(cpu), "streams"));
    vjp_close(ref);
    vjp_close(cpu);
}

/* ---- Memory ------------------------------------------------------------------------------------------ */

static void memory_of_a_device(void **state) {
    (void)state;
    vjp_device *device = open_with("cpu", &(vjp_options){.struct_size = sizeof(vjp_options), .threads = 1});
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

static void copies_and_events(void **state) {
    (void)state;
    static const char *const names[] = {"cpu", "ref", "outside"};
    for (int d = 0; d < 3; d++) {
        vjp_device *device = open_device(names[d]);
        char host[64], back[64];
        for (int i = 0; i < 64; i++)
            host[i] = (char)(3 * i);
        void *a, *b;
        vjp_event *event;
        assert_int_equal(vjp_alloc(device, 64, &a), VJP_OK);
        assert_int_equal(vjp_alloc(device, 64, &b), VJP_OK);
        assert_int_equal(vjp_upload_async(device, a, 0, host, 64), VJP_OK);
        assert_int_equal(vjp_copy(device, b, 8, a, 0, 56), VJP_OK);
        assert_int_equal(vjp_download_async(device, back, b, 8, 56), VJP_OK);
        assert_int_equal(vjp_event_record(device, &event), VJP_OK);
        assert_int_equal(vjp_event_wait(device, event), VJP_OK);
        vjp_event_destroy(device, event);
        assert_memory_equal(back, host, 56);
        assert_int_equal(vjp_copy(device, a, 0, a, 8, 16), VJP_INVALID);
        assert_non_null(strstr(vjp_error(device), "overlap"));
        assert_int_equal(vjp_copy(device, a, 0, a, 8, 8), VJP_OK);
        vjp_free(device, a);
        vjp_free(device, b);
        vjp_close(device);
    }
}

typedef struct arena {
    int live, total;
    size_t limit;
} arena;

static void *take(void *context, size_t bytes, size_t alignment) {
    arena *a = context;
    if (bytes > a->limit) return NULL;
    a->live++;
    a->total++;
    return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void give(void *context, void *data) {
    ((arena *)context)->live--;
    free(data);
}

static void memory_of_the_caller(void **state) {
    (void)state;
    arena a = {.limit = (size_t)1 << 30};
    vjp_options options = VJP_OPTIONS_DEFAULTS;
    options.allocate = take;
    options.release = give;
    options.allocate_context = &a;
    vjp_device *device = open_with("cpu", &options);
    assert_int_equal(a.live, 1); /* the workspace */
    void *data;
    assert_int_equal(vjp_alloc(device, 1000, &data), VJP_OK);
    assert_int_equal(a.live, 2);
    vjp_free(device, data);
    assert_int_equal(vjp_alloc(device, (size_t)1 << 31, &data), VJP_OUT_OF_MEMORY);
    assert_non_null(strstr(vjp_error(device), "options.allocate"));
    assert_null(data);
    vjp_close(device);
    assert_int_equal(a.live, 0);
    a.limit = 10;
    assert_int_equal(vjp_open("cpu", &options, &device), VJP_OUT_OF_MEMORY);
    vjp_close(device);
    options.release = NULL;
    assert_int_equal(vjp_open("cpu", &options, &device), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "release"));
    vjp_close(device);
    options.release = give;
    assert_int_equal(vjp_open("outside", &options, &device), VJP_UNSUPPORTED);
    vjp_close(device);
}

/* ---- What NULL and other sizes give ------------------------------------------------------------------ */

static void null_is_a_status(void **state) {
    (void)state;
    vjp_device *device = open_device("cpu");
    const vjp_op *op = vjp_op_find("scale");
    float x = 1;
    vjp_tensor t = vjp_tensor_of(&x, VJP_F32, 0, NULL);
    const vjp_tensor *tensors[] = {&t, &t};
    assert_int_equal(vjp_alloc(device, 8, NULL), VJP_INVALID);
    assert_int_equal(vjp_upload(device, NULL, 0, &x, 4), VJP_INVALID);
    assert_int_equal(vjp_upload(device, &x, 0, NULL, 4), VJP_INVALID);
    assert_int_equal(vjp_download(device, NULL, &x, 0, 4), VJP_INVALID);
    assert_int_equal(vjp_download(device, &x, NULL, 0, 4), VJP_INVALID);
    assert_int_equal(vjp_upload(device, NULL, 0, NULL, 0), VJP_OK);
    assert_int_equal(vjp_copy(device, NULL, 0, &x, 0, 4), VJP_INVALID);
    assert_int_equal(vjp_event_record(device, NULL), VJP_INVALID);
    assert_int_equal(vjp_event_wait(device, NULL), VJP_INVALID);
    assert_int_equal(vjp_workspace_size(device, op, VJP_FORWARD, tensors, 2, NULL, NULL), VJP_INVALID);
    assert_int_equal(vjp_infer(device, op, VJP_FORWARD, tensors, 2, NULL, NULL), VJP_INVALID);
    assert_int_equal(vjp_min_cost(device, op, VJP_FORWARD, tensors, 2, NULL, NULL), VJP_INVALID);
    assert_int_equal(vjp_call(device, op, VJP_FORWARD, NULL, 2, NULL), VJP_INVALID);
    assert_int_equal(vjp_call(device, NULL, VJP_FORWARD, tensors, 2, NULL), VJP_INVALID);
    assert_int_equal(vjp_call(NULL, op, VJP_FORWARD, tensors, 2, NULL), VJP_NO_DEVICE);
    assert_true(strlen(vjp_error(device)) > 0);
    vjp_op_defaults(NULL, &x);
    vjp_op_defaults(op, NULL);
    t = vjp_tensor_of(&x, VJP_F32, 2, NULL);
    assert_int_equal(vjp_scale_forward(device, &t, &t, NULL), VJP_INVALID);
    t = vjp_tensor_of(&x, VJP_F32, -1, NULL);
    assert_int_equal(vjp_scale_forward(device, &t, &t, NULL), VJP_INVALID);
    vjp_string_free(NULL);
    vjp_event_destroy(device, NULL);
    vjp_close(device);
}

static void structs_of_another_size(void **state) {
    (void)state;
    float w = 1, m = 0, v = 0, g = 1, lr = 0.1f;
    int32_t step = 1;
    vjp_device *device = open_device("cpu");
    vjp_tensor tw = vjp_tensor_of(&w, VJP_F32, 0, NULL), tm = vjp_tensor_of(&m, VJP_F32, 0, NULL);
    vjp_tensor tv = vjp_tensor_of(&v, VJP_F32, 0, NULL), tg = vjp_tensor_of(&g, VJP_F32, 0, NULL);
    vjp_tensor tlr = vjp_tensor_of(&lr, VJP_F32, 0, NULL), tstep = vjp_tensor_of(&step, VJP_I32, 0, NULL);
    const vjp_adamw_attributes two_members = {.beta1 = 0.9, .beta2 = 0.99};
    assert_int_equal(vjp_adamw_forward(device, &tw, &tm, &tv, &tw, &tm, &tv, &tg, &tlr, &tstep, NULL, &two_members),
                     VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "struct_size is 0; it must be 48"));
    assert_true(w == 1 && m == 0 && v == 0);
    vjp_adamw_attributes whole = VJP_ADAMW_DEFAULTS;
    whole.beta2 = 0.99;
    assert_true(whole.eps == 1e-8 && whole.beta1 == 0.9);
    assert_int_equal(vjp_adamw_forward(device, &tw, &tm, &tv, &tw, &tm, &tv, &tg, &tlr, &tstep, NULL, &whole), VJP_OK);
    vjp_close(device);
    vjp_options options = {.threads = 1};
    assert_int_equal(vjp_open("cpu", &options, &device), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "struct_size is 0"));
    vjp_close(device);
}

int main(void) {
    unsetenv("VJP_THREADS");
    unsetenv("VJP_ISA");
    unsetenv("VJP_GEMM");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(outside_backend),
        cmocka_unit_test(outside_rows),
        cmocka_unit_test(names_that_are_no_devices),
        cmocka_unit_test(lists_of_devices),
        cmocka_unit_test(properties),
        cmocka_unit_test(memory_of_a_device),
        cmocka_unit_test(copies_and_events),
        cmocka_unit_test(memory_of_the_caller),
        cmocka_unit_test(null_is_a_status),
        cmocka_unit_test(structs_of_another_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

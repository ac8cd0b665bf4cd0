/* SPDX-License-Identifier: MIT */
/*
 * The Metal backend's device without a Mac, on the stand-in of tests/metal/stand_in.c: its library, opening that fails,
 * memory and copies, which calls share a command buffer, a pipeline or a launch, and the failures of compiler and GPU.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "on_stand_in.h"

static void the_library_has_one_entry_and_knows_its_version(void **state) {
    (void)state;
    check_library(VJP_METAL_LIBRARY, "metal");
}

static void where_there_is_no_macos_it_is_said(void **state) {
    (void)state;
    vjp_device *none;
    objc_use(NULL);
    assert_int_equal(vjp_device_create("metal", &none), VJP_OK);
    assert_int_equal(vjp_device_start(none, backend_here(), NULL), VJP_NO_DEVICE);
    if (!strstr(vjp_error(none), "metal: Metal needs macOS")) fail_msg("%s", vjp_error(none));
    assert_int_equal(vjp_synchronize(none), VJP_NO_DEVICE);
    vjp_close(none);
    assert_int_equal(vjp_open("metal:1", NULL, &none), VJP_NO_DEVICE);
    assert_non_null(strstr(vjp_error(none), "unknown device \"metal:1\""));
    vjp_close(none);
}

static void opening_that_fails_says_why_and_keeps_nothing(void **state) {
    (void)state;
    static const char compiler[] = "program_source:3:1: error: unknown type name 'floot'";
    const struct {
        stand_in_state with;
        vjp_status status;
        const char *words;
    } rows[] = {
        {{.no_device = true}, VJP_NO_DEVICE, "no GPU for Metal"},
        {{.fail_queue = true}, VJP_OUT_OF_MEMORY, "no memory for the device"},
        {{.fail_buffer = true}, VJP_OUT_OF_MEMORY, "no memory for the device"},
        {{.fail_library = compiler}, VJP_DEVICE_FAILED, "tools.metal: program_source:3:1: error: unknown type"},
        {{.fail_function = "no such constant"}, VJP_DEVICE_FAILED, "tools.metal, words(): no such constant"},
        {{.fail_pipeline = "too many registers"}, VJP_DEVICE_FAILED, "words(): too many registers"},
        {{.max_threads = 0}, VJP_NO_DEVICE, "runs no threads"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        vjp_device *none;
        stand_in_reset();
        stand_in_state usual = stand_in;
        stand_in = rows[i].with;
        stand_in.max_bytes = usual.max_bytes;
        assert_int_equal(open_here(&none), rows[i].status);
        if (!strstr(vjp_error(none), rows[i].words)) fail_msg("\"%s\" is no \"%s\"", vjp_error(none), rows[i].words);
        vjp_close(none);
        all_is_gone();
    }
}

static void any_bytes_go_up_and_come_down(void **state) {
    (void)state;
    start();
    unsigned char host[64], back[64];
    void *data, *other;
    assert_int_equal(vjp_alloc(device, 64, &data), VJP_OK);
    assert_int_equal(vjp_alloc(device, 0, &other), VJP_OK);
    for (unsigned i = 0; i < 64; i++)
        host[i] = (unsigned char)(i + 1);
    assert_int_equal(vjp_upload(device, data, 3, host, 61), VJP_OK);
    assert_memory_equal((char *)data + 3, host, 61); /* the host sees the device's memory */
    assert_int_equal(vjp_download(device, back, data, 4, 7), VJP_OK);
    assert_memory_equal(back, host + 1, 7);
    assert_int_equal(vjp_upload(device, data, 0, host, 0), VJP_OK);
    assert_int_equal(vjp_upload(device, host, 0, host, 4), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "is not memory of this device"));
    assert_int_equal(vjp_download(device, back, data, 250, 16), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "16 bytes at 250 run past a buffer of 256"));
    vjp_free(device, data);
    vjp_free(device, other);
    vjp_free(device, host);
    stop();
}

/* Whole words and single bytes; done when waited for, not before. */
static void copies_within_the_device(void **state) {
    (void)state;
    start();
    char host[2048], back[2048], expected[2048];
    void *data;
    for (size_t i = 0; i < sizeof host; i++)
        host[i] = (char)(i * 7 % 251);
    assert_int_equal(vjp_alloc(device, sizeof host, &data), VJP_OK);
    assert_int_equal(vjp_upload(device, data, 0, host, sizeof host), VJP_OK);
    memcpy(expected, host, sizeof host);
    char *to = data;
    assert_int_equal(device->backend->copy(device, to + 1024, to, 1000), VJP_OK);
    assert_int_equal(device->backend->copy(device, to + 1, to + 1027, 301), VJP_OK);
    assert_memory_equal(data, host, sizeof host);
    memcpy(expected + 1024, host, 1000);
    memcpy(expected + 1, expected + 1027, 301);
    assert_int_equal(vjp_download(device, back, data, 0, sizeof back), VJP_OK);
    assert_memory_equal(back, expected, sizeof back);
    vjp_free(device, data);
    stop();
}

static const float numbers[8] = {1, 2, 3, 4, 5, 6, 7, 9};

static void calls_share_a_command_buffer_and_no_pipeline_is_made_twice(void **state) {
    (void)state;
    start();
    const metal_state *inside = device->state;
    vjp_tensor x = on_device(VJP_F32, 2, (int64_t[]){2, 4}, numbers, sizeof numbers);
    vjp_tensor y = on_device(VJP_F32, 2, (int64_t[]){2, 4}, numbers, sizeof numbers);
    assert_int_equal(norm(&y, &x), VJP_OK);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    int libraries = stand_in.libraries, pipelines = stand_in.pipelines, committed = stand_in.committed;
    for (int i = 0; i < 40; i++)
        assert_int_equal(norm(&y, &x), VJP_OK);
    assert_int_equal(inside->launches, 40);
    assert_int_equal(stand_in.committed, committed);
    for (int i = 40; i < METAL_LAUNCHES * (METAL_COMMITTED + 2); i++) /* more than may run at once */
        assert_int_equal(norm(&y, &x), VJP_OK);
    assert_true(stand_in.committed - committed >= METAL_COMMITTED);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    assert_int_equal(stand_in.committed - committed, METAL_COMMITTED + 2);
    assert_int_equal(inside->launches, 0);
    assert_int_equal(stand_in.libraries, libraries);
    assert_int_equal(stand_in.pipelines, pipelines);
    /* Freed while it is in use, and the device closed with unfinished work. */
    assert_int_equal(norm(&y, &x), VJP_OK);
    vjp_free(device, y.data);
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    assert_int_equal(norm(&x, &x), VJP_OK);
    vjp_free(device, x.data);
    stop();
}

/* A pipeline for each dtype, presence and constant, and none for what does not matter. */
static void pipelines_are_made_for_what_differs(void **state) {
    (void)state;
    start();
    vjp_tensor x = on_device(VJP_F32, 2, (int64_t[]){2, 4}, numbers, sizeof numbers), other = x, y = x;
    vjp_tensor gamma = on_device(VJP_F32, 1, (int64_t[]){4}, numbers, 16);
    assert_int_equal(norm(&y, &x), VJP_OK);
    int before = stand_in.pipelines;
    other.shape[0] = 1; /* fewer rows, elsewhere, another eps: the same */
    y.shape[0] = 1;
    other.offset = y.offset = 16;
    assert_int_equal(vjp_rms_norm_forward(device, &y, NULL, &other, NULL, NULL, WITH(rms_norm, .axes = 1, .eps = 1e-3)),
                     VJP_OK);
    assert_int_equal(stand_in.pipelines, before);
    assert_int_equal(
        vjp_rms_norm_forward(device, &y, NULL, &other, &gamma, NULL, WITH(rms_norm, .axes = 1, .eps = 1e-3)), VJP_OK);
    assert_int_equal(stand_in.pipelines, before + 1);
    other.dtype = y.dtype = VJP_BF16;
    assert_int_equal(
        vjp_rms_norm_forward(device, &y, NULL, &other, &gamma, NULL, WITH(rms_norm, .axes = 1, .eps = 1e-3)), VJP_OK);
    assert_int_equal(stand_in.pipelines, before + 2);
    vjp_free(device, x.data);
    vjp_free(device, gamma.data);
    stop();
}

static void failures_of_compiler_and_device_are_a_status(void **state) {
    (void)state;
    start();
    vjp_tensor x = on_device(VJP_F32, 2, (int64_t[]){2, 4}, numbers, sizeof numbers);
    stand_in.fail_library = "program_source:9:3: error: no member named 'z'\n  in 'Stats'";
    assert_int_equal(norm(&x, &x), VJP_DEVICE_FAILED);
    assert_non_null(
        strstr(vjp_error(device), "rms_norm.metal: program_source:9:3: error: no member named 'z' in 'Stats'"));
    stand_in.fail_library = NULL;
    stand_in.fail_pipeline = "Compiler encountered an internal error";
    assert_int_equal(norm(&x, &x), VJP_DEVICE_FAILED);
    assert_non_null(strstr(vjp_error(device), "rms_norm.metal, forward(): Compiler encountered"));
    stand_in.fail_pipeline = NULL;
    stand_in.fail_commands = true;
    assert_int_equal(norm(&x, &x), VJP_DEVICE_FAILED);
    stand_in.fail_commands = false;
    stand_in.fail_encoder = true;
    assert_int_equal(norm(&x, &x), VJP_DEVICE_FAILED);
    assert_non_null(strstr(vjp_error(device), "gives no command buffer"));
    stand_in.fail_encoder = false;
    assert_int_equal(norm(&x, &x), VJP_OK); /* and the device still works */

    stand_in.fail_run = "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)";
    assert_int_equal(vjp_synchronize(device), VJP_DEVICE_FAILED);
    assert_non_null(strstr(vjp_error(device), "metal: running: Caused GPU Timeout Error"));
    stand_in.fail_run = NULL;
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    assert_int_equal(norm(&x, &x), VJP_OK);
    stand_in.fail_run = "Lost";
    float back[8];
    assert_int_equal(vjp_download(device, back, x.data, 0, sizeof back), VJP_DEVICE_FAILED);
    stand_in.fail_run = NULL;

    /* A pipeline that gives fewer threads than the others, or less than asked. */
    stand_in.max_threads = 100;
    vjp_tensor y = x;
    y.dtype = VJP_F16;
    assert_int_equal(norm(&y, &y), VJP_UNSUPPORTED);
    assert_non_null(strstr(vjp_error(device), "forward needs more threads than this device gives it"));
    vjp_free(device, x.data);
    stop();
}

static void memory_that_is_not_the_devices_is_refused(void **state) {
    (void)state;
    start();
    float host[8] = {0};
    vjp_tensor x = on_device(VJP_F32, 2, (int64_t[]){2, 4}, numbers, sizeof numbers), y = x, far = x;
    y.data = host;
    assert_int_equal(norm(&y, &x), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "y does not lie in memory of this device"));
    far.shape[0] = 1000;
    assert_int_equal(norm(&far, &far), VJP_INVALID);
    stand_in.fail_buffer = true;
    void *data;
    assert_int_equal(vjp_alloc(device, 64, &data), VJP_OUT_OF_MEMORY);
    assert_non_null(strstr(vjp_error(device), "64 bytes: the device has none"));
    stand_in.fail_buffer = false;
    assert_int_equal(vjp_alloc(device, (size_t)1 << 50, &data), VJP_OUT_OF_MEMORY);
    assert_non_null(
        strstr(vjp_error(device), "1125899906842624 bytes: a buffer of this device holds at most 4294967296"));
    assert_int_equal(vjp_synchronize(device), VJP_OK);
    vjp_free(device, x.data);
    stop();
}

static void an_old_system_has_fast_mathematics_off_too(void **state) {
    (void)state;
    stand_in_reset();
    stand_in.old_system = true;
    if (open_here(&device) != VJP_OK) fail_msg("%s", vjp_error(device));
    stop();
}

/* More parameters than a merged launch has rows: the optimizer's step is two launches, and the weights are the same. */
static void more_calls_than_a_table_holds_are_several_launches(void **state) {
    (void)state;
    enum { COUNT = METAL_ROWS + 8 };
    float result[2][COUNT];
    long launches[2];
    start();
    vjp_graph *g = vjp_graph_create();
    vjp_value weight[COUNT], sum = 0;
    for (int i = 0; i < COUNT; i++) {
        char name[16];
        snprintf(name, sizeof name, "w%d", i);
        weight[i] = vjp_graph_parameter(g, name, VJP_F32, 1, (const int64_t[]){1});
        vjp_value square = vjp_graph_mul(g, weight[i], weight[i], NULL);
        sum = i ? vjp_graph_add(g, sum, square, NULL) : square;
    }
    vjp_minimize_options options = VJP_MINIMIZE_OPTIONS_DEFAULTS;
    vjp_minimize_result made = {.struct_size = sizeof made};
    vjp_graph_minimize(g, vjp_graph_mean(g, sum, WITH(mean, .axis = 0, .axes = 1)), &options, &made);
    for (int unplanned = 0; unplanned < 2; unplanned++) {
        vjp_program *program;
        double loss;
        const vjp_program_options with = {.struct_size = sizeof with, .unplanned = unplanned};
        if (vjp_compile(device, g, made.results, made.count, &with, &program) != VJP_OK)
            fail_msg("%s", vjp_error(device));
        for (int i = 0; i < COUNT; i++)
            assert_int_equal(vjp_program_write(program, weight[i], &(float){(float)i - 7.5f}, sizeof(float)), VJP_OK);
        long before = dispatches_so_far();
        if (vjp_program_step(program, &made, 0.01, 1, &loss) != VJP_OK) fail_msg("%s", vjp_error(device));
        launches[unplanned] = dispatches_so_far() - before;
        for (int i = 0; i < COUNT; i++)
            assert_int_equal(vjp_program_read(program, weight[i], &result[unplanned][i], sizeof(float)), VJP_OK);
        vjp_program_destroy(program);
    }
    assert_memory_equal(result[0], result[1], sizeof result[0]);
    assert_true((double)result[0][0] != -7.5);
    if (launches[0] != launches[1] - COUNT + 2) fail_msg("%ld launches, %ld one by one", launches[0], launches[1]);
    vjp_graph_destroy(g);
    stop();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_library_has_one_entry_and_knows_its_version),
        cmocka_unit_test(where_there_is_no_macos_it_is_said),
        cmocka_unit_test(opening_that_fails_says_why_and_keeps_nothing),
        cmocka_unit_test(any_bytes_go_up_and_come_down),
        cmocka_unit_test(copies_within_the_device),
        cmocka_unit_test(calls_share_a_command_buffer_and_no_pipeline_is_made_twice),
        cmocka_unit_test(pipelines_are_made_for_what_differs),
        cmocka_unit_test(failures_of_compiler_and_device_are_a_status),
        cmocka_unit_test(memory_that_is_not_the_devices_is_refused),
        cmocka_unit_test(an_old_system_has_fast_mathematics_off_too),
        cmocka_unit_test(more_calls_than_a_table_holds_are_several_launches),
    };
    return cmocka_run_group_tests_name("metal device", tests, NULL, NULL);
}

/* SPDX-License-Identifier: MIT */
/*
 * Opening a device: what is refused and that such a device answers every call; which setting overrides which; and two
 * threads with a device each, whose errors stay apart.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <pthread.h>

#include "attributes.h"
#include "opening.h"
#include "sample.h"

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
        vjp_device *device = open_with("cpu", &options);
        unsetenv(rows[i].variable);
        if (!strstr(vjp_device_summary(device), rows[i].summary)) print_error("%s\n", vjp_device_summary(device));
        assert_non_null(strstr(vjp_device_summary(device), rows[i].summary));
        assert_string_equal(vjp_device_name(device), "cpu");
        assert_string_equal(vjp_error(device), "");
        vjp_close(device);
    }
}

/* ---- Two threads with one device each ---------------------------------------------------------------- */

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
        if (!call_make(&made, device, sample_find("layer_norm"), VJP_BACKWARD,
                       (sample_types){VJP_F32, VJP_F32, VJP_I32}, 1))
            w->status = VJP_INVALID;
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

int main(void) {
    unsetenv("VJP_THREADS");
    unsetenv("VJP_ISA");
    unsetenv("VJP_GEMM");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(open_failures),
        cmocka_unit_test(open_settings),
        cmocka_unit_test(two_threads),
    };
    return cmocka_run_group_tests_name("open", tests, NULL, NULL);
}

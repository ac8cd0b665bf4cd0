/* SPDX-License-Identifier: MIT */
/*
 * Muon: three steps compared with a plain implementation in double (golden/muon.py); the same bits for any number of
 * threads; a scale that is not finite changes nothing; which parameters it trains; what it refuses.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <math.h>

#include "files/safetensors.h"
#include "graph/program.h"
#include "vjp.h"

#define CHECK(device, call)                                                                                            \
    do {                                                                                                               \
        if ((call) != VJP_OK) fail_msg("%s", vjp_error(device));                                                       \
    } while (0)

static vjp_device *open_device(const char *name, int threads) {
    vjp_device *device;
    const vjp_options options = {.struct_size = sizeof options, .threads = threads};
    if (vjp_open(name, &options, &device) != VJP_OK) fail_msg("%s", vjp_error(device));
    return device;
}

/* A program that takes Muon's step of one matrix, whose gradient and scale are inputs. */
typedef struct stepper {
    vjp_graph *graph;
    vjp_program *program;
    vjp_value w, g, scale, momentum;
    vjp_minimize_result made;
    size_t count;
} stepper;

static stepper prepare(vjp_device *device, const int64_t shape[2], const vjp_muon_options *muon, bool scaled) {
    stepper s = {.graph = vjp_graph_create(), .made = {.struct_size = sizeof s.made}};
    s.w = vjp_graph_parameter(s.graph, "w", VJP_F32, 2, shape);
    s.g = vjp_graph_input(s.graph, "g", VJP_F32, 2, shape);
    if (scaled) s.scale = vjp_graph_input(s.graph, "scale", VJP_F32, 0, NULL);
    vjp_minimize_options options = VJP_MINIMIZE_OPTIONS_DEFAULTS;
    options.parameters = &s.w;
    options.gradients = &s.g;
    options.count = 1;
    options.scale = s.scale;
    options.muon = muon;
    if (vjp_graph_minimize(s.graph, 0, &options, &s.made) != VJP_OK) fail_msg("%s", vjp_graph_error(s.graph));
    s.momentum = vjp_graph_find(s.graph, "w.momentum");
    s.count = (size_t)(shape[0] * shape[1]);
    CHECK(device, vjp_compile(device, s.graph, s.made.results, s.made.count, NULL, &s.program));
    return s;
}

static void finish(stepper *s) {
    vjp_program_destroy(s->program);
    vjp_graph_destroy(s->graph);
}

static void step(vjp_device *device, const stepper *s, const float *g, float scale, float rate, float *w,
                 float *momentum) {
    CHECK(device, vjp_program_write(s->program, s->g, g, s->count * sizeof *g));
    if (s->scale) CHECK(device, vjp_program_write(s->program, s->scale, &scale, sizeof scale));
    assert_int_equal(s->made.step, 0);
    CHECK(device, vjp_program_step(s->program, &s->made, rate, 1, NULL));
    CHECK(device, vjp_program_read(s->program, s->w, w, s->count * sizeof *w));
    CHECK(device, vjp_program_read(s->program, s->momentum, momentum, s->count * sizeof *momentum));
}

/* ---- The same as in double ---------------------------------------------------------------------------- */

static double setting(const safetensors_file *file, const char *key) {
    const char *text = safetensors_metadata(file, key);
    assert_non_null(text);
    return strtod(text, NULL);
}

static const double *values(const safetensors_file *file, const char *name, int step_number) {
    char full[32];
    snprintf(full, sizeof full, step_number ? "%s_%d" : "%s", name, step_number);
    const safetensors_tensor *tensor = safetensors_find(file, full);
    assert_non_null(tensor);
    return tensor->data;
}

static void expect_near(const char *file, const char *what, const float *got, const double *wanted, size_t count,
                        double bound) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < count; i++) {
        difference += (got[i] - wanted[i]) * (got[i] - wanted[i]);
        size += wanted[i] * wanted[i];
    }
    if (!(sqrt(difference) <= bound * sqrt(size)))
        fail_msg("%s: %s is off by %.3g of its length", file, what, sqrt(difference / size));
}

static void compare(const char *device_name, const char *name) {
    char path[512], error[SAFETENSORS_ERROR];
    safetensors_file file;
    snprintf(path, sizeof path, "%s/muon/%s.safetensors", VJP_GOLDEN_DIR, name);
    if (!safetensors_read(path, &file, error)) fail_msg("%s", error);
    const safetensors_tensor *first = safetensors_find(&file, "w");
    assert_non_null(first);
    vjp_muon_options muon = VJP_MUON_OPTIONS_DEFAULTS;
    muon.momentum = setting(&file, "momentum");
    muon.nesterov = (int32_t)setting(&file, "nesterov");
    muon.iterations = (int32_t)setting(&file, "iterations");
    muon.scale = (int32_t)setting(&file, "scale");
    muon.weight_decay = setting(&file, "weight_decay");
    float clip = (float)setting(&file, "clip"), rate = (float)setting(&file, "rate");
    vjp_device *device = open_device(device_name, 1);
    stepper s = prepare(device, first->shape, &muon, clip > 0);
    float *w = calloc(3 * s.count, sizeof *w), *momentum = w + s.count, *g = momentum + s.count;
    for (size_t i = 0; i < s.count; i++)
        w[i] = (float)((const double *)first->data)[i];
    CHECK(device, vjp_program_write(s.program, s.w, w, s.count * sizeof *w));
    for (int n = 1; n <= 3; n++) {
        const double *gradient = values(&file, "g", 0) + (size_t)(n - 1) * s.count;
        for (size_t i = 0; i < s.count; i++)
            g[i] = (float)gradient[i];
        step(device, &s, g, clip, rate, w, momentum);
        /* A small singular value of the momentum grows 485 times, and with it the rounding of f32. */
        expect_near(name, "momentum", momentum, values(&file, "momentum", n), s.count, 1e-6);
        expect_near(name, "w", w, values(&file, "w", n), s.count, 1e-5);
    }
    free(w);
    finish(&s);
    vjp_close(device);
    safetensors_free(&file);
}

static void steps_are_those_in_double(void **unused) {
    (void)unused;
    static const char *const names[] = {"wide", "tall", "square", "tall_shape", "column", "row"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        compare("ref", names[i]);
        compare("cpu", names[i]);
    }
}

/* ---- Threads, and steps that are suppressed -------------------------------------------------------------- */

static void fill(float *x, size_t count, unsigned seed) {
    for (size_t i = 0; i < count; i++)
        x[i] = sinf((float)(seed * 1000 + i) * 0.7f) + 0.3f * cosf((float)i * (float)i);
}

static void threads_give_the_same_bits(void **unused) {
    (void)unused;
    const int64_t shapes[][2] = {{130, 300}, {300, 130}};
    enum { COUNT = 130 * 300 };
    float *first = malloc(4 * COUNT * sizeof *first), *g = first + COUNT, *w = g + COUNT, *momentum = w + COUNT;
    assert_non_null(first);
    for (int k = 0; k < 2; k++)
        for (int threads = 1; threads <= 3; threads++) {
            const vjp_muon_options muon = VJP_MUON_OPTIONS_DEFAULTS;
            vjp_device *device = open_device("cpu", threads);
            stepper s = prepare(device, shapes[k], &muon, true);
            fill(w, COUNT, 1);
            CHECK(device, vjp_program_write(s.program, s.w, w, COUNT * sizeof *w));
            for (unsigned n = 0; n < 2; n++) {
                fill(g, COUNT, 2 + n);
                step(device, &s, g, 0.5f, 0.01f, w, momentum);
            }
            if (threads == 1) memcpy(first, w, COUNT * sizeof *w);
            assert_memory_equal(first, w, COUNT * sizeof *w);
            finish(&s);
            vjp_close(device);
        }
    free(first);
}

static void no_finite_scale_no_step(void **unused) {
    (void)unused;
    const int64_t shape[] = {3, 4};
    const vjp_muon_options muon = VJP_MUON_OPTIONS_DEFAULTS;
    vjp_device *device = open_device("cpu", 1);
    stepper s = prepare(device, shape, &muon, true);
    float w[12], before[12], momentum[12], kept[12], g[12];
    fill(before, 12, 1);
    fill(g, 12, 2);
    CHECK(device, vjp_program_write(s.program, s.w, before, sizeof before));
    step(device, &s, g, 1, 0.1f, before, kept);
    step(device, &s, g, NAN, 0.1f, w, momentum);
    assert_memory_equal(w, before, sizeof w);
    assert_memory_equal(momentum, kept, sizeof kept);
    /* A gradient of zeros is a step of decay alone, and no division by zero. */
    memset(g, 0, sizeof g);
    memset(kept, 0, sizeof kept);
    CHECK(device, vjp_program_write(s.program, s.momentum, kept, sizeof kept));
    step(device, &s, g, 1, 0.5f, w, momentum);
    for (int i = 0; i < 12; i++)
        assert_true(fabsf(w[i] - 0.95f * before[i]) <= 1e-7f);
    finish(&s);
    vjp_close(device);
}

/* Once the momentum has changed, a run can no longer be interrupted. */
static void momentum_and_weights_change_together(void **unused) {
    (void)unused;
    const int64_t shape[] = {3, 4};
    const vjp_muon_options muon = VJP_MUON_OPTIONS_DEFAULTS;
    vjp_device *device = open_device("cpu", 1);
    stepper s = prepare(device, shape, &muon, true);
    vjp_program_report report = {.struct_size = sizeof report};
    vjp_program_describe(s.program, &report);
    assert_true(s.program->commits < (int32_t)report.calls);
    for (int32_t k = 0; k < s.program->commits; k++) {
        vjp_call_time call = {.struct_size = sizeof call};
        assert_int_equal(vjp_program_time(s.program, (size_t)k, &call), VJP_OK);
        assert_string_not_equal(vjp_op_describe(call.op)->name, "sgd");
    }
    finish(&s);
    vjp_close(device);
}

/* ---- Choice of parameters, refusals ------------------------------------------------------------------------ */

static int not_the_second(void *context, const char *name, const vjp_tensor *parameter) {
    assert_ptr_equal(context, &not_the_second);
    assert_int_equal(parameter->ndim, 2);
    return strcmp(name, "second") != 0;
}

static void only_chosen_matrices(void **unused) {
    (void)unused;
    static const struct {
        const char *name;
        int ndim;
        bool muon;
    } rows[] = {{"first", 2, true}, {"second", 2, false}, {"vector", 1, false}, {"block", 3, false}};
    const int64_t shape[] = {3, 2, 2};
    vjp_graph *graph = vjp_graph_create();
    vjp_value parameters[4], gradients[4];
    for (int i = 0; i < 4; i++) {
        char name[32];
        snprintf(name, sizeof name, "g%d", i);
        parameters[i] = vjp_graph_parameter(graph, rows[i].name, VJP_F32, rows[i].ndim, shape);
        gradients[i] = vjp_graph_input(graph, name, VJP_F32, rows[i].ndim, shape);
    }
    const vjp_muon_options muon = VJP_MUON_OPTIONS_DEFAULTS;
    vjp_minimize_options options = VJP_MINIMIZE_OPTIONS_DEFAULTS;
    options.parameters = parameters;
    options.gradients = gradients;
    options.count = 4;
    options.muon = &muon;
    options.uses_muon = not_the_second;
    options.context = (void *)&not_the_second;
    vjp_minimize_result made = {.struct_size = sizeof made};
    if (vjp_graph_minimize(graph, 0, &options, &made) != VJP_OK) fail_msg("%s", vjp_graph_error(graph));
    for (int i = 0; i < 4; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s.momentum", rows[i].name);
        assert_int_equal(vjp_graph_find(graph, name) != 0, rows[i].muon);
        snprintf(name, sizeof name, "%s.v", rows[i].name);
        assert_int_equal(vjp_graph_find(graph, name) != 0, !rows[i].muon);
    }
    vjp_graph_destroy(graph);
}

static void refuses(void **unused) {
    (void)unused;
    static const struct {
        vjp_muon_options options;
        const char *sentence;
    } rows[] = {
        {{8, 0.9, 0, 1, 5, 0, 0}, "struct_size"},
        {{sizeof(vjp_muon_options), 1, 0, 1, 5, 0, 0}, "momentum is 1;"},
        {{sizeof(vjp_muon_options), NAN, 0, 1, 5, 0, 0}, "momentum is "},
        {{sizeof(vjp_muon_options), -0.5, 0, 1, 5, 0, 0}, "momentum is -0.5"},
        {{sizeof(vjp_muon_options), 0.9, -1, 1, 5, 0, 0}, "weight_decay is -1"},
        {{sizeof(vjp_muon_options), 0.9, 0, 1, 0, 0, 0}, "0 iterations"},
        {{sizeof(vjp_muon_options), 0.9, 0, 1, 101, 0, 0}, "101 iterations"},
        {{sizeof(vjp_muon_options), 0.9, 0, 1, 5, 2, 0}, "scale is 2"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const int64_t shape[] = {2, 2};
        vjp_graph *graph = vjp_graph_create();
        vjp_value w = vjp_graph_parameter(graph, "w", VJP_F32, 2, shape);
        vjp_value g = vjp_graph_input(graph, "g", VJP_F32, 2, shape);
        vjp_minimize_options options = VJP_MINIMIZE_OPTIONS_DEFAULTS;
        options.parameters = &w;
        options.gradients = &g;
        options.count = 1;
        options.muon = &rows[i].options;
        vjp_minimize_result made = {.struct_size = sizeof made};
        assert_int_equal(vjp_graph_minimize(graph, 0, &options, &made), VJP_INVALID);
        if (!strstr(vjp_graph_error(graph), rows[i].sentence))
            fail_msg("expected \"%s\"; got \"%s\"", rows[i].sentence, vjp_graph_error(graph));
        vjp_graph_destroy(graph);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_are_those_in_double), cmocka_unit_test(threads_give_the_same_bits),
        cmocka_unit_test(no_finite_scale_no_step),   cmocka_unit_test(momentum_and_weights_change_together),
        cmocka_unit_test(only_chosen_matrices),      cmocka_unit_test(refuses),
    };
    return cmocka_run_group_tests_name("Muon", tests, NULL, NULL);
}

/* SPDX-License-Identifier: MIT */
/*
 * Watching and stopping a program's run: profiles, traces and the graph as text; interrupts, which stop no run that has
 * begun to change parameters; an index out of range, which stops it with the node's name.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <math.h>

#include "attributes.h"
#include "blocks.h"
#include "opening.h"
#include "programs.h"

static void runs_can_be_watched(void **unused) {
    (void)unused;
    vjp_device *device = open_device("cpu");
    vjp_value x, weight[BLOCKS], result[BLOCKS + 1];
    vjp_graph *graph = stacked(false, &x, weight, result);
    vjp_program *program = compile(device, graph, result, BLOCKS + 1, NULL);
    fill(program, x, 1, 1);
    for (int w = 0; w < BLOCKS; w++)
        fill(program, weight[w], 2 + (uint64_t)w, 0.2);

    vjp_program_profile(program, 1);
    run(device, program);
    run(device, program);
    vjp_program_report report = {.struct_size = sizeof report};
    vjp_program_describe(program, &report);
    double seconds = 0, flops = 0;
    for (size_t i = 0; i < report.calls; i++) {
        vjp_call_time time = {.struct_size = sizeof time};
        assert_int_equal(vjp_program_time(program, i, &time), VJP_OK);
        assert_int_equal(time.runs, 2);
        seconds += time.seconds;
        flops += time.cost.flops;
    }
    assert_true(seconds > 0);
    assert_true(flops == report.cost.flops);
    vjp_call_time time = {.struct_size = sizeof time};
    assert_int_equal(vjp_program_time(program, report.calls, &time), VJP_INVALID);
    vjp_program_profile(program, 0);

    char found[256];
    assert_int_equal(vjp_program_trace(program, found, sizeof found), VJP_OK);
    assert_string_equal(found, "");
    vjp_tensor third = place(program, weight[3]);
    put(&third, 70, 1e38);
    assert_int_equal(vjp_program_trace(program, found, sizeof found), VJP_OK);
    assert_non_null(strstr(found, "linear"));
    put(&third, 70, NAN);
    assert_int_equal(vjp_program_trace(program, found, sizeof found), VJP_OK);
    assert_string_equal(found, "block.3 holds nan at element 70 before the run");

    char *text = vjp_graph_text(graph), *dot = vjp_graph_dot(graph);
    assert_non_null(strstr(text, "rms_norm.backward(dy=%"));
    assert_non_null(strstr(dot, "digraph"));
    vjp_string_free(text);
    vjp_string_free(dot);
    vjp_program_destroy(program);
    vjp_graph_destroy(graph);
    vjp_close(device);
}

/* The caller's thread pool interrupts the program that runs in it. */
static void interrupting_pool(void *context, size_t count, vjp_task task, void *argument) {
    vjp_program **program = context;
    for (size_t i = 0; i < count; i++)
        task(argument, i);
    vjp_program_interrupt(*program);
}

static void interrupts_stop_only_a_run_under_way(void **unused) {
    (void)unused;
    vjp_program *to_interrupt = NULL;
    const vjp_options options = {.struct_size = sizeof options,
                                 .threads = 4,
                                 .parallel_for = interrupting_pool,
                                 .parallel_context = &to_interrupt};
    vjp_device *device;
    assert_int_equal(vjp_open("cpu", &options, &device), VJP_OK);
    vjp_value x, weight[BLOCKS], result[BLOCKS + 1];
    vjp_graph *graph = stacked(false, &x, weight, result);
    vjp_program *program = compile(device, graph, result, BLOCKS + 1, NULL);
    vjp_program_interrupt(program);
    run(device, program);
    to_interrupt = program;
    assert_int_equal(vjp_program_run(program), VJP_INTERRUPTED);
    assert_non_null(strstr(vjp_error(device), "interrupted before this call, "));
    to_interrupt = NULL;
    run(device, program);
    vjp_program_destroy(program);
    vjp_graph_destroy(graph);
    vjp_close(device);
}

/* The caller's thread pool interrupts as soon as a weight has changed. */
typedef struct late_interrupt {
    vjp_program *program;
    const float *weight;
    float before;
    int interrupts;
} late_interrupt;

static void late_pool(void *context, size_t count, vjp_task task, void *argument) {
    late_interrupt *late = context;
    for (size_t i = 0; i < count; i++)
        task(argument, i);
    if (!late->program || *late->weight == late->before) return;
    vjp_program_interrupt(late->program);
    late->interrupts++;
}

/* A run that has begun to change parameters changes all of them. */
static void steps_are_taken_whole(void **unused) {
    (void)unused;
    enum { SIDE = 400, WEIGHTS = 3 };
    late_interrupt late = {0};
    const vjp_options options = {
        .struct_size = sizeof options, .threads = 4, .parallel_for = late_pool, .parallel_context = &late};
    vjp_device *device;
    assert_int_equal(vjp_open("cpu", &options, &device), VJP_OK);
    vjp_graph *g = vjp_graph_create();
    vjp_value x = vjp_graph_input(g, "x", VJP_F32, 2, (const int64_t[]){2, SIDE}), w[WEIGHTS], y = x;
    for (int i = 0; i < WEIGHTS; i++) {
        char name[16];
        snprintf(name, sizeof name, "w%d", i);
        w[i] = vjp_graph_parameter(g, name, VJP_F32, 2, (const int64_t[]){SIDE, SIDE});
        y = vjp_graph_linear(g, y, w[i], 0, 0, 0, NULL);
    }
    vjp_minimize_result made = {.struct_size = sizeof made};
    vjp_graph_minimize(g, mean_of(g, y), NULL, &made);
    vjp_program *program = compile(device, g, made.results, made.count, NULL);
    fill(program, x, 1, 1);
    for (int i = 0; i < WEIGHTS; i++)
        fill(program, w[i], 2 + (uint64_t)i, 0.2);
    vjp_tensor first = place(program, w[0]), last = place(program, w[WEIGHTS - 1]);
    late.weight = (const float *)(const void *)((const char *)first.data + first.offset);
    late.before = *late.weight;
    float before = *(const float *)(const void *)((const char *)last.data + last.offset);
    late.program = program;
    assert_int_equal(vjp_program_step(program, &made, 0.1, 1, NULL), VJP_OK);
    assert_true(late.interrupts > 1);
    assert_true(*(const float *)(const void *)((const char *)last.data + last.offset) != before);
    vjp_program_destroy(program);
    vjp_graph_destroy(g);
    vjp_close(device);
}

/* An index past the table stops the run with the node's name, before that call has written. */
static void bad_indices_stop_a_run(void **unused) {
    (void)unused;
    vjp_device *device = open_device("cpu");
    vjp_graph *g = vjp_graph_create();
    const int64_t table[] = {4, 3}, index[] = {2};
    vjp_value t = vjp_graph_parameter(g, "table", VJP_F32, 2, table), k = vjp_graph_input(g, "k", VJP_I32, 1, index);
    vjp_graph_push(g, "embed");
    vjp_value y = vjp_graph_gather(g, t, k, NULL);
    vjp_program *program = compile(device, g, &y, 1, NULL);
    const int32_t bad[] = {1, 4};
    assert_int_equal(vjp_program_write(program, k, bad, sizeof bad), VJP_OK);
    assert_int_equal(vjp_program_run(program), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "embed.gather: gather.forward: index[1] is 4"));
    vjp_program_destroy(program);
    vjp_graph_destroy(g);
    vjp_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(runs_can_be_watched),
        cmocka_unit_test(interrupts_stop_only_a_run_under_way),
        cmocka_unit_test(steps_are_taken_whole),
        cmocka_unit_test(bad_indices_stop_a_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* SPDX-License-Identifier: MIT */
/*
 * Intermediates that wait in the host's memory: on a device of the host whose copies happen as early or as late as a
 * GPU's may (merging.h). Random graphs that offload all they can are in test_graph.c.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "attributes.h"
#include "graph/program.h"
#include "merging.h"
#include "opening.h"
#include "programs.h"

enum { LAYERS = 16, ROWS = 120, WIDTH = 32 };

/* Layers whose backward needs what goes into them, gradients of weights, and the mean that these are of. */
typedef struct stack {
    vjp_graph *graph;
    vjp_value x, weight[LAYERS], result[LAYERS + 1];
} stack;

static stack make_stack(void) {
    stack s = {.graph = vjp_graph_create()};
    vjp_value x = s.x = vjp_graph_input(s.graph, "x", VJP_F32, 2, (const int64_t[]){ROWS, WIDTH});
    for (int i = 0; i < LAYERS; i++) {
        char name[16];
        snprintf(name, sizeof name, "w%d", i);
        s.weight[i] = vjp_graph_parameter(s.graph, name, VJP_F32, 1, (const int64_t[]){WIDTH});
        x = vjp_graph_rms_norm(s.graph, x, s.weight[i], 0, NULL);
    }
    s.result[LAYERS] = mean_of(s.graph, vjp_graph_mul(s.graph, x, x, NULL));
    assert_int_equal(vjp_graph_grad(s.graph, s.result[LAYERS], s.weight, LAYERS, NULL, 0, s.result), VJP_OK);
    return s;
}

static vjp_program *compile_stack(vjp_device *device, const stack *s, size_t limit) {
    const vjp_program_options options = {.struct_size = sizeof options, .arena_limit = limit};
    vjp_program *program = compile(device, s->graph, s->result, LAYERS + 1, &options);
    fill(program, s->x, 1, 1);
    for (int i = 0; i < LAYERS; i++)
        fill(program, s->weight[i], 2 + (uint64_t)i, 2);
    return program;
}

static vjp_program_report report_of(const vjp_program *program) {
    vjp_program_report report = {.struct_size = sizeof report};
    assert_int_equal(vjp_program_describe(program, &report), VJP_OK);
    return report;
}

static void same_results(vjp_program *one, vjp_program *other, const stack *s) {
    for (int i = 0; i <= LAYERS; i++)
        same_bits_of(one, s->result[i], other, s->result[i]);
}

/* The arena is within the limit, as little waits as that takes, and every bit is the same. */
static void an_arena_fits_its_limit(void **unused) {
    (void)unused;
    vjp_backend backend;
    vjp_device *device = open_device("cpu");
    merge_calls(device, &backend);
    stack s = make_stack();
    vjp_program *whole = compile_stack(device, &s, 0);
    const size_t all = report_of(whole).arena_bytes;
    size_t before = 0;
    run(device, whole);
    assert_int_equal(report_of(whole).host_bytes, 0);
    for (int tenths = 10; tenths >= 5; tenths--) {
        vjp_program *less = compile_stack(device, &s, all / 10 * (size_t)tenths);
        vjp_program_report r = report_of(less), planned = {.struct_size = sizeof planned};
        assert_true(tenths == 10 || r.arena_bytes <= all / 10 * (size_t)tenths);
        assert_true(r.host_bytes >= before && (tenths == 10 || r.host_bytes > 0));
        assert_int_equal(less->moves % 4, 0);
        before = r.host_bytes;
        const vjp_program_options options = {.struct_size = sizeof options, .arena_limit = all / 10 * (size_t)tenths};
        assert_int_equal(vjp_plan(device, s.graph, s.result, LAYERS + 1, &options, &planned), VJP_OK);
        assert_int_equal(planned.arena_bytes, r.arena_bytes);
        assert_int_equal(planned.host_bytes, r.host_bytes);
        for (int again = 0; again < 2; again++) {
            run(device, less);
            same_results(whole, less, &s);
            assert_int_equal(merging_waiting, 0);
        }
        char found[256];
        assert_int_equal(vjp_program_trace(less, found, sizeof found), VJP_OK);
        assert_string_equal(found, "");
        same_results(whole, less, &s);
        vjp_program_destroy(less);
    }
    vjp_program_destroy(whole);
    vjp_graph_destroy(s.graph);
    vjp_close(device);
}

/* A copy for which calls would have to wait is not made, nor on a device that cannot copy, nor without a plan. */
static void only_what_costs_no_time_waits(void **unused) {
    (void)unused;
    vjp_backend backend;
    vjp_device *device = open_device("cpu");
    merge_calls(device, &backend);
    stack s = make_stack();
    size_t host[3];
    for (int i = 0; i < 3; i++) {
        backend.copy_cost = (const double[]){0, 8, 1e9}[i];
        backend.flops_per_byte = 10;
        vjp_program *program = compile_stack(device, &s, 1);
        host[i] = report_of(program).host_bytes;
        vjp_program_destroy(program);
    }
    assert_true(host[0] > host[1] && host[1] > 0);
    assert_int_equal(host[2], 0);
    backend.copy_cost = 0;
    const vjp_program_options unplanned = {.struct_size = sizeof unplanned, .unplanned = 1, .arena_limit = 1};
    vjp_program *program = compile(device, s.graph, s.result, LAYERS + 1, &unplanned);
    assert_int_equal(report_of(program).host_bytes, 0);
    vjp_program_destroy(program);
    backend.copy_begin = NULL;
    program = compile_stack(device, &s, 1);
    assert_int_equal(report_of(program).host_bytes, 0);
    vjp_program_destroy(program);
    vjp_graph_destroy(s.graph);
    vjp_close(device);
}

static vjp_program *running;

static void stop_at_call(void *context, int32_t call) {
    if (call == *(const int32_t *)context) vjp_program_interrupt(running);
}

/* A run that is stopped anywhere leaves no copy behind that would write into the next run's memory. */
static void a_stopped_run_waits_for_its_copies(void **unused) {
    (void)unused;
    vjp_backend backend;
    vjp_device *device = open_device("cpu");
    merge_calls(device, &backend);
    stack s = make_stack();
    vjp_program *whole = compile_stack(device, &s, 0), *less = compile_stack(device, &s, 1);
    run(device, whole);
    int32_t stop = 0;
    running = less;
    less->context = &stop;
    for (stop = 0; stop < less->calls - 1; stop++) {
        less->after = stop_at_call;
        assert_int_equal(vjp_program_run(less), VJP_INTERRUPTED);
        assert_int_equal(merging_waiting, 0);
        less->after = NULL;
        run(device, less);
        same_results(whole, less, &s);
    }
    /* Nor does one whose copy fails. */
    int copies = less->moves / 2, refused = 0;
    for (int i = 0; i < copies; i++) {
        merging_fails_at = merging_begun + i;
        vjp_status status = vjp_program_run(less);
        merging_fails_at = -1;
        refused += status == VJP_DEVICE_FAILED;
        assert_string_equal(vjp_error(device), "a copy that fails");
        assert_int_equal(merging_waiting, 0);
        run(device, less);
        same_results(whole, less, &s);
    }
    assert_int_equal(refused, copies);
    vjp_program_destroy(less);
    vjp_program_destroy(whole);
    vjp_graph_destroy(s.graph);
    vjp_close(device);
}

static vjp_status no_host_memory(vjp_device *device, size_t bytes, void **data) {
    *data = NULL;
    return vjp_fail(device, VJP_OUT_OF_MEMORY, "no host memory for %zu bytes", bytes);
}

static void a_host_without_memory_is_a_sentence(void **unused) {
    (void)unused;
    vjp_backend backend;
    vjp_device *device = open_device("cpu");
    merge_calls(device, &backend);
    backend.alloc_host = no_host_memory;
    stack s = make_stack();
    const vjp_program_options options = {.struct_size = sizeof options, .arena_limit = 1};
    vjp_program *program = NULL;
    assert_int_equal(vjp_compile(device, s.graph, s.result, LAYERS + 1, &options, &program), VJP_OUT_OF_MEMORY);
    assert_null(program);
    assert_non_null(strstr(vjp_error(device), "no host memory for "));
    vjp_graph_destroy(s.graph);
    vjp_close(device);
}

int main(void) {
    /* Otherwise a limit has norms computed again first. */
    setenv("VJP_REWRITES", "-recompute", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_arena_fits_its_limit),
        cmocka_unit_test(only_what_costs_no_time_waits),
        cmocka_unit_test(a_stopped_run_waits_for_its_copies),
        cmocka_unit_test(a_host_without_memory_is_a_sentence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* SPDX-License-Identifier: MIT */
/*
 * What graphs and programs refuse, and how it is said: mistakes with the node's name, gradients with a reason, sizes
 * whose sum overflows, NULL, and programs that would share with another graph.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "attributes.h"
#include "opening.h"
#include "programs.h"

static void expect_error(vjp_graph *graph, const char *part) {
    assert_int_not_equal(vjp_graph_status(graph), VJP_OK);
    if (!strstr(vjp_graph_error(graph), part))
        fail_msg("expected a sentence with \"%s\"; got \"%s\"", part, vjp_graph_error(graph));
    vjp_graph_destroy(graph);
}

static void mistakes_name_the_node(void **unused) {
    (void)unused;
    const int64_t x[] = {4, 6}, w[] = {7, 5};
    vjp_graph *graph = vjp_graph_create();
    vjp_graph_push(graph, "layers.3");
    vjp_value a = vjp_graph_input(graph, "x", VJP_F32, 2, x), b = vjp_graph_parameter(graph, "w", VJP_F32, 2, w);
    vjp_value y = vjp_graph_linear(graph, a, b, 0, 0, 0, NULL);
    assert_int_equal(y, 0);
    assert_int_equal(vjp_graph_rms_norm(graph, y, 0, 0, NULL), 0); /* quiet after the first */
    assert_non_null(strstr(vjp_graph_error(graph), "layers.3.linear: "));
    vjp_device *device = open_device("cpu");
    vjp_program *program;
    assert_int_equal(vjp_compile(device, graph, &a, 1, NULL, &program), VJP_INVALID);
    assert_null(program);
    assert_non_null(strstr(vjp_error(device), "layers.3.linear: "));
    vjp_close(device);
    expect_error(graph, "K is 6 in one and 7 in the other");
}

static void values_are_checked(void **unused) {
    (void)unused;
    const int64_t x[] = {4, 6}, huge[] = {1ll << 40, 1ll << 40};
    vjp_graph *graph = vjp_graph_create();
    vjp_graph_input(graph, "x", VJP_F32, 2, x);
    vjp_graph_state(graph, "x", VJP_F32, 2, x);
    expect_error(graph, "x: there is a value of that name already");
    graph = vjp_graph_create();
    vjp_graph_input(graph, "x", VJP_F32, 2, huge);
    expect_error(graph, "overflows");
    graph = vjp_graph_create();
    vjp_graph_scale(graph, 99, WITH(scale, .factor = 2));
    expect_error(graph, "99, which is not a value");
    graph = vjp_graph_create();
    vjp_graph_reshape(graph, vjp_graph_input(graph, "x", VJP_F32, 2, x), 2, (const int64_t[]){5, -1});
    expect_error(graph, "a reshape of [4, 6], 24 elements");
    graph = vjp_graph_create();
    vjp_value input = vjp_graph_input(graph, "x", VJP_F32, 2, x);
    vjp_graph_assign(graph, input, vjp_graph_scale(graph, input, WITH(scale, .factor = 2)));
    expect_error(graph, "only a parameter or a state");
    graph = vjp_graph_create();
    vjp_graph_pop(graph);
    expect_error(graph, "without a vjp_graph_push");
}

static void gradients_are_refused_with_a_reason(void **unused) {
    (void)unused;
    const int64_t x[] = {4, 6};
    vjp_value gradient;
    vjp_graph *graph = vjp_graph_create();
    vjp_value w = vjp_graph_parameter(graph, "w", VJP_F32, 2, x),
              y = vjp_graph_scale(graph, w, WITH(scale, .factor = 2));
    assert_int_equal(vjp_graph_grad(graph, y, &w, 1, NULL, 0, &gradient), VJP_INVALID);
    assert_int_equal(gradient, 0);
    expect_error(graph, "only a scalar has a gradient; this is [4, 6]");

    graph = vjp_graph_create();
    w = vjp_graph_parameter(graph, "w", VJP_F32, 2, x);
    vjp_value other = vjp_graph_parameter(graph, "other", VJP_F32, 2, x);
    vjp_value loss = vjp_graph_mean(graph, w, WITH(mean, .axis = 0, .axes = 0));
    vjp_value both[] = {w, other}, gradients[2];
    vjp_graph_grad(graph, loss, both, 2, NULL, 0, gradients);
    expect_error(graph, "does not depend on it");

    graph = vjp_graph_create();
    w = vjp_graph_parameter(graph, "w", VJP_F32, 2, x);
    loss = vjp_graph_sum_squares(graph, w);
    vjp_graph_grad(graph, loss, &w, 1, NULL, 0, &gradient);
    expect_error(graph, "sum_squares has no gradient");

    static const vjp_dtype integers[] = {VJP_I32, VJP_I64};
    for (int i = 0; i < 2; i++) {
        graph = vjp_graph_create();
        w = vjp_graph_parameter(graph, "w", integers[i], 0, NULL);
        assert_int_equal(vjp_graph_grad(graph, w, &w, 1, NULL, 0, &gradient), VJP_INVALID);
        assert_int_equal(gradient, 0);
        expect_error(graph,
                     i ? "only a float has a gradient; this is i64" : "only a float has a gradient; this is i32");
    }

    graph = vjp_graph_create();
    both[0] = vjp_graph_parameter(graph, "w", VJP_F32, 2, x);
    both[1] = vjp_graph_parameter(graph, "v", VJP_F32, 2, x);
    vjp_value state = vjp_graph_state(graph, "s", VJP_F32, 2, x), into[] = {state, state};
    loss = vjp_graph_mean(graph, vjp_graph_mul(graph, both[0], both[1], NULL), WITH(mean, .axes = 0));
    vjp_graph_grad(graph, loss, both, 2, into, 0, gradients);
    expect_error(graph, "v: its gradient cannot be put into s, which another gradient goes into");
}

/* Sums of sizes that each fit and together do not are refused before memory is taken. */
static void sums_of_sizes_are_checked(void **unused) {
    (void)unused;
    enum { VALUES = 17 };
    const int64_t huge[] = {(1ll << 57) - 8};
    vjp_device *device = open_device("ref");
    for (int kept = 0; kept < 2; kept++) {
        vjp_graph *graph = vjp_graph_create();
        vjp_value value[VALUES] = {vjp_graph_input(graph, "x", VJP_F64, 1, huge)};
        for (int i = 1; i < VALUES; i++) {
            char name[16];
            snprintf(name, sizeof name, "w%d", i);
            value[i] = kept ? vjp_graph_parameter(graph, name, VJP_F64, 1, huge)
                            : vjp_graph_scale(graph, value[0], WITH(scale, .factor = 2));
        }
        const vjp_program_options unplanned = {.struct_size = sizeof unplanned, .unplanned = 1};
        for (int plan = 0; plan < 2; plan++) {
            vjp_program *program;
            assert_int_equal(
                vjp_compile(device, graph, value, VALUES - (kept && plan), plan ? NULL : &unplanned, &program),
                VJP_INVALID);
            assert_null(program);
            if (!strstr(vjp_error(device), kept ? "inputs, parameters and states does not fit size_t"
                                                : "intermediates does not fit size_t"))
                fail_msg("%s", vjp_error(device));
        }
        vjp_graph_destroy(graph);
    }
    vjp_close(device);
}

static void null_pointers_are_refused(void **unused) {
    (void)unused;
    vjp_device *device = open_device("cpu");
    vjp_graph *g = vjp_graph_create();
    const int64_t shape[] = {3};
    vjp_value x = vjp_graph_input(g, "x", VJP_F32, 1, shape), y = vjp_graph_scale(g, x, WITH(scale, .factor = 2));
    vjp_program *program = compile(device, g, &y, 1, NULL);
#define REFUSED(call, sentence)                                                                                        \
    do {                                                                                                               \
        assert_int_equal(call, VJP_INVALID);                                                                           \
        if (!strstr(vjp_error(device), sentence)) fail_msg("%s", vjp_error(device));                                   \
    } while (0)
    REFUSED(vjp_compile(device, g, NULL, 1, NULL, &(vjp_program *){NULL}), "vjp_compile: results is NULL");
    REFUSED(vjp_compile(device, g, &y, 1, NULL, NULL), "vjp_compile: program is NULL");
    REFUSED(vjp_program_tensor(program, x, NULL), "vjp_program_tensor: tensor is NULL");
    REFUSED(vjp_program_write(program, x, NULL, 12), "vjp_program_write: host is NULL");
    REFUSED(vjp_program_read(program, x, NULL, 12), "vjp_program_read: host is NULL");
    REFUSED(vjp_program_describe(program, NULL), "vjp_program_describe: report is NULL");
    REFUSED(vjp_program_describe(program, &(vjp_program_report){0}), "vjp_program_describe: struct_size is 0; it must");
    REFUSED(vjp_program_time(program, 0, &(vjp_call_time){0}), "vjp_program_time: struct_size is 0; it must be");
    REFUSED(vjp_program_time(program, 0, NULL), "vjp_program_time: time is NULL");
    REFUSED(vjp_program_trace(program, NULL, 9), "vjp_program_trace: found is NULL");
#undef REFUSED
    vjp_value dx;
    assert_int_equal(vjp_graph_grad(g, y, NULL, 1, NULL, 0, &dx), VJP_INVALID);
    expect_error(g, "vjp_graph_grad: wrt is NULL");
    g = vjp_graph_create();
    x = vjp_graph_input(g, "x", VJP_F32, 0, NULL);
    assert_int_equal(vjp_graph_grad(g, x, &x, 1, NULL, 0, NULL), VJP_INVALID);
    expect_error(g, "vjp_graph_grad: gradients is NULL");
    g = vjp_graph_create();
    assert_int_equal(vjp_graph_output(g, vjp_graph_input(g, "x", VJP_F32, 0, NULL), NULL), 0);
    expect_error(g, "no other output \"(NULL)\"");
    vjp_program_destroy(program);
    vjp_close(device);
}

/* A graph that is gone may have had the address of a new one. */
static void programs_share_within_one_graph(void **unused) {
    (void)unused;
    enum { TRIES = 64 };
    vjp_device *device = open_device("cpu");
    vjp_graph *graph[TRIES] = {vjp_graph_create()};
    vjp_value x = vjp_graph_input(graph[0], "x", VJP_F32, 0, NULL);
    vjp_program *first = compile(device, graph[0], &x, 1, NULL), *second;
    uintptr_t address = (uintptr_t)graph[0];
    vjp_graph_destroy(graph[0]);
    int last = 0;
    while ((uintptr_t)(graph[last] = vjp_graph_create()) != address && last < TRIES - 1)
        last++;
    vjp_graph_input(graph[last], "other", VJP_F64, 0, NULL);
    const vjp_program_options share = {.struct_size = sizeof share, .share = first};
    assert_int_equal(vjp_compile(device, graph[last], &x, 1, &share, &second), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "of another graph or device"));
    for (int i = 0; i <= last; i++)
        vjp_graph_destroy(graph[i]);
    vjp_program_destroy(first);
    vjp_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mistakes_name_the_node),
        cmocka_unit_test(values_are_checked),
        cmocka_unit_test(gradients_are_refused_with_a_reason),
        cmocka_unit_test(sums_of_sizes_are_checked),
        cmocka_unit_test(null_pointers_are_refused),
        cmocka_unit_test(programs_share_within_one_graph),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

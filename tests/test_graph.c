/* SPDX-License-Identifier: MIT */
/*
 * Graphs and programs: what is refused and how it is said; gradients against central differences and between
 * devices; random graphs whose planned arena must give the bits of memory without a plan; recomputation; interrupting,
 * tracing, profiling.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include <math.h>

#include "attributes.h"
#include "graph/program.h"
#include "merging.h"
#include "numbers.h"
#include "op/op.h"
#include "random_graph.h"

static vjp_device *open_device(const char *name) {
    vjp_device *device;
    if (vjp_open(name, NULL, &device) != VJP_OK) fail_msg("%s", vjp_error(device));
    return device;
}

/* ---- Numbers ----------------------------------------------------------------------------------------- */

static double random_at(uint64_t seed, uint64_t i) {
    return random_of(7, seed, i);
}

/* Host memory of a value of a program on "cpu" or "ref". */
static vjp_tensor place(vjp_program *program, vjp_value value) {
    vjp_tensor tensor;
    assert_int_equal(vjp_program_tensor(program, value, &tensor), VJP_OK);
    return tensor;
}

static void fill(vjp_program *program, vjp_value value, uint64_t seed, double size) {
    vjp_tensor tensor = place(program, value);
    for (int64_t i = 0; i < count_of(&tensor); i++)
        put(&tensor, i, size * random_at(seed, (uint64_t)i));
}

static vjp_program *compile(vjp_device *device, vjp_graph *graph, const vjp_value *results, size_t count,
                            const vjp_program_options *options) {
    vjp_program *program;
    if (vjp_compile(device, graph, results, count, options, &program) != VJP_OK) fail_msg("%s", vjp_error(device));
    return program;
}

static void run(vjp_device *device, vjp_program *program) {
    if (vjp_program_run(program) != VJP_OK) fail_msg("%s", vjp_error(device));
}

/* ---- Refusals ---------------------------------------------------------------------------------------- */

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

/*
 * Building, differentiating and compiling take time in proportion to the graph, and no stack: a chain with a weight at
 * every tenth node, residual sums, and one block to recompute. Quadratic steps took minutes here.
 */
static void large_graphs_are_quick(void **unused) {
    (void)unused;
    enum { NODES = 20000, WEIGHTS = NODES / 10, SECONDS = 30 /* 0.5 on an idle machine; sanitizers take longer */ };
    static vjp_value weight[WEIGHTS], result[WEIGHTS + 1];
    const int64_t shape[] = {16};
    clock_t begin = clock();
    vjp_device *device = open_device("cpu");
    vjp_graph *g = vjp_graph_create();
    vjp_value h = vjp_graph_input(g, "x", VJP_F32, 1, shape);
    for (int i = 0; i < NODES; i++) {
        if (i == NODES / 2) vjp_graph_recompute_begin(g);
        if (i % 10 == 0) {
            char name[16];
            snprintf(name, sizeof name, "w%d", i / 10);
            weight[i / 10] = vjp_graph_parameter(g, name, VJP_F32, 1, shape);
            h = vjp_graph_add(g, h, vjp_graph_mul(g, h, weight[i / 10], NULL), NULL);
        } else {
            h = i % 10 < 5 ? vjp_graph_scale(g, h, WITH(scale, .factor = 1.01)) : vjp_graph_swiglu(g, h, h);
        }
    }
    vjp_graph_recompute_end(g);
    result[WEIGHTS] = vjp_graph_mean(g, h, WITH(mean, .axes = 0));
    assert_int_equal(vjp_graph_grad(g, result[WEIGHTS], weight, WEIGHTS, NULL, 0, result), VJP_OK);
    vjp_program *program = compile(device, g, result, WEIGHTS + 1, NULL);
    double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    if (seconds > SECONDS) fail_msg("%d nodes took %g s", NODES, seconds);
    vjp_program_destroy(program);
    vjp_graph_destroy(g);
    vjp_close(device);
}

/* ---- Random graphs ----------------------------------------------------------------------------------- */

static void same_bits(vjp_program *one, vjp_program *other, vjp_value in_one, vjp_value in_other, uint64_t seed) {
    vjp_tensor a = place(one, in_one), b = place(other, in_other);
    size_t bytes = (size_t)count_of(&a) * vjp_dtype_size((vjp_dtype)a.dtype);
    if (memcmp((char *)a.data + a.offset, (char *)b.data + b.offset, bytes) != 0)
        fail_msg("seed %d: %d and %d have other bits", (int)seed, in_one, in_other);
}

static void check_random_graphs(vjp_device *device) {
    static const random_kind kinds[] = {
        {.dtype = VJP_F32}, {.dtype = VJP_BF16}, {.dtype = VJP_F16}, {.dtype = VJP_F32, .wild = true}};
    for (uint64_t seed = 0; seed < 400; seed++) {
        char why[RANDOM_WHY];
        if (!random_graph_check(device, (choices){.seed = seed}, kinds[seed % 4], why))
            fail_msg("seed %d: %s", (int)seed, why);
    }
}

/* Neither the plan nor blocks that are computed again change a bit: random_graph_check(). */
static void planned_is_unplanned(void **unused) {
    (void)unused;
    vjp_device *device = open_device("cpu");
    check_random_graphs(device);
    vjp_close(device);
}

/* Nor do calls that run at once, in another order. */
static void merged_is_separate(void **unused) {
    (void)unused;
    vjp_backend backend;
    vjp_device *device = open_device("cpu");
    merge_calls(device, &backend);
    check_random_graphs(device);
    vjp_close(device);
}

/* ---- Groups ------------------------------------------------------------------------------------------ */

enum { LAYERS = 5, WIDTH = 12 };

/* Of a matrix, in f32. */
static vjp_value mean_of(vjp_graph *g, vjp_value x) {
    return vjp_graph_mean(g, vjp_graph_cast(g, x, VJP_F32), WITH(mean, .axis = 0, .axes = 2));
}

/* Layers of f32 weights that are cast down, of different sizes, and a step of AdamW that clips. */
static vjp_graph *training(vjp_minimize_result *made) {
    vjp_graph *g = vjp_graph_create();
    vjp_value x = vjp_graph_input(g, "x", VJP_BF16, 2, (const int64_t[]){3, WIDTH});
    for (int i = 0; i < LAYERS; i++) {
        char name[16];
        snprintf(name, sizeof name, "w%d", i);
        vjp_value w = vjp_graph_parameter(g, name, VJP_F32, 2, (const int64_t[]){WIDTH + i, WIDTH + i + 1});
        x = vjp_graph_linear(g, x, vjp_graph_cast(g, w, VJP_BF16), 0, 0, 0, NULL);
    }
    vjp_minimize_options options = VJP_MINIMIZE_OPTIONS_DEFAULTS;
    options.max_norm = 0.1;
    made->struct_size = sizeof *made;
    vjp_value loss = mean_of(g, vjp_graph_mul(g, x, x, NULL));
    vjp_graph_minimize(g, loss, &options, made);
    return g;
}

/* All casts, all sums of squares and all steps are one group each; none of a chain is. */
static void calls_are_grouped(void **unused) {
    (void)unused;
    vjp_backend backend;
    vjp_device *device = open_device("cpu");
    merge_calls(device, &backend);
    vjp_minimize_result made;
    vjp_graph *g = training(&made);
    vjp_program *program = compile(device, g, made.results, made.count, NULL);
    int32_t largest[VJP_OP_COUNT] = {0}, calls = 0;
    for (int32_t i = 0; i < program->groups; i++) {
        const program_group *group = &program->group[i];
        assert_int_equal(group->first, calls);
        calls += group->count;
        int32_t *most = &largest[program->call[group->first].work.op->id];
        if (group->count > *most) *most = group->count;
    }
    assert_int_equal(calls, program->calls);
    assert_int_equal(largest[OP_ID(cast)], LAYERS);
    assert_int_equal(largest[OP_ID(sum_squares)], LAYERS);
    assert_int_equal(largest[OP_ID(adamw)], LAYERS);
    assert_int_equal(largest[OP_ID(linear)], 1);
    assert_int_equal(program->call[0].work.op->id, OP_ID(cast));
    /* Each sum has its own scratch. */
    for (int32_t k = 1; k < program->calls; k++) {
        const vjp_work *a = &program->call[k - 1].work, *b = &program->call[k].work;
        if (a->op->id == OP_ID(sum_squares) && b->op->id == OP_ID(sum_squares))
            assert_ptr_not_equal(a->workspace, b->workspace);
    }
    vjp_program_destroy(program);
    vjp_graph_destroy(g);
    vjp_close(device);
}

/* What one call of a group reads must not be overwritten by another one. */
static void groups_keep_what_they_read(void **unused) {
    (void)unused;
    enum { CHAINS = 6 };
    vjp_backend backend;
    vjp_device *device = open_device("cpu");
    merge_calls(device, &backend);
    vjp_graph *g = vjp_graph_create();
    const int64_t size = 100;
    vjp_value x[CHAINS], result[CHAINS];
    for (int i = 0; i < CHAINS; i++) {
        char name[16];
        snprintf(name, sizeof name, "x%d", i);
        x[i] = vjp_graph_input(g, name, VJP_F32, 1, &size);
    }
    for (int i = 0; i < CHAINS; i++)
        result[i] = vjp_graph_scale(g, x[i], WITH(scale, .factor = 2));
    for (int i = 0; i < CHAINS; i++)
        result[i] = vjp_graph_scale(g, result[i], WITH(scale, .factor = 2));
    vjp_program *program = compile(device, g, result, CHAINS, NULL);
    assert_int_equal(program->groups, 2);
    for (int i = 0; i < CHAINS; i++)
        fill(program, x[i], (uint64_t)i, 1);
    run(device, program);
    for (int i = 0; i < CHAINS; i++) {
        vjp_tensor from = place(program, x[i]), to = place(program, result[i]);
        for (int64_t k = 0; k < size; k++)
            assert_true(get(&to, k) == 4 * get(&from, k));
    }
    vjp_program_destroy(program);
    vjp_graph_destroy(g);
    vjp_close(device);
}

/*
 * A state's old value is read by a call that comes before the one that writes it: even if a copied value was made
 * earlier, and if both calls could run at once.
 */
static void old_values_of_states_are_read(void **unused) {
    (void)unused;
    for (int merges = 0; merges < 2; merges++) {
        vjp_backend backend;
        vjp_device *device = open_device("cpu");
        if (merges) merge_calls(device, &backend);
        vjp_graph *g = vjp_graph_create();
        const int64_t size = 5;
        vjp_value x = vjp_graph_input(g, "x", VJP_F32, 1, &size), state[2], old[2], copy[2];
        vjp_value three = vjp_graph_scale(g, x, WITH(scale, .factor = 3));
        for (int i = 0; i < 2; i++) {
            state[i] = vjp_graph_state(g, i ? "t" : "s", VJP_F32, 1, &size);
            old[i] = vjp_graph_scale(g, state[i], WITH(scale, .factor = 2));
            vjp_value one = vjp_graph_scale(g, i ? x : three, WITH(scale, .factor = 1));
            copy[i] = vjp_graph_assign(g, state[i], one);
        }
        vjp_program *program = compile(device, g, (const vjp_value[]){old[0], copy[0], old[1], copy[1]}, 4, NULL);
        fill(program, x, 1, 1);
        double before[2];
        for (int i = 0; i < 2; i++) {
            fill(program, state[i], 2, 1);
            vjp_tensor at = place(program, state[i]);
            before[i] = get(&at, 4);
        }
        run(device, program);
        vjp_tensor from = place(program, x);
        for (int i = 0; i < 2; i++) {
            vjp_tensor twice = place(program, old[i]), now = place(program, state[i]);
            assert_true(get(&twice, 4) == 2 * before[i]);
            assert_true(get(&now, 4) == (double)((i ? 1 : 3) * (float)get(&from, 4)));
        }
        vjp_program_destroy(program);
        vjp_graph_destroy(g);
        vjp_close(device);
    }
}

/* A gradient that is only copied into its state is made there. */
static void gradients_are_made_in_their_states(void **unused) {
    (void)unused;
    vjp_device *device = open_device("cpu");
    vjp_graph *g = vjp_graph_create();
    const int64_t shape[] = {4, 4};
    vjp_value x = vjp_graph_input(g, "x", VJP_BF16, 2, shape), w = vjp_graph_parameter(g, "w", VJP_F32, 2, shape);
    vjp_value state = vjp_graph_state(g, "g", VJP_F32, 2, shape), gradient;
    vjp_value y = vjp_graph_linear(g, x, vjp_graph_cast(g, w, VJP_BF16), 0, 0, 0, NULL);
    vjp_value loss = mean_of(g, y);
    assert_int_equal(vjp_graph_grad(g, loss, &w, 1, &state, 0, &gradient), VJP_OK);
    const vjp_program_options unplanned = {.struct_size = sizeof unplanned, .unplanned = 1};
    vjp_program *program[] = {compile(device, g, &gradient, 1, NULL), compile(device, g, &gradient, 1, &unplanned)};
    assert_int_equal(program[0]->calls, program[1]->calls - 1);
    for (int i = 0; i < 2; i++) {
        fill(program[i], x, 1, 1);
        fill(program[i], w, 2, 1);
        run(device, program[i]);
    }
    same_bits(program[0], program[1], state, state, 0);
    for (int i = 0; i < 2; i++)
        vjp_program_destroy(program[i]);
    vjp_graph_destroy(g);
    vjp_close(device);
}

/*
 * A weight cast down from f32 that one op gives a gradient in f32, and that another, an addition, would hand the narrow
 * dy of its result: both must end in one sum, in f32.
 */
static void cast_weights_have_wide_gradients(void **unused) {
    (void)unused;
    vjp_device *device = open_device("cpu");
    vjp_graph *g = vjp_graph_create();
    const int64_t row[] = {1, 4}, line[] = {4};
    vjp_value x = vjp_graph_input(g, "x", VJP_BF16, 2, row), w = vjp_graph_parameter(g, "w", VJP_F32, 1, line), dw;
    vjp_value narrow = vjp_graph_cast(g, w, VJP_BF16);
    vjp_value y =
        vjp_graph_add(g, vjp_graph_rms_norm(g, x, narrow, 0, WITH(rms_norm, .axes = 1, .eps = 0)), narrow, NULL);
    y = vjp_graph_add(g, y, vjp_graph_rms_norm(g, x, narrow, 0, WITH(rms_norm, .axes = 1, .eps = 0)), NULL);
    vjp_graph_grad(g, vjp_graph_mean(g, y, WITH(mean, .axis = 0, .axes = 0)), &w, 1, NULL, 0, &dw);
    vjp_program *program = compile(device, g, &dw, 1, NULL);
    fill(program, x, 1, 1);
    run(device, program);
    vjp_tensor from = place(program, x), gradient = place(program, dw);
    assert_int_equal(gradient.dtype, VJP_F32);
    double values[4], squares = 0;
    for (int i = 0; i < 4; i++) {
        values[i] = vjp_bf16_to_f32(((const uint16_t *)((const char *)from.data + from.offset))[i]);
        squares += values[i] * values[i] / 4;
    }
    /* dy is 1/4, exact in bf16; 2 x rstd + 1 is summed in f32. */
    for (int i = 0; i < 4; i++)
        assert_true(fabs(get(&gradient, i) - (2 * values[i] / sqrt(squares) + 1) / 4) < 1e-6);
    vjp_program_destroy(program);
    vjp_graph_destroy(g);
    vjp_close(device);
}

/* Gradients of random graphs, in double on ref, against central differences. */
static void gradients_are_differences(void **unused) {
    (void)unused;
    vjp_device *device = open_device("ref");
    for (uint64_t seed = 0; seed < 60; seed++) {
        random_graph r = random_graph_make((choices){.seed = seed}, (random_kind){.dtype = VJP_F64, .smooth = true});
        vjp_program *program = compile(device, r.graph, r.result, (size_t)r.results, NULL);
        random_graph_fill(program, &r);
        run(device, program);
        for (int w = 0; w < r.weights; w++) {
            vjp_tensor weight = place(program, r.weight[w]), gradient = place(program, r.gradient[w]);
            int64_t count = count_of(&weight);
            double direction = 0, size = 0;
            double *kept = malloc(sizeof(double) * (size_t)count), *way = malloc(sizeof(double) * (size_t)count);
            for (int64_t i = 0; i < count; i++) {
                kept[i] = get(&weight, i);
                way[i] = random_at(500 + seed, (uint64_t)i);
                direction += way[i] * get(&gradient, i);
                size += fabs(way[i] * get(&gradient, i));
            }
            double loss[2];
            const double step = 1e-5;
            for (int side = 0; side < 2; side++) {
                for (int64_t i = 0; i < count; i++)
                    put(&weight, i, kept[i] + (side ? step : -step) * way[i]);
                run(device, program);
                vjp_tensor at = place(program, r.loss);
                loss[side] = get(&at, 0);
            }
            for (int64_t i = 0; i < count; i++)
                put(&weight, i, kept[i]);
            double difference = (loss[1] - loss[0]) / (2 * step);
            if (!(fabs(difference - direction) <= 1e-6 * size + 1e-9))
                fail_msg("seed %d, weight %d: %.12g by differences, %.12g by the graph", (int)seed, w, difference,
                         direction);
            run(device, program);
            free(kept);
            free(way);
        }
        vjp_program_destroy(program);
        vjp_graph_destroy(r.graph);
    }
    vjp_close(device);
}

/* Blocks that are computed again give the bits of blocks that are kept. */
static vjp_value add_block(vjp_graph *g, vjp_value x, int i, vjp_value *weight, bool recompute) {
    char name[16];
    const int64_t square[] = {64, 64};
    snprintf(name, sizeof name, "block.%d", i);
    *weight = vjp_graph_parameter(g, name, VJP_F32, 2, square);
    if (recompute) vjp_graph_recompute_begin(g);
    vjp_value y = vjp_graph_linear(g, vjp_graph_rms_norm(g, x, 0, 0, WITH(rms_norm, .axes = 1, .eps = 1e-3)), *weight,
                                   0, 0, 0, WITH(linear, .activation = VJP_ACTIVATION_SILU, .transpose_b = 0));
    y = vjp_graph_swiglu(g, y,
                         vjp_graph_linear(g, y, *weight, 0, 0, 0,
                                          WITH(linear, .activation = VJP_ACTIVATION_GELU_ERF, .transpose_b = 1)));
    y = vjp_graph_add(g, x, y, NULL);
    if (recompute) vjp_graph_recompute_end(g);
    return y;
}

enum { BLOCKS = 6 };

static vjp_graph *stacked(bool recompute, vjp_value *x, vjp_value weight[BLOCKS], vjp_value result[BLOCKS + 1]) {
    vjp_graph *g = vjp_graph_create();
    const int64_t shape[] = {128, 64};
    vjp_value h = *x = vjp_graph_input(g, "x", VJP_F32, 2, shape);
    for (int i = 0; i < BLOCKS; i++)
        h = add_block(g, h, i, &weight[i], recompute);
    result[BLOCKS] = vjp_graph_mean(g, vjp_graph_mul(g, h, h, NULL), WITH(mean, .axis = 0, .axes = 0));
    vjp_graph_grad(g, result[BLOCKS], weight, BLOCKS, NULL, 0, result);
    return g;
}

static void recomputed_is_kept(void **unused) {
    (void)unused;
    vjp_device *device = open_device("cpu");
    vjp_graph *graph[2];
    vjp_program *program[2];
    vjp_value x[2], weight[2][BLOCKS], result[2][BLOCKS + 1];
    vjp_program_report report[2] = {{.struct_size = sizeof report[0]}, {.struct_size = sizeof report[1]}};
    for (int i = 0; i < 2; i++) {
        graph[i] = stacked(i == 1, &x[i], weight[i], result[i]);
        program[i] = compile(device, graph[i], result[i], BLOCKS + 1, NULL);
        fill(program[i], x[i], 1, 1);
        for (int w = 0; w < BLOCKS; w++)
            fill(program[i], weight[i][w], 2 + (uint64_t)w, 0.2);
        run(device, program[i]);
        vjp_program_describe(program[i], &report[i]);
    }
    for (int w = 0; w <= BLOCKS; w++)
        same_bits(program[0], program[1], result[0][w], result[1][w], (uint64_t)w);
    assert_true(report[1].calls > report[0].calls);
    assert_true(report[1].arena_bytes * 3 < report[0].arena_bytes * 2);
    for (int i = 0; i < 2; i++) {
        assert_true((double)report[i].arena_bytes <= 1.15 * (double)report[i].live_bytes);
        vjp_program_destroy(program[i]);
        vjp_graph_destroy(graph[i]);
    }
    vjp_close(device);
}

/* ---- Steps ------------------------------------------------------------------------------------------- */

/* Gradients put into a state, then added to it; a step that assigns; programs that share what they keep. */
static void states_are_shared(void **unused) {
    (void)unused;
    vjp_device *device = open_device("cpu");
    vjp_graph *g = vjp_graph_create();
    const int64_t shape[] = {5};
    vjp_value w = vjp_graph_parameter(g, "w", VJP_F32, 1, shape), x = vjp_graph_input(g, "x", VJP_F32, 1, shape);
    vjp_value into = vjp_graph_state(g, "g", VJP_F32, 1, shape), momentum = vjp_graph_state(g, "m", VJP_F32, 1, shape);
    vjp_value rate = vjp_graph_input(g, "rate", VJP_F32, 0, NULL), first, more;
    vjp_value loss = vjp_graph_scale(
        g, vjp_graph_mean(g, vjp_graph_mul(g, w, x, NULL), WITH(mean, .axis = 0, .axes = 0)), WITH(scale, .factor = 5));
    assert_int_equal(vjp_graph_grad(g, loss, &w, 1, &into, 0, &first), VJP_OK);
    assert_int_equal(vjp_graph_grad(g, loss, &w, 1, &into, 1, &more), VJP_OK);
    const vjp_sgd_attributes sgd = {.struct_size = sizeof(vjp_sgd_attributes), .beta = 0.5};
    vjp_value moved = vjp_graph_sgd(g, w, momentum, into, rate, 0, &sgd);
    vjp_program *write = compile(device, g, &first, 1, NULL);
    const vjp_program_options share = {.struct_size = sizeof(vjp_program_options), .share = write};
    vjp_program *add = compile(device, g, &more, 1, &share), *step = compile(device, g, &moved, 1, &share);
    float ones[5] = {1, 1, 1, 1, 1}, xs[5] = {1, 2, 3, 4, 5}, value[5], lr = 0.1f;
    assert_int_equal(vjp_program_write(step, w, ones, sizeof ones), VJP_OK);
    assert_int_equal(vjp_program_write(write, x, xs, sizeof xs), VJP_OK);
    assert_int_equal(vjp_program_write(step, rate, &lr, sizeof lr), VJP_OK);
    for (int round = 1; round <= 2; round++) {
        run(device, write);
        run(device, add);
        run(device, step);
        assert_int_equal(vjp_program_read(write, into, value, sizeof value), VJP_OK);
        for (int i = 0; i < 5; i++)
            assert_float_equal(value[i], 2 * xs[i], 1e-5);
    }
    /* momentum: g, then g/2 + g. */
    assert_int_equal(vjp_program_read(step, w, value, sizeof value), VJP_OK);
    for (int i = 0; i < 5; i++)
        assert_float_equal(value[i], 1 - 0.1f * 2.5f * 2 * xs[i], 1e-5);
    assert_int_equal(vjp_program_write(step, rate, &lr, 3), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "rate has 4 bytes; 3 were given"));
    assert_int_equal(vjp_program_read(write, w, value, sizeof value),
                     VJP_INVALID); /* a gradient that does not read w */
    vjp_program_destroy(step);
    vjp_program_destroy(add);
    vjp_program_destroy(write);
    vjp_graph_destroy(g);
    vjp_close(device);
}

/* ---- Outputs that two nodes can compute -------------------------------------------------------------- */

static int calls_of(const vjp_program *program, vjp_pass pass) {
    int count = 0;
    for (int32_t k = 0; k < program->calls; k++)
        count += program->call[k].work.op == vjp_op_find("linear_cross_entropy") && program->call[k].work.pass == pass;
    return count;
}

/*
 * The backward of linear_cross_entropy computes the loss too, and replaces the forward, unless something between them
 * uses the loss or changes the weight.
 */
static void a_backward_replaces_its_forward(void **unused) {
    (void)unused;
    enum { PLAIN, SCALED, SQUARED, HALVED, CASES };
    vjp_device *device = open_device("cpu");
    for (int which = 0; which < CASES; which++) {
        vjp_graph *g = vjp_graph_create();
        const int64_t x_shape[] = {3, 4}, weight_shape[] = {5, 4}, rows[] = {3};
        vjp_value x = vjp_graph_parameter(g, "x", VJP_F32, 2, x_shape);
        vjp_value weight = vjp_graph_parameter(g, "weight", VJP_F32, 2, weight_shape);
        vjp_value target = vjp_graph_input(g, "target", VJP_I32, 1, rows), gradient;
        vjp_value loss = vjp_graph_linear_cross_entropy(g, x, weight, target, NULL), scalar = loss;
        vjp_value results[] = {loss, 0, 0};
        if (which == SCALED) scalar = vjp_graph_scale(g, loss, WITH(scale, .factor = 3));
        if (which == SQUARED) scalar = vjp_graph_mul(g, loss, loss, NULL);
        if (which == HALVED) {
            results[2] = vjp_graph_scale(g, weight, WITH(scale, .factor = 0.5));
            vjp_graph_assign(g, weight, results[2]);
        }
        assert_int_equal(vjp_graph_grad(g, scalar, &x, 1, NULL, 0, &gradient), VJP_OK);
        results[1] = gradient;
        vjp_program *step = compile(device, g, results, which == HALVED ? 3 : 2, NULL);
        vjp_program *forward = compile(device, g, &loss, 1, NULL);
        assert_int_equal(calls_of(step, VJP_BACKWARD), 1);
        assert_int_equal(calls_of(step, VJP_FORWARD), which == SQUARED || which == HALVED);
        assert_int_equal(calls_of(forward, VJP_FORWARD), 1);
        const int32_t targets[] = {4, 0, 2};
        float losses[2];
        vjp_program *both[] = {step, forward};
        for (int i = 0; i < 2; i++) {
            fill(both[i], x, 1, 1);
            fill(both[i], weight, 2, 1);
            assert_int_equal(vjp_program_write(both[i], target, targets, sizeof targets), VJP_OK);
            run(device, both[i]);
            assert_int_equal(vjp_program_read(both[i], loss, &losses[i], sizeof losses[i]), VJP_OK);
        }
        assert_true(losses[0] > 0 && losses[0] == losses[1]);
        vjp_program_destroy(forward);
        vjp_program_destroy(step);
        vjp_graph_destroy(g);
    }
    vjp_close(device);
}

/* rms_norm's y as a result that nothing reads before the backward gives it: the forward only saves rstd. */
static void a_norms_y_comes_with_its_gradient(void **unused) {
    (void)unused;
    enum { ROWS = 3, DIM = 20 };
    vjp_device *device = open_device("cpu");
    vjp_graph *g = vjp_graph_create();
    const int64_t shape[] = {ROWS, DIM};
    vjp_value x = vjp_graph_parameter(g, "x", VJP_F32, 2, shape), gradient;
    vjp_value gamma = vjp_graph_parameter(g, "gamma", VJP_F32, 1, shape + 1);
    vjp_value beta = vjp_graph_parameter(g, "beta", VJP_F32, 1, shape + 1);
    vjp_value y = vjp_graph_rms_norm(g, x, gamma, beta, NULL);
    vjp_value loss = vjp_graph_mean(g, y, WITH(mean, .axes = 0));
    assert_int_equal(vjp_graph_grad(g, loss, &x, 1, NULL, 0, &gradient), VJP_OK);
    const vjp_value results[] = {y, gradient};
    vjp_program *both[] = {compile(device, g, results, 2, NULL), compile(device, g, &y, 1, NULL)};
    float values[2][ROWS * DIM];
    for (int i = 0; i < 2; i++) {
        fill(both[i], x, 1, 1);
        fill(both[i], gamma, 2, 1);
        fill(both[i], beta, 3, 1);
        run(device, both[i]);
        assert_int_equal(vjp_program_read(both[i], y, values[i], sizeof values[i]), VJP_OK);
    }
    bool made = false;
    for (int32_t k = 0; k < both[0]->calls; k++)
        made = made || (both[0]->call[k].work.pass == VJP_BACKWARD && both[0]->call[k].work.op == &vjp_op_rms_norm &&
                        both[0]->call[k].work.tensor[RMS_NORM_B_Y]);
    assert_true(made);
    assert_memory_equal(values[0], values[1], sizeof values[0]);
    for (int i = 0; i < 2; i++)
        vjp_program_destroy(both[i]);
    vjp_graph_destroy(g);
    vjp_close(device);
}

/* ---- Watching a run ---------------------------------------------------------------------------------- */

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
        cmocka_unit_test(mistakes_name_the_node),
        cmocka_unit_test(values_are_checked),
        cmocka_unit_test(gradients_are_refused_with_a_reason),
        cmocka_unit_test(sums_of_sizes_are_checked),
        cmocka_unit_test(null_pointers_are_refused),
        cmocka_unit_test(programs_share_within_one_graph),
        cmocka_unit_test(large_graphs_are_quick),
        cmocka_unit_test(planned_is_unplanned),
        cmocka_unit_test(merged_is_separate),
        cmocka_unit_test(calls_are_grouped),
        cmocka_unit_test(groups_keep_what_they_read),
        cmocka_unit_test(old_values_of_states_are_read),
        cmocka_unit_test(gradients_are_made_in_their_states),
        cmocka_unit_test(cast_weights_have_wide_gradients),
        cmocka_unit_test(gradients_are_differences),
        cmocka_unit_test(recomputed_is_kept),
        cmocka_unit_test(states_are_shared),
        cmocka_unit_test(a_backward_replaces_its_forward),
        cmocka_unit_test(a_norms_y_comes_with_its_gradient),
        cmocka_unit_test(runs_can_be_watched),
        cmocka_unit_test(interrupts_stop_only_a_run_under_way),
        cmocka_unit_test(steps_are_taken_whole),
        cmocka_unit_test(bad_indices_stop_a_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

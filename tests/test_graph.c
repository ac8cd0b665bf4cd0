/* SPDX-License-Identifier: MIT */
/*
 * Graphs and programs: random graphs whose planned arena must give the bits of memory without a plan; gradients against
 * central differences; recomputation; states and steps; outputs that two nodes can compute.
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
#include "blocks.h"
#include "graph/program.h"
#include "merging.h"
#include "op/op.h"
#include "opening.h"
#include "parts.h"
#include "programs.h"
#include "random_graph.h"

/* ---- Random graphs ----------------------------------------------------------------------------------- */

static void check_random_graphs(vjp_device *device) {
    static const random_kind kinds[] = {
        {.dtype = VJP_F32}, {.dtype = VJP_BF16}, {.dtype = VJP_F16}, {.dtype = VJP_F32, .wild = true}};
    for (uint64_t seed = 0; seed < 400; seed++) {
        char why[RANDOM_WHY];
        if (!in_sanitized_part(seed)) continue;
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

/* ---- Gradients --------------------------------------------------------------------------------------- */

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
    same_bits_of(program[0], state, program[1], state);
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
                way[i] = random_of(7, 500 + seed, (uint64_t)i);
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
        same_bits_of(program[0], result[0][w], program[1], result[1][w]);
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

/* In one arena, in turn; one that is too small, or too large for the machine; and a choice that means nothing. */
static void arenas_are_shared(void **unused) {
    (void)unused;
    vjp_device *device = open_device("cpu");
    vjp_graph *g = vjp_graph_create();
    const int64_t shape[] = {64, 32};
    vjp_value x = vjp_graph_input(g, "x", VJP_F32, 2, shape), scaled = vjp_graph_scale(g, x, NULL);
    vjp_value small = mean_of(g, x), large = vjp_graph_mul(g, scaled, vjp_graph_swiglu(g, scaled, x), NULL);
    vjp_program_report report = {.struct_size = sizeof report};
    assert_int_equal(vjp_plan(device, g, &large, 1, NULL, &report), VJP_OK);
    vjp_program *alone = compile(device, g, &large, 1, NULL), *other;
    for (int reserved = 0; reserved < 2; reserved++) {
        const vjp_program_options first = {.struct_size = sizeof first,
                                           .arena_bytes = reserved ? report.arena_bytes : 0};
        vjp_program *owner = compile(device, g, &small, 1, &first);
        const vjp_program_options share = {.struct_size = sizeof share, .share = owner, .share_arena = 1};
        vjp_program *guest = compile(device, g, &large, 1, &share);
        const vjp_program_options third = {.struct_size = sizeof third, .share = guest, .share_arena = 1};
        vjp_program *last = compile(device, g, &small, 1, &third); /* the arena of the first, or of the second */
        assert_int_equal(guest->arena == owner->arena, reserved);
        assert_ptr_equal(last->arena, guest->arena);
        /* One that needs no more than there is, but reserves more for programs that will share its own. */
        vjp_program_options more = share;
        more.arena_bytes = owner->arena_room + 1;
        vjp_program *host = compile(device, g, &small, 1, &more);
        assert_ptr_not_equal(host->arena, owner->arena);
        assert_true(host->arena_room >= more.arena_bytes);
        vjp_program_destroy(host);
        float before, after;
        fill(owner, x, 1, 1);
        fill(alone, x, 1, 1);
        for (int round = 0; round < 2; round++) {
            run(device, owner);
            assert_int_equal(vjp_program_read(owner, small, &before, sizeof before), VJP_OK);
            run(device, guest);
            run(device, alone);
            same_bits_of(guest, large, alone, large);
            run(device, last);
            assert_int_equal(vjp_program_read(last, small, &after, sizeof after), VJP_OK);
            assert_true(before == after);
        }
        vjp_program_destroy(last);
        vjp_program_destroy(guest);
        vjp_program_destroy(owner);
    }
    const vjp_program_options nothing = {.struct_size = sizeof nothing, .share_arena = 1};
    assert_int_equal(vjp_compile(device, g, &small, 1, &nothing, &other), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "share_arena needs a program"));
    const vjp_program_options huge = {.struct_size = sizeof huge, .arena_bytes = SIZE_MAX - 1};
    assert_int_equal(vjp_compile(device, g, &small, 1, &huge, &other), VJP_OUT_OF_MEMORY);
    assert_null(other);
    vjp_program_destroy(alone);
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(planned_is_unplanned),
        cmocka_unit_test(merged_is_separate),
        cmocka_unit_test(large_graphs_are_quick),
        cmocka_unit_test(gradients_are_made_in_their_states),
        cmocka_unit_test(cast_weights_have_wide_gradients),
        cmocka_unit_test(gradients_are_differences),
        cmocka_unit_test(recomputed_is_kept),
        cmocka_unit_test(states_are_shared),
        cmocka_unit_test(arenas_are_shared),
        cmocka_unit_test(a_backward_replaces_its_forward),
        cmocka_unit_test(a_norms_y_comes_with_its_gradient),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

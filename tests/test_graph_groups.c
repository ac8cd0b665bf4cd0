/* SPDX-License-Identifier: MIT */
/*
 * Calls of a program that may run at once are one group, on a device that merges calls: which are grouped, that none
 * overwrites what another one reads, and that a state's old value is read before it is written.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "attributes.h"
#include "graph/program.h"
#include "merging.h"
#include "op/op.h"
#include "opening.h"
#include "programs.h"

enum { LAYERS = 5, WIDTH = 12 };

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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_are_grouped),
        cmocka_unit_test(groups_keep_what_they_read),
        cmocka_unit_test(old_values_of_states_are_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

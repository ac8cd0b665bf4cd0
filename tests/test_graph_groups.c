/* SPDX-License-Identifier: MIT */
/*
 * Calls of a program that may run at once are one group, on a device that merges calls: which are grouped, that none
 * overwrites what another one reads, and that a state's old value is read before it is written. And calls that run in
 * pairs, on a device that does that.
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

/* ---- Pairs ------------------------------------------------------------------------------------------- */

static int pairs_run;

/* A scale whose result only the next scale or sum reads. */
static int pair_scales(const vjp_work *first, const vjp_work *second, uint32_t unread) {
    return first->op == &vjp_op_scale && (second->op == &vjp_op_scale || second->op == &vjp_op_add) && unread & 1;
}

/*
 * As a kernel for both may do it: results of the second are written before inputs of the first are read, but not where
 * the second reads, and what is between them is not written.
 */
static vjp_status run_scales(const vjp_work *first, const vjp_work *second) {
    size_t bytes = (size_t)vjp_elements(second, SCALE_Y) * sizeof(float);
    void *between = vjp_data(first, SCALE_Y), *result = vjp_data(second, SCALE_Y);
    vjp_status status = VJP_OK;
    if (result != between) memset(result, 0xff, bytes);
    for (int i = 0; i < 2 && status == VJP_OK; i++) {
        const vjp_work *work = i ? second : first;
        status = vjp_run(work, work->device->backend->kernel(work->device, work->op, work->pass));
    }
    if (result != between) memset(between, 0xff, bytes);
    pairs_run++;
    return status;
}

/* `backend` must outlive the device. */
static vjp_device *open_with_pairs(vjp_backend *backend) {
    vjp_device *device = open_device("cpu");
    *backend = *device->backend;
    backend->pairs = pair_scales;
    backend->run_pair = run_scales;
    device->backend = backend;
    return device;
}

static int count_pairs(const vjp_program *program) {
    int found = 0;
    for (int32_t i = 0; i < program->groups; i++)
        found += program->group[i].pair;
    return found;
}

/* A chain of factors 2, 3, ...; bit i of `results`: its value i is a result, of `added`: an add reads it at the end. */
typedef struct pair_case {
    int length;
    unsigned results, added;
    int pairs;
} pair_case;

static void check_chain(const pair_case *p, const char *rewrites, int pairs) {
    enum { MAX_LENGTH = 8 };
    vjp_backend backend;
    vjp_device *device = open_with_pairs(&backend);
    vjp_graph *g = vjp_graph_create();
    const int64_t size = 33;
    vjp_value x = vjp_graph_input(g, "x", VJP_F32, 1, &size), value[MAX_LENGTH], results[MAX_LENGTH + 1], sum = 0;
    size_t count = 0;
    for (int i = 0; i < p->length; i++)
        value[i] = vjp_graph_scale(g, i ? value[i - 1] : x, WITH(scale, .factor = 2 + i));
    for (int i = 0; i < p->length; i++) {
        if (p->results >> i & 1) results[count++] = value[i];
        if (p->added >> i & 1) sum = vjp_graph_add(g, sum ? sum : x, value[i], NULL);
    }
    if (sum) results[count++] = sum;
    setenv("VJP_REWRITES", rewrites, 1);
    vjp_program *program = compile(device, g, results, count, NULL);
    unsetenv("VJP_REWRITES");
    assert_int_equal(count_pairs(program), pairs);
    fill(program, x, 5, 1);
    for (int again = 0; again < 2; again++) {
        pairs_run = 0;
        run(device, program);
        assert_int_equal(pairs_run, pairs);
        vjp_tensor from = place(program, x);
        for (int64_t k = 0; k < size; k++) {
            float now = (float)get(&from, k), total = now;
            size_t r = 0;
            for (int i = 0; i < p->length; i++) {
                now *= (float)(2 + i);
                if (p->added >> i & 1) total += now;
                if (!(p->results >> i & 1)) continue;
                vjp_tensor at = place(program, results[r++]);
                assert_true(get(&at, k) == (double)now);
            }
            if (!sum) continue;
            vjp_tensor at = place(program, sum);
            assert_true(get(&at, k) == (double)total);
        }
    }
    vjp_program_destroy(program);
    vjp_graph_destroy(g);
    vjp_close(device);
}

static void two_calls_run_as_one(void **unused) {
    (void)unused;
    static const pair_case cases[] = {
        {1, 1 << 0, 0, 0},
        {2, 1 << 1, 0, 1},
        {2, 1 << 0 | 1 << 1, 0, 0}, /* what is between them is a result */
        {3, 1 << 2, 0, 1},          /* a call is in one pair at most */
        {4, 1 << 3, 0, 2},
        {7, 1 << 2 | 1 << 6, 0, 3},
        {4, 1 << 3, 1 << 0, 1},          /* something else reads what is between the first two, later */
        {6, 1 << 5, 1 << 1 | 1 << 3, 3}, /* something else reads what pairs give */
        {8, 1 << 7, 1 << 0 | 1 << 2 | 1 << 5, 3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        check_chain(&cases[i], "+pairs", cases[i].pairs);
        check_chain(&cases[i], "-pairs", 0);
    }
}

/* Without a pair the sum would be computed in the place of its first addend, which is also the scale's input. */
static void what_both_calls_read_is_kept(void **unused) {
    (void)unused;
    for (int paired = 0; paired < 2; paired++) {
        vjp_backend backend;
        vjp_device *device = open_with_pairs(&backend);
        vjp_graph *g = vjp_graph_create();
        const int64_t size = 33;
        vjp_value x = vjp_graph_input(g, "x", VJP_F32, 1, &size),
                  twice = vjp_graph_scale(g, x, WITH(scale, .factor = 2));
        vjp_value sum = vjp_graph_add(g, twice, vjp_graph_scale(g, twice, WITH(scale, .factor = 3)), NULL);
        setenv("VJP_REWRITES", paired ? "+pairs" : "-pairs", 1);
        vjp_program *program = compile(device, g, &sum, 1, NULL);
        unsetenv("VJP_REWRITES");
        assert_int_equal(count_pairs(program), paired);
        const vjp_work *last = &program->call[program->calls - 1].work;
        assert_int_equal(vjp_data(last, ADD_Y) == vjp_data(last, ADD_A), !paired);
        fill(program, x, 6, 1);
        run(device, program);
        vjp_tensor from = place(program, x), to = place(program, sum);
        for (int64_t k = 0; k < size; k++)
            assert_true(get(&to, k) == (double)((float)get(&from, k) * 8));
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
        cmocka_unit_test(two_calls_run_as_one),
        cmocka_unit_test(what_both_calls_read_is_kept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* SPDX-License-Identifier: MIT */
/*
 * Rewrites that give products more to do: swiglu with the bits that it has of its own, and sums with the same numbers,
 * rounded once. What a product cannot take stays.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>

#include "attributes.h"
#include "graph/program.h"
#include "op/op.h"
#include "rewrites.h"

/* ---- swiglu in products ------------------------------------------------------------------------------ */

/* What is between the products of gate and up and their swiglu, and what may keep up's product from taking it. */
typedef enum gate_choice {
    GATE_PLAIN,
    GATE_BIAS,
    GATE_FORWARD,        /* without a backward: up is not written */
    GATE_RESULT,         /* up is a result */
    GATE_READ,           /* something else reads up */
    GATE_TWICE,          /* two swiglus of one up: the first is taken */
    GATE_INPUT,          /* gate is a parameter */
    GATE_LATE,           /* gate is computed after up */
    GATE_ACTIVATION,     /* of up's product */
    GATE_ACTIVE_FORWARD, /* the same without a backward: nothing reads pre */
    GATE_RESIDUAL,       /* up's product has one */
    GATE_SWAPPED,        /* up's product computes the gate of swiglu, before its factor */
    GATE_VIEW,           /* swiglu reads up under another shape */
    GATE_ASSIGNED,       /* y goes into a state */
    GATE_CHOICES
} gate_choice;

static bool is_gated(gate_choice choice) {
    return choice <= GATE_INPUT;
}

static gated_graph gate_make(gate_choice choice, vjp_dtype dtype) {
    gated_graph r = {.graph = vjp_graph_create()};
    vjp_graph *g = r.graph;
    const int64_t flat[] = {GATED_ROWS * GATED_WIDE}, wide[] = {GATED_ROWS, GATED_WIDE};
    vjp_linear_attributes plain = *WITH(linear, .transpose_b = 1), own = plain;
    if (choice == GATE_ACTIVATION || choice == GATE_ACTIVE_FORWARD) own.activation = VJP_ACTIVATION_TANH;
    r.x = vjp_graph_input(g, "x", dtype, 2, (int64_t[]){GATED_ROWS, GATED_DIM});
    vjp_value state = vjp_graph_state(g, "state", dtype, 2, wide);
    bool given = choice == GATE_INPUT;
    vjp_value gate_weight =
        gated_weight(&r, "gate", dtype, given ? GATED_ROWS : GATED_WIDE, given ? GATED_WIDE : GATED_DIM);
    vjp_value up_weight = gated_weight(&r, "up", dtype, GATED_WIDE, GATED_DIM);
    vjp_value bias = choice == GATE_BIAS ? gated_weight(&r, "bias", dtype, GATED_WIDE, 0) : 0;
    vjp_value gate = given ? gate_weight : 0;
    if (!given && choice != GATE_LATE) gate = vjp_graph_linear(g, r.x, gate_weight, 0, 0, 0, &plain);
    vjp_value up = vjp_graph_linear(g, r.x, up_weight, bias, choice == GATE_RESIDUAL ? gate : 0, 0, &own);
    if (choice == GATE_LATE) gate = vjp_graph_linear(g, r.x, gate_weight, 0, 0, 0, &plain);
    vjp_value y = choice == GATE_SWAPPED ? vjp_graph_swiglu(g, up, gate)
                  : choice == GATE_VIEW
                      ? vjp_graph_swiglu(g, vjp_graph_reshape(g, gate, 1, flat), vjp_graph_reshape(g, up, 1, flat))
                      : vjp_graph_swiglu(g, gate, up);
    vjp_value kept = choice == GATE_ASSIGNED ? vjp_graph_assign(g, state, y) : 0;
    vjp_value loss = vjp_graph_mul(g, y, y, NULL);
    if (choice == GATE_READ) loss = vjp_graph_mul(g, loss, up, NULL);
    if (choice == GATE_TWICE)
        loss =
            vjp_graph_mul(g, loss, vjp_graph_swiglu(g, vjp_graph_scale(g, gate, WITH(scale, .factor = 2)), up), NULL);
    loss = vjp_graph_cast(g, vjp_graph_mean(g, loss, WITH(mean, .axes = 0)), VJP_F32);
    if (choice != GATE_FORWARD && choice != GATE_ACTIVE_FORWARD) {
        r.results = (size_t)r.weights;
        vjp_graph_grad(g, loss, r.weight, r.results, NULL, 0, r.result);
    }
    r.result[r.results++] = loss;
    if (choice == GATE_RESULT) r.result[r.results++] = up;
    if (kept) r.result[r.results++] = kept;
    if (vjp_graph_status(g) != VJP_OK) fail_msg("%d: %s", (int)choice, vjp_graph_error(g));
    return r;
}

static void products_gate(void **unused) {
    (void)unused;
    vjp_device *device = open_cpu();
    for (int choice = 0; choice < GATE_CHOICES; choice++)
        for (int narrow = 0; narrow < 2; narrow++) {
            gated_graph r = gate_make((gate_choice)choice, narrow ? VJP_BF16 : VJP_F32);
            vjp_program *off = gated_run(device, &r, "-all"), *on = gated_run(device, &r, "-all,+swiglu");
            if (on->calls != off->calls - is_gated((gate_choice)choice))
                fail_msg("%d: %d calls instead of %d", choice, (int)on->calls, (int)off->calls);
            for (size_t i = 0; i < r.results; i++)
                same_bits(off, on, r.result[i]);
            /* Without a reader up is not written. */
            for (int32_t k = 0; k < on->calls; k++) {
                const vjp_work *work = &on->call[k].work;
                if (work->op == &vjp_op_linear && work->pass == VJP_FORWARD && work->tensor[LINEAR_GATE])
                    assert_int_equal(!work->tensor[LINEAR_PRE], choice == GATE_FORWARD);
            }
            vjp_program_destroy(on);
            vjp_program_destroy(off);
            vjp_graph_destroy(r.graph);
        }
    vjp_close(device);
}

/* With the rewrites that look for swiglu themselves, for every combination of choices. */
static void gates_and_other_rewrites(void **unused) {
    (void)unused;
    vjp_device *device = open_cpu();
    for (unsigned choice = 0; choice <= GATED_ALL; choice++) {
        gated_graph r = gated_make(choice, choice % 3 ? VJP_F32 : VJP_BF16);
        vjp_program *off = gated_run(device, &r, "+all,-swiglu"), *on = gated_run(device, &r, "+all");
        for (size_t i = 0; i < r.results; i++)
            same_bits(off, on, r.result[i]);
        if (on->calls != off->calls - !(choice & GATED_SQUARE))
            fail_msg("%u: %d calls instead of %d", choice, (int)on->calls, (int)off->calls);
        vjp_program_destroy(on);
        vjp_program_destroy(off);
        vjp_graph_destroy(r.graph);
    }
    vjp_close(device);
}

/* ---- Sums in products -------------------------------------------------------------------------------- */

/* What is added to the result z of a product, and what may keep the product from adding it. */
typedef enum sum_choice {
    SUM_PLAIN,
    SUM_SWAPPED,    /* r + z */
    SUM_ACTIVATION, /* z has a bias and an activation */
    SUM_PRODUCTS,   /* r is a product, too */
    SUM_LATER,      /* r is computed after z */
    SUM_RESULT,     /* z is a result */
    SUM_READ,       /* something else reads z */
    SUM_ITSELF,     /* z + z */
    SUM_ROW,        /* r is one row */
    SUM_WIDE,       /* r is f32, z is not */
    SUM_CHANGED,    /* r is a state that changes between the two */
    SUM_ASSIGNED,   /* y goes into a state */
    SUM_VIEW,       /* r is read under another shape */
    SUM_CHOICES
} sum_choice;

static bool is_summed(sum_choice choice) {
    return choice <= SUM_PRODUCTS || choice == SUM_VIEW;
}

enum { SUM_ROWS = 6, SUM_DIM = 16, SUM_RESULTS = 6 };

typedef struct sum_graph {
    vjp_graph *graph;
    vjp_value x, state, weight[3], result[SUM_RESULTS];
    size_t weights, results;
} sum_graph;

static sum_graph sum_make(sum_choice choice, vjp_dtype dtype) {
    sum_graph r = {.graph = vjp_graph_create()};
    vjp_graph *g = r.graph;
    const int64_t shape[] = {SUM_ROWS, SUM_DIM}, square[] = {SUM_DIM, SUM_DIM}, flat[] = {SUM_ROWS * SUM_DIM};
    r.x = vjp_graph_input(g, "x", dtype, 2, shape);
    r.state = vjp_graph_state(g, "state", dtype, 2, shape);
    for (int i = 0; i < 2; i++)
        r.weight[r.weights++] = vjp_graph_parameter(g, i ? "v" : "w", dtype, 2, square);
    vjp_value row = vjp_graph_parameter(g, "row", choice == SUM_WIDE ? VJP_F32 : dtype, choice == SUM_WIDE ? 2 : 1,
                                        choice == SUM_WIDE ? shape : square);
    if (choice == SUM_ACTIVATION || choice == SUM_ROW || choice == SUM_WIDE) r.weight[r.weights++] = row;
    vjp_value addend = vjp_graph_scale(g, r.x, WITH(scale, .factor = 0.5));
    if (choice == SUM_PRODUCTS) addend = vjp_graph_linear(g, r.x, r.weight[1], 0, 0, 0, NULL);
    if (choice == SUM_CHANGED) addend = r.state;
    if (choice == SUM_VIEW)
        addend = vjp_graph_reshape(
            g, vjp_graph_scale(g, vjp_graph_reshape(g, r.x, 1, flat), WITH(scale, .factor = 0.5)), 2, shape);
    bool active = choice == SUM_ACTIVATION;
    vjp_value z = vjp_graph_linear(g, r.x, r.weight[0], active ? row : 0, 0, 0,
                                   WITH(linear, .activation = active ? VJP_ACTIVATION_TANH : VJP_ACTIVATION_NONE));
    if (choice == SUM_LATER) addend = vjp_graph_scale(g, z, WITH(scale, .factor = 0.5));
    if (choice == SUM_ITSELF) addend = z;
    if (choice == SUM_ROW || choice == SUM_WIDE) addend = row;
    vjp_value changed =
        choice == SUM_CHANGED ? vjp_graph_assign(g, r.state, vjp_graph_scale(g, r.state, WITH(scale, .factor = 3))) : 0;
    vjp_value y = choice == SUM_SWAPPED ? vjp_graph_add(g, addend, z, NULL) : vjp_graph_add(g, z, addend, NULL);
    vjp_value kept = choice == SUM_ASSIGNED ? vjp_graph_assign(g, r.state, y) : 0;
    vjp_value loss = vjp_graph_mul(g, y, y, NULL);
    if (choice == SUM_READ) loss = vjp_graph_mul(g, loss, z, NULL);
    loss = vjp_graph_cast(g, vjp_graph_mean(g, loss, WITH(mean, .axes = 0)), VJP_F32);
    size_t wanted = choice == SUM_PRODUCTS ? r.weights : 1;
    vjp_graph_grad(g, loss, r.weight, wanted, NULL, 0, r.result);
    r.results = wanted;
    r.result[r.results++] = loss;
    if (choice == SUM_RESULT) r.result[r.results++] = z;
    if (changed) r.result[r.results++] = changed;
    if (kept) r.result[r.results++] = kept;
    if (vjp_graph_status(g) != VJP_OK) fail_msg("%d: %s", choice, vjp_graph_error(g));
    return r;
}

static vjp_program *sum_run(vjp_device *device, const sum_graph *r, const char *rewrites) {
    vjp_program *program = compile_with(device, r->graph, r->result, r->results, rewrites);
    vjp_tensor x;
    for (int i = 0; i < 2; i++) {
        if (vjp_program_tensor(program, i ? r->state : r->x, &x) != VJP_OK) continue; /* no call needs the state */
        for (int64_t k = 0; k < count_of(&x); k++)
            put(&x, k, random_of(9, (uint64_t)i, (uint64_t)k));
    }
    for (size_t i = 0; i < r->weights; i++)
        if (vjp_program_tensor(program, r->weight[i], &x) == VJP_OK)
            assert_int_equal(vjp_program_init_normal(program, r->weight[i], 0, 0.5, 7), VJP_OK);
    memset(program->arena, 0x55, program->report.arena_bytes);
    run(device, program);
    return program;
}

/* In f32 within its rounding; in bf16 the sum is rounded once, so only what is left as it was has the same bits. */
static void products_add(void **unused) {
    (void)unused;
    vjp_device *device = open_cpu();
    for (int choice = 0; choice < SUM_CHOICES; choice++)
        for (int narrow = 0; narrow < 2; narrow++) {
            if (choice == SUM_WIDE && !narrow) continue;
            sum_graph r = sum_make((sum_choice)choice, narrow ? VJP_BF16 : VJP_F32);
            vjp_program *off = sum_run(device, &r, "-all"), *on = sum_run(device, &r, "-all,+residual");
            bool summed = is_summed((sum_choice)choice);
            if (on->calls != off->calls - summed)
                fail_msg("%d: %d calls instead of %d", choice, (int)on->calls, (int)off->calls);
            assert_true(on->report.live_bytes <= off->report.live_bytes);
            for (size_t i = 0; i < r.results; i++) {
                vjp_tensor a, b;
                if (!summed) same_bits(off, on, r.result[i]);
                assert_int_equal(vjp_program_tensor(off, r.result[i], &a), VJP_OK);
                assert_int_equal(vjp_program_tensor(on, r.result[i], &b), VJP_OK);
                for (int64_t k = 0; k < count_of(&a) && a.dtype == VJP_F32 && !narrow; k++)
                    if (fabs(get(&a, k) - get(&b, k)) > 1e-5 * (1 + fabs(get(&a, k))))
                        fail_msg("%d: result %zu has %g instead of %g", choice, i, get(&b, k), get(&a, k));
            }
            vjp_program_destroy(on);
            vjp_program_destroy(off);
            vjp_graph_destroy(r.graph);
        }
    vjp_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_add),
        cmocka_unit_test(products_gate),
        cmocka_unit_test(gates_and_other_rewrites),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

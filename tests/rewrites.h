/* SPDX-License-Identifier: MIT */
/*
 * Programs with and without rewrites, for the tests that compare them: VJP_REWRITES switches them, because the CPU has
 * none of them by default. And a gated block in many variants. Include it after cmocka.h.
 */
#ifndef VJP_TESTS_REWRITES_H
#define VJP_TESTS_REWRITES_H

#include <stdlib.h>
#include <string.h>

#include "graph/program.h"
#include "opening.h"
#include "programs.h"

/* The workspace of products grows with the threads, and the arena with it. */
static inline vjp_device *open_cpu(void) {
    const vjp_options options = {.struct_size = sizeof options, .threads = 2};
    return open_with("cpu", &options);
}

static inline vjp_program *compile_with(vjp_device *device, const vjp_graph *graph, const vjp_value *results,
                                        size_t count, const char *rewrites) {
    setenv("VJP_REWRITES", rewrites, 1);
    vjp_program *program = compile(device, graph, results, count, NULL);
    unsetenv("VJP_REWRITES");
    return program;
}

/* How many calls have a name that ends in `end`. */
static inline int count_calls(const vjp_program *program, const char *end) {
    int found = 0;
    for (int32_t k = 0; k < program->calls; k++) {
        size_t length = strlen(program->call[k].name), wanted = strlen(end);
        found += length >= wanted && strcmp(program->call[k].name + length - wanted, end) == 0;
    }
    return found;
}

static inline void same_bits(vjp_program *one, vjp_program *other, vjp_value value) {
    same_bits_of(one, value, other, value);
}

/* ---- A gated block ----------------------------------------------------------------------------------- */

/* A gated block whose swiglu is computed again, and what may keep its backward from giving y. */
typedef enum gated_choice {
    GATED_ACTIVATION = 1, /* of the product that reads y: its gradients share a pass */
    GATED_TWICE = 2,      /* a second product reads y */
    GATED_OTHER = 4,      /* something that is no product reads y again */
    GATED_KEPT = 8,       /* gate is a result: y has no memory to take over */
    GATED_SQUARE = 16,    /* gate is up, too: again too little memory */
    GATED_RESIDUAL = 32,  /* z is added to x */
    GATED_BIAS = 64,
    GATED_FROZEN = 128, /* the product's weight has no gradient */
    GATED_MARKED = 256, /* as a block; otherwise recompute chooses y, which is not used while larger values are alive */
    GATED_ALL = 511
} gated_choice;

enum { GATED_ROWS = 24, GATED_DIM = 16, GATED_WIDE = 40, GATED_RESULTS = 10 };

typedef struct gated_graph {
    vjp_graph *graph;
    vjp_value x, weight[7], result[GATED_RESULTS];
    int weights;
    size_t results;
} gated_graph;

static inline vjp_value gated_weight(gated_graph *r, const char *name, vjp_dtype dtype, int64_t rows, int64_t columns) {
    const int64_t shape[] = {rows, columns};
    vjp_value made = vjp_graph_parameter(r->graph, name, dtype, columns ? 2 : 1, shape);
    r->weight[r->weights++] = made;
    return made;
}

static inline gated_graph gated_make(unsigned choice, vjp_dtype dtype) {
    gated_graph r = {.graph = vjp_graph_create()};
    vjp_graph *g = r.graph;
    const vjp_linear_attributes *plain = WITH(linear, .transpose_b = 1);
    vjp_linear_attributes out = *plain;
    if (choice & GATED_ACTIVATION) out.activation = VJP_ACTIVATION_TANH;
    r.x = vjp_graph_input(g, "x", dtype, 2, (int64_t[]){GATED_ROWS, GATED_DIM});
    vjp_value gate = vjp_graph_linear(g, r.x, gated_weight(&r, "gate", dtype, GATED_WIDE, GATED_DIM), 0, 0, 0, plain);
    vjp_value up = gate;
    if (!(choice & GATED_SQUARE))
        up = vjp_graph_linear(g, r.x, gated_weight(&r, "up", dtype, GATED_WIDE, GATED_DIM), 0, 0, 0, plain);
    vjp_value bias = choice & GATED_BIAS ? gated_weight(&r, "bias", dtype, GATED_DIM, 0) : 0;
    vjp_value second = choice & GATED_TWICE ? gated_weight(&r, "second", dtype, GATED_DIM, GATED_WIDE) : 0;
    vjp_value down = gated_weight(&r, "down", dtype, GATED_DIM, GATED_WIDE);
    if (choice & GATED_MARKED) vjp_graph_recompute_begin(g);
    vjp_value y = vjp_graph_swiglu(g, gate, up), z = vjp_graph_linear(g, y, down, bias, 0, 0, &out);
    if (second) z = vjp_graph_add(g, z, vjp_graph_linear(g, y, second, 0, 0, 0, plain), NULL);
    vjp_value loss = vjp_graph_mean(g, choice & GATED_OTHER ? vjp_graph_mul(g, y, y, NULL) : z, WITH(mean, .axes = 0));
    if (choice & GATED_MARKED) vjp_graph_recompute_end(g);
    vjp_value large = vjp_graph_input(g, "large", VJP_F32, 1, (int64_t[]){1 << 14});
    vjp_value most = vjp_graph_mean(g, vjp_graph_scale(g, large, NULL), WITH(mean, .axes = 0));
    if (choice & GATED_RESIDUAL) z = vjp_graph_add(g, z, r.x, NULL);
    loss = vjp_graph_add(g, loss, vjp_graph_mean(g, vjp_graph_mul(g, z, z, NULL), WITH(mean, .axes = 0)), NULL);
    loss = vjp_graph_cast(g, loss, VJP_F32);
    size_t wanted = (size_t)r.weights - (choice & GATED_FROZEN ? 1 : 0); /* the product's is the last */
    vjp_graph_grad(g, loss, r.weight, wanted, NULL, 0, r.result);
    r.results = wanted;
    r.result[r.results++] = loss;
    r.result[r.results++] = most;
    if (choice & GATED_KEPT) r.result[r.results++] = gate;
    if (vjp_graph_status(g) != VJP_OK) fail_msg("%u: %s", choice, vjp_graph_error(g));
    return r;
}

static inline vjp_program *gated_run(vjp_device *device, const gated_graph *r, const char *rewrites) {
    vjp_program *program = compile_with(device, r->graph, r->result, r->results, rewrites);
    vjp_tensor x;
    assert_int_equal(vjp_program_tensor(program, r->x, &x), VJP_OK);
    for (int64_t i = 0; i < count_of(&x); i++)
        put(&x, i, random_of(5, 1, (uint64_t)i));
    for (int i = 0; i < r->weights; i++)
        assert_int_equal(vjp_program_init_normal(program, r->weight[i], 0, 0.5, 7), VJP_OK);
    memset(program->arena, 0x55, program->report.arena_bytes);
    run(device, program);
    return program;
}

#endif

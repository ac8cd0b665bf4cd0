/* SPDX-License-Identifier: MIT */
/*
 * Random graphs, for the unit test of the planner and for its fuzzer: ops of random older values, many of them used
 * several times, in changing shapes; gradients, some of them into states; intermediate results; a step of an optimiser;
 * blocks that are computed again. And what must hold for each of them.
 */
#ifndef VJP_TESTS_RANDOM_GRAPH_H
#define VJP_TESTS_RANDOM_GRAPH_H

#include <stdbool.h>
#include <stdlib.h>

#include "choices.h"
#include "vjp.h"

typedef struct random_kind {
    vjp_dtype dtype;
    bool recompute; /* the same ops as without, some of them in blocks */
    bool smooth;    /* only differentiable ops: no maximum, no optimiser's step */
    bool wild;      /* now and then something that may be refused */
} random_kind;

enum { RANDOM_VALUES = 40, RANDOM_WEIGHTS = 10, RANDOM_RESULTS = 64 };

/* What a program must be given before it runs. */
typedef struct random_given {
    vjp_value value;
    double size;   /* numbers from -size to size */
    int64_t limit; /* not 0: indices from 0 to limit - 1 */
} random_given;

typedef struct random_graph {
    random_kind kind;
    vjp_graph *graph;
    random_given given[2 * RANDOM_VALUES];
    vjp_value weight[RANDOM_WEIGHTS], gradient[RANDOM_WEIGHTS], loss;
    vjp_value result[RANDOM_RESULTS]; /* the loss and the gradients first */
    int givens, weights, results;
} random_graph;

/* The choices are not consumed: the same ones make the same graph again. A wild graph may have failed. */
random_graph random_graph_make(choices from, random_kind kind);

/* Writes numbers to all inputs, parameters and states. */
void random_graph_fill(vjp_program *program, const random_graph *r);

/*
 * Neither the plan, twice in a row, nor blocks that are computed again, nor programs that share memory, nor a
 * limit for which values are computed again or wait in the host's memory change a bit; no two live ranges overlap;
 * nothing reads memory that was not written; a refusal has a status and a sentence. False: `why` says what does not
 * hold.
 */
enum { RANDOM_WHY = 1024 };
bool random_graph_check(vjp_device *device, choices from, random_kind kind, char why[RANDOM_WHY]);

#endif

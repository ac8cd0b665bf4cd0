/* SPDX-License-Identifier: MIT */
/*
 * Muon's step for a matrix, built from ops that every backend has. With the gradient g, clipped by `scale`:
 *
 *     B' = mu B + (1 - mu) scale g
 *     U  = mu B' + (1 - mu) scale g             (nesterov; otherwise B')
 *     O  = the orthogonal factor of U           (Newton-Schulz)
 *     w' = w - lr (factor O + decay w)
 *
 * An iteration is X' = a X + (b A + c A A) X with A = X X^T, or X (b A + c A A) with A = X^T X where the matrix has
 * more rows than columns: A is then the smaller of the two. `linear` forms X^T X only as its gradient of b, with X as
 * both a and dy.
 *
 * B' and w' are computed by `sgd`, which changes nothing where its scale is not finite: a step that the caller
 * suppresses leaves the momentum as it was, too. Maths and measurements: docs/optimisers.md.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "graph/graph.h"
#include "graph/minimize.h"
#include "op/op.h"

/* Of Keller Jordan's Muon: singular values from 0 to 1 come close to 1 in five iterations, instead of exactly in more.
 */
static const double A = 3.4445, B = -4.7750, C = 2.0315;

/* A momentum of a smaller norm is multiplied by 1 / MIN_NORM instead of being divided by its norm. */
static const double MIN_NORM = 1e-7;

static vjp_value scaled(vjp_graph *graph, vjp_value x, double factor) {
    vjp_scale_attributes scale = VJP_SCALE_DEFAULTS;
    scale.factor = factor;
    return vjp_graph_scale(graph, x, &scale);
}

/* The f32 constant of that name, which an earlier matrix may have made. */
static vjp_value number(vjp_graph *graph, const char *name, float value) {
    vjp_value old = vjp_graph_find(graph, name);
    return old ? old : vjp_graph_constant(graph, name, VJP_F32, 0, NULL, &value);
}

/* ---- Newton-Schulz ----------------------------------------------------------------------------------- */

typedef struct iteration {
    vjp_graph *graph;
    int64_t rows, columns;
    vjp_value square; /* any square matrix of `columns`; only its shape counts. 0: rows <= columns */
} iteration;

/* The first rows of x: as many as it has columns. */
static vjp_value square_part(vjp_graph *graph, vjp_value x, int64_t size) {
    char name[64];
    snprintf(name, sizeof name, "muon.first_%lld", (long long)size);
    vjp_value index = vjp_graph_find(graph, name);
    int32_t *rows = index ? NULL : malloc((size_t)size * sizeof *rows);
    for (int32_t i = 0; rows && i < size; i++)
        rows[i] = i;
    if (rows) index = vjp_graph_constant(graph, name, VJP_I32, 1, &size, rows);
    free(rows);
    if (!index) return graph_fail(graph, VJP_OUT_OF_MEMORY, NULL, "out of memory while the graph was built");
    return vjp_graph_gather(graph, x, index, NULL);
}

/* X^T X: the gradient of b that linear gives for a = dy = X. b itself is not read. */
static vjp_value inner_products(const iteration *it, vjp_value x) {
    vjp_graph *graph = it->graph;
    const vjp_shape shape = {.ndim = 2, .size = {it->columns, it->columns}};
    const vjp_linear_attributes plain = VJP_LINEAR_DEFAULTS;
    char name[GRAPH_SCOPE_BYTES + 64];
    snprintf(name, sizeof name, "%s.muon.inner", graph->scope);
    if (graph->status != VJP_OK) return 0;
    vjp_value y = graph_add_value(graph, GRAPH_COMPUTED, name, graph->value[x].dtype, &shape);
    if (!y) return 0;
    const vjp_value values[VJP_MAX_SLOTS] = {
        [LINEAR_B_DB] = y, [LINEAR_B_DY] = x, [LINEAR_B_A] = x, [LINEAR_B_B] = it->square};
    int32_t node = graph->nodes;
    if (!graph_add_node(graph, &vjp_op_linear, VJP_BACKWARD, name, values, &plain)) return 0;
    graph->value[y].node = node;
    graph->value[y].slot = LINEAR_B_DB;
    return y;
}

static vjp_value product(vjp_graph *graph, vjp_value a, vjp_value b, bool transpose_b) {
    vjp_linear_attributes linear = VJP_LINEAR_DEFAULTS;
    linear.transpose_b = transpose_b;
    return vjp_graph_linear(graph, a, b, 0, 0, 0, &linear);
}

/* One iteration, times `factor`. */
static vjp_value iterate(iteration *it, vjp_value x, double factor) {
    vjp_graph *graph = it->graph;
    vjp_value a = it->square ? inner_products(it, x) : product(graph, x, x, true);
    vjp_value sum = scaled(graph, a, factor * B);
    sum = vjp_graph_accumulate(graph, sum, product(graph, scaled(graph, a, factor * C), a, false));
    if (it->square) it->square = sum; /* the part of the first matrix need not be kept any longer */
    vjp_value next = scaled(graph, x, factor * A);
    return vjp_graph_accumulate(graph, next,
                                it->square ? product(graph, x, sum, false) : product(graph, sum, x, false));
}

/* The orthogonal factor of u, nearly, times `factor`. */
static vjp_value orthogonal(vjp_graph *graph, vjp_value u, int iterations, double factor) {
    const vjp_tensor shape = vjp_graph_describe(graph, u);
    iteration it = {.graph = graph, .rows = shape.shape[0], .columns = shape.shape[1]};
    /* clip gives min(1, MIN_NORM / norm): singular values are at most 1 then, as the iteration needs. */
    const vjp_clip_attributes clip = {.struct_size = sizeof clip, .max_norm = MIN_NORM};
    vjp_value inverse = scaled(graph, vjp_graph_clip(graph, vjp_graph_sum_squares(graph, u), &clip), 1 / MIN_NORM);
    vjp_value x = vjp_graph_mul(graph, u, inverse, NULL);
    if (it.rows > it.columns) it.square = square_part(graph, x, it.columns);
    for (int i = 1; i <= iterations && graph->status == VJP_OK; i++)
        x = iterate(&it, x, i == iterations ? factor : 1);
    return x;
}

/* ---- The step ---------------------------------------------------------------------------------------- */

static double factor_of(int32_t scale, double rows, double columns) {
    if (scale == VJP_MUON_SCALE_SHAPE) return sqrt(fmax(1, rows / columns));
    return 0.2 * sqrt(fmax(rows, columns));
}

bool graph_check_muon(vjp_graph *graph, const vjp_muon_options *o) {
    const char *name = "vjp_graph_minimize: muon";
    if (o->struct_size != sizeof *o)
        graph_fail(graph, VJP_INVALID, name, "it has another struct_size");
    else if (!(o->momentum >= 0 && o->momentum < 1))
        graph_fail(graph, VJP_INVALID, name, "its momentum is %g; it must be at least 0 and less than 1", o->momentum);
    else if (o->iterations < 1 || o->iterations > 100)
        graph_fail(graph, VJP_INVALID, name, "it has %d iterations; it must have 1 to 100", (int)o->iterations);
    else if (o->scale != VJP_MUON_SCALE_ADAMW && o->scale != VJP_MUON_SCALE_SHAPE)
        graph_fail(graph, VJP_INVALID, name, "its scale is %d; it must be a vjp_muon_scale", (int)o->scale);
    return graph->status == VJP_OK;
}

vjp_value graph_muon(vjp_graph *graph, const graph_muon_step *s, const vjp_muon_options *o) {
    vjp_value one = number(graph, "muon.one", 1), g = s->g, scale = s->scale;
    if (!one || !s->momentum) return 0;
    if (graph->value[g].dtype != graph->value[s->momentum].dtype)
        g = vjp_graph_cast(graph, g, graph->value[s->momentum].dtype);
    /* sgd subtracts: with a negative scale it adds. */
    const double share = 1 - o->momentum;
    const vjp_sgd_attributes mix = {.struct_size = sizeof mix, .weight_decay = share};
    vjp_value add = scaled(graph, scale ? scale : one, -share);
    vjp_value u = vjp_graph_sgd(graph, s->momentum, 0, g, one, add, &mix);
    if (o->nesterov) {
        u = scaled(graph, u, o->momentum);
        vjp_value own = scale ? vjp_graph_mul(graph, g, scaled(graph, scale, share), NULL) : scaled(graph, g, share);
        u = vjp_graph_accumulate(graph, u, own);
    }
    if (graph->status != VJP_OK) return 0;
    const vjp_shape shape = graph->value[s->w].shape;
    vjp_value step =
        orthogonal(graph, u, o->iterations, factor_of(o->scale, (double)shape.size[0], (double)shape.size[1]));
    /* 1, or not finite as `scale` is. */
    vjp_value suppress = scale ? vjp_graph_add(graph, scaled(graph, scale, 0), one, NULL) : 0;
    const vjp_sgd_attributes descend = {.struct_size = sizeof descend, .weight_decay = s->weight_decay};
    return vjp_graph_sgd(graph, s->w, 0, step, s->lr, suppress, &descend);
}

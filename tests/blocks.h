/* SPDX-License-Identifier: MIT */
/* A graph of residual blocks, whose values are kept or computed again, with the gradient of each weight. */
#ifndef VJP_TESTS_BLOCKS_H
#define VJP_TESTS_BLOCKS_H

#include <stdbool.h>
#include <stdio.h>

#include "attributes.h"
#include "vjp.h"

enum { BLOCKS = 6 };

static inline vjp_value add_block(vjp_graph *g, vjp_value x, int i, vjp_value *weight, bool recompute) {
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

/* The results are the gradients of the weights, and the loss. */
static inline vjp_graph *stacked(bool recompute, vjp_value *x, vjp_value weight[BLOCKS], vjp_value result[BLOCKS + 1]) {
    vjp_graph *g = vjp_graph_create();
    const int64_t shape[] = {128, 64};
    vjp_value h = *x = vjp_graph_input(g, "x", VJP_F32, 2, shape);
    for (int i = 0; i < BLOCKS; i++)
        h = add_block(g, h, i, &weight[i], recompute);
    result[BLOCKS] = vjp_graph_mean(g, vjp_graph_mul(g, h, h, NULL), WITH(mean, .axis = 0, .axes = 0));
    vjp_graph_grad(g, result[BLOCKS], weight, BLOCKS, NULL, 0, result);
    return g;
}

#endif

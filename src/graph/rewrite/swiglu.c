/* SPDX-License-Identifier: MIT */
/*
 * Makes swiglu a part of the product that computes one of its factors:
 *
 *     up = linear(a, b, bias)        becomes        y, up = linear(a, b, bias, gate)
 *     y = swiglu(gate, up)
 *
 * one call less, and gate and up are read once less. The bits are the same, because linear rounds up before it
 * multiplies. The backward stays as it is, and reads up, which is the product's pre; where nothing else reads it, it is
 * not written.
 *
 * The product stays where it is in the order of calls, so gate must be there by then. This comes after `recompute` and
 * `combine`, which look for swiglu: what the backward computes again, it computes from gate and up as before.
 */
#include <stdlib.h>
#include <string.h>

#include "graph/rewrite/rewrite.h"
#include "op/op.h"

/* Whether the product at node m can take the swiglu at node n. */
static bool takes(const graph_uses *u, int32_t m, int32_t n) {
    const graph_node *product = &u->node[m], *node = &u->node[n];
    vjp_value up = node->value[SWIGLU_UP], gate = node->value[SWIGLU_GATE], y = node->value[SWIGLU_Y];
    if (product->op != &vjp_op_linear || product->pass != VJP_FORWARD || product->value[LINEAR_Y] != up) return false;
    if (product->value[LINEAR_RESIDUAL] || product->value[LINEAR_GATE]) return false;
    /* An output that nothing reads is still listed here. */
    vjp_value pre = product->value[LINEAR_PRE];
    if (pre && u->reader[graph_storage(u->graph, pre)] != GRAPH_NONE) return false;
    const vjp_linear_attributes *attributes = (const void *)product->attributes;
    return attributes->activation == VJP_ACTIVATION_NONE && graph_is_alike(u, up, y) && graph_is_alike(u, gate, y) &&
           graph_is_there(u, gate, m);
}

/* Of each product the swiglu that it takes. */
static void choose(const graph_uses *u, int32_t nodes, int32_t *taken, bool *dropped) {
    for (int32_t n = 0; n < nodes; n++) {
        const graph_node *node = &u->node[n];
        taken[n] = GRAPH_NONE;
        if (node->op != &vjp_op_swiglu || node->pass != VJP_FORWARD || !graph_is_plain(u, node->value[SWIGLU_Y]) ||
            !graph_is_plain(u, node->value[SWIGLU_UP]))
            continue;
        int32_t m = u->maker[node->value[SWIGLU_UP]];
        if (taken[m] != GRAPH_NONE || !takes(u, m, n)) continue;
        taken[m] = n;
        dropped[n] = true;
    }
}

static bool append_all(vjp_graph *graph, const graph_uses *u, int32_t nodes, const int32_t *taken,
                       const bool *dropped) {
    bool ok = true;
    for (int32_t n = 0; n < nodes && ok; n++) {
        const graph_node *node = &u->node[n];
        if (dropped[n]) continue;
        vjp_value values[VJP_MAX_SLOTS];
        memcpy(values, node->value, sizeof values);
        if (taken[n] != GRAPH_NONE) {
            const graph_node *gated = &u->node[taken[n]];
            vjp_value up = values[LINEAR_Y];
            values[LINEAR_GATE] = gated->value[SWIGLU_GATE];
            values[LINEAR_Y] = gated->value[SWIGLU_Y];
            values[LINEAR_PRE] = u->reader[up] == taken[n] ? 0 : up;
        }
        graph_node *made = graph_add_node(graph, node->op, node->pass, node->name, values, node->attributes);
        ok = made != NULL;
        if (made) made->adds = node->adds;
    }
    return ok;
}

vjp_status graph_rewrite_swiglu(graph_rewriting *w) {
    graph_uses u;
    int32_t nodes = w->copy->nodes, *taken = malloc(((size_t)nodes + 1) * sizeof *taken);
    bool *dropped = calloc((size_t)nodes + 1, sizeof *dropped);
    bool ok = graph_uses_make(&u, w->copy) && taken && dropped;
    if (ok) {
        graph_node *old = graph_take_nodes(w->copy);
        graph_uses_find(&u, old, nodes, w->result, w->own_values);
        choose(&u, nodes, taken, dropped);
        ok = append_all(w->copy, &u, nodes, taken, dropped);
        graph_free_nodes(old, nodes);
    }
    graph_uses_free(&u);
    free(taken);
    free(dropped);
    return ok ? VJP_OK : vjp_fail(w->device, VJP_OUT_OF_MEMORY, "no memory to put swiglu into products");
}

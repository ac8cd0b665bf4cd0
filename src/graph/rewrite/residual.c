/* SPDX-License-Identifier: MIT */
/*
 * Sums in the product. Where the result of linear is only added to another value of its shape and dtype,
 *
 *     z = linear(a, b, bias)
 *     y = add(z, r)                becomes    y = linear(a, b, bias, r)
 *
 * and z is never written nor read: two passes less. y is rounded once instead of twice, so its bits are others. The
 * backward stays as it is: linear's does not read its result, and r's gradient is dy.
 *
 * The product stays where it is in the order of calls, so r must be there by then and not change before the sum. Where
 * both addends are products, the later one takes the sum.
 */
#include <stdlib.h>
#include <string.h>

#include "graph/rewrite/rewrite.h"
#include "op/op.h"

typedef struct summing {
    vjp_graph *graph;
    graph_uses uses;
    const graph_node *node; /* the old list */
    int32_t nodes;
    int32_t *sum;  /* [nodes]: of a product, the sum that it takes; GRAPH_NONE */
    bool *dropped; /* [nodes] */
} summing;

/* The product whose result z the sum at node n can be part of; GRAPH_NONE: there is none. */
static int32_t product_of(const summing *s, int32_t n, vjp_value z, vjp_value r) {
    vjp_value y = s->node[n].value[ADD_Y];
    if (!graph_is_plain(&s->uses, z) || s->uses.reader[z] != n || !graph_is_alike(&s->uses, z, y) ||
        !graph_is_alike(&s->uses, r, y))
        return GRAPH_NONE;
    int32_t m = s->uses.maker[z];
    const graph_node *product = &s->node[m];
    if (product->op != &vjp_op_linear || product->pass != VJP_FORWARD || product->value[LINEAR_Y] != z)
        return GRAPH_NONE;
    if (product->value[LINEAR_RESIDUAL] || product->value[LINEAR_GATE] || s->sum[m] != GRAPH_NONE) return GRAPH_NONE;
    /* r is complete before the product, and does not change until the sum. */
    return graph_is_there(&s->uses, r, m) ? m : GRAPH_NONE;
}

static void choose(summing *s) {
    for (int32_t n = 0; n < s->nodes; n++) {
        const graph_node *node = &s->node[n];
        if (node->op != &vjp_op_add || node->pass != VJP_FORWARD || !graph_is_plain(&s->uses, node->value[ADD_Y]))
            continue;
        int32_t m = product_of(s, n, node->value[ADD_A], node->value[ADD_B]);
        if (m == GRAPH_NONE) m = product_of(s, n, node->value[ADD_B], node->value[ADD_A]);
        if (m == GRAPH_NONE) continue;
        s->sum[m] = n;
        s->dropped[n] = true;
    }
}

static bool append_all(summing *s) {
    bool ok = true;
    for (int32_t n = 0; n < s->nodes && ok; n++) {
        const graph_node *node = &s->node[n];
        if (s->dropped[n]) continue;
        vjp_value values[VJP_MAX_SLOTS];
        memcpy(values, node->value, sizeof values);
        if (s->sum[n] != GRAPH_NONE) {
            const graph_node *sum = &s->node[s->sum[n]];
            bool first = sum->value[ADD_A] == node->value[LINEAR_Y];
            values[LINEAR_RESIDUAL] = sum->value[first ? ADD_B : ADD_A];
            values[LINEAR_Y] = sum->value[ADD_Y];
        }
        graph_node *made = graph_add_node(s->graph, node->op, node->pass, node->name, values, node->attributes);
        ok = made != NULL;
        if (made) made->adds = node->adds;
    }
    return ok;
}

vjp_status graph_rewrite_residual(graph_rewriting *w) {
    summing s = {.graph = w->copy, .nodes = w->copy->nodes};
    size_t nodes = (size_t)w->copy->nodes + 1;
    s.sum = malloc(nodes * sizeof *s.sum);
    s.dropped = calloc(nodes, sizeof *s.dropped);
    bool ok = graph_uses_make(&s.uses, w->copy) && s.sum && s.dropped;
    if (ok) {
        for (size_t n = 0; n < nodes; n++)
            s.sum[n] = GRAPH_NONE;
        graph_node *old = graph_take_nodes(w->copy);
        s.node = old;
        graph_uses_find(&s.uses, old, s.nodes, w->result, w->own_values);
        choose(&s);
        ok = append_all(&s);
        graph_free_nodes(old, s.nodes);
    }
    graph_uses_free(&s.uses);
    free(s.sum);
    free(s.dropped);
    return ok ? VJP_OK : vjp_fail(w->device, VJP_OUT_OF_MEMORY, "no memory to put sums into products");
}

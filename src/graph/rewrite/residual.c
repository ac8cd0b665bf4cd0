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

enum { NONE = -1, OTHER = -2 };

typedef struct summing {
    vjp_graph *graph;
    const graph_node *node; /* the old list */
    int32_t nodes;
    int32_t *maker;  /* [values]: of storages, the one node that writes them; NONE; OTHER: several */
    int32_t *reader; /* [values]: of storages, the one slot of a node that reads them; NONE; OTHER: several */
    int32_t *last;   /* [values]: of storages, the last node that writes them; NONE */
    int32_t *sum;    /* [nodes]: of a product, the sum that it takes; NONE */
    bool *dropped;   /* [nodes] */
} summing;

static const vjp_pass_info *pass_of(const graph_node *node) {
    return &node->op->info.pass[node->pass];
}

static void find_uses(summing *s, const bool *result, int32_t own_values) {
    for (vjp_value v = 0; v < s->graph->values; v++)
        s->maker[v] = s->reader[v] = s->last[v] = NONE;
    for (int32_t n = 0; n < s->nodes; n++)
        for (size_t i = 0; i < pass_of(&s->node[n])->count; i++) {
            if (!s->node[n].value[i]) continue;
            vjp_value storage = graph_storage(s->graph, s->node[n].value[i]);
            bool writes = i < pass_of(&s->node[n])->outputs;
            int32_t *one = writes ? &s->maker[storage] : &s->reader[storage];
            *one = *one == NONE ? n : OTHER;
            if (writes) s->last[storage] = n;
        }
    for (vjp_value v = 1; v < own_values; v++)
        if (result[v]) s->reader[graph_storage(s->graph, v)] = OTHER;
}

/* Whether a value is a whole one, computed by one node that adds to nothing. */
static bool is_plain(const summing *s, vjp_value v) {
    const graph_value *value = &s->graph->value[v];
    return value->role == GRAPH_COMPUTED && value->storage == v && s->maker[v] >= 0 && !s->node[s->maker[v]].adds;
}

static bool is_alike(const summing *s, vjp_value a, vjp_value b) {
    const graph_value *x = &s->graph->value[a], *y = &s->graph->value[b];
    return x->dtype == y->dtype && x->shape.ndim == y->shape.ndim &&
           memcmp(x->shape.size, y->shape.size, (size_t)x->shape.ndim * sizeof x->shape.size[0]) == 0;
}

/* The product whose result z the sum at node n can be part of; NONE: there is none. */
static int32_t product_of(const summing *s, int32_t n, vjp_value z, vjp_value r) {
    vjp_value y = s->node[n].value[ADD_Y];
    if (!is_plain(s, z) || s->reader[z] != n || !is_alike(s, z, y) || !is_alike(s, r, y)) return NONE;
    int32_t m = s->maker[z];
    const graph_node *product = &s->node[m];
    if (product->op != &vjp_op_linear || product->pass != VJP_FORWARD || product->value[LINEAR_Y] != z) return NONE;
    if (product->value[LINEAR_RESIDUAL] || s->sum[m] != NONE) return NONE;
    /* r is complete before the product, and does not change until the sum. */
    return s->last[graph_storage(s->graph, r)] < m ? m : NONE;
}

static void choose(summing *s) {
    for (int32_t n = 0; n < s->nodes; n++) {
        const graph_node *node = &s->node[n];
        if (node->op != &vjp_op_add || node->pass != VJP_FORWARD || !is_plain(s, node->value[ADD_Y])) continue;
        int32_t m = product_of(s, n, node->value[ADD_A], node->value[ADD_B]);
        if (m == NONE) m = product_of(s, n, node->value[ADD_B], node->value[ADD_A]);
        if (m == NONE) continue;
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
        if (s->sum[n] != NONE) {
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

vjp_status graph_rewrite_residual(vjp_device *device, vjp_graph *copy, const bool *result, int32_t own_values) {
    summing s = {.graph = copy, .nodes = copy->nodes};
    size_t values = (size_t)copy->values, nodes = (size_t)copy->nodes + 1;
    s.maker = malloc(3 * values * sizeof *s.maker);
    s.sum = malloc(nodes * sizeof *s.sum);
    s.dropped = calloc(nodes, sizeof *s.dropped);
    bool ok = s.maker && s.sum && s.dropped;
    if (ok) {
        s.reader = s.maker + values;
        s.last = s.reader + values;
        for (size_t n = 0; n < nodes; n++)
            s.sum[n] = NONE;
        graph_node *old = graph_take_nodes(copy);
        s.node = old;
        find_uses(&s, result, own_values);
        choose(&s);
        ok = append_all(&s);
        graph_free_nodes(old, s.nodes);
    }
    free(s.maker);
    free(s.sum);
    free(s.dropped);
    return ok ? VJP_OK : vjp_fail(device, VJP_OUT_OF_MEMORY, "no memory to put sums into products");
}

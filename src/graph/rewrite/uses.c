/* SPDX-License-Identifier: MIT */
/* Which nodes write and read each value, for the rewrites that put one node into another; and the bytes alive. */
#include <stdlib.h>
#include <string.h>

#include "graph/rewrite/rewrite.h"

bool graph_uses_make(graph_uses *u, const vjp_graph *graph) {
    size_t values = (size_t)graph->values;
    *u = (graph_uses){.graph = graph, .maker = malloc(3 * values * sizeof *u->maker)};
    if (!u->maker) return false;
    u->reader = u->maker + values;
    u->last = u->reader + values;
    return true;
}

void graph_uses_find(graph_uses *u, const graph_node *node, int32_t nodes, const bool *result, int32_t own_values) {
    u->node = node;
    for (vjp_value v = 0; v < u->graph->values; v++)
        u->maker[v] = u->reader[v] = u->last[v] = GRAPH_NONE;
    for (int32_t n = 0; n < nodes; n++) {
        const vjp_pass_info *pass = &node[n].op->info.pass[node[n].pass];
        for (size_t i = 0; i < pass->count; i++) {
            if (!node[n].value[i]) continue;
            vjp_value storage = graph_storage(u->graph, node[n].value[i]);
            bool writes = i < pass->outputs;
            int32_t *one = writes ? &u->maker[storage] : &u->reader[storage];
            *one = *one == GRAPH_NONE ? n : GRAPH_SEVERAL;
            if (writes) u->last[storage] = n;
        }
    }
    for (vjp_value v = 1; v < own_values; v++)
        if (result[v]) u->reader[graph_storage(u->graph, v)] = GRAPH_SEVERAL;
}

void graph_uses_free(graph_uses *u) {
    free(u->maker);
}

void graph_find_live(const vjp_graph *graph, int32_t nodes, const int32_t *first, const int32_t *last, size_t *live) {
    memset(live, 0, ((size_t)nodes + 2) * sizeof *live);
    for (vjp_value v = 1; v < graph->values; v++) {
        if (first[v] == GRAPH_NONE || graph_is_persistent(graph->value[v].role)) continue;
        live[first[v]] += graph->value[v].bytes;
        live[last[v] + 1] -= graph->value[v].bytes; /* modulo 2^64 */
    }
    for (int32_t n = 1; n < nodes; n++)
        live[n] += live[n - 1];
}

bool graph_is_plain(const graph_uses *u, vjp_value v) {
    const graph_value *value = &u->graph->value[v];
    return value->role == GRAPH_COMPUTED && value->storage == v && u->maker[v] >= 0 && !u->node[u->maker[v]].adds;
}

bool graph_is_alike(const graph_uses *u, vjp_value a, vjp_value b) {
    const graph_value *x = &u->graph->value[a], *y = &u->graph->value[b];
    return x->dtype == y->dtype && x->shape.ndim == y->shape.ndim &&
           memcmp(x->shape.size, y->shape.size, (size_t)x->shape.ndim * sizeof x->shape.size[0]) == 0;
}

bool graph_is_there(const graph_uses *u, vjp_value v, int32_t node) {
    return u->last[graph_storage(u->graph, v)] < node;
}

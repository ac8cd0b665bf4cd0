/* SPDX-License-Identifier: MIT */
/*
 * The nodes and values that a program's results need, found from the results backwards.
 *
 * Where a needed node can compute the outputs of another one too (graph.h: `also`), and nothing in between uses them or
 * changes what both read, the other node is left out. So a step of training with linear_cross_entropy consists of its
 * backward alone, three products instead of four.
 */
#include <stdlib.h>

#include "graph/graph.h"

typedef struct search {
    const vjp_graph *graph;
    bool *needed;
    int32_t *maker;  /* [values] */
    int32_t *makers; /* [count]: nodes that compute values of others */
    int32_t count;
} search;

static const vjp_pass_info *pass_of(const graph_node *node) {
    return &node->op->info.pass[node->pass];
}

static bool is_also(const graph_node *node, size_t slot) {
    return node->also >> slot & 1;
}

/* Whether a value is what its own node assigned to it, in memory of its own. */
static bool is_plain(const search *s, vjp_value v) {
    const graph_value *value = &s->graph->value[v];
    return value->role == GRAPH_COMPUTED && value->storage == v &&
           !(s->graph->node[value->node].adds >> value->slot & 1);
}

/* Node n is needed. What it can compute in place of another node, and what is needed, it does. */
static void make_also(search *s, int32_t n) {
    const graph_node *node = &s->graph->node[n];
    bool any = false;
    for (size_t i = 0; i < pass_of(node)->outputs; i++) {
        vjp_value v = node->value[i];
        if (!is_also(node, i) || !s->needed[v] || s->maker[v] >= 0 || !is_plain(s, v)) continue;
        s->maker[v] = n;
        any = true;
    }
    if (any) s->makers[s->count++] = n;
}

/* Whether node m uses value v or changes what v's own node reads: then v cannot be computed after m. */
static bool disturbs(const search *s, int32_t m, vjp_value v) {
    const graph_node *between = &s->graph->node[m], *own = &s->graph->node[s->graph->value[v].node];
    for (size_t i = 0; i < pass_of(between)->count; i++) {
        if (!between->value[i] || is_also(between, i)) continue;
        vjp_value storage = graph_storage(s->graph, between->value[i]);
        if (storage == v) return true;
        for (size_t j = pass_of(own)->outputs; j < pass_of(own)->count && i < pass_of(between)->outputs; j++)
            if (own->value[j] && graph_storage(s->graph, own->value[j]) == storage) return true;
    }
    return false;
}

/* Node m is needed: values that it must find are computed by their own nodes after all. */
static void keep_order(search *s, int32_t m) {
    for (int32_t k = 0; k < s->count; k++) {
        int32_t n = s->makers[k];
        const graph_node *node = &s->graph->node[n];
        for (size_t i = 0; i < pass_of(node)->outputs; i++) {
            vjp_value v = node->value[i];
            if (!is_also(node, i) || s->maker[v] != n || m <= s->graph->value[v].node) continue;
            if (disturbs(s, m, v)) s->maker[v] = -1;
        }
    }
}

bool graph_computes(const vjp_graph *graph, const int32_t *maker, int32_t n, size_t slot) {
    const graph_node *node = &graph->node[n];
    vjp_value v = node->value[slot];
    if (is_also(node, slot)) return maker[v] == n;
    return maker[v] < 0 || graph->value[v].node != n;
}

bool graph_find_needed(const vjp_graph *graph, const vjp_value *results, size_t count, bool *needed, bool *result,
                       int32_t *maker, int32_t *node_list, int32_t *nodes) {
    bool *wanted = calloc((size_t)graph->nodes + 1, sizeof *wanted);
    search s = {.graph = graph,
                .needed = needed,
                .maker = maker,
                .makers = malloc(((size_t)graph->nodes + 1) * sizeof *s.makers)};
    bool ok = wanted && s.makers;
    for (size_t i = 0; i < count; i++)
        needed[graph->value[results[i]].origin] = result[graph->value[results[i]].origin] = true;
    for (vjp_value v = 0; v < graph->values; v++)
        maker[v] = -1;
    for (int32_t n = graph->nodes - 1; n >= 0 && ok; n--) {
        const graph_node *node = &graph->node[n];
        const vjp_pass_info *pass = pass_of(node);
        for (size_t i = 0; i < pass->outputs; i++)
            wanted[n] = wanted[n] || (node->value[i] && !is_also(node, i) && graph_computes(graph, maker, n, i) &&
                                      needed[graph->value[node->value[i]].origin]);
        if (!wanted[n]) continue;
        /* Its inputs, and what it assigns: a step that moves a weight moves its moments, too. */
        for (size_t i = 0; i < pass->count; i++) {
            vjp_value value = node->value[i];
            if (!value) continue;
            if (i >= pass->outputs || graph_is_persistent(graph->value[graph_storage(graph, value)].role))
                needed[graph->value[value].origin] = true;
        }
        keep_order(&s, n);
        if (node->also) make_also(&s, n);
    }
    *nodes = 0;
    for (int32_t n = 0; n < graph->nodes && ok; n++)
        if (wanted[n]) node_list[(*nodes)++] = n;
    free(wanted);
    free(s.makers);
    return ok;
}

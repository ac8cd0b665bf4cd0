/* SPDX-License-Identifier: MIT */
/* The nodes and values that a program's results need, found from the results backwards. */
#include <stdlib.h>

#include "graph/graph.h"

bool graph_find_needed(const vjp_graph *graph, const vjp_value *results, size_t count, bool *needed, bool *result,
                       int32_t *node_list, int32_t *nodes) {
    for (size_t i = 0; i < count; i++)
        needed[graph->value[results[i]].origin] = result[graph->value[results[i]].origin] = true;
    bool *wanted = calloc((size_t)graph->nodes + 1, sizeof *wanted);
    if (!wanted) return false;
    for (int32_t n = graph->nodes - 1; n >= 0; n--) {
        const graph_node *node = &graph->node[n];
        const vjp_pass_info *pass = &node->op->info.pass[node->pass];
        for (size_t i = 0; i < pass->outputs; i++)
            wanted[n] = wanted[n] || (node->value[i] && needed[graph->value[node->value[i]].origin]);
        /* Its inputs, and what it assigns: a step that moves a weight moves its moments, too. */
        for (size_t i = 0; i < pass->count && wanted[n]; i++) {
            vjp_value value = node->value[i];
            if (!value) continue;
            if (i >= pass->outputs || graph_is_persistent(graph->value[graph_storage(graph, value)].role))
                needed[graph->value[value].origin] = true;
        }
    }
    *nodes = 0;
    for (int32_t n = 0; n < graph->nodes; n++)
        if (wanted[n]) node_list[(*nodes)++] = n;
    free(wanted);
    return true;
}

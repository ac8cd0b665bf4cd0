/* SPDX-License-Identifier: MIT */
/* Muon's step, for vjp_graph_minimize(). */
#ifndef VJP_GRAPH_MINIMIZE_H
#define VJP_GRAPH_MINIMIZE_H

#include <stdbool.h>

#include "vjp.h"

typedef struct graph_muon_step {
    vjp_value w, momentum, g, lr; /* w has two axes; momentum is a state of its shape */
    vjp_value scale;              /* multiplies g, and suppresses the step where it is not finite; 0: absent */
    double weight_decay;
} graph_muon_step;

/* Whether the options are valid; otherwise the graph has failed. */
bool graph_check_muon(vjp_graph *graph, const vjp_muon_options *options);

/* The new w. */
vjp_value graph_muon(vjp_graph *graph, const graph_muon_step *step, const vjp_muon_options *options);

#endif

/* SPDX-License-Identifier: MIT */
/*
 * Rewrites: changes to a graph that make its program smaller or faster and keep its results, most of them to the bit.
 * Each is one file and one row of the list in rewrite.c. They work on a copy of the graph, made for one program: the
 * caller's graph stays as it is, and the caller's values keep their numbers. docs/graph.md has a table of what each
 * gains.
 *
 * Some are on by default where the device has memory of its own. The environment variable VJP_REWRITES switches them by
 * name, for tests and timing: "-recompute", "+recompute", several separated by commas; "-all" and "+all" for every one.
 */
#ifndef VJP_GRAPH_REWRITE_H
#define VJP_GRAPH_REWRITE_H

#include "graph/graph.h"

/* What a rewrite changes: a copy of a graph, whose nodes are all needed. */
typedef struct graph_rewriting {
    vjp_device *device;
    vjp_graph *copy;
    const bool *result; /* [own_values]: of the caller's values, which are first */
    int32_t own_values;
    size_t live_limit; /* recompute no more than it takes to have so few bytes alive at once; 0: all that pays */
    bool all;          /* all that pays is recomputed */
} graph_rewriting;

typedef struct graph_rewrite {
    const char *name;
    bool on_host, on_devices;                /* by default, where the memory is the host's, and elsewhere */
    bool for_limit;                          /* by default for every program with a limit of memory */
    bool (*gains)(const vjp_device *device); /* whether it is on by default there; NULL: it is */
    bool rounds;                             /* elsewhere than the graph does: other bits */
    bool on_request;                         /* only where the program's options ask for it */
    vjp_status (*apply)(graph_rewriting *w); /* NULL: the graph stays as it is, but two of its calls may run as one */
} graph_rewrite;

/* The graph that a program is compiled from. */
typedef struct graph_rewritten {
    vjp_graph *graph;    /* a copy, to be freed with graph_rewritten_free(); NULL: no rewrite is on */
    bool pairs;          /* calls may run in pairs */
    bool recomputes_all; /* all that pays, or there is no such rewrite: a lower limit changes nothing */
} graph_rewritten;

/*
 * Rewrites the graph of a program with these results. An unplanned program has only the rewrites that change bits, so
 * that it has the bits of the planned one. live_limit: as graph_rewriting has it.
 */
vjp_status graph_rewrite_all(vjp_device *device, const vjp_graph *graph, const vjp_value *results, size_t count,
                             const vjp_program_options *options, size_t live_limit, graph_rewritten *rewritten);
void graph_rewritten_free(vjp_graph *rewritten);

/*
 * For a rewrite that appends all nodes anew: empties the copy's list and returns the old one, to be freed with
 * graph_free_nodes().
 */
graph_node *graph_take_nodes(vjp_graph *copy);
void graph_free_nodes(graph_node *old, int32_t nodes);

/* Of each value's storage, the nodes that use it. */
enum { GRAPH_NONE = -1, GRAPH_SEVERAL = -2 };

typedef struct graph_uses {
    const vjp_graph *graph;
    const graph_node *node;
    int32_t *maker;  /* [values]: the one node that writes it; GRAPH_NONE; GRAPH_SEVERAL */
    int32_t *reader; /* [values]: the one node that reads it, in one slot; a result is read by several */
    int32_t *last;   /* [values]: the last node that writes it; GRAPH_NONE */
} graph_uses;

/* False: no memory. graph_uses_free() may follow either way. */
bool graph_uses_make(graph_uses *u, const vjp_graph *graph);
void graph_uses_find(graph_uses *u, const graph_node *node, int32_t nodes, const bool *result, int32_t own_values);
void graph_uses_free(graph_uses *u);

/*
 * The bytes of computed values that are alive at each of the graph's nodes, which may be taken out, by the first and
 * the last of them that use each storage (first GRAPH_NONE: no memory is needed). `live` has two elements more.
 */
void graph_find_live(const vjp_graph *graph, int32_t nodes, const int32_t *first, const int32_t *last, size_t *live);

/* Whether a value is a whole one, computed by one node that adds to nothing. */
bool graph_is_plain(const graph_uses *u, vjp_value v);

/* Whether two values have the same dtype and shape. */
bool graph_is_alike(const graph_uses *u, vjp_value a, vjp_value b);

/* Whether a value is complete before this node, and does not change from there on. */
bool graph_is_there(const graph_uses *u, vjp_value v, int32_t node);

/* What is only added to the result of a product is added by the product. */
vjp_status graph_rewrite_residual(graph_rewriting *w);

/* Queries, keys and values are one product. */
vjp_status graph_rewrite_qkv(graph_rewriting *w);

/* Weights that are only cast and stepped lie in halves, one of which is what the cast would give. */
vjp_status graph_rewrite_halves(graph_rewriting *w);

/* Values that are cheap to compute again are not kept until the backward. */
vjp_status graph_rewrite_recompute(graph_rewriting *w);

/* What is computed again is computed by the op's backward on its way, where that can give it. */
vjp_status graph_rewrite_combine(graph_rewriting *w);

/* swiglu is a part of the product that computes its up. */
vjp_status graph_rewrite_swiglu(graph_rewriting *w);

#endif

/* SPDX-License-Identifier: MIT */
/*
 * What compiling knows about a graph, for the files that do it: compile.c, group.c for the order of the calls, and
 * offload.c for what waits in the host's memory.
 */
#ifndef VJP_GRAPH_COMPILE_H
#define VJP_GRAPH_COMPILE_H

#include "graph/program.h"
#include "graph/rewrite/rewrite.h"

/*
 * An intermediate that waits in the host's memory. Each number is a call before which something happens: the copy out
 * begins, it has ended, the copy back begins, it has ended.
 */
typedef struct offloaded {
    vjp_value storage;
    int32_t out, freed, fetched, back;
    int32_t range; /* its second place in the plan */
} offloaded;

typedef struct compilation {
    vjp_device *device;
    const vjp_graph *given;    /* the caller's */
    graph_rewritten rewritten; /* its copy */
    const vjp_graph *graph;    /* the one of both that is compiled */
    vjp_program *program;
    bool *needed;          /* [values]: by a call or as a result; of values that are no views */
    bool *result;          /* [values] */
    int32_t *maker;        /* [values]: the node that computes it in place of its own; -1: its own */
    int32_t *call_node;    /* [calls]: the node of each call */
    int32_t *first, *last; /* [values]: calls, of storages; first -1: never written here */
    vjp_value *merged;     /* [values]: the storage that a storage took over, or itself */
    int32_t *range;        /* [values]: of a storage in the plan; -1: persistent or unused */
    size_t *scratch;       /* [calls] */
    plan_range *plan;
    int32_t ranges;
    size_t arena_bytes;
    offloaded *away; /* [aways] */
    int32_t aways;
    int32_t *away_of;  /* [values]: of a storage, its place in that list; -1: it stays */
    int32_t resolving; /* the call whose tensors are looked for */
    const vjp_program_options *options;
} compilation;

static inline bool is_persistent(const compilation *c, vjp_value storage) {
    return graph_is_persistent(c->graph->value[storage].role);
}

static inline const vjp_pass_info *pass_of(const graph_node *node) {
    return &node->op->info.pass[node->pass];
}

static inline const graph_node *node_of(const compilation *c, int32_t call) {
    return &c->graph->node[c->call_node[call]];
}

/* The value of a slot, 0 where nothing needs it or another node computes it. */
static inline vjp_value slot_value(const compilation *c, const graph_node *node, size_t slot) {
    vjp_value value = node->value[slot];
    if (!value || !c->needed[c->graph->value[value].origin]) return 0;
    bool output = slot < pass_of(node)->outputs;
    return !output || graph_computes(c->graph, c->maker, (int32_t)(node - c->graph->node), slot) ? value : 0;
}

/* The owner of a value's memory, after storages have taken over others. */
vjp_value merged_storage(const compilation *c, vjp_value value);

/* Whether a call reads from this storage. */
bool call_reads(const compilation *c, const graph_node *node, vjp_value storage);

/*
 * Group.c, in this order, when the needed calls are known. Each returns false when memory ran out.
 *
 * drop_copies() needs the lives of storages; it leaves out calls that only copy an intermediate into a state, by
 * letting the intermediate be made in the state, and returns how many it left out. order_calls() moves calls that the
 * device can merge next to each other. find_groups() fills program->group.
 */
int32_t drop_copies(compilation *c);
bool order_calls(compilation *c);
bool find_groups(compilation *c);

/*
 * Offload.c: fills c->away so that no more than `limit` bytes are in use at once, or as few as copies beside the calls
 * allow. Copies have `spare` more time than estimated, as a share of the run. False: memory ran out. When the plan is
 * made and the arena is there, make_moves() lists the program's copies.
 */
bool choose_offloaded(compilation *c, size_t limit, double spare);
vjp_status make_moves(compilation *c);

#endif

/*
 * A graph inside: values and nodes in the order in which they were built, which is the order in which they run.
 *
 * A value lies in a storage, named by the value that made it: a reshape, and an output that a state is assigned, lie
 * where another value does. A node writes its outputs, with += where `adds` has the slot's bit, so a gradient that
 * several nodes contribute to is one value with several writers.
 */
#ifndef VJP_GRAPH_H
#define VJP_GRAPH_H

#include <stdbool.h>

#include "core/core.h"

typedef enum graph_role {
    GRAPH_INPUT,
    GRAPH_PARAMETER,
    GRAPH_STATE,
    GRAPH_CONSTANT,
    GRAPH_COMPUTED, /* by a node */
    GRAPH_VIEW      /* of another value */
} graph_role;

typedef struct graph_value {
    graph_role role;
    char *name;
    vjp_dtype dtype;
    vjp_shape shape;
    size_t bytes;
    vjp_value origin;  /* of a view: what it shows; else itself */
    vjp_value storage; /* whose memory it lies in: itself, or the state that it is assigned to */
    int32_t node;      /* that wrote it first; -1: none */
    int32_t slot;
    void *data; /* of a constant */
} graph_value;

typedef struct graph_node {
    const vjp_op *op;
    vjp_pass pass;
    char *name;
    vjp_value value[VJP_MAX_SLOTS]; /* 0: absent */
    uint32_t adds;                  /* outputs that are added to */
    int32_t block;                  /* of nodes that the backward computes again; 0: none */
    int64_t attributes[VJP_MAX_ATTRIBUTE_BYTES / 8];
} graph_node;

enum { GRAPH_SCOPE_BYTES = 256, GRAPH_MOST_SCOPES = 16 };

struct vjp_graph {
    graph_value *value; /* [0] is nobody */
    int32_t values, value_room;
    graph_node *node;
    int32_t nodes, node_room;
    char scope[GRAPH_SCOPE_BYTES];
    int scopes, scope_end[GRAPH_MOST_SCOPES];
    int32_t block, blocks;
    vjp_status status;
    vjp_device *rules; /* a device without kernels: what the ops' shape rules report to */
};

/* Keeps the first mistake. `node` names where; NULL: nowhere in particular. Returns 0, a value's absence. */
vjp_value graph_fail(vjp_graph *graph, vjp_status status, const char *node, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* False: the graph has failed already, or there is no such value. */
bool graph_is(vjp_graph *graph, vjp_value value, const char *what);

/* vjp_graph_call() where the op leaves the dtype of its first output to the caller. */
vjp_value graph_call_as(vjp_graph *graph, const vjp_op *op, const vjp_value *inputs, size_t count,
                        const void *attributes, vjp_dtype dtype);

vjp_value graph_add_value(vjp_graph *graph, graph_role role, const char *name, vjp_dtype dtype, const vjp_shape *shape);

/* Adds a node; value[] as in graph_node, outputs given or 0. NULL: memory ran out, and the graph has failed. */
graph_node *graph_add_node(vjp_graph *graph, const vjp_op *op, vjp_pass pass, const char *name, const vjp_value *values,
                           const void *attributes);

/* The same elements under another shape. */
vjp_value graph_add_view(vjp_graph *graph, vjp_value value, const vjp_shape *shape);

/* Whose memory a value lies in. */
static inline vjp_value graph_storage(const vjp_graph *graph, vjp_value value) {
    return graph->value[graph->value[value].origin].storage;
}

vjp_tensor graph_tensor(const vjp_graph *graph, vjp_value value);

/* The slot of that name in a pass, or -1. */
int graph_slot(const vjp_pass_info *pass, const char *name);

static inline bool graph_is_persistent(graph_role role) {
    return role == GRAPH_INPUT || role == GRAPH_PARAMETER || role == GRAPH_STATE || role == GRAPH_CONSTANT;
}

/* ---- Plans ------------------------------------------------------------------------------------------- */

/* A range of memory that is needed from call `first` to call `last`, both included. */
typedef struct plan_range {
    size_t bytes, offset;
    int32_t first, last;
} plan_range;

enum { PLAN_ALIGNMENT = 256 };

/* Gives every range its offset so that ranges alive together do not overlap. Returns the arena's size. False: no
 * memory. */
bool plan_arena(plan_range *range, int32_t count, size_t *arena_bytes);

/* The most bytes alive at one moment. */
size_t plan_live_bytes(const plan_range *range, int32_t count);

/* The first two ranges that are alive together and overlap; false: none do. */
bool plan_find_overlap(const plan_range *range, int32_t count, int32_t *one, int32_t *other);

#endif

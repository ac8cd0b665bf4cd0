/* SPDX-License-Identifier: MIT */
/*
 * The inside of a graph: values and nodes in the order in which they were built, which is the order in which they run.
 *
 * A value has a storage, named by the value that owns that memory: a reshape, and an output that is assigned to a
 * state, share the storage of another value. A node writes its outputs, with += where `adds` has the slot's bit, so a
 * gradient that several nodes contribute to is one value with several writers.
 *
 * A view may be a slice, a part of its origin (rewrite/qkv.c makes them): it begins at `offset`, and is packed or,
 * where `row` is not 0, has rows of that many elements that lie `step` elements apart. Slices of one value that are not
 * the same do not overlap, and each may have its own writers.
 *
 * Some backward passes compute outputs of their forward on the way (linear_cross_entropy's loss). Such a node lists
 * them among its own, with a bit in `also`. A program that needs the backward anyway then leaves the forward out
 * (needed.c).
 */
#ifndef VJP_GRAPH_H
#define VJP_GRAPH_H

#include <stdbool.h>

#include "core/core.h"
#include "graph/names.h"

typedef enum graph_role {
    GRAPH_INPUT,
    GRAPH_PARAMETER,
    GRAPH_STATE,
    GRAPH_CONSTANT,
    GRAPH_COMPUTED, /* by a node */
    GRAPH_VIEW      /* of another value */
} graph_role;

/* How a parameter lies in memory (rewrite/halves.c). Either: it is not decided yet. */
typedef enum graph_halves { GRAPH_WHOLE, GRAPH_HALVES, GRAPH_EITHER } graph_halves;

typedef struct graph_value {
    graph_role role;
    graph_halves halves;
    char *name;
    vjp_dtype dtype;
    vjp_shape shape;
    size_t bytes;
    vjp_value origin;  /* a view's source; of any other value, itself */
    size_t offset;     /* of a slice in its origin, in bytes */
    int64_t row, step; /* of a slice whose rows lie apart, in elements; 0: packed */
    vjp_value storage; /* the owner of its memory: itself, or the state that it is assigned to */
    int32_t node;      /* the first that writes it; -1: none */
    int32_t slot;
    void *data; /* of a constant */
} graph_value;

typedef struct graph_node {
    const vjp_op *op;
    vjp_pass pass;
    char *name;
    vjp_value value[VJP_MAX_SLOTS]; /* 0: absent */
    uint32_t adds;                  /* a bit for each output that is added to */
    uint32_t also;                  /* a bit for each output that is another node's own, and could be made here too */
    int32_t block;                  /* its block of nodes that the backward computes again; 0: none */
    int64_t attributes[VJP_MAX_ATTRIBUTE_BYTES / 8];
} graph_node;

/* A list of values that the caller may keep as long as the graph. */
typedef struct graph_list {
    struct graph_list *next;
    vjp_value value[];
} graph_list;

enum { GRAPH_SCOPE_BYTES = 256, GRAPH_MAX_SCOPES = 16, GRAPH_MAX_ITEMS = 1 << 30 /* values, and nodes */ };

struct vjp_graph {
    uint64_t id;        /* no other graph of this process has it, nor had one that is gone */
    graph_value *value; /* [0] is unused */
    int32_t values, value_room;
    graph_node *node;
    int32_t nodes, node_room;
    graph_names value_names; /* of inputs, parameters, states and constants: the value */
    graph_names node_names;  /* the suffix of the next node of that name */
    char scope[GRAPH_SCOPE_BYTES];
    int scopes, scope_end[GRAPH_MAX_SCOPES];
    int32_t block, blocks;
    graph_list *lists;
    vjp_status status;
    vjp_device *rules; /* a device without kernels, for the sentences of the ops' shape rules */
};

/* Keeps the first mistake. `node` is the name it begins with; NULL: none. Returns 0, the absent value. */
vjp_value graph_fail(vjp_graph *graph, vjp_status status, const char *node, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* False: the graph has failed already, or it has no such value. */
bool graph_is(vjp_graph *graph, vjp_value value, const char *what);

/*
 * vjp_graph_grad() whose gradients of f32 values are of `dtype` where the value is only ever cast to that dtype, as
 * weights are: then no pass and no memory is spent on their gradients in f32.
 */
vjp_status graph_grad_as(vjp_graph *graph, vjp_value scalar, const vjp_value *wrt, size_t count, vjp_dtype dtype,
                         vjp_value *gradients);

/* vjp_graph_call() where the op leaves the dtype of its first output to the caller. */
vjp_value graph_call_as(vjp_graph *graph, const vjp_op *op, const vjp_value *inputs, size_t count,
                        const void *attributes, vjp_dtype dtype);

vjp_value graph_add_value(vjp_graph *graph, graph_role role, const char *name, vjp_dtype dtype, const vjp_shape *shape);

/* Adds a node; `values` as in graph_node. NULL: memory ran out, and the graph has failed. */
graph_node *graph_add_node(vjp_graph *graph, const vjp_op *op, vjp_pass pass, const char *name, const vjp_value *values,
                           const void *attributes);

/* Whether a value is a part of its origin. */
static inline bool graph_is_slice(const vjp_graph *graph, vjp_value value) {
    return graph->value[value].bytes != graph->value[graph->value[value].origin].bytes;
}

/* The same elements under another shape. */
vjp_value graph_add_view(vjp_graph *graph, vjp_value value, const vjp_shape *shape);

/* The owner of a value's memory. */
static inline vjp_value graph_storage(const vjp_graph *graph, vjp_value value) {
    return graph->value[graph->value[value].origin].storage;
}

vjp_tensor graph_tensor(const vjp_graph *graph, vjp_value value);

/* The slot of that name in a pass, or -1. */
int graph_slot(const vjp_pass_info *pass, const char *name);

static inline bool graph_is_float(vjp_dtype dtype) {
    return dtype == VJP_F32 || dtype == VJP_BF16 || dtype == VJP_F16 || dtype == VJP_F64;
}

static inline bool graph_is_persistent(graph_role role) {
    return role == GRAPH_INPUT || role == GRAPH_PARAMETER || role == GRAPH_STATE || role == GRAPH_CONSTANT;
}

/*
 * Marks the values that the results need, and the results themselves, both of values that are no views, and lists the
 * nodes that make them in their order. The flags are false at first. maker[v] is the node that computes v in place of
 * its own, or -1. False: no memory.
 */
bool graph_find_needed(const vjp_graph *graph, const vjp_value *results, size_t count, bool *needed, bool *result,
                       int32_t *maker, int32_t *node_list, int32_t *nodes);

/* Whether node n computes an output: its own, unless another node does; another node's, if it was chosen. */
bool graph_computes(const vjp_graph *graph, const int32_t *maker, int32_t n, size_t slot);

/* ---- Plans ------------------------------------------------------------------------------------------- */

/* A range of memory that is needed from call `first` to call `last`, both included. */
typedef struct plan_range {
    size_t bytes, offset;
    int32_t first, last;
} plan_range;

enum { PLAN_ALIGNMENT = 256 };

/* Whether the sum of all ranges, each aligned, fits size_t. The functions below need that. */
bool plan_sizes_fit(const plan_range *range, int32_t count);

/* Gives every range its offset so that ranges alive together do not overlap. False, here and below: out of memory. */
bool plan_arena(plan_range *range, int32_t count, size_t *arena_bytes);

/* The largest number of bytes alive at one moment. */
bool plan_live_bytes(const plan_range *range, int32_t count, size_t *live_bytes);

/* Two ranges that are alive together and overlap; both -1 when no two do. */
bool plan_find_overlap(const plan_range *range, int32_t count, int32_t pair[2]);

#endif

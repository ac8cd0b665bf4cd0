/* SPDX-License-Identifier: MIT */
/* Building a graph: values, nodes, names, and the first mistake. */
#include "graph/graph.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Shapes are inferred by the ops' own rules, which need a device to hold their sentences, and no kernel. */
static const vjp_backend rules = {.name = "graph", .host_memory = true};

vjp_graph *vjp_graph_create(void) {
    static atomic_uint_least64_t last_id;
    vjp_graph *graph = calloc(1, sizeof *graph);
    if (!graph) return NULL;
    graph->id = atomic_fetch_add(&last_id, 1) + 1;
    graph->value_room = 64;
    graph->value = calloc((size_t)graph->value_room, sizeof *graph->value);
    graph->values = 1;
    if (!graph->value || vjp_device_create("graph", &graph->rules) != VJP_OK) {
        vjp_graph_destroy(graph);
        return NULL;
    }
    graph->rules->backend = graph->rules->found = &rules;
    return graph;
}

void vjp_graph_destroy(vjp_graph *graph) {
    if (!graph) return;
    for (int32_t i = 0; i < graph->values && graph->value; i++) {
        free(graph->value[i].name);
        free(graph->value[i].data);
    }
    for (int32_t i = 0; i < graph->nodes; i++)
        free(graph->node[i].name);
    for (graph_list *list = graph->lists, *next; list; list = next) {
        next = list->next;
        free(list);
    }
    free(graph->value);
    free(graph->node);
    names_free(&graph->value_names);
    names_free(&graph->node_names);
    free(graph->rules); /* made by calloc() and never opened */
    free(graph);
}

/* ---- Mistakes ---------------------------------------------------------------------------------------- */

vjp_status vjp_graph_status(const vjp_graph *graph) {
    return graph ? graph->status : VJP_OUT_OF_MEMORY;
}

const char *vjp_graph_error(const vjp_graph *graph) {
    return graph ? graph->rules->error : "out of memory: there is no graph";
}

vjp_value graph_fail(vjp_graph *graph, vjp_status status, const char *node, const char *format, ...) {
    if (graph->status != VJP_OK) return 0;
    graph->status = status;
    char *error = graph->rules->error;
    int used = node ? snprintf(error, VJP_ERROR_BYTES, "%s: ", node) : 0;
    if (used >= VJP_ERROR_BYTES) return 0;
    va_list list;
    va_start(list, format);
    vsnprintf(error + used, VJP_ERROR_BYTES - (size_t)used, format, list);
    va_end(list);
    return 0;
}

static vjp_value out_of_memory(vjp_graph *graph) {
    return graph_fail(graph, VJP_OUT_OF_MEMORY, NULL, "out of memory while the graph was built");
}

bool graph_is(vjp_graph *graph, vjp_value value, const char *what) {
    if (!graph || graph->status != VJP_OK) return false;
    if (value >= 1 && value < graph->values) return true;
    graph_fail(graph, VJP_INVALID, graph->scope[0] ? graph->scope : NULL,
               "%s is %d, which is not a value of this graph", what, value);
    return false;
}

/* ---- Names ------------------------------------------------------------------------------------------- */

void vjp_graph_push(vjp_graph *graph, const char *name) {
    if (!graph || graph->status != VJP_OK) return;
    size_t used = strlen(graph->scope);
    if (graph->scopes == GRAPH_MAX_SCOPES || !name || used + strlen(name) + 2 > sizeof graph->scope) {
        graph_fail(graph, VJP_INVALID, graph->scope,
                   "the scope \"%s\" is one too many: %d may nest, their names %d bytes long", name ? name : "(NULL)",
                   GRAPH_MAX_SCOPES, GRAPH_SCOPE_BYTES);
        return;
    }
    graph->scope_end[graph->scopes++] = (int)used;
    snprintf(graph->scope + used, sizeof graph->scope - used, "%s%s", used ? "." : "", name);
}

void vjp_graph_pop(vjp_graph *graph) {
    if (!graph || graph->status != VJP_OK) return;
    if (graph->scopes == 0) {
        graph_fail(graph, VJP_INVALID, NULL, "vjp_graph_pop() without a vjp_graph_push()");
        return;
    }
    graph->scope[graph->scope_end[--graph->scopes]] = 0;
}

void vjp_graph_recompute_begin(vjp_graph *graph) {
    if (!graph || graph->status != VJP_OK) return;
    if (graph->block)
        graph_fail(graph, VJP_INVALID, graph->scope, "blocks to recompute do not nest");
    else
        graph->block = ++graph->blocks;
}

void vjp_graph_recompute_end(vjp_graph *graph) {
    if (!graph || graph->status != VJP_OK) return;
    if (!graph->block) graph_fail(graph, VJP_INVALID, graph->scope, "no block to recompute has begun");
    graph->block = 0;
}

const char *vjp_graph_name(const vjp_graph *graph, vjp_value value) {
    return graph && value >= 1 && value < graph->values ? graph->value[value].name : "";
}

/* ---- Values ------------------------------------------------------------------------------------------ */

static size_t bytes_of(vjp_dtype dtype, const vjp_shape *shape) {
    return (size_t)vjp_shape_product(shape, 0, shape->ndim) * vjp_dtype_size(dtype);
}

vjp_value graph_add_value(vjp_graph *graph, graph_role role, const char *name, vjp_dtype dtype,
                          const vjp_shape *shape) {
    if (graph->values == graph->value_room) {
        if (graph->values == GRAPH_MAX_ITEMS) return out_of_memory(graph);
        graph_value *more = realloc(graph->value, 2 * (size_t)graph->value_room * sizeof *more);
        if (!more) return out_of_memory(graph);
        graph->value = more;
        graph->value_room *= 2;
    }
    char *copy = strdup(name);
    if (!copy || (graph_is_persistent(role) && !names_add(&graph->value_names, copy, graph->values))) {
        free(copy);
        return out_of_memory(graph);
    }
    vjp_value value = graph->values++;
    graph->value[value] = (graph_value){.role = role,
                                        .name = copy,
                                        .dtype = dtype,
                                        .shape = *shape,
                                        .bytes = bytes_of(dtype, shape),
                                        .origin = value,
                                        .storage = value,
                                        .node = -1,
                                        .slot = -1};
    return value;
}

static vjp_value add_named(vjp_graph *graph, graph_role role, const char *name, vjp_dtype dtype, int ndim,
                           const int64_t *shape) {
    if (!graph || graph->status != VJP_OK) return 0;
    if (!name || !name[0])
        return graph_fail(graph, VJP_INVALID, graph->scope, "an input, parameter, state or constant without a name");
    if (names_find(&graph->value_names, name))
        return graph_fail(graph, VJP_INVALID, name, "there is a value of that name already");
    if (!vjp_dtype_size(dtype)) return graph_fail(graph, VJP_INVALID, name, "unknown dtype %d", (int)dtype);
    if (ndim < 0 || ndim > VJP_MAX_DIMS || (ndim && !shape))
        return graph_fail(graph, VJP_INVALID, name, "its rank is %d; ranks go from 0 to %d", ndim, VJP_MAX_DIMS);
    vjp_shape own = {.ndim = ndim};
    for (int i = 0; i < ndim; i++) {
        own.size[i] = shape[i];
        if (shape[i] < 0)
            return graph_fail(graph, VJP_INVALID, name, "its size on axis %d is %lld", i, (long long)shape[i]);
    }
    if (!vjp_sizes_fit(ndim, own.size))
        return graph_fail(graph, VJP_INVALID, name, "it is too large: the product of its %d sizes overflows", ndim);
    return graph_add_value(graph, role, name, dtype, &own);
}

vjp_value vjp_graph_input(vjp_graph *graph, const char *name, vjp_dtype dtype, int ndim, const int64_t *shape) {
    return add_named(graph, GRAPH_INPUT, name, dtype, ndim, shape);
}

vjp_value vjp_graph_parameter(vjp_graph *graph, const char *name, vjp_dtype dtype, int ndim, const int64_t *shape) {
    return add_named(graph, GRAPH_PARAMETER, name, dtype, ndim, shape);
}

vjp_value vjp_graph_state(vjp_graph *graph, const char *name, vjp_dtype dtype, int ndim, const int64_t *shape) {
    return add_named(graph, GRAPH_STATE, name, dtype, ndim, shape);
}

vjp_value vjp_graph_constant(vjp_graph *graph, const char *name, vjp_dtype dtype, int ndim, const int64_t *shape,
                             const void *data) {
    vjp_value value = add_named(graph, GRAPH_CONSTANT, name, dtype, ndim, shape);
    if (!value) return 0;
    graph_value *constant = &graph->value[value];
    if (!constant->bytes) return value;
    if (!data) return graph_fail(graph, VJP_INVALID, name, "a constant with elements needs data");
    constant->data = malloc(constant->bytes);
    if (!constant->data) return out_of_memory(graph);
    memcpy(constant->data, data, constant->bytes);
    return value;
}

vjp_value graph_add_view(vjp_graph *graph, vjp_value value, const vjp_shape *shape) {
    vjp_value origin = graph->value[value].origin;
    vjp_value view = graph_add_value(graph, GRAPH_VIEW, graph->value[origin].name, graph->value[origin].dtype, shape);
    if (!view) return 0;
    const graph_value *from = &graph->value[value];
    graph_value *own = &graph->value[view];
    own->origin = origin;
    own->offset = from->offset;
    own->row = from->row;
    own->step = from->step;
    return view;
}

vjp_value vjp_graph_reshape(vjp_graph *graph, vjp_value value, int ndim, const int64_t *shape) {
    if (!graph_is(graph, value, "the value to reshape")) return 0;
    const char *name = graph->value[value].name;
    const vjp_shape old = graph->value[value].shape;
    char text[VJP_SHAPE_TEXT];
    if (ndim < 0 || ndim > VJP_MAX_DIMS || (ndim && !shape))
        return graph_fail(graph, VJP_INVALID, name, "a reshape to rank %d; ranks go from 0 to %d", ndim, VJP_MAX_DIMS);
    vjp_shape new_shape = {.ndim = ndim};
    int64_t known = 1, total = vjp_shape_product(&old, 0, old.ndim);
    int open = -1;
    for (int i = 0; i < ndim; i++) {
        new_shape.size[i] = shape[i];
        if (shape[i] == -1 && open < 0)
            open = i;
        else if (shape[i] < 0 || __builtin_mul_overflow(known, shape[i], &known))
            return graph_fail(graph, VJP_INVALID, name, "a reshape to size %lld on axis %d", (long long)shape[i], i);
    }
    if (open >= 0) new_shape.size[open] = known > 0 ? total / known : 0;
    if (vjp_shape_product(&new_shape, 0, ndim) != total || (open >= 0 && known == 0))
        return graph_fail(graph, VJP_INVALID, name, "a reshape of %s, %lld elements, to sizes whose product is %lld",
                          vjp_shape_text(&old, text), (long long)total, (long long)known);
    return graph_add_view(graph, value, &new_shape);
}

vjp_tensor graph_tensor(const vjp_graph *graph, vjp_value value) {
    const graph_value *v = &graph->value[value];
    vjp_tensor tensor = vjp_tensor_of(NULL, v->dtype, v->shape.ndim, v->shape.size);
    tensor.offset = v->offset;
    int64_t expected = 1;
    for (int i = tensor.ndim - 1; i >= 0 && v->row; i--) {
        if (expected == v->row) expected = v->step;
        tensor.stride[i] = expected;
        expected *= tensor.shape[i];
    }
    return tensor;
}

vjp_tensor vjp_graph_describe(const vjp_graph *graph, vjp_value value) {
    return graph && value >= 1 && value < graph->values ? graph_tensor(graph, value) : vjp_tensor_of(NULL, -1, 0, NULL);
}

/* ---- Nodes ------------------------------------------------------------------------------------------- */

int graph_slot(const vjp_pass_info *pass, const char *name) {
    for (size_t i = 0; i < pass->count; i++)
        if (strcmp(pass->slots[i].name, name) == 0) return (int)i;
    return -1;
}

graph_node *graph_add_node(vjp_graph *graph, const vjp_op *op, vjp_pass pass, const char *name, const vjp_value *values,
                           const void *attributes) {
    if (graph->nodes == graph->node_room) {
        int32_t room = graph->node_room ? 2 * graph->node_room : 64;
        graph_node *more = graph->nodes < GRAPH_MAX_ITEMS ? realloc(graph->node, (size_t)room * sizeof *more) : NULL;
        if (!more) {
            out_of_memory(graph);
            return NULL;
        }
        graph->node = more;
        graph->node_room = room;
    }
    enum { FIRST_SUFFIX = 2 };
    char *copy = strdup(name);
    if (!copy || !names_add(&graph->node_names, copy, FIRST_SUFFIX)) {
        free(copy);
        out_of_memory(graph);
        return NULL;
    }
    graph_node *node = &graph->node[graph->nodes++];
    *node = (graph_node){.op = op, .pass = pass, .name = copy, .block = graph->block};
    memcpy(node->value, values, op->info.pass[pass].count * sizeof *values);
    if (attributes)
        memcpy(node->attributes, attributes, op->info.attribute_bytes);
    else
        vjp_op_defaults(op, node->attributes);
    return node;
}

/* A name that no other node has: "scope.op", or "scope.op.2" the second time. */
static void node_name(const vjp_graph *graph, const vjp_op *op, char *name, size_t bytes) {
    const char *dot = graph->scope[0] ? "." : "";
    snprintf(name, bytes, "%s%s%s", graph->scope, dot, op->info.name);
    int32_t *suffix = names_find(&graph->node_names, name);
    while (names_find(&graph->node_names, name))
        snprintf(name, bytes, "%s%s%s.%d", graph->scope, dot, op->info.name, (*suffix)++);
}

vjp_value vjp_graph_call(vjp_graph *graph, const vjp_op *op, const vjp_value *inputs, size_t count,
                         const void *attributes) {
    if (!graph || graph->status != VJP_OK) return 0;
    if (!op) return graph_fail(graph, VJP_INVALID, graph->scope, "op is NULL");
    char name[GRAPH_SCOPE_BYTES + 64];
    node_name(graph, op, name, sizeof name);
    const vjp_pass_info *pass = &op->info.pass[VJP_FORWARD];
    if (!inputs || count != pass->count - pass->outputs)
        return graph_fail(graph, VJP_INVALID, name, "%zu inputs given; %s has %zu", count, op->info.name,
                          pass->count - pass->outputs);
    vjp_value values[VJP_MAX_SLOTS] = {0};
    vjp_tensor tensor[VJP_MAX_SLOTS], described[VJP_MAX_SLOTS];
    const vjp_tensor *present[VJP_MAX_SLOTS] = {0};
    for (size_t i = 0; i < count; i++) {
        size_t slot = pass->outputs + i;
        if (!inputs[i]) continue;
        if (inputs[i] < 1 || inputs[i] >= graph->values)
            return graph_fail(graph, VJP_INVALID, name, "%s is %d, which is not a value of this graph",
                              pass->slots[slot].name, inputs[i]);
        values[slot] = inputs[i];
        tensor[slot] = graph_tensor(graph, inputs[i]);
        present[slot] = &tensor[slot];
    }
    vjp_status status = vjp_infer(graph->rules, op, VJP_FORWARD, present, pass->count, attributes, described);
    if (status != VJP_OK) {
        char why[VJP_ERROR_BYTES];
        snprintf(why, sizeof why, "%s", graph->rules->error);
        return graph_fail(graph, status, name, "%s", why);
    }
    for (size_t i = 0; i < pass->outputs; i++) {
        char value_name[GRAPH_SCOPE_BYTES + 96];
        snprintf(value_name, sizeof value_name, "%s%s%s", name, i ? ":" : "", i ? pass->slots[i].name : "");
        vjp_shape shape = {.ndim = described[i].ndim};
        memcpy(shape.size, described[i].shape, sizeof shape.size);
        /* A plane of 2^31 elements is past every pooling; half the bytes of what vjp_infer() proposes. */
        vjp_dtype dtype = pass->slots[i].kind == VJP_KIND_ARGMAX ? VJP_I32 : (vjp_dtype)described[i].dtype;
        values[i] = graph_add_value(graph, GRAPH_COMPUTED, value_name, dtype, &shape);
        if (!values[i]) return 0;
        graph->value[values[i]].node = graph->nodes;
        graph->value[values[i]].slot = (int32_t)i;
    }
    return graph_add_node(graph, op, VJP_FORWARD, name, values, attributes) ? values[0] : 0;
}

vjp_value vjp_graph_output(vjp_graph *graph, vjp_value value, const char *slot) {
    if (!graph_is(graph, value, "the value whose node is asked")) return 0;
    const graph_value *v = &graph->value[value];
    if (v->node < 0 || v->role == GRAPH_VIEW)
        return graph_fail(graph, VJP_INVALID, v->name, "no node made it, so there is no other output \"%s\"",
                          slot ? slot : "(NULL)");
    const graph_node *node = &graph->node[v->node];
    const vjp_pass_info *pass = &node->op->info.pass[node->pass];
    int at = slot ? graph_slot(pass, slot) : -1;
    if (at < 0 || at >= (int)pass->outputs)
        return graph_fail(graph, VJP_INVALID, node->name, "%s has no output \"%s\"", node->op->info.name,
                          slot ? slot : "(NULL)");
    return node->value[at];
}

vjp_value vjp_graph_assign(vjp_graph *graph, vjp_value state, vjp_value output) {
    if (!graph_is(graph, state, "the state to assign") || !graph_is(graph, output, "the value to assign")) return 0;
    graph_value *to = &graph->value[state], *from = &graph->value[output];
    if (to->role != GRAPH_PARAMETER && to->role != GRAPH_STATE)
        return graph_fail(graph, VJP_INVALID, to->name, "only a parameter or a state can be assigned");
    if (from->role != GRAPH_COMPUTED || from->storage != output)
        return graph_fail(graph, VJP_INVALID, to->name, "%s is not a node's own output", from->name);
    const graph_node *node = &graph->node[from->node];
    const vjp_slot *slots = node->op->info.pass[node->pass].slots;
    if (from->bytes != to->bytes || from->dtype != to->dtype)
        return graph_fail(graph, VJP_INVALID, to->name, "%s has another dtype or size", from->name);
    for (int i = 0; i < VJP_MAX_SLOTS; i++) {
        bool is_it = node->value[i] && graph_storage(graph, node->value[i]) == to->storage;
        if (is_it && !(slots[from->slot].aliases >> i & 1))
            return graph_fail(graph, VJP_INVALID, node->name, "%s reads it as %s and cannot write %s in its place",
                              node->op->info.name, slots[i].name, slots[from->slot].name);
    }
    from->storage = to->storage;
    return output;
}

vjp_value vjp_graph_accumulate(vjp_graph *graph, vjp_value total, vjp_value output) {
    if (!graph_is(graph, total, "the total to add to") || !graph_is(graph, output, "the value to add")) return 0;
    graph_value *to = &graph->value[total], *from = &graph->value[output];
    if (to->role != GRAPH_COMPUTED || from->role != GRAPH_COMPUTED || to->node >= from->node)
        return graph_fail(graph, VJP_INVALID, from->name,
                          "it cannot be added to %s: both must be nodes' outputs, and "
                          "the total the older one",
                          to->name);
    graph_node *node = &graph->node[from->node];
    const vjp_slot *slot = &node->op->info.pass[node->pass].slots[from->slot];
    if (!(slot->flags & VJP_SLOT_ACCUMULATES) || from->bytes != to->bytes || from->dtype != to->dtype)
        return graph_fail(graph, VJP_INVALID, node->name, "its %s cannot be added to %s", slot->name, to->name);
    node->value[from->slot] = total;
    node->adds |= 1u << from->slot;
    from->role = GRAPH_VIEW;
    from->origin = to->origin;
    return total;
}

vjp_value graph_call_as(vjp_graph *graph, const vjp_op *op, const vjp_value *inputs, size_t count,
                        const void *attributes, vjp_dtype dtype) {
    if (!graph || graph->status != VJP_OK) return 0;
    if (dtype != VJP_F32 && dtype != VJP_BF16 && dtype != VJP_F16 && dtype != VJP_F64)
        return graph_fail(graph, VJP_INVALID, op->info.name, "the result's type %s is not a float type",
                          vjp_dtype_name(dtype));
    vjp_value y = vjp_graph_call(graph, op, inputs, count, attributes);
    if (!y) return 0;
    graph_value *value = &graph->value[y];
    value->bytes = value->bytes / vjp_dtype_size(value->dtype) * vjp_dtype_size(dtype);
    value->dtype = dtype;
    return y;
}

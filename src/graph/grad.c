/* SPDX-License-Identifier: MIT */
/*
 * Differentiating a graph: node by node in reverse, from the scalar back to the values whose gradients are asked for,
 * each node's backward pass is appended. The rule is in the names of the op's slots: the backward's output dx is the
 * gradient of x, its input dy that of y, and every other slot is the forward's tensor of that name.
 *
 * A value's gradient is one value that every node that used it adds to, the first by writing it. Where an op passes dy
 * on unchanged (a sum does), its inputs share dy instead of copying it. Before one of them is added to, the others that
 * are still to be read get a copy.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph/graph.h"
#include "op/op.h"

typedef struct differentiation {
    vjp_graph *graph;
    /* Arrays, indexed by the values that the graph had before and that are no views. */
    vjp_value *gradient; /* 0: none yet */
    vjp_value *again;    /* the recomputed value; 0: none yet */
    vjp_value *sharer;   /* a ring of the values whose gradients share one storage; alone: itself */
    vjp_value *list;     /* for stop_sharing() */
    int32_t *stack;      /* of nodes, for recomputed() */
    bool *depends;       /* on a value whose gradient is asked for */
    bool *asked;
    bool *unwritten;  /* the gradient is a state that nothing was written to yet */
    bool *own_type;   /* some op gives it a gradient of the value's own dtype only */
    bool *filled;     /* a state that one of the gradients goes into */
    bool *other_use;  /* something else than a cast to `narrow` uses it, or the cast is the weight of a loss */
    vjp_dtype narrow; /* of gradients of f32 values that are asked for; f32: their own */
} differentiation;

static vjp_value root_of(const differentiation *d, vjp_value value) {
    return d->graph->value[value].origin;
}

static bool same_shape(const vjp_shape *a, const vjp_shape *b) {
    return a->ndim == b->ndim && memcmp(a->size, b->size, (size_t)a->ndim * sizeof a->size[0]) == 0;
}

/* `value` under the shape of `like`. */
static vjp_value shaped_like(differentiation *d, vjp_value value, vjp_value like) {
    if (!value) return 0;
    const vjp_shape shape = d->graph->value[like].shape;
    return same_shape(&d->graph->value[value].shape, &shape) ? value : graph_add_view(d->graph, value, &shape);
}

static const char *gradient_slot_name(const vjp_slot *slot) {
    return slot->name[0] == 'd' ? slot->name + 1 : "";
}

/* ---- What depends on what ---------------------------------------------------------------------------- */

/*
 * linear_cross_entropy computes its logits twice for a gradient of the weight in 16 bits, since a sum over chunks must
 * not be rounded after each: the value that was cast to this weight keeps an f32 gradient.
 */
static void keep_wide(differentiation *d, const graph_node *node) {
    if (node->op != &vjp_op_linear_cross_entropy) return;
    int32_t n = d->graph->value[root_of(d, node->value[LINEAR_CROSS_ENTROPY_WEIGHT])].node;
    if (n >= 0 && d->graph->node[n].op == &vjp_op_cast)
        d->other_use[root_of(d, d->graph->node[n].value[CAST_X])] = true;
}

static void find_dependents(differentiation *d, int32_t last_node) {
    for (int32_t n = 0; n <= last_node; n++) {
        const graph_node *node = &d->graph->node[n];
        if (node->pass != VJP_FORWARD) continue;
        const vjp_pass_info *pass = &node->op->info.pass[VJP_FORWARD];
        const vjp_pass_info *back = &node->op->info.pass[VJP_BACKWARD];
        bool any = false;
        keep_wide(d, node);
        for (size_t i = pass->outputs; i < pass->count; i++) {
            if (!node->value[i]) continue;
            any = any || d->depends[root_of(d, node->value[i])];
            bool narrows = node->op == &vjp_op_cast && d->graph->value[node->value[CAST_Y]].dtype == d->narrow;
            if (!narrows) d->other_use[root_of(d, node->value[i])] = true;
            for (size_t j = 0; j < back->outputs; j++)
                if (strcmp(gradient_slot_name(&back->slots[j]), pass->slots[i].name) == 0 &&
                    back->slots[j].kind == VJP_KIND_STORAGE)
                    d->own_type[root_of(d, node->value[i])] = true;
        }
        for (size_t i = 0; i < pass->outputs && any; i++)
            if (node->value[i]) d->depends[node->value[i]] = true;
    }
}

/* Whether a value's gradient is asked for in the narrow dtype, and the casts that use the value pass it on. */
static bool is_narrow(const differentiation *d, vjp_value root) {
    return d->narrow != VJP_F32 && d->asked[root] && d->graph->value[root].dtype == VJP_F32 && !d->other_use[root];
}

/*
 * The dtype of a value's gradient is the value's own; but a value that was cast down from f32, as weights are, has a
 * gradient in f32 where every op that uses it can give one, unless it is asked for in the narrow dtype.
 */
static vjp_dtype gradient_type(const differentiation *d, vjp_value root) {
    const graph_value *v = &d->graph->value[root];
    if (is_narrow(d, root)) return d->narrow;
    if (v->node < 0 || d->own_type[root]) return v->dtype;
    const graph_node *node = &d->graph->node[v->node];
    if (node->op != &vjp_op_cast || node->pass != VJP_FORWARD) return v->dtype;
    if (is_narrow(d, root_of(d, node->value[CAST_X]))) return v->dtype;
    return d->graph->value[node->value[CAST_X]].dtype == VJP_F32 ? VJP_F32 : v->dtype;
}

/* Whether a value's gradient, made or still to be made, has this dtype: only then can it share another's memory. */
static bool has_type(const differentiation *d, vjp_value root, vjp_dtype dtype) {
    vjp_value gradient = d->gradient[root];
    return (gradient ? d->graph->value[gradient].dtype : gradient_type(d, root)) == dtype;
}

/* ---- Adding up --------------------------------------------------------------------------------------- */

/* to = from, or to += from. */
static void append_copy(differentiation *d, vjp_value to, vjp_value from, bool adds) {
    vjp_graph *graph = d->graph;
    char name[GRAPH_SCOPE_BYTES + 64];
    snprintf(name, sizeof name, "%s.%s", graph->value[to].name, adds ? "add" : "copy");
    vjp_value values[VJP_MAX_SLOTS] = {[SCALE_Y] = to, [SCALE_X] = shaped_like(d, from, to)};
    int32_t number = graph->nodes;
    graph_node *node = graph_add_node(graph, &vjp_op_scale, VJP_FORWARD, name, values, NULL);
    if (!node) return;
    node->block = 0;
    if (adds) node->adds = 1u << SCALE_Y;
    if (!adds && graph->value[to].node < 0) {
        graph->value[to].node = number;
        graph->value[to].slot = SCALE_Y;
    }
}

static vjp_value new_gradient(differentiation *d, vjp_value root) {
    char name[GRAPH_SCOPE_BYTES + 96];
    const vjp_shape shape = d->graph->value[root].shape;
    snprintf(name, sizeof name, "d(%s)", d->graph->value[root].name);
    return graph_add_value(d->graph, GRAPH_COMPUTED, name, gradient_type(d, root), &shape);
}

/* `root` joins the values that share the gradient of `with`. */
static void share_gradient(differentiation *d, vjp_value root, vjp_value with) {
    d->sharer[root] = d->sharer[with];
    d->sharer[with] = root;
}

static void leave_sharers(differentiation *d, vjp_value root, vjp_value near) {
    while (d->sharer[near] != root)
        near = d->sharer[near];
    d->sharer[near] = d->sharer[root];
    d->sharer[root] = root;
}

static int ascending(const void *a, const void *b) {
    vjp_value x = *(const vjp_value *)a, y = *(const vjp_value *)b;
    return (x > y) - (x < y);
}

/*
 * Before something is added to root's gradient at node n: values that share it and are still to be read get a copy.
 * Nodes are differentiated in reverse, so the gradient of a value that a node after n made is not read any more.
 */
static void stop_sharing(differentiation *d, vjp_value root, int32_t n) {
    size_t count = 0;
    for (vjp_value other = d->sharer[root], next; other != root; other = next) {
        next = d->sharer[other];
        d->sharer[other] = other;
        bool read_later = d->graph->value[other].node <= n || d->asked[other];
        if (read_later) d->list[count++] = other;
    }
    d->sharer[root] = root;
    qsort(d->list, count, sizeof *d->list, ascending);
    for (size_t i = 0; i < count && d->graph->status == VJP_OK; i++) {
        vjp_value other = d->list[i], copy = new_gradient(d, other);
        if (!copy) return;
        append_copy(d, copy, d->gradient[other], false);
        d->gradient[other] = copy;
    }
}

/* The gradient dy of node n's output is itself the contribution to root's gradient. */
static void pass_on(differentiation *d, vjp_value root, int32_t n) {
    vjp_value output = d->graph->node[n].value[0], dy = d->gradient[output];
    if (!d->gradient[root]) {
        d->gradient[root] = shaped_like(d, dy, root);
        share_gradient(d, root, output);
    } else if (d->unwritten[root]) {
        append_copy(d, d->gradient[root], dy, false);
        d->unwritten[root] = false;
    } else if (graph_storage(d->graph, d->gradient[root]) == graph_storage(d->graph, dy)) {
        /* x + x: the one gradient that both share, twice. */
        vjp_value sum = new_gradient(d, root);
        if (!sum) return;
        append_copy(d, sum, dy, false);
        append_copy(d, sum, dy, true);
        d->gradient[root] = sum;
        leave_sharers(d, root, output);
    } else {
        stop_sharing(d, root, n);
        append_copy(d, d->gradient[root], dy, true);
    }
}

/* ---- Computing again --------------------------------------------------------------------------------- */

static bool is_in_block(const differentiation *d, vjp_value root, int32_t block) {
    int32_t n = d->graph->value[root].node;
    return block && n >= 0 && d->graph->node[n].block == block;
}

/* The node of the first input of node n that is made in the block and not yet made again; -1: there is none. */
static int32_t first_missing(const differentiation *d, int32_t n, int32_t block) {
    const graph_node *node = &d->graph->node[n];
    const vjp_pass_info *pass = &node->op->info.pass[node->pass];
    for (size_t i = pass->outputs; i < pass->count; i++) {
        vjp_value root = node->value[i] ? root_of(d, node->value[i]) : 0;
        if (root && is_in_block(d, root, block) && !d->again[root]) return d->graph->value[root].node;
    }
    return -1;
}

/* A value of the block as it was made again; any other as it is. */
static vjp_value latest(differentiation *d, vjp_value value, int32_t block) {
    vjp_value root = root_of(d, value);
    return is_in_block(d, root, block) ? shaped_like(d, d->again[root], value) : value;
}

/* Appends node n once more. Its inputs that are made in the block have been made again. */
static bool repeat_node(differentiation *d, int32_t n, int32_t block) {
    vjp_graph *graph = d->graph;
    const graph_node node = graph->node[n];
    const vjp_pass_info *pass = &node.op->info.pass[node.pass];
    vjp_value values[VJP_MAX_SLOTS] = {0};
    for (size_t i = pass->outputs; i < pass->count; i++)
        if (node.value[i]) values[i] = latest(d, node.value[i], block);
    char name[GRAPH_SCOPE_BYTES + 96];
    snprintf(name, sizeof name, "%s.again", node.name);
    for (size_t i = 0; i < pass->outputs; i++) {
        if (!node.value[i]) continue;
        const graph_value old = graph->value[node.value[i]];
        char value_name[GRAPH_SCOPE_BYTES + 128];
        snprintf(value_name, sizeof value_name, "%s.again", old.name);
        values[i] = graph_add_value(graph, GRAPH_COMPUTED, value_name, old.dtype, &old.shape);
        if (!values[i]) return false;
        graph->value[values[i]].node = graph->nodes;
        graph->value[values[i]].slot = (int32_t)i;
        d->again[node.value[i]] = values[i];
    }
    graph_node *clone = graph_add_node(graph, node.op, node.pass, name, values, node.attributes);
    if (clone) clone->block = 0;
    return clone != NULL;
}

/*
 * A forward value as the backward of a node in `block` reads it: itself, or, made in the same block, made again, after
 * its inputs. The stack is our own: a block may be deeper than the thread's.
 */
static vjp_value recomputed(differentiation *d, vjp_value value, int32_t block) {
    vjp_value root = root_of(d, value);
    if (!is_in_block(d, root, block)) return value;
    int32_t depth = 0;
    if (!d->again[root]) d->stack[depth++] = d->graph->value[root].node;
    while (depth) {
        int32_t n = d->stack[depth - 1], before = first_missing(d, n, block);
        if (before >= 0)
            d->stack[depth++] = before;
        else if (repeat_node(d, n, block))
            depth--;
        else
            return 0;
    }
    return latest(d, value, block);
}

/* ---- One node ---------------------------------------------------------------------------------------- */

/* The slot of the forward whose gradient a slot of the backward is, or -1. */
static int differentiates(const vjp_pass_info *forward, const vjp_slot *slot) {
    return graph_slot(forward, gradient_slot_name(slot));
}

/* The inputs of the backward: gradients, and what the forward read and made. False: one is missing. */
static bool fill_inputs(differentiation *d, const graph_node *node, uint32_t wanted, vjp_value *values) {
    const vjp_pass_info *forward = &node->op->info.pass[VJP_FORWARD], *back = &node->op->info.pass[VJP_BACKWARD];
    uint32_t keeps = node->op->rules->keeps ? node->op->rules->keeps(node->attributes, wanted) : ~0u;
    for (size_t i = back->outputs; i < back->count; i++) {
        const vjp_slot *slot = &back->slots[i];
        int of = differentiates(forward, slot);
        if (of >= 0 && of < (int)forward->outputs) {
            values[i] = shaped_like(d, d->gradient[node->value[of]], node->value[of]);
            if (values[i] || slot->flags & VJP_SLOT_OPTIONAL) continue;
            graph_fail(d->graph, VJP_INVALID, node->name,
                       "the scalar depends on another output than %s, and %s has no gradient for that",
                       forward->slots[of].name, node->op->info.name);
            return false;
        }
        if (slot->flags & VJP_SLOT_OPTIONAL && !(keeps >> i & 1)) continue;
        int same = graph_slot(forward, slot->name);
        if (same >= 0 && node->value[same]) values[i] = recomputed(d, node->value[same], node->block);
    }
    return d->graph->status == VJP_OK;
}

/* The outputs of the forward that the backward computes on its way; returns their slots, as bits. */
static uint32_t fill_forward_outputs(const graph_node *node, vjp_value *values) {
    const vjp_pass_info *forward = &node->op->info.pass[VJP_FORWARD], *back = &node->op->info.pass[VJP_BACKWARD];
    uint32_t also = 0;
    for (size_t i = 0; i < back->outputs; i++) {
        int same = graph_slot(forward, back->slots[i].name);
        if (same < 0 || !node->value[same]) continue;
        values[i] = node->value[same];
        also |= 1u << i;
    }
    return also;
}

static bool check_backward(vjp_graph *graph, const graph_node *node, const char *name, const vjp_value *values) {
    const vjp_pass_info *back = &node->op->info.pass[VJP_BACKWARD];
    vjp_tensor tensor[VJP_MAX_SLOTS], described[VJP_MAX_SLOTS];
    const vjp_tensor *present[VJP_MAX_SLOTS] = {0};
    for (size_t i = 0; i < back->count; i++) {
        if (!values[i]) continue;
        tensor[i] = graph_tensor(graph, values[i]);
        present[i] = &tensor[i];
    }
    vjp_status status =
        vjp_infer(graph->rules, node->op, VJP_BACKWARD, present, back->count, node->attributes, described);
    if (status == VJP_OK) return true;
    char why[VJP_ERROR_BYTES];
    snprintf(why, sizeof why, "%s", graph->rules->error);
    graph_fail(graph, status, name, "%s", why);
    return false;
}

/* Where the backward writes the gradient of one input, and whether it adds. *later: a value that another node must add.
 */
static vjp_value place_gradient(differentiation *d, vjp_value input, bool can_add, bool taken, int32_t n, bool *adds,
                                vjp_value *later) {
    vjp_value root = root_of(d, input);
    *adds = false;
    *later = 0;
    if (!d->gradient[root]) {
        d->gradient[root] = new_gradient(d, root);
    } else if (d->unwritten[root]) {
        d->unwritten[root] = false;
    } else if (can_add && !taken) {
        stop_sharing(d, root, n);
        *adds = true;
    } else {
        *later = new_gradient(d, root);
        return shaped_like(d, *later, input);
    }
    return shaped_like(d, d->gradient[root], input);
}

static void differentiate_node(differentiation *d, int32_t n) {
    vjp_graph *graph = d->graph;
    const graph_node node = graph->node[n];
    const vjp_pass_info *forward = &node.op->info.pass[VJP_FORWARD], *back = &node.op->info.pass[VJP_BACKWARD];
    bool reached = false, needed = false;
    for (size_t i = 0; i < forward->count; i++) {
        if (!node.value[i]) continue;
        if (i < forward->outputs)
            reached = reached || d->gradient[node.value[i]];
        else
            needed = needed || d->depends[root_of(d, node.value[i])];
    }
    if (!reached || !needed) return;
    if (back->count == 0) {
        graph_fail(graph, VJP_INVALID, node.name, "%s has no gradient, and the scalar depends on its result",
                   node.op->info.name);
        return;
    }

    /* Which gradients the call has to make. */
    uint32_t wanted = 0, passed = 0;
    vjp_value input[VJP_MAX_SLOTS] = {0}, dy = d->gradient[node.value[0]];
    for (size_t i = 0; i < back->outputs; i++) {
        int of = differentiates(forward, &back->slots[i]);
        if (of < (int)forward->outputs || !node.value[of] || !d->depends[root_of(d, node.value[of])]) continue;
        input[i] = node.value[of];
        bool alike = dy && graph->value[input[i]].bytes == graph->value[dy].bytes &&
                     graph->value[input[i]].dtype == graph->value[dy].dtype;
        bool same = node.op->rules->passes_gradient >> i & 1 && dy && (alike || is_narrow(d, root_of(d, input[i]))) &&
                    has_type(d, root_of(d, input[i]), graph->value[dy].dtype);
        *(same ? &passed : &wanted) |= 1u << i;
    }

    if (wanted) {
        vjp_value values[VJP_MAX_SLOTS] = {0}, later[VJP_MAX_SLOTS] = {0};
        uint32_t adding = 0;
        for (size_t i = 0; i < back->outputs; i++) {
            if (!(wanted >> i & 1)) continue;
            bool taken = false, adds, can_add = back->slots[i].flags & VJP_SLOT_ACCUMULATES;
            for (size_t j = 0; j < i; j++)
                taken = taken || (wanted >> j & 1 && root_of(d, input[j]) == root_of(d, input[i]));
            values[i] = place_gradient(d, input[i], can_add, taken, n, &adds, &later[i]);
            if (adds) adding |= 1u << i;
            if (!values[i]) return;
        }
        /* After place_gradient(), which may have given dy a copy of its own. */
        if (!fill_inputs(d, &node, wanted, values)) return;
        uint32_t also = fill_forward_outputs(&node, values);
        char name[GRAPH_SCOPE_BYTES + 96];
        snprintf(name, sizeof name, "%s.backward", node.name);
        if (!check_backward(graph, &node, name, values)) return;
        int32_t number = graph->nodes;
        graph_node *made = graph_add_node(graph, node.op, VJP_BACKWARD, name, values, node.attributes);
        if (!made) return;
        made->adds = adding;
        made->also = also;
        made->block = 0;
        for (size_t i = 0; i < back->outputs; i++) {
            if (!values[i]) continue;
            graph_value *gradient = &graph->value[root_of(d, values[i])];
            if (gradient->role == GRAPH_COMPUTED && gradient->node < 0) {
                gradient->node = number;
                gradient->slot = (int32_t)i;
            }
            if (!later[i]) continue;
            stop_sharing(d, root_of(d, input[i]), n);
            append_copy(d, d->gradient[root_of(d, input[i])], later[i], true);
        }
    }
    for (size_t i = 0; i < back->outputs && graph->status == VJP_OK; i++)
        if (passed >> i & 1) pass_on(d, root_of(d, input[i]), n);
}

/* ---- The whole --------------------------------------------------------------------------------------- */

/* The derivative of the scalar by itself. */
static vjp_value add_one(vjp_graph *graph, vjp_value scalar) {
    char name[GRAPH_SCOPE_BYTES + 96];
    snprintf(name, sizeof name, "d(%s)", graph->value[scalar].name);
    const vjp_dtype dtype = graph->value[scalar].dtype;
    const vjp_shape shape = graph->value[scalar].shape;
    vjp_value one = graph_add_value(graph, GRAPH_CONSTANT, name, dtype, &shape);
    if (!one) return 0;
    void *data = calloc(1, 8);
    if (!data) return graph_fail(graph, VJP_OUT_OF_MEMORY, NULL, "out of memory while the graph was differentiated");
    const float f32 = 1;
    const double f64 = 1;
    const uint16_t bf16 = 0x3f80, f16 = 0x3c00;
    const void *source = dtype == VJP_F32 ? (const void *)&f32 : dtype == VJP_F64 ? (const void *)&f64 : NULL;
    if (!source) source = dtype == VJP_BF16 ? &bf16 : &f16;
    memcpy(data, source, vjp_dtype_size(dtype));
    graph->value[one].data = data;
    return one;
}

static void differentiate(differentiation *d, vjp_value scalar, const vjp_value *wrt, size_t count,
                          const vjp_value *into, int add, vjp_value *gradients) {
    vjp_graph *graph = d->graph;
    int32_t last = graph->value[root_of(d, scalar)].node;
    for (size_t i = 0; i < count; i++) {
        vjp_value root = root_of(d, wrt[i]);
        if (d->asked[root]) {
            graph_fail(graph, VJP_INVALID, graph->value[root].name, "its gradient is asked for twice");
            return;
        }
        d->asked[root] = d->depends[root] = true;
        if (!into || !into[i]) continue;
        if (graph->value[into[i]].role != GRAPH_STATE ||
            vjp_shape_product(&graph->value[into[i]].shape, 0, graph->value[into[i]].shape.ndim) !=
                vjp_shape_product(&graph->value[root].shape, 0, graph->value[root].shape.ndim)) {
            graph_fail(graph, VJP_INVALID, graph->value[root].name,
                       "its gradient cannot be put into %s, which is not a state of its size",
                       graph->value[into[i]].name);
            return;
        }
        if (d->filled[into[i]]) {
            graph_fail(graph, VJP_INVALID, graph->value[root].name,
                       "its gradient cannot be put into %s, which another gradient goes into",
                       graph->value[into[i]].name);
            return;
        }
        d->filled[into[i]] = true;
        d->gradient[root] = new_gradient(d, root);
        if (!d->gradient[root]) return;
        graph->value[d->gradient[root]].dtype = graph->value[into[i]].dtype;
        graph->value[d->gradient[root]].bytes = graph->value[into[i]].bytes;
        graph->value[d->gradient[root]].storage = graph_storage(graph, into[i]);
        d->unwritten[root] = !add;
    }
    find_dependents(d, last);
    vjp_value root = root_of(d, scalar);
    if (!d->depends[root]) {
        graph_fail(graph, VJP_INVALID, graph->value[scalar].name, "it depends on nothing that a gradient is asked for");
        return;
    }
    if (!d->gradient[root]) d->gradient[root] = shaped_like(d, add_one(graph, root), root);
    for (int32_t n = last; n >= 0 && graph->status == VJP_OK; n--)
        if (graph->node[n].pass == VJP_FORWARD) differentiate_node(d, n);
    for (size_t i = 0; i < count && graph->status == VJP_OK; i++) {
        vjp_value gradient = d->gradient[root_of(d, wrt[i])];
        if (!gradient || d->unwritten[root_of(d, wrt[i])])
            graph_fail(graph, VJP_INVALID, graph->value[wrt[i]].name, "%s does not depend on it",
                       graph->value[scalar].name);
        else
            gradients[i] = shaped_like(d, gradient, wrt[i]);
    }
}

static vjp_status grad(vjp_graph *graph, vjp_value scalar, const vjp_value *wrt, size_t count, const vjp_value *into,
                       int add, vjp_dtype narrow, vjp_value *gradients) {
    if (!graph) return VJP_OUT_OF_MEMORY;
    if (count && (!wrt || !gradients)) {
        graph_fail(graph, VJP_INVALID, graph->scope[0] ? graph->scope : NULL, "vjp_graph_grad: %s is NULL",
                   wrt ? "gradients" : "wrt");
        return graph->status;
    }
    for (size_t i = 0; i < count; i++)
        gradients[i] = 0;
    bool known = graph_is(graph, scalar, "the scalar to differentiate");
    for (size_t i = 0; i < count && known; i++) {
        known = graph_is(graph, wrt[i], "what to differentiate by");
        if (known && into && into[i]) known = graph_is(graph, into[i], "the state for a gradient");
    }
    if (!known) return graph->status;
    char text[VJP_SHAPE_TEXT];
    const vjp_shape *shape = &graph->value[scalar].shape;
    if (vjp_shape_product(shape, 0, shape->ndim) != 1) {
        graph_fail(graph, VJP_INVALID, graph->value[scalar].name, "only a scalar has a gradient; this is %s",
                   vjp_shape_text(shape, text));
        return graph->status;
    }
    if (!graph_is_float(graph->value[scalar].dtype)) {
        graph_fail(graph, VJP_INVALID, graph->value[scalar].name, "only a float has a gradient; this is %s",
                   vjp_dtype_name(graph->value[scalar].dtype));
        return graph->status;
    }
    size_t values = (size_t)graph->values;
    differentiation d = {.graph = graph, .narrow = narrow};
    d.gradient = calloc(4 * values, sizeof *d.gradient);
    d.stack = malloc(((size_t)graph->nodes + 1) * sizeof *d.stack);
    d.depends = calloc(6 * values, sizeof *d.depends);
    if (d.gradient && d.stack && d.depends) {
        d.again = d.gradient + values;
        d.sharer = d.again + values;
        d.list = d.sharer + values;
        for (size_t v = 0; v < values; v++)
            d.sharer[v] = (vjp_value)v;
        d.asked = d.depends + values;
        d.unwritten = d.asked + values;
        d.own_type = d.unwritten + values;
        d.filled = d.own_type + values;
        d.other_use = d.filled + values;
        differentiate(&d, scalar, wrt, count, into, add, gradients);
    } else {
        graph_fail(graph, VJP_OUT_OF_MEMORY, NULL, "out of memory while the graph was differentiated");
    }
    free(d.gradient);
    free(d.stack);
    free(d.depends);
    for (size_t i = 0; i < count && graph->status != VJP_OK; i++)
        gradients[i] = 0;
    return graph->status;
}

vjp_status vjp_graph_grad(vjp_graph *graph, vjp_value scalar, const vjp_value *wrt, size_t count, const vjp_value *into,
                          int add, vjp_value *gradients) {
    return grad(graph, scalar, wrt, count, into, add, VJP_F32, gradients);
}

vjp_status graph_grad_as(vjp_graph *graph, vjp_value scalar, const vjp_value *wrt, size_t count, vjp_dtype dtype,
                         vjp_value *gradients) {
    return grad(graph, scalar, wrt, count, NULL, 0, dtype, gradients);
}

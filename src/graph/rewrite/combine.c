/* SPDX-License-Identifier: MIT */
/*
 * Values that are computed again by a backward on its way. Where a forward is repeated for the backward (recompute.c,
 * or a block that is marked), its result y is read by the backward of linear as the operand a, and the op's own
 * backward follows, which reads all that the forward reads and can give y as well:
 *
 *     y = swiglu(gate, up)                          dy = linear.backward(dz, w)
 *     dy, dw = linear.backward(dz, y, w)            dgate, dup, y = swiglu.backward(dy, gate, up)
 *     dgate, dup = swiglu.backward(dy, gate, up)    dw = linear.backward(dz, y, w)
 *
 * on the left becomes what is on the right: gate and up are read once instead of twice. A norm's y is read by several
 * products, which all add to its dy, and comes from the norm's backward in the same way: x is read once instead of
 * twice. The two products of linear's backward are separate anyway, and only db needs a. With an activation they would
 * share a pass, so then nothing is changed. The bits are the same.
 *
 * The bytes alive at once do not grow: y takes over the memory of an input that the backward of its op is the last to
 * read, and what is kept longer than before, the gradients dz of the products, fits beside the rest into what was alive
 * while one of the products was computed.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph/rewrite/rewrite.h"
#include "op/op.h"

enum { MAX_READERS = 8 };

typedef struct combining {
    vjp_device *device;
    vjp_graph *graph;
    const graph_node *node; /* the old list */
    int32_t nodes;
    int32_t *writers;      /* [values]: of storages, how many outputs are written there */
    int32_t *first, *last; /* [values]: of storages, the nodes that use them; last is `nodes` where they are kept */
    size_t *live;          /* [nodes]: bytes, if no output takes over an input */
    int32_t *repeats;      /* [nodes]: of the backward of an op, the forward that it replaces; NONE */
    int32_t *later; /* [nodes]: of linear's backward, the node after which db is computed; NONE: it stays whole */
    bool *dropped;  /* [nodes] */
} combining;

enum { NONE = GRAPH_NONE };

/* A forward that may be replaced, the backward that can give its y, and linear's backwards that read y before. */
typedef struct candidate {
    int32_t forward, backward;
    int y_slot; /* of the backward */
    int32_t reader[MAX_READERS];
    int32_t readers;
} candidate;

static const vjp_pass_info *pass_of(const graph_node *node) {
    return &node->op->info.pass[node->pass];
}

static vjp_value storage_of(const combining *c, vjp_value value) {
    return value ? graph_storage(c->graph, value) : 0;
}

/* ---- Uses -------------------------------------------------------------------------------------------- */

static void find_uses(combining *c, const bool *result, int32_t own_values) {
    for (vjp_value v = 0; v < c->graph->values; v++) {
        const graph_value *value = &c->graph->value[v];
        c->writers[v] = 0;
        c->first[v] = NONE;
        c->last[v] = v && graph_is_persistent(value->role) ? c->nodes : NONE;
    }
    for (int32_t n = 0; n < c->nodes; n++)
        for (size_t i = 0; i < pass_of(&c->node[n])->count; i++) {
            vjp_value storage = storage_of(c, c->node[n].value[i]);
            if (!storage) continue;
            if (i < pass_of(&c->node[n])->outputs) c->writers[storage]++;
            if (c->first[storage] == NONE) c->first[storage] = n;
            if (c->last[storage] < n) c->last[storage] = n;
        }
    for (vjp_value v = 1; v < own_values; v++)
        if (result[v]) c->last[storage_of(c, v)] = c->nodes;
    graph_find_live(c->graph, c->nodes, c->first, c->last, c->live);
}

static bool touches(const combining *c, int32_t n, vjp_value storage, bool writes_only) {
    const graph_node *node = &c->node[n];
    size_t count = writes_only ? pass_of(node)->outputs : pass_of(node)->count;
    for (size_t i = 0; i < count && storage; i++)
        if (storage_of(c, node->value[i]) == storage) return true;
    return false;
}

/* ---- The pattern ------------------------------------------------------------------------------------- */

/* Whether a node is a plain forward with one output, which the backward of its op can give, too. */
static bool is_candidate(const combining *c, int32_t n, int *y_slot) {
    const graph_node *node = &c->node[n];
    const vjp_pass_info *back = &node->op->info.pass[VJP_BACKWARD];
    if (node->pass != VJP_FORWARD || !node->value[0] || node->adds) return false;
    for (size_t i = 1; i < pass_of(node)->outputs; i++)
        if (node->value[i]) return false;
    *y_slot = graph_slot(back, pass_of(node)->slots[0].name);
    if (*y_slot < 0 || *y_slot >= (int)back->outputs) return false;
    const graph_value *y = &c->graph->value[node->value[0]];
    return y->role == GRAPH_COMPUTED && y->storage == node->value[0] && c->writers[node->value[0]] == 1 &&
           c->last[node->value[0]] < c->nodes;
}

/* Whether node m is the backward of node n, on the same inputs, and does not give y yet. */
static bool is_backward_of(const combining *c, int32_t m, int32_t n, int y_slot) {
    const graph_node *back = &c->node[m], *node = &c->node[n];
    if (back->op != node->op || back->pass != VJP_BACKWARD || back->value[y_slot]) return false;
    if (memcmp(back->attributes, node->attributes, node->op->info.attribute_bytes) != 0) return false;
    for (size_t i = pass_of(node)->outputs; i < pass_of(node)->count; i++) {
        int slot = graph_slot(pass_of(back), pass_of(node)->slots[i].name);
        if (slot < 0 || back->value[slot] != node->value[i]) return false;
    }
    return true;
}

/* Whether node m reads y as a of linear's backward and nowhere else, and computes nothing that its parts would share.
 */
static bool is_divisible(const combining *c, int32_t m, vjp_value y) {
    const graph_node *node = &c->node[m];
    const vjp_linear_attributes *attributes = (const void *)node->attributes;
    if (node->op != &vjp_op_linear || node->pass != VJP_BACKWARD || attributes->activation != VJP_ACTIVATION_NONE ||
        node->value[LINEAR_B_GATE])
        return false;
    for (size_t i = 0; i < pass_of(node)->count; i++)
        if ((storage_of(c, node->value[i]) == y) != (i == LINEAR_B_A)) return false;
    return true;
}

/* Finds the backward of a forward and the readers of its y before it. False: something else needs y before. */
static bool find_backward(const combining *c, candidate *found) {
    const graph_node *forward = &c->node[found->forward];
    vjp_value y = forward->value[0];
    found->readers = 0;
    for (int32_t m = found->forward + 1; m < c->nodes; m++) {
        found->backward = m;
        if (is_backward_of(c, m, found->forward, found->y_slot)) return found->readers > 0;
        for (size_t i = pass_of(forward)->outputs; i < pass_of(forward)->count; i++)
            if (touches(c, m, storage_of(c, forward->value[i]), true)) return false;
        if (!touches(c, m, y, false)) continue;
        if (!is_divisible(c, m, y) || c->later[m] != NONE || found->readers == MAX_READERS) return false;
        found->reader[found->readers++] = m;
    }
    return false;
}

/* ---- The parts of linear's backward ------------------------------------------------------------------ */

static void values_of_da(const graph_node *node, vjp_value values[VJP_MAX_SLOTS]) {
    memset(values, 0, VJP_MAX_SLOTS * sizeof values[0]);
    values[LINEAR_B_DA] = node->value[LINEAR_B_DA];
    values[LINEAR_B_DY] = node->value[LINEAR_B_DY];
    values[LINEAR_B_B] = node->value[LINEAR_B_B];
}

static void values_of_db(const graph_node *node, vjp_value values[VJP_MAX_SLOTS]) {
    memcpy(values, node->value, VJP_MAX_SLOTS * sizeof values[0]);
    values[LINEAR_B_DA] = 0;
}

/* ---- What may be moved ------------------------------------------------------------------------------- */

/*
 * Whether the part of a reader that gives db and dbias can come after the backward: nothing in between uses these or
 * changes what it reads.
 */
static bool can_wait(const combining *c, const candidate *found, int32_t reader) {
    const graph_node *node = &c->node[reader];
    for (int32_t m = reader + 1; m <= found->backward; m++)
        for (size_t i = 0; i < pass_of(node)->count; i++) {
            bool output = i < pass_of(node)->outputs;
            if (i != LINEAR_B_DA && i != LINEAR_B_A && touches(c, m, storage_of(c, node->value[i]), !output))
                return false;
        }
    return true;
}

/* Whether the part of a reader that gives db reads a storage. */
static bool reads_later(const combining *c, int32_t reader, vjp_value storage) {
    const graph_node *node = &c->node[reader];
    for (size_t i = pass_of(node)->outputs; i < pass_of(node)->count; i++)
        if (storage_of(c, node->value[i]) == storage) return true;
    return false;
}

/* The bytes of an output that takes over an input's memory where one is free; 0 of one that needs its own, or none. */
static size_t takes_over(const combining *c, const graph_node *node, size_t slot) {
    vjp_value storage = storage_of(c, node->value[slot]);
    if (!storage || node->adds >> slot & 1 || !pass_of(node)->slots[slot].aliases) return 0;
    return graph_is_persistent(c->graph->value[storage].role) ? 0 : c->graph->value[storage].bytes;
}

/*
 * Whether every output of the backward that may be in an input's place, and y, can take over one that nothing reads
 * afterwards, so that y needs no memory of its own there.
 */
static bool has_room(const combining *c, const candidate *found) {
    const graph_node *back = &c->node[found->backward];
    const vjp_pass_info *pass = pass_of(back);
    const graph_value *y = &c->graph->value[c->node[found->forward].value[0]];
    vjp_value freed[VJP_MAX_SLOTS];
    int free_inputs = 0, outputs = 1;
    for (size_t i = 0; i < pass->outputs; i++)
        outputs += takes_over(c, back, i) != 0;
    for (size_t i = pass->outputs; i < pass->count; i++) {
        vjp_value storage = storage_of(c, back->value[i]);
        if (!storage || c->last[storage] != found->backward || !(pass->slots[found->y_slot].aliases >> i & 1)) continue;
        if (c->graph->value[storage].bytes != y->bytes || c->graph->value[storage].dtype != y->dtype) continue;
        bool taken = false;
        for (int k = 0; k < free_inputs; k++)
            taken = taken || freed[k] == storage;
        for (int32_t k = 0; k < found->readers; k++)
            taken = taken || reads_later(c, found->reader[k], storage);
        if (!taken) freed[free_inputs++] = storage;
    }
    return outputs <= free_inputs;
}

/* ---- The bytes alive at once ------------------------------------------------------------------------- */

static vjp_value dz_of(const combining *c, const candidate *found, int32_t k) {
    return storage_of(c, c->node[found->reader[k]].value[LINEAR_B_DY]);
}

/* Whether a reader after the k-th has the same dz. */
static bool shares_dz(const combining *c, const candidate *found, int32_t k) {
    bool shares = false;
    for (int32_t j = k + 1; j < found->readers; j++)
        shares = shares || dz_of(c, found, j) == dz_of(c, found, k);
    return shares;
}

/* The bytes of db and dbias that begin with the k-th reader and are alive at node m. */
static size_t made_by(const combining *c, const candidate *found, int32_t k, int32_t m) {
    static const int slots[] = {LINEAR_B_DB, LINEAR_B_DBIAS};
    size_t bytes = 0;
    for (int i = 0; i < 2; i++) {
        vjp_value made = storage_of(c, c->node[found->reader[k]].value[slots[i]]);
        if (!made || graph_is_persistent(c->graph->value[made].role)) continue;
        if (c->first[made] == found->reader[k] && c->last[made] >= m) bytes += c->graph->value[made].bytes;
    }
    return bytes;
}

/*
 * The bytes alive at node m between the first reader and the backward, once calls are combined: without y, without db
 * and dbias, and with the gradients that wait. At the backward y and its other outputs take over inputs.
 */
static size_t live_at(const combining *c, const candidate *found, int32_t m) {
    vjp_value y = c->node[found->forward].value[0];
    size_t bytes = c->live[m];
    if (m <= c->last[y]) bytes -= c->graph->value[y].bytes;
    for (int32_t k = 0; k < found->readers && found->reader[k] <= m; k++) {
        vjp_value dz = dz_of(c, found, k);
        bytes -= made_by(c, found, k, m);
        bool counted = c->last[dz] >= m;
        for (int32_t j = 0; j < k; j++)
            counted = counted || dz_of(c, found, j) == dz;
        if (!counted) bytes += c->graph->value[dz].bytes;
    }
    for (size_t i = 0; i < pass_of(&c->node[m])->outputs && m == found->backward; i++)
        bytes -= takes_over(c, &c->node[m], i);
    return bytes;
}

/* The scratch of a node with these values. False: the call is refused, which compiling reports. */
static bool find_scratch(const combining *c, const graph_node *node, const vjp_value *values, size_t *bytes) {
    size_t count = pass_of(node)->count;
    vjp_tensor tensor[VJP_MAX_SLOTS];
    const vjp_tensor *present[VJP_MAX_SLOTS] = {0};
    for (size_t i = 0; i < count; i++) {
        if (!values[i]) continue;
        tensor[i] = graph_tensor(c->graph, values[i]);
        present[i] = &tensor[i];
    }
    return vjp_workspace_size(c->device, node->op, node->pass, present, count, node->attributes, bytes) == VJP_OK;
}

static bool is_reader(const candidate *found, int32_t n) {
    for (int32_t k = 0; k < found->readers; k++)
        if (found->reader[k] == n) return true;
    return false;
}

/* Whether no call needs more at once than one of the readers did before. */
static bool fits(const combining *c, const candidate *found) {
    size_t limit = 0, scratch;
    vjp_value values[VJP_MAX_SLOTS];
    for (int32_t k = 0; k < found->readers; k++) {
        const graph_node *node = &c->node[found->reader[k]];
        if (!find_scratch(c, node, node->value, &scratch)) return false;
        if (limit < c->live[found->reader[k]] + scratch) limit = c->live[found->reader[k]] + scratch;
    }
    for (int32_t m = found->reader[0]; m <= found->backward; m++) {
        memcpy(values, c->node[m].value, sizeof values);
        bool reads = is_reader(found, m);
        if (reads) values_of_da(&c->node[m], values);
        if (reads && !values[LINEAR_B_DA]) continue;
        if (m == found->backward) values[found->y_slot] = c->node[found->forward].value[0];
        if (!find_scratch(c, &c->node[m], values, &scratch) || live_at(c, found, m) + scratch > limit) return false;
    }
    /* Then db and dbias of one after the other; dz is free after the last that reads it. */
    size_t bytes = live_at(c, found, found->backward);
    for (int32_t k = 0; k < found->readers; k++) {
        values_of_db(&c->node[found->reader[k]], values);
        bytes += made_by(c, found, k, found->reader[k]);
        if (!find_scratch(c, &c->node[found->reader[k]], values, &scratch) || bytes + scratch > limit) return false;
        vjp_value dz = dz_of(c, found, k);
        if (c->last[dz] <= found->backward && !shares_dz(c, found, k)) bytes -= c->graph->value[dz].bytes;
    }
    return true;
}

static bool can_wait_together(const combining *c, const candidate *found) {
    for (int32_t k = 0; k < found->readers; k++)
        if (!can_wait(c, found, found->reader[k])) return false;
    return fits(c, found);
}

/* What is chosen changes the bytes that are alive from its forward to its backward, so these do not overlap. */
static void choose(combining *c) {
    int32_t busy = NONE;
    for (int32_t n = 0; n < c->nodes; n++) {
        candidate found = {.forward = n};
        if (n <= busy || !is_candidate(c, n, &found.y_slot) || !find_backward(c, &found)) continue;
        if (!has_room(c, &found) || !can_wait_together(c, &found)) continue;
        c->dropped[n] = true;
        c->repeats[found.backward] = n;
        for (int32_t k = 0; k < found.readers; k++)
            c->later[found.reader[k]] = found.backward;
        busy = found.backward;
    }
}

/* ---- The new list of nodes --------------------------------------------------------------------------- */

/* Appends a node with other values; of the old outputs' bits in `adds`, those of outputs that it still has. */
static bool append(combining *c, const graph_node *node, const char *name, const vjp_value *values) {
    graph_node *made = graph_add_node(c->graph, node->op, node->pass, name, values, node->attributes);
    if (!made) return false;
    for (size_t i = 0; i < pass_of(node)->outputs; i++)
        if (values[i]) made->adds |= node->adds & 1u << i;
    return true;
}

static bool append_da(combining *c, const graph_node *node) {
    vjp_value values[VJP_MAX_SLOTS];
    values_of_da(node, values);
    return !values[LINEAR_B_DA] || append(c, node, node->name, values);
}

static bool append_db(combining *c, const graph_node *node) {
    char name[GRAPH_SCOPE_BYTES + 128];
    vjp_value values[VJP_MAX_SLOTS];
    values_of_db(node, values);
    snprintf(name, sizeof name, "%s.db", node->name);
    return (!values[LINEAR_B_DB] && !values[LINEAR_B_DBIAS]) || append(c, node, name, values);
}

static bool append_backward(combining *c, int32_t n) {
    const graph_node *node = &c->node[n], *forward = &c->node[c->repeats[n]];
    vjp_value values[VJP_MAX_SLOTS];
    memcpy(values, node->value, sizeof values);
    values[graph_slot(pass_of(node), pass_of(forward)->slots[0].name)] = forward->value[0];
    bool ok = append(c, node, node->name, values);
    for (int32_t m = c->repeats[n] + 1; m < n && ok; m++)
        if (c->later[m] == n) ok = append_db(c, &c->node[m]);
    return ok;
}

static bool append_all(combining *c) {
    bool ok = true;
    for (int32_t n = 0; n < c->nodes && ok; n++) {
        const graph_node *node = &c->node[n];
        if (c->dropped[n]) continue;
        if (c->repeats[n] != NONE)
            ok = append_backward(c, n);
        else if (c->later[n] != NONE)
            ok = append_da(c, node);
        else
            ok = append(c, node, node->name, node->value);
    }
    return ok;
}

vjp_status graph_rewrite_combine(graph_rewriting *w) {
    combining c = {.device = w->device, .graph = w->copy, .nodes = w->copy->nodes};
    size_t values = (size_t)w->copy->values, nodes = (size_t)w->copy->nodes + 1;
    c.writers = malloc(3 * values * sizeof *c.writers);
    c.repeats = malloc(2 * nodes * sizeof *c.repeats);
    c.dropped = calloc(nodes, sizeof *c.dropped);
    c.live = malloc((nodes + 1) * sizeof *c.live);
    bool ok = c.writers && c.repeats && c.dropped && c.live;
    if (ok) {
        c.first = c.writers + values;
        c.last = c.first + values;
        c.later = c.repeats + nodes;
        for (size_t n = 0; n < 2 * nodes; n++)
            c.repeats[n] = NONE;
        graph_node *old = graph_take_nodes(w->copy);
        c.node = old;
        find_uses(&c, w->result, w->own_values);
        choose(&c);
        ok = append_all(&c);
        graph_free_nodes(old, c.nodes);
    }
    free(c.writers);
    free(c.repeats);
    free(c.dropped);
    free(c.live);
    w->device->error[0] = 0; /* of a call that find_scratch() asked about and that is refused */
    return ok ? VJP_OK : vjp_fail(w->device, VJP_OUT_OF_MEMORY, "no memory to combine calls");
}

/* SPDX-License-Identifier: MIT */
/*
 * Keeping less for the backward. A value that the forward computes, that is not used while memory is at its peak, and
 * that one cheap call can compute again from values that are in memory anyway, is freed after its last use before the
 * peak and computed again before its first use after it: a norm's y from x, which the norm's backward reads, swiglu's y
 * from gate and up, a 16-bit weight from its f32 original. The same call on the same inputs gives the same bits.
 *
 * Cheap means one pass at the speed of memory. What such a call needs is already in memory as long as its result is, so
 * the bytes alive at any moment never grow. After each round the peak is elsewhere or lower; rounds end when nothing
 * can be freed at the peak, or when it is within the caller's limit. For a limit the largest values are freed first:
 * each costs a call, whatever its size.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph/rewrite/rewrite.h"

enum {
    MAX_ROUNDS = 16,
    MAX_LIMITED_ROUNDS = 64, /* each frees only what the limit asks for */
    /* Bytes moved for each byte that is freed: 2 for a norm, 3 for swiglu and for a weight's cast. */
    MAX_MOVED = 4,
    /* Smaller values than this share of the peak do not pay for a call. */
    MIN_SHARE = 4096
};

/* One round. Calls are numbered as the copy's nodes are; values are those that are no views. */
typedef struct recomputing {
    vjp_device *device;
    vjp_graph *graph;
    const bool *result;
    int32_t *writer;       /* [values]: the call that writes it; NONE, or SEVERAL */
    int32_t *first_write;  /* [values]: of storages; NONE */
    int32_t *first, *last; /* [values]: of storages, calls that use them; first NONE: no memory is needed */
    int32_t *after;        /* [values]: the first call after the peak that reads it; NONE */
    bool *at_peak;         /* [values]: used by the call at the peak */
    vjp_value *again;      /* [values]: the value that takes its place from call `after` on; 0: itself */
    int32_t *chosen;       /* nodes to repeat, in the reverse of their order */
    int32_t chosen_count;
    int32_t peak;
    size_t peak_bytes;
    size_t live_limit; /* 0: none */
    size_t *live;      /* [calls]: bytes */
} recomputing;

enum { NONE = GRAPH_NONE, SEVERAL = GRAPH_SEVERAL };

static const vjp_pass_info *pass_of(const graph_node *node) {
    return &node->op->info.pass[node->pass];
}

static vjp_value root_of(const recomputing *r, vjp_value value) {
    return r->graph->value[value].origin;
}

static bool is_result(const recomputing *r, vjp_value value, int32_t own_values) {
    return value < own_values && r->result[value];
}

/* ---- Where the peak is ------------------------------------------------------------------------------- */

static void find_uses(recomputing *r, int32_t own_values) {
    const vjp_graph *graph = r->graph;
    for (vjp_value v = 1; v < own_values; v++)
        if (r->result[v]) r->last[graph_storage(graph, v)] = graph->nodes;
    for (int32_t n = graph->nodes - 1; n >= 0; n--) {
        const graph_node *node = &graph->node[n];
        for (size_t i = 0; i < pass_of(node)->count; i++) {
            vjp_value value = node->value[i];
            if (!value) continue;
            vjp_value root = root_of(r, value), storage = graph_storage(graph, value);
            bool writes = i < pass_of(node)->outputs;
            if (writes) {
                r->writer[root] = r->writer[root] == NONE ? n : SEVERAL;
                r->first_write[storage] = n;
            }
            if (r->last[storage] == NONE && !writes) r->last[storage] = n;
            /* An output that no later call reads needs no memory. */
            if (r->last[storage] != NONE) r->first[storage] = n;
        }
    }
}

static void find_peak(recomputing *r) {
    const vjp_graph *graph = r->graph;
    graph_find_live(graph, graph->nodes, r->first, r->last, r->live);
    r->peak_bytes = 0;
    for (int32_t n = 0; n < graph->nodes; n++) {
        if (r->live[n] <= r->peak_bytes) continue;
        r->peak = n;
        r->peak_bytes = r->live[n];
    }
    for (int32_t n = graph->nodes - 1; n >= r->peak && n >= 0; n--) {
        const graph_node *node = &graph->node[n];
        for (size_t i = 0; i < pass_of(node)->count; i++) {
            if (!node->value[i]) continue;
            vjp_value root = root_of(r, node->value[i]);
            if (n == r->peak)
                r->at_peak[root] = true;
            else if (i >= pass_of(node)->outputs)
                r->after[root] = n;
        }
    }
}

/* ---- What is computed again -------------------------------------------------------------------------- */

/* Whether node n, repeated before call `at`, reads what it read the first time, all of it in memory until then. */
static bool inputs_last(const recomputing *r, int32_t n, int32_t at) {
    const graph_node *node = &r->graph->node[n];
    for (size_t i = pass_of(node)->outputs; i < pass_of(node)->count; i++) {
        if (!node->value[i]) continue;
        vjp_value root = root_of(r, node->value[i]), storage = graph_storage(r->graph, node->value[i]);
        int32_t written = r->first_write[storage];
        if (graph_is_persistent(r->graph->value[storage].role)) {
            if (written != NONE && written < at) return false;
        } else if (r->writer[root] == SEVERAL || r->last[storage] < at) {
            return false;
        }
    }
    return true;
}

/*
 * Whether a call is one pass at the speed of memory, as those are that multiply no matrices, moves few bytes for each
 * one that it frees, and has room for its scratch before call `at`.
 */
static bool is_cheap(const recomputing *r, const graph_node *node, size_t slot, int32_t at) {
    size_t count = pass_of(node)->count, scratch;
    vjp_tensor tensor[VJP_MAX_SLOTS];
    const vjp_tensor *present[VJP_MAX_SLOTS] = {0};
    for (size_t i = 0; i < count; i++) {
        if (!node->value[i] || (i < pass_of(node)->outputs && i != slot)) continue;
        tensor[i] = graph_tensor(r->graph, node->value[i]);
        present[i] = &tensor[i];
    }
    vjp_cost cost;
    /* A call that is refused here is refused, with its sentence, when the program is compiled. */
    if (vjp_min_cost(r->device, node->op, node->pass, present, count, node->attributes, &cost) != VJP_OK ||
        vjp_workspace_size(r->device, node->op, node->pass, present, count, node->attributes, &scratch) != VJP_OK)
        return false;
    double freed = (double)r->graph->value[node->value[slot]].bytes;
    return cost.flops == 0 && cost.bytes <= MAX_MOVED * freed && scratch <= r->peak_bytes - r->live[at];
}

/* Whether output `slot` of node n, made before the peak, is to be computed again after it. */
static bool pays(const recomputing *r, int32_t n, size_t slot, int32_t own_values) {
    const graph_node *node = &r->graph->node[n];
    vjp_value value = node->value[slot];
    if (!value || r->writer[value] != n || r->after[value] == NONE || r->at_peak[value]) return false;
    const graph_value *v = &r->graph->value[value];
    if (v->role != GRAPH_COMPUTED || v->storage != value || is_result(r, value, own_values)) return false;
    if (v->bytes < r->peak_bytes / MIN_SHARE || node->pass != VJP_FORWARD || node->adds) return false;
    for (size_t i = 0; i < pass_of(node)->outputs; i++)
        if (node->value[i] && graph_is_persistent(r->graph->value[graph_storage(r->graph, node->value[i])].role))
            return false;
    return inputs_last(r, n, r->after[value]) && is_cheap(r, node, slot, r->after[value]);
}

static int compare_sizes(const void *a, const void *b) {
    size_t x = *(const size_t *)a, y = *(const size_t *)b;
    return (x < y) - (x > y);
}

enum { SLOT = 0 }; /* of several outputs only the first is large */

/*
 * What a round frees for a limit: all values of more than `size` bytes, and of those with as many as that another
 * `bytes` together. `sizes` has room for one of each node.
 */
typedef struct share {
    size_t size, bytes;
} share;

static share share_for_limit(const recomputing *r, int32_t own_values, size_t *sizes) {
    size_t count = 0, over = r->peak_bytes - r->live_limit;
    for (int32_t n = 0; n < r->peak; n++)
        if (pays(r, n, SLOT, own_values)) sizes[count++] = r->graph->value[r->graph->node[n].value[SLOT]].bytes;
    qsort(sizes, count, sizeof *sizes, compare_sizes);
    share s = {0, SIZE_MAX};
    for (size_t i = 0, freed = 0; i < count && freed < over; freed += sizes[i++]) {
        if (sizes[i] != s.size) s = (share){sizes[i], over - freed};
    }
    return s;
}

/*
 * From the last node before the peak to the first: a node's inputs are then chosen after it, and, if they are computed
 * again themselves, in time for it.
 */
static void choose_values(recomputing *r, share wanted, int32_t own_values) {
    size_t freed = 0; /* of the values with `wanted.size` bytes */
    for (int32_t n = r->peak - 1; n >= 0; n--) {
        const graph_node *node = &r->graph->node[n];
        if (!pays(r, n, SLOT, own_values)) continue;
        size_t bytes = r->graph->value[node->value[SLOT]].bytes;
        if (bytes < wanted.size || (bytes == wanted.size && freed >= wanted.bytes)) continue;
        freed += bytes == wanted.size ? bytes : 0;
        r->chosen[r->chosen_count++] = n;
        int32_t at = r->after[node->value[SLOT]];
        for (size_t i = pass_of(node)->outputs; i < pass_of(node)->count; i++) {
            vjp_value root = node->value[i] ? root_of(r, node->value[i]) : 0;
            if (root && (r->after[root] == NONE || r->after[root] > at)) r->after[root] = at;
        }
    }
}

/* ---- The new list of nodes --------------------------------------------------------------------------- */

/* A value as a call after the peak reads it. */
static vjp_value latest(recomputing *r, vjp_value value) {
    vjp_value root = root_of(r, value), again = r->again[root];
    if (!again) return value;
    if (root == value) return again;
    const vjp_shape shape = r->graph->value[value].shape;
    return graph_add_view(r->graph, again, &shape);
}

/* Appends a node of the old list with its inputs as they are now. False, here and below: no memory. */
static bool append(recomputing *r, const graph_node *node, const char *name, const vjp_value *outputs) {
    vjp_value values[VJP_MAX_SLOTS] = {0};
    for (size_t i = 0; i < pass_of(node)->count; i++) {
        bool reads = i >= pass_of(node)->outputs;
        values[i] = !reads ? outputs[i] : node->value[i] ? latest(r, node->value[i]) : 0;
        if (reads && node->value[i] && !values[i]) return false;
    }
    graph_node *made = graph_add_node(r->graph, node->op, node->pass, name, values, node->attributes);
    if (made) made->adds = node->adds;
    return made != NULL;
}

static bool append_again(recomputing *r, const graph_node *node) {
    char name[GRAPH_SCOPE_BYTES + 128];
    vjp_value outputs[VJP_MAX_SLOTS] = {0};
    const graph_value old = r->graph->value[node->value[0]];
    snprintf(name, sizeof name, "%s.again", old.name);
    outputs[0] = graph_add_value(r->graph, GRAPH_COMPUTED, name, old.dtype, &old.shape);
    snprintf(name, sizeof name, "%s.again", node->name);
    if (!outputs[0] || !append(r, node, name, outputs)) return false;
    r->again[node->value[0]] = outputs[0];
    return true;
}

/* Each repeated node comes before the call that reads its value first; of several there, in the order of the graph. */
static bool append_all(recomputing *r, const graph_node *old, int32_t nodes) {
    int32_t *next = malloc(((size_t)nodes + 1) * sizeof *next); /* lists of chosen nodes, one for each call */
    int32_t *head = malloc(((size_t)nodes + 1) * sizeof *head);
    bool ok = next && head;
    for (int32_t n = 0; n < nodes && ok; n++)
        head[n] = NONE;
    for (int32_t i = 0; i < r->chosen_count && ok; i++) {
        int32_t at = r->after[old[r->chosen[i]].value[0]];
        next[r->chosen[i]] = head[at];
        head[at] = r->chosen[i];
    }
    for (int32_t n = 0; n < nodes && ok; n++) {
        for (int32_t chosen = head[n]; chosen != NONE && ok; chosen = next[chosen])
            ok = append_again(r, &old[chosen]);
        ok = ok && append(r, &old[n], old[n].name, old[n].value);
    }
    free(next);
    free(head);
    return ok;
}

static bool replace_nodes(recomputing *r) {
    int32_t nodes = r->graph->nodes;
    graph_node *old = graph_take_nodes(r->graph);
    bool ok = append_all(r, old, nodes);
    graph_free_nodes(old, nodes);
    return ok;
}

/* ---- Rounds ------------------------------------------------------------------------------------------ */

typedef enum outcome { NO_MEMORY, FREED, WITHIN_LIMIT, NOTHING_LEFT } outcome;

static outcome do_round(recomputing *r, int32_t own_values) {
    size_t values = (size_t)r->graph->values;
    int32_t *numbers = malloc(5 * values * sizeof *numbers);
    r->again = calloc(values, sizeof *r->again);
    r->at_peak = calloc(values, sizeof *r->at_peak);
    r->chosen = malloc(((size_t)r->graph->nodes + 1) * sizeof *r->chosen);
    r->live = malloc(((size_t)r->graph->nodes + 2) * sizeof *r->live);
    size_t *sizes = malloc(((size_t)r->graph->nodes + 1) * sizeof *sizes);
    r->chosen_count = 0;
    r->peak = 0;
    outcome found = NO_MEMORY;
    if (numbers && sizes && r->again && r->at_peak && r->chosen && r->live) {
        for (size_t i = 0; i < 5 * values; i++)
            numbers[i] = NONE;
        r->writer = numbers;
        r->first_write = r->writer + values;
        r->first = r->first_write + values;
        r->last = r->first + values;
        r->after = r->last + values;
        find_uses(r, own_values);
        find_peak(r);
        share wanted = {0, SIZE_MAX};
        bool within = r->live_limit && r->peak_bytes <= r->live_limit;
        if (r->live_limit && !within) wanted = share_for_limit(r, own_values, sizes);
        if (!within) choose_values(r, wanted, own_values);
        found = within ? WITHIN_LIMIT : r->chosen_count ? FREED : NOTHING_LEFT;
    }
    if (found == FREED && !replace_nodes(r)) found = NO_MEMORY;
    free(numbers);
    free(sizes);
    free(r->again);
    free(r->at_peak);
    free(r->chosen);
    free(r->live);
    return found;
}

vjp_status graph_rewrite_recompute(graph_rewriting *w) {
    recomputing r = {.device = w->device, .graph = w->copy, .result = w->result, .live_limit = w->live_limit};
    outcome found = w->copy->nodes ? FREED : NOTHING_LEFT;
    int rounds = w->live_limit ? MAX_LIMITED_ROUNDS : MAX_ROUNDS;
    for (int round = 0; round < rounds && found == FREED; round++)
        found = do_round(&r, w->own_values);
    if (found == NO_MEMORY) return vjp_fail(w->device, VJP_OUT_OF_MEMORY, "no memory to choose what is computed again");
    w->all = found == NOTHING_LEFT || !w->live_limit;
    w->device->error[0] = 0; /* of a call that is_cheap() asked about and that is refused */
    return VJP_OK;
}

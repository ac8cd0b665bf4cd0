/* SPDX-License-Identifier: MIT */
/*
 * Weights that need no cast. Training in bf16 keeps each weight in f32, casts it for the products, and adamw changes
 * the f32 one. A parameter that only casts to bf16 and adamw use lies in halves instead (core/half.h): all upper
 * halves, which are the weights in bf16, then all lower ones, in the memory that the f32 numbers would take.
 *
 *     y = cast(w)                       y is the first half of w's memory
 *     w = adamw(w, ...)                 w = adamw(w, ..., halves)
 *
 * on the left becomes what is on the right: the casts of a step, in both passes, are gone, and no memory holds their
 * results. A cast into a slice, as the qkv rewrite makes them, becomes a copy of half the bytes. A weight that is
 * halfway between two numbers of bf16 rounds away from zero and not to even: other bits, and as near.
 *
 * Programs that share a parameter must agree about it: the first one chooses, and those that cannot do as it did are
 * refused. vjp_program_read() and vjp_program_write() give and take f32 (access.c).
 */
#include <stdlib.h>

#include "graph/rewrite/rewrite.h"
#include "op/op.h"

enum { NONE = -1 };

typedef struct halving {
    vjp_device *device;
    vjp_graph *graph;
    const bool *result;
    int32_t own_values;
    bool *casts;        /* [values]: a cast to bf16 reads it */
    int32_t *refuses;   /* [values]: a node that needs it whole; NONE */
    int32_t *step;      /* [values]: the adamw that changes it; NONE */
    int32_t *writers;   /* [values] */
    vjp_value *weight;  /* [values]: of what a cast computes, the parameter; 0 */
    vjp_value *rounded; /* [values]: of a parameter, its upper halves; 0: not made yet */
} halving;

static const vjp_pass_info *pass_of(const graph_node *node) {
    return &node->op->info.pass[node->pass];
}

static vjp_value storage_of(const halving *h, vjp_value value) {
    return value ? graph_storage(h->graph, value) : 0;
}

static bool is_step(const halving *h, const graph_node *node, vjp_value w) {
    return node->op == &vjp_op_adamw && h->graph->value[node->value[ADAMW_W]].origin == w &&
           storage_of(h, node->value[ADAMW_W_OUT]) == w;
}

static bool is_cast(const halving *h, const graph_node *node) {
    return node->op == &vjp_op_cast && node->pass == VJP_FORWARD && !node->adds &&
           h->graph->value[node->value[CAST_Y]].dtype == VJP_BF16;
}

/* Whether a cast's result can be a view of the weight: whole, made by nothing else, and not read after the run. */
static bool is_plain(const halving *h, vjp_value y) {
    const graph_value *value = &h->graph->value[y];
    return value->role == GRAPH_COMPUTED && value->storage == y && h->writers[y] == 1 &&
           !(y < h->own_values && h->result[y]);
}

/* ---- Which parameters -------------------------------------------------------------------------------- */

/* Slot i of node n uses a parameter. */
static void note_use(halving *h, int32_t n, size_t i, vjp_value w) {
    const graph_node *node = &h->graph->node[n];
    bool steps = is_step(h, node, w) && (i == ADAMW_W || i == ADAMW_W_OUT);
    if (steps && (h->step[w] == NONE || h->step[w] == n))
        h->step[w] = n;
    else if (is_cast(h, node) && i == CAST_X)
        h->casts[w] = true;
    else if (h->refuses[w] == NONE)
        h->refuses[w] = n;
}

static void note_uses(halving *h) {
    const vjp_graph *graph = h->graph;
    for (int32_t n = 0; n < graph->nodes; n++)
        for (size_t i = 0; i < pass_of(&graph->node[n])->outputs; i++)
            if (graph->node[n].value[i]) h->writers[graph->value[graph->node[n].value[i]].origin]++;
    for (int32_t n = 0; n < graph->nodes; n++) {
        const graph_node *node = &graph->node[n];
        for (size_t i = 0; i < pass_of(node)->count; i++) {
            vjp_value w = storage_of(h, node->value[i]);
            if (w && graph->value[w].halves != GRAPH_WHOLE) note_use(h, n, i, w);
            /* Nothing that was cast may be read after the step, when the memory holds the new weights. */
            vjp_value of = node->value[i] ? h->weight[graph->value[node->value[i]].origin] : 0;
            if (of && h->step[of] != NONE && h->refuses[of] == NONE) h->refuses[of] = n;
        }
        if (!is_cast(h, node) || !is_plain(h, node->value[CAST_Y])) continue;
        vjp_value w = storage_of(h, node->value[CAST_X]);
        if (graph->value[w].halves != GRAPH_WHOLE) h->weight[node->value[CAST_Y]] = w;
    }
}

static vjp_status choose(halving *h) {
    for (vjp_value v = 1; v < h->graph->values; v++) {
        graph_value *w = &h->graph->value[v];
        if (w->halves == GRAPH_HALVES && h->refuses[v] != NONE)
            return vjp_fail(h->device, VJP_UNSUPPORTED,
                            "%s: it needs %s whole, which the shared program keeps in halves; compile that one without "
                            "options.halves",
                            h->graph->node[h->refuses[v]].name, w->name);
        if (w->halves == GRAPH_EITHER) w->halves = h->refuses[v] == NONE && h->casts[v] ? GRAPH_HALVES : GRAPH_WHOLE;
    }
    return VJP_OK;
}

/* ---- The change -------------------------------------------------------------------------------------- */

/* The results of casts become views, whatever views of them there are, too. */
static void make_views(halving *h) {
    for (vjp_value v = 1; v < h->graph->values; v++) {
        graph_value *own = &h->graph->value[v];
        vjp_value w = h->weight[own->origin];
        if (!w || h->graph->value[w].halves != GRAPH_HALVES) continue;
        own->role = GRAPH_VIEW;
        own->origin = w;
    }
}

/* 0: no memory. */
static vjp_value upper_halves(halving *h, vjp_value w) {
    if (h->rounded[w]) return h->rounded[w];
    const vjp_shape shape = h->graph->value[w].shape;
    vjp_value made = graph_add_view(h->graph, w, &shape);
    if (!made) return 0;
    h->graph->value[made].dtype = VJP_BF16;
    h->graph->value[made].bytes /= 2;
    return h->rounded[w] = made;
}

/* False: no memory. */
static bool change_nodes(halving *h) {
    vjp_graph *graph = h->graph;
    int32_t kept = 0;
    bool ok = true;
    for (int32_t n = 0; n < graph->nodes; n++) {
        graph_node node = graph->node[n];
        vjp_value w = storage_of(h, node.op == &vjp_op_adamw ? node.value[ADAMW_W]
                                    : is_cast(h, &node)      ? node.value[CAST_X]
                                                             : 0);
        if (w && graph->value[w].halves == GRAPH_HALVES) {
            if (node.op == &vjp_op_adamw) {
                ((vjp_adamw_attributes *)(void *)node.attributes)->halves = 1;
            } else if (h->weight[node.value[CAST_Y]]) {
                free(node.name);
                continue;
            } else {
                node.value[CAST_X] = upper_halves(h, w);
                ok = ok && node.value[CAST_X];
            }
        }
        graph->node[kept++] = node;
    }
    graph->nodes = kept;
    return ok;
}

vjp_status graph_rewrite_halves(graph_rewriting *w) {
    size_t values = (size_t)w->copy->values;
    halving h = {.device = w->device, .graph = w->copy, .result = w->result, .own_values = w->own_values};
    h.casts = calloc(values, sizeof *h.casts);
    h.refuses = malloc(2 * values * sizeof *h.refuses);
    h.writers = calloc(values, sizeof *h.writers);
    h.weight = calloc(2 * values, sizeof *h.weight);
    vjp_status status = VJP_OK;
    bool ok = h.casts && h.refuses && h.writers && h.weight;
    if (ok) {
        h.step = h.refuses + values;
        h.rounded = h.weight + values;
        for (size_t v = 0; v < 2 * values; v++)
            h.refuses[v] = NONE;
        note_uses(&h);
        status = choose(&h);
        if (status == VJP_OK) {
            make_views(&h);
            ok = change_nodes(&h);
        }
    }
    free(h.casts);
    free(h.refuses);
    free(h.writers);
    free(h.weight);
    return ok ? status : vjp_fail(w->device, VJP_OUT_OF_MEMORY, "no memory to lay weights in halves");
}

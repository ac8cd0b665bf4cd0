/* SPDX-License-Identifier: MIT */
/* The list of rewrites, which of them are on, and the copy of a graph that they change. */
#include "graph/rewrite/rewrite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph/program.h"
#include "op/op.h"

/* Where a product multiplies by the gate in a call of its own, nothing is gained. */
static bool gates_products(const vjp_device *device) {
    return device->backend->gates_products;
}

static bool steps_halves(const vjp_device *device) {
    const vjp_kernel *kernel = device->found->kernel(device, &vjp_op_adamw, VJP_FORWARD);
    return kernel && kernel->storage & VJP_TAKES_HALVES;
}

static bool pairs_calls(const vjp_device *device) {
    return device->backend->pairs;
}

static const graph_rewrite rewrites[] = {
    {.name = "residual", .on_host = false, .on_devices = true, .rounds = true, .apply = graph_rewrite_residual},
    {.name = "qkv", .on_host = false, .on_devices = true, .rounds = true, .apply = graph_rewrite_qkv},
    {.name = "halves", /* after qkv, which moves casts */
     .on_devices = true,
     .gains = steps_halves,
     .rounds = true,
     .on_request = true,
     .apply = graph_rewrite_halves},
    {.name = "recompute", .on_host = false, .on_devices = true, .for_limit = true, .apply = graph_rewrite_recompute},
    {.name = "combine", /* after recompute */
     .on_host = false,
     .on_devices = true,
     .for_limit = true,
     .apply = graph_rewrite_combine},
    {.name = "swiglu", .on_host = false, .on_devices = true, .gains = gates_products, .apply = graph_rewrite_swiglu},
    {.name = "pairs", .on_host = true, .on_devices = true, .gains = pairs_calls}, /* group.c does it */
};

enum { REWRITES = sizeof rewrites / sizeof rewrites[0] };

/* ---- Which are on ------------------------------------------------------------------------------------ */

static bool has_name(const graph_rewrite *rewrite, const char *name, size_t length) {
    bool all = length == 3 && memcmp(name, "all", 3) == 0;
    return all || (strlen(rewrite->name) == length && memcmp(rewrite->name, name, length) == 0);
}

/* One item of VJP_REWRITES. False: there is no such rewrite, or no sign. */
static bool switch_rewrites(const char *item, size_t length, bool on[REWRITES]) {
    bool found = false;
    if (!length || (item[0] != '+' && item[0] != '-')) return false;
    for (int i = 0; i < REWRITES; i++) {
        if (!has_name(&rewrites[i], item + 1, length - 1)) continue;
        on[i] = item[0] == '+';
        found = true;
    }
    return found;
}

static vjp_status choose_rewrites(vjp_device *device, bool limited, bool on[REWRITES]) {
    for (int i = 0; i < REWRITES; i++) {
        on[i] = vjp_device_is_host(device) ? rewrites[i].on_host : rewrites[i].on_devices;
        if (limited && rewrites[i].for_limit) on[i] = true;
        if (rewrites[i].gains && !rewrites[i].gains(device)) on[i] = false;
    }
    const char *list = getenv("VJP_REWRITES");
    while (list && *list) {
        size_t length = strcspn(list, ",");
        if (!switch_rewrites(list, length, on)) {
            char names[256] = "";
            for (int i = 0; i < REWRITES; i++)
                snprintf(names + strlen(names), sizeof names - strlen(names), ", %s", rewrites[i].name);
            return vjp_fail(device, VJP_INVALID,
                            "VJP_REWRITES: unknown item \"%.*s\"; an item is + or - and one of all%s",
                            (int)(length < 64 ? length : 64), list, names);
        }
        list += length;
        list += *list == ',';
    }
    return VJP_OK;
}

/* ---- The copy ---------------------------------------------------------------------------------------- */

/*
 * Copies the values, whose constant data stays with the caller's graph, and the nodes that are needed, each with the
 * outputs that it computes here.
 */
static bool copy_into(vjp_graph *copy, const vjp_graph *graph, const int32_t *maker, const int32_t *node,
                      int32_t nodes) {
    copy->id = graph->id;
    for (vjp_value v = 1; v < graph->values; v++) {
        const graph_value *from = &graph->value[v];
        /* As a computed value, so that its name is not looked up or checked. */
        vjp_value made = graph_add_value(copy, GRAPH_COMPUTED, from->name, from->dtype, &from->shape);
        if (!made) return false;
        char *name = copy->value[made].name;
        copy->value[made] = *from;
        copy->value[made].name = name;
        copy->value[made].node = copy->value[made].slot = -1;
    }
    for (int32_t i = 0; i < nodes; i++) {
        const graph_node *from = &graph->node[node[i]];
        vjp_value values[VJP_MAX_SLOTS];
        memcpy(values, from->value, sizeof values);
        for (size_t slot = 0; slot < from->op->info.pass[from->pass].outputs; slot++)
            if (values[slot] && !graph_computes(graph, maker, node[i], slot)) values[slot] = 0;
        graph_node *to = graph_add_node(copy, from->op, from->pass, from->name, values, from->attributes);
        if (!to) return false;
        to->adds = from->adds;
    }
    return true;
}

graph_node *graph_take_nodes(vjp_graph *copy) {
    graph_node *old = copy->node;
    copy->node = NULL;
    copy->nodes = copy->node_room = 0;
    names_free(&copy->node_names);
    return old;
}

void graph_free_nodes(graph_node *old, int32_t nodes) {
    for (int32_t n = 0; n < nodes; n++)
        free(old[n].name);
    free(old);
}

/* The first writer of each value, as the nodes are now. */
static void find_writers(vjp_graph *graph) {
    for (int32_t n = 0; n < graph->nodes; n++) {
        const graph_node *node = &graph->node[n];
        for (size_t i = 0; i < node->op->info.pass[node->pass].outputs; i++) {
            if (!node->value[i]) continue;
            graph_value *value = &graph->value[graph->value[node->value[i]].origin];
            if (value->node >= 0) continue;
            value->node = n;
            value->slot = (int32_t)i;
        }
    }
}

static vjp_status no_memory(vjp_device *device) {
    return vjp_fail(device, VJP_OUT_OF_MEMORY, "no memory to rewrite the graph");
}

void graph_rewritten_free(vjp_graph *rewritten) {
    for (vjp_value v = 1; rewritten && v < rewritten->values; v++)
        rewritten->value[v].data = NULL;
    vjp_graph_destroy(rewritten);
}

/* What a shared program keeps in halves or whole stays so; `on`: other parameters may be in halves. */
static void mark_halves(vjp_graph *copy, const vjp_program *share, bool on) {
    for (vjp_value v = 1; v < copy->values; v++) {
        graph_value *value = &copy->value[v];
        if (value->role != GRAPH_PARAMETER || value->dtype != VJP_F32) continue;
        bool shared = share && v < share->values && share->value[v].name;
        value->halves = shared ? share->value[v].halves ? GRAPH_HALVES : GRAPH_WHOLE : on ? GRAPH_EITHER : GRAPH_WHOLE;
    }
}

static bool keeps_halves(const vjp_program *program) {
    bool any = false;
    for (vjp_value v = 1; program && v < program->values && !any; v++)
        any = program->value[v].halves;
    return any;
}

vjp_status graph_rewrite_all(vjp_device *device, const vjp_graph *graph, const vjp_value *results, size_t count,
                             const vjp_program_options *options, size_t live_limit, graph_rewritten *rewritten) {
    bool on[REWRITES], any = false, halves = false, shares_halves = keeps_halves(options->share);
    *rewritten = (graph_rewritten){.recomputes_all = true};
    vjp_status status = choose_rewrites(device, options->arena_limit != 0, on);
    for (int i = 0; i < REWRITES; i++) {
        if (!rewrites[i].apply) {
            rewritten->pairs = on[i] && pairs_calls(device) && !options->unplanned;
            on[i] = false;
        }
        on[i] = on[i] && (rewrites[i].rounds || !options->unplanned) && (!rewrites[i].on_request || options->halves);
        if (rewrites[i].apply == graph_rewrite_halves) {
            halves = on[i];
            on[i] = on[i] || shares_halves;
        }
        any = any || on[i];
    }
    if (status != VJP_OK || !any) return status;
    bool *needed = calloc(2 * (size_t)graph->values, sizeof *needed);
    int32_t *node = malloc(((size_t)graph->nodes + 1) * sizeof *node), nodes = 0;
    int32_t *maker = malloc((size_t)graph->values * sizeof *maker);
    vjp_graph *copy = vjp_graph_create();
    if (!needed || !node || !maker || !copy ||
        !graph_find_needed(graph, results, count, needed, needed + graph->values, maker, node, &nodes) ||
        !copy_into(copy, graph, maker, node, nodes))
        status = no_memory(device);
    if (status == VJP_OK) mark_halves(copy, options->share, halves);
    graph_rewriting w = {.device = device,
                         .copy = copy,
                         .result = needed + graph->values,
                         .own_values = graph->values,
                         .live_limit = live_limit,
                         .all = true};
    for (int i = 0; i < REWRITES && status == VJP_OK; i++)
        if (on[i]) status = rewrites[i].apply(&w);
    free(needed);
    free(node);
    free(maker);
    if (status != VJP_OK) {
        graph_rewritten_free(copy);
        return status;
    }
    find_writers(copy);
    rewritten->graph = copy;
    rewritten->recomputes_all = w.all;
    return VJP_OK;
}

/* SPDX-License-Identifier: MIT */
/* A graph as text for people and as dot for Graphviz. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph/graph.h"

/* Text that grows; NULL once memory ran out. */
typedef struct growing {
    char *text;
    size_t used, room;
    bool failed;
} growing;

static void put(growing *g, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put(growing *g, const char *format, ...) {
    va_list list, again;
    va_start(list, format);
    va_copy(again, list);
    int wanted = vsnprintf(NULL, 0, format, list);
    va_end(list);
    if (wanted < 0) g->failed = true;
    if (!g->failed && g->used + (size_t)wanted + 1 > g->room) {
        size_t room = 2 * (g->used + (size_t)wanted + 1);
        char *more = realloc(g->text, room);
        g->failed = !more;
        if (more) {
            g->text = more;
            g->room = room;
        }
    }
    if (!g->failed) {
        vsnprintf(g->text + g->used, g->room - g->used, format, again);
        g->used += (size_t)wanted;
    }
    va_end(again);
}

static char *finish(growing *g) {
    if (!g->failed) return g->text;
    free(g->text);
    return NULL;
}

static const char *const role_names[] = {"input", "parameter", "state", "constant", "computed", "view"};

static void put_shape(growing *g, const graph_value *value) {
    char text[VJP_SHAPE_TEXT];
    put(g, "%s%s", vjp_dtype_name(value->dtype), value->shape.ndim ? vjp_shape_text(&value->shape, text) : "[]");
}

/* Attributes that are not their defaults, as name=value. */
static void put_attributes(growing *g, const graph_node *node) {
    const vjp_op_info *info = &node->op->info;
    int64_t defaults[VJP_MAX_ATTRIBUTE_BYTES / 8];
    vjp_op_defaults(node->op, defaults);
    for (size_t i = 0; i < info->attribute_count; i++) {
        const vjp_attribute *a = &info->attributes[i];
        const char *own = (const char *)node->attributes + a->offset;
        if (memcmp(own, (const char *)defaults + a->offset, 8) == 0) continue;
        int64_t integer;
        double real;
        memcpy(&integer, own, 8);
        memcpy(&real, own, 8);
        if (a->type == VJP_REAL)
            put(g, " %s=%g", a->name, real);
        else if (a->type == VJP_CHOICE)
            put(g, " %s=%s", a->name, a->choices[integer]);
        else
            put(g, " %s=%lld", a->name, (long long)integer);
    }
}

char *vjp_graph_text(const vjp_graph *graph) {
    if (!graph) return NULL;
    growing g = {0};
    put(&g, "%s", "");
    for (vjp_value v = 1; v < graph->values; v++) {
        const graph_value *value = &graph->value[v];
        if (!graph_is_persistent(value->role)) continue;
        put(&g, "%%%-5d %-9s ", v, role_names[value->role]);
        put_shape(&g, value);
        put(&g, "  %s\n", value->name);
    }
    for (int32_t n = 0; n < graph->nodes; n++) {
        const graph_node *node = &graph->node[n];
        const vjp_pass_info *pass = &node->op->info.pass[node->pass];
        for (size_t i = 0; i < pass->outputs; i++) {
            if (!node->value[i] || node->also >> i & 1) continue;
            put(&g, "%s%%%d", i ? ", " : "", node->value[i]);
            put(&g, "%s", node->adds >> i & 1 ? " += " : " = ");
            put_shape(&g, &graph->value[node->value[i]]);
        }
        put(&g, "  %s.%s(", node->op->info.name, vjp_pass_name(node->pass));
        const char *comma = "";
        for (size_t i = pass->outputs; i < pass->count; i++) {
            if (!node->value[i]) continue;
            put(&g, "%s%s=%%%d", comma, pass->slots[i].name, node->value[i]);
            comma = ", ";
        }
        put(&g, ")");
        put_attributes(&g, node);
        put(&g, "  ; %s\n", node->name);
    }
    return finish(&g);
}

/* Names can hold what dot would read as syntax. */
static void put_quoted(growing *g, const char *text) {
    put(g, "\"");
    for (; *text; text++)
        put(g, *text == '"' || *text == '\\' ? "\\%c" : "%c", *text);
    put(g, "\"");
}

char *vjp_graph_dot(const vjp_graph *graph) {
    if (!graph) return NULL;
    growing g = {0};
    put(&g, "digraph vjp {\n  rankdir=TB;\n  node [fontname=\"sans-serif\", fontsize=10];\n");
    for (vjp_value v = 1; v < graph->values; v++) {
        const graph_value *value = &graph->value[v];
        if (!graph_is_persistent(value->role)) continue;
        put(&g, "  v%d [shape=%s, label=", v, value->role == GRAPH_INPUT ? "invhouse" : "box");
        put_quoted(&g, value->name);
        put(&g, "];\n");
    }
    for (int32_t n = 0; n < graph->nodes; n++) {
        const graph_node *node = &graph->node[n];
        const vjp_pass_info *pass = &node->op->info.pass[node->pass];
        put(&g, "  n%d [shape=box, style=\"rounded,filled\", fillcolor=\"%s\", label=", n,
            node->pass == VJP_FORWARD ? "#dbe9f6" : "#fde3cf");
        put_quoted(&g, node->name);
        put(&g, "];\n");
        for (size_t i = pass->outputs; i < pass->count; i++) {
            if (!node->value[i]) continue;
            vjp_value origin = graph->value[node->value[i]].origin;
            const graph_value *value = &graph->value[origin];
            if (value->node >= 0 && value->node != n)
                put(&g, "  n%d -> n%d;\n", value->node, n);
            else if (graph_is_persistent(value->role))
                put(&g, "  v%d -> n%d;\n", origin, n);
        }
    }
    put(&g, "}\n");
    return finish(&g);
}

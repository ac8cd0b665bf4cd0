/* SPDX-License-Identifier: MIT */
/*
 * Queries, keys and values as one product. Where three products of the same rows only feed attention, directly or
 * through rope,
 *
 *     q = rope(linear(x, wq))                     qkv = linear(x, [wq; wk; wv])
 *     k = rope(linear(x, wk))                     q, k, v are slices of qkv, in which rope works in place
 *     v = linear(x, wv)
 *     dx = linear.backward(dv, x, wv)             dq, dk, dv are slices of dqkv
 *     dx += linear.backward(dk, x, wk)            dx, [dwq; dwk; dwv] = linear.backward(dqkv, x, [wq; wk; wv])
 *     dx += linear.backward(dq, x, wq)
 *
 * on the left becomes what is on the right: one product instead of three that are narrow, and dx is written once
 * instead of three times and read twice. It is rounded once, too, so its bits are others. q and k lie side by side, so
 * that one rope turns both. Forward and backward are joined independently of each other.
 *
 * The weights lie one below the other in memory: 16-bit ones are cast there, others are copied, which costs little
 * where there are more rows of x than of weights. Attention's and rope's kernels must take rows that lie apart.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph/rewrite/rewrite.h"
#include "op/op.h"

enum { PARTS = 3, NONE = -1, SEVERAL = -2 };

/* Weights, or biases, that lie one below the other. */
typedef struct stack {
    vjp_value part[PARTS], whole;
} stack;

/* A product in the place of three. */
typedef struct product {
    int32_t at[PARTS], last; /* the nodes that it replaces, and the last of them, where it is */
    int32_t turn[PARTS];     /* rope: in the forward right after it, in the backward before; NONE */
    vjp_value turned[2];     /* from, to: where one rope turns q and k; 0: each has its own */
    vjp_value value[VJP_MAX_SLOTS];
    uint32_t adds;
    vjp_value copy[2 * PARTS][2]; /* from, to: made before it */
    int copies;
} product;

typedef struct joining {
    vjp_device *device;
    vjp_graph *graph;
    const bool *result;
    int32_t own_values;
    const graph_node *node; /* the old list */
    int32_t nodes;
    int32_t *writer;  /* [values]: of values that are no views, the node that writes them; NONE, or SEVERAL */
    int32_t values;   /* before the first change */
    int32_t *joined;  /* [nodes]: the product that takes the node's place; NONE */
    product *product; /* [nodes] */
    int32_t products;
    stack *stack; /* [2 * nodes] */
    int32_t stacks;
} joining;

/* Where q, k or v, or its gradient, comes from: the value that is a product's, and that behind or before rope. */
typedef struct part {
    vjp_value own, turned; /* turned 0: there is no rope */
    int32_t product;       /* node */
    int64_t width;
} part;

static const vjp_pass_info *pass_of(const graph_node *node) {
    return &node->op->info.pass[node->pass];
}

static vjp_value root_of(const joining *j, vjp_value value) {
    return j->graph->value[value].origin;
}

static bool is_result(const joining *j, vjp_value value) {
    return value < j->own_values && j->result[value];
}

static int64_t last_size(const joining *j, vjp_value value) {
    const vjp_shape *shape = &j->graph->value[value].shape;
    return shape->ndim ? shape->size[shape->ndim - 1] : 0;
}

/* ---- Uses -------------------------------------------------------------------------------------------- */

static void find_writers(joining *j) {
    for (int32_t v = 0; v < j->values; v++)
        j->writer[v] = NONE;
    for (int32_t n = 0; n < j->nodes; n++)
        for (size_t i = 0; i < pass_of(&j->node[n])->outputs; i++) {
            if (!j->node[n].value[i]) continue;
            int32_t *writer = &j->writer[root_of(j, j->node[n].value[i])];
            *writer = *writer == NONE ? n : SEVERAL;
        }
}

/* Whether a value is whole and computed by one node, which adds to nothing. */
static bool is_plain(const joining *j, vjp_value v) {
    const graph_value *value = &j->graph->value[v];
    return v && v < j->values && value->role == GRAPH_COMPUTED && value->storage == v && j->writer[v] >= 0 &&
           !j->node[j->writer[v]].adds;
}

static bool reads(const joining *j, int32_t n, vjp_value root) {
    const graph_node *node = &j->node[n];
    for (size_t i = pass_of(node)->outputs; i < pass_of(node)->count; i++)
        if (node->value[i] && root_of(j, node->value[i]) == root) return true;
    return false;
}

/* The node that alone reads a value; NONE: none does; SEVERAL. */
static int32_t reader_of(const joining *j, vjp_value root) {
    int32_t found = NONE;
    for (int32_t n = 0; n < j->nodes && found != SEVERAL; n++)
        if (reads(j, n, root)) found = found == NONE ? n : SEVERAL;
    return found;
}

static bool touches(const joining *j, int32_t n, vjp_value value, bool writes_only) {
    const graph_node *node = &j->node[n];
    size_t count = writes_only ? pass_of(node)->outputs : pass_of(node)->count;
    for (size_t i = 0; i < count && value; i++)
        if (node->value[i] && graph_storage(j->graph, node->value[i]) == graph_storage(j->graph, value)) return true;
    return false;
}

/* Whether a slot of a node takes a slice with rows of that width. */
static bool takes_rows(const joining *j, const graph_node *node, size_t slot, int64_t width) {
    if (!(pass_of(node)->slots[slot].flags & VJP_SLOT_ROWS)) return false;
    const vjp_kernel *kernel = j->device->found->kernel(j->device, node->op, node->pass);
    const vjp_shape *shape = &j->graph->value[node->value[slot]].shape;
    return kernel && (kernel->storage & VJP_TAKES_ROWS) && shape->ndim >= 3 &&
           shape->size[shape->ndim - 2] * shape->size[shape->ndim - 1] == width;
}

/* Whether all nodes but `except` that use a value take it as a slice, and those that read it come after a node. */
static bool all_take_rows(const joining *j, vjp_value root, int64_t width, int32_t except, int32_t after) {
    for (int32_t n = 0; n < j->nodes; n++) {
        const graph_node *node = &j->node[n];
        for (size_t i = 0; i < pass_of(node)->count && n != except; i++) {
            if (!node->value[i] || root_of(j, node->value[i]) != root) continue;
            if (!takes_rows(j, node, i, width) || (i >= pass_of(node)->outputs && n <= after)) return false;
        }
    }
    return true;
}

/* ---- What lies one below the other -------------------------------------------------------------------- */

static const stack *find_stack(const joining *j, const vjp_value parts[PARTS]) {
    for (int32_t k = 0; k < j->stacks; k++)
        if (memcmp(j->stack[k].part, parts, sizeof j->stack[k].part) == 0) return &j->stack[k];
    return NULL;
}

static bool is_kept(const joining *j, vjp_value v) {
    return graph_is_persistent(j->graph->value[v].role);
}

/* Whether three values are there, different and alike but for their first sizes, and of one kind: computed, or kept. */
static bool are_alike(const joining *j, const vjp_value parts[PARTS]) {
    for (int i = 0; i < PARTS; i++)
        if (!parts[i] || root_of(j, parts[i]) != parts[i] || parts[i] == parts[(i + 1) % PARTS]) return false;
    const graph_value *first = &j->graph->value[parts[0]];
    for (int i = 0; i < PARTS; i++) {
        const graph_value *own = &j->graph->value[parts[i]];
        if (own->dtype != first->dtype || own->shape.ndim != first->shape.ndim || own->shape.ndim < 1) return false;
        if (own->shape.size[0] == 0) return false;
        for (int axis = 1; axis < own->shape.ndim; axis++)
            if (own->shape.size[axis] != first->shape.size[axis] || own->shape.size[axis] == 0) return false;
    }
    return true;
}

static bool all_plain(const joining *j, const vjp_value parts[PARTS]) {
    return is_plain(j, parts[0]) && is_plain(j, parts[1]) && is_plain(j, parts[2]);
}

/* Whether values that a node `at` reads can lie one below the other: where they are made, or as copies of what is kept.
 */
static bool can_stack(const joining *j, const vjp_value parts[PARTS], int32_t at, int64_t rows) {
    bool known = find_stack(j, parts);
    if (!known && !are_alike(j, parts)) return false;
    if (all_plain(j, parts) || (known && !is_kept(j, parts[0]))) return true;
    int64_t sum = 0;
    for (int i = 0; i < PARTS; i++) {
        sum += j->graph->value[parts[i]].shape.size[0];
        if (!is_kept(j, parts[i])) return false;
        for (int32_t n = 0; n < at; n++)
            if (touches(j, n, parts[i], true)) return false;
    }
    return rows >= sum;
}

/* Makes a value, and all views of it, slices of another one. */
static void make_slice(joining *j, vjp_value value, vjp_value whole, size_t offset, int64_t row, int64_t step) {
    for (vjp_value v = 1; v < j->graph->values; v++) {
        graph_value *own = &j->graph->value[v];
        if (own->origin != value) continue;
        own->role = GRAPH_VIEW;
        own->origin = whole;
        own->offset = offset;
        own->row = row;
        own->step = step;
    }
}

/* A new value of a shape whose size on one axis is the sum of those of three. 0: no memory. */
static vjp_value add_whole(joining *j, const vjp_value like[PARTS], int axis) {
    vjp_shape shape = j->graph->value[like[0]].shape;
    for (int i = 1; i < PARTS; i++)
        shape.size[axis] += j->graph->value[like[i]].shape.size[axis];
    char name[GRAPH_SCOPE_BYTES + 128];
    snprintf(name, sizeof name, "%s.qkv", j->graph->value[like[0]].name);
    return graph_add_value(j->graph, GRAPH_COMPUTED, name, j->graph->value[like[0]].dtype, &shape);
}

/* The value in which three lie one below the other; 0: no memory. */
static vjp_value stacked(joining *j, product *p, const vjp_value parts[PARTS]) {
    const stack *known = find_stack(j, parts);
    if (known) return known->whole;
    bool plain = all_plain(j, parts);
    stack made = {.whole = add_whole(j, parts, 0)};
    memcpy(made.part, parts, sizeof made.part);
    size_t offset = 0;
    for (int i = 0; i < PARTS && made.whole; i++) {
        size_t bytes = j->graph->value[parts[i]].bytes;
        if (plain) {
            make_slice(j, parts[i], made.whole, offset, 0, 0);
        } else {
            const vjp_shape shape = j->graph->value[parts[i]].shape;
            vjp_value to = graph_add_view(j->graph, made.whole, &shape);
            if (!to) return 0;
            j->graph->value[to].offset = offset;
            p->copy[p->copies][0] = parts[i];
            p->copy[p->copies++][1] = to;
        }
        offset += bytes;
    }
    j->stack[j->stacks++] = made;
    return made.whole;
}

/* The values side by side in rows; 0: no memory. `like`: values with the shapes that the product has for them. */
static vjp_value side_by_side(joining *j, const part parts[PARTS], const vjp_value like[PARTS]) {
    vjp_value whole = add_whole(j, like, j->graph->value[like[0]].shape.ndim - 1);
    size_t offset = 0;
    for (int i = 0; i < PARTS && whole; i++) {
        make_slice(j, parts[i].own, whole, offset, parts[i].width, last_size(j, whole));
        if (parts[i].turned) make_slice(j, parts[i].turned, whole, offset, parts[i].width, last_size(j, whole));
        offset += (size_t)parts[i].width * vjp_dtype_size(j->graph->value[whole].dtype);
    }
    return whole;
}

/* Whether two ropes turn heads of the same size at the same times by the same angles. */
static bool turn_alike(const joining *j, int32_t one, int32_t other) {
    if (one == NONE || other == NONE) return false;
    const graph_node *a = &j->node[one], *b = &j->node[other];
    const vjp_shape *x = &j->graph->value[a->value[0]].shape, *y = &j->graph->value[b->value[0]].shape;
    if (memcmp(a->attributes, b->attributes, a->op->info.attribute_bytes) != 0 || x->ndim != y->ndim) return false;
    for (int i = 0; i < x->ndim; i++)
        if (i != x->ndim - 2 && x->size[i] != y->size[i]) return false;
    for (size_t i = pass_of(a)->outputs + 1; i < pass_of(a)->count; i++) /* but the first input, which is turned */
        if (a->value[i] != b->value[i]) return false;
    return true;
}

/* The heads of q and k, as one rope takes them. 0: no memory. */
static vjp_value both_heads(joining *j, const product *p, const part parts[PARTS], vjp_value whole) {
    vjp_shape shape = j->graph->value[j->node[p->turn[0]].value[0]].shape;
    shape.size[shape.ndim - 2] += j->graph->value[j->node[p->turn[1]].value[0]].shape.size[shape.ndim - 2];
    vjp_value view = graph_add_view(j->graph, whole, &shape);
    if (!view) return 0;
    j->graph->value[view].row = parts[0].width + parts[1].width;
    j->graph->value[view].step = last_size(j, whole);
    return view;
}

/* One rope for q and k where that is possible. False: no memory. */
static bool turn_together(joining *j, product *p, const part parts[PARTS], vjp_value whole) {
    if (!turn_alike(j, p->turn[0], p->turn[1])) return true;
    for (int i = 0; i < 2; i++)
        if (!(p->turned[i] = both_heads(j, p, parts, whole))) return false;
    return true;
}

static void replace(joining *j, const product *p) {
    for (int i = 0; i < PARTS; i++) {
        j->joined[p->at[i]] = j->products;
        if (p->turn[i] != NONE) j->joined[p->turn[i]] = j->products;
    }
    j->product[j->products++] = *p;
}

/* ---- Forward ----------------------------------------------------------------------------------------- */

/* Whether a node is a product with a shared weight [N, K] and nothing but a bias. */
static bool is_product(const joining *j, int32_t n, vjp_pass pass) {
    const graph_node *node = &j->node[n];
    const vjp_linear_attributes *attributes = (const void *)node->attributes;
    if (node->op != &vjp_op_linear || node->pass != pass || j->joined[n] != NONE) return false;
    vjp_value b = node->value[pass == VJP_FORWARD ? LINEAR_B : LINEAR_B_B];
    return attributes->activation == VJP_ACTIVATION_NONE && attributes->transpose_b && !attributes->zero_nan &&
           j->graph->value[b].shape.ndim == 2;
}

/* Follows an input of attention back to a product. */
static bool find_part(const joining *j, vjp_value value, part *p) {
    vjp_value root = value ? root_of(j, value) : 0;
    *p = (part){0};
    if (!is_plain(j, root) || is_result(j, root)) return false;
    int32_t n = j->writer[root];
    if (j->node[n].op == &vjp_op_rope && j->node[n].pass == VJP_FORWARD) {
        p->turned = root;
        root = root_of(j, j->node[n].value[ROPE_X]);
        if (!is_plain(j, root) || is_result(j, root) || reader_of(j, root) != n) return false;
        n = j->writer[root];
    }
    if (!is_product(j, n, VJP_FORWARD)) return false;
    const vjp_value *values = j->node[n].value;
    vjp_value pre = values[LINEAR_PRE];
    if (values[LINEAR_Y] != root || values[LINEAR_RESIDUAL] || values[LINEAR_GATE]) return false;
    if (pre && (is_result(j, pre) || reader_of(j, pre) != NONE)) return false;
    p->own = root;
    p->product = n;
    p->width = last_size(j, root);
    return p->width > 0;
}

static bool are_different(const part parts[PARTS]) {
    return parts[0].product != parts[1].product && parts[1].product != parts[2].product &&
           parts[0].product != parts[2].product;
}

static int32_t latest(const part parts[PARTS]) {
    int32_t last = parts[0].product;
    for (int i = 1; i < PARTS; i++)
        if (parts[i].product > last) last = parts[i].product;
    return last;
}

static int64_t rows_of(const joining *j, vjp_value value) {
    const vjp_shape *shape = &j->graph->value[value].shape;
    return vjp_shape_product(shape, 0, shape->ndim - 1);
}

/* The three values of a slot of the products, and whether all have one or none has. */
static bool gather(const joining *j, const part parts[PARTS], int slot, vjp_value values[PARTS]) {
    for (int i = 0; i < PARTS; i++)
        values[i] = j->node[parts[i].product].value[slot];
    return !values[0] == !values[1] && !values[0] == !values[2];
}

/* Whether what a node reads is not written between it and a later one. */
static bool are_kept_until(const joining *j, int32_t node, int32_t last) {
    const graph_node *own = &j->node[node];
    for (int32_t n = node + 1; n < last; n++)
        for (size_t i = pass_of(own)->outputs; i < pass_of(own)->count; i++)
            if (touches(j, n, own->value[i], true)) return false;
    return true;
}

/* The products that a node of attention reads, of either pass. False: no memory. */
static bool join_forward(joining *j, const graph_node *attention) {
    static const int slots[VJP_PASS_COUNT][PARTS] = {{ATTENTION_Q, ATTENTION_K, ATTENTION_V},
                                                     {ATTENTION_B_Q, ATTENTION_B_K, ATTENTION_B_V}};
    part parts[PARTS];
    for (int i = 0; i < PARTS; i++)
        if (!find_part(j, attention->value[slots[attention->pass][i]], &parts[i])) return true;
    product p = {.last = latest(parts)};
    vjp_value a[PARTS], b[PARTS], bias[PARTS], y[PARTS];
    if (!are_different(parts) || !gather(j, parts, LINEAR_A, a) || !gather(j, parts, LINEAR_B, b) ||
        !gather(j, parts, LINEAR_BIAS, bias) || !gather(j, parts, LINEAR_Y, y))
        return true;
    int64_t rows = rows_of(j, a[0]);
    if (a[0] != a[1] || a[0] != a[2] || !can_stack(j, b, p.last, rows)) return true;
    if (bias[0] && !can_stack(j, bias, p.last, rows)) return true;
    for (int i = 0; i < PARTS; i++) {
        vjp_value turned = parts[i].turned;
        p.at[i] = parts[i].product;
        p.turn[i] = turned ? j->writer[turned] : NONE;
        if (!are_kept_until(j, p.at[i], p.last) || (turned && !are_kept_until(j, p.turn[i], p.last))) return true;
        if (!all_take_rows(j, parts[i].own, parts[i].width, p.at[i], turned ? NONE : p.last)) return true;
        if (turned && !all_take_rows(j, turned, parts[i].width, NONE, p.last)) return true;
    }
    p.value[LINEAR_A] = a[0];
    p.value[LINEAR_B] = stacked(j, &p, b);
    p.value[LINEAR_BIAS] = bias[0] ? stacked(j, &p, bias) : 0;
    p.value[LINEAR_Y] = side_by_side(j, parts, y);
    if (!p.value[LINEAR_B] || !p.value[LINEAR_Y] || (bias[0] && !p.value[LINEAR_BIAS])) return false;
    if (!turn_together(j, &p, parts, p.value[LINEAR_Y])) return false;
    replace(j, &p);
    return true;
}

/* ---- Backward ---------------------------------------------------------------------------------------- */

/* Follows an output of attention's backward to the product's backward that alone reads it. */
static bool find_gradient(const joining *j, vjp_value value, part *p) {
    *p = (part){.own = value ? root_of(j, value) : 0};
    if (!is_plain(j, p->own) || is_result(j, p->own)) return false;
    int32_t n = reader_of(j, p->own);
    if (n >= 0 && j->node[n].op == &vjp_op_rope && j->node[n].pass == VJP_BACKWARD) {
        p->turned = p->own;
        p->own = root_of(j, j->node[n].value[ROPE_B_DX]);
        if (!is_plain(j, p->own) || is_result(j, p->own)) return false;
        n = reader_of(j, p->own);
    }
    if (n < 0 || !is_product(j, n, VJP_BACKWARD)) return false;
    const vjp_value *values = j->node[n].value;
    if (root_of(j, values[LINEAR_B_DY]) != p->own || values[LINEAR_B_PRE] || values[LINEAR_B_DRESIDUAL] ||
        values[LINEAR_B_GATE])
        return false;
    for (size_t i = LINEAR_B_DY + 1; i < pass_of(&j->node[n])->count; i++)
        if (values[i] && root_of(j, values[i]) == p->own) return false;
    p->product = n;
    p->width = last_size(j, values[LINEAR_B_DY]);
    return p->width > 0;
}

/* Whether da is one value, to which all but the first of the products add. `adds`: the first does, too. */
static bool add_up(const joining *j, const part parts[PARTS], const vjp_value da[PARTS], bool *adds) {
    if (da[0] != da[1] || da[0] != da[2]) return false;
    int first = 0;
    for (int i = 1; i < PARTS; i++)
        if (parts[i].product < parts[first].product) first = i;
    *adds = j->node[parts[first].product].adds >> LINEAR_B_DA & 1;
    for (int i = 0; i < PARTS && da[0]; i++)
        if (i != first && !(j->node[parts[i].product].adds >> LINEAR_B_DA & 1)) return false;
    return true;
}

/* Whether gradients of weights or biases can be made one below the other. */
static bool can_make(const joining *j, const part parts[PARTS], int slot, const vjp_value made[PARTS]) {
    if (!made[0]) return true;
    for (int i = 0; i < PARTS; i++)
        if (j->node[parts[i].product].adds >> slot & 1 || j->writer[root_of(j, made[i])] != parts[i].product)
            return false;
    return are_alike(j, made) && j->graph->value[made[0]].role == GRAPH_COMPUTED &&
           j->graph->value[made[1]].role == GRAPH_COMPUTED && j->graph->value[made[2]].role == GRAPH_COMPUTED &&
           graph_storage(j->graph, made[0]) == made[0] && graph_storage(j->graph, made[1]) == made[1] &&
           graph_storage(j->graph, made[2]) == made[2];
}

/* Whether the products can wait for the last: nothing in between uses what they make or changes what they read. */
static bool can_wait(const joining *j, const part parts[PARTS], int32_t last) {
    for (int i = 0; i < PARTS; i++)
        for (int32_t n = parts[i].product + 1; n < last; n++) {
            const graph_node *node = &j->node[parts[i].product];
            if (n == parts[0].product || n == parts[1].product || n == parts[2].product) continue;
            for (size_t slot = 0; slot < pass_of(node)->count; slot++)
                if (touches(j, n, node->value[slot], slot >= pass_of(node)->outputs)) return false;
        }
    return true;
}

/* Gradients of weights or biases one below the other; 0: no memory. */
static vjp_value made_together(joining *j, const vjp_value parts[PARTS]) {
    vjp_value whole = add_whole(j, parts, 0);
    size_t offset = 0;
    for (int i = 0; i < PARTS && whole; i++) {
        make_slice(j, parts[i], whole, offset, 0, 0);
        offset += j->graph->value[parts[i]].bytes;
    }
    return whole;
}

/* False: no memory. */
static bool join_backward(joining *j, const graph_node *attention) {
    static const int slots[PARTS] = {ATTENTION_B_DQ, ATTENTION_B_DK, ATTENTION_B_DV};
    part parts[PARTS];
    for (int i = 0; i < PARTS; i++)
        if (!find_gradient(j, attention->value[slots[i]], &parts[i])) return true;
    product p = {.last = latest(parts)};
    bool adds;
    vjp_value da[PARTS], db[PARTS], dbias[PARTS], dy[PARTS], a[PARTS], b[PARTS], bias[PARTS];
    if (!are_different(parts) || !gather(j, parts, LINEAR_B_DA, da) || !gather(j, parts, LINEAR_B_DB, db) ||
        !gather(j, parts, LINEAR_B_DBIAS, dbias) || !gather(j, parts, LINEAR_B_DY, dy) ||
        !gather(j, parts, LINEAR_B_A, a) || !gather(j, parts, LINEAR_B_B, b))
        return true;
    gather(j, parts, LINEAR_B_BIAS, bias); /* not needed without an activation */
    if (a[0] != a[1] || a[0] != a[2] || !add_up(j, parts, da, &adds) || !can_make(j, parts, LINEAR_B_DB, db) ||
        !can_make(j, parts, LINEAR_B_DBIAS, dbias) || !can_wait(j, parts, p.last) ||
        !can_stack(j, b, p.last, rows_of(j, dy[0])))
        return true;
    for (int i = 0; i < PARTS; i++) {
        p.at[i] = parts[i].product;
        p.turn[i] = parts[i].turned ? j->writer[parts[i].own] : NONE;
        if (parts[i].turned && !are_kept_until(j, p.turn[i], p.last)) return true;
        if (!all_take_rows(j, parts[i].own, parts[i].width, p.at[i], NONE)) return true;
        if (parts[i].turned && !all_take_rows(j, parts[i].turned, parts[i].width, NONE, NONE)) return true;
    }
    p.value[LINEAR_B_A] = a[0];
    p.value[LINEAR_B_DA] = da[0];
    p.value[LINEAR_B_B] = stacked(j, &p, b);
    p.value[LINEAR_B_DB] = db[0] ? made_together(j, db) : 0;
    p.value[LINEAR_B_DBIAS] = dbias[0] ? made_together(j, dbias) : 0;
    p.value[LINEAR_B_DY] = side_by_side(j, parts, dy);
    p.adds = da[0] && adds ? 1u << LINEAR_B_DA : 0;
    if (!p.value[LINEAR_B_B] || !p.value[LINEAR_B_DY] || (db[0] && !p.value[LINEAR_B_DB]) ||
        (dbias[0] && !p.value[LINEAR_B_DBIAS]) || !turn_together(j, &p, parts, p.value[LINEAR_B_DY]))
        return false;
    replace(j, &p);
    return true;
}

/* ---- The new list of nodes --------------------------------------------------------------------------- */

static bool join_all(joining *j) {
    bool ok = true;
    for (int32_t n = 0; n < j->nodes && ok; n++) {
        const graph_node *node = &j->node[n];
        if (node->op != &vjp_op_attention) continue;
        ok = join_forward(j, node) && (node->pass == VJP_FORWARD || join_backward(j, node));
    }
    return ok;
}

static bool append(joining *j, const graph_node *node) {
    graph_node *made = graph_add_node(j->graph, node->op, node->pass, node->name, node->value, node->attributes);
    if (made) made->adds = node->adds;
    return made != NULL;
}

/* The ropes of a product's parts. */
static bool append_turns(joining *j, const product *p) {
    bool ok = true;
    if (p->turned[0]) {
        const graph_node *node = &j->node[p->turn[0]];
        vjp_value values[VJP_MAX_SLOTS];
        memcpy(values, node->value, sizeof values);
        values[pass_of(node)->outputs] = p->turned[0];
        values[0] = p->turned[1];
        ok = graph_add_node(j->graph, node->op, node->pass, node->name, values, node->attributes) != NULL;
    }
    for (int i = p->turned[0] ? 2 : 0; i < PARTS && ok; i++)
        if (p->turn[i] != NONE) ok = append(j, &j->node[p->turn[i]]);
    return ok;
}

static bool append_product(joining *j, const product *p, const graph_node *last) {
    char name[GRAPH_SCOPE_BYTES + 128];
    for (int i = 0; i < p->copies; i++) {
        const vjp_value values[VJP_MAX_SLOTS] = {[CAST_X] = p->copy[i][0], [CAST_Y] = p->copy[i][1]};
        snprintf(name, sizeof name, "%s.copy", j->graph->value[p->copy[i][0]].name);
        if (!graph_add_node(j->graph, &vjp_op_cast, VJP_FORWARD, name, values, NULL)) return false;
    }
    if (last->pass == VJP_BACKWARD && !append_turns(j, p)) return false;
    snprintf(name, sizeof name, "%s.qkv", last->name);
    graph_node *made = graph_add_node(j->graph, last->op, last->pass, name, p->value, last->attributes);
    if (made) made->adds = p->adds;
    return made && (last->pass == VJP_BACKWARD || append_turns(j, p));
}

static bool append_all(joining *j) {
    bool ok = true;
    for (int32_t n = 0; n < j->nodes && ok; n++) {
        const graph_node *node = &j->node[n];
        if (j->joined[n] == NONE)
            ok = append(j, node);
        else if (j->product[j->joined[n]].last == n)
            ok = append_product(j, &j->product[j->joined[n]], node);
    }
    return ok;
}

vjp_status graph_rewrite_qkv(graph_rewriting *w) {
    joining j = {.device = w->device,
                 .graph = w->copy,
                 .result = w->result,
                 .own_values = w->own_values,
                 .nodes = w->copy->nodes,
                 .values = w->copy->values};
    size_t nodes = (size_t)w->copy->nodes + 1;
    j.writer = malloc((size_t)w->copy->values * sizeof *j.writer);
    j.joined = malloc(nodes * sizeof *j.joined);
    j.product = malloc(nodes * sizeof *j.product);
    j.stack = malloc(2 * nodes * sizeof *j.stack);
    bool ok = j.writer && j.joined && j.product && j.stack;
    if (ok) {
        for (size_t n = 0; n < nodes; n++)
            j.joined[n] = NONE;
        graph_node *old = graph_take_nodes(w->copy);
        j.node = old;
        find_writers(&j);
        ok = join_all(&j) && append_all(&j);
        graph_free_nodes(old, j.nodes);
    }
    free(j.writer);
    free(j.joined);
    free(j.product);
    free(j.stack);
    return ok ? VJP_OK : vjp_fail(w->device, VJP_OUT_OF_MEMORY, "no memory to join products");
}

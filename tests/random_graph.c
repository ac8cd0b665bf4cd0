/* SPDX-License-Identifier: MIT */
/* Random graphs: see random_graph.h. */
#include "random_graph.h"
#include "attributes.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph/program.h"

/* More elements than this give no new plans, only slower runs. */
enum { MAX_ELEMENTS = 600 };

/* ---- Values ------------------------------------------------------------------------------------------ */

typedef struct making {
    random_graph *r;
    choices from;
    vjp_value value[RANDOM_VALUES]; /* of rank 1 to 4, in the graph's dtype, with elements */
    bool used[RANDOM_VALUES];
    int values;
} making;

static int64_t choose_size(making *m) {
    static const int64_t sizes[] = {3, 1, 2, 4, 5, 6, 8, 16, 17};
    return sizes[choose(&m->from, sizeof sizes / sizeof sizes[0])];
}

static vjp_tensor shape_of(const making *m, vjp_value value) {
    return vjp_graph_describe(m->r->graph, value);
}

static vjp_value give(making *m, bool weight, vjp_dtype dtype, int ndim, const int64_t *shape, double size,
                      int64_t limit) {
    random_graph *r = m->r;
    char name[16];
    snprintf(name, sizeof name, "%c%d", weight ? 'w' : 'x', r->givens);
    vjp_value made = (weight ? vjp_graph_parameter : vjp_graph_input)(r->graph, name, dtype, ndim, shape);
    r->given[r->givens++] = (random_given){made, size, limit};
    if (weight) r->weight[r->weights++] = made;
    return made;
}

static vjp_value give_input(making *m, int ndim, const int64_t *shape) {
    return give(m, false, m->r->kind.dtype, ndim, shape, 1, 0);
}

static vjp_value give_index(making *m, int ndim, const int64_t *shape, int64_t limit) {
    return give(m, false, VJP_I32, ndim, shape, 0, limit);
}

/* 0 when there are enough weights. Those of a 16-bit graph may be cast from f32, as in the trainer. */
static vjp_value give_weight(making *m, int ndim, const int64_t *shape) {
    vjp_dtype own = m->r->kind.dtype;
    bool cast = choose(&m->from, 2) && own != VJP_F32 && own != VJP_F64;
    if (m->r->weights == RANDOM_WEIGHTS) return 0;
    vjp_value made = give(m, true, cast ? VJP_F32 : own, ndim, shape, 0.7, 0);
    return cast ? vjp_graph_cast(m->r->graph, made, own) : made;
}

/* One of the older values. */
static vjp_value pick(making *m) {
    uint32_t i = choose(&m->from, (uint32_t)m->values);
    m->used[i] = true;
    return m->value[i];
}

/* One of the older values whose shape is that of a, or, where `shorter` is allowed, a's without some first axes. */
static vjp_value pick_like(making *m, vjp_value a, bool shorter) {
    vjp_tensor like = shape_of(m, a);
    uint32_t begin = choose(&m->from, (uint32_t)m->values);
    for (int step = 0; step < m->values; step++) {
        int i = (int)(begin + (uint32_t)step) % m->values;
        vjp_tensor other = shape_of(m, m->value[i]);
        int fewer = like.ndim - other.ndim;
        if (fewer < 0 || (fewer && !shorter)) continue;
        if (memcmp(like.shape + fewer, other.shape, (size_t)other.ndim * sizeof other.shape[0]) != 0) continue;
        m->used[i] = true;
        return m->value[i];
    }
    return a;
}

/* ---- Ops --------------------------------------------------------------------------------------------- */

/* x under four axes, of which the last is its own. */
static vjp_value with_four_axes(making *m, vjp_value x) {
    vjp_tensor t = shape_of(m, x);
    const int64_t shape[] = {1, 1, -1, t.shape[t.ndim - 1]};
    return vjp_graph_reshape(m->r->graph, x, 4, shape);
}

static vjp_value add_norm(making *m, vjp_value x, bool centred) {
    vjp_graph *g = m->r->graph;
    vjp_tensor t = shape_of(m, x);
    int axes = 1 + (int)choose(&m->from, (uint32_t)t.ndim);
    vjp_value gamma = choose(&m->from, 2) ? give_weight(m, axes, t.shape + t.ndim - axes) : 0;
    vjp_value beta = choose(&m->from, 3) == 1 ? give_weight(m, axes, t.shape + t.ndim - axes) : 0;
    if (centred) return vjp_graph_layer_norm(g, x, gamma, beta, WITH(layer_norm, .axes = axes, .eps = 0.1));
    return vjp_graph_rms_norm(g, x, gamma, beta, WITH(rms_norm, .axes = axes, .eps = 0.1));
}

static vjp_value add_linear(making *m, vjp_value x) {
    vjp_graph *g = m->r->graph;
    vjp_tensor t = shape_of(m, x);
    uint32_t more = choose(&m->from, 4); /* 1: with a residual, 2: with a gate; y has x's shape then */
    bool sums = more == 1, gated = more == 2;
    int64_t k = t.shape[t.ndim - 1], n = sums || gated ? k : choose_size(m);
    int transposed = (int)choose(&m->from, 2);
    vjp_activation activation = (vjp_activation)choose(&m->from, 7);
    if (t.ndim < 2) x = vjp_graph_reshape(g, x, 2, (const int64_t[]){1, k});
    vjp_value b = give_weight(m, 2, transposed ? (const int64_t[]){n, k} : (const int64_t[]){k, n});
    if (!b) return vjp_graph_add(g, x, x, NULL);
    vjp_value bias = choose(&m->from, 2) ? give_weight(m, 1, &n) : 0;
    vjp_value residual = sums ? pick_like(m, x, false) : 0, gate = gated ? pick_like(m, x, false) : 0;
    if (gated) activation = VJP_ACTIVATION_NONE;
    return vjp_graph_linear(g, x, b, bias, residual, gate,
                            WITH(linear, .activation = activation, .transpose_b = transposed));
}

static vjp_value add_conv2d(making *m, vjp_value x) {
    vjp_graph *g = m->r->graph;
    const vjp_conv2d_attributes attributes = {sizeof(vjp_conv2d_attributes), 1, 1, 1, 1, 1, 1, 1,
                                              VJP_LAYOUT_CHANNELS_FIRST,     0, 0};
    x = with_four_axes(m, x);
    vjp_value weight = give_weight(m, 4, (const int64_t[]){1 + choose(&m->from, 3), 1, 3, 3});
    return weight ? vjp_graph_conv2d(g, x, weight, 0, &attributes) : vjp_graph_scale(g, x, WITH(scale, .factor = 0.5));
}

static vjp_value add_attention(making *m, vjp_value x) {
    vjp_graph *g = m->r->graph;
    vjp_tensor t = shape_of(m, x);
    const int64_t shape[] = {1, -1, 1, t.shape[t.ndim - 1]};
    vjp_value y = pick_like(m, x, false), z = pick_like(m, x, false);
    x = vjp_graph_reshape(g, x, 4, shape), y = vjp_graph_reshape(g, y, 4, shape);
    return vjp_graph_attention(g, x, y, vjp_graph_reshape(g, z, 4, shape), 0,
                               WITH(attention, .causal = (int)choose(&m->from, 2), .scale = 0));
}

static vjp_value add_gather(making *m, vjp_value x) {
    vjp_tensor t = shape_of(m, x);
    int axis = (int)choose(&m->from, (uint32_t)t.ndim);
    int64_t count = choose_size(m);
    return vjp_graph_gather(m->r->graph, x, give_index(m, 1, &count, t.shape[axis]), WITH(gather, .axis = axis));
}

static vjp_value add_reshape(making *m, vjp_value x) {
    vjp_graph *g = m->r->graph;
    static const int64_t shapes[][3] = {{-1, 0, 0}, {1, -1, 0}, {-1, 1, 0}, {1, -1, 1}};
    uint32_t which = choose(&m->from, 4);
    x = vjp_graph_reshape(g, x, which == 0 ? 1 : which == 3 ? 3 : 2, shapes[which]);
    return choose(&m->from, 2) ? x : vjp_graph_scale(g, x, WITH(scale, .factor = 1.5));
}

/* Any op of any values, valid or not; its output is a result and never an input. */
static void add_anything(making *m) {
    random_graph *r = m->r;
    const vjp_op *op = vjp_op_at(choose(&m->from, (uint32_t)vjp_op_count()));
    const vjp_pass_info *pass = &vjp_op_describe(op)->pass[VJP_FORWARD];
    vjp_value inputs[VJP_MAX_SLOTS] = {0};
    for (size_t i = 0; i < pass->count - pass->outputs; i++) {
        uint32_t kind = choose(&m->from, 8);
        vjp_value any = r->given[choose(&m->from, (uint32_t)r->givens)].value;
        inputs[i] = kind == 0 ? any : kind == 1 ? 0 : kind == 2 ? (vjp_value)choose(&m->from, 99) - 9 : pick(m);
    }
    size_t count = pass->count - pass->outputs - (choose(&m->from, 16) == 1);
    vjp_value made = vjp_graph_call(r->graph, op, inputs, count, NULL);
    if (made) r->result[r->results++] = made;
}

static vjp_value add_op(making *m) {
    vjp_graph *g = m->r->graph;
    bool smooth = m->r->kind.smooth;
    vjp_value a = pick(m);
    vjp_tensor t = shape_of(m, a);
    switch (choose(&m->from, 16)) {
    case 0: return vjp_graph_add(g, a, pick_like(m, a, true), NULL);
    case 1: return vjp_graph_mul(g, a, pick_like(m, a, true), NULL);
    case 2: return vjp_graph_scale(g, a, WITH(scale, .factor = 0.5));
    case 3: return vjp_graph_swiglu(g, a, pick_like(m, a, false));
    case 4: return add_norm(m, a, true);
    case 5: return add_norm(m, a, false);
    case 6: {
        int axis = (int)choose(&m->from, (uint32_t)t.ndim), kind = (int)choose(&m->from, 4);
        return vjp_graph_cumsum(g, vjp_graph_scale(g, a, WITH(scale, .factor = 0.25)),
                                WITH(cumsum, .axis = axis, .exclusive = smooth ? 0 : kind / 2, .reverse = kind % 2));
    }
    case 7: return add_linear(m, a);
    case 8: return add_gather(m, a);
    case 9: return add_reshape(m, a);
    case 10: {
        int axis = (int)choose(&m->from, (uint32_t)t.ndim);
        return vjp_graph_mean(g, a, WITH(mean, .axis = axis, .axes = 1));
    }
    case 11: return add_attention(m, a);
    case 12: return add_conv2d(m, a);
    case 13:
        return vjp_graph_group_norm(g, with_four_axes(m, a), 0, 0,
                                    WITH(group_norm, .groups = 1, .layout = VJP_LAYOUT_CHANNELS_FIRST, .eps = 0.1));
    case 14: {
        const vjp_maxpool2d_attributes attributes = {sizeof(vjp_maxpool2d_attributes), 2, 2, 1, 1, 1, 1, 1, 1, 0,
                                                     VJP_LAYOUT_CHANNELS_FIRST,        0, 0};
        return smooth ? vjp_graph_add(g, a, a, NULL) : vjp_graph_maxpool2d(g, with_four_axes(m, a), &attributes);
    }
    default: {
        int64_t two = 2;
        vjp_value counter = give_index(m, 1, &two, 1000);
        return vjp_graph_dropout(g, a, counter, WITH(dropout, .p = 0.25, .stream = (int64_t)choose(&m->from, 3)));
    }
    }
}

/* Adds an output, or its mean if it is too large, to the values that later ops choose from. */
static void keep(making *m, vjp_value made) {
    vjp_tensor t = shape_of(m, made);
    if (!made) return; /* the graph has failed */
    bool large = count_of(&t) > MAX_ELEMENTS || t.ndim > 4;
    if (large) made = vjp_graph_mean(m->r->graph, made, WITH(mean, .axis = 0, .axes = 0));
    if (large || t.ndim == 0) made = vjp_graph_reshape(m->r->graph, made, 1, (const int64_t[]){1});
    m->value[m->values++] = made;
}

/* ---- The whole graph --------------------------------------------------------------------------------- */

static void add_ops(making *m) {
    vjp_graph *g = m->r->graph;
    int wanted = 2 + (int)choose(&m->from, 20);
    bool open = false;
    for (int i = 0; i < wanted; i++) {
        bool turn =
            choose(&m->from, 4) == 1; /* drawn in any case, so that the ops are the same with and without blocks */
        if (m->r->kind.recompute && turn) {
            if (open)
                vjp_graph_recompute_end(g);
            else
                vjp_graph_recompute_begin(g);
            open = !open;
        }
        if (m->r->kind.wild && choose(&m->from, 16) == 1) add_anything(m);
        keep(m, add_op(m));
    }
    if (open) vjp_graph_recompute_end(g);
}

/* Every value contributes to the loss, directly or through later values. */
static void add_loss(making *m) {
    vjp_graph *g = m->r->graph;
    vjp_value loss = 0;
    for (int i = 0; i < m->values; i++) {
        bool extra = choose(&m->from, 4) == 1, square = choose(&m->from, 2);
        if (m->used[i] && !extra) continue;
        vjp_tensor t = shape_of(m, m->value[i]);
        vjp_value probe = square ? m->value[i] : give_input(m, t.ndim, t.shape);
        vjp_value part =
            vjp_graph_mean(g, vjp_graph_mul(g, m->value[i], probe, NULL), WITH(mean, .axis = 0, .axes = 0));
        loss = loss ? vjp_graph_add(g, loss, part, NULL) : part;
    }
    m->r->loss = loss;
}

static void add_gradients(making *m) {
    random_graph *r = m->r;
    vjp_value into[RANDOM_WEIGHTS] = {0};
    for (int i = 0; i < r->weights; i++) {
        vjp_tensor t = shape_of(m, r->weight[i]);
        char name[16];
        snprintf(name, sizeof name, "g%d", i);
        if (choose(&m->from, 4) == 1 && !r->kind.smooth)
            into[i] = vjp_graph_state(r->graph, name, (vjp_dtype)t.dtype, t.ndim, t.shape);
    }
    vjp_graph_grad(r->graph, r->loss, r->weight, (size_t)r->weights, into, (int)choose(&m->from, 2), r->gradient);
    r->result[r->results++] = r->loss;
    for (int i = 0; i < r->weights; i++)
        r->result[r->results++] = r->gradient[i];
}

/* Intermediate values that are results, and weights that a step updates. */
static void add_results(making *m) {
    random_graph *r = m->r;
    const int64_t one = 1;
    for (int i = 0; i < m->values && r->results < RANDOM_RESULTS; i++)
        if (choose(&m->from, 8) == 1) r->result[r->results++] = m->value[i];
    for (int i = 0; i < r->weights && r->results < RANDOM_RESULTS; i++) {
        if (choose(&m->from, 4) != 1 || r->kind.smooth) continue;
        vjp_tensor t = shape_of(m, r->weight[i]);
        char name[16];
        snprintf(name, sizeof name, "m%d", i);
        if (t.dtype != VJP_F32) continue;
        vjp_value momentum = vjp_graph_state(r->graph, name, VJP_F32, t.ndim, t.shape);
        vjp_value rate = give(m, false, VJP_F32, 0, &one, 0.01, 0);
        const vjp_sgd_attributes attributes = {.struct_size = sizeof(vjp_sgd_attributes), .beta = 0.5};
        r->result[r->results++] = vjp_graph_sgd(r->graph, r->weight[i], momentum, r->gradient[i], rate, 0, &attributes);
    }
    if (r->kind.wild && r->results < RANDOM_RESULTS && choose(&m->from, 32) == 1)
        r->result[r->results++] = (vjp_value)choose(&m->from, 200) - 20;
}

random_graph random_graph_make(choices from, random_kind kind) {
    random_graph r = {.kind = kind, .graph = vjp_graph_create()};
    making m = {.r = &r, .from = from};
    const int64_t shape[] = {choose_size(&m), choose_size(&m)};
    m.value[m.values++] = give_input(&m, 2, shape);
    m.value[m.values++] = give_weight(&m, 2, shape);
    add_ops(&m);
    add_loss(&m);
    add_gradients(&m);
    add_results(&m);
    return r;
}

void random_graph_fill(vjp_program *program, const random_graph *r) {
    for (int i = 0; i < r->givens; i++) {
        vjp_tensor t;
        if (vjp_program_tensor(program, r->given[i].value, &t) != VJP_OK) continue; /* no call reads it */
        for (int64_t e = 0; e < count_of(&t); e++)
            put(&t, e,
                r->given[i].limit ? (double)((e * 5 + 2) % r->given[i].limit)
                                  : r->given[i].size * random_of(7, 100 + (uint64_t)i, (uint64_t)e));
    }
}

/* ---- What must hold ---------------------------------------------------------------------------------- */

__attribute__((format(printf, 2, 3))) static bool fails(char why[RANDOM_WHY], const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(why, RANDOM_WHY, format, list);
    va_end(list);
    return false;
}

/* Fills the arena with a byte: if a run reads what it has not written, two programs with different bytes differ. */
static void poison(vjp_program *program, int byte) {
    memset(program->arena, byte, program->report.arena_bytes);
}

static bool same_bits(vjp_program *one, vjp_program *other, vjp_value in_one, vjp_value in_other, const char *what,
                      char why[RANDOM_WHY]) {
    vjp_tensor a, b;
    if (vjp_program_tensor(one, in_one, &a) != VJP_OK || vjp_program_tensor(other, in_other, &b) != VJP_OK)
        return fails(why, "%s: a result has no place: %s", what, vjp_error(one->device));
    size_t bytes = (size_t)count_of(&a) * vjp_dtype_size((vjp_dtype)a.dtype);
    if (memcmp((char *)a.data + a.offset, (char *)b.data + b.offset, bytes) == 0) return true;
    return fails(why, "%s: values %d and %d have other bits", what, in_one, in_other);
}

static bool check_plan(const vjp_program *plan, const vjp_program *whole, char why[RANDOM_WHY]) {
    int32_t pair[2];
    const vjp_program_report *p = &plan->report;
    if (!plan_find_overlap(plan->range, plan->ranges, pair) || pair[0] >= 0)
        return fails(why, "ranges %d and %d overlap", pair[0], pair[1]);
    if (p->arena_bytes < p->live_bytes || p->arena_bytes > whole->report.arena_bytes)
        return fails(why, "an arena of %zu bytes: %zu are alive, and %zu are enough without a plan", p->arena_bytes,
                     p->live_bytes, whole->report.arena_bytes);
    return true;
}

/* Both stop with the same status, for errors found during a run, such as an index past its table. */
static bool run_both(vjp_program *plan, vjp_program *whole, bool *done, char why[RANDOM_WHY]) {
    vjp_status one = vjp_program_run(plan);
    bool said = one == VJP_OK || vjp_error(plan->device)[0];
    vjp_status other = vjp_program_run(whole);
    *done = one == VJP_OK;
    if (one != other) return fails(why, "status %d with a plan, %d without", one, other);
    return said || fails(why, "a run stopped with status %d and no sentence", one);
}

/* `guest` computes the loss in the plan's arena, if that is large enough, `forward` in its own. */
static bool check_programs(const random_graph *r, vjp_program *plan, vjp_program *whole, vjp_program *forward,
                           vjp_program *guest, char why[RANDOM_WHY]) {
    bool done = true;
    random_graph_fill(plan, r);
    random_graph_fill(whole, r);
    poison(plan, 0xaa);
    poison(whole, 0x55);
    poison(forward, 0x33);
    /* Before the optimiser's step, which changes the weights that they share. */
    if (vjp_program_run(forward) != VJP_OK) return true;
    bool fits = guest->report.arena_bytes <= plan->arena_room;
    if (fits != (guest->arena == plan->arena)) return fails(why, "an arena is %sshared", fits ? "not " : "");
    if (vjp_program_run(guest) != VJP_OK || !same_bits(forward, guest, r->loss, r->loss, "in another's arena", why))
        return fails(why, "in another's arena: another loss or status");
    for (int again = 0; again < 2 && done; again++) {
        if (!run_both(plan, whole, &done, why)) return false;
        if (done && !again && !same_bits(plan, forward, r->loss, r->loss, "shared memory", why)) return false;
        for (int i = 0; i < r->results && done; i++)
            if (!same_bits(plan, whole, r->result[i], r->result[i], again ? "planned, second run" : "planned", why))
                return false;
    }
    return true;
}

/*
 * Within a limit: values are computed again and, where they can, intermediates wait in the host's memory. As many as
 * can, or for a limit that lies between, through two runs, beside one that keeps them.
 */
static bool check_limited(vjp_device *device, const random_graph *r, bool most, char why[RANDOM_WHY]) {
    vjp_program_options options = VJP_PROGRAM_OPTIONS_DEFAULTS;
    vjp_program *kept = NULL, *less = NULL;
    bool ok = vjp_compile(device, r->graph, r->result, (size_t)r->results, NULL, &kept) == VJP_OK;
    options.arena_limit = ok && !most ? kept->report.arena_bytes / 10 * 9 : 1;
    ok = (ok && vjp_compile(device, r->graph, r->result, (size_t)r->results, &options, &less) == VJP_OK) ||
         fails(why, "with a limit: %s", vjp_error(device));
    bool done = ok;
    if (ok) {
        random_graph_fill(kept, r);
        random_graph_fill(less, r);
        poison(kept, 0xaa);
        poison(less, 0x55);
        ok = check_plan(less, less, why); /* a limit that cannot be met may have a larger arena than none */
    }
    for (int again = 0; again < 2 && ok && done; again++) {
        ok = run_both(less, kept, &done, why);
        for (int i = 0; i < r->results && ok && done; i++)
            ok = same_bits(less, kept, r->result[i], r->result[i], "with a limit", why);
    }
    vjp_program_destroy(less);
    vjp_program_destroy(kept);
    return ok;
}

/* The blocks' program, once, beside one that keeps everything. */
static bool check_blocks(vjp_device *device, choices from, const random_graph *r, char why[RANDOM_WHY]) {
    random_kind kind = r->kind;
    kind.recompute = true;
    random_graph blocks = random_graph_make(from, kind);
    vjp_program *kept = NULL, *again = NULL;
    bool ok = blocks.results == r->results || fails(why, "blocks: other results");
    if (ok && (vjp_compile(device, r->graph, r->result, (size_t)r->results, NULL, &kept) != VJP_OK ||
               vjp_compile(device, blocks.graph, blocks.result, (size_t)blocks.results, NULL, &again) != VJP_OK))
        ok = fails(why, "blocks: %s", vjp_error(device));
    if (ok) {
        random_graph_fill(kept, r);
        random_graph_fill(again, &blocks);
        poison(kept, 0xaa);
        poison(again, 0x55);
        bool done;
        ok = run_both(kept, again, &done, why);
        for (int i = 0; i < r->results && ok && done; i++)
            ok = same_bits(kept, again, r->result[i], blocks.result[i], "blocks", why);
    }
    vjp_program_destroy(kept);
    vjp_program_destroy(again);
    vjp_graph_destroy(blocks.graph);
    return ok;
}

static bool check_refusal(vjp_device *device, const random_graph *r, vjp_status status, const vjp_program *program,
                          char why[RANDOM_WHY]) {
    vjp_status graph = vjp_graph_status(r->graph);
    if (program) return fails(why, "refused, and there is a program");
    if (!vjp_error(device)[0]) return fails(why, "refused with status %d and no sentence", status);
    if (graph != VJP_OK && (graph != status || !vjp_graph_error(r->graph)[0]))
        return fails(why, "the graph says %d \"%s\", compiling says %d", graph, vjp_graph_error(r->graph), status);
    return r->kind.wild || fails(why, "%s", vjp_error(device));
}

bool random_graph_check(vjp_device *device, choices from, random_kind kind, char why[RANDOM_WHY]) {
    const vjp_program_options unplanned = {.struct_size = sizeof(vjp_program_options), .unplanned = 1};
    random_graph r = random_graph_make(from, kind);
    vjp_program *plan, *whole = NULL, *forward = NULL, *guest = NULL;
    vjp_status status = vjp_compile(device, r.graph, r.result, (size_t)r.results, NULL, &plan);
    bool ok;
    if (status != VJP_OK) {
        ok = check_refusal(device, &r, status, plan, why);
    } else {
        vjp_program_options share = {.struct_size = sizeof(vjp_program_options), .share = plan}, arena = share;
        arena.share_arena = 1;
        ok = (vjp_compile(device, r.graph, r.result, (size_t)r.results, &unplanned, &whole) == VJP_OK &&
              vjp_compile(device, r.graph, &r.loss, 1, &share, &forward) == VJP_OK &&
              vjp_compile(device, r.graph, &r.loss, 1, &arena, &guest) == VJP_OK) ||
             fails(why, "compiled with a plan, refused otherwise: %s", vjp_error(device));
        ok = ok && check_plan(plan, whole, why) && check_programs(&r, plan, whole, forward, guest, why) &&
             check_limited(device, &r, r.results % 2, why) && check_blocks(device, from, &r, why);
    }
    vjp_program_destroy(guest);
    vjp_program_destroy(forward);
    vjp_program_destroy(whole);
    vjp_program_destroy(plan);
    vjp_graph_destroy(r.graph);
    return ok;
}

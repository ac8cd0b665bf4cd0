/* SPDX-License-Identifier: MIT */
/*
 * Loss scaling from ops that every backend has. A decision is made by sgd, which changes nothing where its scale is not
 * finite: with w = b, g = b - a, a rate of 1 and a flag of 1 it gives a, and with a flag that is not finite b. Both are
 * exact, because the numbers are small integers, or powers of two apart.
 */
#include "train/trainer/loss_scale.h"

#include "core/core.h"
#include "op/op.h"

const char *const loss_scale_names[LOSS_SCALE_STATES] = {"loss_scale", "loss_scale.inverse", "loss_scale.good",
                                                         "loss_scale.taken"};

static vjp_value constant(vjp_graph *graph, const char *name, float value) {
    vjp_value old = vjp_graph_find(graph, name);
    return old ? old : vjp_graph_constant(graph, name, VJP_F32, 0, NULL, &value);
}

static vjp_value one(vjp_graph *graph) {
    return constant(graph, "loss_scale.one", 1);
}

static vjp_value times(vjp_graph *graph, vjp_value x, double factor) {
    vjp_scale_attributes scale = VJP_SCALE_DEFAULTS;
    scale.factor = factor;
    return vjp_graph_scale(graph, x, &scale);
}

static vjp_value sum(vjp_graph *graph, vjp_value a, vjp_value b) {
    return vjp_graph_add(graph, a, b, NULL);
}

/* 1 where x is finite; not finite where it is not. */
static vjp_value flag(vjp_graph *graph, vjp_value x) {
    return sum(graph, times(graph, x, 0), one(graph));
}

/* a where the flag is 1; b where it is not finite. */
static vjp_value choose(vjp_graph *graph, vjp_value which, vjp_value a, vjp_value b) {
    const vjp_value inputs[] = {b, 0, sum(graph, b, times(graph, a, -1)), one(graph), which};
    return vjp_graph_call(graph, &vjp_op_sgd, inputs, sizeof inputs / sizeof inputs[0], NULL);
}

loss_scale loss_scale_create(vjp_graph *graph, int64_t steps) {
    loss_scale s = {.graph = graph, .steps = steps};
    for (int i = 0; i < LOSS_SCALE_STATES; i++)
        s.state[i] = vjp_graph_state(graph, loss_scale_names[i], VJP_F32, 0, NULL);
    return s;
}

void loss_scale_first(double scale, float first[LOSS_SCALE_STATES]) {
    first[LOSS_SCALE] = (float)scale;
    first[LOSS_SCALE_INVERSE] = (float)(1 / scale);
    first[LOSS_SCALE_GOOD] = first[LOSS_SCALE_TAKEN] = 0;
}

vjp_value loss_scale_multiply(const loss_scale *s, vjp_value loss) {
    return vjp_graph_mul(s->graph, loss, s->state[LOSS_SCALE], NULL);
}

vjp_value loss_scale_measure(loss_scale *s, const vjp_value *gradients, size_t count, double max_norm) {
    vjp_graph *graph = s->graph;
    vjp_value scaled;
    vjp_graph_clip_norm(graph, gradients, count, 0, &scaled);
    s->norm = vjp_graph_mul(graph, scaled, s->state[LOSS_SCALE_INVERSE], NULL);
    s->fine = flag(graph, scaled);
    s->step = sum(graph, s->state[LOSS_SCALE_TAKEN], one(graph));
    const vjp_clip_attributes clip = {.struct_size = sizeof clip, .max_norm = max_norm};
    vjp_value factor = vjp_graph_clip(graph, vjp_graph_mul(graph, s->norm, s->norm, NULL), &clip);
    factor = vjp_graph_mul(graph, factor, s->state[LOSS_SCALE_INVERSE], NULL);
    return vjp_graph_mul(graph, factor, s->fine, NULL);
}

/* 1 where a count has reached the steps after which the scale grows; not finite before. */
static vjp_value reached(const loss_scale *s, vjp_value count) {
    static const double LARGE = 0x1p127; /* 1 times this, twice, is infinite */
    vjp_value limit = constant(s->graph, "loss_scale.steps", (float)s->steps);
    vjp_value missing = sum(s->graph, limit, times(s->graph, count, -1));
    return flag(s->graph, times(s->graph, times(s->graph, missing, LARGE), LARGE));
}

void loss_scale_finish(const loss_scale *s, vjp_value alive, vjp_value results[LOSS_SCALE_STATES], vjp_value *lost) {
    static const double HALVES = 0x1p127; /* times 1 finite, times 2 infinite */
    vjp_graph *graph = s->graph;
    vjp_value next[LOSS_SCALE_STATES], good = sum(graph, s->state[LOSS_SCALE_GOOD], one(graph));
    vjp_value lives = flag(graph, alive);
    next[LOSS_SCALE_TAKEN] = choose(graph, s->fine, s->step, s->state[LOSS_SCALE_TAKEN]);
    for (int i = 0; i < LOSS_SCALE_TAKEN; i++)
        next[i] = s->state[i];
    if (s->steps) {
        vjp_value grows = reached(s, good), zero = constant(graph, "loss_scale.zero", 0);
        for (int i = LOSS_SCALE; i <= LOSS_SCALE_INVERSE; i++) {
            vjp_value doubled = times(graph, s->state[i], 2), half = times(graph, s->state[i], 0.5);
            bool inverse = i == LOSS_SCALE_INVERSE;
            vjp_value grown = choose(graph, grows, inverse ? half : doubled, s->state[i]);
            next[i] = choose(graph, s->fine, grown, inverse ? doubled : half);
        }
        next[LOSS_SCALE_GOOD] = choose(graph, s->fine, choose(graph, grows, zero, good), zero);
    }
    *lost = times(graph, next[LOSS_SCALE_INVERSE], s->steps ? HALVES : 0);
    for (int i = 0; i < LOSS_SCALE_STATES; i++)
        results[i] = vjp_graph_assign(graph, s->state[i], choose(graph, lives, next[i], s->state[i]));
}

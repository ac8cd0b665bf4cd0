/* SPDX-License-Identifier: MIT */
/* The graph of a step, and its programs: loss, gradients, their norm, the optimiser and the average. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "graph/graph.h"
#include "train/trainer/state.h"

const kept_kind trainer_kinds[KINDS] = {{"m", ".exp_avg"}, {"v", ".exp_avg_sq"}, {"momentum", ".momentum_buffer"}};

/* An f32 state of the shape of a parameter. */
static vjp_value add_state(trainer *t, size_t parameter, const char *kind) {
    char name[TRAINER_NAME];
    const model_parameter *p = t->trained[parameter];
    vjp_tensor shape = vjp_graph_describe(t->model->graph, p->value);
    snprintf(name, sizeof name, "%s.%s", p->name, kind);
    return vjp_graph_state(t->model->graph, name, VJP_F32, shape.ndim, shape.shape);
}

/* A state that vjp_graph_minimize() added; 0: it added none of this kind. */
static vjp_value find_state(const trainer *t, size_t parameter, const char *kind) {
    char name[TRAINER_NAME];
    snprintf(name, sizeof name, "%s.%s", t->trained[parameter]->name, kind);
    return vjp_graph_find(t->model->graph, name);
}

static vjp_value times_zero(vjp_graph *graph, vjp_value x) {
    vjp_scale_attributes zero = VJP_SCALE_DEFAULTS;
    zero.factor = 0;
    return vjp_graph_scale(graph, x, &zero);
}

/*
 * Adds 0 times a number to the guard, a state that is 0 at first: it becomes NaN with the first number that is not
 * finite, and stays so until the host resets it.
 */
static vjp_value watch(trainer *t, vjp_value x) {
    vjp_graph *graph = t->model->graph;
    return vjp_graph_assign(graph, t->guard, vjp_graph_add(graph, t->guard, times_zero(graph, x), NULL));
}

bool trainer_takes_halves(const trainer *t) {
    return t->options.optimiser == TRAINER_ADAMW && !(t->options.average > 0) && !t->split.group;
}

/* The results of a program, freed when it is compiled. */
typedef struct wanted {
    vjp_value *results;
    size_t count;
    vjp_program **program;
} wanted;

/* What a program needs, which trainer_plan() adds up. */
static bool plan_program(trainer *t, const vjp_value *results, size_t count, size_t *arena_bytes) {
    planning *p = t->planning;
    vjp_program_report report = {.struct_size = sizeof report};
    const vjp_program_options options = {.struct_size = sizeof options,
                                         .halves = trainer_takes_halves(t),
                                         .arena_limit = (size_t)t->options.arena_limit};
    if (vjp_plan(t->device, t->model->graph, results, count, &options, &report) != VJP_OK) return false;
    *arena_bytes = report.arena_bytes;
    if (!p) return true;
    vjp_value *all = realloc(p->results, (p->count + count) * sizeof *all);
    if (!all) return vjp_fail(t->device, VJP_OUT_OF_MEMORY, "no memory to plan a step") == VJP_OK;
    memcpy(all + p->count, results, count * sizeof *all);
    p->results = all;
    p->count += count;
    p->needs.cost.bytes += report.cost.bytes;
    p->needs.cost.flops += report.cost.flops;
    return vjp_add_size(p->needs.host_bytes, report.host_bytes, &p->needs.host_bytes) ||
           vjp_fail(t->device, VJP_INVALID, "the sum of all bytes on the host does not fit size_t") == VJP_OK;
}

static bool compile(trainer *t, const vjp_value *results, size_t count, size_t arena_bytes, vjp_program **program) {
    const vjp_program_options options = {.struct_size = sizeof options,
                                         .share = t->first,
                                         .halves = trainer_takes_halves(t),
                                         .share_arena = t->first != NULL,
                                         .arena_bytes = arena_bytes,
                                         .arena_limit = (size_t)t->options.arena_limit};
    return vjp_compile(t->device, t->model->graph, results, count, &options, program) == VJP_OK;
}

bool trainer_compile(trainer *t, const vjp_value *results, size_t count, vjp_program **program) {
    size_t bytes, *all = t->planning ? &t->planning->needs.arena_bytes : NULL;
    if (!all) return compile(t, results, count, 0, program);
    if (!plan_program(t, results, count, &bytes)) return false;
    return bytes <= *all || vjp_add_size(*all, bytes, all) ||
           vjp_fail(t->device, VJP_INVALID, "the sum of all arenas does not fit size_t") == VJP_OK;
}

/* The programs of a step run in turn, in one arena that is large enough for each of them. */
static bool compile_step(trainer *t, const wanted *programs, int count) {
    size_t largest = 0, bytes;
    bool ok = true;
    for (int i = 0; i < count && ok && (count > 1 || t->planning); i++) {
        ok = plan_program(t, programs[i].results, programs[i].count, &bytes);
        if (ok && bytes > largest) largest = bytes;
    }
    if (t->planning) t->planning->needs.arena_bytes = largest;
    for (int i = 0; i < count && ok && !t->planning; i++)
        ok = compile(t, programs[i].results, programs[i].count, largest, programs[i].program);
    for (int i = 0; i < count; i++)
        free(programs[i].results);
    return ok;
}

static vjp_value *new_results(trainer *t, size_t more) {
    size_t count = t->count + more;
    vjp_value *results = calloc(count, sizeof *results);
    if (!results) vjp_fail(t->device, VJP_OUT_OF_MEMORY, "no memory for %zu results", count);
    return results;
}

/* The loss of one part, and its gradients into states, written or added. */
static bool want_part(trainer *t, vjp_value loss, vjp_value watched, int add, wanted *w) {
    size_t count = t->count;
    w->results = new_results(t, 2);
    if (!w->results) return false;
    vjp_graph_grad(t->model->graph, loss, t->values, count, t->values + count, add, w->results);
    w->results[count] = t->model->loss;
    w->results[count + 1] = watched;
    w->count = count + 2;
    return true;
}

static vjp_status minimize(trainer *t, vjp_value loss, vjp_value scale, vjp_minimize_result *made) {
    const trainer_options *o = &t->options;
    const vjp_adamw_attributes adamw = {.struct_size = sizeof adamw,
                                        .beta1 = o->beta1,
                                        .beta2 = o->beta2,
                                        .eps = o->eps,
                                        .weight_decay = o->weight_decay};
    const vjp_sgd_attributes sgd = {
        .struct_size = sizeof sgd, .beta = o->momentum, .weight_decay = o->weight_decay, .nesterov = o->momentum > 0};
    vjp_muon_options muon = VJP_MUON_OPTIONS_DEFAULTS;
    muon.momentum = o->momentum;
    muon.weight_decay = o->weight_decay;
    const vjp_minimize_options minimize = {.struct_size = sizeof minimize,
                                           .parameters = t->values,
                                           .gradients = t->values + t->count,
                                           .count = t->count,
                                           .scale = scale,
                                           .adamw = &adamw,
                                           .sgd = o->optimiser == TRAINER_SGD ? &sgd : NULL,
                                           .decays = model_decays,
                                           .context = t->model,
                                           .muon = o->optimiser == TRAINER_MUON ? &muon : NULL,
                                           .uses_muon = model_is_hidden,
                                           .moments = (int32_t)o->moments,
                                           .step = t->scaling.step};
    return vjp_graph_minimize(t->model->graph, loss, &minimize, made);
}

/*
 * average = average - share (average - weight), by sgd: with a gradient of -weight, a decay of 1 and the share as the
 * rate. Its scale is -1, or not finite as that of the step: then the average stays, too.
 */
static size_t add_averages(trainer *t, vjp_value scale, const vjp_value *weights, vjp_value *results) {
    static const float minus_one = -1;
    vjp_graph *graph = t->model->graph;
    const vjp_sgd_attributes mix = {.struct_size = sizeof mix, .weight_decay = 1};
    vjp_value minus = vjp_graph_constant(graph, "trainer.minus_one", VJP_F32, 0, NULL, &minus_one);
    minus = vjp_graph_add(graph, times_zero(graph, scale), minus, NULL);
    t->share = vjp_graph_input(graph, "trainer.average_share", VJP_F32, 0, NULL);
    size_t used = 0;
    for (size_t i = 0; i < t->count; i++) {
        t->track[i].average = add_state(t, i, "average");
        vjp_value mixed = vjp_graph_sgd(graph, t->track[i].average, 0, weights[i], t->share, minus, &mix);
        if (split_owns(&t->split, (size_t)i)) results[used++] = mixed;
    }
    return used;
}

/* The scale that clips the gradients, from their squares, which processes sum together where each has a part of them.
 */
static vjp_value add_clip(trainer *t) {
    vjp_graph *graph = t->model->graph;
    if (!t->split.group)
        return vjp_graph_clip_norm(graph, t->values + t->count, t->count, t->options.max_norm, &t->norm);
    const vjp_clip_attributes clip = {.struct_size = sizeof clip, .max_norm = t->options.max_norm};
    t->squares = vjp_graph_input(graph, "trainer.squares", VJP_F32, 0, NULL);
    vjp_value scale = vjp_graph_clip(graph, t->squares, &clip);
    if (scale) t->norm = vjp_graph_output(graph, scale, "norm");
    return scale;
}

/*
 * Sets the norm of the gradients; returns the factor for them, which is not finite where the step is not to be taken.
 * With a loss scale that changes, gradients that are not finite suppress their own step only. *guard is the guard.
 */
static vjp_value measure(trainer *t, vjp_value loss, vjp_value *guard) {
    vjp_graph *graph = t->model->graph;
    bool scaled = t->options.loss_scale != 0;
    vjp_value scale =
        scaled ? loss_scale_measure(&t->scaling, t->values + t->count, t->count, t->options.max_norm) : add_clip(t);
    if (scaled) t->norm = t->scaling.norm;
    *guard = loss ? watch(t, loss) : t->guard;
    if (!scaled || !t->scaling.steps) *guard = watch(t, t->norm);
    return vjp_graph_add(graph, scale, *guard, NULL);
}

/* The norm of the gradients, and a step of the optimiser for every own parameter that the guard can suppress. */
static bool want_update(trainer *t, vjp_value loss, wanted *w) {
    size_t count = t->count;
    vjp_value guard, scale = measure(t, loss, &guard);
    vjp_minimize_result made = {.struct_size = sizeof made};
    minimize(t, loss, scale, &made);
    t->rate = made.lr;
    t->step = made.step;
    for (size_t i = 0; i < count; i++)
        for (int k = 0; k < KINDS; k++)
            t->track[i].state[k] = find_state(t, i, trainer_kinds[k].graph);
    vjp_value *results = w->results = new_results(t, 3 + LOSS_SCALE_STATES + count);
    if (!results) return false;
    size_t used = 0;
    for (size_t i = 0; i < made.count; i++) /* the weights are the last ones */
        if (i + count < made.count || split_owns(&t->split, i + count - made.count)) results[used++] = made.results[i];
    results[used++] = t->norm;
    if (made.count && t->options.average > 0)
        used += add_averages(t, scale, made.results + made.count - count, results + used);
    if (t->options.loss_scale != 0) {
        vjp_value lost;
        loss_scale_finish(&t->scaling, guard, results + used, &lost);
        used += LOSS_SCALE_STATES;
        results[used++] = watch(t, lost);
    }
    w->count = used;
    return true;
}

static vjp_value scaled_loss(const trainer *t, vjp_value loss) {
    return t->options.loss_scale != 0 ? loss_scale_multiply(&t->scaling, loss) : loss;
}

static bool compile_whole(trainer *t) {
    size_t count = t->count;
    graph_grad_as(t->model->graph, scaled_loss(t, t->model->loss), t->values, count, t->options.gradients,
                  t->values + count);
    wanted all = {.program = &t->first};
    return want_update(t, t->model->loss, &all) && compile_step(t, &all, 1);
}

static bool compile_parts(trainer *t) {
    vjp_graph *graph = t->model->graph;
    for (size_t i = 0; i < t->count; i++)
        t->values[t->count + i] = t->track[i].gradient = add_state(t, i, "grad");
    /* The mean over the parts of a batch. */
    vjp_scale_attributes share = VJP_SCALE_DEFAULTS;
    share.factor = 1 / (double)(t->options.accumulate * t->shards.count);
    vjp_value loss = scaled_loss(t, vjp_graph_scale(graph, t->model->loss, &share));
    vjp_value watched = watch(t, t->model->loss);
    wanted all[TRAINER_PROGRAMS] = {{.program = &t->first}, {.program = &t->more}, {.program = &t->update}};
    if (want_part(t, loss, watched, 0, &all[0]) && want_part(t, loss, watched, 1, &all[1]) &&
        want_update(t, 0, &all[2]))
        return compile_step(t, all, TRAINER_PROGRAMS);
    for (int i = 0; i < TRAINER_PROGRAMS; i++)
        free(all[i].results);
    return false;
}

bool trainer_compile_all(trainer *t) {
    vjp_graph *graph = t->model->graph;
    t->guard = vjp_graph_state(graph, "trainer.guard", VJP_F32, 0, NULL);
    if (t->options.loss_scale != 0) t->scaling = loss_scale_create(graph, t->options.loss_scale_steps);
    for (size_t i = 0; i < t->count; i++) {
        vjp_tensor shape = vjp_graph_describe(graph, t->trained[i]->value);
        t->track[i] = (tracked){.count = count_of(&shape)};
        t->values[i] = t->trained[i]->value;
    }
    return t->options.accumulate * t->shards.count > 1 ? compile_parts(t) : compile_whole(t);
}

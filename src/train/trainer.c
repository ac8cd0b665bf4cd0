/* SPDX-License-Identifier: MIT */
/* The trainer: its programs, one step, and the tensors of a checkpoint. */
#include "train/trainer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/group.h"
#include "core/arithmetic.h"
#include "core/system.h"
#include "graph/graph.h"
#include "graph/program.h"
#include "op/op.h"
#include "train/loss_scale.h"
#include "train/overlap.h"
#include "train/shards.h"
#include "train/split.h"

/* What trainer_plan() has planned so far. */
typedef struct planning {
    trainer_needs needs;
    vjp_value *results; /* [count]: of all programs */
    size_t count;
} planning;

/* What optimisers keep of a parameter: the ends of the names in the graph and in a checkpoint. */
static const struct {
    const char *graph, *file;
} kinds[] = {{"m", ".exp_avg"}, {"v", ".exp_avg_sq"}, {"momentum", ".momentum_buffer"}};

enum { KINDS = sizeof kinds / sizeof kinds[0], MAX_TENSORS = 4 /* of a parameter: weight, average, two moments */ };

static const char TRAINED[] = ".trained";

/* The gradient, the optimiser's states and the average of one parameter. */
typedef struct tracked {
    vjp_value gradient;     /* a state; 0 where a batch is one part */
    vjp_value state[KINDS]; /* 0: its optimiser keeps none of this kind */
    vjp_value average;      /* 0: weights are not averaged */
    int64_t count;
} tracked;

/* A step in the queue. What the device reads and writes late is in the host's memory, pinned where that helps. */
typedef struct flight {
    int64_t step;
    int64_t *number; /* the step, as the program's input */
    float *rate, *share, *norm;
    float *scale; /* of the loss, after the step */
    float *loss;  /* [parts] */
    vjp_event *done;
} flight;

/* A batch on its way to the device: the host's copy, and where the device can copy beside its calls, its own. */
typedef struct batch {
    char *host; /* input, then target, then the model's `first` */
    void *device;
    vjp_event *used; /* the program has read it; NULL: it is free */
} batch;

enum { DEPTH = 2, BATCHES = 2 };

/* What each process of a group tells the others of a step before the gradients are summed. */
typedef struct rank_report {
    int32_t failed;
    float norm;   /* of the step before, which must have the same bits everywhere */
    float loss[]; /* [parts] */
} rank_report;

struct trainer {
    vjp_device *device;
    train_model *model;
    trainer_options options;
    size_t count;                    /* of the parameters that are trained */
    const model_parameter **trained; /* [count] */
    tracked *track;                  /* [count] */
    vjp_value *values;               /* [2 * count]: the parameters that are trained, then their gradients */
    vjp_value rate, step, norm, guard;
    loss_scale scaling;   /* of options.loss_scale */
    vjp_value share;      /* of a step in the average; 0: weights are not averaged */
    vjp_value squares;    /* of all gradients, where processes sum them together; 0: the program does it */
    vjp_program *first;   /* all of a step; or, where a batch has several parts, loss and gradients of the first */
    vjp_program *more;    /* loss and gradients of another part, added to what is there; NULL: there is one part */
    vjp_program *update;  /* norm and the optimiser's step; NULL: there is one part */
    vjp_program *forward; /* the loss alone */
    flight flight[DEPTH];
    int oldest, queued; /* in flight[] */
    bool dirty;         /* a step failed while it was queued: the guard may be set */
    bool swapped;       /* weights and averages have changed places */
    char *flight_memory;
    batch batch[BATCHES];
    int next_batch;
    size_t input_bytes, target_bytes, target_offset;
    size_t first_bytes; /* behind the target; 0: the model has none */
    shards shards;
    overlap overlap;
    parameter_split split; /* of what the optimiser keeps */
    int64_t parts;         /* of a step, computed by this process: own shards, each with its parts of the batch */
    rank_report *shared;   /* [size of the group]; NULL: one process */
    bool together;         /* the last failure was found by all processes */
    float last_norm;
    double waited; /* seconds for the reports of others */
    /* The results of trainer_tensors(). */
    safetensors_tensor *tensor; /* [MAX_TENSORS * count + LOSS_SCALE_STATES]: weights, then states */
    char (*name)[TRAINER_NAME];
    float
        *copy; /* all of them if the device's memory is not the host's, else twice as large as the largest parameter */
    float *collected;   /* of rank 0: what other processes keep; NULL: none was needed yet */
    planning *planning; /* NULL: programs are compiled */
};

static bool device_failed(const trainer *t, char error[TRAIN_ERROR]) {
    return train_fail(error, "%s", vjp_error(t->device));
}

static int64_t count_of(const vjp_tensor *tensor) {
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

/* ---- Programs ---------------------------------------------------------------------------------------- */

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

static bool plan_program(trainer *t, const vjp_value *results, size_t count) {
    planning *p = t->planning;
    vjp_program_report report = {.struct_size = sizeof report};
    if (vjp_plan(t->device, t->model->graph, results, count, &report) != VJP_OK) return false;
    vjp_value *all = realloc(p->results, (p->count + count) * sizeof *all);
    if (!all) return vjp_fail(t->device, VJP_OUT_OF_MEMORY, "no memory to plan a step") == VJP_OK;
    memcpy(all + p->count, results, count * sizeof *all);
    p->results = all;
    p->count += count;
    p->needs.cost.bytes += report.cost.bytes;
    p->needs.cost.flops += report.cost.flops;
    return vjp_add_size(p->needs.arena_bytes, report.arena_bytes, &p->needs.arena_bytes) ||
           vjp_fail(t->device, VJP_INVALID, "the sum of all arenas does not fit size_t") == VJP_OK;
}

/* Compiles a program that shares what the first one keeps; or only plans it. */
static bool compile(trainer *t, const vjp_value *results, size_t count, vjp_program **program) {
    if (t->planning) return plan_program(t, results, count);
    const vjp_program_options options = {.struct_size = sizeof(vjp_program_options), .share = t->first};
    return vjp_compile(t->device, t->model->graph, results, count, &options, program) == VJP_OK;
}

static vjp_value *new_results(trainer *t, size_t more) {
    size_t count = t->count + more;
    vjp_value *results = calloc(count, sizeof *results);
    if (!results) vjp_fail(t->device, VJP_OUT_OF_MEMORY, "no memory for %zu results", count);
    return results;
}

/* The gradients of one part into states, written or added, and the program that computes them and the loss. */
static bool compile_part(trainer *t, vjp_value loss, vjp_value watched, int add, vjp_program **program) {
    size_t count = t->count;
    vjp_value *results = new_results(t, 2);
    if (!results) return false;
    vjp_graph_grad(t->model->graph, loss, t->values, count, t->values + count, add, results);
    results[count] = t->model->loss;
    results[count + 1] = watched;
    bool ok = compile(t, results, count + 2, program);
    free(results);
    return ok;
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
static bool compile_update(trainer *t, vjp_value loss, vjp_program **program) {
    size_t count = t->count;
    vjp_value guard, scale = measure(t, loss, &guard);
    vjp_minimize_result made = {.struct_size = sizeof made};
    minimize(t, loss, scale, &made);
    t->rate = made.lr;
    t->step = made.step;
    for (size_t i = 0; i < count; i++)
        for (int k = 0; k < KINDS; k++)
            t->track[i].state[k] = find_state(t, i, kinds[k].graph);
    vjp_value *results = new_results(t, 3 + LOSS_SCALE_STATES + count);
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
    bool ok = compile(t, results, used, program);
    free(results);
    return ok;
}

static vjp_value scaled_loss(const trainer *t, vjp_value loss) {
    return t->options.loss_scale != 0 ? loss_scale_multiply(&t->scaling, loss) : loss;
}

static bool compile_whole(trainer *t) {
    size_t count = t->count;
    graph_grad_as(t->model->graph, scaled_loss(t, t->model->loss), t->values, count, t->options.gradients,
                  t->values + count);
    return compile_update(t, t->model->loss, &t->first);
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
    return compile_part(t, loss, watched, 0, &t->first) && compile_part(t, loss, watched, 1, &t->more) &&
           compile_update(t, 0, &t->update);
}

static bool compile_all(trainer *t) {
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

/* The program that takes the optimiser's step. */
static vjp_program *updating(const trainer *t) {
    return t->update ? t->update : t->first;
}

/* Frozen parameters are loaded. */
static bool fill_initial_values(trainer *t) {
    for (size_t i = 0; i < t->count; i++) {
        const model_parameter *p = t->trained[i];
        vjp_status status = p->uniform
                                ? vjp_program_init_uniform(t->first, p->value, p->centre - p->spread,
                                                           p->centre + p->spread, t->options.seed)
                                : vjp_program_init_normal(t->first, p->value, p->centre, p->spread, t->options.seed);
        if (status != VJP_OK) return false;
    }
    float first[LOSS_SCALE_STATES];
    loss_scale_first(t->options.loss_scale, first);
    for (int i = 0; i < LOSS_SCALE_STATES && t->options.loss_scale != 0; i++)
        if (vjp_program_write(updating(t), t->scaling.state[i], &first[i], sizeof first[i]) != VJP_OK) return false;
    return true;
}

/* How many numbers `copy` holds: all tensors of a checkpoint, or one parameter twice. */
static size_t copy_count(vjp_device *device, const train_model *model) {
    if (!vjp_device_is_host(device)) return MAX_TENSORS * (size_t)model_trained_size(model) + LOSS_SCALE_STATES;
    size_t max = 0;
    for (int i = 0; i < model->parameters; i++) {
        if (model->parameter[i].frozen) continue;
        vjp_tensor tensor = vjp_graph_describe(model->graph, model->parameter[i].value);
        if ((size_t)count_of(&tensor) > max) max = (size_t)count_of(&tensor);
    }
    return 2 * max;
}

static size_t bytes_of(const train_model *model, vjp_value value) {
    vjp_tensor tensor = vjp_graph_describe(model->graph, value);
    return (size_t)count_of(&tensor) * vjp_dtype_size((vjp_dtype)tensor.dtype);
}

/* ---- Memory that the device copies -------------------------------------------------------------------- */

static void *new_host(vjp_device *device, size_t bytes) {
    void *data = NULL;
    if (!device->backend->alloc_host) return malloc(bytes);
    return device->backend->alloc_host(device, bytes, &data) == VJP_OK ? data : NULL;
}

static void free_host(vjp_device *device, void *data) {
    if (data && device->backend->alloc_host)
        device->backend->free_host(device, data);
    else
        free(data);
}

static bool copies_beside(const trainer *t) {
    return t->device->backend->upload_beside != NULL;
}

static bool make_flights(trainer *t) {
    size_t numbers = 4 + (size_t)t->parts, bytes = sizeof(int64_t) + numbers * sizeof(float);
    bytes = (bytes + 63) / 64 * 64;
    t->flight_memory = new_host(t->device, DEPTH * bytes);
    for (int i = 0; i < DEPTH && t->flight_memory; i++) {
        char *own = t->flight_memory + (size_t)i * bytes;
        float *number = (float *)(void *)(own + sizeof(int64_t));
        t->flight[i] = (flight){.number = (int64_t *)(void *)own,
                                .rate = number,
                                .share = number + 1,
                                .norm = number + 2,
                                .scale = number + 3,
                                .loss = number + 4};
    }
    return t->flight_memory != NULL;
}

static bool make_batches(trainer *t) {
    t->target_offset = (t->input_bytes + 63) / 64 * 64;
    size_t bytes = t->target_offset + t->target_bytes + t->first_bytes;
    for (int i = 0; i < BATCHES; i++) {
        t->batch[i].host = new_host(t->device, bytes + 1);
        if (!t->batch[i].host) return false;
        if (copies_beside(t) && vjp_alloc(t->device, bytes + 1, &t->batch[i].device) != VJP_OK) return false;
    }
    return true;
}

static size_t report_bytes(const trainer *t) {
    return sizeof(rank_report) + (size_t)t->parts * sizeof(float);
}

static rank_report *report_of(const trainer *t, int32_t rank) {
    return (rank_report *)(void *)((char *)t->shared + (size_t)rank * report_bytes(t));
}

static bool make_reports(trainer *t) {
    size_t size = (size_t)vjp_group_size(t->options.group);
    if (size > 1) t->shared = calloc(size, report_bytes(t));
    return size == 1 || t->shared;
}

const char *trainer_no_overlap(const trainer *t) {
    if (vjp_group_size(t->options.group) == 1 || !t->options.overlap) return NULL;
    if (!vjp_device_is_host(t->device) || t->device->backend->record)
        return "the device runs a whole pass at once, so gradients travel after it";
    if (!vjp_group_is_any_thread(t->options.group))
        return "the group's engine can be used by one thread only, so gradients travel after the backward pass";
    return NULL;
}

/* Gradients of shards are summed where the first program keeps them. */
static bool make_shards(trainer *t) {
    if (t->shards.count == 1) return true;
    size_t count = t->count;
    vjp_tensor *gradient = calloc(count + 1, sizeof *gradient);
    bool ok =
        gradient || vjp_fail(t->device, VJP_OUT_OF_MEMORY, "no memory for a list of %zu gradients", count) == VJP_OK;
    for (size_t i = 0; i < count && ok; i++)
        ok = vjp_program_tensor(t->first, t->track[i].gradient, &gradient[i]) == VJP_OK;
    ok = ok && shards_create(&t->shards, gradient, count) == VJP_OK;
    /* The list is used again, for the weights. */
    for (size_t i = 0; i < count && ok && t->split.group; i++)
        ok = vjp_program_tensor(t->first, t->values[i], &gradient[i]) == VJP_OK;
    if (ok && t->split.group) ok = split_create(&t->split, &t->shards, gradient) == VJP_OK;
    free(gradient);
    if (!ok || vjp_group_size(t->options.group) == 1 || !t->options.overlap || trainer_no_overlap(t)) return ok;
    vjp_program *last = t->options.accumulate > 1 ? t->more : t->first;
    return overlap_create(&t->overlap, &t->shards, last, t->split.bounds) == VJP_OK;
}

static bool choose_split(trainer *t, char error[TRAIN_ERROR]) {
    size_t count = t->count;
    /* The loss's scale follows from the norm of all gradients, which the program computes. */
    if (!t->options.zero || vjp_group_size(t->options.group) == 1 || t->options.loss_scale != 0) return true;
    int64_t *elements = calloc(count + 1, sizeof *elements);
    for (size_t i = 0; elements && i < count; i++) {
        vjp_tensor shape = vjp_graph_describe(t->model->graph, t->trained[i]->value);
        elements[i] = count_of(&shape);
    }
    bool ok = elements ? split_choose(&t->split, t->options.group, elements, count, error)
                       : train_fail(error, "there is no memory to split %zu parameters", count);
    free(elements);
    return ok;
}

/* A trainer with its lists of values and nothing else. NULL: `error` says why. */
static trainer *new_trainer(vjp_device *device, train_model *model, const trainer_options *options,
                            char error[TRAIN_ERROR]) {
    if (vjp_graph_status(model->graph) != VJP_OK) {
        train_fail(error, "%s", vjp_graph_error(model->graph));
        return NULL;
    }
    size_t count = 0, hidden = 0;
    for (int i = 0; i < model->parameters; i++) {
        const model_parameter *p = &model->parameter[i];
        vjp_tensor shape = vjp_graph_describe(model->graph, p->value);
        if (p->frozen) continue;
        hidden += shape.ndim == 2 && model_is_hidden(model, p->name, &shape);
        count++;
    }
    if (!count) {
        train_fail(error, "all weights of this model are frozen: there is nothing to train");
        return NULL;
    }
    if (options->optimiser == TRAINER_MUON && !hidden) {
        train_fail(error, "Muon trains hidden matrices, and this model has none: choose adamw or sgd");
        return NULL;
    }
    shards own;
    if (!shards_split(&own, device, options->group, options->shards ? options->shards : 1, error)) return NULL;
    trainer *t = calloc(1, sizeof *t);
    if (t) {
        *t = (trainer){.device = device, .model = model, .options = *options, .shards = own};
        t->parts = options->accumulate * own.own;
        t->input_bytes = bytes_of(model, model->input);
        t->target_bytes = bytes_of(model, model->target);
        t->first_bytes = model->first ? bytes_of(model, model->first) : 0;
        t->trained = calloc(count, sizeof *t->trained);
        t->track = calloc(count, sizeof *t->track);
        t->values = calloc(2 * count, sizeof *t->values);
    }
    bool ok = t && t->trained && t->track && t->values;
    for (int i = 0; ok && i < model->parameters; i++)
        if (!model->parameter[i].frozen) t->trained[t->count++] = &model->parameter[i];
    ok = ok ? choose_split(t, error) : train_fail(error, "there is no memory for a trainer");
    if (ok) return t;
    trainer_destroy(t);
    return NULL;
}

bool trainer_plan(vjp_device *device, train_model *model, const trainer_options *options, bool validates,
                  trainer_needs *needs, char error[TRAIN_ERROR]) {
    trainer *t = new_trainer(device, model, options, error);
    if (!t) return false;
    planning p = {0};
    t->planning = &p;
    if (t->split.group) split_take_longest(&t->split);
    bool ok = compile_all(t);
    const vjp_cost step = p.needs.cost;
    ok = ok && (!validates || plan_program(t, &model->loss, 1));
    /* Programs share what they keep: a plan of all their results has each of these values once. */
    vjp_program_report all = {.struct_size = sizeof all};
    ok = ok && vjp_plan(device, model->graph, p.results, p.count, &all) == VJP_OK;
    p.needs.cost = step;
    size_t batches = copies_beside(t) ? BATCHES * (t->input_bytes + t->target_bytes + t->first_bytes) : 0, buffers;
    if (ok && (!vjp_mul_size((size_t)shards_buffers(&t->shards) * sizeof(float), (size_t)model_trained_size(model),
                             &buffers) ||
               !vjp_add_size(all.persistent_bytes, buffers, &p.needs.kept_bytes) ||
               !vjp_add_size(p.needs.kept_bytes, batches, &p.needs.kept_bytes) ||
               !vjp_add_size(p.needs.kept_bytes, p.needs.arena_bytes, &p.needs.bytes)))
        ok = vjp_fail(device, VJP_INVALID, "the bytes of a training step do not fit size_t") == VJP_OK;
    if (ok)
        *needs = p.needs;
    else
        device_failed(t, error);
    free(p.results);
    trainer_destroy(t);
    return ok;
}

trainer *trainer_create(vjp_device *device, train_model *model, const trainer_options *options,
                        char error[TRAIN_ERROR]) {
    trainer *t = new_trainer(device, model, options, error);
    if (!t) return NULL;
    size_t count = t->count;
    t->tensor = calloc(MAX_TENSORS * count + LOSS_SCALE_STATES, sizeof *t->tensor);
    t->name = calloc(MAX_TENSORS * count + LOSS_SCALE_STATES, sizeof *t->name);
    t->copy = malloc(copy_count(device, model) * sizeof *t->copy + 1);
    bool ok = t->tensor && t->name && t->copy && make_flights(t) && make_batches(t) && make_reports(t);
    if (!ok)
        train_fail(error, "there is no memory for a model of %lld parameters", (long long)model_size(model));
    else if (!compile_all(t) || !fill_initial_values(t) || !make_shards(t)) {
        device_failed(t, error);
        ok = false;
    }
    if (ok && trainer_begin_average(t, error)) return t;
    trainer_destroy(t);
    return NULL;
}

static void free_event(trainer *t, vjp_event **event) {
    vjp_event_destroy(t->device, *event);
    *event = NULL;
}

void trainer_destroy(trainer *t) {
    if (!t) return;
    vjp_synchronize(t->device); /* copies to and from the memory below may be under way */
    vjp_program_destroy(t->update);
    vjp_program_destroy(t->forward);
    vjp_program_destroy(t->more);
    vjp_program_destroy(t->first);
    for (int i = 0; i < DEPTH; i++)
        free_event(t, &t->flight[i].done);
    for (int i = 0; i < BATCHES; i++) {
        free_event(t, &t->batch[i].used);
        free_host(t->device, t->batch[i].host);
        vjp_free(t->device, t->batch[i].device);
    }
    free_host(t->device, t->flight_memory);
    overlap_free(&t->overlap);
    split_free(&t->split, t->device);
    shards_free(&t->shards);
    free(t->collected);
    free(t->shared);
    free(t->trained);
    free(t->track);
    free(t->values);
    free(t->tensor);
    free(t->name);
    free(t->copy);
    free(t);
}

int trainer_programs(trainer *t, vjp_program *programs[TRAINER_PROGRAMS]) {
    programs[0] = t->first;
    programs[1] = t->more;
    programs[2] = t->update;
    return t->update ? TRAINER_PROGRAMS : 1;
}

void trainer_interrupt(trainer *t) {
    vjp_program_interrupt(t->first);
    vjp_program_interrupt(t->more);
}

/* ---- Steps ------------------------------------------------------------------------------------------- */

/* Copies a batch into a program's input and target, and `first` where the model has it. */
static bool write_batch(trainer *t, vjp_program *program, const batch *b) {
    const char *target = b->host + t->target_offset;
    if (!copies_beside(t))
        return vjp_program_write(program, t->model->input, b->host, t->input_bytes) == VJP_OK &&
               vjp_program_write(program, t->model->target, target, t->target_bytes) == VJP_OK &&
               (!t->first_bytes ||
                vjp_program_write(program, t->model->first, target + t->target_bytes, t->first_bytes) == VJP_OK);
    vjp_tensor to, to_target, to_first = {0};
    size_t bytes = t->target_offset + t->target_bytes + t->first_bytes;
    if (t->first_bytes && vjp_program_tensor(program, t->model->first, &to_first) != VJP_OK) return false;
    return vjp_program_tensor(program, t->model->input, &to) == VJP_OK &&
           vjp_program_tensor(program, t->model->target, &to_target) == VJP_OK &&
           t->device->backend->upload_beside(t->device, b->device, 0, b->host, bytes) == VJP_OK &&
           vjp_copy(t->device, to.data, to.offset, b->device, 0, t->input_bytes) == VJP_OK &&
           vjp_copy(t->device, to_target.data, to_target.offset, b->device, t->target_offset, t->target_bytes) ==
               VJP_OK &&
           (!t->first_bytes || vjp_copy(t->device, to_first.data, to_first.offset, b->device,
                                        t->target_offset + t->target_bytes, t->first_bytes) == VJP_OK);
}

/* Fills a program's input and target. While the device still reads one batch, the other is filled. */
static bool feed(trainer *t, vjp_program *program, const train_source *source, bool validation, uint64_t part) {
    batch *b = &t->batch[t->next_batch];
    if (b->used && vjp_event_wait(t->device, b->used) != VJP_OK) return false;
    free_event(t, &b->used);
    source->fill(source->context, validation, part, b->host, (int32_t *)(void *)(b->host + t->target_offset));
    if (!write_batch(t, program, b)) return false;
    t->next_batch = (t->next_batch + 1) % BATCHES;
    return !copies_beside(t) || vjp_event_record(t->device, &b->used) == VJP_OK; /* other copies are done */
}

/*
 * Enqueues a copy between a program's value and the host's memory, which must stay until the step has been taken. A
 * process that owns no parameter, or none of an optimiser's, has a program without that optimiser's inputs.
 */
static bool send(trainer *t, vjp_program *program, vjp_value value, const void *from, size_t bytes) {
    vjp_tensor to;
    if (vjp_program_tensor(program, value, &to) != VJP_OK) return t->split.group != NULL;
    return vjp_upload_async(t->device, to.data, to.offset, from, bytes) == VJP_OK;
}

static bool receive(trainer *t, vjp_program *program, vjp_value value, float *to) {
    vjp_tensor from;
    return vjp_program_tensor(program, value, &from) == VJP_OK &&
           vjp_download_async(t->device, to, from.data, from.offset, sizeof *to) == VJP_OK;
}

/* A part's program: the first of a shard writes the gradients, the others add to them. */
static vjp_program *program_of(trainer *t, int64_t part) {
    return part % t->options.accumulate ? t->more : t->first;
}

/* The number of an own part in the whole run: shards of one batch are neighbours. */
static uint64_t number_of(const trainer *t, int64_t step, int64_t part) {
    int64_t each = t->options.accumulate, shard = t->shards.first + part / each;
    return (uint64_t)(((step - 1) * each + part % each) * t->shards.count + shard);
}

static bool clear_gradients(trainer *t) {
    for (size_t i = 0; i < t->count; i++) {
        size_t bytes = (size_t)t->track[i].count * sizeof *t->copy;
        memset(t->copy, 0, bytes);
        if (vjp_program_write(t->first, t->track[i].gradient, t->copy, bytes) != VJP_OK) return false;
    }
    return true;
}

static bool reset_guard(trainer *t) {
    static const float zero = 0;
    t->dirty = vjp_program_write(t->first, t->guard, &zero, sizeof zero) != VJP_OK;
    return !t->dirty;
}

/* How many calls of a program come before the first that changes a weight or a moment. */
static int32_t calls_before_update(const vjp_program *program) {
    vjp_program_report report = {.struct_size = sizeof report};
    vjp_program_describe(program, &report);
    vjp_call_time call = {.struct_size = sizeof call};
    for (size_t k = 0; k < report.calls; k++)
        if (vjp_program_time(program, k, &call) == VJP_OK && (call.op == &vjp_op_adamw || call.op == &vjp_op_sgd))
            return (int32_t)k;
    return (int32_t)report.calls;
}

static bool trace(trainer *t, vjp_program *program, char *found, size_t bytes) {
    return program_trace(program, calls_before_update(program), found, bytes) == VJP_OK && reset_guard(t);
}

/*
 * Finds where a number that is not finite came from: runs the parts up to this one again, call by call, then the norm.
 * Gradients that are kept are cleared first, because they already hold it.
 */
static bool explain(trainer *t, const train_source *source, int64_t step, int64_t last, const char *what, double value,
                    char error[TRAIN_ERROR]) {
    char found[TRAIN_ERROR / 2] = "";
    if (!reset_guard(t) || (t->update && !clear_gradients(t))) return device_failed(t, error);
    for (int64_t part = 0; part <= last && !found[0]; part++)
        if (!feed(t, program_of(t, part), source, false, number_of(t, step, part)) ||
            !trace(t, program_of(t, part), found, sizeof found))
            return device_failed(t, error);
    if (!found[0] && t->split.group && strcmp(what, "loss") != 0)
        snprintf(found, sizeof found, "the sum of the gradients of all processes, or of their squares");
    else if (!found[0] && t->update && !trace(t, t->update, found, sizeof found))
        return device_failed(t, error);
    if (!found[0]) snprintf(found, sizeof found, "it did not appear when the step was run again");
    if (isnan(value)) value = NAN; /* printf() would show a NaN's sign */
    return train_fail(error, "step %lld: the %s is %g; where it first appears: %s", (long long)step, what, value,
                      found);
}

int trainer_depth(const trainer *t) {
    return t->device->backend->event_create && !t->shared ? DEPTH : 1;
}

bool trainer_failed_together(const trainer *t) {
    return t->together;
}

trainer_group_time trainer_take_group_time(trainer *t) {
    trainer_group_time time = {t->shards.seconds, t->waited, t->overlap.hidden};
    t->shards.seconds = t->waited = t->overlap.hidden = 0;
    return time;
}

/* Ends the exchange of gradients during the last part, also of a process in which a part has failed. */
static bool end_overlap(trainer *t, bool begun, bool ok) {
    char sentence[VJP_ERROR_BYTES];
    snprintf(sentence, sizeof sentence, "%s", vjp_error(t->device));
    if (!begun) begun = overlap_begin(&t->overlap) == VJP_OK;
    bool ended = begun && overlap_end(&t->overlap, ok) == VJP_OK;
    return ok ? ended : vjp_fail(t->device, VJP_GROUP_FAILED, "%s", sentence) == VJP_OK;
}

/* Computes the own parts of a step, and adds the gradients of own shards. */
static bool run_parts(trainer *t, const train_source *source, flight *f) {
    int64_t each = t->options.accumulate;
    bool ok = true, begun = false;
    for (int64_t part = 0; part < t->parts && ok; part++) {
        vjp_program *program = program_of(t, part);
        bool overlaps = t->overlap.sum && part == t->parts - 1;
        ok = feed(t, program, source, false, number_of(t, f->step, part));
        if (ok && overlaps) ok = begun = overlap_begin(&t->overlap) == VJP_OK;
        ok = ok && vjp_program_run(program) == VJP_OK && receive(t, program, t->model->loss, &f->loss[part]);
        if (ok && !overlaps && part % each == each - 1) ok = shards_add(&t->shards, part / each) == VJP_OK;
    }
    return t->overlap.sum ? end_overlap(t, begun, ok) : ok;
}

/* Whether all processes are as they should be after the own parts of a step. A loss that is not finite is left to
 * trainer_collect(). */
static bool check_reports(trainer *t, int64_t step) {
    for (int32_t rank = 0; rank < vjp_group_size(t->options.group); rank++) {
        const rank_report *r = report_of(t, rank);
        bool own = rank == vjp_group_rank(t->options.group);
        if (r->failed) return own ? false : vjp_fail(t->device, VJP_GROUP_FAILED, "%s", "") == VJP_OK;
        if (memcmp(&r->norm, &report_of(t, 0)->norm, sizeof r->norm) != 0)
            return vjp_fail(t->device, VJP_GROUP_FAILED,
                            "step %lld: rank %d computed other bits than rank 0: the norm of the gradients was %.9g, "
                            "not %.9g; its processor, memory or library is not the same",
                            (long long)step - 1, (int)rank, (double)r->norm, (double)report_of(t, 0)->norm) == VJP_OK;
    }
    return true;
}

/* Tells the other processes how the own parts went. False: one has failed, and all of them know. */
static bool agree(trainer *t, flight *f, bool ok) {
    char sentence[VJP_ERROR_BYTES];
    ok = ok && vjp_synchronize(t->device) == VJP_OK; /* the losses are in the host's memory */
    snprintf(sentence, sizeof sentence, "%s", vjp_error(t->device));
    rank_report *own = report_of(t, vjp_group_rank(t->options.group));
    *own = (rank_report){.failed = !ok, .norm = t->last_norm};
    memcpy(own->loss, f->loss, (size_t)t->parts * sizeof *f->loss);
    double begin = system_seconds();
    if (vjp_group_share(t->options.group, t->shared, report_bytes(t)) != VJP_OK) return false;
    t->waited += system_seconds() - begin;
    t->together = true;
    if (!ok) return vjp_fail(t->device, VJP_GROUP_FAILED, "%s", sentence) == VJP_OK;
    return check_reports(t, f->step);
}

/* Loss `part` of a step, counted over all processes; the step's parts are in the order of their shards. */
static float loss_of(const trainer *t, const flight *f, int64_t part) {
    return t->shared ? report_of(t, (int32_t)(part / t->parts))->loss[part % t->parts] : f->loss[part];
}

static int64_t all_parts(const trainer *t) {
    return t->parts * vjp_group_size(t->options.group);
}

/* The own gradients of all processes, and the squares of all gradients for the program that takes the step. */
static bool sum_split(trainer *t) {
    float squares;
    return split_sum(&t->split, &t->shards, t->overlap.sum != NULL, &squares) == VJP_OK &&
           vjp_program_write(t->update, t->squares, &squares, sizeof squares) == VJP_OK;
}

/* All of a step, with its results on their way into `f`. */
static bool enqueue(trainer *t, const train_source *source, flight *f) {
    vjp_program *last = updating(t);
    free(t->collected);
    t->collected = NULL;
    *f->number = f->step;
    *f->rate = (float)trainer_rate(&t->options, f->step);
    *f->scale = 0;
    bool ok = send(t, last, t->rate, f->rate, sizeof *f->rate);
    if (t->step) ok = ok && send(t, last, t->step, f->number, sizeof *f->number);
    if (t->share) {
        *f->share = (float)trainer_average_share(&t->options, f->step);
        ok = ok && send(t, last, t->share, f->share, sizeof *f->share);
    }
    t->together = false;
    ok = ok && run_parts(t, source, f);
    if (t->shared) {
        if (!agree(t, f, ok)) return false;
        t->together = false;
        /* A process's guard has seen its own losses alone: a bad one of another must suppress the step here, too. */
        for (int64_t part = 0; part < all_parts(t); part++)
            if (!isfinite(loss_of(t, f, part))) {
                *f->norm = NAN;
                return vjp_event_record(t->device, &f->done) == VJP_OK;
            }
        ok = t->split.group ? sum_split(t) : shards_sum(&t->shards, t->overlap.sum != NULL) == VJP_OK;
    }
    if (t->update) ok = ok && vjp_program_run(t->update) == VJP_OK;
    if (t->options.loss_scale != 0) ok = ok && receive(t, last, t->scaling.state[LOSS_SCALE], f->scale);
    if (t->split.group) ok = ok && split_share_weights(&t->split, &t->shards) == VJP_OK;
    return ok && receive(t, last, t->norm, f->norm) && vjp_event_record(t->device, &f->done) == VJP_OK;
}

bool trainer_queue(trainer *t, const train_source *source, int64_t step, char error[TRAIN_ERROR]) {
    if (t->queued == DEPTH || (t->dirty && t->queued))
        return train_fail(error, "step %lld: the steps before it must be collected first", (long long)step);
    if (t->dirty && !reset_guard(t)) return device_failed(t, error);
    flight *f = &t->flight[(t->oldest + t->queued) % DEPTH];
    f->step = step;
    if (!enqueue(t, source, f)) {
        t->dirty = true;
        return device_failed(t, error);
    }
    t->queued++;
    return true;
}

/* Waits for all steps and forgets them. */
static void drop_flights(trainer *t) {
    vjp_synchronize(t->device);
    for (int i = 0; i < DEPTH; i++)
        free_event(t, &t->flight[i].done);
    t->queued = 0;
}

bool trainer_collect(trainer *t, const train_source *source, trainer_step_result *result, char error[TRAIN_ERROR]) {
    flight *f = &t->flight[t->oldest];
    int64_t parts = all_parts(t);
    double sum = 0;
    if (!t->queued) return train_fail(error, "no step has been queued");
    if (vjp_event_wait(t->device, f->done) != VJP_OK) {
        device_failed(t, error);
        drop_flights(t);
        t->dirty = true;
        return false;
    }
    for (int64_t part = 0; part < parts; part++) {
        float loss = loss_of(t, f, part);
        if (!isfinite(loss)) {
            drop_flights(t);
            t->together = t->shared != NULL;
            int64_t own = part - t->parts * vjp_group_rank(t->options.group);
            if (own < 0 || own >= t->parts) return train_fail(error, "%s", "");
            return explain(t, source, f->step, own, "loss", loss, error);
        }
        sum += loss;
    }
    /* Where the scale changes and is not too small yet, the device has skipped the step. */
    bool skipped = !isfinite(*f->norm) && t->scaling.steps && *f->scale >= 1;
    if (!isfinite(*f->norm) && !skipped) {
        drop_flights(t);
        t->together = t->shared != NULL;
        return explain(t, source, f->step, t->parts - 1, "norm of the gradients", *f->norm, error);
    }
    t->last_norm = skipped ? 0 : *f->norm;
    free_event(t, &f->done);
    t->oldest = (t->oldest + 1) % DEPTH;
    t->queued--;
    *result = (trainer_step_result){.loss = sum / (double)parts,
                                    .norm = (double)t->last_norm,
                                    .rate = *f->rate,
                                    .loss_scale = *f->scale,
                                    .skipped = skipped};
    return true;
}

bool trainer_step(trainer *t, const train_source *source, int64_t step, trainer_step_result *result,
                  char error[TRAIN_ERROR]) {
    return trainer_queue(t, source, step, error) && trainer_collect(t, source, result, error);
}

/* ---- Validation and averages ------------------------------------------------------------------------- */

static bool copy_parameter(trainer *t, size_t i, vjp_value from, vjp_program *reads, vjp_value to, vjp_program *writes,
                           float *through) {
    size_t bytes = (size_t)t->track[i].count * sizeof *through;
    return vjp_program_read(reads, from, through, bytes) == VJP_OK &&
           vjp_program_write(writes, to, through, bytes) == VJP_OK;
}

bool trainer_begin_average(trainer *t, char error[TRAIN_ERROR]) {
    for (size_t i = 0; t->share && i < t->count; i++)
        if (split_owns(&t->split, i) &&
            !copy_parameter(t, i, t->values[i], t->first, t->track[i].average, updating(t), t->copy))
            return device_failed(t, error);
    return true;
}

/* Exchanges weights and averages, for a program that computes with the weights. Twice: all is as it was. */
static bool swap_averages(trainer *t) {
    if (!t->share) return true;
    t->swapped = !t->swapped;
    for (size_t i = 0; i < t->count; i++) {
        if (!split_owns(&t->split, i)) continue;
        float *weight = t->copy, *average = weight + t->track[i].count;
        size_t bytes = (size_t)t->track[i].count * sizeof *weight;
        if (vjp_program_read(t->first, t->values[i], weight, bytes) != VJP_OK ||
            !copy_parameter(t, i, t->track[i].average, updating(t), t->values[i], t->first, average) ||
            vjp_program_write(updating(t), t->track[i].average, weight, bytes) != VJP_OK)
            return false;
    }
    return !t->split.group || split_share_weights(&t->split, &t->shards) == VJP_OK;
}

static bool run_validation(trainer *t, const train_source *source, uint64_t part, double *loss) {
    float value = 0;
    bool ok = feed(t, t->forward, source, true, part) && vjp_program_run(t->forward) == VJP_OK &&
              vjp_synchronize(t->device) == VJP_OK &&
              vjp_program_read(t->forward, t->model->loss, &value, sizeof value) == VJP_OK;
    *loss = value;
    return ok;
}

/* Every process computes its own shards of each batch; the losses are added in the order of the parts. */
static bool evaluate(trainer *t, const train_source *source, int64_t parts, double *loss, double *all) {
    const shards *s = &t->shards;
    int64_t each = parts * s->own;
    double sum = 0, *own = all + each * vjp_group_rank(t->options.group);
    for (int64_t i = 0; i < each; i++)
        if (!run_validation(t, source, (uint64_t)(i / s->own * s->count + s->first + i % s->own), &own[i]))
            return false;
    if (vjp_group_size(t->options.group) > 1 && each &&
        vjp_group_share(t->options.group, all, (size_t)each * sizeof *all) != VJP_OK)
        return false;
    for (int64_t part = 0; part < parts; part++)
        for (int64_t shard = 0; shard < s->count; shard++)
            sum += all[shard / s->own * each + part * s->own + shard % s->own];
    *loss = parts ? sum / (double)(parts * s->count) : NAN;
    return true;
}

bool trainer_evaluate(trainer *t, const train_source *source, int64_t parts, double *loss, char error[TRAIN_ERROR]) {
    if (!t->forward && !compile(t, &t->model->loss, 1, &t->forward)) return device_failed(t, error);
    parts = vjp_min(parts, source->validation_parts / t->shards.count);
    int64_t count = parts * t->shards.own * vjp_group_size(t->options.group);
    double *all = calloc((size_t)count + 1, sizeof *all);
    if (!all) return train_fail(error, "there is no memory for the losses of %lld parts", (long long)count);
    if (!swap_averages(t)) return free(all), device_failed(t, error);
    bool ok = evaluate(t, source, parts, loss, all) || device_failed(t, error);
    free(all);
    return (swap_averages(t) || device_failed(t, error)) && ok;
}

/* ---- Checkpoints ------------------------------------------------------------------------------------- */

/* A list of tensors being made, with the memory that is left for copies. */
typedef struct listing {
    size_t count;
    float *copy, *collected;
    vjp_group_item *item; /* [count]: who has each; NULL: nothing is split, or only what all have is listed */
} listing;

/* How many floats hold so many bytes. */
static size_t floats_for(size_t bytes) {
    return (bytes + sizeof(float) - 1) / sizeof(float);
}

/*
 * Adds a tensor to the list: host memory as it is, device memory copied. One of a parameter that another process keeps
 * (`is_split`) has its place in what rank 0 collects, and no data elsewhere.
 */
static bool list_tensor(trainer *t, listing *list, vjp_program *program, vjp_value value, const char *name,
                        const char *kind, size_t parameter, bool is_split) {
    const bool own = !is_split || split_owns(&t->split, parameter);
    vjp_tensor tensor = vjp_graph_describe(t->model->graph, value);
    size_t bytes = (size_t)count_of(&tensor) * vjp_dtype_size((vjp_dtype)tensor.dtype), at = list->count++;
    const void *data = list->collected;
    if (own) {
        if (vjp_program_tensor(program, value, &tensor) != VJP_OK) return false;
        data = (const char *)tensor.data + tensor.offset;
        if (!vjp_device_is_host(t->device)) {
            if (vjp_program_read(program, value, list->copy, bytes) != VJP_OK) return false;
            data = list->copy;
            list->copy += floats_for(bytes);
        }
    } else if (list->collected) {
        list->collected += floats_for(bytes);
    }
    snprintf(t->name[at], sizeof t->name[at], "%s%s", name, kind);
    t->tensor[at] = (safetensors_tensor){.name = t->name[at], .dtype = tensor.dtype, .ndim = tensor.ndim, .data = data};
    memcpy(t->tensor[at].shape, tensor.shape, sizeof tensor.shape);
    if (list->item)
        list->item[at] = (vjp_group_item){is_split ? split_owner(&t->split, parameter) : 0, (void *)data, bytes};
    return true;
}

/* The weights of the model, then what the optimiser keeps; `models` is how many the first are. */
static bool list_all(trainer *t, listing *list, size_t *models) {
    bool ok = true;
    for (size_t i = 0; i < t->count && ok; i++)
        ok = t->share ? list_tensor(t, list, updating(t), t->track[i].average, t->trained[i]->name, "", i, true)
                      : list_tensor(t, list, t->first, t->values[i], t->trained[i]->name, "", i, false);
    *models = list->count;
    for (size_t i = 0; i < t->count && ok; i++) {
        const char *name = t->trained[i]->name;
        for (int k = 0; k < KINDS && ok; k++)
            if (t->track[i].state[k])
                ok = list_tensor(t, list, updating(t), t->track[i].state[k], name, kinds[k].file, i, true);
        if (t->share) ok = ok && list_tensor(t, list, t->first, t->values[i], name, TRAINED, i, false);
    }
    for (int i = 0; i < LOSS_SCALE_STATES && t->options.loss_scale != 0 && ok; i++)
        ok = list_tensor(t, list, updating(t), t->scaling.state[i], loss_scale_names[i], "", 0, false);
    return ok;
}

/* How many numbers other processes keep. */
static size_t others_count(const trainer *t) {
    size_t sum = 0;
    for (size_t i = 0; i < t->count; i++) {
        size_t kept = t->share ? 1 : 0;
        for (int k = 0; k < KINDS; k++)
            kept += t->track[i].state[k] != 0;
        if (!split_owns(&t->split, i)) sum += kept * (size_t)t->track[i].count;
    }
    return sum;
}

/* Whether all processes are ready to send or receive. `error` stays as it is in one that is not, and is "" in others.
 */
static bool all_ready(trainer *t, bool ok, char error[TRAIN_ERROR]) {
    report_of(t, vjp_group_rank(t->options.group))->failed = !ok;
    if (vjp_group_share(t->options.group, t->shared, report_bytes(t)) != VJP_OK) return device_failed(t, error);
    bool all = ok;
    for (int32_t rank = 0; rank < vjp_group_size(t->options.group); rank++)
        all = all && !report_of(t, rank)->failed;
    return all || (ok ? train_fail(error, "%s", "") : false);
}

/* Rank 0 collects what the others keep. The memory is freed by the next step: it is as large as what it saves there. */
static bool collect_split(trainer *t, listing *list, size_t *models, char error[TRAIN_ERROR]) {
    bool first = vjp_group_rank(t->options.group) == 0;
    list->item = calloc(MAX_TENSORS * t->count + LOSS_SCALE_STATES, sizeof *list->item);
    if (first && !t->collected) t->collected = malloc(others_count(t) * sizeof *t->collected + 1);
    list->collected = t->collected;
    bool ok = (list->item && (!first || t->collected)) ||
              train_fail(error, "there is no memory to collect what other processes keep of the optimiser");
    ok = ok && (list_all(t, list, models) || device_failed(t, error));
    ok = all_ready(t, ok, error);
    if (ok && vjp_group_collect(t->options.group, list->item, list->count) != VJP_OK) ok = device_failed(t, error);
    free(list->item);
    return ok;
}

bool trainer_tensors(trainer *t, const safetensors_tensor **model, size_t *model_count,
                     const safetensors_tensor **optimiser, size_t *optimiser_count, char error[TRAIN_ERROR]) {
    listing list = {.copy = t->copy};
    *model_count = 0;
    if (t->swapped) return train_fail(error, "a validation failed and left weights and averages exchanged");
    bool ok = t->split.group ? collect_split(t, &list, model_count, error)
                             : list_all(t, &list, model_count) || device_failed(t, error);
    *model = t->tensor;
    *optimiser = t->tensor + *model_count;
    *optimiser_count = list.count - *model_count;
    return ok;
}

bool trainer_common_tensors(trainer *t, const safetensors_tensor **tensors, size_t *count, char error[TRAIN_ERROR]) {
    listing list = {.copy = t->copy};
    size_t ignored;
    bool ok = true;
    if (!t->split.group) ok = list_all(t, &list, &ignored);
    for (size_t i = 0; t->split.group && ok && i < t->count; i++)
        ok = list_tensor(t, &list, t->first, t->values[i], t->trained[i]->name, "", i, false);
    *tensors = t->tensor;
    *count = list.count;
    return ok || device_failed(t, error);
}

bool trainer_state_name(const trainer *t, size_t index, char name[TRAINER_NAME]) {
    for (size_t i = 0; i < t->count; i++)
        for (int k = 0; k <= KINDS; k++) {
            bool is_kept = k < KINDS ? t->track[i].state[k] != 0 : t->share != 0;
            if (!is_kept || index--) continue;
            snprintf(name, TRAINER_NAME, "%s%s", t->trained[i]->name, k < KINDS ? kinds[k].file : TRAINED);
            return true;
        }
    if (t->options.loss_scale == 0 || index >= LOSS_SCALE_STATES) return false;
    snprintf(name, TRAINER_NAME, "%s", loss_scale_names[index]);
    return true;
}

/* The value of that name in a checkpoint, a program that holds it, and whether this process does. 0: there is none. */
static vjp_value find(trainer *t, const char *name, vjp_program **program, bool *held) {
    *program = t->first;
    *held = true;
    for (int i = 0; i < t->model->parameters; i++)
        if (strcmp(name, t->model->parameter[i].name) == 0) return t->model->parameter[i].value;
    for (size_t i = 0; i < t->count; i++) {
        const char *own = t->trained[i]->name;
        size_t length = strlen(own);
        if (strncmp(name, own, length) != 0) continue;
        if (strcmp(name + length, TRAINED) == 0) return t->trained[i]->value;
        *program = updating(t);
        *held = split_owns(&t->split, (size_t)i);
        for (int k = 0; k < KINDS; k++)
            if (strcmp(name + length, kinds[k].file) == 0) return t->track[i].state[k];
    }
    *program = updating(t);
    for (int i = 0; i < LOSS_SCALE_STATES && t->options.loss_scale != 0; i++)
        if (strcmp(name, loss_scale_names[i]) == 0) return t->scaling.state[i];
    return 0;
}

bool trainer_load(trainer *t, const safetensors_tensor *tensor, char error[TRAIN_ERROR]) {
    vjp_program *program;
    bool held;
    vjp_value value = find(t, tensor->name, &program, &held);
    if (value && !held) return true;
    if (!value) return train_fail(error, "the model has no tensor %s", tensor->name);
    vjp_tensor own = vjp_graph_describe(t->model->graph, value);
    bool is_moment = program == updating(t) && own.dtype != tensor->dtype;
    for (int i = 0; i < t->model->parameters && is_moment; i++)
        is_moment = value != t->model->parameter[i].value;
    if (is_moment)
        return train_fail(error, "%s is %s in the file, and the run keeps it in %s: its settings were changed",
                          tensor->name, tensor->type, vjp_dtype_name((vjp_dtype)own.dtype));
    return model_load(t->model, program, value, tensor, error);
}

/* SPDX-License-Identifier: MIT */
/* The trainer: its memory, what it needs of a device, its programs' first values. */
#include "train/trainer/trainer.h"

#include <stdlib.h>

#include "core/arithmetic.h"
#include "graph/program.h"
#include "train/trainer/state.h"

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
static size_t copy_count(const trainer *t) {
    const train_model *model = t->model;
    bool copies = !vjp_device_is_host(t->device);
    for (size_t i = 0; i < t->count && !copies; i++) {
        const program_value *place;
        copies = program_find(t->first, t->values[i], &place) == VJP_OK && place->halves;
    }
    if (copies) return MAX_TENSORS * (size_t)model_trained_size(model) + LOSS_SCALE_STATES;
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
    ok = ok ? trainer_choose_split(t, error) : train_fail(error, "there is no memory for a trainer");
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
    bool ok = trainer_compile_all(t);
    const vjp_cost step = p.needs.cost;
    ok = ok && (!validates || trainer_compile(t, &model->loss, 1, NULL));
    /* Programs share what they keep: a plan of all their results has each of these values once. */
    vjp_program_report all = {.struct_size = sizeof all};
    ok = ok && vjp_plan(device, model->graph, p.results, p.count, NULL, &all) == VJP_OK;
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
    bool ok = t->tensor && t->name && trainer_make_flights(t) && trainer_make_batches(t) && trainer_make_reports(t);
    bool compiled = ok && trainer_compile_all(t);
    if (compiled) ok = (t->copy = malloc(copy_count(t) * sizeof *t->copy + 1)) != NULL;
    if (!ok)
        train_fail(error, "there is no memory for a model of %lld parameters", (long long)model_size(model));
    else if (!compiled || !fill_initial_values(t) || !trainer_make_shards(t)) {
        device_failed(t, error);
        ok = false;
    }
    if (ok && trainer_begin_average(t, error)) return t;
    trainer_destroy(t);
    return NULL;
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
        trainer_free_host(t->device, t->batch[i].host);
        vjp_free(t->device, t->batch[i].device);
    }
    trainer_free_host(t->device, t->flight_memory);
    overlap_free(&t->overlap);
    split_free(&t->split, t->device);
    split_free(&t->writers, t->device);
    shards_free(&t->shards);
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

/* SPDX-License-Identifier: MIT */
/* Validation, and averaged weights, which take the place of the trained ones while it runs. */
#include <math.h>
#include <stdlib.h>

#include "core/arithmetic.h"
#include "train/trainer/state.h"

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
    bool ok = trainer_feed(t, t->forward, source, true, part) && vjp_program_run(t->forward) == VJP_OK &&
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
    if (!t->forward && !trainer_compile(t, &t->model->loss, 1, &t->forward)) return device_failed(t, error);
    parts = vjp_min(parts, source->validation_parts / t->shards.count);
    int64_t count = parts * t->shards.own * vjp_group_size(t->options.group);
    double *all = calloc((size_t)count + 1, sizeof *all);
    if (!all) return train_fail(error, "there is no memory for the losses of %lld parts", (long long)count);
    if (!swap_averages(t)) return free(all), device_failed(t, error);
    bool ok = evaluate(t, source, parts, loss, all) || device_failed(t, error);
    free(all);
    return (swap_averages(t) || device_failed(t, error)) && ok;
}

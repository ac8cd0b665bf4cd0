/* SPDX-License-Identifier: MIT */
/* Steps: queued, collected later, and run again call by call where a number is not finite. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph/program.h"
#include "op/op.h"
#include "train/trainer/state.h"

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
        if (!trainer_feed(t, program_of(t, part), source, false, number_of(t, step, part)) ||
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

/* Computes the own parts of a step, and adds the gradients of own shards. */
static bool run_parts(trainer *t, const train_source *source, flight *f) {
    int64_t each = t->options.accumulate;
    bool ok = true, begun = false;
    for (int64_t part = 0; part < t->parts && ok; part++) {
        vjp_program *program = program_of(t, part);
        bool overlaps = t->overlap.sum && part == t->parts - 1;
        ok = trainer_feed(t, program, source, false, number_of(t, f->step, part));
        if (ok && overlaps) ok = begun = overlap_begin(&t->overlap) == VJP_OK;
        ok = ok && vjp_program_run(program) == VJP_OK && receive(t, program, t->model->loss, &f->loss[part]);
        if (ok && !overlaps && part % each == each - 1) ok = shards_add(&t->shards, part / each) == VJP_OK;
    }
    return t->overlap.sum ? trainer_end_overlap(t, begun, ok) : ok;
}

/* Loss `part` of a step, counted over all processes; the step's parts are in the order of their shards. */
static float loss_of(const trainer *t, const flight *f, int64_t part) {
    return t->shared ? report_of(t, (int32_t)(part / t->parts))->loss[part % t->parts] : f->loss[part];
}

static int64_t all_parts(const trainer *t) {
    return t->parts * vjp_group_size(t->options.group);
}

/* All of a step, with its results on their way into `f`. */
static bool enqueue(trainer *t, const train_source *source, flight *f) {
    vjp_program *last = updating(t);
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
        if (!trainer_agree(t, f, ok)) return false;
        t->together = false;
        /* A process's guard has seen its own losses alone: a bad one of another must suppress the step here, too. */
        for (int64_t part = 0; part < all_parts(t); part++)
            if (!isfinite(loss_of(t, f, part))) {
                *f->norm = NAN;
                return vjp_event_record(t->device, &f->done) == VJP_OK;
            }
        ok = t->split.group ? trainer_sum_split(t) : shards_sum(&t->shards, t->overlap.sum != NULL) == VJP_OK;
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

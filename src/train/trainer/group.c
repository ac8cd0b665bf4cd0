/* SPDX-License-Identifier: MIT */
/*
 * A trainer among the processes of a group: how shards and parameters are split, the report of each process before the
 * gradients are summed, and the sums. A process in which something fails still takes part in every exchange up to that
 * report, so that the others learn of it instead of waiting.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/system.h"
#include "train/trainer/state.h"

bool trainer_make_reports(trainer *t) {
    size_t size = (size_t)vjp_group_size(t->options.group);
    if (size > 1) t->shared = calloc(size, report_bytes(t));
    return size == 1 || t->shared;
}

const char *trainer_no_overlap(const trainer *t) {
    if (vjp_group_size(t->options.group) == 1 || !t->options.overlap) return NULL;
    if (!vjp_device_is_host(t->device) && !t->device->backend->set_stream)
        return "the device has one queue only, so gradients travel after the backward pass";
    if (!vjp_group_is_any_thread(t->options.group))
        return "the group's engine can be used by one thread only, so gradients travel after the backward pass";
    return NULL;
}

/* Gradients of shards are summed where the first program keeps them. */
bool trainer_make_shards(trainer *t) {
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

bool trainer_choose_split(trainer *t, char error[TRAIN_ERROR]) {
    size_t count = t->count;
    if (vjp_group_size(t->options.group) == 1) return true;
    int64_t *elements = calloc(count + 1, sizeof *elements);
    for (size_t i = 0; elements && i < count; i++) {
        vjp_tensor shape = vjp_graph_describe(t->model->graph, t->trained[i]->value);
        elements[i] = count_of(&shape);
    }
    bool ok = elements ? split_choose(&t->writers, t->options.group, elements, count, error)
                       : train_fail(error, "there is no memory to split %zu parameters", count);
    /* The loss's scale follows from the norm of all gradients, which the program computes. */
    if (ok && t->options.zero && t->options.loss_scale == 0)
        ok = split_choose(&t->split, t->options.group, elements, count, error);
    free(elements);
    return ok;
}

bool trainer_failed_together(const trainer *t) {
    return t->together;
}

trainer_group_time trainer_take_group_time(trainer *t) {
    trainer_group_time time = {t->shards.seconds, t->waited, t->overlap.hidden};
    t->shards.seconds = t->waited = t->overlap.hidden = 0;
    return time;
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

bool trainer_agree(trainer *t, flight *f, bool ok) {
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

bool trainer_end_overlap(trainer *t, bool begun, bool ok) {
    char sentence[VJP_ERROR_BYTES];
    snprintf(sentence, sizeof sentence, "%s", vjp_error(t->device));
    if (!begun) begun = overlap_begin(&t->overlap) == VJP_OK;
    bool ended = begun && overlap_end(&t->overlap, ok) == VJP_OK;
    return ok ? ended : vjp_fail(t->device, VJP_GROUP_FAILED, "%s", sentence) == VJP_OK;
}

bool trainer_sum_split(trainer *t) {
    float squares;
    return split_sum(&t->split, &t->shards, t->overlap.sum != NULL, &squares) == VJP_OK &&
           vjp_program_write(t->update, t->squares, &squares, sizeof squares) == VJP_OK;
}

/* SPDX-License-Identifier: MIT */
/* Memory of the host that the device copies, pinned where that helps: batches, and the numbers of a step. */
#include <stdlib.h>

#include "train/trainer/state.h"

static void *new_host(vjp_device *device, size_t bytes) {
    void *data = NULL;
    if (!device->backend->alloc_host) return malloc(bytes);
    return device->backend->alloc_host(device, bytes, &data) == VJP_OK ? data : NULL;
}

void trainer_free_host(vjp_device *device, void *data) {
    if (data && device->backend->alloc_host)
        device->backend->free_host(device, data);
    else
        free(data);
}

bool trainer_make_flights(trainer *t) {
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

bool trainer_make_batches(trainer *t) {
    t->target_offset = (t->input_bytes + 63) / 64 * 64;
    size_t bytes = t->target_offset + t->target_bytes + t->first_bytes;
    for (int i = 0; i < BATCHES; i++) {
        t->batch[i].host = new_host(t->device, bytes + 1);
        if (!t->batch[i].host) return false;
        if (copies_beside(t) && vjp_alloc(t->device, bytes + 1, &t->batch[i].device) != VJP_OK) return false;
    }
    return true;
}

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

bool trainer_feed(trainer *t, vjp_program *program, const train_source *source, bool validation, uint64_t part) {
    batch *b = &t->batch[t->next_batch];
    if (b->used && vjp_event_wait(t->device, b->used) != VJP_OK) return false;
    free_event(t, &b->used);
    source->fill(source->context, validation, part, b->host, (int32_t *)(void *)(b->host + t->target_offset));
    if (!write_batch(t, program, b)) return false;
    t->next_batch = (t->next_batch + 1) % BATCHES;
    return !copies_beside(t) || vjp_event_record(t->device, &b->used) == VJP_OK; /* other copies are done */
}

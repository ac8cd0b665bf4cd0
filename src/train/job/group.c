/* SPDX-License-Identifier: MIT */
/* Agreement of the processes of a run. */
#include "train/job/group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/system.h"
#include "files/sync.h"
#include "train/job/sources_hash.h"

uint64_t job_hash_more(uint64_t hash, const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
    return hash;
}

uint64_t job_hash(const void *bytes, size_t count) {
    return job_hash_more(14695981039346656037u, bytes, count);
}

bool job_hash_model(const checkpoint *model, uint64_t *hash, char error[TRAIN_ERROR]) {
    enum { FIRST_BYTES = 4096 };
    char bytes[FIRST_BYTES];
    *hash = 0;
    for (size_t i = 0; i < model->model_count; i++) {
        const safetensors_tensor *tensor = model->model[i];
        size_t count = tensor->bytes < sizeof bytes ? tensor->bytes : sizeof bytes;
        if (!safetensors_fetch(tensor, 0, count, bytes, error)) return false;
        *hash = *hash * 31 + job_hash(tensor->name, strlen(tensor->name));
        *hash = *hash * 31 + job_hash(tensor->shape, (size_t)tensor->ndim * sizeof tensor->shape[0]);
        *hash = *hash * 31 + job_hash(bytes, count);
    }
    return true;
}

static vjp_group *group_of(const job *j) {
    return j->settings.trainer.group;
}

bool job_is_first(const job *j) {
    return vjp_group_rank(group_of(j)) == 0;
}

/* Shares what each process has, `bytes` of it. NULL: `error` says why. free() it. */
static void *share(job *j, const void *own, size_t bytes, char error[TRAIN_ERROR]) {
    size_t size = (size_t)vjp_group_size(group_of(j)), rank = (size_t)vjp_group_rank(group_of(j));
    char *all = calloc(size, bytes);
    if (!all) {
        train_fail(error, "there is no memory for the reports of %zu processes", size);
        return NULL;
    }
    memcpy(all + rank * bytes, own, bytes);
    if (vjp_group_share(group_of(j), all, bytes) == VJP_OK) return all;
    train_fail(error, "%s", vjp_error(j->device));
    free(all);
    return NULL;
}

typedef struct outcome {
    int32_t failed, busy;
    char sentence[TRAIN_ERROR];
} outcome;

bool job_agree(job *j, bool ok, char error[TRAIN_ERROR]) {
    int32_t size = vjp_group_size(group_of(j)), speaker = -1;
    j->together = false;
    if (size == 1) return ok;
    outcome own = {.failed = !ok};
    if (!ok) snprintf(own.sentence, sizeof own.sentence, "%s", error);
    outcome *all = NULL;
    for (bool busy = true; busy;) {
        free(all);
        all = share(j, &own, sizeof own, error);
        if (!all) return false;
        busy = false;
        for (int32_t rank = 0; rank < size; rank++)
            busy = busy || all[rank].busy;
    }
    bool same = true;
    for (int32_t rank = size - 1; rank >= 0; rank--) {
        ok = ok && !all[rank].failed;
        if (all[rank].failed && (all[rank].sentence[0] || speaker < 0)) speaker = rank;
    }
    for (int32_t rank = 0; rank < size && !ok; rank++)
        same = same && strcmp(all[rank].sentence, all[speaker].sentence) == 0;
    if (!ok && same) train_fail(error, "%s", all[speaker].sentence);
    if (!ok && !same) train_fail(error, "rank %d: %.*s", (int)speaker, TRAIN_ERROR - 32, all[speaker].sentence);
    j->together = !ok;
    free(all);
    return ok;
}

bool job_is_busy(job *j) {
    int32_t size = vjp_group_size(group_of(j));
    char ignored[TRAIN_ERROR]; /* job_agree() fails, too, and says why */
    if (size == 1) return true;
    const outcome own = {.busy = 1};
    outcome *all = share(j, &own, sizeof own, ignored);
    bool ok = all != NULL;
    for (int32_t rank = 0; rank < size && ok; rank++)
        ok = !all[rank].failed;
    free(all);
    return ok;
}

bool job_stops(job *j, bool wish) {
    int32_t size = vjp_group_size(group_of(j)), own = wish;
    char ignored[TRAIN_ERROR];
    if (size == 1) return wish;
    int32_t *all = share(j, &own, sizeof own, ignored); /* the next step fails, too, and says why */
    bool stops = false;
    for (int32_t rank = 0; all && rank < size; rank++)
        stops = stops || all[rank];
    free(all);
    return stops;
}

/* ---- What must be the same --------------------------------------------------------------------------- */

/* Eight bytes at a time: all weights are hashed at every save. */
static uint64_t hash_tensors(uint64_t hash, const safetensors_tensor *tensor, size_t count) {
    for (size_t i = 0; i < count; i++) {
        size_t bytes = vjp_dtype_size((vjp_dtype)tensor[i].dtype);
        for (int axis = 0; axis < tensor[i].ndim; axis++)
            bytes *= (size_t)tensor[i].shape[axis];
        const char *data = tensor[i].data;
        for (size_t at = 0; at < bytes; at += sizeof hash) {
            uint64_t word = 0;
            memcpy(&word, data + at, bytes - at < sizeof word ? bytes - at : sizeof word);
            hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
            hash ^= hash >> 32;
        }
    }
    return hash;
}

static bool hash_weights(job *j, uint64_t *hash, char error[TRAIN_ERROR]) {
    const safetensors_tensor *common;
    size_t count;
    if (!trainer_common_tensors(j->trainer, &common, &count, error)) return false;
    *hash = hash_tensors((uint64_t)j->step, common, count);
    return true;
}

/* Paths and the number of a device may differ from machine to machine. */
static uint64_t hash_settings(const job *j) {
    job_settings s = j->settings;
    s.data[0] = s.from[0] = s.tokenizer[0] = s.cache[0] = 0;
    s.arithmetic.device[strcspn(s.arithmetic.device, ":")] = 0;
    json_writer w = {0};
    json_put_object(&w, NULL);
    job_settings_write(&w, &s);
    json_put_object_end(&w);
    char *text = json_take(&w);
    uint64_t hash = text ? job_hash(text, strlen(text)) : 0;
    free(text);
    return hash ^ (uint64_t)(s.trainer.zero + 2 * s.trainer.overlap); /* not recorded, but they must do the same */
}

/* Compares what every process has with what rank 0 has; `what` is the name of each number. */
static bool require_alike(job *j, const uint64_t *own, const char *const *what, size_t count, char error[TRAIN_ERROR]) {
    bool ok = true;
    uint64_t *all = share(j, own, count * sizeof *own, error);
    if (!all) return false;
    for (int32_t rank = 1; rank < vjp_group_size(group_of(j)) && ok; rank++)
        for (size_t i = 0; i < count && ok; i++)
            if (all[(size_t)rank * count + i] != all[i])
                ok = train_fail(error, "rank %d has other %s than rank 0, so they cannot train together", (int)rank,
                                what[i]);
    j->together = !ok;
    free(all);
    return ok;
}

/* Each process writes its part of a checkpoint there. Opening the folder above lets NFS look again for a new one. */
static bool sees_out(const job *j, char error[TRAIN_ERROR]) {
    system_status status;
    char ignored[TRAIN_ERROR];
    (void)file_sync_parent(j->out, ignored);
    if (system_status_of(j->out, &status) && status.kind == SYSTEM_FOLDER) return true;
    return train_fail(error, "%.300s is not there: --out must be a folder that all processes share", j->out);
}

bool job_meet(job *j, bool ok, char error[TRAIN_ERROR]) {
    static const char *const what[] = {"code", "settings", "data", "base weights"};
    if (!ok && j->together) return false; /* they have agreed on that failure before */
    if (!job_agree(j, ok, error)) return false;
    if (vjp_group_size(group_of(j)) == 1) return true;
    const uint64_t own[] = {job_hash(sources_hash, strlen(sources_hash)), hash_settings(j), j->data_hash, j->base_hash};
    return require_alike(j, own, what, 4, error) && job_agree(j, sees_out(j, error), error) &&
           job_has_same_weights(j, error);
}

bool job_has_same_weights(job *j, char error[TRAIN_ERROR]) {
    static const char *const what[] = {"weights"};
    uint64_t own = 0;
    if (vjp_group_size(group_of(j)) == 1) return true;
    bool ok = hash_weights(j, &own, error);
    return job_agree(j, ok, error) && require_alike(j, &own, what, 1, error);
}

/* SPDX-License-Identifier: MIT */
/*
 * Finding and opening checkpoints; checkpoint_save.c saves them. A folder that transformers wrote opens the same way.
 * Nothing in it is trusted: a list of files may not lead out of the folder, each tensor must be in the file that the
 * list names, and all files of a checkpoint must have the same step.
 */
#include "train/files/checkpoint.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/system.h"
#include "train/files/checkpoint_names.h"
#include "train/files/input.h"

/* ---- Names ------------------------------------------------------------------------------------------- */

bool checkpoint_path(char path[CHECKPOINT_PATH], char error[TRAIN_ERROR], const char *format, ...) {
    va_list list;
    va_start(list, format);
    int length = vsnprintf(path, CHECKPOINT_PATH, format, list);
    va_end(list);
    if (length > 0 && length < CHECKPOINT_PATH) return true;
    return train_fail(error, "%.300s...: the path is %s", path, length ? "too long" : "empty");
}

static const char PREFIX[] = "checkpoint-";

bool checkpoint_is_temporary(const char *name) {
    static const char suffix[] = ".tmp";
    size_t length = strlen(name), end = sizeof suffix - 1;
    return name[0] == '.' && strncmp(name + 1, PREFIX, sizeof PREFIX - 1) == 0 && length > sizeof PREFIX + end &&
           strcmp(name + length - end, suffix) == 0;
}

/* The step of "checkpoint-00000100". False: checkpoint_save() would give no step this name. */
static bool step_of(const char *name, int64_t *step) {
    char same[64];
    if (strncmp(name, PREFIX, sizeof PREFIX - 1) != 0) return false;
    errno = 0;
    *step = strtoll(name + sizeof PREFIX - 1, NULL, 10);
    snprintf(same, sizeof same, CHECKPOINT_NAME, (long long)*step);
    return errno == 0 && *step >= 0 && strcmp(name, same) == 0;
}

static int from_highest(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

bool checkpoint_list(const char *dir, int64_t **steps, size_t *count) {
    *steps = NULL;
    *count = 0;
    size_t room = 0;
    system_folder *entries = system_folder_open(dir);
    if (!entries) return false;
    bool ok = true;
    for (const char *name; ok && (name = system_folder_next(entries));) {
        int64_t step;
        if (!step_of(name, &step)) continue;
        if (*count == room) {
            room = room ? room * 2 : 16;
            int64_t *larger = realloc(*steps, room * sizeof *larger);
            ok = larger != NULL;
            if (!ok) break;
            *steps = larger;
        }
        (*steps)[(*count)++] = step;
    }
    int reason = ok ? errno : ENOMEM;
    system_folder_close(entries);
    if (!reason && *count) qsort(*steps, *count, sizeof **steps, from_highest);
    if (!reason) return true;
    free(*steps);
    errno = reason;
    return false;
}

/* ---- Finding ----------------------------------------------------------------------------------------- */

static bool is_there(const char *folder, const char *name) {
    char path[CHECKPOINT_PATH], ignored[TRAIN_ERROR];
    system_status status;
    return checkpoint_path(path, ignored, "%s/%s", folder, name) && system_status_of(path, &status);
}

static const char INDEX[] = "model.safetensors.index.json";
static const char ADAPTER_CONFIG[] = "adapter_config.json", ADAPTER[] = "adapter_model.safetensors";

bool checkpoint_is_one(const char *dir) {
    return is_there(dir, "config.json") || is_there(dir, ADAPTER_CONFIG);
}

/* Where `latest` points; "" where it is no link. */
static void read_latest(const char *dir, char target[CHECKPOINT_PATH]) {
    char latest[CHECKPOINT_PATH], ignored[TRAIN_ERROR];
    if (!checkpoint_path(latest, ignored, "%s/latest", dir) || !system_read_link(latest, target, CHECKPOINT_PATH))
        target[0] = 0;
}

/* The target of the link, so that a later save does not change the folder that is being read. False: no such link. */
static bool follow_latest(const char *dir, char path[CHECKPOINT_PATH], char *error) {
    char target[CHECKPOINT_PATH];
    if (!is_there(dir, "latest")) return false;
    read_latest(dir, target);
    if (!target[0]) return false;
    if (system_is_absolute(target)) return checkpoint_path(path, error, "%s", target);
    return checkpoint_path(path, error, "%s/%s", dir, target);
}

int64_t checkpoint_step(const char *path, char error[TRAIN_ERROR]) {
    checkpoint c;
    if (!checkpoint_open(path, &c, error)) return -2;
    int64_t step = c.step;
    checkpoint_close(&c);
    return step;
}

bool checkpoint_lacks_files(const char *path) {
    bool model = is_there(path, "model.safetensors") || is_there(path, INDEX) || is_there(path, ADAPTER);
    return !checkpoint_is_one(path) || !model || !is_there(path, "optimizer.safetensors") ||
           !is_there(path, "trainer.json");
}

/* Of what opens: a folder without a step may be another program's, which has other files. */
static bool is_torn(const char *path, int64_t step) {
    return step >= 0 && checkpoint_lacks_files(path);
}

/*
 * Whether `latest` leads to a torn checkpoint beside it, as in a copy by `cp -a` or `rsync -a`. A run that is saving
 * may rename its target meanwhile, and then remove its files: it is not torn then, but gone, and the caller tries
 * again.
 */
static bool links_to_torn(const char *dir, const char *path) {
    char target[CHECKPOINT_PATH];
    int64_t step;
    system_status before, after;
    read_latest(dir, target);
    return step_of(target, &step) && system_status_of(path, &before) && before.kind == SYSTEM_FOLDER &&
           checkpoint_lacks_files(path) && system_status_of(path, &after) && after.volume == before.volume &&
           after.number == before.number;
}

/*
 * The checkpoint of the highest step that opens; one that may be torn only if there is no other, and never if
 * `whole_only`. After `cp -rL`, `latest` is a folder, and one of the candidates.
 */
static bool find_newest(const char *dir, bool whole_only, char path[CHECKPOINT_PATH], char error[TRAIN_ERROR]) {
    char latest[CHECKPOINT_PATH], target[CHECKPOINT_PATH], reason[TRAIN_ERROR] = "";
    int64_t *steps, copied = -2;
    size_t count;
    if (!checkpoint_list(dir, &steps, &count))
        return train_fail(error, "%.300s: it cannot be read: %s", dir, strerror(errno));
    read_latest(dir, target);
    if (!target[0] && checkpoint_path(latest, reason, "%s/latest", dir) && checkpoint_is_one(latest))
        copied = checkpoint_step(latest, reason);
    bool found = false;
    for (int any = 0; any < (whole_only ? 1 : 2) && !found; any++) {
        bool takes_latest = copied >= -1 && (any || !is_torn(latest, copied));
        for (size_t i = 0; !found && i < count && (!takes_latest || steps[i] >= copied); i++) {
            if (!checkpoint_path(path, reason, CHECKPOINT_FORMAT, dir, (long long)steps[i])) continue;
            int64_t step = checkpoint_step(path, reason);
            found = step >= -1 && (any || !is_torn(path, step));
        }
        if (!found && takes_latest) found = checkpoint_path(path, reason, "%s", latest);
    }
    free(steps);
    if (found) return true;
    if (reason[0])
        return train_fail(error, "%.200s: none of its checkpoints can be opened; the last: %.250s", dir, reason);
    return train_fail(error, "%.300s: it has neither a config.json nor a checkpoint, nor adapters", dir);
}

/* A file with the name of a checkpoint beside it, in the place of a link. */
static bool read_name(const char *file, char path[CHECKPOINT_PATH]) {
    char name[64] = "", ignored[TRAIN_ERROR];
    int64_t step, bytes;
    FILE *stream = input_stream(file, sizeof name - 1, &bytes, ignored);
    if (!stream) return false;
    (void)!fread(name, 1, sizeof name - 1, stream);
    fclose(stream);
    name[strcspn(name, "\n")] = 0;
    size_t folder = strlen(file);
    while (folder && !system_is_separator(file[folder - 1]))
        folder--;
    return step_of(name, &step) && checkpoint_path(path, ignored, "%.*s%s", (int)folder, file, name);
}

bool checkpoint_find(const char *dir, char path[CHECKPOINT_PATH], char error[TRAIN_ERROR]) {
    system_status status;
    if (!system_status_of(dir, &status))
        return train_fail(error, "%.300s: it cannot be opened: %s", dir, strerror(errno));
    if (status.kind == SYSTEM_FILE && read_name(dir, path)) return true;
    if (status.kind != SYSTEM_FOLDER) return train_fail(error, "%.300s: it is not a folder", dir);
    if (checkpoint_is_one(dir)) return checkpoint_path(path, error, "%s", dir);
    if (!follow_latest(dir, path, error)) return find_newest(dir, false, path, error);
    char whole[CHECKPOINT_PATH], ignored[TRAIN_ERROR];
    if (links_to_torn(dir, path) && find_newest(dir, true, whole, ignored)) memcpy(path, whole, strlen(whole) + 1);
    return true;
}

/* ---- Files ------------------------------------------------------------------------------------------- */

static void close_file(checkpoint_file *file) {
    safetensors_free(&file->tensors);
    *file = (checkpoint_file){0};
}

static bool open_file(const char *folder, const char *name, checkpoint_file *file, char *error) {
    char path[CHECKPOINT_PATH];
    *file = (checkpoint_file){.name = name};
    return checkpoint_path(path, error, "%s/%s", folder, name) && safetensors_open(path, &file->tensors, error);
}

static bool read_json(const char *folder, const char *name, json_document *document, char *error) {
    char path[CHECKPOINT_PATH];
    if (!checkpoint_path(path, error, "%s/%s", folder, name) || !json_read(path, document, error)) return false;
    return document->root->type == JSON_OBJECT || train_fail(error, "%.300s: it must be a JSON object", path);
}

/* ---- The model --------------------------------------------------------------------------------------- */

static checkpoint_file *file_named(checkpoint *c, const char *name) {
    for (size_t i = 0; i < c->file_count; i++)
        if (strcmp(c->files[i].name, name) == 0) return &c->files[i];
    return NULL;
}

static bool listing_fails(const char *folder, const json_value *entry, const char *what, char *error) {
    char file[JSON_SHOWN];
    return train_fail(error, "%.200s/%s: tensor \"%.64s\" is listed in %s, %s", folder, INDEX, entry->key,
                      json_show(entry, file), what);
}

/* Opens every file that the index names. */
static bool open_listed(const char *folder, checkpoint *c, char *error) {
    if (!read_json(folder, INDEX, &c->index, error)) return false;
    const json_value *map = json_member(c->index.root, "weight_map");
    if (!map || map->type != JSON_OBJECT)
        return train_fail(error, "%.300s/%s: it has no object \"weight_map\"", folder, INDEX);
    c->files = calloc(map->count + 1, sizeof *c->files);
    if (!c->files) return train_fail(error, "%.300s/%s: there is no memory for it", folder, INDEX);
    for (const json_value *entry = map->first; entry; entry = entry->next) {
        /* On Windows '\\' separates folders, too, and ':' follows a drive. */
        if (entry->type != JSON_STRING || !entry->text[0] || entry->text[0] == '.' || strpbrk(entry->text, "/\\:"))
            return listing_fails(folder, entry, "which must be the name of a file in this folder", error);
        if (file_named(c, entry->text)) continue;
        if (!open_file(folder, entry->text, &c->files[c->file_count], error)) return false;
        c->file_count++;
    }
    return true;
}

/* Each tensor must be in the file that the index gives for it. */
static bool check_listed(const char *folder, checkpoint *c, char *error) {
    const json_value *map = json_member(c->index.root, "weight_map");
    for (const json_value *entry = map ? map->first : NULL; entry; entry = entry->next) {
        const safetensors_file *file = &file_named(c, entry->text)->tensors;
        const safetensors_tensor *tensor = checkpoint_tensor(c, entry->key);
        if (!tensor || tensor < file->tensors || tensor >= file->tensors + file->count)
            return listing_fails(folder, entry, "which does not have it", error);
    }
    return true;
}

static bool open_single(const char *folder, checkpoint *c, char *error) {
    c->files = calloc(1, sizeof *c->files);
    if (!c->files) return train_fail(error, "%.300s: there is no memory to open it", folder);
    if (!open_file(folder, "model.safetensors", &c->files[0], error)) return false;
    c->file_count = 1;
    return true;
}

static int by_name(const void *a, const void *b) {
    return strcmp((*(const safetensors_tensor *const *)a)->name, (*(const safetensors_tensor *const *)b)->name);
}

static bool sort_tensors(const char *folder, checkpoint *c, char *error) {
    size_t count = 0;
    for (size_t i = 0; i < c->file_count; i++)
        count += c->files[i].tensors.count;
    c->model = calloc(count + 1, sizeof *c->model);
    if (!c->model) return train_fail(error, "%.300s: there is no memory for its %zu tensors", folder, count);
    for (size_t i = 0; i < c->file_count; i++)
        for (size_t j = 0; j < c->files[i].tensors.count; j++)
            c->model[c->model_count++] = &c->files[i].tensors.tensors[j];
    qsort(c->model, count, sizeof *c->model, by_name);
    for (size_t i = 1; i < count; i++)
        if (by_name(&c->model[i - 1], &c->model[i]) == 0)
            return train_fail(error, "%.300s: two of its files have a tensor \"%.64s\"", folder, c->model[i]->name);
    return true;
}

static bool open_model(const char *folder, checkpoint *c, char *error) {
    bool single = is_there(folder, "model.safetensors"), listed = is_there(folder, INDEX);
    if (!single && !listed && is_there(folder, "pytorch_model.bin"))
        return train_fail(error, "%.300s: its weights are in pytorch_model.bin only; vjp reads model.safetensors",
                          folder);
    bool ok = !single && listed ? open_listed(folder, c, error) : open_single(folder, c, error);
    return ok && sort_tensors(folder, c, error) && check_listed(folder, c, error);
}

/* ---- The whole --------------------------------------------------------------------------------------- */

/* All files that have a step must have the same. */
static bool agree(const char *folder, checkpoint *c, const char *name, const char *text, char *error) {
    if (!text) return true;
    char *end;
    errno = 0;
    long long step = strtoll(text, &end, 10);
    if (errno || end == text || *end || step < 0)
        return train_fail(error, "%.300s/%s: its step is \"%.32s\"; it must be an integer of 0 or more", folder, name,
                          text);
    if (c->step >= 0 && c->step != step)
        return train_fail(error, "%.300s: %s is of step %lld, but the files beside it are of step %lld", folder, name,
                          step, (long long)c->step);
    c->step = step;
    return true;
}

static bool check_steps(const char *folder, checkpoint *c, char *error) {
    for (size_t i = 0; i < c->file_count; i++)
        if (!agree(folder, c, c->files[i].name, safetensors_metadata(&c->files[i].tensors, "step"), error))
            return false;
    if (!agree(folder, c, ADAPTER, safetensors_metadata(&c->adapter.tensors, "step"), error)) return false;
    if (!agree(folder, c, "optimizer.safetensors", safetensors_metadata(&c->optimizer.tensors, "step"), error))
        return false;
    char text[JSON_SHOWN];
    const json_value *step = json_member(c->trainer.root, "step");
    return agree(folder, c, "trainer.json", step ? json_show(step, text) : NULL, error);
}

/* A file that maps text to tokens; a model of bytes has none. */
static const char *find_tokenizer(const char *folder) {
    static const char *const names[] = {"tokenizer.json", "tokenizer.model", "vocab.json"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (is_there(folder, names[i])) return names[i];
    return NULL;
}

/* The text of a file; NULL and true: there is no such file. */
static bool read_text(const char *folder, const char *name, char **text, char *error) {
    enum { MAX_BYTES = 256 * 1024 * 1024 };
    char path[CHECKPOINT_PATH];
    int64_t bytes;
    *text = NULL;
    if (!is_there(folder, name)) return true;
    if (!checkpoint_path(path, error, "%s/%s", folder, name)) return false;
    FILE *file = input_stream(path, MAX_BYTES, &bytes, error);
    if (!file) return false;
    *text = malloc((size_t)bytes + 1);
    bool ok = *text || train_fail(error, "%.300s: there is no memory for its %lld bytes", path, (long long)bytes);
    if (ok) {
        size_t count = fread(*text, 1, (size_t)bytes, file);
        (*text)[count] = 0;
        ok = !ferror(file) || train_fail(error, "%.300s: it cannot be read: %s", path, strerror(errno));
    }
    fclose(file);
    return ok;
}

bool checkpoint_read_tokenizer(const char *folder, char **json, char **config, char error[TRAIN_ERROR]) {
    *config = NULL;
    bool ok = read_text(folder, "tokenizer.json", json, error);
    ok = ok && (!*json || read_text(folder, "tokenizer_config.json", config, error));
    if (ok) return true;
    free(*json);
    free(*config);
    *json = *config = NULL;
    return false;
}

/* The model, or the adapters. A folder with both configs has adapters: transformers takes it for that, too. */
static bool open_weights(const char *path, checkpoint *c, char *error) {
    if (is_there(path, ADAPTER_CONFIG))
        return read_json(path, ADAPTER_CONFIG, &c->adapter_config, error) &&
               open_file(path, ADAPTER, &c->adapter, error);
    return read_json(path, "config.json", &c->config, error) && open_model(path, c, error);
}

bool checkpoint_open(const char *path, checkpoint *c, char error[TRAIN_ERROR]) {
    *c = (checkpoint){.step = -1, .tokenizer = find_tokenizer(path)};
    bool ok =
        open_weights(path, c, error) &&
        (!is_there(path, "optimizer.safetensors") || open_file(path, "optimizer.safetensors", &c->optimizer, error)) &&
        (!is_there(path, "trainer.json") || read_json(path, "trainer.json", &c->trainer, error)) &&
        checkpoint_read_tokenizer(path, &c->tokenizer_json, &c->tokenizer_config, error) && check_steps(path, c, error);
    if (!ok) checkpoint_close(c);
    return ok;
}

bool checkpoint_open_base(checkpoint *c, const char *base, char error[TRAIN_ERROR]) {
    char path[CHECKPOINT_PATH], reason[TRAIN_ERROR];
    if (!c->adapter_config.root)
        return !base || train_fail(error, "--base is for a folder of adapters, and this one has a model of its own");
    const json_value *named = json_member(c->adapter_config.root, "base_model_name_or_path");
    const char *dir = base ? base : named && named->type == JSON_STRING ? named->text : "";
    if (!dir[0]) return train_fail(error, "adapter_config.json names no base model: give its folder by --base");
    checkpoint model;
    if (!checkpoint_find(dir, path, reason) || !checkpoint_open(path, &model, reason))
        return train_fail(error, "the base model of the adapters cannot be opened: %.380s%s", reason,
                          base ? "" : "; give its folder by --base");
    if (model.adapter_config.root) {
        checkpoint_close(&model);
        return train_fail(error, "%.300s has adapters itself, so it cannot be the base of others: merge it first",
                          path);
    }
    c->config = model.config;
    c->model = model.model;
    c->model_count = model.model_count;
    c->files = model.files;
    c->file_count = model.file_count;
    c->index = model.index;
    snprintf(c->base, sizeof c->base, "%s", path);
    if (!c->tokenizer) {
        c->tokenizer = model.tokenizer;
        c->tokenizer_json = model.tokenizer_json;
        c->tokenizer_config = model.tokenizer_config;
        model.tokenizer_json = model.tokenizer_config = NULL;
    }
    /* What is not taken over. A model that vjp trained on bytes has a trainer.json that says so. */
    if (!c->trainer.root) {
        c->trainer = model.trainer;
        model.trainer = (json_document){0};
    }
    model.config = model.index = (json_document){0};
    model.model = NULL;
    model.files = NULL;
    model.file_count = 0;
    checkpoint_close(&model);
    return true;
}

bool checkpoint_open_newest(const char *dir, char path[CHECKPOINT_PATH], checkpoint *c, char error[TRAIN_ERROR]) {
    enum { MAX_TRIES = 100 };
    *c = (checkpoint){.step = -1};
    bool ok = false, replaced = true;
    char before[CHECKPOINT_PATH], after[CHECKPOINT_PATH];
    for (int i = 0; i < MAX_TRIES && replaced; i++) {
        checkpoint_close(c);
        read_latest(dir, before);
        ok = checkpoint_find(dir, path, error);
        if (!ok) {
            /* Those that it tried may have been replaced meanwhile; then `latest` has moved on. */
            read_latest(dir, after);
            replaced = strcmp(before, after) != 0;
            continue;
        }
        ok = checkpoint_open(path, c, error);
        /* A checkpoint is renamed before its files are removed. If its name is gone by now, a newer one is there, and
         * files of this one may have been taken for missing. */
        system_status status;
        replaced = !system_status_of(path, &status) && errno == ENOENT;
    }
    return ok;
}

void checkpoint_close(checkpoint *c) {
    for (size_t i = 0; i < c->file_count; i++)
        close_file(&c->files[i]);
    free(c->files);
    free(c->model);
    close_file(&c->optimizer);
    json_free(&c->config);
    json_free(&c->trainer);
    json_free(&c->index);
    free(c->tokenizer_json);
    free(c->tokenizer_config);
    close_file(&c->adapter);
    json_free(&c->adapter_config);
    *c = (checkpoint){.step = -1};
}

const safetensors_tensor *checkpoint_tensor(const checkpoint *c, const char *name) {
    const safetensors_tensor wanted = {.name = name}, *key = &wanted;
    const safetensors_tensor *const *found =
        c->model_count ? bsearch(&key, c->model, c->model_count, sizeof *c->model, by_name) : NULL;
    return found ? *found : safetensors_find(&c->adapter.tensors, name);
}

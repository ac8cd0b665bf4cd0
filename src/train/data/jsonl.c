/* SPDX-License-Identifier: MIT */
/* The files of a data set, their key, and encoding them; see jsonl.h. */
#include "train/data/jsonl.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/system.h"
#include "train/files/checkpoint_names.h"
#include "train/files/input.h"

/* ---- Files ------------------------------------------------------------------------------------------- */

typedef struct data_file {
    char *path;
    int64_t bytes, changed;
} data_file;

typedef struct data_set {
    data_file *file; /* [count] */
    size_t count, room;
    int64_t bytes;
    char folder[CHECKPOINT_PATH]; /* that they are in */
} data_set;

static void free_set(data_set *set) {
    for (size_t i = 0; i < set->count; i++)
        free(set->file[i].path);
    free(set->file);
    *set = (data_set){0};
}

static bool is_jsonl(const char *name) {
    static const char ending[] = ".jsonl";
    size_t length = strlen(name);
    return length >= sizeof ending && strcmp(name + length + 1 - sizeof ending, ending) == 0;
}

bool jsonl_is_set(const char *path) {
    system_status about;
    char error[TRAIN_ERROR];
    if (!system_status_of(path, &about) || about.kind != SYSTEM_FOLDER) return is_jsonl(path);
    size_t count = 0;
    bool found = false;
    char **names = input_names(path, &count, error);
    for (size_t i = 0; i < count; i++) {
        found = found || is_jsonl(names[i]);
        free(names[i]);
    }
    free(names);
    return found;
}

/* Adds a file to the set; a folder of that name is not one. */
static bool add_file(const char *path, data_set *set, char error[TRAIN_ERROR]) {
    system_status about;
    if (!system_status_of(path, &about))
        return train_fail(error, "%.300s: it cannot be opened: %s", path, strerror(errno));
    if (about.kind == SYSTEM_FOLDER) return true;
    if (set->count == set->room) {
        data_file *larger = list_grow(set->file, set->count, 1, sizeof *larger, &set->room);
        if (!larger) return train_fail(error, "there is no memory for the list of files");
        set->file = larger;
    }
    char *copy = malloc(strlen(path) + 1);
    if (!copy) return train_fail(error, "there is no memory for the list of files");
    set->file[set->count++] = (data_file){strcpy(copy, path), about.bytes, about.changed};
    set->bytes += about.bytes;
    return true;
}

static bool list_files(const char *path, data_set *set, char error[TRAIN_ERROR]) {
    system_status about;
    size_t count = 0, length = strlen(path);
    if (!checkpoint_path(set->folder, error, "%s", path)) return false;
    if (!system_status_of(path, &about) || about.kind != SYSTEM_FOLDER) {
        while (length && !system_is_separator(path[length - 1]))
            length--;
        snprintf(set->folder, sizeof set->folder, "%.*s", length ? (int)length : 1, length ? path : ".");
        return add_file(path, set, error);
    }
    char **names = input_names(path, &count, error);
    bool ok = names != NULL;
    for (size_t i = 0; i < count; i++) {
        char inner[CHECKPOINT_PATH];
        if (ok && is_jsonl(names[i]))
            ok = checkpoint_path(inner, error, "%s/%s", path, names[i]) && add_file(inner, set, error);
        free(names[i]);
    }
    free(names);
    return ok;
}

/* A data set that is written to while it is read would be neither the old nor the new one. */
static bool is_unchanged(const data_set *set, char error[TRAIN_ERROR]) {
    for (size_t i = 0; i < set->count; i++) {
        system_status about;
        const data_file *file = &set->file[i];
        if (!system_status_of(file->path, &about) || about.bytes != file->bytes || about.changed != file->changed)
            return train_fail(error, "%.300s: it has changed while it was read", file->path);
    }
    return true;
}

/* ---- The key ----------------------------------------------------------------------------------------- */

static uint64_t add_hash(uint64_t hash, const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
    return (hash ^ count) * 1099511628211u;
}

/* Of names, sizes and times of the files, not of their contents: a set may have terabytes. */
static uint64_t key_of(const data_set *set, const model_tokenizer *t, const jsonl_options *o) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < set->count; i++) {
        const data_file *file = &set->file[i];
        hash = add_hash(hash, file->path, strlen(file->path));
        hash = add_hash(hash, &file->bytes, sizeof file->bytes);
        hash = add_hash(hash, &file->changed, sizeof file->changed);
    }
    if (t->json) hash = add_hash(hash, t->json, strlen(t->json));
    if (t->config) hash = add_hash(hash, t->config, strlen(t->config));
    return add_hash(hash, &o->skip_bad, sizeof o->skip_bad);
}

/* ---- Lines ------------------------------------------------------------------------------------------- */

typedef struct encoding {
    const model_tokenizer *tokenizer;
    const jsonl_options *options;
    jsonl_result *result;
    token_cache_writer *writer;
    document document;
    byte_list line;
    int64_t done, all; /* bytes */
    uint64_t bad;
} encoding;

static bool is_blank(const char *text, size_t length) {
    while (length && strchr(" \t\r\n", text[length - 1]) && text[length - 1])
        length--;
    return !length;
}

/* The next line, without its end, up to JSON_MAX_BYTES + 1 bytes of it. False: there is none, or it cannot be read. */
static bool next_line(encoding *e, FILE *file, bool *ok) {
    enum { CHUNK = 1 << 16 };
    int c;
    e->line.count = 0;
    while ((c = getc(file)) != EOF && c != '\n') {
        e->done++;
        if (e->line.count > JSON_MAX_BYTES) continue; /* document_encode() refuses its length */
        *ok = e->line.count < e->line.room || byte_list_reserve(&e->line, CHUNK);
        if (!*ok) return false;
        e->line.bytes[e->line.count++] = (char)c;
    }
    if (c == '\n') e->done++;
    return c == '\n' || e->line.count;
}

static bool add_line(encoding *e, const char *path, int64_t number, char error[TRAIN_ERROR]) {
    char reason[TRAIN_ERROR];
    if (is_blank(e->line.bytes, e->line.count)) return true;
    if (document_encode(e->tokenizer, e->line.bytes, e->line.count, &e->document, reason))
        return token_cache_add(e->writer, &e->document, error);
    train_fail(error, "%.200s: line %lld: %.280s", path, (long long)number, reason);
    if (!e->options->skip_bad) return false;
    if (!e->bad++) memcpy(e->result->first_bad, error, TRAIN_ERROR);
    return true;
}

static bool add_lines(encoding *e, const char *path, char error[TRAIN_ERROR]) {
    int64_t bytes, number = 1;
    bool ok = true, enough = true;
    FILE *file = input_stream(path, INT64_MAX, &bytes, error);
    if (!file) return false;
    for (; ok && next_line(e, file, &enough); number++) {
        ok = add_line(e, path, number, error);
        if (ok && e->options->progress && !e->options->progress(e->options->progress_context, e->done, e->all))
            ok = train_fail(error, "%.300s: encoding was stopped", path);
    }
    if (ok && !enough) ok = train_fail(error, "%.300s: line %lld: there is no memory for it", path, (long long)number);
    if (ok && ferror(file)) ok = train_fail(error, "%.300s: it cannot be read: %s", path, strerror(errno));
    fclose(file);
    return ok;
}

static bool make(const char *path, const char *cache, uint64_t key, const data_set *set, encoding *e,
                 char error[TRAIN_ERROR]) {
    e->writer = token_cache_create(cache, key, error);
    if (!e->writer) return false;
    bool ok = true;
    uint64_t documents = 0;
    for (size_t i = 0; i < set->count && ok; i++)
        ok = add_lines(e, set->file[i].path, error);
    ok = ok && is_unchanged(set, error);
    documents = token_cache_documents(e->writer);
    if (ok && !documents)
        ok = train_fail(error, "%.300s: there is no document in it%s", path, e->bad ? ": every line was skipped" : "");
    ok = token_cache_finish(e->writer, ok, e->bad, error);
    document_free(&e->document);
    byte_list_free(&e->line);
    return ok;
}

/* ---- Opening ----------------------------------------------------------------------------------------- */

/*
 * Makes the cache while no other process does. A process that waits finds it made; where the file system has no locks
 * both make it, each whole, and the last one stays.
 */
static bool make_alone(const char *path, const char *cache, uint64_t key, const data_set *set, encoding *e,
                       char error[TRAIN_ERROR]) {
    enum { WAIT_NANOSECONDS = 100000000 };
    char lock_path[CHECKPOINT_PATH], ignored[TRAIN_ERROR];
    int64_t holder;
    if (!checkpoint_path(lock_path, error, "%s.lock", cache)) return false;
    int lock = system_open_to_lock(lock_path);
    if (lock < 0)
        return train_fail(error, "%.250s: it cannot be created: %s; choose a folder for the cache with --cache",
                          lock_path, strerror(errno));
    while (!system_lock(lock, &holder)) {
        system_sleep(WAIT_NANOSECONDS);
        if (e->options->progress && !e->options->progress(e->options->progress_context, 0, e->all)) {
            system_close(lock);
            return train_fail(error, "%.300s: encoding was stopped", path);
        }
    }
    e->result->made = !token_cache_open(cache, key, &e->result->tokens, ignored);
    bool ok = !e->result->made || make(path, cache, key, set, e, error);
    system_close(lock);
    return ok;
}

bool jsonl_open(const char *path, const model_tokenizer *t, const jsonl_options *options, jsonl_result *result,
                char error[TRAIN_ERROR]) {
    data_set set = {0};
    *result = (jsonl_result){0};
    if (t->tokens && tokenizer_size(t->tokens) > DOCUMENT_TOKEN)
        return train_fail(error, "the tokenizer has %d tokens; data can have up to %d", (int)tokenizer_size(t->tokens),
                          DOCUMENT_TOKEN);
    bool ok = list_files(path, &set, error), named = options->cache && options->cache[0];
    char folder[CHECKPOINT_PATH], cache[CHECKPOINT_PATH], reason[TRAIN_ERROR];
    uint64_t key = ok ? key_of(&set, t, options) : 0;
    ok = ok && checkpoint_path(folder, error, "%s%s", named ? options->cache : set.folder, named ? "" : "/.vjp-cache");
    ok = ok && checkpoint_path(cache, error, "%s/%016llx.tokens", folder, (unsigned long long)key);
    if (ok && !token_cache_open(cache, key, &result->tokens, reason)) {
        encoding e = {.tokenizer = t, .options = options, .result = result, .all = set.bytes};
        if (!checkpoint_make_folders(folder, reason))
            ok = train_fail(error, "%.400s; choose one for the cache with --cache", reason);
        ok = ok && make_alone(path, cache, key, &set, &e, error);
        if (ok && !result->tokens.map) ok = token_cache_open(cache, key, &result->tokens, error);
    }
    result->files = (int64_t)set.count;
    free_set(&set);
    return ok;
}

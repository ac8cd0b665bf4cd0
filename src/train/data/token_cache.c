/* SPDX-License-Identifier: MIT */
/* Writing and mapping a file of tokens; see token_cache.h. */
#include "train/data/token_cache.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/system.h"
#include "files/sync.h"
#include "train/files/checkpoint_names.h"
#include "train/files/input.h"

/* Changed whenever the layout or the way lines are encoded changes. */
static const char MAGIC[8] = "vjptok1";

typedef struct header {
    char magic[8];
    uint64_t order; /* ORDER: a file of the other byte order is not read */
    token_cache_counts has;
    uint64_t check; /* a hash of the above */
} header;

static const uint64_t ORDER = 0x0102030405060708u;

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
    return hash;
}

/* Four bytes at a time: every token goes through it. */
static uint64_t hash_tokens(uint64_t hash, const int32_t *token, size_t count) {
    for (size_t i = 0; i < count; i++) {
        hash = (hash ^ (uint32_t)token[i]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    return hash;
}

static uint64_t check_of(const header *h) {
    return hash_bytes(14695981039346656037u, h, offsetof(header, check));
}

/* Where the ends are: after the tokens, at a multiple of 8. False: the sizes fit no file. */
static bool layout_of(const token_cache_counts *has, size_t *ends, size_t *bytes) {
    size_t tokens, documents;
    if (has->tokens > SIZE_MAX / 8 || has->documents > SIZE_MAX / 16) return false;
    tokens = ((size_t)has->tokens + 1) / 2 * 2 * sizeof(int32_t);
    documents = (size_t)has->documents * sizeof(uint64_t);
    return vjp_add_size(sizeof(header), tokens, ends) && vjp_add_size(*ends, documents, bytes);
}

/* ---- Reading ----------------------------------------------------------------------------------------- */

/* Ends rise, each document has a token and the last ends where the tokens do. */
static bool has_sound_ends(const token_cache *c) {
    uint64_t last = 0;
    for (uint64_t i = 0; i < c->has.documents; i++) {
        uint64_t end = c->end[i] & ~TOKEN_CACHE_WHOLE;
        if (end <= last || end > c->has.tokens) return false;
        last = end;
    }
    return last == c->has.tokens;
}

static bool map(const char *path, int file, int64_t size, uint64_t key, token_cache *c, char error[TRAIN_ERROR]) {
    header h;
    size_t ends, bytes;
    bool ours = system_read_at(file, &h, sizeof h, 0) == (int64_t)sizeof h &&
                memcmp(h.magic, MAGIC, sizeof MAGIC) == 0 && h.order == ORDER && h.check == check_of(&h);
    if (!ours) return train_fail(error, "%.300s: it is not a cache that this vjp has made", path);
    if (h.has.key != key) return train_fail(error, "%.300s: it was made from other data", path);
    if (!layout_of(&h.has, &ends, &bytes) || (uint64_t)size != bytes)
        return train_fail(error, "%.300s: it has %lld bytes, which are too few or too many for its %llu tokens", path,
                          (long long)size, (unsigned long long)h.has.tokens);
    *c = (token_cache){.has = h.has, .map = system_map(file, bytes), .bytes = bytes};
    if (!c->map) return train_fail(error, "%.300s: it cannot be mapped into memory: %s", path, strerror(errno));
    c->token = (const int32_t *)(const void *)((const char *)c->map + sizeof(header));
    c->end = (const uint64_t *)(const void *)((const char *)c->map + ends);
    if (has_sound_ends(c)) return true;
    token_cache_close(c);
    return train_fail(error, "%.300s: its documents are damaged", path);
}

bool token_cache_open(const char *path, uint64_t key, token_cache *cache, char error[TRAIN_ERROR]) {
    int64_t size;
    *cache = (token_cache){0};
    int file = input_open(path, INT64_MAX, &size, error);
    if (file < 0) return false;
    bool ok = map(path, file, size, key, cache, error);
    system_close(file);
    return ok;
}

void token_cache_close(token_cache *cache) {
    system_unmap(cache->map, cache->bytes);
    *cache = (token_cache){0};
}

/* ---- Writing ----------------------------------------------------------------------------------------- */

struct token_cache_writer {
    char path[CHECKPOINT_PATH], temporary[CHECKPOINT_PATH];
    FILE *stream;
    token_cache_counts has;
    uint64_t *end; /* 8 bytes per document are all that is held in memory */
    size_t room;
};

static bool write_failed(const token_cache_writer *w, char error[TRAIN_ERROR]) {
    return train_fail(error, "%.300s: it cannot be written: %s", w->temporary, strerror(errno));
}

token_cache_writer *token_cache_create(const char *path, uint64_t key, char error[TRAIN_ERROR]) {
    token_cache_writer *w = calloc(1, sizeof *w);
    if (!w) {
        train_fail(error, "there is no memory to write a cache");
        return NULL;
    }
    w->has = (token_cache_counts){.key = key, .content = 14695981039346656037u};
    bool ok = checkpoint_path(w->path, error, "%s", path) && checkpoint_path(w->temporary, error, "%s.tmp", path);
    if (ok) {
        system_remove_file(w->temporary); /* what a killed process left */
        int file = system_create(w->temporary);
        w->stream = file >= 0 ? system_stream_of(file, "wb") : NULL;
        if (!w->stream) {
            ok = write_failed(w, error);
            if (file >= 0) system_close(file);
        }
    }
    const header empty = {.magic = ""};
    if (ok && fwrite(&empty, sizeof empty, 1, w->stream) != 1) ok = write_failed(w, error);
    if (ok) return w;
    token_cache_finish(w, false, 0, error);
    return NULL;
}

bool token_cache_add(token_cache_writer *w, const document *d, char error[TRAIN_ERROR]) {
    if (w->has.documents == w->room) {
        uint64_t *larger = list_grow(w->end, (size_t)w->has.documents, 1, sizeof *larger, &w->room);
        if (!larger) return train_fail(error, "there is no memory for the ends of so many documents");
        w->end = larger;
    }
    if (fwrite(d->tokens.ids, sizeof *d->tokens.ids, d->tokens.count, w->stream) != d->tokens.count)
        return write_failed(w, error);
    w->has.content = hash_tokens(w->has.content, d->tokens.ids, d->tokens.count);
    w->has.tokens += d->tokens.count;
    w->end[w->has.documents++] = w->has.tokens | (d->whole ? TOKEN_CACHE_WHOLE : 0);
    return true;
}

uint64_t token_cache_documents(const token_cache_writer *w) {
    return w->has.documents;
}

/* What follows the tokens, and the header, which is not read before the file has its name. */
static bool complete(token_cache_writer *w, char error[TRAIN_ERROR]) {
    static const int32_t padding = 0;
    size_t documents = (size_t)w->has.documents;
    header h = {.order = ORDER, .has = w->has};
    memcpy(h.magic, MAGIC, sizeof MAGIC);
    h.check = check_of(&h);
    bool ok = (w->has.tokens % 2 == 0 || fwrite(&padding, sizeof padding, 1, w->stream) == 1) &&
              (!documents || fwrite(w->end, sizeof *w->end, documents, w->stream) == documents) &&
              fseek(w->stream, 0, SEEK_SET) == 0 && fwrite(&h, sizeof h, 1, w->stream) == 1 && fflush(w->stream) == 0 &&
              system_sync(system_number_of(w->stream));
    return ok || write_failed(w, error);
}

bool token_cache_finish(token_cache_writer *w, bool keep, uint64_t bad, char error[TRAIN_ERROR]) {
    w->has.bad = bad;
    bool ok = keep && complete(w, error);
    if (w->stream && fclose(w->stream) != 0 && ok) ok = write_failed(w, error);
    if (ok && !system_rename(w->temporary, w->path)) ok = write_failed(w, error);
    if (!ok && w->stream) system_remove_file(w->temporary);
    ok = ok && file_sync_parent(w->path, error);
    free(w->end);
    free(w);
    return ok;
}

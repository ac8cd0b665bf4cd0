/* SPDX-License-Identifier: MIT */
/* Reading text and splitting it into batches. */
#include "train/data/text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/philox.h"
#include "core/system.h"
#include "text/list.h"
#include "train/files/input.h"

enum { MAX_DEPTH = 32, PATH = 4096, VALIDATION = 20 /* the last twentieth */ };

/* All of the text is held in memory. */

/* ---- Files ------------------------------------------------------------------------------------------- */

static bool make_room(text_data *text, int64_t more, const char *path, char error[TRAIN_ERROR]) {
    if ((size_t)more <= text->room - text->count) return true;
    size_t room = text->room * 2 > text->count + (size_t)more ? text->room * 2 : text->count + (size_t)more;
    unsigned char *bytes = realloc(text->bytes, room);
    if (!bytes) return train_fail(error, "%.300s: there is no memory for %zu bytes of text", path, room);
    text->bytes = bytes;
    text->room = room;
    return true;
}

/* Adds a file. In a folder, a file with a zero byte is not text and is left out. */
static bool add_file(const char *path, bool in_folder, text_data *text, char error[TRAIN_ERROR]) {
    int64_t bytes;
    FILE *file = input_stream(path, TEXT_MAX_BYTES - (int64_t)text->count, &bytes, error);
    if (!file) return false;
    size_t begin = text->count;
    bool ok = make_room(text, bytes, path, error);
    if (ok && bytes) text->count += fread(text->bytes + begin, 1, (size_t)bytes, file);
    if (ok && ferror(file)) ok = train_fail(error, "%.300s: it cannot be read: %s", path, strerror(errno));
    fclose(file);
    if (!ok) return false;
    if (in_folder && text->count > begin && memchr(text->bytes + begin, 0, text->count - begin)) {
        text->count = begin;
        text->left_out++;
        return true;
    }
    if ((size_t)text->files == text->files_room) {
        size_t *larger = list_grow(text->ends, (size_t)text->files, 1, sizeof *larger, &text->files_room);
        if (!larger) return train_fail(error, "%.300s: there is no memory for the list of files", path);
        text->ends = larger;
    }
    text->ends[text->files++] = text->count;
    return true;
}

static bool add_folder(const char *path, int depth, text_data *text, char error[TRAIN_ERROR]) {
    if (depth > MAX_DEPTH) return train_fail(error, "%s: folders are nested more than %d deep", path, MAX_DEPTH);
    size_t count;
    char **names = input_names(path, &count, error);
    if (!names) return false;
    bool ok = true;
    for (size_t i = 0; i < count; i++) {
        char inner[PATH];
        system_status about;
        if (ok && snprintf(inner, sizeof inner, "%s/%s", path, names[i]) >= (int)sizeof inner)
            ok = train_fail(error, "%s/%s: the path is too long", path, names[i]);
        /* Links to files are followed, links to folders are not: they could form a cycle. */
        bool link = ok && system_status_of_link(inner, &about) && about.kind == SYSTEM_LINK;
        bool known = ok && system_status_of(inner, &about);
        if (ok && !known && errno != ENOENT && errno != ELOOP) /* not a link to nothing or to itself */
            ok = train_fail(error, "%.300s: it cannot be read: %s", inner, strerror(errno));
        if (known) {
            if (about.kind == SYSTEM_FILE) ok = add_file(inner, true, text, error);
            if (about.kind == SYSTEM_FOLDER && !link) ok = add_folder(inner, depth + 1, text, error);
        }
        free(names[i]);
    }
    free(names);
    return ok;
}

bool text_read(const char *path, text_data *text, char error[TRAIN_ERROR]) {
    *text = (text_data){0};
    system_status about;
    bool ok =
        system_status_of(path, &about) || train_fail(error, "%.300s: it cannot be opened: %s", path, strerror(errno));
    if (ok && about.kind == SYSTEM_FOLDER)
        ok = add_folder(path, 0, text, error);
    else if (ok)
        ok = add_file(path, false, text, error);
    if (ok && text->count == 0)
        ok = train_fail(error, "%.300s: there is no text in it%s", path,
                        text->left_out ? ": every file has zero bytes in it" : "");
    if (!ok) text_free(text);
    text_set_length(text, text->count);
    return ok;
}

void text_set_length(text_data *text, size_t length) {
    text->length = length;
    text->trained = length - length / VALIDATION;
}

void text_free(text_data *text) {
    free(text->bytes);
    free(text->ends);
    token_list_free(&text->tokens);
    *text = (text_data){0};
}

/* ---- Batches ----------------------------------------------------------------------------------------- */

static int32_t token_at(const text_data *text, size_t at) {
    return text->tokens.count ? text->tokens.ids[at] : text->bytes[at];
}

static void fill(void *context, bool validation, uint64_t part, void *input, int32_t *target) {
    const text_data *text = context;
    int32_t *tokens = input;
    uint64_t batch = part / (uint64_t)text->shards, first = part % (uint64_t)text->shards * (uint64_t)text->rows;
    for (int64_t row = 0; row < text->rows; row++) {
        size_t at;
        if (validation) {
            at = text->trained + ((size_t)part * (size_t)text->rows + (size_t)row) * (size_t)text->context;
        } else {
            vjp_philox words = {
                {(uint32_t)batch, (uint32_t)(batch >> 32), (uint32_t)first + (uint32_t)row, 0x74657874u /* "text" */}};
            words = vjp_philox4x32_10(words, (uint32_t)text->seed, (uint32_t)(text->seed >> 32));
            uint64_t wide = (uint64_t)words.word[0] << 32 | words.word[1];
            at = (size_t)(wide % (text->trained - (size_t)text->context));
        }
        for (int64_t i = 0; i < text->context; i++) {
            *tokens++ = token_at(text, at + (size_t)i);
            *target++ = token_at(text, at + (size_t)i + 1);
        }
    }
}

bool text_source(text_data *text, int64_t batch, int64_t shards, int64_t context, uint64_t seed, train_source *source,
                 char error[TRAIN_ERROR]) {
    if (text->trained <= (size_t)context)
        return train_fail(error, "the text has %zu %s to train on; a context of %lld needs at least %lld",
                          text->trained, text->tokens.count ? "tokens" : "bytes", (long long)context,
                          (long long)context + 1);
    text->rows = batch / shards;
    text->shards = shards;
    text->context = context;
    text->seed = seed;
    int64_t kept = (int64_t)(text->length - text->trained);
    *source = (train_source){
        .context = text, .fill = fill, .validation_parts = kept > 0 ? (kept - 1) / context / batch * shards : 0};
    return true;
}

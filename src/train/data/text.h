/* SPDX-License-Identifier: MIT */
/*
 * Text to train on: a file, or all text files of a folder, as bytes, which tokens.h can encode. The last twentieth is
 * kept for validation. Which windows a batch holds depends on the seed and the number of the batch alone.
 */
#ifndef VJP_TRAIN_TEXT_H
#define VJP_TRAIN_TEXT_H

#include <stddef.h>

#include "text/list.h"
#include "train/trainer/trainer.h"

/* What is read at most. */
#define TEXT_MAX_BYTES ((int64_t)1 << 34)

/* All zero is empty, safe to free. */
typedef struct text_data {
    unsigned char *bytes;
    size_t count, room;
    token_list tokens; /* empty: tokens are the bytes */
    size_t length;     /* in tokens */
    size_t trained;    /* tokens before the validation part */
    size_t *ends;      /* [files]: where each file ends */
    int64_t files;
    size_t files_room;
    int64_t left_out; /* files of a folder that are not text: they have zero bytes */
    /* Set by text_source(). */
    int64_t rows, shards, context; /* `rows` of one shard */
    uint64_t seed;
} text_data;

/* False: `error` has a sentence that begins with the path. */
bool text_read(const char *path, text_data *text, char error[TRAIN_ERROR]);
void text_free(text_data *text);

enum { TEXT_TOKENS = 256 }; /* bytes */

/* Sets how many tokens there are, and with it the part for validation. */
void text_set_length(text_data *text, size_t length);

/*
 * Batches of `batch` rows of `context` tokens; each target is the next token. Each part is one of the `shards` of a
 * batch, whose rows are the same for any number of them. False: the text is too short.
 */
bool text_source(text_data *text, int64_t batch, int64_t shards, int64_t context, uint64_t seed, train_source *source,
                 char error[TRAIN_ERROR]);

#endif

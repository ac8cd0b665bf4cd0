/* SPDX-License-Identifier: MIT */
/*
 * Text to train on: a file, or all text files of a folder, as bytes. The last twentieth is kept for validation. Which
 * windows a batch holds depends on the seed and the number of the batch alone.
 */
#ifndef VJP_TRAIN_TEXT_H
#define VJP_TRAIN_TEXT_H

#include <stddef.h>

#include "train/files/checkpoint.h"
#include "train/trainer.h"

/* All zero is empty, safe to free. */
typedef struct text_data {
    unsigned char *bytes;
    size_t count, room;
    size_t trained; /* bytes before the validation part */
    size_t *ends;   /* [files]: where each file ends */
    int64_t files;
    size_t files_room;
    int64_t left_out; /* files of a folder that are not text: they have zero bytes */
    /* Set by text_source(). */
    int64_t batch, context;
    uint64_t seed;
} text_data;

/* False: `error` has a sentence that begins with the path. */
bool text_read(const char *path, text_data *text, char error[TRAIN_ERROR]);
void text_free(text_data *text);

enum { TEXT_TOKENS = 256 }; /* bytes */

/* Whether a model's tokens are bytes; others would be read and written as garbage. False: `error` says why. */
bool text_is_for(const checkpoint *model, int64_t vocabulary, char error[TRAIN_ERROR]);

/* Batches of `batch` rows of `context` bytes; each target is the next byte. False: the text is too short. */
bool text_source(text_data *text, int64_t batch, int64_t context, uint64_t seed, train_source *source,
                 char error[TRAIN_ERROR]);

#endif

/* SPDX-License-Identifier: MIT */
/* The tokenizer of a model: read from a folder, kept with the run, and written into each of its checkpoints. */
#ifndef VJP_TRAIN_TOKENS_H
#define VJP_TRAIN_TOKENS_H

#include "text/tokenizer.h"
#include "train/data/text.h"
#include "train/files/checkpoint.h"

/* All zero has none: tokens are bytes. Safe to free. */
typedef struct model_tokenizer {
    tokenizer *tokens;
    char *json, *config; /* its files as they are; config NULL: there is no tokenizer_config.json */
    int32_t begin, end;  /* the tokens that begin and end a text; -1: none */
} model_tokenizer;

/* That of a folder; `error` begins with its path. */
bool model_tokenizer_read(const char *folder, model_tokenizer *t, char error[TRAIN_ERROR]);

/* That of a checkpoint, or none if it has no file of a tokenizer. False: it has one that vjp does not read. */
bool model_tokenizer_of(const checkpoint *from, model_tokenizer *t, char error[TRAIN_ERROR]);

void model_tokenizer_free(model_tokenizer *t);

/* Whether a model of so many tokens can be used with it; without a tokenizer its tokens must be bytes. */
bool model_tokenizer_fits(const model_tokenizer *t, const checkpoint *model, int64_t vocabulary,
                          char error[TRAIN_ERROR]);

/* Encodes the text, file by file; each ends with the end token. Does nothing where tokens are bytes. */
bool model_tokenizer_encode(const model_tokenizer *t, text_data *text, char error[TRAIN_ERROR]);

#endif

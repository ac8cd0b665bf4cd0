/* SPDX-License-Identifier: MIT */
/*
 * Training a byte-level tokenizer: from the 256 bytes, the pair of neighbouring tokens that is most frequent inside
 * words becomes a new token, of several the one with the smaller numbers, until there are enough. The same text gives
 * the same tokenizer on every machine.
 */
#ifndef VJP_TEXT_TRAIN_H
#define VJP_TEXT_TRAIN_H

#include "files/fail.h"
#include "text/list.h"

/* The names of --pattern. */
#define TRAINING_PATTERNS "gpt2 or llama3"

typedef struct training_options {
    int32_t size;               /* tokens: special ones, 256 bytes, and merges */
    const char *pattern;        /* how a text is split into words: "gpt2" or "llama3" */
    const char *const *special; /* numbered from 0; the first one ends a text */
    int32_t special_count;      /* 1 or more */
} training_options;

/*
 * The text of a tokenizer.json, which the caller must free(), and how many tokens it has: fewer than asked for if no
 * pair is left. Documents end at `ends`, the last one at the end of the text. NULL: `error` says why.
 */
char *tokenizer_train(const char *text, const size_t *ends, size_t documents, const training_options *options,
                      int32_t *size, char error[FILE_ERROR]);

/* The text of a tokenizer_config.json beside it, by which transformers loads it. NULL: there is no memory. */
char *tokenizer_config(const training_options *options);

#endif

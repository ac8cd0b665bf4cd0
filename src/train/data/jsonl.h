/* SPDX-License-Identifier: MIT */
/*
 * A data set of .jsonl files: one file, or all that are directly in a folder, in the order of their names. Each line is
 * a document (document.h). They are encoded once, a line at a time, into a file of tokens (token_cache.h) in the folder
 * CACHE, which any number of processes can use at the same time.
 */
#ifndef VJP_TRAIN_JSONL_H
#define VJP_TRAIN_JSONL_H

#include "train/data/token_cache.h"

/* Whether a path names such a data set: its name ends in .jsonl, or it is a folder with such a name in it. */
bool jsonl_is_set(const char *path);

typedef struct jsonl_options {
    const char *cache; /* the folder of the cache; NULL or "": .vjp-cache beside the data */
    bool skip_bad;     /* lines that cannot be used are left out and counted */
    /* Called for every line with the bytes read and those of all files; NULL: never. False ends the encoding. */
    bool (*progress)(void *context, int64_t done, int64_t all);
    void *progress_context;
} jsonl_options;

typedef struct jsonl_result {
    token_cache tokens;
    int64_t files;
    bool made;                   /* by this call */
    char first_bad[TRAIN_ERROR]; /* of the lines that this call skipped; "": none */
} jsonl_result;

/* Opens the cache, after making it where there is none. False: `error` begins with the path of what is wrong. */
bool jsonl_open(const char *path, const model_tokenizer *t, const jsonl_options *options, jsonl_result *result,
                char error[TRAIN_ERROR]);

#endif

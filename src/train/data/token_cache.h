/* SPDX-License-Identifier: MIT */
/*
 * A file of documents as tokens, so that a data set is encoded once. It is mapped into memory: its size may exceed it.
 *
 * Layout, in the machine's byte order: a header, the tokens (int32, as document.h marks them), and for each document
 * where it ends (uint64; the highest bit: it should stay whole). A file is written under another name and renamed when
 * it is complete and on the disk, so that no file of the final name is ever incomplete. It belongs to one `key`, a hash
 * of what it was made from.
 */
#ifndef VJP_TRAIN_TOKEN_CACHE_H
#define VJP_TRAIN_TOKEN_CACHE_H

#include "train/data/document.h"

#define TOKEN_CACHE_WHOLE ((uint64_t)1 << 63)

/* What a file has been made from, and what it holds. */
typedef struct token_cache_counts {
    uint64_t key;
    uint64_t content; /* a hash of the tokens */
    uint64_t tokens, documents;
    uint64_t bad; /* lines that were skipped */
} token_cache_counts;

/* All zero is closed, safe to close. */
typedef struct token_cache {
    token_cache_counts has;
    const int32_t *token; /* [tokens] */
    const uint64_t *end;  /* [documents] */
    const void *map;
    size_t bytes;
} token_cache;

/* Opens a file. False: no file has this key, or it is not complete; `error` says why. */
bool token_cache_open(const char *path, uint64_t key, token_cache *cache, char error[TRAIN_ERROR]);
void token_cache_close(token_cache *cache);

typedef struct token_cache_writer token_cache_writer;

/* Begins the file that will be renamed to `path`. NULL: `error` says why. */
token_cache_writer *token_cache_create(const char *path, uint64_t key, char error[TRAIN_ERROR]);
bool token_cache_add(token_cache_writer *w, const document *d, char error[TRAIN_ERROR]);

uint64_t token_cache_documents(const token_cache_writer *w); /* added so far */

/* Completes the file, unless `keep` is false; frees the writer in any case. */
bool token_cache_finish(token_cache_writer *w, bool keep, uint64_t bad, char error[TRAIN_ERROR]);

#endif

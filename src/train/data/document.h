/* SPDX-License-Identifier: MIT */
/*
 * One line of a .jsonl file as tokens. A line is an object with one of
 *
 *     {"text": "..."}                                            all of it is trained on
 *     {"prompt": "...", "completion": "..."}                     the completion is
 *     {"messages": [{"role": "user", "content": "..."}, ...]}    what the assistant says is
 *
 * and with other members, which are not read. docs/data.md has the rules.
 */
#ifndef VJP_TRAIN_DOCUMENT_H
#define VJP_TRAIN_DOCUMENT_H

#include "text/chat.h"
#include "train/data/tokens.h"

/* A token with marks, as a token_list and the cache hold it. */
enum {
    DOCUMENT_TOKEN = 0x1fffffff,  /* its number */
    DOCUMENT_BEGINS = 0x20000000, /* it is the first of its document */
    DOCUMENT_GIVEN = 0x40000000   /* it is not trained on: part of a question */
};

typedef struct document {
    token_list tokens;
    bool whole; /* an answer: it should not be separated from its question */
} document;

static inline void document_free(document *d) {
    token_list_free(&d->tokens);
}

/* Replaces what `to` holds by the document of a line. False: `error` says what is wrong with the line. */
bool document_encode(const model_tokenizer *t, const char *line, size_t length, document *to, char error[TRAIN_ERROR]);

#endif

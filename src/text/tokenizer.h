/* SPDX-License-Identifier: MIT */
/*
 * Tokenizers: a tokenizer.json of Hugging Face's `tokenizers` is read and applied, with equal tokens;
 * docs/tokenizers.md lists what is supported. What a file asks for and is not supported is refused by name.
 *
 * A tokenizer is used by one thread at a time: encoding fills its cache. Two of the same file share nothing.
 */
#ifndef VJP_TEXT_TOKENIZER_H
#define VJP_TEXT_TOKENIZER_H

#include "files/fail.h"
#include "text/list.h"

typedef struct tokenizer tokenizer;

/* The largest tokenizer.json, in bytes; those of the largest vocabularies have about 30 MB. */
enum { TOKENIZER_MAX_BYTES = 256 * 1024 * 1024 };

/* Reads a tokenizer.json, or the one in a folder. NULL: `error` has a sentence that begins with the path. */
tokenizer *tokenizer_read(const char *path, char error[FILE_ERROR]);

/* The same from memory. */
tokenizer *tokenizer_parse(const char *json, size_t length, char error[FILE_ERROR]);

void tokenizer_free(tokenizer *t);

/* The largest number of a token + 1. */
int32_t tokenizer_size(const tokenizer *t);

/* The text of a token as the file has it, which ends with a zero; NULL: there is no such token. */
const char *tokenizer_token(const tokenizer *t, int32_t id);

/* The number of a token; -1: there is none of that text. */
int32_t tokenizer_find(const tokenizer *t, const char *text);

/* Whether it is marked as special in the file: control tokens such as <|endoftext|>, which are not text. */
bool tokenizer_is_special(const tokenizer *t, int32_t id);

/*
 * Adds the tokens of a text. Bytes that are not UTF-8 are read as U+FFFD (see utf8.h). With `around`, the tokens that
 * the file puts before and behind each text (<s>, <|begin_of_text|>) are added, too. False: `error` says why, and `to`
 * is as it was.
 */
bool tokenizer_encode(tokenizer *t, const char *text, size_t length, bool around, token_list *to,
                      char error[FILE_ERROR]);

/*
 * Adds the text of tokens; `special` includes special ones. Numbers that are no token are left out. Byte tokens may
 * make text that is not UTF-8. False: there is no memory, and `to` is as it was.
 */
bool tokenizer_decode(const tokenizer *t, const int32_t *ids, size_t count, bool special, byte_list *to,
                      char error[FILE_ERROR]);

#endif

/* SPDX-License-Identifier: MIT */
/* Tokens by number and by text: an array, and a hash table of its numbers. */
#ifndef VJP_TEXT_VOCABULARY_H
#define VJP_TEXT_VOCABULARY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The largest number of a token. */
enum { VOCABULARY_MAX = 1 << 24 };

typedef struct token_text {
    const char *text; /* NULL: no token has this number */
    uint32_t length;
} token_text;

/* All zero is empty, safe to free. The texts belong to the caller. */
typedef struct vocabulary {
    token_text *tokens; /* [size] */
    int32_t size;       /* the largest number + 1 */
    int32_t *slots;
    size_t slot_count; /* a power of 2, or 0 */
} vocabulary;

/* Room for tokens 0 .. size-1. False: there is no memory. */
bool vocabulary_create(vocabulary *v, int32_t size);
void vocabulary_free(vocabulary *v);

/* Sets an unused number to a text. False: another token has the text. */
bool vocabulary_set(vocabulary *v, int32_t id, const char *text, size_t length);

/* -1: none. */
int32_t vocabulary_find(const vocabulary *v, const char *text, size_t length);

/* A hash of bytes: fast and well mixed, not safe against chosen keys. */
uint64_t text_hash(const char *text, size_t length);

#endif

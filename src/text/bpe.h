/* SPDX-License-Identifier: MIT */
/*
 * Byte-pair encoding of one word: it begins as its characters, or as its bytes; then the pair of neighbours with the
 * lowest rank is merged, the leftmost of several, until no pair has a rank.
 *
 *     word                     how the next pair is found
 *     seen before, short       not at all: the cache has its tokens
 *     up to BPE_SHORT symbols  every pair is looked at: n * n steps, but few and without branches
 *     longer                   a heap of pairs: n * log n steps
 */
#ifndef VJP_TEXT_BPE_H
#define VJP_TEXT_BPE_H

#include "files/fail.h"
#include "text/list.h"
#include "text/vocabulary.h"

/* Measured per byte, on letters without the cache: at 60 symbols 74 ns by the scan and 93 by the heap, at 135 about 100
 * by both. */
enum { BPE_SHORT = 96 };

typedef struct bpe_merge {
    int32_t left, right; /* left -1: an empty slot */
    uint32_t rank;
    int32_t product;
} bpe_merge;

typedef struct bpe_cache bpe_cache;

/* All zero is empty, safe to free. One thread at a time may use it: encoding fills the cache. */
typedef struct bpe {
    vocabulary vocabulary; /* of a byte-level model: its texts in bytes, not in the characters that stand for them */
    bpe_merge *merges;     /* a hash table */
    size_t merge_slots;    /* a power of 2, or 0 */
    int32_t first[256];    /* the token of each byte, or of each ASCII character; -1: none */
    int32_t fallback[256]; /* of a model with byte fallback: the tokens <0x00> to <0xFF>; -1: none */
    int32_t unknown;       /* for characters that have no token; -1: they are left out */
    bool byte_level;
    bool byte_fallback;
    bool fuse_unknown; /* several unknown characters in a row are one token */
    bool whole_words;  /* a word that is a token is taken whole, whatever the merges would make of it */
    bpe_cache *cache;
    void *scratch; /* of one word */
    size_t scratch_room;
} bpe;

/* Room for `count` merges. False: there is no memory. */
bool bpe_reserve_merges(bpe *b, size_t count);

/* The last one with the same pair counts. */
void bpe_set_merge(bpe *b, int32_t left, int32_t right, uint32_t rank, int32_t product);

/* Sets what follows from the vocabulary; call it when that is complete. */
void bpe_finish(bpe *b);

/* Adds the tokens of a word: of valid UTF-8, or for a byte-level model of any bytes. */
bool bpe_encode(bpe *b, const char *word, size_t length, token_list *to, char error[FILE_ERROR]);

void bpe_free(bpe *b);

#endif

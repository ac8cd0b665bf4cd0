/* SPDX-License-Identifier: MIT */
/*
 * The parts of a tokenizer, in the order in which a text passes them:
 *
 *     added.c      added tokens are found in the text; what is between them is
 *     normalize.c  normalized, and searched for the added tokens that are defined on normalized text,
 *     split.c      then split into words, one splitter after another,
 *     bpe.c        whose tokens are found.
 *     decode.c     is the way back.
 */
#ifndef VJP_TEXT_PARTS_H
#define VJP_TEXT_PARTS_H

#include "text/bpe.h"
#include "text/pattern.h"
#include "text/tokenizer.h"

/* ---- What a file describes --------------------------------------------------------------------------- */

/* A text or a regular expression to look for: one of the two is set. */
typedef struct search {
    const char *text;
    size_t length;
    pattern *expression;
} search;

typedef struct normalizer {
    enum { NORMALIZER_NFC, NORMALIZER_PREPEND, NORMALIZER_REPLACE } kind;
    search what;         /* of replace */
    const char *content; /* what is put before the text, or in place of what is found */
} normalizer;

typedef enum split_behavior {
    SPLIT_REMOVED,
    SPLIT_ISOLATED,
    SPLIT_MERGED_WITH_PREVIOUS,
    SPLIT_MERGED_WITH_NEXT,
    SPLIT_CONTIGUOUS
} split_behavior;

typedef struct splitter {
    enum { SPLITTER_SEARCH, SPLITTER_METASPACE, SPLITTER_BYTES } kind;
    search what; /* of search, and of bytes where it uses its own expression; length 0 and no expression: no split */
    split_behavior behavior;
    bool invert; /* splits at what is not found */
    enum { PREPEND_NEVER, PREPEND_FIRST, PREPEND_ALWAYS } prepend;
    const char *replacement; /* of metaspace: in place of a space, and before the text */
    byte_list scratch;       /* the changed text, while its words are encoded */
} splitter;

typedef struct decoder {
    enum { DECODER_BYTES, DECODER_REPLACE, DECODER_FALLBACK, DECODER_FUSE, DECODER_STRIP, DECODER_METASPACE } kind;
    search what;         /* of replace; of strip and metaspace, a character */
    const char *content; /* of replace */
    int64_t start, stop; /* of strip: at most so many */
    bool prepended;      /* of metaspace: the first token loses its replacement characters */
} decoder;

typedef struct added_token {
    int32_t id;
    const char *text;
    bool single_word, left_strip, right_strip, normalized, special;
} added_token;

/* Texts of added tokens as a tree of bytes: the children of a node are a chain of siblings. */
typedef struct added_node {
    int32_t child, sibling; /* 0: none */
    int32_t token;          /* index of the added token that ends here; -1: none */
    unsigned char byte;
} added_node;

typedef struct added_tree {
    added_node *nodes; /* nodes[0] is the root */
    size_t count, room;
    bool begins[256]; /* whether a token begins with this byte */
} added_tree;

enum { TOKENIZER_MAX_STEPS = 32 }; /* normalizers, splitters and decoders of one file */

struct tokenizer {
    char *texts;      /* of the file; the texts of tokens point into it */
    char *byte_texts; /* of a byte-level model: the bytes of its tokens */
    bpe model;
    vocabulary names; /* model and added tokens; their texts end with a zero */
    bool *special;    /* [names.size] */
    added_token *added;
    size_t added_count;
    added_tree raw, normalized; /* added tokens in text before and after normalizing */
    pattern *word;              /* one character of a word, for single_word; NULL: not needed */
    normalizer normalizers[TOKENIZER_MAX_STEPS];
    int normalizer_count;
    splitter splitters[TOKENIZER_MAX_STEPS];
    int splitter_count;
    decoder decoders[TOKENIZER_MAX_STEPS];
    int decoder_count;
    bool decodes;              /* false: the file has no decoder, and tokens are joined by spaces */
    token_list before, behind; /* around each text */
    const char *boundary;      /* long words may be divided before this character; NULL: not; see split.c */
    byte_list repaired, normal[2];
};

/* ---- What the parts do ------------------------------------------------------------------------------- */

typedef struct encoder {
    tokenizer *t;
    token_list *to;
    char *error;
} encoder;

static inline bool no_memory(char *error) {
    return file_fail(error, "there is no memory for a text");
}

/* The first place at or after `from` where the search finds something. */
pattern_result search_find(const search *s, const char *text, size_t length, size_t from, size_t *begin, size_t *end);
bool search_failed(char *error);

/* Adds a token's text to a tree. False: there is no memory. */
bool added_tree_add(added_tree *tree, const char *text, size_t length, int32_t token);

/* The tokens of a text. */
bool added_encode(encoder *e, const char *text, size_t length);

/* The normalized text, in a buffer of the tokenizer or in place. */
bool normalize(tokenizer *t, const char **text, size_t *length, char *error);

/* The tokens of a normalized text by splitter `step` and those behind it; `first`: the text begins there. */
bool split_encode(encoder *e, int step, const char *text, size_t length, bool first);

/* Sets `boundary` of a complete tokenizer. */
void split_find_boundary(tokenizer *t);

#endif

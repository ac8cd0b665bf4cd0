/* SPDX-License-Identifier: MIT */
/*
 * Documents packed into rows of `context` tokens, and batches of such rows.
 *
 * Documents follow one another in the order of the data. One with an answer goes into the next row if it does not fit
 * into the rest of this one, and is split only if it is longer than a row; a text is split wherever a row ends. What
 * remains of a row is filled with tokens that are not trained on. Each token is to see the tokens of its own document
 * alone: `first` is where that begins. Without packing every row has one document, or a part of one.
 *
 * Every twentieth row is for validation. The others are trained on in an order that the seed decides: each epoch is a
 * random permutation of them, of which any element can be computed by itself, so that a run can be resumed anywhere.
 */
#ifndef VJP_TRAIN_PACKED_H
#define VJP_TRAIN_PACKED_H

#include "train/data/token_cache.h"
#include "train/trainer/trainer.h"

/* Tokens [begin, end); the last of each document in it is predicted only. */
typedef struct packed_row {
    uint64_t begin;
    uint32_t length; /* end - begin */
} packed_row;

/* All zero is empty, safe to free. */
typedef struct packed_data {
    const token_cache *tokens;
    packed_row *row; /* [count] */
    int64_t count, trained;
    size_t room;
    int64_t context;
    bool masks;       /* batches have `first` */
    int64_t used;     /* places of all rows that hold a token */
    int64_t split;    /* documents with an answer that are longer than a row */
    int64_t unusable; /* parts of them without a token to train on, which are left out */
    /* Set by packed_source(). */
    int64_t rows, shards; /* `rows` of one shard */
    uint64_t seed;
} packed_data;

/* Plans the rows; the cache must outlive them. False: `error` says why. */
bool packed_plan(packed_data *packed, const token_cache *tokens, int64_t context, bool pack, char error[TRAIN_ERROR]);
void packed_free(packed_data *packed);

/*
 * Writes a row: its tokens, the tokens that they predict (or the ignored index), and where the document of each begins
 * (NULL: not wanted), `context` numbers each.
 */
void packed_fill_row(const packed_data *packed, int64_t row, int32_t *input, int32_t *target, int32_t *first);

/*
 * Batches of `batch` rows. Each part is one of the `shards` of a batch, whose rows are the same for any number of them.
 * Where documents are packed, a part's targets are followed by the `first` of each token.
 */
void packed_source(packed_data *packed, int64_t batch, int64_t shards, uint64_t seed, train_source *source);

/* Element `index` of permutation number `epoch` of [0, count). */
uint64_t packed_permute(uint64_t index, uint64_t count, uint64_t seed, uint64_t epoch);

#endif

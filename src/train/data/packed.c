/* SPDX-License-Identifier: MIT */
/* Rows of documents, their order, and batches; see packed.h. */
#include "train/data/packed.h"

#include <stdlib.h>
#include <string.h>

#include "core/philox.h"

enum { VALIDATION = 20 /* every twentieth row */ };

/* ---- Rows -------------------------------------------------------------------------------------------- */

typedef struct planning {
    packed_data *packed;
    packed_row row; /* that is being filled */
    int64_t used;   /* places of it */
} planning;

/* Ends the row, if there is anything in it. */
static bool end_row(planning *p, char error[TRAIN_ERROR]) {
    packed_data *d = p->packed;
    if (!p->used) return true;
    if ((size_t)d->count == d->room) {
        packed_row *larger = list_grow(d->row, (size_t)d->count, 1, sizeof *larger, &d->room);
        if (!larger) return train_fail(error, "there is no memory for a list of %lld rows", (long long)d->count);
        d->row = larger;
    }
    d->row[d->count++] = p->row;
    d->used += p->used;
    p->used = 0;
    return true;
}

/* Adds tokens [begin, begin + places] of a document: `places` of them, and the one that the last place predicts. */
static void add_part(planning *p, uint64_t begin, int64_t places) {
    if (!p->used) p->row = (packed_row){.begin = begin};
    p->row.length = (uint32_t)(begin + (uint64_t)places + 1 - p->row.begin);
    p->used += places;
}

static bool has_target(const token_cache *c, uint64_t begin, int64_t places) {
    for (int64_t i = 1; i <= places; i++)
        if (!(c->token[begin + (uint64_t)i] & DOCUMENT_GIVEN)) return true;
    return false;
}

/* A document with an answer that is longer than a row: rows of its own. */
static bool add_long(planning *p, uint64_t begin, int64_t places, char error[TRAIN_ERROR]) {
    packed_data *d = p->packed;
    d->split++;
    for (int64_t part; places > 0; places -= part, begin += (uint64_t)part) {
        if (!end_row(p, error)) return false;
        part = vjp_min(d->context, places);
        if (has_target(d->tokens, begin, part))
            add_part(p, begin, part);
        else
            d->unusable++;
    }
    return true;
}

static bool add_document(planning *p, uint64_t begin, uint64_t end, bool whole, bool pack, char error[TRAIN_ERROR]) {
    packed_data *d = p->packed;
    int64_t places = (int64_t)(end - begin) - 1, rest = d->context - p->used;
    if (whole && places > d->context) return add_long(p, begin, places, error);
    if ((!pack || rest == 0 || (whole && places > rest)) && !end_row(p, error)) return false;
    for (int64_t part; places > 0; places -= part, begin += (uint64_t)part) {
        if (p->used == d->context && !end_row(p, error)) return false;
        part = vjp_min(d->context - p->used, places);
        add_part(p, begin, part);
    }
    return true;
}

bool packed_plan(packed_data *packed, const token_cache *tokens, int64_t context, bool pack, char error[TRAIN_ERROR]) {
    *packed = (packed_data){.tokens = tokens, .context = context, .masks = pack};
    planning p = {.packed = packed};
    bool ok = context < INT32_MAX / 4 || train_fail(error, "a context of %lld is too long", (long long)context);
    uint64_t begin = 0;
    for (uint64_t i = 0; i < tokens->has.documents && ok; i++) {
        uint64_t end = tokens->end[i] & ~TOKEN_CACHE_WHOLE;
        ok = add_document(&p, begin, end, tokens->end[i] & TOKEN_CACHE_WHOLE, pack, error);
        begin = end;
    }
    ok = ok && end_row(&p, error);
    packed->trained = packed->count - packed->count / VALIDATION;
    if (ok && !packed->count) ok = train_fail(error, "the data have no token to predict");
    if (!ok) packed_free(packed);
    return ok;
}

void packed_free(packed_data *packed) {
    free(packed->row);
    *packed = (packed_data){0};
}

/* ---- The order --------------------------------------------------------------------------------------- */

/*
 * A Feistel network over an even number of bits permutes a power of four that is not less than `count`; where its
 * result is outside, it is applied again, which happens less than three times on average.
 */
uint64_t packed_permute(uint64_t index, uint64_t count, uint64_t seed, uint64_t epoch) {
    enum { ROUNDS = 6 };
    int half = 1;
    while (half < 32 && (uint64_t)1 << 2 * half < count)
        half++;
    const uint32_t mask = half < 32 ? ((uint32_t)1 << half) - 1 : UINT32_MAX;
    do {
        uint32_t left = (uint32_t)(index >> half) & mask, right = (uint32_t)index & mask;
        for (uint32_t round = 0; round < ROUNDS; round++) {
            vjp_philox words = {{right, round, (uint32_t)epoch, (uint32_t)(epoch >> 32) ^ 0x726f7773u /* "rows" */}};
            words = vjp_philox4x32_10(words, (uint32_t)seed, (uint32_t)(seed >> 32));
            uint32_t mixed = (left ^ words.word[0]) & mask;
            left = right;
            right = mixed;
        }
        index = (uint64_t)left << half | right;
    } while (index >= count);
    return index;
}

/* ---- Batches ----------------------------------------------------------------------------------------- */

/* The row of a place in the run, or of a place among those for validation: every VALIDATION-th one. */
static int64_t row_of(const packed_data *d, bool validation, uint64_t place) {
    if (validation) return (int64_t)(place % (uint64_t)(d->count - d->trained)) * VALIDATION + VALIDATION - 1;
    uint64_t count = (uint64_t)d->trained;
    uint64_t chosen = packed_permute(place % count, count, d->seed, place / count);
    return (int64_t)(chosen + chosen / (VALIDATION - 1));
}

void packed_fill_row(const packed_data *d, int64_t index, int32_t *input, int32_t *target, int32_t *first) {
    const packed_row *row = &d->row[index];
    const vjp_cross_entropy_attributes defaults = VJP_CROSS_ENTROPY_DEFAULTS;
    const int32_t *token = d->tokens->token + row->begin, ignored = (int32_t)defaults.ignore_index;
    int64_t place = 0, begin = 0;
    for (uint32_t i = 0; i + 1 < row->length && place < d->context; i++) {
        int32_t next = token[i + 1];
        if (next & DOCUMENT_BEGINS) {
            begin = place; /* nothing follows the last token of a document */
            continue;
        }
        input[place] = token[i] & DOCUMENT_TOKEN;
        target[place] = next & DOCUMENT_GIVEN ? ignored : next & DOCUMENT_TOKEN;
        if (first) first[place] = (int32_t)begin;
        place++;
    }
    for (; place < d->context; place++) {
        input[place] = 0;
        target[place] = ignored;
        if (first) first[place] = (int32_t)place;
    }
}

static void fill(void *context, bool validation, uint64_t part, void *input, int32_t *target) {
    const packed_data *d = context;
    int64_t batch = d->rows * d->shards;
    uint64_t begin = part / (uint64_t)d->shards * (uint64_t)batch + part % (uint64_t)d->shards * (uint64_t)d->rows;
    int32_t *first = d->masks ? target + d->rows * d->context : NULL;
    for (int64_t i = 0; i < d->rows; i++) {
        int64_t at = i * d->context;
        packed_fill_row(d, row_of(d, validation, begin + (uint64_t)i), (int32_t *)input + at, target + at,
                        first ? first + at : NULL);
    }
}

void packed_source(packed_data *packed, int64_t batch, int64_t shards, uint64_t seed, train_source *source) {
    packed->rows = batch / shards;
    packed->shards = shards;
    packed->seed = seed;
    *source = (train_source){
        .context = packed, .fill = fill, .validation_parts = (packed->count - packed->trained) / batch * shards};
}

/* SPDX-License-Identifier: MIT */
/* Tokens by number and by text; see vocabulary.h. */
#include "text/vocabulary.h"

#include <stdlib.h>
#include <string.h>

static uint64_t mix(uint64_t a, uint64_t b) {
    a = (a ^ b) * 0x9e3779b97f4a7c15u;
    return a ^ a >> 32;
}

uint64_t text_hash(const char *text, size_t length) {
    uint64_t hash = length, word;
    for (; length >= 8; text += 8, length -= 8) {
        memcpy(&word, text, 8);
        hash = mix(hash, word);
    }
    if (length) {
        word = 0;
        memcpy(&word, text, length);
        hash = mix(hash, word);
    }
    return mix(hash, 0);
}

bool vocabulary_create(vocabulary *v, int32_t size) {
    *v = (vocabulary){.size = size, .slot_count = 16};
    while (v->slot_count < 2 * (size_t)size)
        v->slot_count *= 2;
    v->tokens = calloc((size_t)size + 1, sizeof *v->tokens);
    v->slots = malloc(v->slot_count * sizeof *v->slots);
    if (!v->tokens || !v->slots) {
        vocabulary_free(v);
        return false;
    }
    memset(v->slots, 0xff, v->slot_count * sizeof *v->slots); /* -1: empty */
    return true;
}

void vocabulary_free(vocabulary *v) {
    free(v->tokens);
    free(v->slots);
    *v = (vocabulary){0};
}

/* The slot that has this text, or the empty one where it belongs. */
static size_t slot_of(const vocabulary *v, const char *text, size_t length) {
    size_t slot = text_hash(text, length) & (v->slot_count - 1);
    for (; v->slots[slot] >= 0; slot = (slot + 1) & (v->slot_count - 1)) {
        const token_text *t = &v->tokens[v->slots[slot]];
        if (t->length == length && memcmp(t->text, text, length) == 0) break;
    }
    return slot;
}

bool vocabulary_set(vocabulary *v, int32_t id, const char *text, size_t length) {
    size_t slot = slot_of(v, text, length);
    if (v->slots[slot] >= 0) return false;
    v->slots[slot] = id;
    v->tokens[id] = (token_text){text, (uint32_t)length};
    return true;
}

int32_t vocabulary_find(const vocabulary *v, const char *text, size_t length) {
    return v->slot_count ? v->slots[slot_of(v, text, length)] : -1;
}

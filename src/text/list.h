/* SPDX-License-Identifier: MIT */
/* Lists of bytes and of tokens that grow. All zero is an empty list, safe to free. False: there is no memory, and the
 * list is as it was. */
#ifndef VJP_TEXT_LIST_H
#define VJP_TEXT_LIST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"

typedef struct byte_list {
    char *bytes;
    size_t count, room;
} byte_list;

typedef struct token_list {
    int32_t *ids;
    size_t count, room;
} token_list;

/* The memory of a list of `count` elements with room for `more`; NULL: there is none, and `memory` is still valid. */
static inline void *list_grow(void *memory, size_t count, size_t more, size_t size, size_t *room) {
    size_t needed, bytes;
    if (!vjp_add_size(count, more, &needed)) return NULL;
    if (needed < 2 * *room) needed = 2 * *room;
    if (needed < 64) needed = 64;
    if (!vjp_mul_size(needed, size, &bytes)) return NULL;
    void *larger = realloc(memory, bytes);
    if (larger) *room = needed;
    return larger;
}

static inline bool byte_list_reserve(byte_list *list, size_t more) {
    if (more <= list->room - list->count) return true;
    char *larger = list_grow(list->bytes, list->count, more, 1, &list->room);
    if (larger) list->bytes = larger;
    return larger != NULL;
}

static inline bool byte_list_add(byte_list *list, const char *bytes, size_t count) {
    if (!byte_list_reserve(list, count)) return false;
    if (count) memcpy(list->bytes + list->count, bytes, count);
    list->count += count;
    return true;
}

static inline void byte_list_free(byte_list *list) {
    free(list->bytes);
    *list = (byte_list){0};
}

static inline bool token_list_reserve(token_list *list, size_t more) {
    if (more <= list->room - list->count) return true;
    int32_t *larger = list_grow(list->ids, list->count, more, sizeof *larger, &list->room);
    if (larger) list->ids = larger;
    return larger != NULL;
}

static inline bool token_list_add(token_list *list, const int32_t *ids, size_t count) {
    if (!token_list_reserve(list, count)) return false;
    if (count) memcpy(list->ids + list->count, ids, count * sizeof *ids);
    list->count += count;
    return true;
}

static inline void token_list_free(token_list *list) {
    free(list->ids);
    *list = (token_list){0};
}

#endif

/* SPDX-License-Identifier: MIT */
/* The table is an array of a power of two of entries with linear probing, at most half full. */
#include "graph/names.h"

#include <stdlib.h>
#include <string.h>

struct names_entry {
    const char *name; /* NULL: free */
    int32_t number;
};

uint32_t names_hash(const char *name) {
    uint32_t hash = 2166136261u;
    for (; *name; name++)
        hash = (hash ^ (unsigned char)*name) * 16777619u;
    return hash;
}

/* The entry of a name, or the free one where it belongs. */
static struct names_entry *entry_of(const graph_names *names, const char *name) {
    size_t at = names_hash(name) & (names->room - 1);
    while (names->entry[at].name && strcmp(names->entry[at].name, name) != 0)
        at = (at + 1) & (names->room - 1);
    return &names->entry[at];
}

int32_t *names_find(const graph_names *names, const char *name) {
    struct names_entry *entry = names->used ? entry_of(names, name) : NULL;
    return entry && entry->name ? &entry->number : NULL;
}

static bool grow(graph_names *names) {
    graph_names larger = {.room = names->room ? 2 * names->room : 64, .used = names->used};
    larger.entry = calloc(larger.room, sizeof *larger.entry);
    if (!larger.entry) return false;
    for (size_t i = 0; i < names->room; i++)
        if (names->entry[i].name) *entry_of(&larger, names->entry[i].name) = names->entry[i];
    free(names->entry);
    *names = larger;
    return true;
}

bool names_add(graph_names *names, const char *name, int32_t number) {
    if (2 * names->used >= names->room && !grow(names)) return false;
    struct names_entry *entry = entry_of(names, name);
    if (entry->name) return true;
    *entry = (struct names_entry){name, number};
    names->used++;
    return true;
}

void names_free(graph_names *names) {
    free(names->entry);
    *names = (graph_names){0};
}

/* SPDX-License-Identifier: MIT */
/* Names in a hash table, each with a number, so that building a graph of n nodes takes time proportional to n. */
#ifndef VJP_GRAPH_NAMES_H
#define VJP_GRAPH_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* All zero is an empty table. */
typedef struct graph_names {
    struct names_entry *entry;
    size_t room, used;
} graph_names;

/* FNV-1a. Also the random stream of a parameter's first values, so it must never change. */
uint32_t names_hash(const char *name);

/* The number of a name; NULL when the table does not have it. Valid until the next names_add(). */
int32_t *names_find(const graph_names *names, const char *name);

/* Adds a name, which must outlive the table; one that is there already keeps its number. False: out of memory. */
bool names_add(graph_names *names, const char *name, int32_t number);

void names_free(graph_names *names);

#endif

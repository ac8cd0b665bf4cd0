/* SPDX-License-Identifier: MIT */
/* Members of the objects in a tokenizer.json, with a sentence for each that is not as it must be. */
#ifndef VJP_TEXT_READ_MEMBERS_H
#define VJP_TEXT_READ_MEMBERS_H

#include "files/json.h"
#include "text/parts.h"

/* The sentences begin with `where`: "its decoder". */
typedef struct member_reader {
    const json_value *object;
    const char *where;
    char *error;
} member_reader;

/* Whether it is an object that has no other members than these; the list ends with NULL. */
bool members_only(const member_reader *r, const char *const *names);

bool member_text(const member_reader *r, const char *name, const char **text);
bool member_boolean(const member_reader *r, const char *name, bool fallback, bool *value);
bool member_integer(const member_reader *r, const char *name, int64_t min, int64_t max, int64_t *value);

/* A list. */
bool member_list(const member_reader *r, const char *name, const json_value **list);

/* {"String": "..."} or {"Regex": "..."}. */
bool member_search(const member_reader *r, const char *name, search *what);

/* The text of "type". */
bool member_type(const member_reader *r, const char **type);

bool unknown_type(const member_reader *r, const char *type, const char *known);

/* The normalizers, splitters, decoders and the tokens around a text: read_steps.c. */
bool read_normalizer(tokenizer *t, const json_value *value, char *error);
bool read_splitter(tokenizer *t, const json_value *value, char *error);
bool read_decoder(tokenizer *t, const json_value *value, char *error);
bool read_around(tokenizer *t, const json_value *value, char *error);

#endif

/* SPDX-License-Identifier: MIT */
/*
 * JSON: a strict reader that makes a tree of a text, and a writer that makes a text.
 *
 * Reading accepts RFC 8259 and nothing more: no comments, no NaN, no second key of the same name, nothing that is
 * not UTF-8, no string with a zero character (texts here end with one). A text that breaks a rule is refused with a
 * sentence that names the byte, and holds no memory afterwards.
 */
#ifndef VJP_FILES_JSON_H
#define VJP_FILES_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "files/fail.h"

/* ---- Reading ----------------------------------------------------------------------------------------- */

enum { JSON_DEPTH = 64 };                    /* the largest number of lists and objects inside one another */
enum { JSON_MAX_BYTES = 16 * 1024 * 1024 };  /* the default limit of a text, in bytes */
enum { JSON_MAX_VALUES = 16 * 1024 * 1024 }; /* the largest number of values; the tree has 40 bytes for each */

typedef enum json_type { JSON_NULL, JSON_BOOLEAN, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } json_type;

typedef struct json_value {
    json_type type;
    bool boolean;
    bool exact; /* a number without fraction and exponent, within int64 and not -0: `integer` has it */
    union {     /* look at the type first: a value has only what its own type has */
        struct {
            int64_t integer;
            double number;
        };
        const char *text; /* of a string */
        struct {
            const struct json_value *first; /* of a list or an object: its elements, in the order of the text */
            size_t count;                   /* of them */
        };
    };
    const char *key; /* of an object's member; NULL elsewhere */
    const struct json_value *next;
} json_value;

/* All zero is an empty document, safe to free. */
typedef struct json_document {
    const json_value *root;
    json_value *values; /* memory of the tree */
    char *text;         /* the strings of the tree point into it */
} json_document;

/* The length of the UTF-8 character that a text begins with; 0: it begins with none. */
size_t json_character(const char *text, size_t length);

bool json_parse(const char *text, size_t length, json_document *document, char error[FILE_ERROR]);

/* The same with the caller's limit in place of JSON_MAX_BYTES. */
bool json_parse_up_to(size_t max_bytes, const char *text, size_t length, json_document *document,
                      char error[FILE_ERROR]);

/* The same from a file; the sentence begins with the path. */
bool json_read(const char *path, json_document *document, char error[FILE_ERROR]);
bool json_read_up_to(size_t max_bytes, const char *path, json_document *document, char error[FILE_ERROR]);

void json_free(json_document *document);

/* Frees the tree and returns the memory of its strings, which the caller must free(). */
char *json_take_texts(json_document *document);

/* The member of that name. NULL if there is none, or if `object` is NULL or no object. */
const json_value *json_member(const json_value *object, const char *key);

/* Whether there is such a member and it is not null. */
bool json_has(const json_value *object, const char *key);

/* A value as a sentence would show it: "gelu", true, 1e-5, [...], {...}. */
enum { JSON_SHOWN = 64 };
const char *json_show(const json_value *value, char text[JSON_SHOWN]);

/* ---- Writing ----------------------------------------------------------------------------------------- */

/*
 * All zero is a writer of one line; set `indented` for one member per line. Keys are NULL inside a list and at the top.
 * Reals are written so that they read back as the same double, and as a real (1.0, not 1); NaN and the infinities,
 * which JSON has no numbers for, as the strings "NaN", "Infinity" and "-Infinity".
 */
typedef struct json_writer {
    bool indented;
    bool compact; /* no blanks and no newline at the end */
    bool failed;  /* memory ran out */
    bool comma;   /* the next element needs one before it */
    int depth;
    char *text;
    size_t length, room;
} json_writer;

void json_put_object(json_writer *writer, const char *key);
void json_put_object_end(json_writer *writer);
void json_put_array(json_writer *writer, const char *key);
void json_put_array_end(json_writer *writer);
void json_put_text(json_writer *writer, const char *key, const char *value); /* NULL: null */
void json_put_integer(json_writer *writer, const char *key, int64_t value);
void json_put_real(json_writer *writer, const char *key, double value);
void json_put_boolean(json_writer *writer, const char *key, bool value);
void json_put_null(json_writer *writer, const char *key);

/* The text, which ends with a newline unless it is compact, and which the caller must free(); the writer is empty
 * again. NULL: out of memory.
 */
char *json_take(json_writer *writer);

#endif

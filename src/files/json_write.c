/* SPDX-License-Identifier: MIT */
/* Writing JSON into a text that grows; json.c reads it. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/real.h"
#include "files/json.h"

/* ---- The text ---------------------------------------------------------------------------------------- */

static void add(json_writer *w, const char *text, size_t length) {
    if (w->failed) return;
    if (w->room - w->length <= length) {
        size_t room = (w->length + length + 1) * 2;
        char *larger = realloc(w->text, room);
        if (!larger) {
            w->failed = true;
            return;
        }
        w->text = larger;
        w->room = room;
    }
    memcpy(w->text + w->length, text, length);
    w->length += length;
    w->text[w->length] = 0;
}

static void add_text(json_writer *w, const char *text) {
    add(w, text, strlen(text));
}

static void add_string(json_writer *w, const char *text) {
    add_text(w, "\"");
    for (const char *c = text; *c; c++) {
        char escaped[8];
        if (*c == '"' || *c == '\\')
            snprintf(escaped, sizeof escaped, "\\%c", *c);
        else if (*c == '\n')
            snprintf(escaped, sizeof escaped, "\\n");
        else if (*c == '\t')
            snprintf(escaped, sizeof escaped, "\\t");
        else if ((unsigned char)*c < 0x20 || *c == 0x7f)
            snprintf(escaped, sizeof escaped, "\\u%04x", (unsigned)*c);
        else
            escaped[0] = *c, escaped[1] = 0;
        add_text(w, escaped);
    }
    add_text(w, "\"");
}

static void add_line(json_writer *w) {
    if (!w->indented) return;
    add_text(w, "\n");
    for (int i = 0; i < w->depth; i++)
        add_text(w, "  ");
}

/* ---- Values ------------------------------------------------------------------------------------------ */

static void begin_value(json_writer *w, const char *key) {
    if (w->comma) add_text(w, w->indented || w->compact ? "," : ", ");
    if (w->depth) add_line(w);
    w->comma = true;
    if (!key) return;
    add_string(w, key);
    add_text(w, w->compact ? ":" : ": ");
}

static void open_with(json_writer *w, const char *key, const char *bracket) {
    begin_value(w, key);
    add_text(w, bracket);
    w->comma = false;
    w->depth++;
}

static void close_with(json_writer *w, const char *bracket) {
    w->depth--;
    if (w->comma) add_line(w); /* something stands inside */
    add_text(w, bracket);
    w->comma = true;
}

void json_put_object(json_writer *writer, const char *key) {
    open_with(writer, key, "{");
}

void json_put_object_end(json_writer *writer) {
    close_with(writer, "}");
}

void json_put_array(json_writer *writer, const char *key) {
    open_with(writer, key, "[");
}

void json_put_array_end(json_writer *writer) {
    close_with(writer, "]");
}

void json_put_null(json_writer *writer, const char *key) {
    begin_value(writer, key);
    add_text(writer, "null");
}

void json_put_text(json_writer *writer, const char *key, const char *value) {
    begin_value(writer, key);
    if (value)
        add_string(writer, value);
    else
        add_text(writer, "null");
}

void json_put_boolean(json_writer *writer, const char *key, bool value) {
    begin_value(writer, key);
    add_text(writer, value ? "true" : "false");
}

void json_put_integer(json_writer *writer, const char *key, int64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%" PRId64, value);
    begin_value(writer, key);
    add_text(writer, text);
}

/* What is added to a real so that it reads back as one: 2 is an integer. */
static const char *whole_end(const char *real) {
    return strpbrk(real, ".e") ? "" : ".0";
}

void json_put_real(json_writer *writer, const char *key, double value) {
    if (isnan(value)) {
        json_put_text(writer, key, "NaN");
    } else if (isinf(value)) {
        json_put_text(writer, key, value > 0 ? "Infinity" : "-Infinity");
    } else {
        char text[REAL_TEXT];
        begin_value(writer, key);
        add_text(writer, text_real(value, text));
        add_text(writer, whole_end(text));
    }
}

char *json_take(json_writer *writer) {
    if (!writer->compact) add_text(writer, "\n");
    char *text = writer->text;
    if (writer->failed) {
        free(text);
        text = NULL;
    }
    *writer = (json_writer){.indented = writer->indented, .compact = writer->compact};
    return text;
}

/* ---- In sentences ------------------------------------------------------------------------------------ */

const char *json_show(const json_value *value, char text[JSON_SHOWN]) {
    char number[REAL_TEXT];
    switch (value->type) {
    case JSON_NULL: snprintf(text, JSON_SHOWN, "null"); break;
    case JSON_BOOLEAN: snprintf(text, JSON_SHOWN, "%s", value->boolean ? "true" : "false"); break;
    case JSON_NUMBER:
        if (value->exact) {
            snprintf(text, JSON_SHOWN, "%" PRId64, value->integer);
        } else {
            text_real(value->number, number);
            snprintf(text, JSON_SHOWN, "%s%s", number, whole_end(number));
        }
        break;
    case JSON_STRING: snprintf(text, JSON_SHOWN, "\"%.40s\"", value->text); break;
    case JSON_ARRAY: snprintf(text, JSON_SHOWN, "%s", value->count ? "[...]" : "[]"); break;
    case JSON_OBJECT: snprintf(text, JSON_SHOWN, "%s", value->count ? "{...}" : "{}"); break;
    }
    return text;
}

/* SPDX-License-Identifier: MIT */
/*
 * Reading JSON; json_write.c writes it. The text is copied once and decoded in place: a decoded string is never longer
 * than its source. All values of the tree are in one array: there is at most one for each comma and opening bracket
 * outside of strings, and the root.
 */
#include "files/json.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/system.h"

typedef struct reader {
    char *text; /* ends with a zero at `length` */
    size_t at, length;
    json_value *values;
    size_t used;
    const json_value **sorted; /* [room], to find a key that is there twice */
    size_t room;
    int depth;
    char *error;
} reader;

static bool expected(const reader *r, const char *what) {
    if (r->at >= r->length) return file_fail(r->error, "it ends at byte %zu, where %s should stand", r->length, what);
    return file_fail(r->error, "it has no %s at byte %zu", what, r->at);
}

static void skip_blanks(reader *r) {
    const char *c = r->text + r->at; /* stops at the zero at the latest */
    while (*c == ' ' || *c == '\n' || *c == '\t' || *c == '\r')
        c++;
    r->at = (size_t)(c - r->text);
}

/* Whether the next character is `sign`; it is then consumed. */
static bool take(reader *r, char sign) {
    skip_blanks(r);
    if (r->at >= r->length || r->text[r->at] != sign) return false;
    r->at++;
    return true;
}

/* ---- Strings ----------------------------------------------------------------------------------------- */

static bool read_hex4(reader *r, unsigned *value) {
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    *value = 0;
    for (int i = 0; i < 4; i++, r->at++) {
        const char *digit = r->at < r->length && r->text[r->at] ? strchr(digits, r->text[r->at]) : NULL;
        if (!digit) return expected(r, "four hexadecimal digits");
        *value = *value << 4 | ((unsigned)(digit - digits) & 15);
    }
    return true;
}

static char *put_utf8(char *to, unsigned code) {
    static const unsigned char lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    int bytes = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (int i = bytes - 1; i > 0; i--, code >>= 6)
        to[i] = (char)(0x80 | (code & 0x3f));
    to[0] = (char)(lead[bytes] | code);
    return to + bytes;
}

/* After "\u": one character, or a pair of surrogates that make one. */
static bool read_code_point(reader *r, char **to) {
    size_t begin = r->at - 2;
    unsigned code, low = 0;
    if (!read_hex4(r, &code)) return false;
    if (code >= 0xd800 && code < 0xe000) {
        bool pair = code < 0xdc00 && r->length - r->at >= 2 && memcmp(r->text + r->at, "\\u", 2) == 0;
        r->at += pair ? 2 : 0;
        if (pair && !read_hex4(r, &low)) return false;
        if (low < 0xdc00 || low >= 0xe000)
            return file_fail(r->error, "it has half a surrogate pair at byte %zu", begin);
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    if (code == 0) return file_fail(r->error, "it has a text with a zero character at byte %zu", begin);
    *to = put_utf8(*to, code);
    return true;
}

/* Decodes the string in place and ends it with a zero: the closing quote leaves room for one. */
static bool read_string(reader *r, const char *what, const char **string) {
    static const char escapes[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    if (!take(r, '"')) return expected(r, what);
    char *to = r->text + r->at;
    *string = to;
    while (r->at < r->length && r->text[r->at] != '"') {
        char c = r->text[r->at++];
        if ((unsigned char)c < 0x20)
            return file_fail(r->error, "it has a control character inside a text at byte %zu", r->at - 1);
        if (c != '\\') {
            *to++ = c;
            continue;
        }
        char escape = r->at < r->length ? r->text[r->at++] : 0;
        const char *known = escape ? strchr(escapes, escape) : NULL;
        if (known)
            *to++ = meanings[known - escapes];
        else if (escape != 'u')
            return file_fail(r->error, "it has an unknown escape at byte %zu", r->at - 1);
        else if (!read_code_point(r, &to))
            return false;
    }
    if (r->at >= r->length) return expected(r, "the end of a text");
    r->at++;
    *to = 0;
    return true;
}

size_t json_character(const char *text, size_t length) {
    const unsigned char *c = (const unsigned char *)text;
    if (!length || c[0] < 0x80) return length > 0;
    size_t more = c[0] < 0xc2 ? 4 : c[0] < 0xe0 ? 1 : c[0] < 0xf0 ? 2 : c[0] < 0xf5 ? 3 : 4;
    if (more == 4 || more >= length) return 0;
    for (size_t i = 1; i <= more; i++)
        if ((c[i] & 0xc0) != 0x80) return 0;
    /* Not longer than needed, no surrogates, nothing above U+10FFFF. */
    bool wrong = (c[0] == 0xe0 && c[1] < 0xa0) || (c[0] == 0xed && c[1] >= 0xa0) || (c[0] == 0xf0 && c[1] < 0x90) ||
                 (c[0] == 0xf4 && c[1] >= 0x90);
    return wrong ? 0 : more + 1;
}

static bool check_utf8(const reader *r) {
    for (size_t i = 0; i < r->length;) {
        bool plain = (unsigned char)r->text[i] < 0x80; /* nearly always */
        size_t bytes = plain ? 1 : json_character(r->text + i, r->length - i);
        if (!bytes) return file_fail(r->error, "it is not UTF-8 at byte %zu", i);
        i += bytes;
    }
    return true;
}

/* ---- Numbers ----------------------------------------------------------------------------------------- */

static bool digit_at(const reader *r) {
    return r->at < r->length && r->text[r->at] >= '0' && r->text[r->at] <= '9';
}

static bool read_digits(reader *r) {
    if (!digit_at(r)) return expected(r, "digit");
    while (digit_at(r))
        r->at++;
    return true;
}

static bool read_number(reader *r, json_value *value) {
    size_t begin = r->at;
    bool whole = true;
    r->at += r->text[r->at] == '-';
    bool zero = r->text[r->at] == '0';
    size_t first = r->at;
    if (!read_digits(r)) return false;
    if (zero && r->at > first + 1) return file_fail(r->error, "it has a number with a leading zero at byte %zu", begin);
    if (r->text[r->at] == '.') {
        whole = false;
        r->at++;
        if (!read_digits(r)) return false;
    }
    if (r->text[r->at] == 'e' || r->text[r->at] == 'E') {
        whole = false;
        r->at++;
        r->at += r->text[r->at] == '-' || r->text[r->at] == '+';
        if (!read_digits(r)) return false;
    }
    value->type = JSON_NUMBER;
    if (whole) {
        errno = 0;
        value->integer = strtoll(r->text + begin, NULL, 10);
        value->exact = errno == 0 && (value->integer || r->text[begin] != '-');
    }
    if (value->exact) { /* rounds as strtod() does, and is much faster */
        value->number = (double)value->integer;
        return true;
    }
    value->integer = 0;
    value->number = strtod(r->text + begin, NULL);
    return !isinf(value->number) || file_fail(r->error, "it has a number that no double can hold at byte %zu", begin);
}

/* ---- Values ------------------------------------------------------------------------------------------ */

static int by_key(const void *a, const void *b) {
    return strcmp((*(const json_value *const *)a)->key, (*(const json_value *const *)b)->key);
}

static bool check_keys(reader *r, const json_value *object, size_t begin) {
    if (object->count < 2) return true;
    if (object->count > r->room) {
        const json_value **larger = realloc(r->sorted, object->count * sizeof *larger);
        if (!larger) return file_fail(r->error, "there is no memory to sort its %zu keys", object->count);
        r->sorted = larger;
        r->room = object->count;
    }
    size_t count = 0;
    for (const json_value *v = object->first; v; v = v->next)
        r->sorted[count++] = v;
    qsort(r->sorted, count, sizeof *r->sorted, by_key);
    for (size_t i = 1; i < count; i++)
        if (by_key(&r->sorted[i - 1], &r->sorted[i]) == 0)
            return file_fail(r->error, "the object at byte %zu has two members \"%.64s\"", begin, r->sorted[i]->key);
    return true;
}

static bool read_value(reader *r, json_value *value);

/* The elements of a list or an object, after its opening bracket. */
static bool read_elements(reader *r, json_value *parent) {
    bool object = parent->type == JSON_OBJECT;
    char end = object ? '}' : ']';
    size_t begin = r->at - 1;
    if (r->depth == JSON_DEPTH)
        return file_fail(r->error, "it has more than %d lists and objects inside one another at byte %zu", JSON_DEPTH,
                         begin);
    r->depth++;
    const json_value **link = &parent->first;
    for (; !take(r, end); parent->count++) {
        if (parent->count && !take(r, ',')) return expected(r, object ? "comma or }" : "comma or ]");
        json_value *value = &r->values[r->used++];
        if (object && !read_string(r, "key", &value->key)) return false;
        if (object && !take(r, ':')) return expected(r, "colon");
        if (!read_value(r, value)) return false;
        *link = value;
        link = &value->next;
    }
    r->depth--;
    return !object || check_keys(r, parent, begin);
}

static bool read_value(reader *r, json_value *value) {
    static const struct {
        const char *word;
        json_type type;
        bool boolean;
    } words[] = {{"null", JSON_NULL, false}, {"true", JSON_BOOLEAN, true}, {"false", JSON_BOOLEAN, false}};
    skip_blanks(r);
    char sign = r->text[r->at]; /* at the end, the zero */
    if (sign == '"') {
        value->type = JSON_STRING;
        return read_string(r, "text", &value->text);
    }
    if (sign == '-' || digit_at(r)) return read_number(r, value);
    if (sign == '{' || sign == '[') {
        r->at++;
        value->type = sign == '{' ? JSON_OBJECT : JSON_ARRAY;
        return read_elements(r, value);
    }
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        size_t length = strlen(words[i].word);
        if (r->length - r->at < length || memcmp(r->text + r->at, words[i].word, length) != 0) continue;
        r->at += length;
        value->type = words[i].type;
        value->boolean = words[i].boolean;
        return true;
    }
    return expected(r, "value");
}

static bool read_all(reader *r) {
    if (!check_utf8(r) || !read_value(r, &r->values[r->used++])) return false;
    skip_blanks(r);
    return r->at == r->length || file_fail(r->error, "it has more text after its end at byte %zu", r->at);
}

/* ---- Documents --------------------------------------------------------------------------------------- */

/* An upper bound of the number of values: each but the first comes after an opening bracket or a comma. */
static size_t count_values(const char *text, size_t length) {
    size_t count = 1;
    for (size_t i = 0; i < length; i++) {
        count += text[i] == ',' || text[i] == '[' || text[i] == '{';
        if (text[i] == '"') /* skips to the quote that ends the string */
            for (i++; i < length && text[i] != '"'; i++)
                if (text[i] == '\\' && ++i == length) break;
    }
    return count;
}

bool json_parse_up_to(size_t max_bytes, const char *text, size_t length, json_document *document,
                      char error[FILE_ERROR]) {
    *document = (json_document){0};
    if (length > max_bytes) return file_fail(error, "it has %zu bytes; JSON here has at most %zu", length, max_bytes);
    size_t max_values = count_values(text, length);
    if (max_values > JSON_MAX_VALUES)
        return file_fail(error, "it has more than %d commas and brackets", (int)JSON_MAX_VALUES);
    document->text = malloc(length + 1);
    document->values = calloc(max_values, sizeof *document->values);
    reader r = {.text = document->text, .length = length, .values = document->values, .error = error};
    bool ok = document->text && document->values;
    if (ok) {
        if (length) memcpy(document->text, text, length);
        document->text[length] = 0;
        ok = read_all(&r);
    } else {
        file_fail(error, "there is no memory for its %zu values", max_values);
    }
    free(r.sorted);
    document->root = document->values;
    if (!ok) json_free(document);
    return ok;
}

bool json_parse(const char *text, size_t length, json_document *document, char error[FILE_ERROR]) {
    return json_parse_up_to(JSON_MAX_BYTES, text, length, document, error);
}

/* Reads to the end instead of the size that the file system gives, which may change meanwhile. */
static bool read_stream(FILE *stream, size_t max_bytes, char **text, size_t *length, char *error) {
    size_t room = 4096;
    for (*length = 0;;) {
        char *larger = realloc(*text, room);
        if (!larger) return file_fail(error, "there is no memory for it");
        *text = larger;
        *length += fread(larger + *length, 1, room - *length, stream);
        if (ferror(stream)) return file_fail(error, "it cannot be read: %s", strerror(errno));
        if (*length < room) return true;
        if (*length > max_bytes) return file_fail(error, "JSON here has at most %zu bytes", max_bytes);
        room *= 2;
    }
}

bool json_read_up_to(size_t max_bytes, const char *path, json_document *document, char error[FILE_ERROR]) {
    *document = (json_document){0};
    system_status status;
    if (system_status_of(path, &status) && status.kind != SYSTEM_FILE) /* opening a pipe would wait for its other end */
        return file_fail(error, "%.300s: it is %s", path,
                         status.kind == SYSTEM_FOLDER ? "a folder" : "not a regular file");
    FILE *stream = system_stream(path, "rb");
    if (!stream) return file_fail(error, "%.300s: it cannot be opened: %s", path, strerror(errno));
    char reason[FILE_ERROR] = "", *text = NULL;
    size_t length;
    bool ok = read_stream(stream, max_bytes, &text, &length, reason) &&
              json_parse_up_to(max_bytes, text, length, document, reason);
    free(text);
    fclose(stream);
    return ok || file_fail(error, "%.300s: %.200s", path, reason);
}

bool json_read(const char *path, json_document *document, char error[FILE_ERROR]) {
    return json_read_up_to(JSON_MAX_BYTES, path, document, error);
}

void json_free(json_document *document) {
    free(document->values);
    free(document->text);
    *document = (json_document){0};
}

char *json_take_texts(json_document *document) {
    char *text = document->text;
    document->text = NULL;
    json_free(document);
    return text;
}

const json_value *json_member(const json_value *object, const char *key) {
    if (!object || object->type != JSON_OBJECT) return NULL;
    for (const json_value *v = object->first; v; v = v->next)
        if (strcmp(v->key, key) == 0) return v;
    return NULL;
}

bool json_has(const json_value *object, const char *key) {
    const json_value *value = json_member(object, key);
    return value && value->type != JSON_NULL;
}

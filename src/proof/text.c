/* SPDX-License-Identifier: MIT */
/*
 * Ops, attributes and shapes to text and back, by the op table. Reading is strict: the whole text must be used, and a
 * value that does not fit is refused, not clipped. The program never calls setlocale(), so numbers have a point.
 */
#include "proof/text.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "core/real.h"

static bool fail(char error[TEXT_ERROR], const char *format, ...) __attribute__((format(printf, 2, 3)));

static bool fail(char error[TEXT_ERROR], const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(error, TEXT_ERROR, format, list);
    va_end(list);
    return false;
}

/* Appends to a text of at most `bytes`; what does not fit is truncated. */
static void append(char *text, size_t bytes, const char *format, ...) __attribute__((format(printf, 3, 4)));

static void append(char *text, size_t bytes, const char *format, ...) {
    size_t used = strlen(text);
    va_list list;
    va_start(list, format);
    vsnprintf(text + used, bytes - used, format, list);
    va_end(list);
}

/* ---- Numbers ----------------------------------------------------------------------------------------- */

static bool parse_integer(const char *text, int64_t *value) {
    if (!isdigit((unsigned char)text[text[0] == '-' || text[0] == '+'])) return false;
    char *end;
    errno = 0;
    *value = strtoll(text, &end, 10);
    return !*end && !errno;
}

static bool parse_real(const char *text, double *value) {
    if (!*text || isspace((unsigned char)*text)) return false;
    char *end;
    errno = 0;
    double parsed = strtod(text, &end);
    /* A denormal sets ERANGE too and is fine; an overflow is not what was written. */
    bool overflow = errno == ERANGE && (parsed > 1 || parsed < -1);
    if (*end || overflow) return false;
    *value = parsed;
    return true;
}

/* ---- Attributes -------------------------------------------------------------------------------------- */

static const char *list_choices(const vjp_attribute *a, char *text, size_t bytes) {
    text[0] = 0;
    for (size_t i = 0; a->choices[i]; i++)
        append(text, bytes, "%s%s", i ? ", " : "", a->choices[i]);
    return text;
}

static const char *list_attributes(const vjp_op_info *info, char *text, size_t bytes) {
    snprintf(text, bytes, "%s", info->attribute_count ? "" : "no attributes");
    for (size_t i = 0; i < info->attribute_count; i++)
        append(text, bytes, "%s%s", i ? ", " : "", info->attributes[i].name);
    return text;
}

static const vjp_attribute *find_attribute(const vjp_op_info *info, const char *name, size_t length) {
    for (size_t i = 0; i < info->attribute_count; i++)
        if (strlen(info->attributes[i].name) == length && memcmp(info->attributes[i].name, name, length) == 0)
            return &info->attributes[i];
    return NULL;
}

bool text_set_attribute(const vjp_op *op, void *attributes, const char *assignment, char error[TEXT_ERROR]) {
    const vjp_op_info *info = vjp_op_describe(op);
    char allowed[TEXT_ERROR / 2];
    const char *equals = strchr(assignment, '=');
    if (!equals) return fail(error, "\"%.64s\" is not an attribute: write name=value", assignment);
    size_t length = (size_t)(equals - assignment);
    const char *value = equals + 1;
    const vjp_attribute *a = find_attribute(info, assignment, length);
    if (!a)
        return fail(error, "%s has no attribute \"%.*s\"; it has %s", info->name, (int)(length < 64 ? length : 64),
                    assignment, list_attributes(info, allowed, sizeof allowed));
    int64_t integer = 0;
    double real = 0;
    switch (a->type) {
    case VJP_INTEGER:
        if (!parse_integer(value, &integer))
            return fail(error, "%s of %s is \"%.64s\"; it must be an integer", a->name, info->name, value);
        break;
    case VJP_REAL:
        if (!parse_real(value, &real))
            return fail(error, "%s of %s is \"%.64s\"; it must be a number", a->name, info->name, value);
        break;
    case VJP_BOOLEAN:
        integer = strcmp(value, "true") == 0 || strcmp(value, "1") == 0;
        if (!integer && strcmp(value, "false") != 0 && strcmp(value, "0") != 0)
            return fail(error, "%s of %s is \"%.64s\"; it must be true or false", a->name, info->name, value);
        break;
    case VJP_CHOICE:
        while (a->choices[integer] && strcmp(a->choices[integer], value) != 0)
            integer++;
        if (!a->choices[integer])
            return fail(error, "%s of %s is \"%.64s\"; it must be one of %s", a->name, info->name, value,
                        list_choices(a, allowed, sizeof allowed));
        break;
    }
    memcpy((char *)attributes + a->offset, a->type == VJP_REAL ? (const void *)&real : (const void *)&integer, 8);
    return true;
}

bool text_set_attributes(const vjp_op *op, void *attributes, const char *text, char error[TEXT_ERROR]) {
    /* Into a copy first, so that a failure leaves the caller's values alone. */
    text_values copy;
    memcpy(copy.bytes, attributes, vjp_op_describe(op)->attribute_bytes);
    while (*text) {
        size_t blanks = strspn(text, " \t\n"), length = strcspn(text + blanks, " \t\n");
        text += blanks;
        char word[128];
        if (length >= sizeof word) return fail(error, "\"%.64s...\" is too long for an attribute", text);
        memcpy(word, text, length);
        word[length] = 0;
        text += length;
        if (length && !text_set_attribute(op, copy.bytes, word, error)) return false;
    }
    memcpy(attributes, copy.bytes, vjp_op_describe(op)->attribute_bytes);
    return true;
}

static const char *value_text(const vjp_attribute *a, int64_t integer, double real, char text[TEXT_VALUE]) {
    if (a->type == VJP_REAL) return text_real(real, text);
    if (a->type == VJP_BOOLEAN && (integer == 0 || integer == 1)) {
        snprintf(text, TEXT_VALUE, "%s", integer ? "true" : "false");
        return text;
    }
    for (int64_t i = 0; a->type == VJP_CHOICE && a->choices[i]; i++)
        if (i == integer) {
            snprintf(text, TEXT_VALUE, "%s", a->choices[i]);
            return text;
        }
    snprintf(text, TEXT_VALUE, "%" PRId64, integer);
    return text;
}

const char *text_attribute(const vjp_attribute *attribute, const void *attributes, char text[TEXT_VALUE]) {
    int64_t integer;
    double real;
    memcpy(&integer, (const char *)attributes + attribute->offset, 8);
    memcpy(&real, (const char *)attributes + attribute->offset, 8);
    return value_text(attribute, integer, real, text);
}

const char *text_default(const vjp_attribute *attribute, char text[TEXT_VALUE]) {
    return value_text(attribute, attribute->integer, attribute->real, text);
}

const char *text_attributes(const vjp_op *op, const void *attributes, bool only_changed, char *text, size_t bytes) {
    const vjp_op_info *info = vjp_op_describe(op);
    text[0] = 0;
    for (size_t i = 0; i < info->attribute_count; i++) {
        char value[TEXT_VALUE], usual[TEXT_VALUE];
        text_attribute(&info->attributes[i], attributes, value);
        if (only_changed && strcmp(value, text_default(&info->attributes[i], usual)) == 0) continue;
        append(text, bytes, "%s%s=%s", text[0] ? " " : "", info->attributes[i].name, value);
    }
    return text;
}

/* ---- Ops and passes ---------------------------------------------------------------------------------- */

const char *text_pass_name(vjp_pass pass) {
    return pass == VJP_FORWARD ? "forward" : "backward";
}

bool text_parse_pass(const char *text, const vjp_op **op, vjp_pass *pass, char error[TEXT_ERROR]) {
    const char *point = strchr(text, '.');
    char name[64];
    size_t length = point ? (size_t)(point - text) : strlen(text);
    snprintf(name, sizeof name, "%.*s", (int)(length < 64 ? length : 63), text);
    const vjp_op *found = vjp_op_find(name);
    if (!found) {
        char known[TEXT_ERROR / 2] = "";
        for (size_t i = 0; i < vjp_op_count(); i++)
            append(known, sizeof known, "%s%s", i ? ", " : "", vjp_op_describe(vjp_op_at(i))->name);
        return fail(error, "unknown op \"%s\"; there are %s", name, known);
    }
    int passes = vjp_passes(vjp_op_describe(found));
    for (int p = 0; p < passes; p++)
        if (point && strcmp(point + 1, text_pass_name((vjp_pass)p)) == 0) {
            *op = found;
            *pass = (vjp_pass)p;
            return true;
        }
    if (passes < VJP_PASS_COUNT && point && strcmp(point + 1, text_pass_name(VJP_BACKWARD)) == 0)
        return fail(error, "%s has no backward pass: nothing is differentiated through it", name);
    if (passes < VJP_PASS_COUNT) return fail(error, "\"%.64s\" is not a pass: write %s.forward", text, name);
    return fail(error, "\"%.64s\" is not a pass: write %s.forward or %s.backward", text, name, name);
}

/* How many letters must be inserted, deleted or replaced to turn one word into the other. */
static size_t distance(const char *a, const char *b) {
    enum { LONGEST = 63 };
    size_t row[LONGEST + 1], length_a = strlen(a), length_b = strlen(b);
    if (length_a > LONGEST || length_b > LONGEST) return SIZE_MAX;
    for (size_t j = 0; j <= length_b; j++)
        row[j] = j;
    for (size_t i = 1; i <= length_a; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= length_b; j++) {
            size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            size_t smallest = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
            row[j] = replaced < smallest ? replaced : smallest;
        }
    }
    return row[length_b];
}

const char *text_nearest(const char *word, const char *const *words) {
    const char *nearest = NULL;
    size_t smallest = (strlen(word) + 2) / 3 + 1;
    for (size_t i = 0; words[i]; i++) {
        size_t d = distance(word, words[i]);
        if (d < smallest) nearest = words[i], smallest = d;
    }
    return nearest;
}

/* ---- Shapes ------------------------------------------------------------------------------------------ */

bool text_parse_shape(const char *text, int *ndim, int64_t shape[VJP_MAX_DIMS], char error[TEXT_ERROR]) {
    int64_t sizes[VJP_MAX_DIMS];
    int count = 0;
    const char *at = text + strspn(text, " ");
    bool bracket = *at == '[';
    if (bracket) at++;
    at += strspn(at, " ");
    bool empty = bracket && *at == ']';
    while (!empty) {
        if (count == VJP_MAX_DIMS)
            return fail(error, "shape \"%.64s\" has more than %d sizes", text, (int)VJP_MAX_DIMS);
        if (!isdigit((unsigned char)*at)) return fail(error, "\"%.64s\" is not a shape: write [7,65]", text);
        char *end;
        errno = 0;
        sizes[count++] = strtoll(at, &end, 10);
        if (errno) return fail(error, "shape \"%.64s\" has a size past 2^63", text);
        at = end + strspn(end, " ");
        if (*at != ',') break;
        at++;
        at += strspn(at, " ");
    }
    if (bracket && *at++ != ']') return fail(error, "\"%.64s\" is not a shape: write [7,65]", text);
    if (at[strspn(at, " ")]) return fail(error, "\"%.64s\" is not a shape: write [7,65]", text);
    memcpy(shape, sizes, (size_t)count * sizeof sizes[0]);
    *ndim = count;
    return true;
}

const char *text_shape(int ndim, const int64_t *shape, char text[TEXT_SHAPE]) {
    snprintf(text, TEXT_SHAPE, "[");
    for (int i = 0; i < ndim && i < VJP_MAX_DIMS; i++)
        append(text, TEXT_SHAPE, "%s%" PRId64, i ? ", " : "", shape[i]);
    append(text, TEXT_SHAPE, "]");
    return text;
}

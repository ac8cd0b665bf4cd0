/* SPDX-License-Identifier: MIT */
/* Regular expressions by PCRE2; see pattern.h. */
#include "text/pattern.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef VJP_HAVE_PCRE2

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "text/list.h"

/* Steps of backtracking before a match is given up; the patterns in use need a few per character. */
enum { MAX_STEPS = 10 * 1000 * 1000 };

/* The just-in-time compiled code begins with this much stack, and may grow it to the maximum. */
enum { STACK_BYTES = 32 * 1024, MAX_STACK_BYTES = 8 * 1024 * 1024 };

struct pattern {
    pcre2_code *code;
    pcre2_match_data *found;
    pcre2_match_context *context;
    pcre2_jit_stack *stack; /* NULL: this processor or system has no just-in-time compiler */
};

/* ---- Translation ------------------------------------------------------------------------------------- */

typedef struct reader {
    const char *text, *at;
    bool in_class;
    byte_list out;
    char *error;
} reader;

static bool refuse(reader *r, const char *what) {
    return file_fail(r->error, "the pattern \"%.100s\" has %s at byte %zu, which is not supported", r->text, what,
                     (size_t)(r->at - r->text));
}

static bool put(reader *r, const char *text, size_t length) {
    return byte_list_add(&r->out, text, length) || file_fail(r->error, "there is no memory for a pattern");
}

static bool put_text(reader *r, const char *text) {
    return put(r, text, strlen(text));
}

/* A backslash and what follows. Escapes of letters other than these mean other things in the two libraries. */
static bool read_escape(reader *r) {
    static const char word[] = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}";
    char c = r->at[1];
    if (!c) return refuse(r, "a backslash at its end");
    bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    bool ok;
    if (c == 's')
        ok = put_text(r, "\\p{White_Space}");
    else if (c == 'S')
        ok = put_text(r, "\\P{White_Space}");
    else if (c == 'w' && r->in_class)
        ok = put_text(r, word);
    else if ((c == 'w' || c == 'W') && !r->in_class)
        ok = put_text(r, c == 'w' ? "[" : "[^") && put_text(r, word) && put_text(r, "]");
    else if (strchr("xpP", c)) {
        const char *end = r->at[2] == '{' ? strchr(r->at, '}') : NULL;
        if (!end) return refuse(r, "an escape without braces");
        ok = put(r, r->at, (size_t)(end - r->at) + 1);
        r->at = end - 1;
    } else if (!letter || strchr("dDrntf", c))
        ok = put(r, r->at, 2);
    else {
        char what[] = "the escape \\?";
        what[sizeof what - 2] = c;
        return refuse(r, what);
    }
    r->at += 2;
    return ok;
}

static bool read_group(reader *r) {
    static const char *const known[] = {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"};
    if (r->at[1] != '?') return put(r, r->at++, 1);
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        size_t length = strlen(known[i]);
        if (strncmp(r->at, known[i], length) != 0) continue;
        r->at += length;
        return put_text(r, known[i]);
    }
    return refuse(r, "a group of an unknown kind");
}

/* {2}, {2,} or {1,3}, which must not be followed by a plus: in Oniguruma that repeats the whole once more. */
static bool read_count(reader *r) {
    const char *c = r->at + 1;
    size_t first = strspn(c, "0123456789");
    c += first;
    if (*c == ',') c += 1 + strspn(c + 1, "0123456789");
    if (!first || *c != '}') return refuse(r, "a brace that is no count of repeats");
    if (c[1] == '+') return refuse(r, "a plus after a count of repeats");
    size_t length = (size_t)(c - r->at) + 1;
    bool ok = put(r, r->at, length);
    r->at += length;
    return ok;
}

static bool read_class(reader *r) {
    bool ok = put(r, r->at++, 1);
    if (ok && *r->at == '^') ok = put(r, r->at++, 1);
    r->in_class = true;
    if (*r->at == ']') return refuse(r, "an empty class");
    while (ok && *r->at && *r->at != ']') {
        if (*r->at == '\\')
            ok = read_escape(r);
        else if (*r->at == '[')
            return refuse(r, "a class inside a class");
        else if (r->at[0] == '&' && r->at[1] == '&')
            return refuse(r, "an intersection of classes");
        else
            ok = put(r, r->at++, 1);
    }
    r->in_class = false;
    return ok && (*r->at == ']' || refuse(r, "a class without an end")) && put(r, r->at++, 1);
}

static bool translate(reader *r) {
    bool ok = true;
    while (ok && *r->at) {
        switch (*r->at) {
        case '\\': ok = read_escape(r); break;
        case '(': ok = read_group(r); break;
        case '[': ok = read_class(r); break;
        case '{': ok = read_count(r); break;
        case '^':
        case '$': return refuse(r, "an anchor");
        default: ok = put(r, r->at++, 1);
        }
    }
    return ok && put(r, "", 1);
}

/* ---- Compiling --------------------------------------------------------------------------------------- */

static bool compile(pattern *p, const char *text, char *error) {
    reader r = {.text = text, .at = text, .error = error};
    pcre2_compile_context *lines = pcre2_compile_context_create(NULL);
    bool ok = lines != NULL || file_fail(error, "there is no memory for a pattern");
    ok = ok && translate(&r);
    if (ok) {
        int code;
        PCRE2_SIZE at;
        pcre2_set_newline(lines, PCRE2_NEWLINE_LF);
        p->code =
            pcre2_compile((PCRE2_SPTR)r.out.bytes, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &at, lines);
        if (!p->code) {
            PCRE2_UCHAR reason[160];
            pcre2_get_error_message(code, reason, sizeof reason);
            ok = file_fail(error, "the pattern \"%.100s\" is refused: %s", text, (const char *)reason);
        }
    }
    byte_list_free(&r.out);
    pcre2_compile_context_free(lines);
    return ok;
}

pattern *pattern_compile(const char *text, char error[FILE_ERROR]) {
    pattern *p = calloc(1, sizeof *p);
    bool ok = p != NULL || file_fail(error, "there is no memory for a pattern");
    ok = ok && compile(p, text, error);
    if (ok) {
        p->found = pcre2_match_data_create_from_pattern(p->code, NULL);
        p->context = pcre2_match_context_create(NULL);
        ok = (p->found && p->context) || file_fail(error, "there is no memory for a pattern");
    }
    if (ok) {
        pcre2_set_match_limit(p->context, MAX_STEPS);
        if (pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE) == 0)
            p->stack = pcre2_jit_stack_create(STACK_BYTES, MAX_STACK_BYTES, NULL);
        if (p->stack) pcre2_jit_stack_assign(p->context, NULL, p->stack);
        return p;
    }
    pattern_free(p);
    return NULL;
}

void pattern_free(pattern *p) {
    if (!p) return;
    pcre2_code_free(p->code);
    pcre2_match_data_free(p->found);
    pcre2_match_context_free(p->context);
    pcre2_jit_stack_free(p->stack);
    free(p);
}

pattern_result pattern_find(pattern *p, const char *text, size_t length, size_t from, size_t *begin, size_t *end) {
    PCRE2_SPTR subject = (PCRE2_SPTR)text;
    int count = p->stack ? pcre2_jit_match(p->code, subject, length, from, PCRE2_NO_UTF_CHECK, p->found, p->context)
                         : pcre2_match(p->code, subject, length, from, PCRE2_NO_UTF_CHECK, p->found, p->context);
    if (count == PCRE2_ERROR_NOMATCH) return PATTERN_NONE;
    if (count < 0) return PATTERN_FAILED;
    const PCRE2_SIZE *ends = pcre2_get_ovector_pointer(p->found);
    *begin = ends[0];
    *end = ends[1];
    return PATTERN_FOUND;
}

const char *pattern_unicode(void) {
    static char version[32];
    if (!version[0] && pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, NULL) < (int)sizeof version)
        pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, version);
    return version;
}

#else

pattern *pattern_compile(const char *text, char error[FILE_ERROR]) {
    file_fail(error, "it has the regular expression \"%.100s\", and this vjp was built without PCRE2, which reads them",
              text);
    return NULL;
}

void pattern_free(pattern *p) {
    (void)p;
}

pattern_result pattern_find(pattern *p, const char *text, size_t length, size_t from, size_t *begin, size_t *end) {
    (void)p, (void)text, (void)length, (void)from, (void)begin, (void)end;
    return PATTERN_FAILED;
}

const char *pattern_unicode(void) {
    return "";
}

#endif

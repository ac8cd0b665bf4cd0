/* SPDX-License-Identifier: MIT */
/*
 * Regular expressions of tokenizers, by PCRE2.
 *
 * The files are written for Oniguruma, whose syntax differs from PCRE2's in places. A pattern is read first: what both
 * read alike is kept; \s, \S and \w are replaced by the Unicode properties that Oniguruma means by them; everything
 * else is refused by name rather than read in another sense.
 */
#ifndef VJP_TEXT_PATTERN_H
#define VJP_TEXT_PATTERN_H

#include "files/fail.h"

#include <stddef.h>

typedef struct pattern pattern;

/* NULL: `error` says why; without PCRE2, that it is missing. */
pattern *pattern_compile(const char *text, char error[FILE_ERROR]);
void pattern_free(pattern *p);

typedef enum pattern_result { PATTERN_NONE, PATTERN_FOUND, PATTERN_FAILED } pattern_result;

/* The first match in a valid UTF-8 text that begins at `from` or later. It fails where backtracking passes a limit. */
pattern_result pattern_find(pattern *p, const char *text, size_t length, size_t from, size_t *begin, size_t *end);

/* The version of Unicode whose properties are used: "14.0.0"; "" without PCRE2. */
const char *pattern_unicode(void);

#endif

/* SPDX-License-Identifier: MIT */
/* Normalizers: what is done to a text before it is split. Also the search that normalizers and splitters share. */
#include "text/nfc.h"
#include "text/parts.h"

#include <string.h>

pattern_result search_find(const search *s, const char *text, size_t length, size_t from, size_t *begin, size_t *end) {
    if (s->expression) return pattern_find(s->expression, text, length, from, begin, end);
    for (; length - from >= s->length; from++) {
        const char *found = memchr(text + from, s->text[0], length - from - s->length + 1);
        if (!found) break;
        from = (size_t)(found - text);
        if (memcmp(found, s->text, s->length) != 0) continue;
        *begin = from;
        *end = from + s->length;
        return PATTERN_FOUND;
    }
    return PATTERN_NONE;
}

bool search_failed(char *error) {
    return file_fail(error, "a regular expression of the tokenizer needs too many steps for this text");
}

static bool replace(const normalizer *n, const char *text, size_t length, byte_list *to, char *error) {
    size_t content = strlen(n->content), done = 0, begin, end;
    pattern_result found;
    while ((found = search_find(&n->what, text, length, done, &begin, &end)) == PATTERN_FOUND) {
        if (begin == end) return file_fail(error, "a normalizer of the tokenizer replaces an empty text");
        if (!byte_list_add(to, text + done, begin - done) || !byte_list_add(to, n->content, content))
            return no_memory(error);
        done = end;
    }
    if (found == PATTERN_FAILED) return search_failed(error);
    return byte_list_add(to, text + done, length - done) || no_memory(error);
}

bool normalize(tokenizer *t, const char **text, size_t *length, char *error) {
    for (int i = 0; i < t->normalizer_count; i++) {
        const normalizer *n = &t->normalizers[i];
        byte_list *to = &t->normal[i % 2];
        bool ok = true;
        to->count = 0;
        switch (n->kind) {
        case NORMALIZER_NFC: ok = nfc_normalize(*text, *length, to) || no_memory(error); break;
        case NORMALIZER_PREPEND:
            if (*length && !byte_list_add(to, n->content, strlen(n->content))) return no_memory(error);
            ok = byte_list_add(to, *text, *length) || no_memory(error);
            break;
        case NORMALIZER_REPLACE: ok = replace(n, *text, *length, to, error); break;
        }
        if (!ok) return false;
        *text = to->bytes;
        *length = to->count;
    }
    return true;
}

/* SPDX-License-Identifier: MIT */
/*
 * Decoding: the texts of tokens pass the file's decoders, each of which makes a new list of texts; what is left is
 * joined.
 */
#include "text/byte_level.h"
#include "text/parts.h"

/* Texts one behind another. */
typedef struct texts {
    byte_list bytes;
    size_t *ends;
    size_t count, room;
} texts;

static void texts_free(texts *t) {
    byte_list_free(&t->bytes);
    free(t->ends);
    *t = (texts){0};
}

/* Ends the text that was added since the last one. */
static bool texts_end(texts *t) {
    if (t->count == t->room) {
        size_t *larger = list_grow(t->ends, t->count, 1, sizeof *larger, &t->room);
        if (!larger) return false;
        t->ends = larger;
    }
    t->ends[t->count++] = t->bytes.count;
    return true;
}

static bool texts_add(texts *t, const char *text, size_t length) {
    return byte_list_add(&t->bytes, text, length) && texts_end(t);
}

/* ---- Decoders of one text ------------------------------------------------------------------------------ */

/* The bytes that the text stands for; the text itself if one of its characters stands for none. */
static bool decode_bytes(const char *text, size_t length, texts *to) {
    size_t count;
    if (!byte_list_reserve(&to->bytes, length)) return false;
    if (!byte_level_bytes(text, length, to->bytes.bytes + to->bytes.count, &count)) return texts_add(to, text, length);
    to->bytes.count += count;
    return texts_end(to);
}

static bool decode_replace(const decoder *d, const char *text, size_t length, texts *to) {
    size_t done = 0, begin, end;
    while (search_find(&d->what, text, length, done, &begin, &end) == PATTERN_FOUND && begin < end) {
        if (!byte_list_add(&to->bytes, text + done, begin - done) ||
            !byte_list_add(&to->bytes, d->content, strlen(d->content)))
            return false;
        done = end;
    }
    return texts_add(to, text + done, length - done);
}

static bool decode_metaspace(const decoder *d, bool first, const char *text, size_t length, texts *to) {
    const decoder with_space = {.what = d->what, .content = first && d->prepended ? "" : " "};
    return decode_replace(&with_space, text, length, to);
}

static bool decode_strip(const decoder *d, const char *text, size_t length, texts *to) {
    const char *c = d->what.text;
    size_t bytes = d->what.length;
    for (int64_t i = 0; i < d->start && length >= bytes && memcmp(text, c, bytes) == 0; i++)
        text += bytes, length -= bytes;
    for (int64_t i = 0; i < d->stop && length >= bytes && memcmp(text + length - bytes, c, bytes) == 0; i++)
        length -= bytes;
    return texts_add(to, text, length);
}

/* ---- Decoders of all texts ----------------------------------------------------------------------------- */

/* The byte of a text such as <0x0A>; -1: it is none. */
static int fallback_byte(const char *text, size_t length) {
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    if (length != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>') return -1;
    const char *high = text[3] ? strchr(digits, text[3]) : NULL, *low = text[4] ? strchr(digits, text[4]) : NULL;
    return high && low ? (int)((high - digits) & 15) << 4 | (int)((low - digits) & 15) : -1;
}

/* Ends a run of bytes, which begins at `begin`: text if it is UTF-8 as a whole, otherwise U+FFFD for each byte. */
static bool end_run(texts *to, size_t begin) {
    size_t count = to->bytes.count - begin;
    if (!count || utf8_valid(to->bytes.bytes + begin, count) == count) return !count || texts_end(to);
    to->bytes.count = begin;
    for (size_t i = 0; i < count; i++)
        if (!texts_add(to, "\xef\xbf\xbd", 3)) return false;
    return true;
}

static bool decode_fallback(const texts *from, texts *to) {
    size_t begin = 0, run = 0; /* where the text begins, and the run of bytes in `to` */
    for (size_t i = 0; i < from->count; begin = from->ends[i++]) {
        const char *text = from->bytes.bytes + begin;
        size_t length = from->ends[i] - begin;
        int byte = length ? fallback_byte(text, length) : -1;
        if (byte >= 0) {
            char c = (char)byte;
            if (!byte_list_add(&to->bytes, &c, 1)) return false;
            continue;
        }
        if (!end_run(to, run) || !texts_add(to, text, length)) return false;
        run = to->bytes.count;
    }
    return end_run(to, run);
}

static bool decode_step(const decoder *d, const texts *from, texts *to) {
    if (d->kind == DECODER_FALLBACK) return decode_fallback(from, to);
    if (d->kind == DECODER_FUSE) return texts_add(to, from->bytes.bytes, from->bytes.count);
    size_t begin = 0;
    bool ok = true;
    for (size_t i = 0; i < from->count && ok; begin = from->ends[i++]) {
        const char *text = from->bytes.bytes + begin;
        size_t length = from->ends[i] - begin;
        if (!length)
            ok = texts_end(to);
        else if (d->kind == DECODER_BYTES)
            ok = decode_bytes(text, length, to);
        else if (d->kind == DECODER_REPLACE)
            ok = decode_replace(d, text, length, to);
        else if (d->kind == DECODER_STRIP)
            ok = decode_strip(d, text, length, to);
        else
            ok = decode_metaspace(d, i == 0, text, length, to);
    }
    return ok;
}

static bool collect(const tokenizer *t, const int32_t *ids, size_t count, bool special, texts *to) {
    for (size_t i = 0; i < count; i++) {
        if (!tokenizer_token(t, ids[i]) || (!special && t->special[ids[i]])) continue;
        const token_text *one = &t->names.tokens[ids[i]];
        if (!t->decodes && to->count && !byte_list_add(&to->bytes, " ", 1)) return false;
        if (!texts_add(to, one->text, one->length)) return false;
    }
    return true;
}

bool tokenizer_decode(const tokenizer *t, const int32_t *ids, size_t count, bool special, byte_list *to,
                      char error[FILE_ERROR]) {
    texts lists[2] = {{.count = 0}, {.count = 0}};
    int now = 0;
    bool ok = collect(t, ids, count, special, &lists[0]);
    for (int i = 0; i < t->decoder_count && ok; i++, now = !now) {
        lists[!now].count = lists[!now].bytes.count = 0;
        ok = decode_step(&t->decoders[i], &lists[now], &lists[!now]);
    }
    ok = ok && byte_list_add(to, lists[now].bytes.bytes, lists[now].bytes.count);
    texts_free(&lists[0]);
    texts_free(&lists[1]);
    return ok || no_memory(error);
}

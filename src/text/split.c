/* SPDX-License-Identifier: MIT */
/*
 * Splitters divide a text into words. Each hands its parts to the next one at once, and the last to the model, so that
 * no list of words is ever made.
 */
#include "text/parts.h"
#include "text/utf8.h"

/* The character that stands for a space in models made by SentencePiece. */
static const char METASPACE[] = "\xe2\x96\x81";
enum { METASPACE_BYTES = sizeof METASPACE - 1 };

/* ---- Words ------------------------------------------------------------------------------------------- */

/* The first METASPACE behind another character; `length`: none. */
static size_t next_boundary(const char *text, size_t length, size_t from) {
    const search space = {.text = METASPACE, .length = METASPACE_BYTES};
    for (size_t begin, end = from; search_find(&space, text, length, end, &begin, &end) == PATTERN_FOUND;) {
        bool after_another = begin > from && (begin - from < METASPACE_BYTES ||
                                              memcmp(text + begin - METASPACE_BYTES, METASPACE, METASPACE_BYTES) != 0);
        if (after_another) return begin;
    }
    return length;
}

/*
 * A model made by SentencePiece sees a whole text as one word. Where no merge makes a token with METASPACE behind
 * another character, no token can reach across such a place, and dividing the text there changes nothing: its words are
 * then short, and mostly in the cache.
 */
void split_find_boundary(tokenizer *t) {
    const bpe *b = &t->model;
    if (b->byte_level || b->whole_words || vocabulary_find(&b->vocabulary, METASPACE, METASPACE_BYTES) < 0) return;
    for (size_t i = 0; i < b->merge_slots; i++) {
        if (b->merges[i].left < 0) continue;
        const token_text *made = &b->vocabulary.tokens[b->merges[i].product];
        if (next_boundary(made->text, made->length, 0) < made->length) return;
    }
    t->boundary = METASPACE;
}

static bool encode_word(encoder *e, const char *text, size_t length) {
    bpe *model = &e->t->model;
    if (!e->t->boundary) return bpe_encode(model, text, length, e->to, e->error);
    for (size_t begin = 0, end; begin < length; begin = end) {
        end = next_boundary(text, length, begin);
        if (!bpe_encode(model, text + begin, end - begin, e->to, e->error)) return false;
    }
    return true;
}

/* ---- Splitting at what a search finds ------------------------------------------------------------------ */

/* The part that is not handed on yet: the one behind it may still join it. */
typedef struct division {
    encoder *e;
    const splitter *s;
    int step;
    const char *text;
    bool first; /* the text begins where the whole one does */
    size_t begin, end;
    bool held, found; /* whether there is such a part, and whether it is one that was found */
} division;

static bool hand_on(division *d, size_t begin, size_t end) {
    return begin == end || split_encode(d->e, d->step + 1, d->text + begin, end - begin, d->first && !begin);
}

static bool release(division *d) {
    bool held = d->held;
    d->held = false;
    return !held || hand_on(d, d->begin, d->end);
}

/* The next part, found or between two that were. */
static bool divide(division *d, size_t begin, size_t end, bool found) {
    found = found != d->s->invert;
    bool joins = false;
    switch (d->s->behavior) {
    case SPLIT_REMOVED: return found || hand_on(d, begin, end);
    case SPLIT_ISOLATED: return hand_on(d, begin, end);
    case SPLIT_CONTIGUOUS: joins = found == d->found; break;
    case SPLIT_MERGED_WITH_PREVIOUS: joins = found && !d->found; break;
    case SPLIT_MERGED_WITH_NEXT: joins = !found && d->found; break;
    }
    joins = joins && d->held;
    if (!joins && !release(d)) return false;
    if (!joins) d->begin = begin;
    d->end = end;
    d->held = true;
    d->found = found;
    return true;
}

static bool split_at(encoder *e, int step, const char *text, size_t length, bool first) {
    division d = {.e = e, .s = &e->t->splitters[step], .step = step, .text = text, .first = first};
    const search *what = &d.s->what;
    if (!what->length && !what->expression) return hand_on(&d, 0, length);
    size_t done = 0, from = 0, begin, end;
    bool any = false; /* whether something was found; it ends at `done` */
    pattern_result found = PATTERN_NONE;
    while (from <= length && (found = search_find(what, text, length, from, &begin, &end)) == PATTERN_FOUND) {
        if (begin == end && any && end == done) { /* an empty match right behind another is not counted */
            from = done < length ? done + utf8_length(text[done]) : length + 1;
            continue;
        }
        if ((begin > done && !divide(&d, done, begin, false)) || !divide(&d, begin, end, true)) return false;
        from = done = end;
        any = true;
    }
    if (found == PATTERN_FAILED) return search_failed(e->error);
    return (done == length || divide(&d, done, length, false)) && release(&d);
}

/* ---- Splitters that change the text -------------------------------------------------------------------- */

static bool begins_with(const char *text, size_t length, const char *what) {
    size_t bytes = strlen(what);
    return length >= bytes && memcmp(text, what, bytes) == 0;
}

/* Spaces become the replacement character, and one is put before the text. */
static bool split_metaspace(encoder *e, int step, const char *text, size_t length, bool first) {
    splitter *s = &e->t->splitters[step];
    size_t bytes = strlen(s->replacement);
    bool begun = begins_with(text, length, " ") || begins_with(text, length, s->replacement);
    bool put = !begun && (s->prepend == PREPEND_ALWAYS || (s->prepend == PREPEND_FIRST && first));
    s->scratch.count = 0;
    bool ok = !put || byte_list_add(&s->scratch, s->replacement, bytes);
    for (size_t i = 0; i < length && ok;) {
        const char *space = memchr(text + i, ' ', length - i);
        size_t end = space ? (size_t)(space - text) : length;
        ok = byte_list_add(&s->scratch, text + i, end - i);
        if (ok && space) ok = byte_list_add(&s->scratch, s->replacement, bytes);
        i = end + 1;
    }
    return ok ? split_at(e, step, s->scratch.bytes, s->scratch.count, first) : no_memory(e->error);
}

static bool split_bytes(encoder *e, int step, const char *text, size_t length, bool first) {
    splitter *s = &e->t->splitters[step];
    if (s->prepend == PREPEND_ALWAYS && !begins_with(text, length, " ")) {
        s->scratch.count = 0;
        if (!byte_list_add(&s->scratch, " ", 1) || !byte_list_add(&s->scratch, text, length))
            return no_memory(e->error);
        text = s->scratch.bytes;
        length = s->scratch.count;
    }
    return split_at(e, step, text, length, first);
}

bool split_encode(encoder *e, int step, const char *text, size_t length, bool first) {
    if (step == e->t->splitter_count) return encode_word(e, text, length);
    switch (e->t->splitters[step].kind) {
    case SPLITTER_SEARCH: return split_at(e, step, text, length, first);
    case SPLITTER_METASPACE: return split_metaspace(e, step, text, length, first);
    case SPLITTER_BYTES: return split_bytes(e, step, text, length, first);
    }
    return false;
}

/* SPDX-License-Identifier: MIT */
/*
 * Added tokens are found before anything else happens to a text: the longest that begins at the leftmost place. Most
 * are control tokens; their texts form a tree of bytes, so that a place where none begins costs one look at a table.
 */
#include "text/parts.h"
#include "text/utf8.h"

bool added_tree_add(added_tree *tree, const char *text, size_t length, int32_t token) {
    size_t at = 0;
    for (size_t i = 0; i <= length; i++) {
        if (tree->room - tree->count < 2) {
            added_node *larger = list_grow(tree->nodes, tree->count, 2, sizeof *larger, &tree->room);
            if (!larger) return false;
            tree->nodes = larger;
        }
        if (!tree->count) tree->nodes[tree->count++] = (added_node){.token = -1};
        if (i == length) break;
        unsigned char byte = (unsigned char)text[i];
        int32_t child = tree->nodes[at].child;
        while (child && tree->nodes[child].byte != byte)
            child = tree->nodes[child].sibling;
        if (!child) {
            child = (int32_t)tree->count++;
            tree->nodes[child] = (added_node){.sibling = tree->nodes[at].child, .token = -1, .byte = byte};
            tree->nodes[at].child = child;
        }
        at = (size_t)child;
    }
    if (length) tree->begins[(unsigned char)text[0]] = true;
    if (length && tree->nodes[at].token < 0) tree->nodes[at].token = token;
    return true;
}

/* The longest token that begins at `text`, and its length; -1: none. */
static int32_t longest(const added_tree *tree, const char *text, size_t length, size_t *found) {
    int32_t token = -1, at = 0;
    for (size_t i = 0; i < length; i++) {
        at = tree->nodes[at].child;
        while (at && tree->nodes[at].byte != (unsigned char)text[i])
            at = tree->nodes[at].sibling;
        if (!at) break;
        if (tree->nodes[at].token < 0) continue;
        token = tree->nodes[at].token;
        *found = i + 1;
    }
    return token;
}

static size_t character_before(const char *text, size_t at) {
    for (at--; at && ((unsigned char)text[at] & 0xc0) == 0x80;)
        at--;
    return at;
}

/* Whether the character at `at` belongs to a word. */
static bool is_word(const tokenizer *t, const char *text, size_t length, size_t at) {
    size_t begin, end;
    return at < length && pattern_find(t->word, text, at + utf8_length(text[at]), at, &begin, &end) == PATTERN_FOUND;
}

static bool is_single_word(const tokenizer *t, const char *text, size_t length, size_t begin, size_t end) {
    return !(begin && is_word(t, text, length, character_before(text, begin))) && !is_word(t, text, length, end);
}

static size_t spaces_before(const char *text, size_t at, size_t min) {
    while (at > min) {
        size_t bytes, before = character_before(text, at);
        if (!utf8_is_space(utf8_first(text + before, &bytes))) break;
        at = before;
    }
    return at < min ? min : at;
}

static size_t spaces_after(const char *text, size_t length, size_t at) {
    for (size_t bytes; at < length && utf8_is_space(utf8_first(text + at, &bytes)); at += bytes)
        ;
    return at;
}

typedef bool part_encoder(encoder *e, const char *text, size_t length, bool first);

/* Adds the tokens that the tree finds, and calls `between` for the text before, between and behind them. */
static bool encode_around(encoder *e, const added_tree *tree, const char *text, size_t length, bool first,
                          part_encoder *between) {
    size_t done = 0;
    for (size_t i = 0; tree->count && i < length;) {
        size_t found = 0;
        int32_t index = tree->begins[(unsigned char)text[i]] ? longest(tree, text + i, length - i, &found) : -1;
        if (index < 0) {
            i++;
            continue;
        }
        const added_token *a = &e->t->added[index];
        size_t begin = i, end = i + found;
        i = end;
        if (a->single_word && !is_single_word(e->t, text, length, begin, end)) continue;
        if (a->left_strip) begin = spaces_before(text, begin, done);
        if (a->right_strip) end = spaces_after(text, length, end);
        if (begin > done && !between(e, text + done, begin - done, first && !done)) return false;
        if (!token_list_add(e->to, &a->id, 1)) return no_memory(e->error);
        done = end;
    }
    return done >= length || between(e, text + done, length - done, first && !done);
}

static bool encode_split(encoder *e, const char *text, size_t length, bool first) {
    return split_encode(e, 0, text, length, first);
}

static bool encode_normalized(encoder *e, const char *text, size_t length, bool first) {
    if (!normalize(e->t, &text, &length, e->error)) return false;
    return encode_around(e, &e->t->normalized, text, length, first, encode_split);
}

bool added_encode(encoder *e, const char *text, size_t length) {
    return encode_around(e, &e->t->raw, text, length, true, encode_normalized);
}

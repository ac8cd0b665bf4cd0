/* SPDX-License-Identifier: MIT */
/*
 * Training by counts: each different word is kept once, with how often it occurs. Every pair has its count and the
 * words that it may be in, so that a merge changes only those words and the counts of the pairs beside it. A heap has
 * the pairs by count; an entry whose count has changed since is corrected when it comes to the top.
 */
#include "text/train.h"

#include <stdio.h>

#include "files/json.h"
#include "text/byte_level.h"
#include "text/pattern.h"
#include "text/vocabulary.h"

static const char *const LLAMA3 = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
                                  "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+"
                                  "|\\s+(?!\\S)|\\s+";

static const char *expression_of(const char *name) {
    return strcmp(name, "gpt2") == 0 ? BYTE_LEVEL_PATTERN : strcmp(name, "llama3") == 0 ? LLAMA3 : NULL;
}

typedef struct word {
    size_t begin; /* of its text, and of its tokens: it begins with one per byte */
    uint32_t length;
    int64_t count;
} word;

typedef struct pair {
    int32_t left, right;
    int64_t count;
    uint32_t *words; /* that it may be in */
    size_t word_count, word_room;
    bool grown;  /* its count has grown by the present merge */
    bool merged; /* it is in the list of merges */
} pair;

typedef struct entry {
    int64_t count; /* of the pair when it was put here */
    uint32_t pair;
} entry;

typedef struct training {
    const training_options *options;
    byte_list texts; /* of all words */
    word *words;
    size_t word_count, word_room;
    uint32_t *word_slots; /* word + 1; 0: empty */
    size_t word_slot_count;
    int32_t *tokens; /* of all words */
    pair *pairs;
    size_t pair_count, pair_room;
    uint32_t *pair_slots; /* pair + 1; 0: empty */
    size_t pair_slot_count;
    entry *heap;
    size_t heap_count, heap_room;
    uint32_t *grown; /* the pairs whose count has grown by the present merge */
    size_t grown_count, grown_room;
    vocabulary known; /* the tokens in bytes, special ones not counted */
    char **spellings; /* [made]: the texts of `known`, each allocated */
    int32_t made;
    int32_t (*merges)[2];
    size_t merge_count, merge_room;
} training;

/* ---- Words ------------------------------------------------------------------------------------------- */

/* Counts a word. False: there is no memory. */
static bool add_word(training *t, const char *text, size_t length) {
    if (2 * (t->word_count + 1) > t->word_slot_count) {
        size_t more = t->word_slot_count ? 2 * t->word_slot_count : 1 << 12;
        uint32_t *slots = calloc(more, sizeof *slots);
        if (!slots || t->word_count > UINT32_MAX / 4) return free(slots), false;
        for (size_t i = 0; i < t->word_count; i++) {
            size_t slot = text_hash(t->texts.bytes + t->words[i].begin, t->words[i].length) & (more - 1);
            while (slots[slot])
                slot = (slot + 1) & (more - 1);
            slots[slot] = (uint32_t)i + 1;
        }
        free(t->word_slots);
        t->word_slots = slots;
        t->word_slot_count = more;
    }
    size_t slot = text_hash(text, length) & (t->word_slot_count - 1);
    for (; t->word_slots[slot]; slot = (slot + 1) & (t->word_slot_count - 1)) {
        word *w = &t->words[t->word_slots[slot] - 1];
        if (w->length != length || memcmp(t->texts.bytes + w->begin, text, length) != 0) continue;
        w->count++;
        return true;
    }
    if (t->word_count == t->word_room) {
        word *larger = list_grow(t->words, t->word_count, 1, sizeof *larger, &t->word_room);
        if (!larger) return false;
        t->words = larger;
    }
    size_t begin = t->texts.count;
    if (length > UINT32_MAX || !byte_list_add(&t->texts, text, length)) return false;
    t->words[t->word_count++] = (word){.begin = begin, .length = (uint32_t)length, .count = 1};
    t->word_slots[slot] = (uint32_t)t->word_count;
    return true;
}

/* The words of a document: what the expression finds, and what is between. */
static bool count_words(training *t, pattern *p, const char *text, size_t length, char *error) {
    size_t done = 0, begin, end;
    pattern_result found;
    bool ok = true;
    while (ok && (found = pattern_find(p, text, length, done, &begin, &end)) != PATTERN_NONE) {
        if (found == PATTERN_FAILED) return file_fail(error, "the text cannot be split into words");
        ok = (begin == done || add_word(t, text + done, begin - done)) && add_word(t, text + begin, end - begin);
        done = end;
    }
    ok = ok && (done == length || add_word(t, text + done, length - done));
    return ok || file_fail(error, "there is no memory for the words of the text");
}

static bool collect_words(training *t, const char *text, const size_t *ends, size_t documents, char *error) {
    pattern *p = pattern_compile(expression_of(t->options->pattern), error);
    byte_list repaired = {0};
    bool ok = p != NULL;
    for (size_t i = 0, begin = 0; i < documents && ok; begin = ends[i++]) {
        size_t length = ends[i] - begin;
        const char *document = text + begin;
        if (utf8_valid(document, length) < length) {
            repaired.count = 0;
            ok = utf8_repair(document, length, &repaired) || file_fail(error, "there is no memory for the text");
            document = repaired.bytes;
            length = repaired.count;
        }
        ok = ok && count_words(t, p, document, length, error);
    }
    byte_list_free(&repaired);
    pattern_free(p);
    return ok;
}

/* ---- Pairs ------------------------------------------------------------------------------------------- */

static size_t hash_pair(int32_t left, int32_t right) {
    uint64_t key = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9e3779b97f4a7c15u;
    return (size_t)(key ^ key >> 32);
}

/* The pair of two tokens; NULL: there is no memory. */
static pair *find_pair(training *t, int32_t left, int32_t right) {
    if (2 * (t->pair_count + 1) > t->pair_slot_count) {
        size_t more = t->pair_slot_count ? 2 * t->pair_slot_count : 1 << 12;
        uint32_t *slots = calloc(more, sizeof *slots);
        if (!slots || t->pair_count > UINT32_MAX / 4) return free(slots), NULL;
        for (size_t i = 0; i < t->pair_count; i++) {
            size_t slot = hash_pair(t->pairs[i].left, t->pairs[i].right) & (more - 1);
            while (slots[slot])
                slot = (slot + 1) & (more - 1);
            slots[slot] = (uint32_t)i + 1;
        }
        free(t->pair_slots);
        t->pair_slots = slots;
        t->pair_slot_count = more;
    }
    size_t slot = hash_pair(left, right) & (t->pair_slot_count - 1);
    for (; t->pair_slots[slot]; slot = (slot + 1) & (t->pair_slot_count - 1)) {
        pair *p = &t->pairs[t->pair_slots[slot] - 1];
        if (p->left == left && p->right == right) return p;
    }
    if (t->pair_count == t->pair_room) {
        pair *larger = list_grow(t->pairs, t->pair_count, 1, sizeof *larger, &t->pair_room);
        if (!larger) return NULL;
        t->pairs = larger;
    }
    t->pairs[t->pair_count++] = (pair){.left = left, .right = right};
    t->pair_slots[slot] = (uint32_t)t->pair_count;
    return &t->pairs[t->pair_count - 1];
}

/* Adds to the count of a pair, which is in this word from now on if `change` is positive. */
static bool change_pair(training *t, int32_t left, int32_t right, int64_t change, uint32_t in_word) {
    pair *p = find_pair(t, left, right);
    if (!p) return false;
    p->count += change;
    if (change < 0 || (p->word_count && p->words[p->word_count - 1] == in_word)) return true;
    if (p->word_count == p->word_room) {
        uint32_t *larger = list_grow(p->words, p->word_count, 1, sizeof *larger, &p->word_room);
        if (!larger) return false;
        p->words = larger;
    }
    p->words[p->word_count++] = in_word;
    if (p->grown) return true;
    if (t->grown_count == t->grown_room) {
        uint32_t *larger = list_grow(t->grown, t->grown_count, 1, sizeof *larger, &t->grown_room);
        if (!larger) return false;
        t->grown = larger;
    }
    p->grown = true;
    t->grown[t->grown_count++] = (uint32_t)(p - t->pairs);
    return true;
}

/* Whether a comes to the top before b: the more frequent, then the one with the smaller numbers. */
static bool before(const training *t, entry a, entry b) {
    if (a.count != b.count) return a.count > b.count;
    const pair *x = &t->pairs[a.pair], *y = &t->pairs[b.pair];
    return x->left != y->left ? x->left < y->left : x->right < y->right;
}

static bool push(training *t, uint32_t index) {
    if (t->heap_count == t->heap_room) {
        entry *larger = list_grow(t->heap, t->heap_count, 1, sizeof *larger, &t->heap_room);
        if (!larger) return false;
        t->heap = larger;
    }
    size_t at = t->heap_count++;
    entry added = {t->pairs[index].count, index};
    for (; at && before(t, added, t->heap[(at - 1) / 2]); at = (at - 1) / 2)
        t->heap[at] = t->heap[(at - 1) / 2];
    t->heap[at] = added;
    return true;
}

static entry pop(training *t) {
    entry top = t->heap[0], moved = t->heap[--t->heap_count];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < t->heap_count; at = child) {
        if (child + 1 < t->heap_count && before(t, t->heap[child + 1], t->heap[child])) child++;
        if (!before(t, t->heap[child], moved)) break;
        t->heap[at] = t->heap[child];
    }
    t->heap[at] = moved;
    return top;
}

/* Puts the pairs whose counts have grown into the heap. */
static bool push_grown(training *t) {
    for (size_t i = 0; i < t->grown_count; i++) {
        t->pairs[t->grown[i]].grown = false;
        if (t->pairs[t->grown[i]].count > 0 && !push(t, t->grown[i])) return false;
    }
    t->grown_count = 0;
    return true;
}

/* ---- Merging ----------------------------------------------------------------------------------------- */

static bool merge_word(training *t, uint32_t index, int32_t left, int32_t right, int32_t product) {
    word *w = &t->words[index];
    int32_t *tokens = t->tokens + w->begin;
    uint32_t to = 0;
    bool ok = true;
    for (uint32_t i = 0; i < w->length && ok; i++) {
        if (i + 1 == w->length || tokens[i] != left || tokens[i + 1] != right) {
            tokens[to++] = tokens[i];
            continue;
        }
        if (to)
            ok = change_pair(t, tokens[to - 1], left, -w->count, index) &&
                 change_pair(t, tokens[to - 1], product, w->count, index);
        if (ok && i + 2 < w->length)
            ok = change_pair(t, right, tokens[i + 2], -w->count, index) &&
                 change_pair(t, product, tokens[i + 2], w->count, index);
        tokens[to++] = product;
        i++;
    }
    w->length = to;
    return ok;
}

/* Adds a token of two texts. -1: there is no memory. The number of one that is there: it is not added. */
static int32_t add_token(training *t, token_text left, token_text right) {
    size_t length = (size_t)left.length + right.length;
    char *text = malloc(length + 1);
    if (!text) return -1;
    memcpy(text, left.text, left.length);
    memcpy(text + left.length, right.text, right.length);
    int32_t there = vocabulary_find(&t->known, text, length);
    if (there >= 0) return free(text), there;
    (void)vocabulary_set(&t->known, t->made, text, length);
    t->spellings[t->made] = text;
    return t->made++;
}

/* The bytes, in the order of the characters that stand for them, as the vocabularies of others have them. */
static bool begin_tokens(training *t, int32_t number[256]) {
    for (uint32_t c = 0; c < BYTE_LEVEL_END; c++) {
        int byte = byte_level_byte(c);
        if (byte < 0) continue;
        char text = (char)byte;
        number[byte] = add_token(t, (token_text){&text, 1}, (token_text){"", 0});
        if (number[byte] < 0) return false;
    }
    return true;
}

static bool add_merge(training *t, int32_t left, int32_t right) {
    if (t->merge_count == t->merge_room) {
        int32_t(*larger)[2] = list_grow(t->merges, t->merge_count, 1, sizeof *larger, &t->merge_room);
        if (!larger) return false;
        t->merges = larger;
    }
    t->merges[t->merge_count][0] = left;
    t->merges[t->merge_count++][1] = right;
    return true;
}

static bool count_pairs(training *t, const int32_t number[256]) {
    t->tokens = malloc((t->texts.count + 1) * sizeof *t->tokens);
    if (!t->tokens) return false;
    for (size_t i = 0; i < t->texts.count; i++)
        t->tokens[i] = number[(unsigned char)t->texts.bytes[i]];
    for (size_t i = 0; i < t->word_count; i++) {
        const word *w = &t->words[i];
        for (size_t k = w->begin; k + 1 < w->begin + w->length; k++)
            if (!change_pair(t, t->tokens[k], t->tokens[k + 1], w->count, (uint32_t)i)) return false;
    }
    return push_grown(t);
}

/* Merges a pair in all words that it may be in. */
static bool merge_pair(training *t, uint32_t index) {
    pair *p = &t->pairs[index];
    int32_t left = p->left, right = p->right;
    int32_t product = add_token(t, t->known.tokens[left], t->known.tokens[right]);
    if (product < 0 || (!p->merged && !add_merge(t, left, right))) return false;
    uint32_t *in = p->words; /* the list of pairs may move */
    size_t count = p->word_count;
    *p = (pair){.left = left, .right = right, .merged = true};
    bool ok = true;
    for (size_t i = 0; i < count && ok; i++)
        ok = merge_word(t, in[i], left, right, product);
    free(in);
    /* Where pairs overlap, as in aaa, some were counted that are gone now. */
    if (!t->pairs[index].grown) t->pairs[index].count = 0;
    return ok && push_grown(t);
}

/* False: there is no memory. */
static bool merge_all(training *t) {
    while (t->made < t->known.size && t->heap_count) {
        entry top = pop(t);
        int64_t count = t->pairs[top.pair].count;
        if (count <= 0) continue;
        if (count != top.count ? !push(t, top.pair) : !merge_pair(t, top.pair)) return false;
    }
    return true;
}

/* ---- The files --------------------------------------------------------------------------------------- */

/* The text of a token as files have it. */
static void put_name(const training *t, int32_t id, byte_list *to) {
    const token_text *name = &t->known.tokens[id];
    to->count = 0;
    for (size_t i = 0; i < name->length; i++)
        to->count += utf8_write(byte_level_character((unsigned char)name->text[i]), to->bytes + to->count);
    to->bytes[to->count] = 0;
}

static void put_byte_level(json_writer *w, const char *key, bool expression) {
    json_put_object(w, key);
    json_put_text(w, "type", "ByteLevel");
    json_put_boolean(w, "add_prefix_space", false);
    json_put_boolean(w, "trim_offsets", true);
    json_put_boolean(w, "use_regex", expression);
    json_put_object_end(w);
}

static void put_splitter(json_writer *w, const char *name) {
    if (strcmp(name, "gpt2") == 0) {
        put_byte_level(w, "pre_tokenizer", true);
        return;
    }
    json_put_object(w, "pre_tokenizer");
    json_put_text(w, "type", "Sequence");
    json_put_array(w, "pretokenizers");
    json_put_object(w, NULL);
    json_put_text(w, "type", "Split");
    json_put_object(w, "pattern");
    json_put_text(w, "Regex", expression_of(name));
    json_put_object_end(w);
    json_put_text(w, "behavior", "Isolated");
    json_put_boolean(w, "invert", false);
    json_put_object_end(w);
    put_byte_level(w, NULL, false);
    json_put_array_end(w);
    json_put_object_end(w);
}

static void put_added(json_writer *w, const training_options *o) {
    json_put_array(w, "added_tokens");
    for (int32_t i = 0; i < o->special_count; i++) {
        json_put_object(w, NULL);
        json_put_integer(w, "id", i);
        json_put_text(w, "content", o->special[i]);
        json_put_boolean(w, "single_word", false);
        json_put_boolean(w, "lstrip", false);
        json_put_boolean(w, "rstrip", false);
        json_put_boolean(w, "normalized", false);
        json_put_boolean(w, "special", true);
        json_put_object_end(w);
    }
    json_put_array_end(w);
}

static void put_model(json_writer *w, const training *t, byte_list *name) {
    json_put_object(w, "model");
    json_put_text(w, "type", "BPE");
    json_put_null(w, "dropout");
    json_put_null(w, "unk_token");
    json_put_null(w, "continuing_subword_prefix");
    json_put_null(w, "end_of_word_suffix");
    json_put_boolean(w, "fuse_unk", false);
    json_put_boolean(w, "byte_fallback", false);
    json_put_boolean(w, "ignore_merges", false);
    json_put_object(w, "vocab");
    for (int32_t i = 0; i < t->options->special_count; i++)
        json_put_integer(w, t->options->special[i], i);
    for (int32_t i = 0; i < t->made; i++) {
        put_name(t, i, name);
        json_put_integer(w, name->bytes, i + t->options->special_count);
    }
    json_put_object_end(w);
    json_put_array(w, "merges");
    for (size_t i = 0; i < t->merge_count; i++) {
        json_put_array(w, NULL);
        for (int side = 0; side < 2; side++) {
            put_name(t, t->merges[i][side], name);
            json_put_text(w, NULL, name->bytes);
        }
        json_put_array_end(w);
    }
    json_put_array_end(w);
    json_put_object_end(w);
}

static char *write_json(const training *t) {
    json_writer w = {.indented = true};
    byte_list name = {0};
    uint32_t longest = 0;
    for (int32_t i = 0; i < t->made; i++)
        if (longest < t->known.tokens[i].length) longest = t->known.tokens[i].length;
    if (!byte_list_reserve(&name, 2 * (size_t)longest + 1)) return NULL; /* each byte becomes one or two */
    json_put_object(&w, NULL);
    json_put_text(&w, "version", "1.0");
    json_put_null(&w, "truncation");
    json_put_null(&w, "padding");
    put_added(&w, t->options);
    json_put_null(&w, "normalizer");
    put_splitter(&w, t->options->pattern);
    json_put_null(&w, "post_processor");
    put_byte_level(&w, "decoder", true);
    put_model(&w, t, &name);
    json_put_object_end(&w);
    byte_list_free(&name);
    return json_take(&w);
}

char *tokenizer_config(const training_options *options) {
    json_writer w = {.indented = true};
    json_put_object(&w, NULL);
    json_put_text(&w, "tokenizer_class", "PreTrainedTokenizerFast");
    json_put_text(&w, "bos_token", options->special[0]);
    json_put_text(&w, "eos_token", options->special[0]);
    json_put_boolean(&w, "clean_up_tokenization_spaces", false);
    json_put_object_end(&w);
    return json_take(&w);
}

/* ---- The whole --------------------------------------------------------------------------------------- */

static bool check(const training_options *o, char *error) {
    if (!expression_of(o->pattern))
        return file_fail(error, "the pattern is \"%.64s\"; it must be " TRAINING_PATTERNS, o->pattern);
    if (o->special_count < 1) return file_fail(error, "there is no special token to end a text with");
    for (int32_t i = 0; i < o->special_count; i++) {
        const char *text = o->special[i];
        if (!text[0] || utf8_valid(text, strlen(text)) < strlen(text))
            return file_fail(error, "the special token %d is empty or not UTF-8", (int)i);
        bool one_byte = !text[utf8_length(text[0])]; /* it might be a byte's */
        for (int32_t k = 0; k < i && !one_byte; k++)
            one_byte = strcmp(o->special[k], text) == 0;
        if (one_byte)
            return file_fail(error, "the special token \"%.64s\" is a single character, or there twice", text);
    }
    if (o->size < o->special_count + 256 || o->size > VOCABULARY_MAX)
        return file_fail(error, "the vocabulary has %d tokens; it must have %d to %d", (int)o->size,
                         (int)o->special_count + 256, VOCABULARY_MAX);
    return true;
}

static void training_free(training *t) {
    byte_list_free(&t->texts);
    free(t->words);
    free(t->word_slots);
    free(t->tokens);
    for (size_t i = 0; i < t->pair_count; i++)
        free(t->pairs[i].words);
    free(t->pairs);
    free(t->pair_slots);
    free(t->heap);
    free(t->grown);
    for (int32_t i = 0; i < t->made; i++)
        free(t->spellings[i]);
    free(t->spellings);
    vocabulary_free(&t->known);
    free(t->merges);
}

char *tokenizer_train(const char *text, const size_t *ends, size_t documents, const training_options *options,
                      int32_t *size, char error[FILE_ERROR]) {
    training t = {.options = options};
    char *json = NULL;
    int32_t number[256];
    bool ok = check(options, error) && collect_words(&t, text, ends, documents, error);
    if (ok) {
        ok = vocabulary_create(&t.known, options->size - options->special_count) &&
             (t.spellings = calloc((size_t)t.known.size, sizeof *t.spellings)) != NULL && begin_tokens(&t, number) &&
             count_pairs(&t, number) && merge_all(&t) && (json = write_json(&t)) != NULL;
        if (!ok) file_fail(error, "there is no memory to train a tokenizer on %zu words", t.word_count);
    }
    if (json) *size = t.made + options->special_count;
    training_free(&t);
    return json;
}

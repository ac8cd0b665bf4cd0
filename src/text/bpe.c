/* SPDX-License-Identifier: MIT */
/* Byte-pair encoding of one word; see bpe.h for which path is taken when. */
#include "text/bpe.h"

#include <stdio.h>

#include "text/byte_level.h"
#include "text/utf8.h"

/* ---- Merges ------------------------------------------------------------------------------------------ */

static const uint32_t NO_RANK = UINT32_MAX;

static size_t pair_slot(const bpe *b, int32_t left, int32_t right) {
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    key *= 0x9e3779b97f4a7c15u;
    return (size_t)(key >> 32 ^ key >> 15) & (b->merge_slots - 1);
}

static bpe_merge *find_slot(const bpe *b, int32_t left, int32_t right) {
    size_t slot = pair_slot(b, left, right);
    bpe_merge *m = &b->merges[slot];
    while (m->left >= 0 && (m->left != left || m->right != right))
        m = &b->merges[slot = (slot + 1) & (b->merge_slots - 1)];
    return m;
}

static uint32_t rank_of(const bpe *b, int32_t left, int32_t right) {
    return find_slot(b, left, right)->rank; /* NO_RANK in an empty slot */
}

bool bpe_reserve_merges(bpe *b, size_t count) {
    b->merge_slots = 16;
    while (b->merge_slots < 2 * count)
        b->merge_slots *= 2;
    b->merges = malloc(b->merge_slots * sizeof *b->merges);
    if (!b->merges) return false;
    for (size_t i = 0; i < b->merge_slots; i++)
        b->merges[i] = (bpe_merge){.left = -1, .rank = NO_RANK};
    return true;
}

void bpe_set_merge(bpe *b, int32_t left, int32_t right, uint32_t rank, int32_t product) {
    *find_slot(b, left, right) = (bpe_merge){left, right, rank, product};
}

void bpe_finish(bpe *b) {
    for (int i = 0; i < 256; i++) {
        char byte = (char)i, name[8];
        b->first[i] = b->byte_level || i < 128 ? vocabulary_find(&b->vocabulary, &byte, 1) : -1;
        int length = snprintf(name, sizeof name, "<0x%02X>", (unsigned)i);
        b->fallback[i] = b->byte_fallback ? vocabulary_find(&b->vocabulary, name, (size_t)length) : -1;
    }
}

/* ---- The cache: words and their tokens ---------------------------------------------------------------- */

/*
 * Words of more bytes are not kept. Text repeats its words: of 10 MB of English and code 97 in 100 words are found.
 * When the cache is full it is emptied, so that it follows a text that changes.
 */
enum { CACHE_WORD = 64, CACHE_FIRST_SLOTS = 1 << 14, CACHE_MAX_SLOTS = 1 << 20 };

typedef struct cached {
    uint64_t hash;
    uint32_t word, tokens; /* where they begin */
    uint32_t length;       /* of the word in bytes; 0: an empty slot */
    uint32_t count;        /* tokens */
} cached;

struct bpe_cache {
    cached *slots;
    size_t slot_count, used;
    byte_list words;
    token_list tokens;
};

static void cache_free(bpe_cache *c) {
    if (!c) return;
    free(c->slots);
    byte_list_free(&c->words);
    token_list_free(&c->tokens);
    free(c);
}

static cached *cache_slot(const bpe_cache *c, uint64_t hash, const char *word, size_t length) {
    size_t slot = hash & (c->slot_count - 1);
    cached *entry = &c->slots[slot];
    while (entry->length &&
           (entry->hash != hash || entry->length != length || memcmp(c->words.bytes + entry->word, word, length) != 0))
        entry = &c->slots[slot = (slot + 1) & (c->slot_count - 1)];
    return entry;
}

/* Twice the slots; an empty cache where that would be too many. False: there is no memory, and nothing has changed. */
static bool cache_grow(bpe_cache *c) {
    size_t more = c->slot_count ? 2 * c->slot_count : CACHE_FIRST_SLOTS;
    if (more > CACHE_MAX_SLOTS) {
        memset(c->slots, 0, c->slot_count * sizeof *c->slots);
        c->used = c->words.count = c->tokens.count = 0;
        return true;
    }
    cached *slots = calloc(more, sizeof *slots);
    if (!slots) return false;
    for (size_t i = 0; i < c->slot_count; i++) {
        if (!c->slots[i].length) continue;
        size_t slot = c->slots[i].hash & (more - 1);
        while (slots[slot].length)
            slot = (slot + 1) & (more - 1);
        slots[slot] = c->slots[i];
    }
    free(c->slots);
    c->slots = slots;
    c->slot_count = more;
    return true;
}

/* Keeps a word. Without memory it is not kept, which changes no result. */
static void cache_add(bpe_cache *c, uint64_t hash, const char *word, size_t length, const int32_t *ids, size_t count) {
    if (2 * c->used >= c->slot_count && !cache_grow(c)) return;
    cached entry = {.hash = hash,
                    .word = (uint32_t)c->words.count,
                    .tokens = (uint32_t)c->tokens.count,
                    .length = (uint32_t)length,
                    .count = (uint32_t)count};
    if (!byte_list_add(&c->words, word, length) || !token_list_add(&c->tokens, ids, count)) return;
    *cache_slot(c, hash, word, length) = entry;
    c->used++;
}

/* ---- The symbols that a word begins with --------------------------------------------------------------- */

typedef struct symbols {
    int32_t *ids;
    size_t count;
    bool pending; /* unknown characters, whose token is added with the next known character, or at the end */
} symbols;

static void flush_unknown(const bpe *b, symbols *s) {
    if (s->pending) s->ids[s->count++] = b->unknown;
    s->pending = false;
}

/* A character without a token: its bytes' tokens if all are there, or the unknown token, or nothing. */
static void add_unknown(const bpe *b, symbols *s, const char *character, size_t bytes) {
    bool all = b->byte_fallback;
    for (size_t i = 0; i < bytes && all; i++)
        all = b->fallback[(unsigned char)character[i]] >= 0;
    if (all) {
        for (size_t i = 0; i < bytes; i++)
            s->ids[s->count++] = b->fallback[(unsigned char)character[i]];
    } else if (b->unknown >= 0) {
        if (!b->fuse_unknown) flush_unknown(b, s);
        s->pending = true;
    }
}

static void add_characters(const bpe *b, symbols *s, const char *word, size_t length) {
    for (size_t i = 0, bytes; i < length; i += bytes) {
        unsigned char c = (unsigned char)word[i];
        bytes = b->byte_level ? 1 : utf8_length(word[i]);
        int32_t id = bytes == 1 ? b->first[c] : vocabulary_find(&b->vocabulary, word + i, bytes);
        if (id >= 0) {
            flush_unknown(b, s);
            s->ids[s->count++] = id;
        } else if (b->byte_level) {
            char stands[4]; /* the character that stands for this byte in the vocabulary */
            add_unknown(b, s, stands, utf8_write(byte_level_character(c), stands));
        } else {
            add_unknown(b, s, word + i, bytes);
        }
    }
    flush_unknown(b, s);
}

/* ---- Merging ----------------------------------------------------------------------------------------- */

static size_t merge_short(const bpe *b, int32_t *ids, size_t count) {
    uint32_t rank[BPE_SHORT]; /* of the pair that begins at a symbol */
    for (size_t i = 0; i + 1 < count; i++)
        rank[i] = rank_of(b, ids[i], ids[i + 1]);
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++)
            best = rank[i] < rank[best] ? i : best;
        if (rank[best] == NO_RANK) break;
        ids[best] = find_slot(b, ids[best], ids[best + 1])->product;
        memmove(ids + best + 1, ids + best + 2, (count - best - 2) * sizeof *ids);
        count--;
        if (best + 1 < count) memmove(rank + best + 1, rank + best + 2, (count - best - 2) * sizeof *rank);
        if (best + 1 < count) rank[best] = rank_of(b, ids[best], ids[best + 1]);
        if (best) rank[best - 1] = rank_of(b, ids[best - 1], ids[best]);
    }
    return count;
}

/* A heap of keys whose upper half is a rank and whose lower half is where the pair begins: the order of merging. */
static void sift_down(uint64_t *heap, size_t count, size_t at) {
    uint64_t moved = heap[at];
    for (size_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= moved) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

static void sift_up(uint64_t *heap, size_t at) {
    uint64_t moved = heap[at];
    for (; at && heap[(at - 1) / 2] > moved; at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = moved;
}

/* The arrays of a long word, each as long as it has symbols; the heap has room for the pairs that merges make. */
typedef struct long_word {
    int32_t *ids;
    uint32_t *next, *before, *rank;
    uint64_t *heap;
    size_t heaped;
} long_word;

static void set_rank(const bpe *b, long_word *w, uint32_t at, size_t count) {
    w->rank[at] = w->next[at] < count ? rank_of(b, w->ids[at], w->ids[w->next[at]]) : NO_RANK;
    if (w->rank[at] == NO_RANK) return;
    w->heap[w->heaped] = (uint64_t)w->rank[at] << 32 | at;
    sift_up(w->heap, w->heaped++);
}

static size_t merge_long(const bpe *b, long_word *w, size_t count) {
    for (uint32_t i = 0; i < count; i++) {
        w->next[i] = i + 1;
        w->before[i] = i - 1;
        w->rank[i] = i + 1 < count ? rank_of(b, w->ids[i], w->ids[i + 1]) : NO_RANK;
        if (w->rank[i] != NO_RANK) w->heap[w->heaped++] = (uint64_t)w->rank[i] << 32 | i;
    }
    for (size_t i = w->heaped / 2; i-- > 0;)
        sift_down(w->heap, w->heaped, i);
    while (w->heaped) {
        uint64_t top = w->heap[0];
        w->heap[0] = w->heap[--w->heaped];
        if (w->heaped) sift_down(w->heap, w->heaped, 0);
        uint32_t at = (uint32_t)top, right = w->next[at];
        if (w->rank[at] != (uint32_t)(top >> 32)) continue; /* one of the two was merged since */
        w->ids[at] = find_slot(b, w->ids[at], w->ids[right])->product;
        w->rank[right] = NO_RANK;
        w->next[at] = w->next[right];
        if (w->next[at] < count) w->before[w->next[at]] = at;
        set_rank(b, w, at, count);
        if (at) set_rank(b, w, w->before[at], count);
    }
    size_t left = 0;
    for (size_t i = 0; i < count; i = w->next[i])
        w->ids[left++] = w->ids[i];
    return left;
}

/* ---- A word ------------------------------------------------------------------------------------------ */

/* The most symbols that a byte of a word can begin as: a character of 4 bytes is 1 or 4, one that stands for a byte 2.
 */
enum { SYMBOLS_PER_BYTE = 2 };

/* Bytes of all arrays of a long word, per symbol: a merge adds at most 2 pairs to the heap. */
enum { BYTES_PER_SYMBOL = sizeof(int32_t) + 3 * sizeof(uint32_t) + 3 * sizeof(uint64_t) };

static bool encode_long(bpe *b, const char *word, size_t length, token_list *to, char *error) {
    size_t room, bytes;
    if (!vjp_mul_size(length + 1, SYMBOLS_PER_BYTE, &room) || room > INT32_MAX ||
        !vjp_mul_size(room, BYTES_PER_SYMBOL, &bytes))
        return file_fail(error, "a word of %zu bytes is too long", length);
    if (bytes > b->scratch_room) {
        free(b->scratch);
        b->scratch = malloc(bytes);
        b->scratch_room = b->scratch ? bytes : 0;
    }
    if (!b->scratch) return file_fail(error, "there is no memory for a word of %zu bytes", length);
    long_word w = {.heap = b->scratch};
    w.ids = (int32_t *)(w.heap + 3 * room);
    w.next = (uint32_t *)(w.ids + room);
    w.before = w.next + room;
    w.rank = w.before + room;
    symbols s = {.ids = w.ids};
    add_characters(b, &s, word, length);
    size_t count = s.count <= BPE_SHORT ? merge_short(b, w.ids, s.count) : merge_long(b, &w, s.count);
    return token_list_add(to, w.ids, count) || file_fail(error, "there is no memory for %zu tokens", count);
}

static bool encode_new(bpe *b, const char *word, size_t length, token_list *to, char *error) {
    int32_t whole = b->whole_words ? vocabulary_find(&b->vocabulary, word, length) : -1;
    if (whole >= 0) return token_list_add(to, &whole, 1) || file_fail(error, "there is no memory for a token");
    if (length > BPE_SHORT / SYMBOLS_PER_BYTE) return encode_long(b, word, length, to, error);
    int32_t ids[BPE_SHORT + 1];
    symbols s = {.ids = ids};
    add_characters(b, &s, word, length);
    return token_list_add(to, ids, merge_short(b, ids, s.count)) ||
           file_fail(error, "there is no memory for the tokens of a word");
}

bool bpe_encode(bpe *b, const char *word, size_t length, token_list *to, char error[FILE_ERROR]) {
    if (!length) return true;
    if (length > CACHE_WORD) return encode_new(b, word, length, to, error);
    if (!b->cache) b->cache = calloc(1, sizeof *b->cache);
    if (!b->cache) return encode_new(b, word, length, to, error);
    uint64_t hash = text_hash(word, length);
    const cached *entry = b->cache->slot_count ? cache_slot(b->cache, hash, word, length) : NULL;
    if (entry && entry->length)
        return !entry->count || token_list_add(to, b->cache->tokens.ids + entry->tokens, entry->count) ||
               file_fail(error, "there is no memory for %u tokens", (unsigned)entry->count);
    size_t before = to->count;
    if (!encode_new(b, word, length, to, error)) return false;
    /* A word may have no tokens, and the list no memory. */
    const int32_t *added = to->count > before ? to->ids + before : NULL;
    cache_add(b->cache, hash, word, length, added, to->count - before);
    return true;
}

void bpe_free(bpe *b) {
    vocabulary_free(&b->vocabulary);
    free(b->merges);
    free(b->scratch);
    cache_free(b->cache);
    *b = (bpe){0};
}

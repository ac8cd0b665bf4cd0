/* SPDX-License-Identifier: MIT */
/*
 * Normal form C, by our own table (nfc_tables.h) instead of a library's: no optional dependency has it in a form that
 * the build could rely on. Nearly all characters are left alone; only a run of special ones (those that may change, or
 * join the one before) and the character before the run are decomposed, sorted by combining class, and composed again.
 */
#include "text/nfc.h"

#include "text/nfc_tables.h"
#include "text/utf8.h"

/* Hangul syllables are composed by arithmetic. */
enum { S_BASE = 0xac00, L_BASE = 0x1100, V_BASE = 0x1161, T_BASE = 0x11a7 };
enum { L_COUNT = 19, V_COUNT = 21, T_COUNT = 28, S_COUNT = L_COUNT * V_COUNT * T_COUNT };

typedef struct run {
    uint32_t *characters;
    size_t count, room;
    bool failed;
} run;

static bool is_special(uint32_t c) {
    return special_pages[special_page[c >> 8]][c >> 5 & 7] >> (c & 31) & 1;
}

static uint32_t combining_class(uint32_t c) {
    size_t low = 0, high = sizeof combining / sizeof combining[0];
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (c > combining[middle][1])
            low = middle + 1;
        else
            high = middle;
    }
    bool inside = low < sizeof combining / sizeof combining[0] && c >= combining[low][0];
    return inside ? combining[low][2] : 0;
}

/* The row of a table, sorted by its first `keys` columns, that begins with them; NULL: none. */
static const uint32_t *find_row(const uint32_t (*table)[3], size_t count, int keys, uint32_t a, uint32_t b) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const uint32_t *row = table[middle];
        if (row[0] < a || (row[0] == a && keys == 2 && row[1] < b))
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && table[low][0] == a && (keys == 1 || table[low][1] == b) ? table[low] : NULL;
}

static void push(run *r, uint32_t c) {
    if (r->count == r->room) {
        uint32_t *larger = list_grow(r->characters, r->count, 1, sizeof *larger, &r->room);
        if (!larger) r->failed = true;
        if (!larger) return;
        r->characters = larger;
    }
    r->characters[r->count++] = c;
}

static void push_decomposed(run *r, uint32_t c) {
    if (c >= S_BASE && c < S_BASE + S_COUNT) {
        uint32_t s = c - S_BASE;
        push(r, L_BASE + s / (V_COUNT * T_COUNT));
        push(r, V_BASE + s % (V_COUNT * T_COUNT) / T_COUNT);
        if (s % T_COUNT) push(r, T_BASE + s % T_COUNT);
        return;
    }
    const uint32_t *row = find_row(decompositions, sizeof decompositions / sizeof decompositions[0], 1, c, 0);
    if (!row) {
        push(r, c);
        return;
    }
    push_decomposed(r, row[1]); /* a few levels: the table has no cycles */
    if (row[2]) push_decomposed(r, row[2]);
}

/* Stable: by insertion, and by counting where a hostile text has a long run of marks. */
static bool sort_marks(uint32_t *c, size_t count) {
    enum { SHORT = 32 };
    if (count <= SHORT) {
        for (size_t i = 1; i < count; i++) {
            uint32_t moved = c[i], class = combining_class(moved);
            size_t at = i;
            for (; at && combining_class(c[at - 1]) > class; at--)
                c[at] = c[at - 1];
            c[at] = moved;
        }
        return true;
    }
    size_t begin[257] = {0}; /* classes are below 256 */
    uint32_t *sorted = malloc(count * sizeof *sorted);
    if (!sorted) return false;
    for (size_t i = 0; i < count; i++)
        begin[combining_class(c[i]) + 1]++;
    for (int i = 1; i < 257; i++)
        begin[i] += begin[i - 1];
    for (size_t i = 0; i < count; i++)
        sorted[begin[combining_class(c[i])]++] = c[i];
    memcpy(c, sorted, count * sizeof *c);
    free(sorted);
    return true;
}

static bool order_marks(run *r) {
    for (size_t i = 0; i < r->count;) {
        size_t end = i;
        while (end < r->count && combining_class(r->characters[end]))
            end++;
        if (end > i + 1 && !sort_marks(r->characters + i, end - i)) return false;
        i = end + 1;
    }
    return true;
}

/* The character that two compose; 0: none. */
static uint32_t composed(uint32_t a, uint32_t b) {
    if (a >= L_BASE && a < L_BASE + L_COUNT && b >= V_BASE && b < V_BASE + V_COUNT)
        return S_BASE + ((a - L_BASE) * V_COUNT + (b - V_BASE)) * T_COUNT;
    if (a >= S_BASE && a < S_BASE + S_COUNT && (a - S_BASE) % T_COUNT == 0 && b > T_BASE && b < T_BASE + T_COUNT)
        return a + (b - T_BASE);
    const uint32_t *row = find_row(compositions, sizeof compositions / sizeof compositions[0], 2, a, b);
    return row ? row[2] : 0;
}

static void compose(run *r) {
    size_t starter = SIZE_MAX, count = 0;
    uint32_t last = 0; /* the class of the character before, where it was kept after the starter */
    for (size_t i = 0; i < r->count; i++) {
        uint32_t c = r->characters[i], class = combining_class(c);
        bool adjacent = starter != SIZE_MAX && count == starter + 1;
        /* A mark is blocked from the starter by one of the same or a higher class between them. */
        uint32_t both = starter != SIZE_MAX && (adjacent || last < class) ? composed(r->characters[starter], c) : 0;
        if (both) {
            r->characters[starter] = both;
            continue;
        }
        if (!class) starter = count;
        last = class;
        r->characters[count++] = c;
    }
    r->count = count;
}

static bool add_run(run *r, const char *text, size_t length, byte_list *to) {
    r->count = 0;
    for (size_t i = 0, bytes; i < length; i += bytes)
        push_decomposed(r, utf8_first(text + i, &bytes));
    if (r->failed || !order_marks(r)) return false;
    compose(r);
    for (size_t i = 0; i < r->count; i++) {
        char c[4];
        if (!byte_list_add(to, c, utf8_write(r->characters[i], c))) return false;
    }
    return true;
}

bool nfc_normalize(const char *text, size_t length, byte_list *to) {
    size_t done = 0, before = 0; /* where the character before begins */
    run r = {0};
    bool ok = byte_list_reserve(to, length);
    for (size_t i = 0, bytes = 0; ok && i < length; before = i, i += bytes) {
        uint32_t c = utf8_first(text + i, &bytes);
        if (c < 0x300 || !is_special(c)) continue; /* 0x300 is the first special character */
        size_t end = i;
        for (; end < length && is_special(utf8_first(text + end, &bytes)); end += bytes)
            ;
        ok = byte_list_add(to, text + done, before - done) && add_run(&r, text + before, end - before, to);
        done = i = end;
        bytes = 0; /* the plain character there, if any, is the next one's starter */
    }
    ok = ok && byte_list_add(to, text + done, length - done);
    free(r.characters);
    return ok;
}

/*
 * JPEG files of every kind (tests/pictures, from make_jpeg.py) against the pixels that they hold; what is refused, and
 * by which name; files that are cut off or damaged at any bit; and files that ask for more work than they are worth.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "train/data/picture.h"
#include "train/data/picture_jpeg.h"

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

typedef struct sample {
    const char *name;
    int channels;
    bool by_pillow;
} sample;

static const sample samples[] = {
    {"grey", 1, false},
    {"grey_factors", 1, false},
    {"noise", 1, false},
    {"colours", 3, false},
    {"half", 3, false},
    {"quarter", 3, false},
    {"tall", 3, false},
    {"fourth", 3, false},
    {"mixed", 3, false},
    {"restart", 3, false},
    {"apart", 3, false},
    {"progressive", 3, false},
    {"progressive_restart", 3, false},
    {"rgb", 3, false},
    {"rgb_names", 3, false},
    {"pillow", 3, true},
    {"pillow_progressive", 3, true},
    {"pillow_grey", 1, true},
};

enum { HEIGHT = 18, WIDTH = 21, MOST_BYTES = 1 << 14 };

static const char *path_of(const char *prefix, const char *name, const char *suffix) {
    static char path[512];
    snprintf(path, sizeof path, "%s/tests/pictures/%s%s%s", VJP_SOURCE_DIR, prefix, name, suffix);
    return path;
}

static size_t read_file(const char *name, unsigned char bytes[MOST_BYTES]) {
    FILE *file = fopen(path_of("", name, ".jpg"), "rb");
    if (!file) fail_msg("%s.jpg is missing", name);
    size_t count = fread(bytes, 1, MOST_BYTES, file);
    fclose(file);
    return count;
}

/* Reads bytes from memory of exactly their size, so that a sanitizer sees the first byte past it. */
static bool read_exactly(const unsigned char *bytes, size_t count, picture *p, char error[TRAIN_ERROR]) {
    unsigned char *exact = malloc(count ? count : 1);
    memcpy(exact, bytes, count);
    *p = (picture){0};
    error[0] = 0;
    bool ok = picture_read_jpeg("file", exact, count, p, error);
    free(exact);
    if (!ok) assert_true(strncmp(error, "file: ", 6) == 0);
    return ok;
}

/*
 * make_jpeg.py rounds where the decoder does, so they differ only where the decoder's transform, in integers, rounds a
 * sample that lies within 0.01 of the middle to the other side: by 1 in a channel, in few places; the largest factor of
 * a channel in a colour is 1.772, which makes that 2. Pillow's own transform and interpolation are less exact: by up to
 * 1 each, which makes 1 + 2 * 1.772, below 5.
 */
static void every_kind_is_read(void **unused) {
    (void)unused;
    for (size_t i = 0; i < COUNT(samples); i++) {
        const sample *s = &samples[i];
        char error[TRAIN_ERROR];
        picture have, want;
        if (!picture_read(path_of("", s->name, ".jpg"), &have, error)) fail_msg("%s", error);
        if (!picture_read(path_of("jpeg_", s->name, s->channels == 1 ? ".pgm" : ".ppm"), &want, error))
            fail_msg("%s", error);
        assert_int_equal(have.height, HEIGHT);
        assert_int_equal(have.width, WIDTH);
        assert_int_equal(have.channels, s->channels);
        assert_int_equal(want.channels, s->channels);
        int most = s->by_pillow ? (s->channels == 1 ? 1 : 4) : s->channels == 1 ? 1 : 2, other = 0;
        int count = HEIGHT * WIDTH * s->channels;
        for (int e = 0; e < count; e++) {
            int difference = abs(have.pixels[e] - want.pixels[e]);
            other += difference > 0;
            if (difference > most)
                fail_msg("%s: row %d, column %d, channel %d is %d instead of %d", s->name, e / s->channels / WIDTH,
                         e / s->channels % WIDTH, e % s->channels, have.pixels[e], want.pixels[e]);
        }
        if (!s->by_pillow && other * 50 > count) fail_msg("%s: %d of %d numbers are others", s->name, other, count);
        picture_free(&have);
        picture_free(&want);
    }
}

static void damaged_files_are_refused(void **unused) {
    (void)unused;
    unsigned char bytes[MOST_BYTES];
    for (size_t i = 0; i < COUNT(samples); i++) {
        char error[TRAIN_ERROR];
        picture p;
        size_t count = read_file(samples[i].name, bytes);
        for (size_t cut = 2; cut < count; cut++)
            if (read_exactly(bytes, cut, &p, error)) fail_msg("%s: read though %zu bytes long", samples[i].name, cut);
        for (size_t at = 2; at < count; at++)
            for (int bit = 0; bit < 8; bit++) {
                bytes[at] ^= (unsigned char)(1 << bit);
                read_exactly(bytes, count, &p, error);
                picture_free(&p);
                bytes[at] ^= (unsigned char)(1 << bit);
            }
    }
}

/* ---- What is refused, and how it is said ------------------------------------------------------------- */

/* Where the segment of this kind is. */
static size_t find(const unsigned char *bytes, size_t count, int kind) {
    for (size_t at = 2; at + 3 < count; at += 2 + (size_t)(bytes[at + 2] << 8 | bytes[at + 3]))
        if (bytes[at + 1] == kind) return at;
    fail_msg("there is no segment %02x", kind);
    return 0;
}

static void other_kinds_are_named(void **unused) {
    (void)unused;
    enum { FRAME = 0xc0, STEPS = 0xdb, CODES = 0xc4, SCAN = 0xda };
    static const struct {
        const char *name;
        int segment, at, value; /* this byte of it becomes that */
        const char *says;
    } rows[] = {
        {"grey", FRAME, 1, 0xc3, "a lossless JPEG"},
        {"grey", FRAME, 1, 0xc5, "a hierarchical JPEG"},
        {"grey", FRAME, 1, 0xc9, "arithmetic codes"},
        {"grey", FRAME, 1, 0xca, "arithmetic codes"},
        {"grey", FRAME, 1, 0xcc, "arithmetic codes"},
        {"grey", FRAME, 1, 0xc2, "the head of a scan is damaged"},
        {"grey", FRAME, 1, 0xfe, "pixels before it says how many"},
        {"grey", FRAME, 4, 12, "12 bits a sample"},
        {"grey", FRAME, 4, 16, "samples have 8 bits"},
        {"grey", FRAME, 6, 0, "told only behind its pixels"},
        {"grey", FRAME, 8, 0, "its head is damaged"},
        {"grey", FRAME, 9, 2, "channels are 1 or 3"},
        {"grey", FRAME, 9, 3, "its head is damaged"},
        {"grey", FRAME, 6, 40, "its pixels are damaged"}, /* more rows than there are */
        {"grey", FRAME, 6, 8, "its pixels are damaged"},  /* fewer */
        {"colours", FRAME, 11, 0x51, "factors of sampling are 1 to 4"},
        {"colours", FRAME, 11, 0x10, "factors of sampling are 1 to 4"},
        {"colours", FRAME, 12, 4, "tables 0 to 3"},
        {"colours", FRAME, 12, 3, "table of steps is missing"},
        {"colours", FRAME, 13, 1, "a name twice"},
        {"colours", FRAME, 11, 0x44, "more than 10 blocks in a group"},
        {"grey", STEPS, 4, 0x20, "a table of steps is damaged"},
        {"grey", STEPS, 4, 0x10, "a table of steps is damaged"},
        {"grey", STEPS, 4, 0x04, "a table of steps is damaged"},
        {"grey", STEPS, 4, 0x01, "table of steps is missing"},
        {"grey", CODES, 4, 0x20, "a Huffman code is damaged"},
        {"grey", CODES, 5, 3, "a Huffman code is damaged"},
        {"grey", CODES, 20, 255, "a Huffman code is damaged"},
        {"grey", CODES, 4, 0x03, "Huffman code is missing"},
        {"grey", SCAN, 4, 0, "the head of a scan is damaged"},
        {"grey", SCAN, 4, 2, "the head of a scan is damaged"},
        {"grey", SCAN, 5, 9, "a channel that there is not"},
        {"grey", SCAN, 6, 0x50, "Huffman code is missing"},
        {"grey", SCAN, 7, 1, "the head of a scan is damaged"},
        {"colours", SCAN, 7, 1, "in no order"},
        {"grey", SCAN, 1, 0xd9, "a channel has no scan"},
        {"grey", FRAME, 1, 0xd0, "a marker where none may be"},
        {"grey", FRAME, 0, 0x00, "something between its segments"},
    };
    unsigned char bytes[MOST_BYTES];
    char error[TRAIN_ERROR];
    picture p;
    for (size_t i = 0; i < COUNT(rows); i++) {
        size_t count = read_file(rows[i].name, bytes);
        bytes[find(bytes, count, rows[i].segment) + (size_t)rows[i].at] = (unsigned char)rows[i].value;
        if (read_exactly(bytes, count, &p, error)) fail_msg("row %zu is read", i);
        if (!strstr(error, rows[i].says)) fail_msg("row %zu: \"%s\"", i, error);
        picture_free(&p);
    }
    size_t count = read_file("pillow_cmyk", bytes);
    assert_false(read_exactly(bytes, count, &p, error));
    assert_non_null(strstr(error, "four channels (CMYK)"));
    static const unsigned char nothing[] = {0xff, 0xd8, 0xff, 0xd9};
    assert_false(read_exactly(nothing, sizeof nothing, &p, error));
    assert_non_null(strstr(error, "no picture in it"));
}

/* A few bytes that claim to be 65535 x 65535 pixels are no reason to ask for 25 GB. */
static void sizes_are_not_believed(void **unused) {
    (void)unused;
    unsigned char bytes[MOST_BYTES];
    char error[TRAIN_ERROR];
    picture p;
    size_t count = read_file("colours", bytes);
    memset(bytes + find(bytes, count, 0xc0) + 5, 0xff, 4);
    assert_false(read_exactly(bytes, count, &p, error));
    if (!strstr(error, "too short for its 65535 x 65535 pixels")) fail_msg("\"%s\"", error);
}

/* ---- Scans of a progressive file --------------------------------------------------------------------- */

typedef struct band {
    int first, last, high, low;
} band;

/* A grey block, in these scans; each says that there is nothing more. */
static size_t write_scans(unsigned char *to, const band *bands, size_t count) {
    static const unsigned char head[] = {
        0xff, 0xd8, 0xff, 0xc2, 0, 11, 8, 0, 8, 0, 8, 1, 1, 0x11, 0,                      /* 8 x 8, progressive */
        0xff, 0xc4, 0,    38,   0, 1,  0, 0, 0, 0, 0, 0, 0, 0,    0, 0, 0, 0, 0, 0, 0, 0, /* the code 0 is symbol 0, */
        0x10, 1,    0,    0,    0, 0,  0, 0, 0, 0, 0, 0, 0, 0,    0, 0, 0, 0,             /* in both codes */
        0xff, 0xdb, 0,    67,   0};
    unsigned char *at = to;
    memcpy(at, head, sizeof head);
    at += sizeof head;
    memset(at, 1, 64);
    at += 64;
    for (size_t i = 0; i < count; i++) {
        const band *b = &bands[i];
        const unsigned char scan[] = {0xff,
                                      0xda,
                                      0,
                                      8,
                                      1,
                                      1,
                                      0,
                                      (unsigned char)b->first,
                                      (unsigned char)b->last,
                                      (unsigned char)(b->high << 4 | b->low),
                                      0x7f};
        memcpy(at, scan, sizeof scan);
        at += sizeof scan;
    }
    *at++ = 0xff;
    *at++ = 0xd9;
    return (size_t)(at - to);
}

static void scans_have_an_order(void **unused) {
    (void)unused;
    static const struct {
        band bands[4];
        size_t count;
        const char *says; /* NULL: it is read */
    } rows[] = {
        {{{0, 0, 0, 0}}, 1, NULL},
        {{{0, 0, 0, 1}, {1, 63, 0, 2}, {1, 63, 2, 1}, {0, 0, 1, 0}}, 4, NULL},
        {{{0, 0, 0, 13}, {1, 5, 0, 0}, {6, 63, 0, 0}}, 3, NULL},
        {{{1, 63, 0, 0}}, 1, "a band before the mean"},
        {{{0, 0, 0, 0}, {0, 0, 0, 0}}, 2, "some bits twice or never"},
        {{{0, 0, 0, 2}, {0, 0, 1, 0}}, 2, "some bits twice or never"},
        {{{0, 0, 0, 0}, {1, 9, 0, 0}, {9, 63, 0, 0}}, 3, "some bits twice or never"},
        {{{0, 0, 0, 0}, {1, 63, 1, 0}}, 2, "some bits twice or never"},
        {{{0, 0, 0, 2}, {0, 0, 2, 0}}, 2, "the head of a scan is damaged"},
        {{{0, 0, 0, 14}}, 1, "the head of a scan is damaged"},
        {{{0, 5, 0, 0}}, 1, "the head of a scan is damaged"},
        {{{0, 0, 0, 0}, {5, 4, 0, 0}}, 2, "the head of a scan is damaged"},
        {{{0, 0, 0, 0}, {5, 64, 0, 0}}, 2, "the head of a scan is damaged"},
    };
    unsigned char bytes[MOST_BYTES];
    char error[TRAIN_ERROR];
    picture p;
    for (size_t i = 0; i < COUNT(rows); i++) {
        size_t count = write_scans(bytes, rows[i].bands, rows[i].count);
        bool ok = read_exactly(bytes, count, &p, error);
        if (ok != !rows[i].says || (!ok && !strstr(error, rows[i].says))) fail_msg("row %zu: \"%s\"", i, error);
        if (ok) assert_int_equal(p.pixels[63], 128);
        picture_free(&p);
    }
    /* Every bit of every coefficient in a scan of its own would be 896 of them. */
    band many[257] = {{0, 0, 0, 0}};
    for (int i = 1; i < 257; i++)
        many[i] = (band){1 + (i - 1) / 14, 1 + (i - 1) / 14, (i - 1) % 14 ? 14 - (i - 1) % 14 : 0, 13 - (i - 1) % 14};
    assert_true(read_exactly(bytes, write_scans(bytes, many, 256), &p, error));
    picture_free(&p);
    assert_false(read_exactly(bytes, write_scans(bytes, many, 257), &p, error));
    assert_non_null(strstr(error, "more than 256 scans"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_is_read),    cmocka_unit_test(damaged_files_are_refused),
        cmocka_unit_test(other_kinds_are_named), cmocka_unit_test(sizes_are_not_believed),
        cmocka_unit_test(scans_have_an_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

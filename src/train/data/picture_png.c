/*
 * PNG, as much of it as data sets use: 8 bits a channel, grey, colours, a palette, with or without transparency, not
 * interlaced. The pixels are compressed by deflate (RFC 1951) inside zlib's frame, and each row is written as the
 * difference to what is left of it and above it. Checksums are not compared: a broken file ends too early or too late.
 */
#include "train/data/picture_png.h"

#include <stdlib.h>
#include <string.h>

/* ---- Deflate ----------------------------------------------------------------------------------------- */

enum { MOST_BITS = 15, LITERALS = 288, DISTANCES = 30, LENGTH_CODES = 19 };

typedef struct inflating {
    const unsigned char *in;
    size_t in_count, at;
    uint32_t bits;
    int held;
    unsigned char *out;
    size_t out_count, done;
    bool bad;
} inflating;

/* A code by its lengths: how many codes there are of each length, and the symbols in the order of their codes. */
typedef struct huffman {
    uint16_t count[MOST_BITS + 1], symbol[LITERALS];
} huffman;

static uint32_t take_bits(inflating *z, int count) {
    while (z->held < count) {
        if (z->at == z->in_count) {
            z->bad = true;
            return 0;
        }
        z->bits |= (uint32_t)z->in[z->at++] << z->held;
        z->held += 8;
    }
    uint32_t value = z->bits & ((1u << count) - 1);
    z->bits >>= count;
    z->held -= count;
    return value;
}

/* False: more codes than so many bits can tell apart. */
static bool make_code(huffman *h, const unsigned char *length, int symbols) {
    uint16_t next[MOST_BITS + 2] = {0};
    memset(h, 0, sizeof *h);
    for (int i = 0; i < symbols; i++)
        h->count[length[i]]++;
    h->count[0] = 0;
    int left = 1;
    for (int bits = 1; bits <= MOST_BITS; bits++) {
        left = 2 * left - h->count[bits];
        if (left < 0) return false;
        next[bits + 1] = (uint16_t)(next[bits] + h->count[bits]);
    }
    for (int i = 0; i < symbols; i++)
        if (length[i]) h->symbol[next[length[i]]++] = (uint16_t)i;
    return true;
}

static int take_symbol(inflating *z, const huffman *h) {
    int code = 0, first = 0, index = 0;
    for (int bits = 1; bits <= MOST_BITS && !z->bad; bits++) {
        code |= (int)take_bits(z, 1);
        int count = h->count[bits];
        if (code - first < count) return h->symbol[index + code - first];
        index += count;
        first = (first + count) << 1;
        code <<= 1;
    }
    z->bad = true;
    return 0;
}

static void put_byte(inflating *z, unsigned char byte) {
    if (z->done == z->out_count)
        z->bad = true;
    else
        z->out[z->done++] = byte;
}

static void repeat(inflating *z, int length, size_t distance) {
    if (distance > z->done) z->bad = true;
    for (int i = 0; i < length && !z->bad; i++)
        put_byte(z, z->out[z->done - distance]);
}

static void inflate_codes(inflating *z, const huffman *literals, const huffman *distances) {
    static const uint16_t length_base[] = {3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                           31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
    static const uint8_t length_more[] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                          2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
    static const uint16_t distance_base[] = {1,    2,    3,    4,    5,    7,    9,    13,    17,    25,
                                             33,   49,   65,   97,   129,  193,  257,  385,   513,   769,
                                             1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
    static const uint8_t distance_more[] = {0, 0, 0, 0, 1, 1, 2, 2,  3,  3,  4,  4,  5,  5,  6,
                                            6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};
    while (!z->bad) {
        int symbol = take_symbol(z, literals);
        if (z->bad || symbol == 256) return;
        if (symbol < 256) {
            put_byte(z, (unsigned char)symbol);
            continue;
        }
        symbol -= 257;
        if (symbol >= 29) break;
        int length = length_base[symbol] + (int)take_bits(z, length_more[symbol]);
        int far = take_symbol(z, distances);
        if (far >= DISTANCES) break;
        repeat(z, length, distance_base[far] + (size_t)take_bits(z, distance_more[far]));
    }
    z->bad = true;
}

static void inflate_fixed(inflating *z) {
    unsigned char length[LITERALS];
    huffman literals, distances;
    for (int i = 0; i < LITERALS; i++)
        length[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
    make_code(&literals, length, LITERALS);
    memset(length, 5, DISTANCES);
    make_code(&distances, length, DISTANCES);
    inflate_codes(z, &literals, &distances);
}

static void inflate_own(inflating *z) {
    static const uint8_t order[LENGTH_CODES] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
    unsigned char length[LITERALS + 32] = {0}, code_length[LENGTH_CODES] = {0};
    huffman codes, literals, distances;
    int literal_count = (int)take_bits(z, 5) + 257, distance_count = (int)take_bits(z, 5) + 1;
    int code_count = (int)take_bits(z, 4) + 4;
    for (int i = 0; i < code_count; i++)
        code_length[order[i]] = (unsigned char)take_bits(z, 3);
    if (z->bad || literal_count > LITERALS || !make_code(&codes, code_length, LENGTH_CODES)) {
        z->bad = true;
        return;
    }
    for (int i = 0; i < literal_count + distance_count && !z->bad;) {
        int symbol = take_symbol(z, &codes), times = 1;
        unsigned char value = (unsigned char)symbol;
        if (symbol == 16) {
            z->bad = z->bad || i == 0;
            value = i ? length[i - 1] : 0;
            times = 3 + (int)take_bits(z, 2);
        } else if (symbol > 16) {
            value = 0;
            times = symbol == 17 ? 3 + (int)take_bits(z, 3) : 11 + (int)take_bits(z, 7);
        }
        if (i + times > literal_count + distance_count) z->bad = true;
        for (; times > 0 && !z->bad; times--)
            length[i++] = value;
    }
    if (!z->bad && make_code(&literals, length, literal_count) &&
        make_code(&distances, length + literal_count, distance_count))
        inflate_codes(z, &literals, &distances);
    else
        z->bad = true;
}

static void inflate_stored(inflating *z) {
    z->bits = 0;
    z->held = 0;
    if (z->in_count - z->at < 4) {
        z->bad = true;
        return;
    }
    size_t length = z->in[z->at] | (size_t)z->in[z->at + 1] << 8;
    z->at += 4;
    if (z->in_count - z->at < length || z->out_count - z->done < length) {
        z->bad = true;
        return;
    }
    memcpy(z->out + z->done, z->in + z->at, length);
    z->done += length;
    z->at += length;
}

/* zlib's two bytes, then blocks until the last one. Whether they fill `out` exactly. */
static bool inflate_all(inflating *z) {
    if (z->in_count < 2 || (z->in[0] & 15) != 8 || z->in[1] & 32) return false;
    z->at = 2;
    for (bool last = false; !last && !z->bad;) {
        last = take_bits(z, 1);
        switch (take_bits(z, 2)) {
        case 0: inflate_stored(z); break;
        case 1: inflate_fixed(z); break;
        case 2: inflate_own(z); break;
        default: z->bad = true;
        }
    }
    return !z->bad && z->done == z->out_count;
}

/* A byte of deflate stands for 1032 at most: a code of two bits for 258 bytes. */
static const size_t MOST_OF_A_BYTE = 1032;

/* ---- PNG --------------------------------------------------------------------------------------------- */

typedef struct png {
    int64_t width, height;
    int stored; /* channels in the file: 1 to 4 */
    int kept;   /* channels of the picture: 1 or 3 */
    bool palette;
    unsigned char colour[256][3];
    unsigned char *data; /* all IDAT chunks, one behind the other */
    size_t data_bytes;
} png;

static uint32_t big_endian(const unsigned char *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static bool read_header(const char *path, const unsigned char *at, uint32_t length, png *f, char error[TRAIN_ERROR]) {
    if (length != 13) return train_fail(error, "%s: its header has %u bytes", path, length);
    f->width = big_endian(at);
    f->height = big_endian(at + 4);
    if (f->width < 1 || f->height < 1 || f->width > 65535 || f->height > 65535)
        return train_fail(error, "%s: it is %lld x %lld", path, (long long)f->width, (long long)f->height);
    static const int channels[] = {1, 0, 3, 1, 2, 0, 4};
    int type = at[9];
    if (at[8] != 8 || type > 6 || !channels[type] || at[12])
        return train_fail(error, "%s: only PNG with 8 bits a channel and not interlaced is read", path);
    f->stored = channels[type];
    f->palette = type == 3;
    f->kept = type == 0 || type == 4 ? 1 : 3;
    return true;
}

static bool read_chunks(const char *path, const unsigned char *bytes, size_t count, png *f, char error[TRAIN_ERROR]) {
    size_t at = 8;
    bool ended = false;
    while (!ended) {
        if (count - at < 12) return train_fail(error, "%s: it ends too early", path);
        uint32_t length = big_endian(bytes + at);
        const unsigned char *kind = bytes + at + 4, *body = kind + 4;
        if (length > count - at - 12) return train_fail(error, "%s: it ends inside a chunk", path);
        if (memcmp(kind, "IHDR", 4) == 0 && !read_header(path, body, length, f, error)) return false;
        if (memcmp(kind, "PLTE", 4) == 0 && length <= sizeof f->colour) memcpy(f->colour, body, length);
        if (memcmp(kind, "IDAT", 4) == 0) {
            memcpy(f->data + f->data_bytes, body, length);
            f->data_bytes += length;
        }
        ended = memcmp(kind, "IEND", 4) == 0;
        at += length + 12;
    }
    return f->width > 0 || train_fail(error, "%s: it has no header", path);
}

static int nearest(int left, int up, int corner) {
    int guess = left + up - corner, a = abs(guess - left), b = abs(guess - up), c = abs(guess - corner);
    return a <= b && a <= c ? left : b <= c ? up : corner;
}

/* Rows are differences: adds back what they were taken from. False: an unknown kind of difference. */
static bool restore_rows(unsigned char *rows, const png *f) {
    int64_t width = f->width * f->stored;
    for (int64_t y = 0; y < f->height; y++) {
        unsigned char *row = rows + y * (width + 1) + 1;
        const unsigned char *above = y ? row - width - 1 : NULL;
        int kind = row[-1];
        if (kind > 4) return false;
        for (int64_t x = 0; x < width; x++) {
            int left = x >= f->stored ? row[x - f->stored] : 0, up = above ? above[x] : 0;
            int corner = above && x >= f->stored ? above[x - f->stored] : 0;
            int from = kind == 1   ? left
                       : kind == 2 ? up
                       : kind == 3 ? (left + up) / 2
                       : kind == 4 ? nearest(left, up, corner)
                                   : 0;
            row[x] = (unsigned char)(row[x] + from);
        }
    }
    return true;
}

static void keep_channels(const unsigned char *rows, const png *f, picture *p) {
    unsigned char *to = p->pixels;
    for (int64_t y = 0; y < f->height; y++) {
        const unsigned char *from = rows + y * (f->width * f->stored + 1) + 1;
        for (int64_t x = 0; x < f->width; x++, from += f->stored)
            for (int c = 0; c < f->kept; c++)
                *to++ = f->palette ? f->colour[from[0]][c] : from[c];
    }
}

static bool decode(const char *path, const png *f, unsigned char *rows, size_t row_bytes, picture *p,
                   char error[TRAIN_ERROR]) {
    inflating z = {.in = f->data, .in_count = f->data_bytes, .out = rows, .out_count = row_bytes};
    if (!inflate_all(&z) || !restore_rows(rows, f)) return train_fail(error, "%s: its pixels are damaged", path);
    p->height = f->height;
    p->width = f->width;
    p->channels = f->kept;
    p->pixels = malloc((size_t)(p->height * p->width * p->channels));
    if (!p->pixels) return train_fail(error, "%s: no memory for its pixels", path);
    keep_channels(rows, f, p);
    return true;
}

bool picture_read_png(const char *path, const unsigned char *bytes, size_t count, picture *p, char error[TRAIN_ERROR]) {
    png f = {.data = malloc(count)};
    bool ok = f.data ? read_chunks(path, bytes, count, &f, error) : train_fail(error, "%s: no memory for it", path);
    size_t row_bytes = ok ? (size_t)(f.height * (f.width * f.stored + 1)) : 0;
    if (ok && row_bytes / MOST_OF_A_BYTE > f.data_bytes)
        ok = train_fail(error, "%s: it is too short for its %lld x %lld pixels", path, (long long)f.width,
                        (long long)f.height);
    unsigned char *rows = ok ? malloc(row_bytes) : NULL;
    if (ok && !rows) ok = train_fail(error, "%s: no memory for its pixels", path);
    ok = ok && decode(path, &f, rows, row_bytes, p, error);
    free(rows);
    free(f.data);
    return ok;
}

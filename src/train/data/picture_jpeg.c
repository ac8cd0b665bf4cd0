/*
 * JPEG (ITU T.81), as much of it as data sets use: Huffman codes, baseline, extended or progressive, 8 bits, grey or
 * three channels of any sampling, restart intervals. Arithmetic codes, lossless and hierarchical files, 12 bits and
 * CMYK are refused by name. How a camera was held (Exif) changes nothing.
 *
 * A file is a row of segments, each begun by a marker: 0xff and a kind. Tables come first, then the frame, which tells
 * the sizes, then scans, each with coefficients of some channels in Huffman codes: all 64 of a block at once, or, in a
 * progressive file, a band of them, and their upper bits first. All coefficients are kept until the end; then each
 * block of 8 x 8 is transformed, and small channels are stretched to the picture's size.
 *
 * Files may lie: every length is checked, memory is a few KiB at most and the time some thousand blocks for each byte
 * of the file, and what does not end where it should is refused.
 */
#include "train/data/picture_jpeg.h"

#include <stdlib.h>
#include <string.h>

enum { BLOCK = 64, SIDE = 8, MOST_CHANNELS = 3, TABLES = 4, MOST_BITS = 16, LARGEST_FACTOR = 4, MOST_BLOCKS = 10 };

/* A progressive file has some ten scans. The standard allows hundreds, each of which may visit every block for a few
 * bytes. */
enum { MOST_SCANS = 256 };

enum marker {
    SOF0 = 0xc0,
    SOF1 = 0xc1,
    SOF2 = 0xc2,
    DHT = 0xc4,
    RST0 = 0xd0,
    SOI = 0xd8,
    EOI = 0xd9,
    SOS = 0xda,
    DQT = 0xdb,
    DRI = 0xdd,
    APP14 = 0xee
};

/* A code by how many codes there are of each length, and the symbols in the order of their codes; and for the first 8
 * bits of what comes, length << 8 | symbol, 0 for codes that are longer. */
typedef struct huffman {
    bool there;
    uint16_t fast[256];
    uint8_t count[MOST_BITS + 1], symbol[256];
} huffman;

typedef struct channel {
    int id, h, v, table;
    int64_t width, height;              /* in samples */
    int64_t blocks_across, blocks_down; /* that hold samples; */
    int64_t across, down;               /* and with those that fill up a group of blocks */
    int16_t *coefficient;               /* [down, across, 64] */
    unsigned char *plane;               /* [8 down, 8 across] */
    uint16_t quantum[BLOCK];            /* as at the channel's first scan */
    int8_t low[BLOCK];                  /* bits of the coefficient that are still missing; -1: all */
    int before;                         /* the DC of the block before */
    const huffman *dc, *ac;             /* of this scan */
} channel;

typedef struct jpeg {
    const char *path;
    char *error;
    const unsigned char *bytes;
    size_t count, at;
    bool progressive, framed, adobe, adobe_coloured;
    int64_t width, height;
    channel channels[MOST_CHANNELS];
    int channel_count, most_h, most_v, scans;
    uint16_t quantum[TABLES][BLOCK];
    bool quantum_there[TABLES];
    huffman dc[TABLES], ac[TABLES];
    int restart;
    /* A scan. */
    channel *part[MOST_CHANNELS];
    int parts, first, last, high, low;
    int64_t skipped; /* blocks whose band ends here: the run of a progressive scan */
    uint64_t bits;
    int held;
    bool bad;
} jpeg;

/* Where the coefficients lie in the order in which they are stored. */
static const uint8_t zigzag[BLOCK] = {0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,
                                      12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,  14, 21, 28,
                                      35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51,
                                      58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

static bool refuse(jpeg *j, const char *what) {
    return train_fail(j->error, "%s: %s", j->path, what);
}

static bool ends_early(jpeg *j) {
    return refuse(j, "it ends too early");
}

static int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* ---- Bits -------------------------------------------------------------------------------------------- */

/* A 0xff inside the codes is followed by a zero; any other is the next marker, which ends them. */
static bool take_byte(jpeg *j) {
    if (j->at >= j->count) return false;
    unsigned char byte = j->bytes[j->at];
    if (byte == 0xff && (j->at + 1 >= j->count || j->bytes[j->at + 1] != 0)) return false;
    j->at += byte == 0xff ? 2 : 1;
    j->bits = j->bits << 8 | byte;
    j->held += 8;
    return true;
}

static int take_bits(jpeg *j, int count) {
    while (j->held < count)
        if (!take_byte(j)) {
            j->bad = true;
            return 0;
        }
    j->held -= count;
    return (int)(j->bits >> j->held & ((1u << count) - 1));
}

static int take_symbol(jpeg *j, const huffman *h) {
    while (j->held < MOST_BITS && take_byte(j)) {
    }
    uint64_t ahead = j->held >= 8 ? j->bits >> (j->held - 8) : j->bits << (8 - j->held);
    int found = h->fast[ahead & 255];
    if (found && found >> 8 <= j->held) {
        j->held -= found >> 8;
        return found & 255;
    }
    int code = 0, first = 0, index = 0;
    for (int length = 1; length <= MOST_BITS && !j->bad; length++) {
        code |= take_bits(j, 1);
        if (code - first < h->count[length]) return h->symbol[index + code - first];
        index += h->count[length];
        first = (first + h->count[length]) << 1;
        code <<= 1;
    }
    j->bad = true;
    return 0;
}

/* A number of so many bits: the upper half of them are the positive ones. */
static int take_number(jpeg *j, int bits) {
    if (bits == 0) return 0;
    int value = take_bits(j, bits);
    return value < 1 << (bits - 1) ? value - (1 << bits) + 1 : value;
}

/* value * 2^low as a coefficient. */
static int16_t shifted(jpeg *j, int value) {
    int64_t large = (int64_t)value * (1 << j->low);
    if (large < -INT16_MAX || large > INT16_MAX) j->bad = true;
    return j->bad ? 0 : (int16_t)large;
}

/* ---- Blocks ------------------------------------------------------------------------------------------ */

static void read_dc(jpeg *j, channel *c, int16_t *block) {
    int bits = take_symbol(j, c->dc);
    if (bits > 15) j->bad = true;
    if (j->bad) return;
    c->before += take_number(j, bits);
    block[0] = shifted(j, c->before);
    if (j->bad) c->before = 0;
}

/* The coefficients from `first` on; a progressive file's may say that so many blocks more have none. */
static void read_ac(jpeg *j, channel *c, int16_t *block, int first, int last) {
    if (j->skipped) {
        j->skipped--;
        return;
    }
    for (int k = first; k <= last && !j->bad;) {
        int symbol = take_symbol(j, c->ac), zeros = symbol >> 4, bits = symbol & 15;
        if (bits == 0 && zeros < 15) {
            if (zeros && !j->progressive) j->bad = true;
            j->skipped = (1 << zeros) - 1 + take_bits(j, zeros);
            return;
        }
        k += zeros;
        if (k > last) j->bad = true;
        if (j->bad) return;
        if (bits) block[zigzag[k]] = shifted(j, take_number(j, bits));
        k++;
    }
}

/* One bit more of a coefficient that is there. */
static void refine(jpeg *j, int16_t *value) {
    if (take_bits(j, 1)) *value = (int16_t)(*value + (*value > 0 ? 1 << j->low : -(1 << j->low)));
}

/* The next bit of a band: of coefficients that are there it comes as it is; new ones are told as in read_ac(), the
 * zeros between them counted without those that are there. */
static void refine_ac(jpeg *j, channel *c, int16_t *block) {
    int k = j->first;
    while (k <= j->last && !j->skipped && !j->bad) {
        int symbol = take_symbol(j, c->ac), zeros = symbol >> 4, bits = symbol & 15, value = 0;
        if (bits > 1) j->bad = true;
        if (bits == 0 && zeros < 15) {
            j->skipped = (1 << zeros) + take_bits(j, zeros);
            break;
        }
        if (bits) value = take_bits(j, 1) ? 1 << j->low : -(1 << j->low);
        for (; k <= j->last; k++) {
            int16_t *at = &block[zigzag[k]];
            if (*at)
                refine(j, at);
            else if (zeros-- == 0)
                break;
        }
        if (k > j->last) j->bad = true;
        if (j->bad) return;
        block[zigzag[k++]] = (int16_t)value;
    }
    if (!j->skipped) return;
    for (; k <= j->last; k++)
        if (block[zigzag[k]]) refine(j, &block[zigzag[k]]);
    j->skipped--;
}

static void read_block(jpeg *j, channel *c, int64_t row, int64_t column) {
    int16_t *block = c->coefficient + (row * c->across + column) * BLOCK;
    if (!j->progressive) {
        read_dc(j, c, block);
        read_ac(j, c, block, 1, BLOCK - 1);
    } else if (j->first > 0) {
        if (j->high)
            refine_ac(j, c, block);
        else
            read_ac(j, c, block, j->first, j->last);
    } else if (!j->high) {
        read_dc(j, c, block);
    } else if (take_bits(j, 1)) {
        block[0] = (int16_t)(block[0] | 1 << j->low);
    }
}

/* ---- Scans ------------------------------------------------------------------------------------------- */

/* What is left of the last byte of the codes is filling; then comes a marker. */
static bool end_codes(jpeg *j) {
    if (j->bad || j->held >= 8 || j->skipped) return refuse(j, "its pixels are damaged");
    while (j->at + 1 < j->count && j->bytes[j->at] == 0xff && j->bytes[j->at + 1] == 0xff)
        j->at++;
    if (j->at + 1 >= j->count) return ends_early(j);
    if (j->bytes[j->at] != 0xff || j->bytes[j->at + 1] == 0) return refuse(j, "its pixels are damaged");
    j->bits = 0;
    j->held = 0;
    return true;
}

static bool pass_restart(jpeg *j, int64_t number) {
    if (!end_codes(j)) return false;
    if (j->bytes[j->at + 1] != RST0 + number % 8) return refuse(j, "its pixels are damaged: a restart is missing");
    j->at += 2;
    for (int i = 0; i < j->parts; i++)
        j->part[i]->before = 0;
    return true;
}

/* One channel alone goes block by block; several go by groups, each with h x v blocks of every one. */
static bool read_codes(jpeg *j) {
    bool alone = j->parts == 1;
    const channel *only = j->part[0];
    int64_t across = alone ? only->blocks_across : divide_up(j->width, SIDE * j->most_h);
    int64_t down = alone ? only->blocks_down : divide_up(j->height, SIDE * j->most_v);
    for (int i = 0; i < j->parts; i++)
        j->part[i]->before = 0;
    j->skipped = 0;
    j->bad = false;
    for (int64_t at = 0; at < across * down && !j->bad; at++) {
        if (j->restart && at && at % j->restart == 0 && !pass_restart(j, at / j->restart - 1)) return false;
        int64_t row = at / across, column = at % across;
        for (int i = 0; i < j->parts; i++) {
            channel *c = j->part[i];
            int h = alone ? 1 : c->h, v = alone ? 1 : c->v;
            for (int b = 0; b < h * v && !j->bad; b++)
                read_block(j, c, row * v + b / h, column * h + b % h);
        }
    }
    if (j->bad && j->at >= j->count) return ends_early(j);
    return end_codes(j);
}

/* Which bits of which coefficients the scan brings: each once, the upper ones first. */
static bool check_band(jpeg *j, channel *c) {
    if (c->low[0] == -1 && j->first > 0) return refuse(j, "its scans are in no order: a band before the mean");
    for (int k = j->first; k <= j->last; k++) {
        if (j->high ? c->low[k] != j->high : c->low[k] != -1)
            return refuse(j, "its scans are in no order: some bits twice or never");
        c->low[k] = (int8_t)j->low;
    }
    return true;
}

static bool begin_channel(jpeg *j, channel *c, int dc, int ac) {
    if (c->low[0] == -1) {
        if (!j->quantum_there[c->table]) return refuse(j, "a channel's table of steps is missing");
        memcpy(c->quantum, j->quantum[c->table], sizeof c->quantum);
    }
    bool needs_dc = j->first == 0 && !j->high, needs_ac = j->last > 0;
    if (dc >= TABLES || ac >= TABLES || (needs_dc && !j->dc[dc].there) || (needs_ac && !j->ac[ac].there))
        return refuse(j, "a scan's Huffman code is missing");
    c->dc = &j->dc[dc];
    c->ac = &j->ac[ac];
    return check_band(j, c);
}

static channel *find_channel(jpeg *j, int id) {
    for (int i = 0; i < j->channel_count; i++)
        if (j->channels[i].id == id) return &j->channels[i];
    return NULL;
}

static bool read_scan(jpeg *j, const unsigned char *s, size_t size) {
    if (!j->framed) return refuse(j, "it has pixels before it says how many");
    j->parts = size ? s[0] : 0;
    if (j->parts < 1 || j->parts > j->channel_count || size != 4 + 2 * (size_t)j->parts)
        return refuse(j, "the head of a scan is damaged");
    if (++j->scans > MOST_SCANS) return refuse(j, "it has more than 256 scans");
    const unsigned char *band = s + 1 + 2 * j->parts;
    j->first = band[0], j->last = band[1], j->high = band[2] >> 4, j->low = band[2] & 15;
    bool whole = j->first == 0 && j->last == BLOCK - 1 && j->high == 0 && j->low == 0;
    bool part = j->last < BLOCK && (j->first ? j->first <= j->last && j->parts == 1 : j->last == 0) && j->low <= 13 &&
                (j->high == 0 || j->high == j->low + 1);
    if (j->progressive ? !part : !whole) return refuse(j, "the head of a scan is damaged");
    int blocks = 0;
    for (int i = 0; i < j->parts; i++) {
        channel *c = j->part[i] = find_channel(j, s[1 + 2 * i]);
        if (!c) return refuse(j, "a scan is of a channel that there is not");
        blocks += c->h * c->v;
        if (!begin_channel(j, c, s[2 + 2 * i] >> 4, s[2 + 2 * i] & 15))
            return false; /* finds one that is there twice */
    }
    if (j->parts > 1 && blocks > MOST_BLOCKS) return refuse(j, "a scan has more than 10 blocks in a group");
    return read_codes(j);
}

/* ---- Tables ------------------------------------------------------------------------------------------ */

static bool read_steps(jpeg *j, const unsigned char *s, size_t size) {
    while (size > 0) {
        int wide = s[0] >> 4, table = s[0] & 15;
        size_t bytes = wide ? 2 * BLOCK : BLOCK;
        if (wide > 1 || table >= TABLES || size < 1 + bytes) return refuse(j, "a table of steps is damaged");
        for (int k = 0; k < BLOCK; k++) {
            const unsigned char *at = s + 1 + (wide ? 2 * k : k);
            j->quantum[table][zigzag[k]] = (uint16_t)(wide ? at[0] << 8 | at[1] : at[0]);
        }
        j->quantum_there[table] = true;
        s += 1 + bytes;
        size -= 1 + bytes;
    }
    return true;
}

/* False: more codes than so many bits can tell apart. */
static bool make_code(huffman *h, const unsigned char *counts, const unsigned char *symbols, int total) {
    *h = (huffman){.there = true};
    memcpy(h->symbol, symbols, (size_t)total);
    int left = 1, code = 0, index = 0;
    for (int length = 1; length <= MOST_BITS; length++) {
        h->count[length] = counts[length - 1];
        left = 2 * left - counts[length - 1];
        if (left < 0) return false;
        for (int i = 0; i < counts[length - 1]; i++, index++, code++)
            for (int fill = 0; length <= 8 && fill < 1 << (8 - length); fill++)
                h->fast[code << (8 - length) | fill] = (uint16_t)(length << 8 | symbols[index]);
        code <<= 1;
    }
    return true;
}

static bool read_huffman(jpeg *j, const unsigned char *s, size_t size) {
    while (size > 0) {
        int total = 0;
        for (int i = 0; i < MOST_BITS && size >= 1 + MOST_BITS; i++)
            total += s[1 + i];
        if (size < 1 + MOST_BITS || s[0] >> 4 > 1 || (s[0] & 15) >= TABLES || total > 256 ||
            size < 1 + MOST_BITS + (size_t)total)
            return refuse(j, "a Huffman code is damaged");
        huffman *h = &(s[0] >> 4 ? j->ac : j->dc)[s[0] & 15];
        if (!make_code(h, s + 1, s + 1 + MOST_BITS, total)) return refuse(j, "a Huffman code is damaged");
        s += 1 + MOST_BITS + total;
        size -= 1 + MOST_BITS + (size_t)total;
    }
    return true;
}

/* ---- The frame --------------------------------------------------------------------------------------- */

static void measure(const jpeg *j, channel *c) {
    c->width = divide_up(j->width * c->h, j->most_h);
    c->height = divide_up(j->height * c->v, j->most_v);
    c->blocks_across = divide_up(c->width, SIDE);
    c->blocks_down = divide_up(c->height, SIDE);
    c->across = divide_up(j->width, SIDE * j->most_h) * c->h;
    c->down = divide_up(j->height, SIDE * j->most_v) * c->v;
    memset(c->low, -1, sizeof c->low);
}

/* Room for all coefficients, which are 0 until a scan says otherwise. */
static bool make_room(jpeg *j) {
    int64_t blocks = 0;
    for (int i = 0; i < j->channel_count; i++) {
        measure(j, &j->channels[i]);
        blocks += j->channels[i].blocks_across * j->channels[i].blocks_down;
    }
    /* A block takes a bit at least; so a small file cannot ask for much memory. */
    if ((uint64_t)blocks > 8 * (uint64_t)j->count)
        return train_fail(j->error, "%s: it is too short for its %lld x %lld pixels", j->path, (long long)j->width,
                          (long long)j->height);
    for (int i = 0; i < j->channel_count; i++) {
        channel *c = &j->channels[i];
        c->coefficient = calloc((size_t)(c->across * c->down) * BLOCK, sizeof *c->coefficient);
        c->plane = malloc((size_t)(c->across * c->down) * BLOCK);
        if (!c->coefficient || !c->plane) return refuse(j, "no memory for its coefficients");
    }
    return true;
}

static bool read_frame(jpeg *j, const unsigned char *s, size_t size) {
    if (j->framed) return refuse(j, "it has two frames");
    if (size < 6) return refuse(j, "its head is damaged");
    if (s[0] == 12) return refuse(j, "it is a JPEG of 12 bits a sample; only 8 are read here");
    if (s[0] != 8) return refuse(j, "its head is damaged: samples have 8 bits");
    j->height = s[1] << 8 | s[2];
    j->width = s[3] << 8 | s[4];
    j->channel_count = s[5];
    if (j->channel_count == 4) return refuse(j, "it is a JPEG of four channels (CMYK); grey and three are read here");
    if (j->channel_count != 1 && j->channel_count != 3) return refuse(j, "its head is damaged: channels are 1 or 3");
    if (size != 6 + 3 * (size_t)j->channel_count || j->width < 1) return refuse(j, "its head is damaged");
    if (j->height < 1) return refuse(j, "its height is told only behind its pixels (DNL), which is not read here");
    j->most_h = j->most_v = 1;
    for (int i = 0; i < j->channel_count; i++) {
        const unsigned char *at = s + 6 + 3 * i;
        channel *c = &j->channels[i];
        if (find_channel(j, at[0]) && find_channel(j, at[0]) < c) return refuse(j, "its head is damaged: a name twice");
        *c = (channel){.id = at[0], .h = at[1] >> 4, .v = at[1] & 15, .table = at[2]};
        if (c->h < 1 || c->v < 1 || c->h > LARGEST_FACTOR || c->v > LARGEST_FACTOR || c->table >= TABLES)
            return refuse(j, "its head is damaged: factors of sampling are 1 to 4, tables 0 to 3");
        if (j->channel_count == 1) c->h = c->v = 1; /* relative to nothing */
        if (c->h > j->most_h) j->most_h = c->h;
        if (c->v > j->most_v) j->most_v = c->v;
    }
    return j->framed = make_room(j);
}

static bool refuse_kind(jpeg *j, int kind) {
    if (kind == 0xc3) return refuse(j, "it is a lossless JPEG, which is not read here");
    if (kind >= 0xc5 && kind <= 0xc7) return refuse(j, "it is a hierarchical JPEG, which is not read here");
    return refuse(j, "it is a JPEG with arithmetic codes, which is not read here");
}

/* ---- Segments ---------------------------------------------------------------------------------------- */

static bool read_segment(jpeg *j, int kind, const unsigned char *s, size_t size) {
    switch (kind) {
    case SOF0:
    case SOF1:
    case SOF2: j->progressive = kind == SOF2; return read_frame(j, s, size);
    case DHT: return read_huffman(j, s, size);
    case DQT: return read_steps(j, s, size);
    case SOS: return read_scan(j, s, size);
    case DRI:
        if (size != 2) return refuse(j, "its restart interval is damaged");
        j->restart = s[0] << 8 | s[1];
        return true;
    case APP14:
        if (size >= 12 && memcmp(s, "Adobe", 5) == 0) {
            j->adobe = true;
            j->adobe_coloured = s[11] != 0;
        }
        return true;
    default: return (kind >= SOF0 && kind <= 0xcf) ? refuse_kind(j, kind) : true; /* comments, Exif, ... */
    }
}

/* Up to the end of the picture. */
static bool read_segments(jpeg *j) {
    j->at = 2;
    for (;;) {
        if (j->at >= j->count) return ends_early(j);
        if (j->bytes[j->at++] != 0xff) return refuse(j, "there is something between its segments");
        while (j->at < j->count && j->bytes[j->at] == 0xff)
            j->at++;
        if (j->at >= j->count) return ends_early(j);
        int kind = j->bytes[j->at++];
        if (kind == EOI) return true;
        if (kind < SOF0 || (kind >= RST0 && kind <= SOI)) return refuse(j, "it has a marker where none may be");
        if (j->count - j->at < 2) return ends_early(j);
        size_t size = (size_t)(j->bytes[j->at] << 8 | j->bytes[j->at + 1]);
        if (size < 2) return refuse(j, "the length of a segment is damaged");
        if (j->count - j->at < size) return ends_early(j);
        const unsigned char *segment = j->bytes + j->at + 2;
        j->at += size;
        if (!read_segment(j, kind, segment, size - 2)) return false;
    }
}

/* ---- Pixels ------------------------------------------------------------------------------------------ */

/* 2^15 cos(k pi / 16) / 2; and, for k = 0, which is the mean's alone, that divided by sqrt(2). */
static int64_t wave(int k) {
    static const int16_t values[SIDE] = {11585, 16069, 15137, 13623, 11585, 9102, 6270, 3196};
    k %= 32;
    if (k > 16) k = 32 - k;
    return k < 8 ? values[k] : -(int64_t)values[16 - k];
}

static unsigned char clamped(int64_t value) {
    return (unsigned char)(value < 0 ? 0 : value > 255 ? 255 : value);
}

/* The inverse transform, columns and then rows, in integers that are rounded once, at the end. */
static void transform(const int16_t *coefficient, const uint16_t *quantum, const int64_t table[SIDE][SIDE],
                      unsigned char *to, int64_t stride) {
    /* Past any that a picture has; what a damaged file holds must not overflow. */
    static const int64_t most = 1 << 17;
    int64_t half[SIDE][SIDE] = {{0}};
    for (int k = 0; k < BLOCK; k++) {
        int64_t value = (int64_t)coefficient[k] * quantum[k];
        if (!value) continue;
        value = value > most ? most : value < -most ? -most : value;
        for (int y = 0; y < SIDE; y++)
            half[y][k % SIDE] += value * table[k / SIDE][y];
    }
    for (int y = 0; y < SIDE; y++)
        for (int x = 0; x < SIDE; x++) {
            int64_t sum = (128ll << 30) + (1 << 29);
            for (int u = 0; u < SIDE; u++)
                sum += half[y][u] * table[u][x];
            to[y * stride + x] = sum < 0 ? 0 : clamped(sum >> 30);
        }
}

static void transform_channel(channel *c) {
    int64_t table[SIDE][SIDE];
    for (int u = 0; u < SIDE; u++)
        for (int x = 0; x < SIDE; x++)
            table[u][x] = wave((2 * x + 1) * u);
    for (int64_t b = 0; b < c->across * c->down; b++) {
        int64_t row = b / c->across, column = b % c->across, stride = c->across * SIDE;
        transform(c->coefficient + b * BLOCK, c->quantum, table, c->plane + (row * stride + column) * SIDE, stride);
    }
}

/* Where a place among `most` lies among `own`, both from edge to edge: the sample before it, and how far behind that,
 * in parts of 2 * most. */
static int64_t place(int64_t at, int own, int most, int64_t size, int *behind, int64_t *next) {
    int64_t parts = (2 * at + 1) * own - most, whole = parts < 0 ? -1 : parts / (2 * most);
    *behind = (int)(parts - whole * 2 * most);
    *next = whole + 1 < size ? whole + 1 : size - 1;
    return whole < 0 ? 0 : whole < size ? whole : size - 1;
}

/* The sample of a channel at a pixel of the picture, between its four neighbours where the channel is smaller. */
static int sample(const jpeg *j, const channel *c, int64_t y, int64_t x) {
    int64_t stride = c->across * SIDE, right, below;
    if (c->h == j->most_h && c->v == j->most_v) return c->plane[y * stride + x];
    int across, down, wide = 2 * j->most_h, high = 2 * j->most_v;
    int64_t left = place(x, c->h, j->most_h, c->width, &across, &right);
    int64_t above = place(y, c->v, j->most_v, c->height, &down, &below);
    int upper = c->plane[above * stride + left] * (wide - across) + c->plane[above * stride + right] * across;
    int lower = c->plane[below * stride + left] * (wide - across) + c->plane[below * stride + right] * across;
    return (upper * (high - down) + lower * down + wide * high / 2) / (wide * high);
}

/* Y, Cb and Cr to red, green and blue, in parts of 2^16. */
static void to_colours(const int s[3], unsigned char *to) {
    int64_t y = (int64_t)s[0] * 65536 + 32768, cb = s[1] - 128, cr = s[2] - 128;
    const int64_t colour[3] = {y + 91881 * cr, y - 22554 * cb - 46802 * cr, y + 116130 * cb};
    for (int i = 0; i < 3; i++)
        to[i] = colour[i] < 0 ? 0 : clamped(colour[i] / 65536);
}

/* Red, green and blue themselves are stored where Adobe's segment says so, or the channels are called that. */
static bool is_coloured(const jpeg *j) {
    const channel *c = j->channels;
    if (j->adobe) return j->adobe_coloured;
    return !(c[0].id == 'R' && c[1].id == 'G' && c[2].id == 'B');
}

static bool make_pixels(jpeg *j, picture *p) {
    for (int i = 0; i < j->channel_count; i++)
        if (j->channels[i].low[0] == -1) return refuse(j, "a channel has no scan");
    p->height = j->height;
    p->width = j->width;
    p->channels = j->channel_count;
    p->pixels = malloc((size_t)(p->height * p->width * p->channels));
    if (!p->pixels) return refuse(j, "no memory for its pixels");
    for (int i = 0; i < j->channel_count; i++)
        transform_channel(&j->channels[i]);
    bool coloured = j->channel_count == 3 && is_coloured(j);
    unsigned char *to = p->pixels;
    for (int64_t y = 0; y < p->height; y++)
        for (int64_t x = 0; x < p->width; x++, to += p->channels) {
            int s[MOST_CHANNELS];
            for (int i = 0; i < j->channel_count; i++)
                s[i] = sample(j, &j->channels[i], y, x);
            if (coloured) {
                to_colours(s, to);
                continue;
            }
            for (int i = 0; i < j->channel_count; i++)
                to[i] = (unsigned char)s[i];
        }
    return true;
}

bool picture_read_jpeg(const char *path, const unsigned char *bytes, size_t count, picture *p,
                       char error[TRAIN_ERROR]) {
    jpeg *j = calloc(1, sizeof *j);
    if (!j) return train_fail(error, "%s: no memory to read it", path);
    j->path = path;
    j->error = error;
    j->bytes = bytes;
    j->count = count;
    bool ok = read_segments(j) && (j->framed || refuse(j, "there is no picture in it")) && make_pixels(j, p);
    for (int i = 0; i < MOST_CHANNELS; i++) {
        free(j->channels[i].coefficient);
        free(j->channels[i].plane);
    }
    free(j);
    return ok;
}

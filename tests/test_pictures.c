/* SPDX-License-Identifier: MIT */
/*
 * Pictures: PNG of every colour (tests/pictures, from make.py), JPEG, PGM and PPM; files that are cut off or damaged at
 * any byte, or too large; IDX sets and folders of classes, whole and broken; and the batches made of them.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "scratch.h"
#include "train/data/images.h"
#include "train/data/picture.h"

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

static unsigned char *read_file(const char *path, size_t *count) {
    unsigned char *bytes = malloc(1 << 16);
    FILE *file = fopen(path, "rb");
    if (!file) fail_msg("%s is missing", path);
    *count = fread(bytes, 1, 1 << 16, file);
    fclose(file);
    return bytes;
}

/* Decodes bytes in memory of exactly their size, so that a sanitizer sees the first byte past it. */
static bool parse_exactly(const unsigned char *bytes, size_t count, picture *p, char error[TRAIN_ERROR]) {
    unsigned char *exact = malloc(count ? count : 1);
    memcpy(exact, bytes, count);
    error[0] = 0;
    bool ok = picture_parse("file", exact, count, p, error);
    free(exact);
    if (!ok) assert_true(strncmp(error, "file: ", 6) == 0 && error[6] && !p->pixels);
    return ok;
}

static const char *sample_path(const char *name) {
    static char path[512];
    snprintf(path, sizeof path, "%s/tests/pictures/%s", VJP_SOURCE_DIR, name);
    return path;
}

/* A file that is cut off anywhere is refused; one with a flipped bit does no harm. */
static void require_damage_refused(const char *name) {
    char error[TRAIN_ERROR];
    picture p;
    size_t count;
    unsigned char *bytes = read_file(sample_path(name), &count);
    for (size_t cut = 0; cut < count; cut++)
        if (parse_exactly(bytes, cut, &p, error)) fail_msg("%s: read though only %zu bytes long", name, cut);
    for (size_t bit = 0; bit < 8 * count; bit++) {
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
        if (parse_exactly(bytes, count, &p, error)) picture_free(&p);
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
    free(bytes);
}

/* ---- PNG --------------------------------------------------------------------------------------------- */

typedef struct sample {
    const char *name;
    int channels;
} sample;

static const sample samples[] = {
    {"grey.png", 1},    {"grey_alpha.png", 1}, {"colours.png", 3},    {"colours_alpha.png", 3},
    {"palette.png", 3}, {"deep.png", 3},       {"interlaced.png", 3},
};

#ifdef VJP_HAVE_PNG
enum { HEIGHT = 10, WIDTH = 7 };

/* What make.py wrote. */
static int wanted(const sample *s, int y, int x, int c) {
    int value = (37 * y + 11 * x) % 251;
    if (strcmp(s->name, "palette.png") == 0) return c == 0 ? value : c == 1 ? 255 - value : 7 * value % 256;
    return (37 * y + 11 * x + 71 * c) % 251;
}

static void pngs_are_read(void **unused) {
    (void)unused;
    for (size_t i = 0; i < COUNT(samples); i++) {
        const sample *s = &samples[i];
        char error[TRAIN_ERROR];
        picture p;
        if (!picture_read(sample_path(s->name), &p, error)) fail_msg("%s", error);
        assert_int_equal(p.height, HEIGHT);
        assert_int_equal(p.width, WIDTH);
        assert_int_equal(p.channels, s->channels);
        for (int y = 0; y < HEIGHT; y++)
            for (int x = 0; x < WIDTH; x++)
                for (int c = 0; c < s->channels; c++)
                    if (p.pixels[(y * WIDTH + x) * s->channels + c] != wanted(s, y, x, c))
                        fail_msg("%s: row %d, column %d, channel %d is %d", s->name, y, x, c,
                                 p.pixels[(y * WIDTH + x) * s->channels + c]);
        picture_free(&p);
        require_damage_refused(s->name);
    }
}

static size_t put_big(unsigned char *to, uint32_t value);

/* The checksum of a PNG's chunk, which ends it. */
static void put_checksum(unsigned char *chunk, size_t body) {
    uint32_t crc = UINT32_MAX;
    for (size_t i = 4; i < 8 + body; i++) {
        crc ^= chunk[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    put_big(chunk + 8 + body, ~crc);
}

/* A header that gives another size than the pixels have; larger ones are refused before anything is allocated. */
static void png_sizes_are_limited(void **unused) {
    (void)unused;
    static const struct {
        uint32_t width, height;
        const char *says;
    } rows[] = {
        {40000, 40000, "it has 40000 x 40000 pixels; a picture has 1 to 67108864"},
        {1, 67108865, "it cannot be decoded"}, /* libpng's own limit is a million */
        {8193, 8192, "it has 8193 x 8192 pixels; a picture has 1 to 67108864"},
        {7, 11, "it cannot be decoded"},
        {0, 10, "it cannot be decoded"},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        char error[TRAIN_ERROR];
        picture p;
        size_t count;
        unsigned char *bytes = read_file(sample_path("colours.png"), &count);
        put_big(bytes + 16, rows[i].width);
        put_big(bytes + 20, rows[i].height);
        put_checksum(bytes + 8, 13);
        assert_false(parse_exactly(bytes, count, &p, error));
        if (!strstr(error, rows[i].says)) fail_msg("row %zu: \"%s\"", i, error);
        free(bytes);
    }
}
#else
static void png_is_refused(void **unused) {
    (void)unused;
    print_message("PNG: only its refusal is tested, this build is without libpng\n");
    for (size_t i = 0; i < COUNT(samples); i++) {
        char error[TRAIN_ERROR];
        picture p;
        assert_false(picture_read(sample_path(samples[i].name), &p, error));
        assert_non_null(strstr(error, "it is a PNG, which this vjp was built without (libpng)"));
    }
}
#endif

/* ---- JPEG -------------------------------------------------------------------------------------------- */

#ifdef VJP_HAVE_JPEG
/* Written and read by Pillow, which has the same library: the pixels must be the same. */
static void jpegs_are_read(void **unused) {
    (void)unused;
    static const char *const names[][2] = {{"pillow.jpg", "jpeg_pillow.ppm"},
                                           {"pillow_progressive.jpg", "jpeg_pillow_progressive.ppm"},
                                           {"pillow_grey.jpg", "jpeg_pillow_grey.pgm"}};
    for (size_t i = 0; i < COUNT(names); i++) {
        char error[TRAIN_ERROR];
        picture have, want;
        if (!picture_read(sample_path(names[i][0]), &have, error)) fail_msg("%s", error);
        if (!picture_read(sample_path(names[i][1]), &want, error)) fail_msg("%s", error);
        assert_true(have.height == want.height && have.width == want.width && have.channels == want.channels);
        assert_memory_equal(have.pixels, want.pixels, (size_t)(want.height * want.width * want.channels));
        picture_free(&have);
        picture_free(&want);
        require_damage_refused(names[i][0]);
    }
}

/* Where the first segment of this kind is. */
static size_t find_segment(const unsigned char *bytes, size_t count, int kind) {
    for (size_t at = 2; at + 3 < count; at += 2 + (size_t)(bytes[at + 2] << 8 | bytes[at + 3]))
        if (bytes[at + 1] == kind) return at;
    fail_msg("there is no segment %02x", kind);
    return 0;
}

static void jpegs_are_refused(void **unused) {
    (void)unused;
    enum { FRAME = 0xc0 };
    char error[TRAIN_ERROR];
    picture p;
    size_t count;
    unsigned char *bytes = read_file(sample_path("pillow_cmyk.jpg"), &count);
    assert_false(parse_exactly(bytes, count, &p, error));
    if (!strstr(error, "it has 4 channels; grey (1) and RGB (3) are read, CMYK is not")) fail_msg("\"%s\"", error);
    free(bytes);
    bytes = read_file(sample_path("pillow.jpg"), &count);
    size_t frame = find_segment(bytes, count, FRAME);
    for (int i = 0; i < 4; i += 2) { /* 16385 x 16385: must not allocate 800 MB */
        bytes[frame + 5 + (size_t)i] = 0x40;
        bytes[frame + 6 + (size_t)i] = 0x01;
    }
    assert_false(parse_exactly(bytes, count, &p, error));
    if (!strstr(error, "it has 16385 x 16385 pixels; a picture has 1 to 67108864")) fail_msg("\"%s\"", error);
    free(bytes);
}

/* A grey block of 8 x 8 whose mean comes in one scan, and each bit of each other coefficient in a scan of its own. */
static size_t write_scans(unsigned char *to, int scans) {
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
    for (int i = 0; i < scans; i++) {
        int coefficient = i ? 1 + (i - 1) / 14 : 0, bit = 13 - (i - 1) % 14;
        int high = i && bit < 13 ? bit + 1 : 0, low = i ? bit : 0;
        const unsigned char scan[] = {0xff,
                                      0xda,
                                      0,
                                      8,
                                      1,
                                      1,
                                      0,
                                      (unsigned char)coefficient,
                                      (unsigned char)coefficient,
                                      (unsigned char)(high << 4 | low),
                                      0x7f};
        memcpy(at, scan, sizeof scan);
        at += sizeof scan;
    }
    *at++ = 0xff;
    *at++ = 0xd9;
    return (size_t)(at - to);
}

/* A small file may require too much work. */
static void jpeg_scans_are_limited(void **unused) {
    (void)unused;
    unsigned char bytes[1 << 13];
    char error[TRAIN_ERROR];
    picture p;
    if (!parse_exactly(bytes, write_scans(bytes, 256), &p, error)) fail_msg("%s", error);
    assert_int_equal(p.pixels[63], 128);
    picture_free(&p);
    assert_false(parse_exactly(bytes, write_scans(bytes, 257), &p, error));
    if (!strstr(error, "it has more than 256 scans")) fail_msg("\"%s\"", error);
}
#else
static void jpeg_is_refused(void **unused) {
    (void)unused;
    print_message("JPEG: only its refusal is tested, this build is without libjpeg-turbo\n");
    char error[TRAIN_ERROR];
    picture p;
    assert_false(picture_read(sample_path("pillow.jpg"), &p, error));
    assert_non_null(strstr(error, "it is a JPEG, which this vjp was built without (libjpeg-turbo)"));
}
#endif

/* ---- PGM, PPM, and what is neither ------------------------------------------------------------------- */

static void other_files(void **unused) {
    (void)unused;
    static const struct {
        const char *bytes;
        size_t count;
        const char *says; /* NULL: it is read */
        int height, width, channels, first;
    } rows[] = {
        {"P5 2 3 255\nabcdef", 17, NULL, 3, 2, 1, 'a'},
        {"P6\n# a comment\n1 1\n255\nxyz", 26, NULL, 1, 1, 3, 'x'},
        {"P5 1 1 15\n\x0f", 11, NULL, 1, 1, 1, 255},
        {"P5 2 3 255\nabcde", 16, "ends before its last pixel", 0, 0, 0, 0},
        {"P5 2 3 65535\nabcdefabcdef", 25, "its header", 0, 0, 0, 0},
        {"P5 0 3 255\n", 11, "it has 0 x 3 pixels", 0, 0, 0, 0},
        {"P5 99999999999999999999 3 255\n", 30, "its header", 0, 0, 0, 0},
        {"P5 65535 65535 255\nab", 21, "it has 65535 x 65535 pixels; a picture has 1 to 67108864", 0, 0, 0, 0},
        {"P5 8192 8192 255\nab", 19, "ends before its last pixel", 0, 0, 0, 0},
        {"P5", 2, "its header", 0, 0, 0, 0},
        {"P5 2 3 255", 10, "ends before its last pixel", 0, 0, 0, 0},
        {"P2 1 1 255\n7", 12, "not a JPEG, PNG, PGM or PPM", 0, 0, 0, 0},
        {"\xff\xd8\xff\xe0", 4, "it ", 0, 0, 0, 0},
        {"", 0, "not a JPEG, PNG, PGM or PPM", 0, 0, 0, 0},
        {"\x89PNG\r\n\x1a\n", 8, "it ", 0, 0, 0, 0},
        {"\x89PNG", 4, "not a JPEG, PNG, PGM or PPM", 0, 0, 0, 0},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        char error[TRAIN_ERROR] = "";
        picture p;
        write_file("one", rows[i].bytes, rows[i].count);
        bool ok = picture_read(path_of("one"), &p, error);
        if (ok != !rows[i].says || (!ok && !strstr(error, rows[i].says))) fail_msg("row %zu: \"%s\"", i, error);
        assert_true(ok || strncmp(error, path_of("one"), strlen(path_of("one"))) == 0);
        if (ok) {
            assert_int_equal(p.height, rows[i].height);
            assert_int_equal(p.width, rows[i].width);
            assert_int_equal(p.channels, rows[i].channels);
            assert_int_equal(p.pixels[0], rows[i].first);
        }
        picture_free(&p);
    }
    require_damage_refused("jpeg_pillow_grey.pgm");
    picture p;
    char error[TRAIN_ERROR];
    assert_false(picture_read(path_of("absent"), &p, error));
    assert_non_null(strstr(error, "No such file"));
    assert_false(picture_read(scratch, &p, error));
    assert_non_null(strstr(error, "it is a folder; only regular files are read"));
    assert_false(picture_read("/dev/zero", &p, error));
    assert_string_equal(error, "/dev/zero: it is a device; only regular files are read");
    assert_int_equal(mkfifo(path_of("pipe"), 0600), 0);
    assert_false(picture_read(path_of("pipe"), &p, error)); /* and does not wait for a writer */
    assert_non_null(strstr(error, "it is a pipe; only regular files are read"));
    write_file("huge", "P5", 2);
    assert_int_equal(truncate(path_of("huge"), (1 << 28) + 1), 0);
    assert_false(picture_read(path_of("huge"), &p, error));
    assert_non_null(strstr(error, "it has 268435457 bytes; at most 268435456 are read"));
    if (geteuid() != 0) {
        assert_int_equal(chmod(path_of("one"), 0), 0);
        assert_false(picture_read(path_of("one"), &p, error));
        assert_non_null(strstr(error, "Permission denied"));
    }
}

/* ---- IDX --------------------------------------------------------------------------------------------- */

enum { SIDE = 3, MAX_COUNT = 64 };

static size_t put_big(unsigned char *to, uint32_t value) {
    for (int i = 0; i < 4; i++)
        to[i] = (unsigned char)(value >> (24 - 8 * i));
    return 4;
}

/* Pictures of SIDE x SIDE, all pixels `first` + their number; labels are numbers modulo 4. */
static void write_idx(const char *pictures, const char *labels, int count, int first) {
    unsigned char bytes[16 + MAX_COUNT * SIDE * SIDE];
    put_big(bytes, 0x803);
    put_big(bytes + 4, (uint32_t)count);
    put_big(bytes + 8, SIDE);
    put_big(bytes + 12, SIDE);
    for (int i = 0; i < count; i++)
        memset(bytes + 16 + i * SIDE * SIDE, first + i, SIDE * SIDE);
    write_file(pictures, bytes, 16 + (size_t)count * SIDE * SIDE);
    put_big(bytes, 0x801);
    put_big(bytes + 4, (uint32_t)count);
    for (int i = 0; i < count; i++)
        bytes[8 + i] = (unsigned char)(i % 4);
    write_file(labels, bytes, 8 + (size_t)count);
}

static void folder(const char *name) {
    assert_int_equal(mkdir(path_of(name), 0777), 0);
}

static void idx_is_read(void **unused) {
    (void)unused;
    folder("idx");
    write_idx("idx/train-images-idx3-ubyte", "idx/train-labels-idx1-ubyte", 12, 0);
    write_idx("idx/t10k-images.idx3-ubyte", "idx/t10k-labels.idx1-ubyte", 5, 100); /* both ways of naming */
    image_data images;
    char error[TRAIN_ERROR];
    if (!images_read(path_of("idx"), &images, error)) fail_msg("%s", error);
    assert_int_equal(images.count, 17);
    assert_int_equal(images.trained, 12);
    assert_int_equal(images.classes, 4);
    assert_int_equal(images.height, SIDE);
    assert_int_equal(images.channels, 1);
    assert_string_equal(images.class_name[3], "3");
    for (int i = 0; i < 17; i++) {
        assert_int_equal(images.pixels[i * SIDE * SIDE + 4], i < 12 ? i : 100 + i - 12);
        assert_int_equal(images.label[i], (i < 12 ? i : i - 12) % 4);
    }

    /* Training sees only the first twelve, all of them, each with its own label; validation the others, in order. */
    train_source source;
    assert_true(images_source(&images, 2, 1, 9, &source, error));
    assert_int_equal(source.validation_parts, 2);
    float pictures[2 * SIDE * SIDE], again[2 * SIDE * SIDE];
    int32_t classes[2];
    bool seen[12] = {0};
    for (uint64_t part = 0; part < 200; part++) {
        source.fill(source.context, false, part, pictures, classes);
        for (int row = 0; row < 2; row++) {
            int which = (int)lround((pictures[row * SIDE * SIDE] / 2 + 0.5) * 255);
            assert_in_range(which, 0, 11);
            assert_int_equal(classes[row], which % 4);
            seen[which] = true;
        }
        source.fill(source.context, false, part, again, classes);
        assert_memory_equal(pictures, again, sizeof pictures);
    }
    for (int i = 0; i < 12; i++)
        assert_true(seen[i]);
    source.fill(source.context, true, 1, pictures, classes);
    assert_true(fabs(pictures[0] - (102.0 / 255 - 0.5) * 2) < 1e-6);
    /* The shards of a batch have its pictures, for validation, too. */
    for (uint64_t part = 0; part < 20; part++) {
        bool validation = part < 2;
        assert_true(images_source(&images, 2, 1, 9, &source, error));
        source.fill(source.context, validation, part, pictures, classes);
        assert_true(images_source(&images, 2, 2, 9, &source, error));
        assert_int_equal(source.validation_parts, 4);
        for (uint64_t shard = 0; shard < 2; shard++)
            source.fill(source.context, validation, 2 * part + shard, again + shard * SIDE * SIDE, classes);
        assert_memory_equal(pictures, again, sizeof pictures);
    }
    images_free(&images);
}

static void broken_idx_is_refused(void **unused) {
    (void)unused;
    static const struct {
        const char *file;
        long at; /* this byte becomes `value`, or the file ends here: value -1 */
        int value;
        const char *says;
    } rows[] = {
        {"train-images-idx3-ubyte", 3, 1, "not an IDX file"},
        {"train-images-idx3-ubyte", 2, 13, "not an IDX file"},
        {"train-images-idx3-ubyte", 0, 'P', "not an IDX file"},
        {"train-images-idx3-ubyte", 10, -1, "ends within its header"},
        {"train-images-idx3-ubyte", 0, -1, "ends within its header"},
        {"train-images-idx3-ubyte", 16 + 12 * SIDE * SIDE - 1, -1, "ends before the last of its 12 pictures"},
        {"train-images-idx3-ubyte", 4, 255, "labels for"},
        {"train-images-idx3-ubyte", 8, 255, "its pictures have"},
        {"train-images-idx3-ubyte", 11, 0, "its pictures have 3 x 0 pixels"},
        {"train-images-idx3-ubyte", 9, 1, "its pictures have"},
        {"train-labels-idx1-ubyte", 7, 11, "11 labels for 12 pictures"},
        {"train-labels-idx1-ubyte", 3, 3, "not an IDX file"},
        {"train-labels-idx1-ubyte", 15, -1, "ends after 7 labels"},
        {"train-labels-idx1-ubyte", 5, -1, "ends within its header"},
    };
    folder("bad");
    for (size_t i = 0; i < COUNT(rows); i++) {
        char error[TRAIN_ERROR] = "", path[300];
        image_data images;
        write_idx("bad/train-images-idx3-ubyte", "bad/train-labels-idx1-ubyte", 12, 0);
        snprintf(path, sizeof path, "%s/bad/%s", scratch, rows[i].file);
        if (rows[i].value < 0) {
            assert_int_equal(truncate(path, rows[i].at), 0);
        } else {
            FILE *file = fopen(path, "r+b");
            fseek(file, rows[i].at, SEEK_SET);
            fputc(rows[i].value, file);
            fclose(file);
        }
        assert_false(images_read(path_of("bad"), &images, error));
        if (!strstr(error, rows[i].says) || strncmp(error, path, strlen(scratch) + 4) != 0)
            fail_msg("row %zu: \"%s\"", i, error);
        assert_null(images.pixels);
    }
    /* Both files claim 2^32 - 1 pictures: no memory is allocated for pictures that are not in the file. */
    image_data images;
    char error[TRAIN_ERROR];
    unsigned char head[16];
    put_big(head, 0x803);
    put_big(head + 4, UINT32_MAX);
    put_big(head + 8, 65535);
    put_big(head + 12, 65535);
    write_file("bad/train-images-idx3-ubyte", head, 16);
    put_big(head, 0x801);
    write_file("bad/train-labels-idx1-ubyte", head, 8);
    assert_false(images_read(path_of("bad"), &images, error));
    assert_non_null(strstr(error, "ends before the last of its 4294967295 pictures"));
    assert_int_equal(truncate(path_of("bad/train-images-idx3-ubyte"), ((off_t)1 << 34) + 1), 0); /* all of it a hole */
    assert_false(images_read(path_of("bad"), &images, error));
    assert_non_null(strstr(error, "it has 17179869185 bytes; at most 17179869184 are read"));
    write_idx("bad/train-images-idx3-ubyte", "bad/train-labels-idx1-ubyte", 12, 0);
    assert_int_equal(unlink(path_of("bad/train-labels-idx1-ubyte")), 0);
    assert_false(images_read(path_of("bad"), &images, error));
    assert_non_null(strstr(error, "with the labels of the pictures beside it, is missing"));
}

/* ---- Folders of classes ------------------------------------------------------------------------------ */

static void folders_are_classes(void **unused) {
    (void)unused;
    image_data images;
    char error[TRAIN_ERROR], name[64];
    folder("classes");
    folder("classes/cat");
    folder("classes/dog");
    for (int i = 0; i < 20; i++) {
        snprintf(name, sizeof name, "classes/%s/%02d.pgm", i % 2 ? "dog" : "cat", i / 2);
        char bytes[] = "P5 2 1 255\n..";
        bytes[11] = bytes[12] = (char)(i % 2 ? 10 + i / 2 : i / 2);
        write_file(name, bytes, 13);
    }
    write_file("classes/README", "not a class", 11);
    write_file("classes/cat/.hidden", "not a picture", 13);
    if (!images_read(path_of("classes"), &images, error)) fail_msg("%s", error);
    assert_int_equal(images.count, 20);
    assert_int_equal(images.trained, 18);
    assert_int_equal(images.classes, 2);
    assert_string_equal(images.class_name[0], "cat");
    assert_string_equal(images.class_name[1], "dog");
    bool seen[20] = {0};
    for (int i = 0; i < 20; i++) {
        int value = images.pixels[2 * i];
        assert_int_equal(images.label[i], value / 10);
        assert_false(seen[value]);
        seen[value] = true;
    }
    images_free(&images);

    write_file("classes/dog/wide.ppm", "P6 1 1 255\nabc", 14);
    assert_false(images_read(path_of("classes"), &images, error));
    assert_non_null(strstr(error, "wide.ppm: it has 1 x 1 pixels and 3 channels; the first picture has 2 x 1 and 1"));
    write_file("classes/dog/wide.ppm", "P6 1", 4);
    assert_false(images_read(path_of("classes"), &images, error));
    assert_non_null(strstr(error, "wide.ppm: its header"));
    assert_int_equal(unlink(path_of("classes/dog/wide.ppm")), 0);
    assert_int_equal(mkfifo(path_of("classes/dog/pipe"), 0600), 0);
    assert_false(images_read(path_of("classes"), &images, error));
    assert_non_null(strstr(error, "classes/dog/pipe: it is a pipe; only regular files are read"));
    folder("empty");
    assert_false(images_read(path_of("empty"), &images, error));
    assert_non_null(strstr(error, "neither IDX files"));
    assert_false(images_read(path_of("absent"), &images, error));
    assert_non_null(strstr(error, "No such file"));
    assert_false(images_read(path_of("classes/README"), &images, error));
    assert_non_null(strstr(error, "from a folder"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
#ifdef VJP_HAVE_PNG
        cmocka_unit_test(pngs_are_read),
        cmocka_unit_test(png_sizes_are_limited),
#else
        cmocka_unit_test(png_is_refused),
#endif
#ifdef VJP_HAVE_JPEG
        cmocka_unit_test(jpegs_are_read),
        cmocka_unit_test(jpegs_are_refused),
        cmocka_unit_test(jpeg_scans_are_limited),
#else
        cmocka_unit_test(jpeg_is_refused),
#endif
        cmocka_unit_test(other_files),
        cmocka_unit_test(idx_is_read),
        cmocka_unit_test(broken_idx_is_refused),
        cmocka_unit_test(folders_are_classes),
    };
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}

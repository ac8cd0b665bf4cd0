/*
 * Pictures: PNG of every colour, filter and compression (tests/pictures, from make.py), PGM and PPM; files that are cut
 * off or damaged at any byte; IDX sets and folders of classes, whole and broken; and the batches made of them.
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
#include "train/data/picture_png.h"

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

static unsigned char *read_file(const char *path, size_t *count) {
    unsigned char *bytes = malloc(1 << 16);
    FILE *file = fopen(path, "rb");
    if (!file) fail_msg("%s is missing", path);
    *count = fread(bytes, 1, 1 << 16, file);
    fclose(file);
    return bytes;
}

/* ---- PNG --------------------------------------------------------------------------------------------- */

typedef struct sample {
    const char *name;
    int height, width, channels;
} sample;

static const sample samples[] = {
    {"grey", 10, 7, 1},     {"grey_alpha", 10, 7, 1}, {"colours", 10, 7, 3}, {"colours_alpha", 10, 7, 3},
    {"palette", 10, 7, 3},  {"stored", 10, 7, 3},     {"fixed", 10, 7, 3},   {"own_code", 60, 50, 1},
    {"repeats", 60, 50, 1}, {"parts", 10, 7, 3},
};

static const char *sample_path(const sample *s) {
    static char path[512];
    snprintf(path, sizeof path, "%s/tests/pictures/%s.png", VJP_SOURCE_DIR, s->name);
    return path;
}

/* What make.py wrote. */
static int wanted(const sample *s, int y, int x, int c) {
    int value = (37 * y + 11 * x) % 251;
    if (strcmp(s->name, "palette") == 0) return c == 0 ? value : c == 1 ? 255 - value : 7 * value % 256;
    return (37 * y + 11 * x + 71 * c) % 251;
}

static void every_kind_is_read(void **unused) {
    (void)unused;
    for (size_t i = 0; i < COUNT(samples); i++) {
        const sample *s = &samples[i];
        char error[TRAIN_ERROR];
        picture p;
        if (!picture_read(sample_path(s), &p, error)) fail_msg("%s", error);
        assert_int_equal(p.height, s->height);
        assert_int_equal(p.width, s->width);
        assert_int_equal(p.channels, s->channels);
        for (int y = 0; y < s->height; y++)
            for (int x = 0; x < s->width; x++)
                for (int c = 0; c < s->channels; c++)
                    if (p.pixels[(y * s->width + x) * s->channels + c] != wanted(s, y, x, c))
                        fail_msg("%s: row %d, column %d, channel %d is %d", s->name, y, x, c,
                                 p.pixels[(y * s->width + x) * s->channels + c]);
        picture_free(&p);
    }
}

/* Reads bytes from memory of exactly their size, so that a sanitizer sees the first byte past it. */
static bool read_exactly(const unsigned char *bytes, size_t count, picture *p, char error[TRAIN_ERROR]) {
    unsigned char *exact = malloc(count ? count : 1);
    memcpy(exact, bytes, count);
    *p = (picture){0};
    error[0] = 0;
    bool ok = picture_read_png("file", exact, count, p, error);
    free(exact);
    return ok;
}

static void damaged_files_are_refused(void **unused) {
    (void)unused;
    for (size_t i = 0; i < COUNT(samples); i++) {
        char error[TRAIN_ERROR];
        picture p;
        size_t count;
        unsigned char *bytes = read_file(sample_path(&samples[i]), &count);
        for (size_t cut = 8; cut < count; cut++) {
            if (read_exactly(bytes, cut, &p, error)) fail_msg("%s: read though %zu bytes long", samples[i].name, cut);
            assert_true(strncmp(error, "file: ", 6) == 0);
            picture_free(&p);
        }
        for (size_t at = 8; at < count; at++)
            for (int bit = 0; bit < 8; bit++) {
                bytes[at] ^= (unsigned char)(1 << bit);
                if (!read_exactly(bytes, count, &p, error)) assert_true(strncmp(error, "file: ", 6) == 0);
                picture_free(&p);
                bytes[at] ^= (unsigned char)(1 << bit);
            }
        free(bytes);
    }
}

/* A header that tells of a row more or fewer than there are. */
static void rows_are_counted(void **unused) {
    (void)unused;
    for (size_t i = 0; i < COUNT(samples); i++)
        for (int change = -1; change <= 1; change += 2) {
            char error[TRAIN_ERROR];
            picture p;
            size_t count;
            unsigned char *bytes = read_file(sample_path(&samples[i]), &count);
            bytes[23] = (unsigned char)(bytes[23] + change);
            assert_false(read_exactly(bytes, count, &p, error));
            assert_string_equal(error, "file: its pixels are damaged");
            free(bytes);
        }
}

/* A few bytes that claim to be 65535 x 65535 colours are no reason to ask for 13 GB. */
static void sizes_are_not_believed(void **unused) {
    (void)unused;
    char error[TRAIN_ERROR];
    picture p;
    size_t count;
    unsigned char *bytes = read_file(sample_path(&samples[2]), &count);
    static const unsigned char huge[8] = {0, 0, 255, 255, 0, 0, 255, 255};
    memcpy(bytes + 16, huge, sizeof huge);
    assert_false(read_exactly(bytes, count, &p, error));
    if (!strstr(error, "too short for its 65535 x 65535 pixels")) fail_msg("\"%s\"", error);
    bytes[16] = 1; /* past what is taken at all */
    assert_false(read_exactly(bytes, count, &p, error));
    free(bytes);
}

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
        {"P5 2 3 255\nabcde", 16, "ends before its pixels", 0, 0, 0, 0},
        {"P5 2 3 65535\nabcdefabcdef", 25, "its header", 0, 0, 0, 0},
        {"P5 0 3 255\n", 11, "its header", 0, 0, 0, 0},
        {"P5 99999999999999999999 3 255\n", 30, "its header", 0, 0, 0, 0},
        {"P5 65535 65535 255\nab", 21, "ends before its pixels", 0, 0, 0, 0},
        {"P5", 2, "its header", 0, 0, 0, 0},
        {"P5 2 3 255", 10, "ends before its pixels", 0, 0, 0, 0},
        {"P2 1 1 255\n7", 12, "no JPEG, PNG, PGM or PPM", 0, 0, 0, 0},
        {"\xff\xd8\xff\xe0", 4, "ends too early", 0, 0, 0, 0},
        {"", 0, "no JPEG, PNG, PGM or PPM", 0, 0, 0, 0},
        {"\x89PNG\r\n\x1a\n", 8, "ends too early", 0, 0, 0, 0},
        {"\x89PNG", 4, "no JPEG, PNG, PGM or PPM", 0, 0, 0, 0},
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
    picture p;
    char error[TRAIN_ERROR];
    assert_false(picture_read(path_of("absent"), &p, error));
    assert_non_null(strstr(error, "No such file"));
    assert_false(picture_read(scratch, &p, error));
    assert_non_null(strstr(error, "Is a directory"));
}

/* ---- IDX --------------------------------------------------------------------------------------------- */

enum { SIDE = 3, MOST = 64 };

static size_t put_big(unsigned char *to, uint32_t value) {
    for (int i = 0; i < 4; i++)
        to[i] = (unsigned char)(value >> (24 - 8 * i));
    return 4;
}

/* Pictures of SIDE x SIDE, all pixels `first` + their number; labels are numbers modulo 4. */
static void write_idx(const char *pictures, const char *labels, int count, int first) {
    unsigned char bytes[16 + MOST * SIDE * SIDE];
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
    assert_true(images_source(&images, 2, 9, &source, error));
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
        {"train-images-idx3-ubyte", 3, 1, "no IDX file"},
        {"train-images-idx3-ubyte", 2, 13, "no IDX file"},
        {"train-images-idx3-ubyte", 0, 'P', "no IDX file"},
        {"train-images-idx3-ubyte", 10, -1, "ends inside its header"},
        {"train-images-idx3-ubyte", 0, -1, "ends inside its header"},
        {"train-images-idx3-ubyte", 16 + 12 * SIDE * SIDE - 1, -1, "ends before its 12 pictures do"},
        {"train-images-idx3-ubyte", 4, 255, "labels for"},
        {"train-images-idx3-ubyte", 8, 255, "its pictures are"},
        {"train-images-idx3-ubyte", 11, 0, "its pictures are 0 x 3"},
        {"train-images-idx3-ubyte", 9, 1, "its pictures are"},
        {"train-labels-idx1-ubyte", 7, 11, "11 labels for 12 pictures"},
        {"train-labels-idx1-ubyte", 3, 3, "no IDX file"},
        {"train-labels-idx1-ubyte", 15, -1, "ends after 7 labels"},
        {"train-labels-idx1-ubyte", 5, -1, "ends inside its header"},
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
    /* Both files claim 2^32 - 1 pictures: no memory is asked for before they are there. */
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
    assert_non_null(strstr(error, "ends before its 4294967295 pictures do"));
    assert_int_equal(unlink(path_of("bad/train-labels-idx1-ubyte")), 0);
    assert_false(images_read(path_of("bad"), &images, error));
    assert_non_null(strstr(error, "labels of the pictures beside it are missing"));
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
    assert_non_null(strstr(error, "wide.ppm: it is 1 x 1 with 3 channels; the first was 1 x 2 with 1"));
    write_file("classes/dog/wide.ppm", "P6 1", 4);
    assert_false(images_read(path_of("classes"), &images, error));
    assert_non_null(strstr(error, "wide.ppm: its header"));
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
        cmocka_unit_test(every_kind_is_read),    cmocka_unit_test(damaged_files_are_refused),
        cmocka_unit_test(rows_are_counted),      cmocka_unit_test(sizes_are_not_believed),
        cmocka_unit_test(other_files),           cmocka_unit_test(idx_is_read),
        cmocka_unit_test(broken_idx_is_refused), cmocka_unit_test(folders_are_classes),
    };
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}

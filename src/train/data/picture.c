/* SPDX-License-Identifier: MIT */
/* Pictures from files. PGM and PPM are decoded here, JPEG in picture_jpeg.c, PNG in picture_png.c. */
#include "train/data/picture.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "train/files/input.h"

enum { MAX_FILE_BYTES = 1 << 28 };

void picture_free(picture *p) {
    free(p->pixels);
    *p = (picture){0};
}

bool picture_allocate(const char *path, int64_t height, int64_t width, int64_t channels, picture *p,
                      char error[TRAIN_ERROR]) {
    if (height < 1 || width < 1 || width > PICTURE_MAX_PIXELS / height)
        return train_fail(error, "%.300s: it has %lld x %lld pixels; a picture has 1 to %d", path, (long long)width,
                          (long long)height, PICTURE_MAX_PIXELS);
    size_t bytes = (size_t)(height * width * channels);
    *p = (picture){.height = height, .width = width, .channels = channels, .pixels = malloc(bytes)};
    return p->pixels || train_fail(error, "%.300s: there is no memory for its %zu bytes of pixels", path, bytes);
}

/* ---- PGM and PPM ------------------------------------------------------------------------------------- */

/* The next number of the header, after spaces and comments; -1: there is none. */
static int64_t next_number(const unsigned char *bytes, size_t count, size_t *at) {
    while (*at < count && (isspace(bytes[*at]) || bytes[*at] == '#'))
        if (bytes[(*at)++] == '#')
            while (*at < count && bytes[*at] != '\n')
                ++*at;
    int64_t number = -1;
    for (; *at < count && isdigit(bytes[*at]) && number <= PICTURE_MAX_PIXELS; ++*at)
        number = (number < 0 ? 0 : number) * 10 + (bytes[*at] - '0');
    return number;
}

static bool parse_pnm(const char *path, const unsigned char *bytes, size_t count, picture *p, char error[TRAIN_ERROR]) {
    size_t at = 2;
    int64_t width = next_number(bytes, count, &at), height = next_number(bytes, count, &at);
    int64_t white = next_number(bytes, count, &at), channels = bytes[1] == '5' ? 1 : 3;
    if (width < 0 || height < 0 || white < 1 || white > 255)
        return train_fail(error, "%.300s: its header is not that of a PGM or PPM with 8 bits per channel", path);
    if (!picture_allocate(path, height, width, channels, p, error)) return false;
    size_t size = (size_t)(width * height * channels);
    at++; /* one space ends the header */
    if (at > count || count - at < size) return train_fail(error, "%.300s: it ends before its last pixel", path);
    for (size_t i = 0; i < size; i++)
        p->pixels[i] = (unsigned char)(bytes[at + i] * 255 / white);
    return true;
}

/* ---- Any format -------------------------------------------------------------------------------------- */

bool picture_parse(const char *path, const unsigned char *bytes, size_t count, picture *p, char error[TRAIN_ERROR]) {
    *p = (picture){0};
    bool ok;
    if (count >= 2 && bytes[0] == 'P' && (bytes[1] == '5' || bytes[1] == '6'))
        ok = parse_pnm(path, bytes, count, p, error);
    else if (count >= 8 && memcmp(bytes, "\x89PNG\r\n\x1a\n", 8) == 0)
        ok = picture_parse_png(path, bytes, count, p, error);
    else if (count >= 2 && bytes[0] == 0xff && bytes[1] == 0xd8)
        ok = picture_parse_jpeg(path, bytes, count, p, error);
    else
        ok = train_fail(error, "%.300s: it is not a JPEG, PNG, PGM or PPM file", path);
    if (!ok) picture_free(p);
    return ok;
}

bool picture_read(const char *path, picture *p, char error[TRAIN_ERROR]) {
    *p = (picture){0};
    int64_t bytes;
    FILE *file = input_stream(path, MAX_FILE_BYTES, &bytes, error);
    if (!file) return false;
    unsigned char *content = malloc((size_t)bytes + 1);
    bool ok = content || train_fail(error, "%.300s: there is no memory for its %lld bytes", path, (long long)bytes);
    ok = ok && (fread(content, 1, (size_t)bytes, file) == (size_t)bytes ||
                train_fail(error, "%.300s: it cannot be read to its end", path));
    ok = ok && picture_parse(path, content, (size_t)bytes, p, error);
    free(content);
    fclose(file);
    return ok;
}

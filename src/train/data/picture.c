/* Pictures from files. PGM and PPM are read here; PNG in picture_png.c, JPEG in picture_jpeg.c. */
#include "train/data/picture.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/data/picture_jpeg.h"
#include "train/data/picture_png.h"

enum { LARGEST = 1 << 28, LONGEST = 65535 };

void picture_free(picture *p) {
    free(p->pixels);
    *p = (picture){0};
}

static bool read_all(const char *path, unsigned char **bytes, size_t *count, char error[TRAIN_ERROR]) {
    FILE *file = fopen(path, "rb");
    if (!file) return train_fail(error, "%s: %s", path, strerror(errno));
    size_t room = 1 << 16;
    bool ok = (*bytes = malloc(room)) != NULL;
    *count = 0;
    for (size_t got = 1; ok && got > 0;) {
        if (*count == room) {
            unsigned char *more = room < LARGEST ? realloc(*bytes, room *= 2) : NULL;
            ok = more != NULL;
            if (more) *bytes = more;
        }
        got = ok ? fread(*bytes + *count, 1, room - *count, file) : 0;
        *count += got;
    }
    if (!ok)
        train_fail(error, "%s: it is larger than a picture may be, or memory ran out", path);
    else if (ferror(file))
        ok = train_fail(error, "%s: %s", path, strerror(errno));
    fclose(file);
    return ok;
}

/* The next number of a PGM's header, past spaces and comments; -1: none. */
static int64_t next_number(const unsigned char *bytes, size_t count, size_t *at) {
    while (*at < count && (isspace(bytes[*at]) || bytes[*at] == '#'))
        if (bytes[(*at)++] == '#')
            while (*at < count && bytes[*at] != '\n')
                ++*at;
    int64_t number = -1;
    for (; *at < count && isdigit(bytes[*at]) && number <= LARGEST; ++*at)
        number = (number < 0 ? 0 : number) * 10 + (bytes[*at] - '0');
    return number;
}

static bool read_pnm(const char *path, const unsigned char *bytes, size_t count, picture *p, char error[TRAIN_ERROR]) {
    size_t at = 2;
    int64_t width = next_number(bytes, count, &at), height = next_number(bytes, count, &at);
    int64_t most = next_number(bytes, count, &at), channels = bytes[1] == '5' ? 1 : 3;
    if (width < 1 || height < 1 || width > LONGEST || height > LONGEST || most < 1 || most > 255)
        return train_fail(error, "%s: its header is no PGM's or PPM's of bytes", path);
    size_t size = (size_t)(width * height * channels);
    at++; /* one space ends the header */
    if (at > count || count - at < size) return train_fail(error, "%s: it ends before its pixels do", path);
    p->pixels = malloc(size);
    if (!p->pixels) return train_fail(error, "%s: no memory for %zu bytes", path, size);
    for (size_t i = 0; i < size; i++)
        p->pixels[i] = (unsigned char)(bytes[at + i] * 255 / most);
    p->height = height;
    p->width = width;
    p->channels = channels;
    return true;
}

bool picture_parse(const char *path, const unsigned char *bytes, size_t count, picture *p, char error[TRAIN_ERROR]) {
    *p = (picture){0};
    bool ok;
    if (count >= 2 && bytes[0] == 'P' && (bytes[1] == '5' || bytes[1] == '6'))
        ok = read_pnm(path, bytes, count, p, error);
    else if (count >= 8 && memcmp(bytes, "\x89PNG\r\n\x1a\n", 8) == 0)
        ok = picture_read_png(path, bytes, count, p, error);
    else if (count >= 2 && bytes[0] == 0xff && bytes[1] == 0xd8)
        ok = picture_read_jpeg(path, bytes, count, p, error);
    else
        ok = train_fail(error, "%s: it is no JPEG, PNG, PGM or PPM file", path);
    if (!ok) picture_free(p);
    return ok;
}

bool picture_read(const char *path, picture *p, char error[TRAIN_ERROR]) {
    *p = (picture){0};
    unsigned char *bytes = NULL;
    size_t count = 0;
    bool ok = read_all(path, &bytes, &count, error) && picture_parse(path, bytes, count, p, error);
    free(bytes);
    return ok;
}

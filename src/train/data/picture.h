/* SPDX-License-Identifier: MIT */
/*
 * One picture from a file: JPEG (by libjpeg-turbo), PNG (by libpng), PGM or PPM (binary, up to 255). A build without
 * one of the libraries refuses its format and says so.
 */
#ifndef VJP_TRAIN_PICTURE_H
#define VJP_TRAIN_PICTURE_H

#include <stddef.h>
#include <stdint.h>

#include "train/fail.h"

/* A larger picture is refused before its pixels are allocated: a PNG of 1.5 MB can hold 40000 x 40000 of them. */
enum { PICTURE_MAX_PIXELS = 1 << 26 };

/* All zero is empty, safe to free. */
typedef struct picture {
    int64_t height, width, channels; /* channels: 1 is grey, 3 is RGB; alpha is dropped */
    unsigned char *pixels;           /* [height, width, channels] */
} picture;

/* False: `error` has a sentence that begins with the path. */
bool picture_read(const char *path, picture *p, char error[TRAIN_ERROR]);

/* The same from bytes in memory; `path` is for the sentence. */
bool picture_parse(const char *path, const unsigned char *bytes, size_t count, picture *p, char error[TRAIN_ERROR]);

void picture_free(picture *p);

/* ---- For the decoders: picture_jpeg.c and picture_png.c ----------------------------------------------- */

/* On failure p may hold memory, which the caller frees. */
bool picture_parse_jpeg(const char *path, const unsigned char *bytes, size_t count, picture *p,
                        char error[TRAIN_ERROR]);
bool picture_parse_png(const char *path, const unsigned char *bytes, size_t count, picture *p, char error[TRAIN_ERROR]);

/* Checks the size and allocates the pixels. */
bool picture_allocate(const char *path, int64_t height, int64_t width, int64_t channels, picture *p,
                      char error[TRAIN_ERROR]);

#endif

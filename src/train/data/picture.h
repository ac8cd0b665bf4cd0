/*
 * One picture from a file: JPEG (8 bits, grey or colours, baseline or progressive), PNG (8 bits a channel, not
 * interlaced), PGM or PPM (binary, up to 255).
 */
#ifndef VJP_TRAIN_PICTURE_H
#define VJP_TRAIN_PICTURE_H

#include <stddef.h>
#include <stdint.h>

#include "train/fail.h"

/* All zero is empty, safe to free. */
typedef struct picture {
    int64_t height, width, channels; /* grey 1, colours 3; a transparent channel is left out */
    unsigned char *pixels;           /* [height, width, channels] */
} picture;

/* False: `error` has a sentence that begins with the path. */
bool picture_read(const char *path, picture *p, char error[TRAIN_ERROR]);

/* The same of bytes that are there already; `path` is for the sentence. */
bool picture_parse(const char *path, const unsigned char *bytes, size_t count, picture *p, char error[TRAIN_ERROR]);

void picture_free(picture *p);

#endif

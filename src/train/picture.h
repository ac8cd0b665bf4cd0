/* One picture from a file: PNG (8 bits a channel, not interlaced), PGM or PPM (binary, up to 255). */
#ifndef VJP_TRAIN_PICTURE_H
#define VJP_TRAIN_PICTURE_H

#include <stdint.h>

#include "train/fail.h"

/* All zero is empty, safe to free. */
typedef struct picture {
    int64_t height, width, channels; /* grey 1, colours 3; a transparent channel is left out */
    unsigned char *pixels;           /* [height, width, channels] */
} picture;

/* False: `error` has a sentence that begins with the path. A JPEG is refused with the way to convert it. */
bool picture_read(const char *path, picture *p, char error[TRAIN_ERROR]);
void picture_free(picture *p);

#endif

/* PNG: see picture.h. */
#ifndef VJP_TRAIN_PICTURE_PNG_H
#define VJP_TRAIN_PICTURE_PNG_H

#include <stddef.h>

#include "train/data/picture.h"

/* `bytes` begins with PNG's eight. On failure p may hold memory, which the caller frees. */
bool picture_read_png(const char *path, const unsigned char *bytes, size_t count, picture *p, char error[TRAIN_ERROR]);

#endif

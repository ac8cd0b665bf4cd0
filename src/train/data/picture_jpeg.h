/* JPEG: see picture.h. */
#ifndef VJP_TRAIN_PICTURE_JPEG_H
#define VJP_TRAIN_PICTURE_JPEG_H

#include <stddef.h>

#include "train/data/picture.h"

/* `bytes` begins with JPEG's two. On failure p may hold memory, which the caller frees. */
bool picture_read_jpeg(const char *path, const unsigned char *bytes, size_t count, picture *p, char error[TRAIN_ERROR]);

#endif

/* SPDX-License-Identifier: MIT */
/*
 * Opening files and folders that a user names. Only regular files are read: a pipe or a device such as /dev/zero may
 * never end, and opening a pipe could wait for ever.
 */
#ifndef VJP_TRAIN_INPUT_H
#define VJP_TRAIN_INPUT_H

#include <stdint.h>
#include <stdio.h>

#include "train/fail.h"

/*
 * Opens a regular file of at most `max_bytes`; *bytes is its size. -1: `error` has a sentence that begins with the path
 * and gives the system's reason, which is in errno, too (EINVAL: it is not a regular file, or too large).
 */
int input_open(const char *path, int64_t max_bytes, int64_t *bytes, char error[TRAIN_ERROR]);

/* The same as a stream, for reading. NULL: see above. */
FILE *input_stream(const char *path, int64_t max_bytes, int64_t *bytes, char error[TRAIN_ERROR]);

/* The names in a folder that do not begin with a dot, in order. NULL: see `error`. Each is freed, and the list. */
char **input_names(const char *path, size_t *count, char error[TRAIN_ERROR]);

#endif
